"""What surrounds a trainer in its tests: a scheduler and a relay behind real gRPC, and a learner that adds up what it saw.

FakeScheduler   a ledger of numbered groups in memory with the trainer-facing rules of the real one; may kill its caller
FakeRelay       takes versions by the grpc backend
AddingLearner   weight += ordinal for each group: whatever happened, the end shows whether each was trained once
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from services.trainer import server
from services.trainer.loop import Learner
from stretto import recipe as recipes
from stretto import rpc, telemetry
from stretto.errors import FencedError, RefusedError
from stretto.recipe import Recipe
from stretto.v1 import scheduler_pb2 as pb
from stretto.v1 import scheduler_pb2_grpc as pb_grpc
from stretto.v1 import trainer_pb2_grpc, types_pb2
from stretto.v1 import weightsync_pb2 as ws
from stretto.v1 import weightsync_pb2_grpc as ws_grpc

WAIT_S = 30.0
"""Longest any test waits for something to happen."""


# ------------------------------------------------------------------------------------------------------------ learner


@dataclass
class Report:
    metrics: dict[str, float]


class AddingLearner:
    """Obeys services.trainer.loop.Learner. Minibatches only count."""

    def __init__(self, recipe: Recipe) -> None:
        self._minibatches = recipe.trainer.minibatches
        self.weight = torch.zeros(4)
        self.seen = torch.zeros(0, dtype=torch.int64)
        self.optimizer_steps = 0

    def train(self, groups: Sequence[types_pb2.Group], step: int) -> Report:
        ordinals = torch.tensor([g.prompt.ordinal for g in groups])
        self.weight += float(ordinals.sum())
        self.seen = torch.cat([self.seen, ordinals])
        self.optimizer_steps += self._minibatches
        return Report({"loss": 1.0 / step, "updates": float(self._minibatches), "optimizer_steps": float(self.optimizer_steps)})

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {"weight": self.weight}

    def state(self) -> dict[str, Any]:
        return {"weight": self.weight, "seen": self.seen, "optimizer_steps": self.optimizer_steps}

    def load_state(self, state: dict[str, Any]) -> None:
        self.weight, self.seen, self.optimizer_steps = state["weight"].clone(), state["seen"].clone(), state["optimizer_steps"]

    def save_pretrained(self, folder: Path, state: Mapping[str, Any]) -> None:
        (folder / "config.json").write_text("{}")
        save_file({"weight": state["weight"]}, folder / "model.safetensors")


# ------------------------------------------------------------------------------------------------------------ scheduler


def bare_group(ordinal: int, version: int) -> types_pb2.Group:
    """A group without trajectories."""
    return types_pb2.Group(prompt=types_pb2.Prompt(uid=f"d{ordinal}", ordinal=ordinal), version_begin=version)


class FakeScheduler(pb_grpc.SchedulerServiceServicer):
    """One run of `total` steps of `batch` groups, numbered 0, 1, 2, …"""

    def __init__(self, total: int, batch: int = 2) -> None:
        self.total, self.batch = total, batch
        self.epoch = self.committed = self.checkpointed = 0
        self.batches: dict[int, list[int]] = {}
        """step -> ordinals, consumed and not yet removed."""
        self.trained: dict[int, list[int]] = {}
        """step -> ordinals, as the commits say; later incarnations replace what they reopen."""
        self.calls: list[tuple[str, int]] = []
        """(method, step) in order of arrival."""
        self.first_versions: dict[int, int] = {}
        """epoch -> step it resumed at."""
        self.metrics: dict[int, dict[str, float]] = {}
        self.available = total * batch
        """Groups finished so far."""
        self.phase = pb.RUN_PHASE_RUNNING
        self.events: list[pb.WatchEventsResponse] = []
        self.last_evaluation: pb.Evaluation | None = None
        self.num_watchers = 0
        """Calls of WatchEvents so far."""
        self.on_call: Callable[[str, int, str], None] = lambda method, step, when: None
        """Called "before" and "after" a method took effect; may kill the caller."""
        self.make_group: Callable[[int, int], types_pb2.Group] = bare_group
        """(ordinal, version that began it) -> what the trainer gets."""
        self.address = ""
        """Of the trainer that opened the run last."""
        self.restored = b""
        """Snapshot that a trainer brought back."""

    # ---- what tests do

    def evaluate(self, evaluation_id: str, step: int) -> None:
        """An evaluation of `step` has ended."""
        self.last_evaluation = pb.Evaluation(
            evaluation_id=evaluation_id,
            step=step,
            version_min=step,
            version_max=step,
            accuracy=0.5,
            metrics={"acc/mean@1": 0.5},
            outcome="complete",
        )
        self._emit("evaluation", evaluation=self.last_evaluation)

    def _emit(self, kind: str, **more: Any) -> str:
        self.events.append(pb.WatchEventsResponse(event_id=f"{len(self.events) + 1}-0", kind=kind, unix_s=1.0, **more))
        return self.events[-1].event_id

    def _enter(self, method: str, step: int, epoch: int | None) -> None:
        self.calls.append((method, step))
        self.on_call(method, step, "before")
        if epoch is not None and epoch != self.epoch:
            raise FencedError(f"trainer epoch {epoch} is older than {self.epoch}; another trainer took over this run; stop this one")

    # ---- RPCs

    async def OpenTrainer(self, request: pb.OpenTrainerRequest, context: Any) -> pb.OpenTrainerResponse:  # noqa: N802
        k, self.address = request.resume_step, request.address
        self._enter("OpenTrainer", k, None)
        if k < self.checkpointed and request.cut_id:
            return pb.OpenTrainerResponse(snapshot_needed=f"the store is at step {self.checkpointed}")
        if k < self.checkpointed:
            raise RefusedError(f"resume at {k}: the groups up to step {self.checkpointed} have left the store")
        reopened = [step for step in self.batches if step > k]
        for step in reopened:
            del self.batches[step]
            self.trained.pop(step, None)
        self.epoch = max(self.epoch, request.epoch_floor) + 1
        self.committed, self.first_versions[self.epoch] = k, k
        if k < self.total:
            self.phase = pb.RUN_PHASE_RUNNING
        event_id = self._emit("trainer_opened")
        self.on_call("OpenTrainer", k, "after")
        return pb.OpenTrainerResponse(trainer_epoch=self.epoch, event_id=event_id, num_reopened=len(reopened) * self.batch)

    async def SampleBatch(self, request: pb.SampleBatchRequest, context: Any) -> AsyncIterator[pb.SampleBatchResponse]:  # noqa: N802
        step = request.step
        self._enter("SampleBatch", step, request.trainer_epoch)
        if step != self.committed + 1:
            raise RefusedError(f"step {step} does not follow the committed step {self.committed}")
        end_s = time.monotonic() + request.wait_s
        while self.available < step * self.batch:
            if time.monotonic() > end_s:
                yield pb.SampleBatchResponse(wait_reason=f"step {step} waits for groups")
                return
            await asyncio.sleep(0.01)
        ordinals = self.batches.setdefault(step, list(range((step - 1) * self.batch, step * self.batch)))
        groups = [self.make_group(n, self.committed) for n in ordinals]
        for part in (groups[:1], groups[1:]):
            yield pb.SampleBatchResponse(groups=part, num_groups=len(groups))
        self.on_call("SampleBatch", step, "after")

    async def CommitStep(self, request: pb.CommitStepRequest, context: Any) -> pb.CommitStepResponse:  # noqa: N802
        step = request.step
        self._enter("CommitStep", step, request.trainer_epoch)
        if step == self.committed + 1:
            self.committed, self.trained[step], self.metrics[step] = step, self.batches[step], dict(request.metrics)
        elif step > self.committed:
            raise RefusedError(f"commit of step {step} does not follow {self.committed}")
        self.on_call("CommitStep", step, "after")
        return pb.CommitStepResponse()

    async def CommitCheckpoint(self, request: pb.CommitCheckpointRequest, context: Any) -> pb.CommitCheckpointResponse:  # noqa: N802
        step = request.step
        self._enter("CommitCheckpoint", step, request.trainer_epoch)
        if step > self.committed:
            raise RefusedError(f"checkpoint of step {step}, committed is {self.committed}")
        self.checkpointed = max(self.checkpointed, step)
        gone = [s for s in self.batches if s <= step]
        for s in gone:
            del self.batches[s]
        if step == self.total and self.phase == pb.RUN_PHASE_RUNNING:
            self.phase = pb.RUN_PHASE_FINISHING
        self.on_call("CommitCheckpoint", step, "after")
        return pb.CommitCheckpointResponse(num_removed=len(gone) * self.batch)

    async def SnapshotLedger(self, request: pb.SnapshotLedgerRequest, context: Any) -> AsyncIterator[pb.SnapshotLedgerResponse]:  # noqa: N802
        self._enter("SnapshotLedger", request.step, request.trainer_epoch)
        for part in (b"ledger after ", str(request.step).encode()):
            yield pb.SnapshotLedgerResponse(data=part)

    async def RestoreLedger(self, request_iterator: Any, context: Any) -> pb.RestoreLedgerResponse:  # noqa: N802
        async for request in request_iterator:
            self._enter("RestoreLedger", request.step, None)
            self.restored = request.data
            self.checkpointed = self.committed = request.step
        return pb.RestoreLedgerResponse()

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:  # noqa: N802
        self._enter("GetStatus", self.committed, None)
        return pb.GetStatusResponse(phase=self.phase, committed_step=self.committed, last_evaluation=self.last_evaluation)

    async def ExplainWait(self, request: pb.ExplainWaitRequest, context: Any) -> pb.ExplainWaitResponse:  # noqa: N802
        return pb.ExplainWaitResponse(reasons=["replica r3 was last heard 41 s ago"])

    async def WatchEvents(self, request: pb.WatchEventsRequest, context: Any) -> AsyncIterator[pb.WatchEventsResponse]:  # noqa: N802
        n = int(request.after_id.split("-")[0])
        self.num_watchers += 1
        while True:
            while n < len(self.events):
                yield self.events[n]
                n += 1
            await asyncio.sleep(0.01)


class FakeRelay(ws_grpc.WeightSyncServiceServicer):
    """Keeps the newest version, and the order in which versions came."""

    def __init__(self) -> None:
        self.newest: tuple[int, int] | None = None
        self.published: list[tuple[int, int]] = []
        self.weights: dict[tuple[int, int], bytes] = {}
        self.on_publish: Callable[[tuple[int, int], str], None] = lambda id, when: None
        self._incoming = b""

    def forget(self) -> None:
        """As after a restart."""
        self.newest = None

    async def PreparePublish(self, request: ws.PreparePublishRequest, context: Any) -> ws.PreparePublishResponse:  # noqa: N802
        id = (request.id.trainer_epoch, request.id.version)
        self.on_publish(id, "before")
        if self.newest is not None and id < self.newest:
            raise FencedError(f"{id} is older than {self.newest}")
        return ws.PreparePublishResponse(backend="grpc", slot_id="s")

    async def Publish(self, request_iterator: Any, context: Any) -> ws.PublishResponse:  # noqa: N802
        self._incoming = b""
        async for request in request_iterator:
            self._incoming += request.data
        return ws.PublishResponse(received_bytes=len(self._incoming))

    async def CommitPublish(self, request: ws.CommitPublishRequest, context: Any) -> ws.CommitPublishResponse:  # noqa: N802
        id = (request.manifest.id.trainer_epoch, request.manifest.id.version)
        self.newest, self.weights[id] = id, self._incoming
        self.published.append(id)
        self.on_publish(id, "after")
        return ws.CommitPublishResponse()

    async def GetStatus(self, request: ws.WeightSyncServiceGetStatusRequest, context: Any) -> ws.WeightSyncServiceGetStatusResponse:  # noqa: N802
        if self.newest is None:
            return ws.WeightSyncServiceGetStatusResponse()
        id = types_pb2.WeightsId(trainer_epoch=self.newest[0], version=self.newest[1])
        return ws.WeightSyncServiceGetStatusResponse(versions=[ws.VersionStatus(id=id, state=ws.VERSION_STATE_READY)])


# ------------------------------------------------------------------------------------------------------------ processes


def _child(overrides: dict[str, Any], make: Callable[[Recipe], Learner]) -> None:
    log = os.open(Path(overrides["run"]["folder"]) / "trainer.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    telemetry.setup("trainer")
    raise SystemExit(server.main(recipes.build(overrides), make))


@dataclass
class World:
    """Scheduler and relay on ports of their own, and trainers that dial them."""

    folder: Path
    scheduler: FakeScheduler
    relay: FakeRelay
    peers: dict[str, str]
    make_learner: Callable[[Recipe], Learner] = AddingLearner
    trainers: list[ForkServerProcess] = field(default_factory=list[ForkServerProcess])

    def tree(self, **trainer: Any) -> dict[str, Any]:
        """A recipe whose trainer section has these values."""
        trainer = {"steps": self.scheduler.total, "checkpoint_every_steps": 3, **trainer}
        model = {"path": str(self.folder / "base")}
        tree: dict[str, Any] = {
            "run": {"name": "t", "folder": str(self.folder)},
            "model": model,
            "data": {"train": "x"},
            "peers": self.peers,
        }
        return tree | {"scheduler": {"batch_groups": self.scheduler.batch}, "weightsync": {"backend": "auto"}, "trainer": trainer}

    def start(self, **trainer: Any) -> ForkServerProcess:
        """A trainer process. Forked from a server that has imported everything: a start costs milliseconds, not seconds."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "services.trainer.step"])
        process = context.Process(target=_child, args=(self.tree(**trainer), self.make_learner), daemon=True)
        process.start()
        self.trainers.append(process)
        return process

    def kill(self) -> None:
        """SIGKILL to the trainer that runs; safe to call from a handler that it waits for."""
        pid = self.trainers[-1].pid
        assert pid
        os.kill(pid, signal.SIGKILL)

    def lines(self, kind: str) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [r for r in records if r["kind"] == kind]

    def log(self) -> str:
        """What the trainers wrote to stderr."""
        return (self.folder / "trainer.log").read_text()

    def state(self, step: int) -> dict[str, Any]:
        return torch.load(self.folder / "checkpoints" / f"step-{step}" / "state.pt", weights_only=True)

    def trained_once(self) -> bool:
        """Whether commits and the last checkpoint both hold each group exactly once."""
        expected = Counter(range(self.scheduler.total * self.scheduler.batch))
        committed = Counter(n for batch in self.scheduler.trained.values() for n in batch)
        return committed == expected and Counter(self.state(self.scheduler.total)["seen"].tolist()) == expected

    @contextmanager
    def control(self) -> Iterator[trainer_pb2_grpc.TrainerServiceStub]:
        """A stub of the trainer that opened the run last."""
        with rpc.connect_blocking(self.scheduler.address) as channel:
            yield trainer_pb2_grpc.TrainerServiceStub(channel)


@contextmanager
def world(folder: Path, total: int, batch: int = 2) -> Iterator[World]:
    """Servers on a thread of their own; trainers still running at the end are killed."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    scheduler, relay = FakeScheduler(total, batch), FakeRelay()

    async def serve() -> list[rpc.Server]:
        return [
            await rpc.serve(
                "127.0.0.1:0", lambda s: pb_grpc.add_SchedulerServiceServicer_to_server(scheduler, s), ["stretto.v1.SchedulerService"]
            ),
            await rpc.serve(
                "127.0.0.1:0", lambda s: ws_grpc.add_WeightSyncServiceServicer_to_server(relay, s), ["stretto.v1.WeightSyncService"]
            ),
        ]

    servers = asyncio.run_coroutine_threadsafe(serve(), loop).result(WAIT_S)
    made = World(folder, scheduler, relay, {"scheduler": servers[0].address, "weightsync": servers[1].address})
    try:
        yield made
    finally:
        for process in made.trainers:
            process.kill()
            process.join(WAIT_S)
        for one in servers:
            asyncio.run_coroutine_threadsafe(one.drain(0.0), loop).result(WAIT_S)
        loop.call_soon_threadsafe(loop.stop)


def ended(process: ForkServerProcess) -> int | None:
    """Exit code, negative for a signal, once the process has ended."""
    process.join(WAIT_S)
    return process.exitcode
