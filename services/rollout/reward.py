"""The reward pool: answers in, scores out, in processes that may hang or crash without hurting anything else.

    score(items) --> queue (bounded) --> lane 0 --chunk--> reward_worker process
                                    \\-> lane 1 --chunk--> reward_worker process     one lane per process

A chunk is as many answers as are expected to take CHUNK_S together, so cheap rewards cost microseconds a hop and slow ones
spread over all processes. What becomes of an answer:

    returns                      Score
    raises, or breaks a rule     ScoreError, at once; the process stays
    runs past deadline_s         ScoreError; the process is killed and replaced, the rest of the chunk is scored by the new one
    kills the process            tried once more (somebody else may have killed it), then ScoreError
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from services.rollout.reward_worker import LENGTH, PROGRESS
from stretto.errors import RecipeError

log = logging.getLogger("stretto.rollout")

CHUNK_ITEMS_MAX = 64
CHUNK_S = 0.02
"""Work aimed at per hop: far above a hop's own 0.2 ms, far below what a lost chunk would cost to repeat."""
QUEUE_ITEMS = 4096
"""Answers that may wait; then `score` waits before it takes more."""
START_S = 60.0
"""For a process to start and import the reward function."""
STARTS_MAX = 3
"""Failed starts in a row after which waiting answers fail instead of waiting longer."""
CRASHES_MAX = 2
"""Processes an answer may take down before it is the one to blame."""


@dataclass(frozen=True, slots=True)
class RewardItem:
    """One answer to score: the arguments of a reward function."""

    response: str
    ground_truth: str
    data_source: str
    prompt: str
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Score(NamedTuple):
    """What the reward function said."""

    reward: float
    """Finite."""
    extras: Mapping[str, float]
    """ "acc" and whatever else it reported."""
    prediction: str | None
    """None = abstained."""


@dataclass(frozen=True, slots=True)
class ScoreError:
    """Why there is no score."""

    message: str


@dataclass(slots=True)
class _Batch:
    """One call of score()."""

    future: asyncio.Future[None]
    results: list[Score | ScoreError | None]
    num_open: int


@dataclass(slots=True)
class _Job:
    item: RewardItem
    batch: _Batch
    place: int
    num_crashes: int = 0

    @property
    def is_wanted(self) -> bool:
        return not self.batch.future.done()

    def end(self, result: Score | ScoreError) -> None:
        self.batch.results[self.place] = result
        self.batch.num_open -= 1
        if self.batch.num_open == 0 and self.is_wanted:
            self.batch.future.set_result(None)


class _LostError(Exception):
    """The process is gone or given up; args: (index in the chunk that was being scored, reason, is the answer to blame)."""


class RewardPool:
    """`workers` processes that run `function`. Belongs to one event loop."""

    def __init__(self, function: str, workers: int, deadline_s: float) -> None:
        """Starts the processes and returns at once; `ready` waits for them."""
        self.function, self.deadline_s = function, deadline_s
        self._item_s = CHUNK_S / 8
        """Estimate over all lanes of what an answer costs; the first chunks are cautious."""
        self._queue: asyncio.Queue[_Job] = asyncio.Queue(QUEUE_ITEMS)
        self._lanes = [_Lane(self) for _ in range(workers)]
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_workers(self) -> int:
        return len(self._lanes)

    @property
    def num_waiting(self) -> int:
        """Answers not yet handed to a process."""
        return self._queue.qsize()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers alive now."""
        return [lane.process.pid for lane in self._lanes if lane.process.poll() is None]

    async def ready(self) -> None:
        """Returns when every process has loaded the function. Raises RecipeError when it cannot be loaded."""
        self._start_lanes()
        for lane in self._lanes:
            await asyncio.wait_for(lane.started.wait(), START_S)
            if lane.refusal:
                raise RecipeError(lane.refusal)

    async def score(self, items: Sequence[RewardItem]) -> list[Score | ScoreError]:
        """One result per item, in order. Cancelling it drops what no process has begun."""
        if not items:
            return []
        self._start_lanes()
        batch = _Batch(asyncio.get_running_loop().create_future(), [None] * len(items), len(items))
        try:
            for place, item in enumerate(items):
                await self._queue.put(_Job(item, batch, place))
            await batch.future
        finally:
            batch.future.cancel()
        return [r for r in batch.results if r is not None]

    async def close(self) -> None:
        """Ends the processes; answers still waiting are cancelled."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for lane in self._lanes:
            lane.kill()
        while not self._queue.empty():
            self._queue.get_nowait().batch.future.cancel()

    async def take(self) -> list[_Job]:
        """The next chunk of what is still wanted; waits for at least one answer."""
        jobs = [await self._queue.get()]
        size = max(1, min(CHUNK_ITEMS_MAX, int(CHUNK_S / self._item_s)))
        while len(jobs) < size and not self._queue.empty():
            jobs.append(self._queue.get_nowait())
        return [job for job in jobs if job.is_wanted]

    def note_cost(self, item_s: float) -> None:
        """Mean seconds per answer of a chunk; one slow chunk shortens the next at once, fast ones lengthen it slowly."""
        self._item_s = max(item_s, 0.7 * self._item_s + 0.3 * item_s, 1e-6)

    def _start_lanes(self) -> None:
        if not self._tasks:
            self._tasks = [asyncio.get_running_loop().create_task(lane.run()) for lane in self._lanes]


class _Lane:
    """Feeds one process and replaces it when it is lost."""

    def __init__(self, pool: RewardPool) -> None:
        self._pool = pool
        self._worker = _Worker(pool.function)
        self.started = asyncio.Event()
        """The first start is over, well or not."""
        self.refusal = ""
        """Why the function cannot be loaded."""

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self._worker.process

    def kill(self) -> None:
        self._worker.kill()
        self._worker.process.wait()

    async def run(self) -> None:
        """Until cancelled."""
        await self._start()
        while True:
            jobs = await self._pool.take()
            while jobs:
                if not self._worker.is_up and not await self._start():
                    _fail(jobs, self.refusal or f"the reward process failed to start {STARTS_MAX} times in a row")
                    break
                try:
                    jobs = await self._attempt(jobs)
                except Exception as err:  # the lane outlives any answer, and every answer ends
                    log.error("reward_chunk_failed", exc_info=err, extra={"fields": {"num_answers": len(jobs)}})
                    _fail(jobs, f"{type(err).__name__}: {err}")
                    jobs = []
                    await self._replace()

    async def _start(self) -> bool:
        """Whether the process is up; replaced when it fails to start."""
        for _ in range(STARTS_MAX if not self.refusal else 0):
            try:
                self.refusal = await asyncio.wait_for(self._worker.hello(), START_S)
            except (TimeoutError, OSError, EOFError) as err:
                log.warning("reward_worker_start_failed", extra={"fields": {"pid": self.process.pid, "error": repr(err)}})
                await self._replace()
            else:
                break
        self.started.set()
        return self._worker.is_up

    async def _attempt(self, jobs: list[_Job]) -> list[_Job]:
        """Score a chunk; returns what must be tried again."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            results = await self._worker.exchange([job.item for job in jobs], self._pool.deadline_s)
        except _LostError as lost:
            return await self._after_loss(jobs, *lost.args)
        self._pool.note_cost((loop.time() - began) / len(jobs))
        for job, result in zip(jobs, results, strict=True):
            job.end(ScoreError(result) if isinstance(result, str) else Score(*result))
        return []

    async def _after_loss(self, jobs: list[_Job], index: int, reason: str, is_hung: bool) -> list[_Job]:
        log.warning("reward_worker_lost", extra={"fields": {"pid": self.process.pid, "reason": reason}})
        await self._replace()
        culprit = jobs[min(index, len(jobs) - 1)]
        rest = [job for job in jobs if job is not culprit]
        culprit.num_crashes += 1
        if is_hung or culprit.num_crashes == CRASHES_MAX:
            culprit.end(ScoreError(reason))
        else:
            rest.append(culprit)
        return [job for job in rest if job.is_wanted]

    async def _replace(self) -> None:
        self._worker.kill()
        await asyncio.to_thread(self._worker.process.wait)
        self._worker = _Worker(self._pool.function)


class _Worker:
    """One process and what we share with it."""

    def __init__(self, function: str) -> None:
        self._function = function
        self.is_up = False
        """It has loaded the function and was not lost since."""
        self._socket, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as file, theirs:
            file.truncate(PROGRESS.size)
            self._progress = mmap.mmap(file.fileno(), PROGRESS.size)
            fds = (theirs.fileno(), file.fileno())
            command = [sys.executable, "-m", "services.rollout.reward_worker", *map(str, fds), str(os.getpid())]
            # What a reward prints goes to our log. Its own file descriptors are the two it is given.
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.__stderr__, pass_fds=fds)
        self._num_done = 0

    async def hello(self) -> str:
        """Why the function cannot be loaded; empty: it is loaded. Raises EOFError when the process ends instead."""
        self._reader, self._writer = await asyncio.open_connection(sock=self._socket)
        self._send({"sys_path": sys.path, "function": self._function})
        refusal: str = (await self._receive())["error"]
        self.is_up = not refusal
        return refusal

    async def exchange(self, items: Sequence[RewardItem], deadline_s: float) -> list[Any]:
        """Results in order. Raises _LostError when an answer takes longer than the deadline or the process ends."""
        self._send([[i.response, i.ground_truth, i.data_source, i.prompt, dict(i.extra)] for i in items])
        base, loop = self._num_done, asyncio.get_running_loop()
        reply = loop.create_task(self._receive())
        index, since = 0, loop.time()
        try:
            while not (await asyncio.wait((reply,), timeout=min(0.25, deadline_s / 8)))[0]:
                now_at = PROGRESS.unpack_from(self._progress)[0] - base
                if now_at != index:
                    index, since = now_at, loop.time()
                elif loop.time() - since > deadline_s:
                    raise _LostError(index, f"no score within reward.deadline_s = {deadline_s:g}", True)
            results = reply.result()
        except (EOFError, OSError):
            index = PROGRESS.unpack_from(self._progress)[0] - base
            code = await asyncio.to_thread(self.process.wait)
            raise _LostError(index, f"the reward process ended with {_exit_name(code)}", False) from None
        finally:
            reply.cancel()
        self._num_done += len(items)
        return results

    def kill(self) -> None:
        self.is_up = False
        self.process.kill()
        if hasattr(self, "_writer"):
            self._writer.close()
        self._socket.close()

    def _send(self, value: Any) -> None:
        payload = json.dumps(value).encode()
        self._writer.write(LENGTH.pack(len(payload)) + payload)

    async def _receive(self) -> Any:
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        return json.loads(await self._reader.readexactly(length))


def _fail(jobs: Sequence[_Job], reason: str) -> None:
    for job in jobs:
        job.end(ScoreError(reason))


def _exit_name(code: int) -> str:
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"signal {-code}"
