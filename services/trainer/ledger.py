"""The scheduler as the loop sees it: one writer of steps, which repeats until it is heard.

    call                repeated while the scheduler is away     why a repeat is safe
    open                yes                                      one operation id
    snapshot            yes                                      it only reads
    restore             yes                                      one operation id
    sample              by the loop, round by round              the same step gets the same batch
    commit_step         yes                                      keyed by (trainer epoch, step)
    commit_checkpoint   yes                                      keyed by step

All waits end at a deadline, or at once when the process is asked to stop.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import grpc

from stretto import rpc
from stretto.errors import StrettoError, UnavailableError
from stretto.v1 import scheduler_pb2 as pb
from stretto.v1 import scheduler_pb2_grpc as pb_grpc
from stretto.v1.types_pb2 import Group

T = TypeVar("T")

CALL_S = 10.0
"""Deadline of one attempt of a small call."""
PART_BYTES = 1 << 20
"""Of a snapshot, in one message."""
BATCH_S = 60.0
"""Deadline of a batch on the wire, over the time it is waited for."""


class Ledger:
    """Calls of one trainer incarnation. `sleep` may raise to end a wait early."""

    def __init__(self, target: str, deadline_s: float, sleep: Callable[[float], object]) -> None:
        """`deadline_s` bounds how long a scheduler may be away."""
        self._channel = rpc.connect_blocking(target, service=rpc.SCHEDULER)
        self.stub = pb_grpc.SchedulerServiceStub(self._channel)
        self._deadline_s, self._sleep = deadline_s, sleep
        self.epoch = 0
        """Our fencing number; 0 before `open`."""

    def open(
        self, resume_step: int, address: str, total_steps: int, batch_groups: int, *, cut_id: str, cut_epoch: int, epoch_floor: int
    ) -> pb.OpenTrainerResponse:
        """Take over the run after `resume_step`, unless the answer says that the ledger must be restored first.

        Raises RefusedError when the store holds another history.
        """
        request = pb.OpenTrainerRequest(
            operation_id=uuid.uuid4().hex,
            resume_step=resume_step,
            address=address,
            total_steps=total_steps,
            batch_groups=batch_groups,
            cut_id=cut_id,
            cut_trainer_epoch=cut_epoch,
            epoch_floor=epoch_floor,
        )
        answer = self._until_heard("OpenTrainer", lambda: self.stub.OpenTrainer(request, timeout=CALL_S))
        self.epoch = answer.trainer_epoch
        return answer

    def sample(self, step: int, wait_s: float) -> tuple[Sequence[Group], str]:
        """(the whole batch of `step`, ""), or ([], why there is none yet) after about `wait_s`. Raises what the scheduler raises."""
        request = pb.SampleBatchRequest(trainer_epoch=self.epoch, step=step, wait_s=wait_s)
        groups, expected, reason = list[Group](), 0, ""
        try:
            for message in self.stub.SampleBatch(request, timeout=wait_s + BATCH_S):
                expected, reason = message.num_groups, message.wait_reason
                groups.extend(message.groups)
        except grpc.RpcError as err:
            raise rpc.from_rpc_error(err) from err
        if groups and len(groups) != expected:
            raise UnavailableError(f"the batch of step {step} ended after {len(groups)} of {expected} groups")
        return groups, "" if groups else reason or f"step {step} has no batch yet"

    def commit_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """The step counts from now on."""
        request = pb.CommitStepRequest(trainer_epoch=self.epoch, step=step, metrics=metrics)
        self._until_heard(f"CommitStep {step}", lambda: self.stub.CommitStep(request, timeout=CALL_S))

    def snapshot(self, step: int) -> bytes:
        """The whole ledger between `step` and the next, as a checkpoint keeps it."""
        request = pb.SnapshotLedgerRequest(trainer_epoch=self.epoch, step=step)
        return self._until_heard(
            f"SnapshotLedger {step}", lambda: b"".join(part.data for part in self.stub.SnapshotLedger(request, timeout=BATCH_S))
        )

    def restore(self, step: int, cut_id: str, snapshot: bytes) -> pb.RestoreLedgerResponse:
        """Put the ledger back to that cut, as the answer to `open` asked.

        Raises RefusedError when the store can be continued as it is, FencedError when another trainer opened it since.
        """
        operation_id = uuid.uuid4().hex

        def parts() -> Iterator[pb.RestoreLedgerRequest]:
            for begin in range(0, max(1, len(snapshot)), PART_BYTES):
                yield pb.RestoreLedgerRequest(
                    operation_id=operation_id,
                    cut_id=cut_id,
                    step=step,
                    trainer_epoch=self.epoch,
                    data=snapshot[begin : begin + PART_BYTES],
                )

        return self._until_heard(f"RestoreLedger {cut_id}", lambda: self.stub.RestoreLedger(parts(), timeout=BATCH_S))

    def commit_checkpoint(self, step: int, path: str, cut_id: str) -> int:
        """Groups of steps <= step may leave the store. Returns how many did."""
        request = pb.CommitCheckpointRequest(trainer_epoch=self.epoch, step=step, path=path, cut_id=cut_id)
        return self._until_heard(f"CommitCheckpoint {step}", lambda: self.stub.CommitCheckpoint(request, timeout=CALL_S)).num_removed

    def status(self) -> pb.GetStatusResponse:
        """One attempt. Raises UnavailableError or DeadlineError when the scheduler is away."""
        try:
            return self.stub.GetStatus(pb.GetStatusRequest(), timeout=CALL_S)
        except grpc.RpcError as err:
            raise rpc.from_rpc_error(err) from err

    def wait_status(self) -> pb.GetStatusResponse:
        """The scheduler's status, as soon as it is there."""
        return self._until_heard("GetStatus", lambda: self.stub.GetStatus(pb.GetStatusRequest(), timeout=CALL_S))

    def explain(self) -> str:
        """What blocks the run, in the scheduler's words, or why it cannot say. Never raises a StrettoError."""
        try:
            answer = self.stub.ExplainWait(pb.ExplainWaitRequest(), timeout=CALL_S)
        except grpc.RpcError as raised:
            err: StrettoError = rpc.from_rpc_error(raised)
            return f"the scheduler does not answer: {err.message}"
        return "; ".join(answer.reasons) or "the scheduler names no blocker"

    def close(self) -> None:
        self._channel.close()

    def _until_heard(self, what: str, call: Callable[[], T]) -> T:
        return rpc.retry_blocking(call, deadline_s=self._deadline_s, what=f"{what} at the scheduler", sleep=self._sleep)
