"""The SDK: talk to a run from Python. Needs grpcio and protobuf only.

    with Client.local() as client:                      # the newest live run under ./runs; or Client("host:port")
        client.submit([UserPrompt("2 + 3 =", "5")])
        for event in client.events():                   # live, until the run is done
            ...
        client.evaluate().accuracy

`AsyncClient` is the same with `await` and `async for`. Every call has a deadline; errors are those of `stretto.errors`, the same
class as the service raised.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import grpc

from stretto import results, rpc, runs
from stretto.errors import DeadlineError, InvalidArgumentError, NotFoundError, StrettoError, UnavailableError
from stretto.results import (
    Checkpoint,
    Chunk,
    Evaluation,
    Event,
    Explanation,
    LedgerGroup,
    LedgerReport,
    Occupancy,
    Replica,
    Status,
    Trainer,
)
from stretto.v1 import rollout_pb2, rollout_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc, trainer_pb2, trainer_pb2_grpc, types_pb2

__all__ = [
    "AsyncClient",
    "Checkpoint",
    "Chunk",
    "Client",
    "Evaluation",
    "Event",
    "Explanation",
    "LedgerGroup",
    "LedgerReport",
    "Occupancy",
    "Replica",
    "Status",
    "Trainer",
    "UserPrompt",
]

T = TypeVar("T")
CALL_S = 10.0
"""Deadline of a call that answers at once."""
POLL_S = 20.0
"""How long one long poll is held open, seconds (the scheduler allows 30)."""
LEDGER_S = 120.0
"""Deadline of a call that reads the whole ledger."""
STREAM_S = 300.0
"""A watch is opened anew after this long: a stream without end has no deadline otherwise."""
DRAIN_S = 2.0
"""A watch that is opened on a run that is done brings what is left of the old events, then ends."""
OUTAGE_S = 60.0
"""How long a watch waits for a scheduler that restarts."""
REDIAL_S = 0.25
"""Between two tries to open a watch again."""
DONE = "DONE"
"""Text of the event of the last change of phase."""

_IDEMPOTENT = [
    f"{rpc.SCHEDULER}/{method}"
    for method in [
        "GetStatus",
        "ExplainWait",
        "VerifyLedger",
        "ReadLedger",
        "Pause",
        "Resume",
        "SetWindow",
        "GetEvaluation",
        "SubmitPrompts",
        "Evaluate",
    ]
]

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages ({"role": …, "content": …})."""


@dataclass(frozen=True, slots=True)
class UserPrompt:
    """A prompt of your own."""

    prompt: Prompt
    ground_truth: str
    """What the reward function compares with."""
    data_source: str = "user"
    """Metrics are grouped by it."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Handed to the reward function; must be JSON."""


# ------------------------------------------------------------------------------------------------------------ calls
# Both clients make the same calls; what a call sends and how its answer is read stands here once.


@dataclass(frozen=True, slots=True)
class _Call(Generic[T]):
    method: str
    request: Any
    read: Callable[[Any], T]
    timeout_s: float = CALL_S


def _failure(err: grpc.RpcError, address: str) -> StrettoError:
    """What the service raised; that it cannot be reached, with the address."""
    failure = rpc.from_rpc_error(err)
    return UnavailableError(f"{address} cannot be reached: {failure.message}") if type(failure) is UnavailableError else failure


def _nothing(_: object) -> None:
    return None


def _payload(prompt: Prompt) -> dict[str, Any]:
    """The one of text / messages_json / token_ids that `prompt` is."""
    if isinstance(prompt, str):
        return {"text": prompt}
    if prompt and all(isinstance(item, int) for item in prompt):
        return {"token_ids": results.pack("i", prompt)}
    if prompt and all(isinstance(item, Mapping) for item in prompt):
        return {"messages_json": json.dumps([dict(item) for item in prompt if isinstance(item, Mapping)])}
    raise InvalidArgumentError(f"a prompt is text, token ids or messages, not {prompt!r:.80}")


def _submit(prompts: Sequence[UserPrompt], operation_id: str | None) -> _Call[tuple[str, ...]]:
    sent = [
        scheduler_pb2.UserPrompt(
            **_payload(p.prompt),
            ground_truth=p.ground_truth,
            data_source=p.data_source,
            extra_json=json.dumps(dict(p.extra)) if p.extra else "",
        )
        for p in prompts
    ]
    request = scheduler_pb2.SubmitPromptsRequest(operation_id=operation_id or uuid.uuid4().hex, prompts=sent)
    return _Call("SubmitPrompts", request, lambda m: tuple(m.uids), 60.0)


def _evaluate(version: int | None, max_prompts: int) -> _Call[str]:
    request = scheduler_pb2.EvaluateRequest(operation_id=uuid.uuid4().hex, version=version, max_prompts=max_prompts)
    return _Call("Evaluate", request, lambda m: m.evaluation_id)


def _evaluation(evaluation_id: str, wait_s: float) -> _Call[Evaluation | None]:
    request = scheduler_pb2.GetEvaluationRequest(evaluation_id=evaluation_id, wait_s=wait_s)
    return _Call("GetEvaluation", request, lambda m: results.evaluation(m.evaluation) if m.done else None, CALL_S + wait_s)


def _status(begun_since: int | None) -> _Call[Status]:
    return _Call("GetStatus", scheduler_pb2.GetStatusRequest(begun_since=begun_since), results.status)


def _why() -> _Call[Explanation]:
    return _Call("ExplainWait", scheduler_pb2.ExplainWaitRequest(), results.explanation)


def _pause(reason: str) -> _Call[None]:
    return _Call("Pause", scheduler_pb2.PauseRequest(reason=reason), _nothing)


def _resume() -> _Call[None]:
    return _Call("Resume", scheduler_pb2.ResumeRequest(), _nothing)


def _set_window(window: int) -> _Call[Occupancy]:
    return _Call("SetWindow", scheduler_pb2.SetWindowRequest(window=window), lambda m: results.occupancy(m.occupancy))


def _verify() -> _Call[LedgerReport]:
    return _Call("VerifyLedger", scheduler_pb2.VerifyLedgerRequest(), results.ledger_report, LEDGER_S)


def _save() -> trainer_pb2.SaveCheckpointRequest:
    return trainer_pb2.SaveCheckpointRequest(operation_id=uuid.uuid4().hex)


def _generate(prompt: Prompt, settings: Mapping[str, float | int]) -> rollout_pb2.GenerateRequest:
    """`settings` are fields of SamplingParams; an unknown one is an InvalidArgumentError."""
    try:
        sampling = types_pb2.SamplingParams(**settings) if settings else None  # pyright: ignore[reportArgumentType]
    except (ValueError, TypeError) as err:
        raise InvalidArgumentError(f"sampling settings {dict(settings)}: {err}") from None
    return rollout_pb2.GenerateRequest(**_payload(prompt), sampling=sampling)


def _trainer_address(status: Status) -> str:
    if status.trainer is None or not status.trainer.address:
        raise NotFoundError(f"no trainer has opened run {status.run!r} yet")
    return status.trainer.address


def _replica_address(status: Status, replica_id: str | None) -> str:
    """Of the named replica, else of the least busy one that holds weights."""
    fit = [r for r in status.replicas if r.address and r.version is not None and r.state in ("running", "updating")]
    if replica_id is not None:
        fit = [r for r in status.replicas if r.replica_id == replica_id and r.address]
    if not fit:
        have = ", ".join(f"{r.replica_id} ({r.state})" for r in status.replicas) or "none"
        raise NotFoundError(f"no replica {'that can answer' if replica_id is None else repr(replica_id)}; the run has: {have}")
    return min(fit, key=lambda r: r.running_sequences).address


class _Watch:
    """Where a watch stands: what to ask for next, and whether a failure is waited out. Pure but for the clock given."""

    def __init__(self, after: str) -> None:
        self.after = after
        self.down_since_s: float | None = None

    def request(self) -> scheduler_pb2.WatchEventsRequest:
        return scheduler_pb2.WatchEventsRequest(after_id=self.after)

    def seen(self, message: scheduler_pb2.WatchEventsResponse) -> Event:
        self.after, self.down_since_s = message.event_id, None
        return results.event(message)

    def failed(self, err: StrettoError, now_s: float, hold_s: float) -> bool:
        """Whether the watch has ended; raises `err` when it cannot go on. `hold_s`: the time it was opened for."""
        if isinstance(err, DeadlineError):  # hold_s is over
            self.down_since_s = None
            return hold_s == DRAIN_S
        self.down_since_s = now_s if self.down_since_s is None else self.down_since_s
        if not isinstance(err, UnavailableError) or now_s - self.down_since_s > OUTAGE_S:
            raise err
        return False


# ------------------------------------------------------------------------------------------------------------ blocking


class Client:
    """A run, for code without an event loop. Thread-safe. Close it, or use it in a `with` statement."""

    def __init__(self, address: str) -> None:
        """`address`: host:port of the run's scheduler. Dials on the first call."""
        self.address = address
        self._channel = rpc.connect_blocking(address, service=rpc.SCHEDULER, idempotent=_IDEMPOTENT)
        self._stub = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        self._is_closed = False

    @classmethod
    def local(cls, folder: Path | str | None = None) -> Self:
        """The live run in `folder`; None: the newest one under ./runs. Raises NotFoundError."""
        return cls(runs.read(Path(folder) if folder is not None else runs.newest(Path("runs"))).scheduler)

    def close(self) -> None:
        """Ends every call in flight, watches included. Idempotent."""
        self._is_closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _do(self, call: _Call[T]) -> T:
        try:
            return call.read(getattr(self._stub, call.method)(call.request, timeout=call.timeout_s))
        except grpc.RpcError as err:
            raise _failure(err, self.address) from None

    def submit(self, prompts: Sequence[UserPrompt], *, operation_id: str | None = None) -> tuple[str, ...]:
        """Queue your own prompts for training, in order, between the dataset's. Returns their uids.

        They occupy the window like any other. Safe to repeat with the same `operation_id`: the first answer comes back.
        """
        return self._do(_submit(prompts, operation_id))

    def status(self, begun_since: int | None = None) -> Status:
        """The state of the run; `begun_since` = its occupancy counts only groups begun by that version or a newer one."""
        return self._do(_status(begun_since))

    def why(self) -> Explanation:
        """What the run waits for, by name."""
        return self._do(_why())

    def pause(self, reason: str = "asked by a user") -> None:
        """No new work is given out until `resume`; running work goes on."""
        self._do(_pause(reason))

    def resume(self) -> None:
        """Undoes `pause`."""
        self._do(_resume())

    def set_window(self, window: int) -> Occupancy:
        """Change how many prompts may be un-trained at once. Shrinking drops nothing."""
        return self._do(_set_window(window))

    def verify_ledger(self) -> LedgerReport:
        """Prove from the store that every prompt entered once and left once. Check `.ok`."""
        return self._do(_verify())

    def ledger(self, uid: str = "", *, open_only: bool = False) -> Generator[LedgerGroup, None, None]:
        """Where every prompt stands or ended: the dataset's by ordinal, then users', then validation's.

        `uid` (or an ordinal) = that one alone, with its answers as far as they are stored. Raises NotFoundError.
        """
        request = scheduler_pb2.ReadLedgerRequest(uid=uid, open_only=open_only)
        try:
            for part in self._stub.ReadLedger(request, timeout=LEDGER_S):
                yield from map(results.ledger_group, part.groups)
        except grpc.RpcError as err:
            raise _failure(err, self.address) from None

    def events(self, after: str = "") -> Generator[Event, None, None]:
        """Events after the one with that id ("0": from the oldest kept; "": new ones), live; ends when the run is done.

        Goes on over a restart of the scheduler without loss or repetition, once it has seen an event. Raises UnavailableError when the
        scheduler is away for a minute.
        """
        watch = _Watch(after)
        while True:
            hold_s = self._hold_s()
            try:
                for message in self._stub.WatchEvents(watch.request(), timeout=hold_s):
                    event = watch.seen(message)
                    yield event
                    if event.kind == "phase" and hold_s != DRAIN_S and self._is_done(event):
                        return
                if hold_s == DRAIN_S:
                    return
            except (grpc.RpcError, ValueError) as err:  # ValueError: the channel was closed
                if self._is_closed:
                    return
                if not isinstance(err, grpc.RpcError):
                    raise
                if watch.failed(_failure(err, self.address), time.monotonic(), hold_s):
                    return
            time.sleep(REDIAL_S)

    def _hold_s(self) -> float:
        """How long a watch that is opened now may last."""
        if self._is_closed:
            return DRAIN_S
        try:
            return DRAIN_S if self.status().is_done else STREAM_S
        except (UnavailableError, DeadlineError):
            return STREAM_S  # the watch itself meets the outage

    def _is_done(self, event: Event) -> bool:
        """Asked when the phase changed: that event may be an old one, from before the run was given more steps."""
        try:
            return self.status().is_done
        except (UnavailableError, DeadlineError):
            return event.text == DONE  # a run that is done takes its scheduler with it

    def start_evaluation(self, version: int | None = None, max_prompts: int = 0) -> str:
        """Begin a validation of `version` (None: the newest) on the first `max_prompts` held-out prompts (0: all). Its id."""
        return self._do(_evaluate(version, max_prompts))

    def evaluation(self, evaluation_id: str, wait_s: float = 0.0) -> Evaluation | None:
        """The outcome, or None when it still runs after `wait_s` (at most 30)."""
        return self._do(_evaluation(evaluation_id, wait_s))

    def evaluate(self, version: int | None = None, max_prompts: int = 0, *, deadline_s: float = 900.0) -> Evaluation:
        """`start_evaluation` and wait for it. Raises DeadlineError after `deadline_s`; the evaluation goes on."""
        evaluation_id, end_s = self.start_evaluation(version, max_prompts), time.monotonic() + deadline_s
        while (left_s := end_s - time.monotonic()) > 0:
            if (outcome := self.evaluation(evaluation_id, min(left_s, POLL_S))) is not None:
                return outcome
        raise DeadlineError(f"evaluation {evaluation_id} is not done after {deadline_s:g} s; ask evaluation({evaluation_id!r}) later")

    def generate(
        self, prompt: Prompt, *, replica_id: str | None = None, timeout_s: float = 60.0, **sampling: float | int
    ) -> Generator[Chunk, None, None]:
        """Stream an answer from a replica, sampled with the weights it holds now.

        `sampling`: temperature, top_p, top_k, max_new_tokens, seed; what is left out takes the recipe's values. Never trained.
        """
        request, target = _generate(prompt, sampling), _replica_address(self.status(), replica_id)
        with rpc.connect_blocking(target) as channel:
            try:
                for message in rollout_pb2_grpc.RolloutServiceStub(channel).Generate(request, timeout=timeout_s):
                    yield results.chunk(message)
            except grpc.RpcError as err:
                raise _failure(err, target) from None

    def save_checkpoint(self, *, timeout_s: float = 600.0) -> Checkpoint:
        """Save after the step in progress; returns when it is durable."""
        target = _trainer_address(self.status())
        with rpc.connect_blocking(target) as channel:
            try:
                return results.checkpoint(trainer_pb2_grpc.TrainerServiceStub(channel).SaveCheckpoint(_save(), timeout=timeout_s))
            except grpc.RpcError as err:
                raise _failure(err, target) from None


# ------------------------------------------------------------------------------------------------------------ asyncio


class AsyncClient:
    """`Client` for an event loop: the same methods with the same contracts. Make and close it inside the loop."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = rpc.connect(address, service=rpc.SCHEDULER, idempotent=_IDEMPOTENT)
        self._stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)

    @classmethod
    def local(cls, folder: Path | str | None = None) -> Self:
        """As Client.local."""
        return cls(runs.read(Path(folder) if folder is not None else runs.newest(Path("runs"))).scheduler)

    async def close(self) -> None:
        """As Client.close."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def _do(self, call: _Call[T]) -> T:
        try:
            return call.read(await getattr(self._stub, call.method)(call.request, timeout=call.timeout_s))
        except grpc.RpcError as err:
            raise _failure(err, self.address) from None

    async def submit(self, prompts: Sequence[UserPrompt], *, operation_id: str | None = None) -> tuple[str, ...]:
        """As Client.submit."""
        return await self._do(_submit(prompts, operation_id))

    async def status(self, begun_since: int | None = None) -> Status:
        """As Client.status."""
        return await self._do(_status(begun_since))

    async def why(self) -> Explanation:
        """As Client.why."""
        return await self._do(_why())

    async def pause(self, reason: str = "asked by a user") -> None:
        """As Client.pause."""
        await self._do(_pause(reason))

    async def resume(self) -> None:
        """As Client.resume."""
        await self._do(_resume())

    async def set_window(self, window: int) -> Occupancy:
        """As Client.set_window."""
        return await self._do(_set_window(window))

    async def verify_ledger(self) -> LedgerReport:
        """As Client.verify_ledger."""
        return await self._do(_verify())

    async def ledger(self, uid: str = "", *, open_only: bool = False) -> AsyncIterator[LedgerGroup]:
        """As Client.ledger."""
        request = scheduler_pb2.ReadLedgerRequest(uid=uid, open_only=open_only)
        try:
            async for part in self._stub.ReadLedger(request, timeout=LEDGER_S):
                for group in part.groups:
                    yield results.ledger_group(group)
        except grpc.RpcError as err:
            raise _failure(err, self.address) from None

    async def events(self, after: str = "") -> AsyncIterator[Event]:
        """As Client.events."""
        watch = _Watch(after)
        while True:
            hold_s = await self._hold_s()
            try:
                async for message in self._stub.WatchEvents(watch.request(), timeout=hold_s):
                    event = watch.seen(message)
                    yield event
                    if event.kind == "phase" and hold_s != DRAIN_S and await self._is_done(event):
                        return
                if hold_s == DRAIN_S:
                    return
            except grpc.RpcError as err:
                if watch.failed(_failure(err, self.address), time.monotonic(), hold_s):
                    return
            await asyncio.sleep(REDIAL_S)

    async def _hold_s(self) -> float:
        """As Client._hold_s."""
        try:
            return DRAIN_S if (await self.status()).is_done else STREAM_S
        except (UnavailableError, DeadlineError):
            return STREAM_S

    async def _is_done(self, event: Event) -> bool:
        """As Client._is_done."""
        try:
            return (await self.status()).is_done
        except (UnavailableError, DeadlineError):
            return event.text == DONE

    async def start_evaluation(self, version: int | None = None, max_prompts: int = 0) -> str:
        """As Client.start_evaluation."""
        return await self._do(_evaluate(version, max_prompts))

    async def evaluation(self, evaluation_id: str, wait_s: float = 0.0) -> Evaluation | None:
        """As Client.evaluation."""
        return await self._do(_evaluation(evaluation_id, wait_s))

    async def evaluate(self, version: int | None = None, max_prompts: int = 0, *, deadline_s: float = 900.0) -> Evaluation:
        """As Client.evaluate."""
        evaluation_id, end_s = await self.start_evaluation(version, max_prompts), time.monotonic() + deadline_s
        while (left_s := end_s - time.monotonic()) > 0:
            if (outcome := await self.evaluation(evaluation_id, min(left_s, POLL_S))) is not None:
                return outcome
        raise DeadlineError(f"evaluation {evaluation_id} is not done after {deadline_s:g} s; ask evaluation({evaluation_id!r}) later")

    async def generate(
        self, prompt: Prompt, *, replica_id: str | None = None, timeout_s: float = 60.0, **sampling: float | int
    ) -> AsyncIterator[Chunk]:
        """As Client.generate."""
        request, target = _generate(prompt, sampling), _replica_address(await self.status(), replica_id)
        async with rpc.connect(target) as channel:
            stub: Any = rollout_pb2_grpc.RolloutServiceStub(channel)
            try:
                async for message in stub.Generate(request, timeout=timeout_s):
                    yield results.chunk(message)
            except grpc.RpcError as err:
                raise _failure(err, target) from None

    async def save_checkpoint(self, *, timeout_s: float = 600.0) -> Checkpoint:
        """As Client.save_checkpoint."""
        target = _trainer_address(await self.status())
        async with rpc.connect(target) as channel:
            stub: Any = trainer_pb2_grpc.TrainerServiceStub(channel)
            try:
                return results.checkpoint(await stub.SaveCheckpoint(_save(), timeout=timeout_s))
            except grpc.RpcError as err:
                raise _failure(err, target) from None
