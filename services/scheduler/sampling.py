"""Which groups train next. Pure: a snapshot in, a typed answer with its reason out.

Earliest due first (due = version_begin + max_lag + 1, see `admission.py`), then order of admission; with equal ages that
is first in, first out. A batch is given only if everything left over can still be trained in time by later steps:

    enough finished, the rest stays feasible          -> Batch
    a straggler would become too old, policy wait     -> Wait, naming it
    a straggler would become too old, policy drop     -> Drop the fewest, then ask again; admission refills one for one
    more is due than the steps left can train         -> Drop (whatever the policy: no waiting helps)
    too few finished                                  -> Wait
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from services.scheduler.groups import Entry, State


@dataclass(frozen=True, slots=True)
class Batch:
    """These groups, in this order."""

    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """No batch yet; `blockers` are the groups it waits for (empty: for new work to finish)."""

    reason: str
    blockers: tuple[Entry, ...] = ()


@dataclass(frozen=True, slots=True)
class Drop:
    """Evict these, then decide again."""

    entries: tuple[Entry, ...]
    reason: str = "stale"


def is_filtered(entry: Entry, filter_name: Literal["none", "zero_variance"]) -> bool:
    """A finished group that must not be trained: it is evicted and refilled."""
    return filter_name == "zero_variance" and entry.reward_low is not None and entry.reward_low == entry.reward_high


def plan(
    entries: Iterable[Entry],
    *,
    step: int,
    batch_groups: int,
    max_lag: int,
    stragglers: Literal["wait", "drop"],
    filter_name: Literal["none", "zero_variance"] = "none",
) -> Batch | Wait | Drop:
    """The batch of `step` out of the open training groups (consumed ones excluded), or what it waits for."""

    def key(entry: Entry) -> tuple[int, int]:
        return entry.due(max_lag), entry.seq

    everything = [e for e in entries if e.state not in (State.CONSUMED, State.FAILED)]
    begun = sorted((e for e in everything if e.is_begun and not _leaves(e, filter_name)), key=key)
    finished = [e for e in begun if e.state is State.FINISHED]
    if lost := _excess(begun, step=step, batch_groups=batch_groups, max_lag=max_lag):
        return Drop(lost)
    unfinished = [e for e in begun if e.state is not State.FINISHED]
    if len(finished) < batch_groups:
        lacking = batch_groups - len(finished)
        return Wait(f"step {step} waits for {lacking} of {batch_groups} groups", tuple(unfinished[:lacking]))
    batch = finished[:batch_groups]
    chosen = {e.uid for e in batch}
    rest = [e for e in begun if e.uid not in chosen]
    late = _excess(rest, step=step + 1, batch_groups=batch_groups, max_lag=max_lag)
    if not late:
        return Batch(tuple(batch))
    if stragglers == "drop":
        return Drop(late)
    return Wait(f"step {step} waits for {len(late)} groups that would exceed max_lag = {max_lag}", late)


def _leaves(entry: Entry, filter_name: Literal["none", "zero_variance"]) -> bool:
    return entry.state is State.FINISHED and is_filtered(entry, filter_name)


def _excess(ordered: Sequence[Entry], *, step: int, batch_groups: int, max_lag: int) -> tuple[Entry, ...]:
    """The fewest groups without which the rest can be trained in time from `step` on; unfinished ones first.

    Scanning by due, one must go whenever more are due by d than steps step..d train; any of those seen may go
    (unit jobs), so the unfinished one of the least due goes.
    """
    kept: list[Entry] = []
    gone: list[Entry] = []
    for entry in ordered:
        kept.append(entry)
        if len(kept) > max(0, entry.due(max_lag) - step + 1) * batch_groups:
            out = next((e for e in kept if e.state is not State.FINISHED), kept[0])
            kept.remove(out)
            gone.append(out)
    return tuple(gone)
