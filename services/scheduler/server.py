"""The RPC face of the scheduler: check, call, answer. What each method promises stands in scheduler.proto."""

from __future__ import annotations

import functools
import itertools
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from services.scheduler import metrics, payloads
from services.scheduler.controller import Controller, Lease
from services.scheduler.groups import Weights
from services.scheduler.ledger import Event, TrajectoryEnd
from stretto.errors import InvalidArgumentError
from stretto.v1 import scheduler_pb2 as spb
from stretto.v1 import types_pb2 as pb
from stretto.v1.scheduler_pb2_grpc import SchedulerServiceServicer

BATCH_PART_BYTES = 1 << 20
"""A message of SampleBatch is closed at this size: few messages a batch, and each far below the limit of gRPC."""
LEDGER_PART_GROUPS = 500
"""In a message of ReadLedger."""
WATCH_S = 30.0
"""A quiet watcher looks again after this long."""
_EVENT_ID = re.compile(r"\d+(-\d+)?")


def _timed(method: Callable[..., Any]) -> Callable[..., Any]:
    seconds = metrics.RPC_S.labels(method.__name__)

    @functools.wraps(method)
    async def timed(self: SchedulerServicer, request: Any, context: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return await method(self, request, context)
        finally:
            seconds.observe(time.perf_counter() - began_s)

    return timed


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise InvalidArgumentError(f"{name} = {value:g} must be at least {least:g}")


class SchedulerServicer(SchedulerServiceServicer):
    """All methods of SchedulerService, named as in the proto, on one controller."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    # ---------------------------------------------------------------------------------------------------- rollout

    @_timed
    async def LeasePrompts(self, request: spb.LeasePromptsRequest, context: Any) -> spb.LeasePromptsResponse:  # noqa: N802
        _at_least("max_prompts", request.max_prompts, 1)
        _at_least("wait_s", request.wait_s, 0)
        leases, reason = await self._controller.lease(
            request.replica_id,
            request.replica_epoch,
            Weights(request.held.trainer_epoch, request.held.version),
            wanted=request.max_prompts,
            wait_s=request.wait_s,
            operation_id=request.operation_id,
        )
        lease_s = self._controller.recipe.scheduler.lease_s
        return spb.LeasePromptsResponse(leases=[_lease(one, lease_s) for one in leases], wait_reason=reason)

    @_timed
    async def ReportTrajectories(self, request: spb.ReportTrajectoriesRequest, context: Any) -> spb.ReportTrajectoriesResponse:  # noqa: N802
        groups: dict[tuple[str, int], list[TrajectoryEnd]] = {}
        for report in request.reports:
            groups.setdefault((report.trajectory.prompt_uid, report.attempt), []).append(_end(report.trajectory))
        done = await self._controller.report(request.replica_id, request.replica_epoch, groups)
        return spb.ReportTrajectoriesResponse(lost_uids=done.lost)

    @_timed
    async def ReturnLeases(self, request: spb.ReturnLeasesRequest, context: Any) -> spb.ReturnLeasesResponse:  # noqa: N802
        await self._controller.return_leases(request)
        return spb.ReturnLeasesResponse()

    @_timed
    async def Heartbeat(self, request: spb.HeartbeatRequest, context: Any) -> spb.HeartbeatResponse:  # noqa: N802
        return await self._controller.heartbeat(request)

    # ---------------------------------------------------------------------------------------------------- trainer

    @_timed
    async def OpenTrainer(self, request: spb.OpenTrainerRequest, context: Any) -> spb.OpenTrainerResponse:  # noqa: N802
        opened = await self._controller.open_trainer(request)
        return spb.OpenTrainerResponse(
            trainer_epoch=opened.epoch, event_id=opened.event_id, num_reopened=opened.reopened, snapshot_needed=opened.snapshot_needed
        )

    async def SnapshotLedger(self, request: spb.SnapshotLedgerRequest, context: Any) -> AsyncIterator[spb.SnapshotLedgerResponse]:  # noqa: N802
        data = await self._controller.snapshot(request.trainer_epoch, request.step)
        for begin in range(0, len(data), BATCH_PART_BYTES):
            yield spb.SnapshotLedgerResponse(data=data[begin : begin + BATCH_PART_BYTES])

    async def RestoreLedger(self, request_iterator: AsyncIterator[spb.RestoreLedgerRequest], context: Any) -> spb.RestoreLedgerResponse:  # noqa: N802
        first, data = spb.RestoreLedgerRequest(), bytearray()
        async for request in request_iterator:
            first = request if not data else first
            data += request.data
        return await self._controller.restore(first, bytes(data))

    async def SampleBatch(self, request: spb.SampleBatchRequest, context: Any) -> AsyncIterator[spb.SampleBatchResponse]:  # noqa: N802
        _at_least("wait_s", request.wait_s, 0)
        groups, reason = await self._controller.sample(request.trainer_epoch, request.step, request.wait_s)
        for part in _parts(groups):
            yield spb.SampleBatchResponse(groups=part, num_groups=len(groups))
        if not groups:
            yield spb.SampleBatchResponse(wait_reason=reason)

    @_timed
    async def CommitStep(self, request: spb.CommitStepRequest, context: Any) -> spb.CommitStepResponse:  # noqa: N802
        await self._controller.commit_step(request.trainer_epoch, request.step, request.metrics)
        return spb.CommitStepResponse()

    @_timed
    async def CommitCheckpoint(self, request: spb.CommitCheckpointRequest, context: Any) -> spb.CommitCheckpointResponse:  # noqa: N802
        removed = await self._controller.commit_checkpoint(request.trainer_epoch, request.step, request.path, request.cut_id)
        return spb.CommitCheckpointResponse(num_removed=removed)

    # ---------------------------------------------------------------------------------------------------- users

    @_timed
    async def SubmitPrompts(self, request: spb.SubmitPromptsRequest, context: Any) -> spb.SubmitPromptsResponse:  # noqa: N802
        if not request.prompts:
            raise InvalidArgumentError("prompts is empty")
        return spb.SubmitPromptsResponse(uids=await self._controller.submit(request.prompts, request.operation_id))

    @_timed
    async def Evaluate(self, request: spb.EvaluateRequest, context: Any) -> spb.EvaluateResponse:  # noqa: N802
        _at_least("max_prompts", request.max_prompts, 0)
        version = request.version if request.HasField("version") else None
        evaluation_id = await self._controller.evaluate(version, request.max_prompts, request.operation_id)
        return spb.EvaluateResponse(evaluation_id=evaluation_id)

    @_timed
    async def GetEvaluation(self, request: spb.GetEvaluationRequest, context: Any) -> spb.GetEvaluationResponse:  # noqa: N802
        _at_least("wait_s", request.wait_s, 0)
        result = await self._controller.get_evaluation(request.evaluation_id, request.wait_s)
        return spb.GetEvaluationResponse(done=result is not None, evaluation=result)

    @_timed
    async def Pause(self, request: spb.PauseRequest, context: Any) -> spb.PauseResponse:  # noqa: N802
        await self._controller.pause(request.reason)
        return spb.PauseResponse()

    @_timed
    async def Resume(self, request: spb.ResumeRequest, context: Any) -> spb.ResumeResponse:  # noqa: N802
        await self._controller.resume()
        return spb.ResumeResponse()

    @_timed
    async def SetWindow(self, request: spb.SetWindowRequest, context: Any) -> spb.SetWindowResponse:  # noqa: N802
        return spb.SetWindowResponse(occupancy=await self._controller.set_window(request.window))

    @_timed
    async def GetStatus(self, request: spb.GetStatusRequest, context: Any) -> spb.GetStatusResponse:  # noqa: N802
        return await self._controller.status(request.begun_since if request.HasField("begun_since") else None)

    @_timed
    async def ExplainWait(self, request: spb.ExplainWaitRequest, context: Any) -> spb.ExplainWaitResponse:  # noqa: N802
        return spb.ExplainWaitResponse(reasons=await self._controller.explain(), is_moving=await self._controller.is_moving())

    async def WatchEvents(self, request: spb.WatchEventsRequest, context: Any) -> AsyncIterator[spb.WatchEventsResponse]:  # noqa: N802
        if request.after_id and not _EVENT_ID.fullmatch(request.after_id):
            raise InvalidArgumentError(f"after_id = {request.after_id!r} is no event id: use one of an event, 0, or nothing")
        ledger, changes = self._controller.ledger, self._controller.events
        last_id = request.after_id or await ledger.newest_event()
        while True:
            seen = changes.count
            events = await ledger.events_after(last_id)
            for event in events:
                last_id = event.id
                yield _event(event)
            if not events:
                await changes.after(seen, WATCH_S)

    @_timed
    async def VerifyLedger(self, request: spb.VerifyLedgerRequest, context: Any) -> spb.VerifyLedgerResponse:  # noqa: N802
        return await self._controller.verify()

    async def ReadLedger(self, request: spb.ReadLedgerRequest, context: Any) -> AsyncIterator[spb.ReadLedgerResponse]:  # noqa: N802
        groups = await self._controller.read_ledger(request.uid, open_only=request.open_only)
        while part := list(itertools.islice(groups, LEDGER_PART_GROUPS)):
            yield spb.ReadLedgerResponse(groups=part)


def _parts(groups: Sequence[pb.Group]) -> Iterator[list[pb.Group]]:
    """Whole groups in their order, split where BATCH_PART_BYTES are reached."""
    part: list[pb.Group] = []
    num_bytes = 0
    for group in groups:
        part.append(group)
        num_bytes += group.ByteSize()
        if num_bytes >= BATCH_PART_BYTES:
            yield part
            part, num_bytes = [], 0
    if part:
        yield part


def _lease(lease: Lease, lease_s: float) -> spb.Lease:
    made = spb.Lease(
        attempt=lease.grant.attempt,
        version_begin=lease.grant.version_begin,
        lease_s=lease_s,
        missing=lease.grant.missing,
        pin_version=lease.is_validation,
    )
    made.prompt.ParseFromString(lease.payload)
    for blob in lease.partials:
        made.partials.add().ParseFromString(blob)
    return made


def _end(trajectory: pb.Trajectory) -> TrajectoryEnd:
    """A reported trajectory; a session without a usable end counts as failed."""
    if trajectory.finish_reason not in (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_FAILED):
        raise InvalidArgumentError(
            f"{trajectory.prompt_uid}/{trajectory.index}: finish_reason {trajectory.finish_reason} is no end; partial answers go back with "
            "ReturnLeases"
        )
    _at_least("index", trajectory.index, 0)
    if trajectory.finish_reason != pb.FINISH_REASON_FAILED and (flaw := payloads.flaw(trajectory)):
        trajectory.error, trajectory.finish_reason = flaw, pb.FINISH_REASON_FAILED
    failed = trajectory.finish_reason == pb.FINISH_REASON_FAILED
    return TrajectoryEnd(
        index=trajectory.index,
        reward=0.0 if failed else trajectory.reward,
        error=(trajectory.error or "session failed")[:500] if failed else "",
        blob=trajectory.SerializeToString(),
        tokens=len(trajectory.token_ids) // 4,
        version=min((span.version for span in trajectory.spans), default=None),
    )


def _event(event: Event) -> spb.WatchEventsResponse:
    made = spb.WatchEventsResponse(
        event_id=event.id, kind=event.kind, unix_s=event.unix_s, text=event.text, values=event.values, labels=event.labels
    )
    if event.blob:
        made.evaluation.ParseFromString(event.blob)
    return made
