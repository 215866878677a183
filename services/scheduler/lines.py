"""What `stretto ledger verify | show | export` say, from a snapshot: the proof, and a line per prompt. Pure."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping

from google.protobuf.message import DecodeError

from services.scheduler import audit
from services.scheduler.audit import Snapshot
from services.scheduler.groups import NOT_BEGUN, OPEN_STATES, Entry, Kind, State
from stretto.v1 import scheduler_pb2 as spb
from stretto.v1 import types_pb2 as pb
from stretto.v1.ledger_pb2 import LedgerGroup


def report(s: Snapshot, max_lag: int) -> spb.VerifyLedgerResponse:
    """The proof. `max_lag` = the recipe's bound."""
    verdict = audit.verify(s, max_lag)
    sizes = Counter(e.state.value for e in s.entries if e.kind is not Kind.VALIDATION)
    sizes[State.COMMITTED.value] = len(s.committed)
    occupied = sum(sizes[state] for state in OPEN_STATES)
    return spb.VerifyLedgerResponse(
        ok=verdict.ok,
        violations=verdict.violations,
        ordinals_entered=verdict.entered,
        ordinals_trained=verdict.trained,
        ordinals_evicted=verdict.evicted,
        ordinals_open=verdict.open,
        duplicates=verdict.duplicates,
        gaps=verdict.gaps,
        evicted_by_reason=verdict.evicted_by_reason,
        occupancy=spb.Occupancy(window=s.run.window, occupied=occupied, **{state.value: sizes[state.value] for state in State}),
        user_entered=s.run.user_next - s.run.user_queued,
        user_trained=verdict.user_trained,
        user_evicted=verdict.user_evicted,
        lag_trained_max=verdict.lag_max,
        max_lag=max_lag,
        committed_step=s.run.committed,
        checkpoint_step=s.run.checkpoint,
        checked=verdict.checked,
        notes=verdict.notes,
    )


def lines(s: Snapshot, *, open_only: bool = False) -> Iterator[LedgerGroup]:
    """One per prompt: the dataset's by ordinal, then users', then validation's."""
    entries = {e.uid: e for e in (*s.entries, *s.committed)}
    steps = {} if open_only else {uid: step for step, uids in s.steps.items() for uid in uids}
    evicted = {} if open_only else s.evicted
    known = [uid for uid, e in entries.items() if not (open_only and e.state is State.COMMITTED)]
    for uid in sorted({*known, *steps, *evicted, *s.queue}, key=_order):
        yield line(s, uid, entries.get(uid), steps.get(uid))


def line(s: Snapshot, uid: str, entry: Entry | None, step: int | None) -> LedgerGroup:
    """Of a prompt that is in the snapshot. `step` trained it; None = it was not trained."""
    made = LedgerGroup(uid=uid, ordinal=int(uid[1:]) if uid.startswith("d") else -1)
    if entry is not None:
        made.state, made.attempts, made.group_size = entry.state.value, entry.attempt, entry.group_size
        made.num_in, made.reason, made.evaluation = entry.marks.count("1"), entry.reason, entry.evaluation
        if entry.state is State.RUNNING:
            made.replica = entry.replica
        if entry.granted_ms:
            made.granted_unix_s = entry.granted_ms / 1000
        if entry.step:
            made.step = entry.step
        if entry.version_begin != NOT_BEGUN:
            made.version_begin = entry.version_begin
    if step is not None:
        made.state, made.step = "trained", step
        if uid in s.begins:
            made.version_begin = s.begins[uid]
    elif uid in s.evicted:
        made.state, made.reason = "evicted", s.evicted[uid]
    elif entry is None:
        made.state = "queued"
    return made


def find(s: Snapshot, uid: str) -> LedgerGroup | None:
    """The line of one prompt, named by its uid or its ordinal; None when it never entered."""
    uid = f"d{uid}" if uid.isdecimal() else uid
    entry = next((e for e in (*s.entries, *s.committed) if e.uid == uid), None)
    step = next((step for step, uids in s.steps.items() if uid in uids), None)
    is_known = entry is not None or step is not None or uid in s.evicted or uid in s.queue
    return line(s, uid, entry, step) if is_known else None


def fill(group: LedgerGroup, prompt: bytes | None, answers: Mapping[str, bytes]) -> LedgerGroup:
    """Adds what is stored of a group's payload; what does not parse is left out (`ledger verify` names it)."""
    if prompt is not None:
        with contextlib.suppress(DecodeError):
            group.prompt.CopyFrom(pb.Prompt.FromString(prompt))
    for name in sorted(answers, key=lambda name: int(name.removeprefix("p"))):
        with contextlib.suppress(DecodeError):
            group.trajectories.append(pb.Trajectory.FromString(answers[name]))
    return group


def _order(uid: str) -> tuple[int, int, str]:
    number = int(uid[1:]) if uid[1:].isdecimal() else 0
    return "duv".find(uid[0]), number, uid
