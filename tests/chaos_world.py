"""A small real run whose parts can be killed, stopped, doubled and moved one by one.

    scheduler, weightsync, trainer, replicas, valkey      processes of their own; whatever ends is started again
    trainer, replicas --Proxy--> scheduler, weightsync    so that single messages can be disturbed

Engines: "torch" is the product as it is, on the word-problems model; "known" puts tests.chaos_rollout and tests.chaos_trainer in the
place of torch and model, and everything else stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import redis

from stretto import embedded, endpoints, process
from stretto.restarts import FENCED_CODE, RECIPE_CODE
from stretto.v1 import scheduler_pb2, weightsync_pb2
from tests.chaos_plan import ROLLOUT, Fault
from tests.chaos_proxy import Proxy
from tests.procs import children_of

Engine = Literal["torch", "known"]
LEASE_S = 3.0
REPLICAS = 2
STOP_S = 30.0
"""From SIGTERM to the end, on a machine that is busy with others."""
JUDGE_EVERY = 40
"""Steps between two validations, with the engine "known"."""
ZOMBIE_S = 60.0
"""From the SIGCONT of a zombie to its end."""
STEPS = 1_000_000
"""Of a run that goes on until it is told how many there are."""
MODULES = {
    "torch": {"trainer": "services.trainer", "rollout": "services.rollout"},
    "known": {"trainer": "tests.chaos_trainer", "rollout": "tests.chaos_rollout"},
}
RECIPE = """
[run]
name = "chaos"
folder = "{folder}"
[scheduler]
batch_groups = 4
max_lag = 2
lease_s = {lease_s}
heartbeat_s = 0.5
attempts_max = 1000       # how often an answer is interrupted is our doing: none may give up because of it
group_deadline_s = 60
[rollout]
slots = 48
prefetch_groups = 2
[trainer]
checkpoint_every_steps = 5
sample_deadline_s = 300
[weightsync]
lease_s = 3
phase_deadline_s = 20
bucket_mb = 1
[redis]
timeout_s = 2
"""
KNOWN = """
[model]
path = "{folder}/model"
[data]
train = "{folder}/train.jsonl"
validation = "{folder}/train.jsonl"
[sampling]
group_size = 4
max_new_tokens = 64
[validation]
every_steps = {judge_every}
max_prompts = 10
deadline_s = 60
[reward]
function = "tests.chaos_known:known_reward"
"""
TORCH = """
[model]
make = "word-problems"
[data]
make = "word-problems"
[sampling]
group_size = 4
max_new_tokens = 18
[reward]
function = "stretto.rewards:gsm8k"
[validation]
every_steps = 0
at_start = false
at_end = false
"""


@dataclass(slots=True)
class Incarnation:
    """One process."""

    child: subprocess.Popen[bytes]
    log: Path
    started_s: float
    started_unix_s: float
    is_stopped: bool = False
    asked_at_s: float = 0.0
    """When it was sent SIGTERM or SIGKILL; 0 = never."""
    pause_s: float = 0.0
    """What passes before it is started again."""
    may_be_fenced: bool = False
    """Another one was started under its name."""


@dataclass(slots=True)
class Place:
    """A name under which a process runs; two for a while when it is doubled."""

    name: str
    kind: str
    living: list[Incarnation] = field(default_factory=list[Incarnation])
    num_starts: int = 0
    is_over: bool = False
    """Not to be started again."""
    start_at_s: float = 0.0

    @property
    def newest(self) -> Incarnation | None:
        return self.living[-1] if self.living else None


class World:
    """Use `open` and `close`, and call `tend` about ten times a second."""

    def __init__(self, folder: Path, engine: Engine, seed: int) -> None:
        self.folder, self.engine = folder, engine
        self._rng = random.Random(seed)
        self._guard = process.Guard()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: embedded.EmbeddedServer | None = None
        self._is_server_stopped = False
        self._redis_port, self._redis_password = endpoints.free_port(), "chaos"
        self.scheduler_address, self._relay_address = (f"127.0.0.1:{endpoints.free_port()}" for _ in range(2))
        self.steps = STEPS
        self.places = {name: Place(name, name) for name in ("scheduler", "weightsync", "trainer")}
        self._num_replicas = 0
        for _ in range(REPLICAS):
            self._new_replica()
        self.proxies: dict[str, Proxy] = {}
        self.struck: Counter[tuple[str, str]] = Counter()
        """(target, kind) -> faults that took place."""
        self.ends: Counter[str] = Counter()
        """"trainer: exit 1" -> how often, for ends that nobody asked for."""
        self.failures: list[str] = []
        """What a part of the run must not do."""
        self.is_calm = False
        """No more faults: a part that is started is started at once."""

    # ---- life

    async def open(self) -> None:
        """Everything is started; it takes seconds until the first step."""
        self.folder.mkdir(parents=True, exist_ok=True)
        body = KNOWN if self.engine == "known" else TORCH
        (self.folder / "recipe.toml").write_text((RECIPE + body).format(folder=self.folder, lease_s=LEASE_S, judge_every=JUDGE_EVERY))
        if self.engine == "known":
            _write_known(self.folder)
        await self._start_server()
        services = {
            "scheduler": (scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"], self.scheduler_address),
            "weightsync": (weightsync_pb2.DESCRIPTOR.services_by_name["WeightSyncService"], self._relay_address),
        }
        for name, (service, target) in services.items():
            self.proxies[name] = Proxy(service, target, self._note)
            await self.proxies[name].start()
        self.tend()

    async def close(self) -> None:
        """Nothing of it is left afterwards; its files stay."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for place in self.places.values():
            for one in place.living:
                process.signal_group(one.child.pid, signal.SIGKILL)
                process.end(one.child, self._guard, 0.0)
        if self._server is not None:
            process.signal_group(self._server.pid, signal.SIGCONT)
            await asyncio.to_thread(self._server.stop)
        for proxy in self.proxies.values():
            await proxy.close()
        self._guard.close()

    def tend(self) -> None:
        """Notice what ended and start what is to run."""
        now_s = time.monotonic()
        for place in list(self.places.values()):
            for one in list(place.living):
                self._look_at(place, one, now_s)
            if not place.living and not place.is_over and now_s >= place.start_at_s:
                self._spawn(place)
        if self._server is not None and self._server.exit_code() not in (None, 0, -signal.SIGKILL, -signal.SIGTERM):
            self.failures.append(f"the store ended with {self._server.exit_code()}")

    async def calm(self) -> None:
        """Undo every fault: what is stopped goes on, what is down comes up."""
        self.is_calm = True
        for proxy in self.proxies.values():
            proxy.disarm()
        pending = list(self._tasks)
        await asyncio.gather(*pending, return_exceptions=True)
        for place in self.places.values():
            place.start_at_s = 0.0

    def finish_after(self, steps: int) -> None:
        """The run is to end there: the trainer starts again with that many steps, and not again once it is done."""
        self.steps = steps
        self._end(self.places["trainer"], signal.SIGTERM, 0.0)

    def pids(self) -> dict[str, int]:
        """Of the services and the store as they run now."""
        found = {place.name: one.child.pid for place in self.places.values() if (one := place.newest) is not None}
        return found | ({"store": self._server.pid} if self._server else {})

    # ---- faults

    async def strike(self, fault: Fault) -> None:
        """Let it happen, unless there is nobody whom it could befall now. What it takes to undo it goes on in the background."""
        if fault.is_message:
            self.proxies[fault.target].arm(fault)  # counted when it meets a call
        elif await self._strike_store(fault) if fault.target == "store" else self._strike_process(fault):
            self._note(fault)

    def _note(self, fault: Fault) -> None:
        self.struck[fault.target, fault.kind] += 1

    @property
    def num_struck(self) -> int:
        return sum(self.struck.values())

    def _strike_process(self, fault: Fault) -> bool:
        place = self._place_of(fault)
        one = place.newest if place else None
        if place is None or one is None or one.asked_at_s:
            return False
        match fault.kind:
            case "kill":
                return self._end(place, signal.SIGKILL, fault.pause_s)
            case "term":
                return self._end(place, signal.SIGTERM, fault.pause_s)
            case "move":
                place.is_over = True
                self._new_replica()
                return self._end(place, signal.SIGTERM, 0.0)
            case "stop" | "freeze" | "double":
                if one.is_stopped or len(place.living) > 1:
                    return False
                self._stop(one, fault.length_s)
                if fault.kind == "double":
                    self._spawn(place)
                    for each in place.living:
                        each.may_be_fenced = True
                    self._later(self._expect_one(place, one, fault.length_s + ZOMBIE_S))
                return True
        raise ValueError(fault.kind)

    def _place_of(self, fault: Fault) -> Place | None:
        if fault.target != ROLLOUT:
            return self.places[fault.target]
        replicas = [p for p in self.places.values() if p.kind == ROLLOUT and not p.is_over]
        return replicas[int(fault.pick * len(replicas))] if replicas else None

    def _end(self, place: Place, number: signal.Signals, pause_s: float) -> bool:
        one = place.newest
        if one is None:
            return False
        one.asked_at_s, one.pause_s = time.monotonic(), pause_s
        one.child.send_signal(number)
        return True

    def _stop(self, one: Incarnation, length_s: float) -> None:
        process.signal_group(one.child.pid, signal.SIGSTOP)
        one.is_stopped = True

        async def go_on() -> None:
            await asyncio.sleep(length_s)
            one.is_stopped = False
            if one.child.returncode is None:
                process.signal_group(one.child.pid, signal.SIGCONT)

        self._later(go_on())

    async def _expect_one(self, place: Place, zombie: Incarnation, limit_s: float) -> None:
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s:
            if len(place.living) < 2:
                return
            await asyncio.sleep(0.2)
        pids = [one.child.pid for one in place.living]
        self.failures.append(f"{place.name}: two processes {pids} live {limit_s:.0f} s after the second began; see {zombie.log}")

    async def _strike_store(self, fault: Fault) -> bool:
        server = self._server
        if server is None or server.exit_code() is not None or self._is_server_stopped:
            return False
        if fault.kind == "forget":
            return await asyncio.to_thread(self._forget_scripts)
        if fault.kind in ("kill", "term", "wipe"):
            os.kill(server.pid, signal.SIGTERM if fault.kind == "term" else signal.SIGKILL)
            self._server = None
            self._later(self._restart_server(server, fault.pause_s, is_wiped=fault.kind == "wipe"))
            return True
        self._is_server_stopped = True
        process.signal_group(server.pid, signal.SIGSTOP)
        self._later(self._continue_server(server, fault.length_s))
        return True

    def _forget_scripts(self) -> bool:
        url = f"redis://:{self._redis_password}@127.0.0.1:{self._redis_port}/0"
        with contextlib.suppress(redis.RedisError, OSError), redis.Redis.from_url(url, socket_timeout=1.0) as client:
            return bool(client.script_flush())
        return False

    async def _restart_server(self, old: embedded.EmbeddedServer, pause_s: float, is_wiped: bool) -> None:
        await asyncio.to_thread(old.stop)
        if is_wiped:
            shutil.rmtree(self.folder / "redis" / "appendonlydir")
        await asyncio.sleep(pause_s)
        await self._start_server()

    async def _start_server(self) -> None:
        self._server = await asyncio.to_thread(
            embedded.start, self.folder / "redis", self._redis_port, self._redis_password, guard=self._guard, deadline_s=60.0
        )

    async def _continue_server(self, server: embedded.EmbeddedServer, length_s: float) -> None:
        await asyncio.sleep(length_s)
        process.signal_group(server.pid, signal.SIGCONT)
        self._is_server_stopped = False

    def _later(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (err := task.exception()) is not None:
            self.failures.append(f"a fault could not be undone: {err!r}")

    # ---- processes

    def _new_replica(self) -> None:
        name = f"{ROLLOUT}-{self._num_replicas}"
        self._num_replicas += 1
        self.places[name] = Place(name, ROLLOUT)

    def _spawn(self, place: Place) -> None:
        place.num_starts += 1
        log = self.folder / "logs" / f"{place.name}.{place.num_starts}.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("wb") as output:
            child = process.spawn(self._command(place), self._guard, env=_environment(), output=output)
        place.living.append(Incarnation(child, log, time.monotonic(), time.time()))

    def _command(self, place: Place) -> list[str]:
        module = MODULES[self.engine].get(place.kind, f"services.{place.kind}")
        sets = [f"peers.{name}={proxy.address}" for name, proxy in self.proxies.items()]
        match place.kind:
            case "scheduler":
                url = f"redis://:{self._redis_password}@127.0.0.1:{self._redis_port}/0"
                sets += [f"scheduler.listen={self.scheduler_address}", f"redis.url={url}"]
            case "weightsync":
                sets += [f"weightsync.listen={self._relay_address}"]
            case "trainer":
                sets += [f"trainer.steps={self.steps}"]
        if place.kind in ("trainer", ROLLOUT):  # both ways of moving bytes take part
            sets += [f"weightsync.backend={self._rng.choice(('auto', 'grpc'))}"]
        own = ["--replica-id", place.name] if place.kind == ROLLOUT else []
        return [sys.executable, "-m", module, "--config", str(self.folder / "recipe.toml"), *own, "--set", *sets]

    def _look_at(self, place: Place, one: Incarnation, now_s: float) -> None:
        code = process.reap(one.child, self._guard)
        if code is None:
            if one.asked_at_s and not one.is_stopped and now_s - one.asked_at_s > STOP_S:
                self.failures.append(f"{place.name} did not end within {STOP_S:g} s of SIGTERM; see {one.log}")
                one.child.kill()
                one.asked_at_s = now_s
            return
        place.living.remove(one)
        is_done = place.name == "trainer" and code == 0 and self.steps < STEPS and not one.asked_at_s
        place.is_over |= is_done
        place.start_at_s = now_s + (0.0 if self.is_calm else one.pause_s)
        if not is_done and (why := _blame(one, code)):
            text = f"{place.name} ended with {code}: {why}"
            self.ends[f"{place.kind} exit {code}"] += 1
            if code != 1 or _has_traceback(one.log):
                self.failures.append(f"{text}; see {one.log}")
            place.start_at_s += 0.0 if self.is_calm else self._rng.uniform(0.1, 1.0)


def _blame(one: Incarnation, code: int) -> str:
    """What is wrong with that end; empty when it was asked for."""
    if code == FENCED_CODE and one.may_be_fenced:
        return ""
    if one.asked_at_s and code in (0, -signal.SIGKILL, -signal.SIGTERM):
        return ""
    names = {0: "nobody asked for it", RECIPE_CODE: "it cannot run as configured", FENCED_CODE: "fenced, and nobody had its name"}
    return f"{names.get(code, 'crashed')}: {' | '.join(_tail(one.log))}"


def _has_traceback(log: Path) -> bool:
    """Whether it ended by an exception that nobody caught: a crash that is told as one is a StrettoError, in one JSON line.

    The learner that got other bytes than it must raises one, too.
    """
    return any(line.startswith("Traceback (most recent call last)") for line in log.read_text(errors="replace").splitlines())


def _tail(log: Path, num_lines: int = 3) -> list[str]:
    return log.read_text(errors="replace").splitlines()[-num_lines:]


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


def _write_known(folder: Path) -> None:
    """A tokenizer of numbers and prompts made of them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {str(n): n for n in range(256)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    model = folder / "model"
    shutil.rmtree(model, ignore_errors=True)
    model.mkdir()
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    rows = [{"prompt": f"{n % 256} {n // 256} 7", "ground_truth": str(n)} for n in range(700)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def resident_mb(pid: int) -> float:
    """Resident set of a process and its children, MiB; 0 for one that is gone. Their libraries are counted: a slope does not mind."""
    return sum(map(_rss_kb, {pid, *children_of({pid})})) / 1024


def _rss_kb(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1])
    return 0
