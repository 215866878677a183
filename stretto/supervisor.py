"""Runs a recipe's processes on this machine: starts, restarts, stops them, and leaves no orphan.

    stretto run                                   one thread calls poll() about ten times a second
      +-- guard      ends all groups below when we are gone, holds the folder's lock until then
      +-- valkey     <folder>/redis               unless redis.url is set
      +-- scheduler  <folder>/logs/scheduler.log
      +-- weightsync
      +-- trainer
      +-- rollout-0 …                             each leads its own session: Ctrl-C reaches only us

Order of the end: trainer, rollout, scheduler, weightsync, valkey: whoever hands work back still finds the one it hands it to.
What to do about a process that ended is decided in `restarts.py`.
"""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from stretto import embedded, endpoints, process, restarts, runs
from stretto.errors import RecipeError, StrettoError
from stretto.logfile import LogFile
from stretto.recipe import Recipe

MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(256 << 20), "MALLOC_TRIM_THRESHOLD_": str(2 << 30)}
"""glibc maps and unmaps every 1 MiB chunk by default; with these the grpc backend moves weights about 1.5 times faster."""
STOP_ORDER = ("trainer", "rollout", "scheduler", "weightsync")
STOP_S = {"trainer": 20.0, "rollout": 10.0, "scheduler": 10.0, "weightsync": 5.0}
"""From SIGTERM to SIGKILL. A trainer may be writing a checkpoint."""
DONE_NOTICE_S = 5.0
"""A trainer ended with 0: so long may the news that the run is done be on its way."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the run is, as last heard from the scheduler."""

    committed_step: int = 0
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class Service:
    """One process to keep running."""

    name: str
    """"rollout-0"."""
    kind: str
    """"rollout": the package under services/."""
    command: tuple[str, ...]
    env: Mapping[str, str]
    """Added to ours."""
    log: Path


@dataclass(frozen=True, slots=True)
class Notice:
    """Something people should see: a restart, a failure."""

    text: str
    is_bad: bool = True


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table of processes."""

    name: str
    pid: int | None
    state: Literal["running", "restarting", "ended"]
    restarts: int
    detail: str
    """Why it was last restarted; empty if never."""
    address: str
    """host:port of its server."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the run ended."""

    exit_code: int
    reason: str
    log: Path | None = None
    tail: tuple[str, ...] = ()
    """Last lines of the log of the process at fault."""


# ------------------------------------------------------------------------------------------------------------ plan


@dataclass(frozen=True, slots=True)
class Plan:
    """What runs where; made once, so that a restarted process finds its old port."""

    services: tuple[Service, ...]
    addresses: Mapping[str, str]
    """As in run.json."""
    redis_port: int | None
    """None: the recipe names its own server."""


def plan(recipe: Recipe, config: Path | None, overrides: Sequence[str], claims: endpoints.Claims) -> Plan:
    """Choose ports, into `claims`, and commands. `config` and `overrides` are those that `recipe` was loaded from.

    Raises RecipeError for a port that the recipe names and another run, or another setting, has.
    """
    ports = _Ports(recipe, claims)
    redis_port = None if recipe.redis.url else endpoints.free_port(claims=claims)
    addresses: dict[str, str] = {} if redis_port is None else {"redis": f"127.0.0.1:{redis_port}"}
    sets: dict[str, list[str]] = {}
    names = ["scheduler", "weightsync", "trainer", *(f"rollout-{i}" for i in range(recipe.rollout.replicas))]
    for name in names:
        kind, _, number = name.partition("-")
        listen, metrics = ports.take(kind, "listen", int(number or 0)), ports.take(kind, "metrics_listen", int(number or 0))
        addresses[name], addresses[f"{name} metrics"] = _dialled(listen), _dialled(metrics)
        sets[name] = [f"{kind}.listen={listen}", f"{kind}.metrics_listen={metrics}"]
    peers = [f"peers.{name}={addresses[name]}" for name in ("scheduler", "weightsync")]
    given = ["--config", str(config)] if config is not None else []
    services: list[Service] = []
    for name in names:
        kind = name.partition("-")[0]
        settings = [part for item in (*overrides, *peers, *sets[name]) for part in ("--set", item)]
        # A name that outlives the process: its successor's first word tells the scheduler that the leases of this one are lost.
        own = ["--replica-id", name] if kind == "rollout" else []
        command = (sys.executable, "-m", f"services.{kind}", *given, *own, *settings)
        services.append(Service(name, kind, command, _env(recipe, kind), recipe.run.folder / "logs" / f"{name}.log"))
    return Plan(tuple(services), addresses, redis_port)


def _env(recipe: Recipe, kind: str) -> dict[str, str]:
    threads = {"trainer": recipe.trainer.threads, "rollout": recipe.rollout.threads}.get(kind, 1)
    env = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    return env | (MALLOC if kind == "weightsync" else {})


class _Ports:
    """Listen addresses of the recipe with every 0, and every default that is taken, made a free port."""

    def __init__(self, recipe: Recipe, claims: endpoints.Claims) -> None:
        self._recipe, self._claims = recipe, claims

    def take(self, kind: str, key: str, number: int) -> str:
        """The `number`-th replica of a service listens `number` ports above the one the recipe names."""
        section = getattr(self._recipe, kind)
        host, port = endpoints.split(getattr(section, key), f"{kind}.{key}")
        wanted = port + number if port else 0
        if wanted and (key in section.model_fields_set or endpoints.is_free(host, wanted)) and self._claims.take(wanted):
            return f"{host}:{wanted}"
        if wanted and key in section.model_fields_set:
            taken = f"port {wanted} belongs to another run on this machine or to another setting"
            raise RecipeError(f"{kind}.{key} = {getattr(section, key)!r}: {taken}; use port 0 for any free one")
        return f"{host}:{endpoints.free_port(host, self._claims)}"


def _dialled(listen: str) -> str:
    """Where a server that listens there is reached from this machine."""
    host, _, port = listen.rpartition(":")
    return f"127.0.0.1:{port}" if host in ("0.0.0.0", "[::]", "") else listen


# ------------------------------------------------------------------------------------------------------------ run


@dataclass(slots=True)
class _Child:
    service: Service
    log: LogFile
    process: subprocess.Popen[bytes] | None = None
    num_starts: int = 0
    started_s: float = 0.0
    start_at_s: float = 0.0
    """When a process that is to be restarted is."""
    has_ended: bool = False
    history: restarts.History = field(default_factory=restarts.History)
    detail: str = ""

    @property
    def num_restarts(self) -> int:
        return max(0, self.num_starts - 1)


class Supervisor:
    """Owns the processes of one run, from the main thread (the kernel ties children to the thread that started them)."""

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        lock: runs.Lock,
        *,
        environ: Mapping[str, str],
        probe: Callable[[], Progress],
        notify: Callable[[Notice], None] = lambda _: None,
    ) -> None:
        """`lock` is `folder`'s; the guard holds it until the last process is gone. `probe` answers at once, with what was last heard."""
        self._folder, self._plan, self._environ, self._probe, self._notify = folder, plan, environ, probe, notify
        self._guard = process.Guard(pass_fds=(lock.fd,))
        self._children = [_Child(s, LogFile(s.log)) for s in plan.services]
        self._password = secrets.token_urlsafe(24)
        self._redis: embedded.EmbeddedServer | None = None
        self._redis_history, self._redis_started_s, self._redis_start_at_s = restarts.History(), 0.0, 0.0
        self._num_redis_starts = 0

    @property
    def redis_pid(self) -> int | None:
        """None when there is none, or not at this moment."""
        return self._redis.pid if self._redis else None

    @property
    def num_restarts(self) -> int:
        return max(0, self._num_redis_starts - 1) + sum(c.num_restarts for c in self._children)

    def rows(self) -> list[Row]:
        """The table of processes."""
        rows: list[Row] = []
        if self._plan.redis_port is not None:
            pid, state = (self._redis.pid, "running") if self._redis else (None, "restarting")
            rows.append(Row("redis", pid, state, max(0, self._num_redis_starts - 1), "", f"127.0.0.1:{self._plan.redis_port}"))
        for c in self._children:
            state = "running" if c.process else "ended" if c.has_ended else "restarting"
            address = self._plan.addresses.get(c.service.name, "")
            rows.append(Row(c.service.name, c.process.pid if c.process else None, state, c.num_restarts, c.detail, address))
        return rows

    # ---- start
    def start(self) -> None:
        """Start everything. Raises when the embedded server does not come up; then nothing is left running."""
        try:
            if self._plan.redis_port is not None:
                self._start_redis(self._plan.redis_port)
            for child in self._children:
                self._start(child)
        except BaseException:
            self.stop()
            raise

    def _start_redis(self, port: int) -> None:
        program = self._environ.get("STRETTO_REDIS_SERVER")
        self._redis = embedded.start(self._folder / "redis", port, self._password, program=program, guard=self._guard)
        self._redis_started_s = time.monotonic()
        self._num_redis_starts += 1

    def _start(self, child: _Child) -> None:
        env = {**self._environ, **child.service.env}
        if self._plan.redis_port is not None:  # by environment: arguments are for everybody to read
            env["STRETTO_REDIS__URL"] = f"redis://:{self._password}@127.0.0.1:{self._plan.redis_port}/0"
        with child.log.open() as output:
            child.process = process.spawn(child.service.command, self._guard, env=env, output=output)
        child.started_s = time.monotonic()
        child.num_starts += 1

    # ---- watch
    def poll(self) -> Outcome | None:
        """Reap, restart what is due, and say how the run ended once it has. Call it about ten times a second, then `stop`."""
        progress, now_s = self._probe(), time.monotonic()
        outcome = self._poll_redis(progress, now_s)
        for child in self._children:
            if child.process is not None:
                code = process.reap(child.process, self._guard)
                outcome = outcome if code is None else self._ended(child, code, now_s, progress) or outcome
                child.log.rotate()
            elif not child.has_ended and now_s >= child.start_at_s and not progress.is_done:
                self._start(child)
        if outcome is None and progress.is_done and not any(c.process for c in self._children if c.service.kind == "trainer"):
            return Outcome(0, "done")
        return outcome

    def _ended(self, child: _Child, code: int, now_s: float, progress: Progress) -> Outcome | None:
        child.process = None
        decision, child.history = restarts.after(child.history, code, now_s - child.started_s, progress.committed_step, progress.is_done)
        if isinstance(decision, restarts.GiveUp):
            child.has_ended = True
            return Outcome(decision.exit_code, f"{child.service.name}: {decision.reason}", child.log.path, tuple(child.log.tail()))
        if isinstance(decision, restarts.Ended):
            child.has_ended = True
            return None
        # A trainer ends with 0 once the run is done; the news may reach us after it.
        delay_s = DONE_NOTICE_S if child.service.kind == "trainer" and code == 0 else decision.delay_s
        child.start_at_s, child.detail = now_s + delay_s, decision.reason
        if delay_s != DONE_NOTICE_S:
            self._notify(Notice(f"{child.service.name} {decision.reason}; starting it again in {delay_s:g} s"))
        return None

    def _poll_redis(self, progress: Progress, now_s: float) -> Outcome | None:
        if self._plan.redis_port is None:
            return None
        error = ""
        if self._redis is not None:
            code = self._redis.exit_code()
            if code is None:
                return None
            error, self._redis = restarts.describe(code), None
        elif now_s >= self._redis_start_at_s:
            try:
                self._start_redis(self._plan.redis_port)
            except StrettoError as err:
                error = err.message
        if not error:
            return None
        ran_s = now_s - self._redis_started_s
        decision, self._redis_history = restarts.after(self._redis_history, 1, ran_s, progress.committed_step, False)
        if isinstance(decision, restarts.GiveUp):
            return Outcome(1, f"redis: {decision.reason}: {error}", self._folder / "redis" / "server.log")
        assert isinstance(decision, restarts.Restart)
        self._redis_start_at_s = now_s + (decision.delay_s if self._redis_history.crashes > 1 else 0.0)
        self._notify(Notice(f"redis ended by {error}; starting it again on its port with its data"))
        return None

    # ---- stop
    def stop(self, is_urgent: Callable[[], bool] = lambda: False) -> None:
        """End everything in order, each process within its deadline; at once when `is_urgent` says so. Idempotent."""
        for kind in STOP_ORDER:
            self._stop_all([c for c in self._children if c.service.kind == kind and c.process], STOP_S[kind], is_urgent)
        if self._redis is not None:
            self._redis.stop(0.0 if is_urgent() else embedded.STOP_S)
            self._redis = None
        self._guard.close()

    def _stop_all(self, children: Sequence[_Child], deadline_s: float, is_urgent: Callable[[], bool]) -> None:
        for child in children:
            assert child.process is not None
            if process.reap(child.process, self._guard) is None:
                child.process.send_signal(signal.SIGTERM)
        end_s = time.monotonic() + deadline_s
        while children := [c for c in children if c.process and process.reap(c.process, self._guard) is None]:
            if is_urgent() or time.monotonic() > end_s:
                for child in children:
                    assert child.process is not None
                    self._notify(Notice(f"{child.service.name} did not stop; killed")) if not is_urgent() else None
                    process.signal_group(child.process.pid, signal.SIGKILL)
                end_s = float("inf")
            time.sleep(0.02)
        for child in self._children:
            if child.process is not None and child.process.returncode is not None:
                child.process, child.has_ended = None, True
