"""What the SDK answers with: frozen dataclasses, and how each is read from its message.

Fields have the names, units and ranges of the messages in protos/stretto/v1/scheduler.proto; maps become dicts, repeated
fields tuples, enums lower-case words ("running"), unset messages None.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from stretto.v1 import ledger_pb2, rollout_pb2, scheduler_pb2, trainer_pb2, types_pb2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Prompts by state; `occupied` = everything not yet trained."""

    window: int
    occupied: int
    pending: int
    running: int
    finished: int
    failed: int
    consumed: int
    committed: int


@dataclass(frozen=True, slots=True)
class Replica:
    """One rollout replica as the scheduler sees it."""

    replica_id: str
    state: str
    """starting, waiting_for_weights, running, updating, draining, asleep, dead."""
    version: int | None
    """Policy version it holds; None before its first."""
    address: str
    slots: int
    running_sequences: int
    num_leases: int
    generated_tokens: int
    tokens_per_s: float
    busy_share: float
    last_heard_s: float
    num_weight_updates: int
    update_stall_ms: float


@dataclass(frozen=True, slots=True)
class Trainer:
    """The trainer as the scheduler sees it."""

    trainer_epoch: int
    address: str
    last_heard_s: float
    metrics: Mapping[str, float]
    """Of the newest committed step."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One validation. A session that failed counts as wrong."""

    evaluation_id: str
    version_min: int
    version_max: int
    step: int
    metrics: Mapping[str, float]
    num_sessions: int
    num_failed: int
    accuracy: float
    wall_s: float
    outcome: str
    """"complete", or "cut: …"."""


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a run."""

    run: str
    phase: str
    """starting, running, paused, finishing, done."""
    total_steps: int
    committed_step: int
    """Newest committed step = newest published version."""
    checkpoint_step: int
    occupancy: Occupancy
    max_lag: int
    batch_groups: int
    lag_trained_max: int
    replicas: tuple[Replica, ...]
    trainer: Trainer | None
    last_evaluation: Evaluation | None
    cursor: int
    dataset_size: int
    num_evicted: int
    num_failed: int
    num_reissued: int
    pause_reason: str
    num_trajectories: int
    num_tokens: int
    """Sampled in those trajectories."""
    cut_id: str
    """The cut a restart resumes from: its newest durable checkpoint; "" before the first."""
    completions_per_s: float

    @property
    def is_done(self) -> bool:
        return self.phase == "done"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why is nothing moving."""

    reasons: tuple[str, ...]
    """Most important first."""
    is_moving: bool


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in the run."""

    event_id: str
    kind: str
    """step, checkpoint, evaluation, evicted, failed, reissued, replica_joined, replica_left, trainer_opened, paused, resumed, phase."""
    unix_s: float
    text: str
    values: Mapping[str, float]
    labels: Mapping[str, str]
    evaluation: Evaluation | None


@dataclass(frozen=True, slots=True)
class LedgerReport:
    """The proof, from the store, that no prompt was lost or trained twice."""

    ok: bool
    violations: tuple[str, ...]
    ordinals_entered: int
    ordinals_trained: int
    ordinals_evicted: int
    ordinals_open: int
    duplicates: int
    gaps: int
    evicted_by_reason: Mapping[str, int]
    occupancy: Occupancy
    user_entered: int
    user_trained: int
    user_evicted: int
    lag_trained_max: int
    max_lag: int
    """The recipe's bound on it."""
    committed_step: int
    checkpoint_step: int
    checked: tuple[str, ...]
    """The invariants looked at: "I1", "I2", …"""
    notes: tuple[str, ...]
    """What is no violation but should be known."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A stored answer of a group; `finish_reason` "aborted" = a partial one, to be continued."""

    index: int
    finish_reason: str
    num_tokens: int
    spans: tuple[tuple[int, int], ...]
    """(policy version, number of tokens) in order."""
    reward: float
    error: str
    generation_s: float
    replica_id: str


@dataclass(frozen=True, slots=True)
class LedgerGroup:
    """One prompt's place in the ledger, and what is known of its life."""

    uid: str
    ordinal: int
    """-1 for a user's prompt and for validation."""
    state: str
    """queued, pending, running, finished, failed, consumed, trained or evicted."""
    step: int | None
    """The step that took it."""
    version_begin: int | None
    attempts: int | None
    """Leases so far; None once it has left the store."""
    reason: str
    """Why it was evicted, or why its newest attempt failed."""
    replica: str
    """Who holds it, while it is running."""
    granted_unix_s: float | None
    """Of its newest lease."""
    num_in: int
    group_size: int
    evaluation: str
    text: str = ""
    """The prompt, where one group was asked for that is still stored."""
    ground_truth: str = ""
    answers: tuple[Answer, ...] = ()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A durable checkpoint."""

    step: int
    path: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of an answer that is being generated."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """One per token, natural log."""
    spans: tuple[tuple[int, int], ...]
    """(policy version, number of tokens) in order."""
    finish_reason: str
    """Empty but on the last chunk: stop, length, aborted, failed."""


# ------------------------------------------------------------------------------------------------------------ reading


def _read(cls: type[T], message: Any, **made: Any) -> T:
    """A `cls` with the message's fields of the same names; `made` are those that need more than a copy."""
    return cls(**{f.name: made[f.name] if f.name in made else getattr(message, f.name) for f in fields(cls)})  # pyright: ignore[reportArgumentType]


def _word(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower()


def occupancy(m: scheduler_pb2.Occupancy) -> Occupancy:
    return _read(Occupancy, m)


def replica(m: scheduler_pb2.ReplicaStatus) -> Replica:
    state = _word(scheduler_pb2.ReplicaState.Name(m.state), "REPLICA_STATE_")
    return _read(Replica, m, state=state, version=m.held.version if m.held.trainer_epoch else None)


def evaluation(m: scheduler_pb2.Evaluation) -> Evaluation:
    return _read(Evaluation, m, metrics=dict(m.metrics))


def status(m: scheduler_pb2.GetStatusResponse) -> Status:
    return _read(
        Status,
        m,
        phase=_word(scheduler_pb2.RunPhase.Name(m.phase), "RUN_PHASE_"),
        occupancy=occupancy(m.occupancy),
        replicas=tuple(map(replica, m.replicas)),
        trainer=_read(Trainer, m.trainer, metrics=dict(m.trainer.metrics)) if m.HasField("trainer") else None,
        last_evaluation=evaluation(m.last_evaluation) if m.HasField("last_evaluation") else None,
    )


def explanation(m: scheduler_pb2.ExplainWaitResponse) -> Explanation:
    return _read(Explanation, m, reasons=tuple(m.reasons))


def event(m: scheduler_pb2.WatchEventsResponse) -> Event:
    judged = evaluation(m.evaluation) if m.HasField("evaluation") else None
    return _read(Event, m, values=dict(m.values), labels=dict(m.labels), evaluation=judged)


def ledger_report(m: scheduler_pb2.VerifyLedgerResponse) -> LedgerReport:
    made: dict[str, Any] = {name: tuple(getattr(m, name)) for name in ("violations", "checked", "notes")}
    return _read(LedgerReport, m, evicted_by_reason=dict(m.evicted_by_reason), occupancy=occupancy(m.occupancy), **made)


def ledger_group(m: ledger_pb2.LedgerGroup) -> LedgerGroup:
    optional = {name: getattr(m, name) if m.HasField(name) else None for name in ("step", "version_begin", "attempts", "granted_unix_s")}
    answers = tuple(map(answer, m.trajectories))
    return _read(LedgerGroup, m, text=m.prompt.text, ground_truth=m.prompt.ground_truth, answers=answers, **optional)


def answer(m: types_pb2.Trajectory) -> Answer:
    spans = tuple((s.version, s.num_tokens) for s in m.spans)
    finish = _word(types_pb2.FinishReason.Name(m.finish_reason), "FINISH_REASON_")
    return _read(Answer, m, finish_reason=finish, num_tokens=len(m.token_ids) // 4, spans=spans)


def checkpoint(m: trainer_pb2.SaveCheckpointResponse) -> Checkpoint:
    return _read(Checkpoint, m)


def chunk(m: rollout_pb2.GenerateResponse) -> Chunk:
    finish = _word(types_pb2.FinishReason.Name(m.finish_reason), "FINISH_REASON_") if m.finish_reason else ""
    return Chunk(
        m.text,
        tuple(unpack("i", m.token_ids)),
        tuple(unpack("f", m.logprobs)),
        tuple((s.version, s.num_tokens) for s in m.spans),
        finish,
    )


def unpack(code: str, data: bytes) -> array[Any]:
    """Numbers of packed little-endian bytes: "i" int32, "f" float32."""
    numbers: array[Any] = array(code, data)
    _to_little_endian(numbers)
    return numbers


def pack(code: str, values: Any) -> bytes:
    """`unpack`, back."""
    numbers: array[Any] = array(code, values)
    _to_little_endian(numbers)
    return numbers.tobytes()


def _to_little_endian(numbers: array[Any]) -> None:
    if sys.byteorder == "big":
        numbers.byteswap()
