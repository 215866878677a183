"""A replica in the test's own process: real gRPC to a scripted scheduler, the real worker and driver, a fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.rollout.driver import Driver, UpdatePolicy
from services.rollout.engine import Request
from services.rollout.link import SchedulerLink
from services.rollout.reward import RewardItem, Score, ScoreError
from services.rollout.scoring import Scorer
from services.rollout.weights import Follower
from services.rollout.worker import Settings, Worker
from stretto import rpc
from stretto.errors import FencedError, NotFoundError, StrettoError
from stretto.v1 import scheduler_pb2 as pb
from stretto.v1 import scheduler_pb2_grpc
from stretto.v1.types_pb2 import Prompt, SamplingParams, Trajectory
from tests.fakes import FakeEngine
from tests.waits import eventually

GROUP = 4
"""Trajectories per group."""


def lease(uid: str, n: int = GROUP, attempt: int = 1, missing: Sequence[int] | None = None, **fields: Any) -> pb.Lease:
    prompt = Prompt(
        uid=uid,
        group_size=n,
        token_ids=np.array([5, 6, 7], "<i4").tobytes(),
        ground_truth="42",
        sampling=SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=16, seed=1),
    )
    return pb.Lease(prompt=prompt, attempt=attempt, missing=range(n) if missing is None else missing, lease_s=60, **fields)


class ScriptedScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Grants what is offered and writes down what it is told."""

    def __init__(self) -> None:
        self._offered: deque[pb.Lease] = deque()
        self._has_offers = asyncio.Event()
        self.granted: dict[str, pb.Lease] = {}
        self.answers: dict[str, pb.LeasePromptsResponse] = {}
        self.polls: list[pb.LeasePromptsRequest] = []
        self.reported: dict[tuple[str, int], Trajectory] = {}
        self.returned: dict[str, pb.ReturnedLease] = {}
        self.return_reasons: list[str] = []
        self.return_failures: deque[StrettoError] = deque()
        """Raised by the next ReturnLeases."""
        self.heartbeats: list[pb.HeartbeatRequest] = []
        self.interval_s = 0.02
        self.lost: set[str] = set()
        self.directives: list[pb.Directive] = []
        self.epoch = 0
        self.forgotten: set[int] = set()
        """Epochs that nobody remembers."""
        self.fenced: set[int] = set()
        """Epochs that are refused."""
        self.fence_all = False

    def offer(self, *leases: pb.Lease) -> None:
        self._offered.extend(leases)
        self._has_offers.set()

    def _check(self, epoch: int) -> None:
        if epoch in self.forgotten:
            raise NotFoundError(f"replica epoch {epoch} is unknown here")
        if self.fence_all or epoch in self.fenced:
            raise FencedError(f"replica epoch {epoch} is over")

    async def LeasePrompts(self, request: pb.LeasePromptsRequest, context: Any) -> pb.LeasePromptsResponse:  # noqa: N802
        self._check(request.replica_epoch)
        self.polls.append(request)
        if request.operation_id not in self.answers:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_offers.wait(), request.wait_s)
            leases = [self._offered.popleft() for _ in range(min(len(self._offered), request.max_prompts))]
            if not self._offered:
                self._has_offers.clear()
            self.granted |= {granted.prompt.uid: granted for granted in leases}
            self.answers[request.operation_id] = pb.LeasePromptsResponse(leases=leases, wait_reason="" if leases else "window full")
        return self.answers[request.operation_id]

    async def ReportTrajectories(self, request: pb.ReportTrajectoriesRequest, context: Any) -> pb.ReportTrajectoriesResponse:  # noqa: N802
        self._check(request.replica_epoch)
        lost = {r.trajectory.prompt_uid for r in request.reports} & self.lost
        for report in request.reports:
            t = report.trajectory
            if t.prompt_uid not in lost:
                self.reported.setdefault((t.prompt_uid, t.index), t)
        return pb.ReportTrajectoriesResponse(lost_uids=lost)

    async def ReturnLeases(self, request: pb.ReturnLeasesRequest, context: Any) -> pb.ReturnLeasesResponse:  # noqa: N802
        self._check(request.replica_epoch)
        if self.return_failures:
            raise self.return_failures.popleft()
        self.returned |= {r.prompt_uid: r for r in request.leases}
        self.return_reasons.append(request.reason)
        return pb.ReturnLeasesResponse()

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatResponse:  # noqa: N802
        if request.replica_epoch:
            self._check(request.replica_epoch)
        else:
            self.epoch += 1
        self.heartbeats.append(request)
        directives, self.directives = self.directives, []
        lost = [uid for uid in request.lease_uids if uid in self.lost]
        return pb.HeartbeatResponse(
            replica_epoch=request.replica_epoch or self.epoch, interval_s=self.interval_s, directives=directives, lost_uids=lost
        )

    def finished(self, uid: str, n: int = GROUP) -> bool:
        return all((uid, index) in self.reported for index in range(n))


@dataclass
class FakeFetched:
    id: tuple[int, int]
    tensors: dict[str, Any] = field(default_factory=dict[str, Any])


class FakeSource:
    """A relay's client whose newest version the test sets."""

    def __init__(self) -> None:
        self.newest: tuple[int, int] | None = None
        self.failures: deque[StrettoError] = deque()
        """Raised by the next fetches."""
        self.torn: deque[bool] = deque()
        """Whether the bytes of the next fetches are overwritten while they are loaded."""
        self.fetching = asyncio.Event()
        self.may_fetch = asyncio.Event()
        self.may_fetch.set()
        self.released: list[tuple[tuple[int, int], str]] = []
        self._seen: asyncio.Queue[tuple[int, int]] = asyncio.Queue()

    def publish(self, epoch: int, version: int) -> None:
        self.newest = (epoch, version)
        self._seen.put_nowait(self.newest)

    async def watch(self) -> AsyncIterator[tuple[int, int]]:
        while True:
            yield await self._seen.get()

    async def fetch(self, held: tuple[int, int] | None) -> FakeFetched | None:
        self.fetching.set()
        await self.may_fetch.wait()
        if self.failures:
            raise self.failures.popleft()
        return None if self.newest is None or (held is not None and tuple(held) == self.newest) else FakeFetched(self.newest)

    async def release(self, fetched: FakeFetched, error: str = "") -> bool:
        self.released.append((fetched.id, error))
        return not (self.torn and self.torn.popleft())


class FakePool:
    """Scores every answer with its length; answers in `stuck` wait for `unstick`."""

    num_workers = 1

    def __init__(self) -> None:
        self.items: list[RewardItem] = []
        self.stuck: set[str] = set()
        self.unstick = asyncio.Event()
        self.failing: set[str] = set()

    async def score(self, items: Sequence[RewardItem]) -> list[Score | ScoreError]:
        self.items.extend(items)
        if any(item.response in self.stuck for item in items):
            await self.unstick.wait()
        return [
            ScoreError("ValueError: no") if item.response in self.failing else Score(float(len(item.response)), {"acc": 1.0}, "42")
            for item in items
        ]


class FragileEngine(FakeEngine):
    """Dies in step() when told to."""

    dies = threading.Event()

    def step(self) -> Any:
        if self.dies.is_set():
            self.dies.clear()
            raise RuntimeError("the device is gone")
        return super().step()


def decode(answers: list[list[int]]) -> list[str]:
    return [" ".join(map(str, tokens)) for tokens in answers]


@dataclass
class World:
    """What a test looks at."""

    scheduler: ScriptedScheduler
    server: rpc.Server
    source: FakeSource
    pool: FakePool
    worker: Worker
    driver: Driver
    engines: list[FragileEngine]
    running: asyncio.Task[None]

    @property
    def engine(self) -> FragileEngine:
        return self.engines[-1]

    @property
    def requests(self) -> list[Request]:
        return [r for engine in self.engines for r in engine.added]


def make_engine(slots: int = 64) -> FragileEngine:
    engine = FragileEngine(slots=slots)
    engine.dies = threading.Event()
    return engine


@contextlib.asynccontextmanager
async def replica(
    *, policy: UpdatePolicy = "in_flight", keep_partials: bool = True, slots: int = 64, prefetch_groups: int = 4, publish: bool = True
) -> AsyncIterator[World]:
    """A running replica that holds version 0 (unless publish is off); cancelled at the end if it still runs."""
    scheduler, source, pool = ScriptedScheduler(), FakeSource(), FakePool()
    server = await rpc.serve(
        "127.0.0.1:0", lambda s: scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(scheduler, s), ["stretto.v1.SchedulerService"]
    )
    worker = Worker(Settings(GROUP, prefetch_groups, poll_s=2.0, heartbeat_s=0.02), SchedulerLink(server.address, "r-test"))
    engines: list[FragileEngine] = []

    def build() -> FragileEngine:
        engines.append(make_engine(slots))
        return engines[-1]

    driver = Driver(build, policy=policy, keep_partials=keep_partials, on_ended=worker.on_ended, on_died=worker.on_died)
    follower = Follower(
        source,
        driver,
        is_pinned=lambda: worker.book.is_pinned,
        give_back=worker.give_back,
        on_change=worker.on_weights,
        lease_s=0.0,
        convert=lambda views: views,
    )
    worker.attach(driver, follower, Scorer(pool, decode, is_wanted=worker.book.wants, on_scored=worker.on_scored))
    await driver.start()
    running = asyncio.create_task(worker.run())
    world = World(scheduler, server, source, pool, worker, driver, engines, running)
    try:
        if publish:
            source.publish(1, 0)
            await eventually(lambda: follower.held == (1, 0), "first weights")
        yield world
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await driver.stop()
        await worker.link.close()
        await server.drain(0)
