"""The supervisor with real processes; the services are one-line scripts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from stretto import endpoints, process, recipe, runs
from stretto.errors import RecipeError, RefusedError
from stretto.supervisor import Notice, Outcome, Plan, Progress, Service, Supervisor, plan
from tests.waits import until

SLEEPER = """
import signal, time
def end(*_):
    print('{name}', file=open('{order}', 'a'))
    exit(0)
signal.signal(signal.SIGTERM, end)
print('ready', flush=True)
time.sleep(60)
"""
WITH_GRANDCHILD = """
import os, subprocess, time
child = subprocess.Popen(['sleep', '60'])
with open('{pids}.new', 'w') as f:
    f.write(str(child.pid))
os.rename('{pids}.new', '{pids}')
time.sleep(60)
"""
PARENT = """
import os, sys, time
from pathlib import Path
from stretto import runs
from stretto.supervisor import Plan, Progress, Service, Supervisor
folder = Path(sys.argv[1])
service = Service("rollout-0", "rollout", (sys.executable, "-c", sys.argv[2]), {}, folder / "log")
s = Supervisor(folder, Plan((service,), {}, int(sys.argv[3])), runs.Lock(folder), environ=os.environ, probe=Progress)
s.start()
while not (folder / "pids").exists():
    time.sleep(0.01)
print(s.redis_pid, s.rows()[1].pid, flush=True)
time.sleep(60)
"""


class Run:
    """A supervisor over scripts, with a probe the test sets."""

    def __init__(self, folder: Path, scripts: dict[str, str], redis_port: int | None = None) -> None:
        self.folder, self.progress, self.notices = folder, Progress(), list[Notice]()
        services = [
            Service(name, name.partition("-")[0], (sys.executable, "-c", script), {"TEST": name}, folder / "logs" / f"{name}.log")
            for name, script in scripts.items()
        ]
        self.lock = runs.Lock(folder)
        self.supervisor = Supervisor(
            folder,
            Plan(tuple(services), {}, redis_port),
            self.lock,
            environ=os.environ,
            probe=lambda: self.progress,
            notify=self.notices.append,
        )

    def until_outcome(self, deadline_s: float = 10.0) -> Outcome:
        found: list[Outcome] = []
        until(lambda: bool(found.extend([o] if (o := self.supervisor.poll()) else []) or found), deadline_s=deadline_s)
        return found[0]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def one(scripts: dict[str, str], redis_port: int | None = None) -> Run:
        made.append(Run(tmp_path, scripts, redis_port))
        return made[-1]

    yield one
    for run in made:
        run.supervisor.stop(lambda: True)
        run.lock.release()


def test_a_killed_supervisor_leaves_neither_child_nor_grandchild(tmp_path: Path) -> None:
    script = WITH_GRANDCHILD.format(pids=tmp_path / "pids")
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), script, str(endpoints.free_port())], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    pids.append(int((tmp_path / "pids").read_text()))
    assert len(pids) == 3
    assert all(map(process.is_alive, pids))
    parent.kill()
    parent.wait()
    until(lambda: not any(map(process.is_alive, pids)), deadline_s=2.0)
    runs.Lock(tmp_path).release()  # the folder is free again


def test_a_second_run_in_a_folder_is_refused_by_the_pid_of_the_first(make: Callable[..., Run], tmp_path: Path) -> None:
    make({})
    with pytest.raises(RefusedError, match=rf"process {os.getpid()} runs in it"):
        runs.Lock(tmp_path)


def test_processes_stop_in_order_and_each_by_its_own_will(make: Callable[..., Run], tmp_path: Path) -> None:
    names = ["scheduler", "weightsync", "trainer", "rollout-0"]
    run = make({n: SLEEPER.format(name=n, order=tmp_path / "order") for n in names})
    run.supervisor.start()
    until(lambda: all("ready" in (tmp_path / "logs" / f"{n}.log").read_text() for n in names))
    run.supervisor.stop()
    assert (tmp_path / "order").read_text().split() == ["trainer", "rollout-0", "scheduler", "weightsync"]


def test_a_process_that_ignores_sigterm_is_killed_at_once_when_asked_twice(make: Callable[..., Run], tmp_path: Path) -> None:
    run = make({"trainer": "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"})
    run.supervisor.start()
    until(lambda: "ready" in (tmp_path / "logs" / "trainer.log").read_text())
    start_s = time.monotonic()
    run.supervisor.stop(lambda: time.monotonic() - start_s > 0.2)
    assert time.monotonic() - start_s < 3


def test_a_killed_service_is_started_again_and_said_so(make: Callable[..., Run]) -> None:
    run = make({"trainer": "import time; time.sleep(60)"})
    run.supervisor.start()
    pid = run.supervisor.rows()[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: run.supervisor.poll() is None and run.supervisor.rows()[0].pid not in (pid, None))
    assert [n.text for n in run.notices] == ["trainer ended by signal 9; starting it again in 0.5 s"]
    assert run.supervisor.num_restarts == 1


def test_a_bad_recipe_ends_the_run_with_the_log_of_the_process_at_fault(make: Callable[..., Run]) -> None:
    line = json.dumps({"ts": "2026-01-01T00:00:00Z", "level": "ERROR", "event": "recipe_not_valid", "key": "x.y"})
    run = make({"trainer": f"print({line!r}); exit(2)"})
    run.supervisor.start()
    outcome = run.until_outcome()
    assert (outcome.exit_code, outcome.tail) == (2, ("00:00:00 ERROR recipe_not_valid key=x.y",))


def test_the_run_is_done_when_the_trainer_ended_and_the_scheduler_says_so(make: Callable[..., Run]) -> None:
    run = make({"trainer": "", "rollout-0": "import time; time.sleep(60)"})
    run.supervisor.start()
    until(lambda: run.supervisor.poll() is None and run.supervisor.rows()[0].pid is None)
    run.progress = Progress(9, True)
    assert run.until_outcome() == Outcome(0, "done")
    assert run.supervisor.num_restarts == 0


def test_a_killed_redis_comes_back_on_its_port_with_its_data(make: Callable[..., Run]) -> None:
    script = "import os,time; print(os.environ['STRETTO_REDIS__URL'], flush=True); time.sleep(60)"
    run = make({"scheduler": script}, endpoints.free_port())
    run.supervisor.start()
    log = run.folder / "logs" / "scheduler.log"
    until(lambda: log.read_text().endswith("/0\n"))
    url = log.read_text().strip()
    with redis.Redis.from_url(url) as client:
        client.set("k", "v")
    pid = run.supervisor.redis_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: run.supervisor.poll() is None and run.supervisor.redis_pid not in (None, pid))
    with redis.Redis.from_url(url) as client:
        assert client.get("k") == b"v"


@pytest.fixture
def claims() -> Iterator[endpoints.Claims]:
    taken = endpoints.Claims()
    yield taken
    taken.close()


def test_the_plan_gives_every_process_its_own_free_port_and_all_the_same_peers(claims: endpoints.Claims) -> None:
    parsed = recipe.load("recipes/word-problems.toml", ["rollout.replicas=2"])
    made = plan(parsed, Path("recipes/word-problems.toml"), ["rollout.replicas=2"], claims)
    assert [s.name for s in made.services] == ["scheduler", "weightsync", "trainer", "rollout-0", "rollout-1"]
    assert len(set(made.addresses.values())) == len(made.addresses) == 11
    for service in made.services:
        assert f"peers.scheduler={made.addresses['scheduler']}" in service.command
        assert service.env["OMP_NUM_THREADS"] == "1"


def test_a_port_that_a_recipe_names_is_kept(claims: endpoints.Claims) -> None:
    port = endpoints.free_port()
    parsed = recipe.load("recipes/word-problems.toml", [f"scheduler.listen=127.0.0.1:{port}"])
    assert plan(parsed, None, [], claims).addresses["scheduler"] == f"127.0.0.1:{port}"
    with pytest.raises(RecipeError, match=f"scheduler.listen = '127.0.0.1:{port}': port {port} belongs to another run"):
        plan(parsed, None, [], endpoints.Claims())


def test_two_runs_that_start_at_once_share_no_port(claims: endpoints.Claims) -> None:
    """Neither has a process that listens yet."""
    others = endpoints.Claims()
    parsed = recipe.load("recipes/word-problems.toml")
    here, there = plan(parsed, None, [], claims), plan(parsed, None, [], others)
    others.close()
    assert not {*here.addresses.values()} & {*there.addresses.values()}
    assert claims.take(int(there.addresses["scheduler"].rpartition(":")[2])), "free again once its run has ended"
