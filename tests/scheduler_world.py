"""A scheduler in process, with real gRPC and a real store, and hand-driven workers on its wire."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from services.scheduler.controller import Controller, Prompts
from services.scheduler.ledger import Ledger
from services.scheduler.server import SchedulerServicer
from stretto import recipe as recipes
from stretto import rpc
from stretto.store import Store
from stretto.v1 import scheduler_pb2 as spb
from stretto.v1 import types_pb2 as pb
from stretto.v1.scheduler_pb2_grpc import SchedulerServiceStub, add_SchedulerServiceServicer_to_server

DATASET_SIZE = 40
SOON_S = 10.0
"""Nothing a test waits for takes longer."""


class NumberedPrompts:
    """An endless dataset whose rows are their ordinals."""

    def __init__(self, group_size: int = 2, fingerprint: str = "numbers") -> None:
        self.group_size, self._fingerprint = group_size, fingerprint

    def __len__(self) -> int:
        return DATASET_SIZE

    def fingerprint(self) -> str:
        return self._fingerprint

    def prompt(self, ordinal: int) -> pb.Prompt:
        return pb.Prompt(
            uid=f"d{ordinal}", kind=pb.PROMPT_KIND_TRAIN, ordinal=ordinal, row=ordinal % DATASET_SIZE, group_size=self.group_size
        )

    def named(self, prompt: pb.Prompt, uid: str) -> pb.Prompt:
        prompt.uid = uid
        return prompt

    def user_prompt(self, user: spb.UserPrompt) -> pb.Prompt:
        return pb.Prompt(kind=pb.PROMPT_KIND_USER, ordinal=-1, row=-1, group_size=self.group_size, text=user.text)

    def exam(self, evaluation_id: str, max_prompts: int) -> list[pb.Prompt]:
        return [
            pb.Prompt(uid=f"v{evaluation_id}-{n}", kind=pb.PROMPT_KIND_VALIDATION, data_source="sums", group_size=2)
            for n in range(min(max_prompts or 3, 3))
        ]


def recipe_of(**scheduler: Any) -> recipes.Recipe:
    """Steps of 4 groups of 2 answers, max_lag 2: window 12."""
    validation = scheduler.pop("validation", {"every_steps": 0, "at_start": False, "at_end": False})
    rules = {"batch_groups": 4, "max_lag": 2, "wait_max_s": 5.0} | scheduler
    return recipes.build(
        {
            "model": {"path": "m"},
            "data": {"train": "t"},
            "sampling": {"group_size": 2},
            "scheduler": rules,
            "validation": validation,
            "trainer": {"steps": 1000, "minibatches": 1},
        }
    )


class CountingLedger(Ledger):
    """The real one; says how many dataset prompts each admission lets in."""

    def __init__(self, world: World) -> None:
        super().__init__(world.store, "world")
        self._world = world

    async def push(self, prompts: Sequence[pb.Prompt], **kwargs: Any) -> list[str]:
        self._world.pushes.append(len(prompts))
        return await super().push(prompts, **kwargs)


class World:
    """One scheduler; `restart` ends it as kill -9 would (nothing is said or saved) and starts the next on the same store."""

    def __init__(
        self,
        url: str,
        recipe: recipes.Recipe,
        *,
        with_exam: bool = False,
        prompts: Prompts | None = None,
        store_timeout_s: float = 5.0,
        store_outage_s: float = 5.0,
    ) -> None:
        self.recipe, self._url, self._with_exam = recipe, url, with_exam
        self._store_timeout_s, self._store_outage_s = store_timeout_s, store_outage_s
        self.prompts: Any = prompts or NumberedPrompts()
        self.pushes: list[int] = []
        """Dataset prompts of each admission of the newest incarnation."""
        self.offset_s = 0.0
        """Added to the scheduler's clock."""

    async def start(self) -> None:
        self.store = await Store.open(self._url, timeout_s=self._store_timeout_s, outage_s=self._store_outage_s)
        exam = self.prompts.exam if self._with_exam else None
        self.pushes = []
        self.controller = Controller(self.recipe, CountingLedger(self), self.prompts, exam, clock=self.clock)
        await self.controller.start()
        servicer = SchedulerServicer(self.controller)
        self.server = await rpc.serve("127.0.0.1:0", lambda s: add_SchedulerServiceServicer_to_server(servicer, s), [rpc.SCHEDULER])
        self.channel = rpc.connect(self.server.address)
        self.stub: Any = SchedulerServiceStub(self.channel)
        self.work = asyncio.create_task(self.controller.run())

    async def stop(self) -> None:
        self.work.cancel()
        await asyncio.gather(self.work, return_exceptions=True)
        await self.channel.close()
        await self.server.drain(0)
        await self.store.close()

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    def clock(self) -> float:
        return time.time() + self.offset_s

    async def pass_s(self, seconds: float) -> None:
        """Move the scheduler's clock and let it look, often enough that it does not take itself for one that stood still."""
        num_looks = math.ceil(4 * seconds / self.recipe.scheduler.lease_s)
        for _ in range(num_looks):
            self.offset_s += seconds / num_looks
            await self.controller.tick()
        await self.controller.settle()

    async def call(self, method: str, request: Any) -> Any:
        """One call; raises the scheduler's error as its own class."""
        try:
            return await getattr(self.stub, method)(request, timeout=SOON_S)
        except grpc.RpcError as err:
            raise rpc.from_rpc_error(err) from None

    async def status(self) -> spb.GetStatusResponse:
        return await self.call("GetStatus", spb.GetStatusRequest())

    async def until(self, holds: Callable[[spb.GetStatusResponse], bool]) -> spb.GetStatusResponse:
        """The first status for which `holds`."""
        async with asyncio.timeout(SOON_S):
            while True:
                seen = self.controller.changes.count
                status = await self.status()
                if holds(status):
                    return status
                await self.controller.changes.after(seen, 0.2)

    async def until_full(self) -> spb.Occupancy:
        return (await self.until(lambda s: s.occupancy.occupied >= s.occupancy.window)).occupancy

    async def verify(self) -> spb.VerifyLedgerResponse:
        verdict: spb.VerifyLedgerResponse = await self.call("VerifyLedger", spb.VerifyLedgerRequest())
        assert list(verdict.violations) == []
        return verdict

    async def events(self, after_id: str = "0", until: str = "") -> list[spb.WatchEventsResponse]:
        """Events up to the first of kind `until`."""
        found: list[spb.WatchEventsResponse] = []
        stream = self.stub.WatchEvents(spb.WatchEventsRequest(after_id=after_id), timeout=SOON_S)
        async for event in stream:
            found.append(event)
            if event.kind == until:
                stream.cancel()
                return found
        return found


class Replica:
    """A rollout worker without an engine: leases what it gets and answers what it is told to."""

    def __init__(self, world: World, name: str = "r-1") -> None:
        self.world, self.name, self.epoch = world, name, 0
        self.held = pb.WeightsId()
        self.leases: dict[str, spb.Lease] = {}

    async def beat(self, state: spb.ReplicaState.ValueType = spb.REPLICA_STATE_RUNNING) -> spb.HeartbeatResponse:
        answer = await self.world.call(
            "Heartbeat",
            spb.HeartbeatRequest(
                replica_id=self.name, replica_epoch=self.epoch, state=state, held=self.held, slots=64, lease_uids=list(self.leases)
            ),
        )
        self.epoch = answer.replica_epoch
        for uid in answer.lost_uids:
            self.leases.pop(uid, None)
        return answer

    async def hold(self, trainer_epoch: int, version: int) -> None:
        self.held = pb.WeightsId(trainer_epoch=trainer_epoch, version=version)
        await self.beat()

    async def poll(self, wanted: int = 64, *, wait_s: float = 0.0, op: str = "") -> spb.LeasePromptsResponse:
        request = spb.LeasePromptsRequest(
            replica_id=self.name,
            replica_epoch=self.epoch,
            operation_id=op or uuid.uuid4().hex,
            max_prompts=wanted,
            held=self.held,
            wait_s=wait_s,
        )
        answer: spb.LeasePromptsResponse = await self.world.call("LeasePrompts", request)
        self.leases |= {lease.prompt.uid: lease for lease in answer.leases}
        return answer

    def ends(
        self, uid: str, *, reward: float = 1.0, fails: bool = False, indices: Sequence[int] | None = None
    ) -> list[spb.TrajectoryReport]:
        lease = self.leases[uid]
        made: list[spb.TrajectoryReport] = []
        for index in lease.missing if indices is None else indices:
            trajectory = pb.Trajectory(
                prompt_uid=uid,
                index=index,
                token_ids=b"\x05\x00\x00\x00" * 3,
                logprobs=b"\x00\x00\x80\xbf" * 3,
                spans=[pb.VersionSpan(version=self.held.version, num_tokens=3)],
                finish_reason=pb.FINISH_REASON_FAILED if fails else pb.FINISH_REASON_STOP,
                reward=reward + index,
                reward_extras={"acc": reward},
                error="it broke" if fails else "",
                replica_id=self.name,
            )
            made.append(spb.TrajectoryReport(attempt=lease.attempt, trajectory=trajectory))
        return made

    async def report(self, reports: Sequence[spb.TrajectoryReport]) -> list[str]:
        request = spb.ReportTrajectoriesRequest(replica_id=self.name, replica_epoch=self.epoch, reports=reports)
        return list((await self.world.call("ReportTrajectories", request)).lost_uids)

    def handing_back(self, reason: str) -> spb.ReturnLeasesRequest:
        """All leases, without partial answers."""
        back = [spb.ReturnedLease(prompt_uid=uid, attempt=lease.attempt) for uid, lease in self.leases.items()]
        return spb.ReturnLeasesRequest(
            replica_id=self.name, replica_epoch=self.epoch, operation_id=uuid.uuid4().hex, leases=back, reason=reason
        )

    async def finish(self, *uids: str) -> None:
        """Answer these leases (default: all) wholly."""
        todo = uids or tuple(self.leases)
        await self.report([end for uid in todo for end in self.ends(uid)])
        for uid in todo:
            del self.leases[uid]


class Trainer:
    """A trainer without a model."""

    def __init__(self, world: World) -> None:
        self.world, self.epoch = world, 0

    async def open(
        self, resume: int = 0, *, total: int = 1000, op: str = "", cut_id: str = "", cut_epoch: int = 1, epoch_floor: int = 0
    ) -> spb.OpenTrainerResponse:
        request = spb.OpenTrainerRequest(
            operation_id=op or uuid.uuid4().hex,
            resume_step=resume,
            address="t:1",
            total_steps=total,
            batch_groups=self.world.recipe.scheduler.batch_groups,
            cut_id=cut_id,
            epoch_floor=epoch_floor,
            cut_trainer_epoch=cut_epoch,
        )
        answer: spb.OpenTrainerResponse = await self.world.call("OpenTrainer", request)
        self.epoch = answer.trainer_epoch or self.epoch
        return answer

    async def sample(self, step: int, wait_s: float = 0.0) -> tuple[list[pb.Group], str]:
        groups: list[pb.Group] = []
        reason = ""
        request = spb.SampleBatchRequest(trainer_epoch=self.epoch, step=step, wait_s=wait_s)
        try:
            async for answer in self.world.stub.SampleBatch(request, timeout=SOON_S):
                reason = answer.wait_reason
                groups.extend(answer.groups)
        except grpc.RpcError as err:
            raise rpc.from_rpc_error(err) from None
        return groups, reason

    async def commit(self, step: int, **metrics: float) -> None:
        await self.world.call("CommitStep", spb.CommitStepRequest(trainer_epoch=self.epoch, step=step, metrics=metrics))

    async def step(self, step: int) -> list[str]:
        """Train `step`; the uids of its batch."""
        groups, reason = await self.sample(step)
        assert groups, reason
        await self.commit(step)
        return [group.prompt.uid for group in groups]

    async def save(self, step: int, cut_id: str = "") -> int:
        request = spb.CommitCheckpointRequest(trainer_epoch=self.epoch, step=step, path="c", cut_id=cut_id)
        return (await self.world.call("CommitCheckpoint", request)).num_removed

    async def snapshot(self, step: int) -> bytes:
        request = spb.SnapshotLedgerRequest(trainer_epoch=self.epoch, step=step)
        try:
            return b"".join([part.data async for part in self.world.stub.SnapshotLedger(request, timeout=SOON_S)])
        except grpc.RpcError as err:
            raise rpc.from_rpc_error(err) from None

    async def restore(self, step: int, cut_id: str, snapshot: bytes, *, op: str = "") -> spb.RestoreLedgerResponse:
        op = op or uuid.uuid4().hex
        half = len(snapshot) // 2
        parts = [
            spb.RestoreLedgerRequest(operation_id=op, cut_id=cut_id, step=step, trainer_epoch=self.epoch, data=data)
            for data in (snapshot[:half], snapshot[half:])
        ]
        return await self.world.call("RestoreLedger", iter(parts))


@contextlib.asynccontextmanager
async def running(url: str, recipe: recipes.Recipe, **options: Any) -> AsyncIterator[World]:
    """`options` of World."""
    world = World(url, recipe, **options)
    await world.start()
    try:
        yield world
    finally:
        await world.stop()


@contextlib.asynccontextmanager
async def ring(url: str, recipe: recipes.Recipe, **options: Any) -> AsyncIterator[tuple[World, Trainer, Replica]]:
    """A scheduler, a trainer that has opened the run at step 0, and a replica that holds version 0."""
    async with running(url, recipe, **options) as world:
        trainer, replica = Trainer(world), Replica(world)
        await trainer.open()
        await replica.hold(trainer.epoch, 0)
        await world.until_full()
        yield world, trainer, replica
