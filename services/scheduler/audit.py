"""Proves I1 to I3 from a snapshot of the store. Pure; `stretto ledger verify` prints the answer.

I1  a prompt is in one place: open, trained or evicted; its payload and its trajectories fit its state
I2  the occupancy counters equal the sizes of the states
I3  every ordinal first .. cursor - 1 entered once and is open, trained in exactly one committed step, or evicted once
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

    @property
    def ok(self) -> bool:
        return not self.violations


def verify(s: Snapshot) -> Verdict:
    verdict = Verdict(entered=s.run.cursor - s.run.ordinal_first, user_trained=s.run.user_trained)
    places = _places(s)
    verdict.trained = sum(uid.startswith("d") for uids in s.steps.values() for uid in uids)
    verdict.evicted = sum(uid.startswith("d") for uid in s.evicted)
    verdict.open = sum(e.kind is Kind.TRAIN for e in s.entries)
    verdict.evicted_by_reason = dict(Counter(reason.partition(":")[0] for reason in s.evicted.values()))
    verdict.violations += _named(_one_place(places, verdict))
    verdict.violations += _named(_no_gaps(s, places, verdict))
    verdict.violations += _named(_counters(s))
    verdict.violations += _named(_contents(s))
    return verdict


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
