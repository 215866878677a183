"""Proves the invariants from a snapshot of the store, or of a checkpoint. Pure; `stretto ledger verify` prints the answer.

I1  a prompt is in one place: open, trained or evicted; its payload and its trajectories fit its state
I2  the occupancy counters equal the sizes of the states
I3  every ordinal first .. cursor - 1 entered once and is open, trained in exactly one committed step, or evicted once
I4  no more than the window is open, unless a restore brought more: that is said, since a store cannot tell why
I5  whatever was trained after the newest checkpoint is still there, with its payload
I6  the epochs that the records carry are the newest ones given out, or older
I7  every payload parses, is its own group's and agrees with the marks
I8  no token is older than its group's label; no step has trained a group older than max_lag by its label
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from services.scheduler.groups import Entry, Kind, RunState, State

NAMED_MAX = 20
"""Violations of one kind that are named; the rest is counted."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything the store says about prompts, taken at one moment."""

    run: RunState
    entries: tuple[Entry, ...]
    """Open groups, validation included."""
    committed: tuple[Entry, ...]
    """Trained groups that no checkpoint contains yet."""
    steps: Mapping[int, tuple[str, ...]]
    """uids trained by each committed step."""
    evicted: Mapping[str, str]
    """uid -> reason."""
    prompts: frozenset[str]
    """uids that have a payload."""
    queue: tuple[str, ...]
    """Users' prompts that have not entered."""
    occupancy: Mapping[str, int]
    trajectories: Mapping[str, frozenset[int]]
    """Stored trajectories of every open and committed group."""
    begins: Mapping[str, int] = field(default_factory=lambda: dict[str, int]())
    """version_begin of every trained group."""
    epochs: Epochs | None = None
    """None where they were not read."""
    flaws: tuple[tuple[str, str], ...] | None = None
    """(invariant, what is wrong with a payload); None where payloads were not read."""
    is_cut: bool = False
    """Taken from a checkpoint: what its step and earlier ones trained has left, nothing is leased, and there are no counters."""


@dataclass(frozen=True, slots=True)
class Epochs:
    """I6: incarnations given out, and those that records carry."""

    scheduler: int
    trainer: int
    replicas: Mapping[str, int]
    sessions: Mapping[str, int]
    """Of the replicas' session records."""


@dataclass(slots=True)
class Verdict:
    violations: list[str] = field(default_factory=lambda: list[str]())
    entered: int = 0
    trained: int = 0
    evicted: int = 0
    open: int = 0
    duplicates: int = 0
    gaps: int = 0
    evicted_by_reason: dict[str, int] = field(default_factory=lambda: dict[str, int]())
    user_trained: int = 0
    user_evicted: int = 0
    lag_max: int = 0
    """Greatest lag trained, by the labels."""
    checked: tuple[str, ...] = ()
    """The invariants that the snapshot shows."""
    notes: list[str] = field(default_factory=lambda: list[str]())
    """What is no violation but should be known."""

    @property
    def ok(self) -> bool:
        return not self.violations


def verify(s: Snapshot, max_lag: int | None = None) -> Verdict:
    """`max_lag` = the recipe's bound; None = not looked at."""
    verdict = Verdict(entered=s.run.cursor - s.run.ordinal_first, user_trained=s.run.user_trained, checked=_checked(s))
    places = _places(s)
    verdict.trained = sum(uid.startswith("d") for uids in s.steps.values() for uid in uids)
    verdict.evicted = sum(uid.startswith("d") for uid in s.evicted)
    verdict.user_evicted = sum(uid.startswith("u") for uid in s.evicted)
    verdict.open = sum(e.kind is Kind.TRAIN for e in s.entries)
    verdict.evicted_by_reason = dict(Counter(reason.partition(":")[0] for reason in s.evicted.values()))
    verdict.violations += _named(_one_place(places, verdict))
    verdict.violations += _named(_no_gaps(s, places, verdict))
    if not s.is_cut:
        verdict.violations += _named(_counters(s))
    verdict.violations += _named(_contents(s))
    verdict.violations += _named(_kept(s))
    verdict.violations += _named(_epochs(s))
    verdict.violations += _named(f"{name}: {text}" for name, text in s.flaws or ())
    verdict.violations += _named(_lags(s, max_lag, verdict))
    verdict.notes += _notes(s)
    return verdict


def _checked(s: Snapshot) -> tuple[str, ...]:
    shown = {"I2": not s.is_cut, "I6": s.epochs is not None, "I7": s.flaws is not None, "I8": s.flaws is not None}
    return tuple(name for name in ("I1", "I2", "I3", "I4", "I5", "I6", "I7", "I8") if shown.get(name, True))


def _notes(s: Snapshot) -> Iterable[str]:
    occupied = sum(e.kind is not Kind.VALIDATION for e in s.entries)
    if occupied > s.run.window:
        more = "more was restored, or the window was shrunk; none enters until they are trained"
        yield f"I4: {occupied}/{s.run.window} prompts are open: {more}"
    if s.run.ordinal_first:
        yield f"I3: this store begins with ordinal {s.run.ordinal_first}: what came before was lost with an older store"
    if s.epochs and s.run.trainer_epoch != s.epochs.trainer and _awaits_trainer(s, s.epochs):
        yield f"I6: no trainer has opened the run since it was restored to {s.run.cut_id}"
    if left := sum(e.step <= s.run.checkpoint for e in s.committed):
        yield f"I5: {left} groups that checkpoint {s.run.checkpoint} contains are still stored; the next checkpoint removes them"


def _kept(s: Snapshot) -> Iterable[str]:
    """I5. A payload that a committed group lacks is named by `_contents`."""
    kept = {e.uid for e in s.committed}
    if not s.is_cut:
        for step in sorted(step for step in s.steps if step > s.run.checkpoint):
            if lost := [uid for uid in s.steps[step] if uid not in kept]:
                names = ", ".join(lost[:5])
                yield f"I5: step {step} is after checkpoint {s.run.checkpoint}, but {len(lost)} of its groups are gone: {names}"
    for entry in s.entries:
        if entry.state is State.CONSUMED and entry.step != s.run.committed + 1:
            yield f"I5: {entry.uid} is consumed by step {entry.step}, but {s.run.committed} is the newest committed"


def _epochs(s: Snapshot) -> Iterable[str]:
    if s.epochs is None:
        return
    if s.run.trainer_epoch != s.epochs.trainer and not _awaits_trainer(s, s.epochs):
        yield f"I6: the run was opened by trainer epoch {s.run.trainer_epoch}, but {s.epochs.trainer} is the newest given out"
    if s.run.trainer_epoch and not s.epochs.scheduler:
        yield "I6: no scheduler epoch was ever given out"
    for replica, epoch in s.epochs.sessions.items():
        if epoch != s.epochs.replicas.get(replica, 0):
            yield f"I6: the session of {replica} is of epoch {epoch}, but {s.epochs.replicas.get(replica, 0)} is the newest given out"
    for entry in s.entries:
        if entry.state is State.RUNNING and entry.replica_epoch > s.epochs.replicas.get(entry.replica, 0):
            yield f"I6: {entry.uid} is leased to {entry.replica} epoch {entry.replica_epoch}, which was never given out"


def _awaits_trainer(s: Snapshot, epochs: Epochs) -> bool:
    """A restored ledger carries the epoch of its cut, and the store the newest one, until the trainer that asked for it opens the run."""
    is_untouched = s.run.committed == s.run.checkpoint and not s.committed and not any(e.state is State.CONSUMED for e in s.entries)
    return is_untouched and bool(s.run.cut_id) and (s.run.trainer_epoch < epochs.trainer or not epochs.trainer)


def _lags(s: Snapshot, max_lag: int | None, verdict: Verdict) -> Iterable[str]:
    """I8. Step t trains on version t - 1."""
    verdict.lag_max = s.run.lag_trained_max
    for step, uids in s.steps.items():
        for uid in uids:
            lag = step - 1 - s.begins.get(uid, step - 1)
            verdict.lag_max = max(verdict.lag_max, lag)
            if max_lag is not None and lag > max_lag:
                yield f"I8: step {step} trained {uid}, begun by v{s.begins[uid]}: lag {lag} is more than max_lag = {max_lag}"


def _places(s: Snapshot) -> dict[str, list[str]]:
    """uid -> where it is."""
    places: dict[str, list[str]] = {}
    for entry in s.entries:
        places.setdefault(entry.uid, []).append(entry.state.value)
    for step, uids in s.steps.items():
        for uid in uids:
            places.setdefault(uid, []).append(f"trained in step {step}")
    for uid in s.evicted:
        places.setdefault(uid, []).append("evicted")
    for uid in s.queue:
        places.setdefault(uid, []).append("queued")
    return places


def _one_place(places: Mapping[str, list[str]], verdict: Verdict) -> Iterable[str]:
    for uid, where in places.items():
        if len(where) > 1:
            verdict.duplicates += 1
            yield f"I1: {uid} is in {len(where)} places: {', '.join(where)}"


def _no_gaps(s: Snapshot, places: Mapping[str, list[str]], verdict: Verdict) -> Iterable[str]:
    entered = {f"d{n}" for n in range(s.run.ordinal_first, s.run.cursor)} | {f"u{n}" for n in range(s.run.user_next)}
    lost, strange = entered - set(places), {uid for uid in places if not uid.startswith("v")} - entered
    verdict.gaps += len(lost)
    yield from (f"I3: {_ordinal(uid)} entered and is nowhere" for uid in sorted(lost))
    yield from (f"I3: {uid} is {places[uid][0]} but never entered (cursor {s.run.cursor})" for uid in sorted(strange))
    if s.run.ordinal_first == 0:
        yield from (f"I3: step {n} is committed without a batch" for n in range(1, s.run.committed + 1) if n not in s.steps)
    yield from (f"I3: step {n} has a batch, but {s.run.committed} is the newest committed" for n in s.steps if n > s.run.committed)


def _ordinal(uid: str) -> str:
    return f"ordinal {uid[1:]}" if uid.startswith("d") else f"user prompt {uid}"


def _counters(s: Snapshot) -> Iterable[str]:
    sizes: Counter[str] = Counter({State.COMMITTED.value: len(s.committed)})
    for entry in s.entries:
        sizes[("validation:" if entry.kind is Kind.VALIDATION else "") + entry.state.value] += 1
    for name in sorted(set(sizes) | set(s.occupancy)):
        if sizes[name] != s.occupancy.get(name, 0):
            yield f"I2: counter {name} is {s.occupancy.get(name, 0)}, but {sizes[name]} groups are"


def _contents(s: Snapshot) -> Iterable[str]:
    expected = {e.uid for e in (*s.entries, *s.committed)} | set(s.queue)
    for uid in sorted(expected - s.prompts):
        yield f"I1: {uid} has lost its payload"
    for uid in sorted(s.prompts - expected):
        yield f"I1: payload of {uid} belongs to no group"
    trained = {uid for uids in s.steps.values() for uid in uids}
    for entry in s.committed:
        if entry.uid not in trained:
            yield f"I3: {entry.uid} is committed but in no step"
    for entry in (*s.entries, *s.committed):
        marked = {i for i, mark in enumerate(entry.marks) if mark == "1"}
        if not marked <= s.trajectories.get(entry.uid, frozenset()):
            yield f"I1: {entry.uid} has lost trajectories {sorted(marked - s.trajectories.get(entry.uid, frozenset()))}"
        if entry.state in (State.FINISHED, State.CONSUMED, State.COMMITTED) and len(marked) != entry.group_size:
            yield f"I1: {entry.uid} is {entry.state.value} with {len(marked)} of {entry.group_size} trajectories"


def _named(found: Iterable[str]) -> list[str]:
    every = list(found)
    more = len(every) - NAMED_MAX
    return every[:NAMED_MAX] + ([f"… and {more} more like it"] if more > 0 else [])
