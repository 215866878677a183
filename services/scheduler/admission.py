"""Who may enter the window, and who may begin. Pure: a snapshot in, an answer with its reason out.

The lag bound, derived
    Step t turns version t - 1 into version t. A group begun by version b and trained at step t has lag t - 1 - b, so
    lag <= max_lag  <=>  t <= due = b + max_lag + 1.
    Let c be the newest committed step and B the groups a step trains. Steps c+1 .. t train (t - c) x B groups, hence all
    begun groups can still be trained in time exactly when

        (F)   for every t > c:   #{begun, not yet trained, due <= t}  <=  (t - c) x B

    (unit jobs with deadlines on B machines: earliest due first finds a schedule whenever there is one).
    Every transition keeps (F):
    * a lease that begins k groups on version v adds k jobs of due v + max_lag + 1: `begin_room` is the greatest such k.
      For v = c the due is c + max_lag + 1, where the right side is (max_lag + 1) x B >= window >= open groups: a replica
      with the newest weights is never held back while the window rule holds. An older replica, or a ledger restored
      fuller than its window, is held back exactly as far as (F) needs.
    * a batch takes B groups, earliest due first, only if the rest keeps (F) for step + 1 (`sampling.py`);
    * a commit moves c to c + 1 after just that batch left;
    * a trainer that resumes at k < c brings back the batches of k+1 .. c: each had due >= its step, so with c := k both
      sides of (F) grow by at least as much on the right as on the left;
    * eviction only takes jobs away.
    So lag <= max_lag for every trained group, whatever dies. tests/unit/test_admission.py simulates it.

The label stays true (I8)
    `version_begin` is at most the version of every token of the group. Only a lease to weights older than the label could
    break that: of a replica that lags behind, or of every replica once the trainer has fallen back and counts again from
    k. Such a lease makes the label that older version, and is given only where (F) still holds with the due moved ahead;
    else the group waits for weights as new as its label. Nothing is dropped for it, and nobody waits for ever: what a step
    lacks may be worked on by the newest weights. Versions of the lost steps count by their number: version j of either
    timeline is j - k updates from the same checkpoint, and the groups of the lost steps train again in the order of
    their dues.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.scheduler.groups import Entry, Kind, State, View, Weights


def effective_window(window: int, total_steps: int, committed: int, batch_groups: int) -> int:
    """The window, less what the run will not train any more: its last steps generate nothing for the bin."""
    return max(0, min(window, (total_steps - committed) * batch_groups))


def admit(window: int, occupied: int) -> int:
    """I4: how many prompts may enter now. The only rule that lets prompts in, at warm-up, steady state, eviction, resume."""
    return max(0, window - occupied)


def is_feasible(dues: Iterable[int], committed: int, batch_groups: int) -> bool:
    """(F): can all groups of these dues be trained in time by the steps after `committed`?"""
    return all(due >= committed + 1 + place // batch_groups for place, due in enumerate(sorted(dues)))


def begin_room(version: int, dues: Sequence[int], *, committed: int, batch_groups: int, max_lag: int) -> int:
    """The most groups that `version` may begin beside those of `dues` so that (F) still holds."""
    due = version + max_lag + 1
    if due <= committed:
        return 0
    ordered = sorted(dues)
    room = math.inf
    counted = 0
    for step in range(due, max([due, *ordered]) + 1):
        while counted < len(ordered) and ordered[counted] <= step:
            counted += 1
        room = min(room, (step - committed) * batch_groups - counted)
    return max(0, int(room))


@dataclass(frozen=True, slots=True)
class Grant:
    """What to lease, in this order."""

    entries: tuple[Entry, ...]
    version: int
    """Begins those that have not begun, and those that newer weights began."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing to lease now."""

    reason: str


def grant(
    view: View,
    held: Weights,
    *,
    wanted: int,
    batch_groups: int,
    max_lag: int,
    evaluation_version: int = 0,
    waiting: int = 1,
) -> Grant | Refused:
    """Which groups a replica that holds `held` may work on: validation, then re-issued ones oldest first, then new ones.

    `waiting` replicas share what is there, so that one long poll does not take all. `evaluation_version` is the least
    version the running evaluation wants.
    """
    run = view.run
    if run.pause_reason:
        return Refused(f"paused: {run.pause_reason}")
    if held.epoch != run.trainer_epoch or not run.trainer_epoch:
        return Refused(f"waiting for weights v{run.committed}: this replica holds {name_of(held, run.trainer_epoch)}")
    pending = [e for e in view.entries.values() if e.state is State.PENDING]
    exam = sorted((e for e in pending if e.kind is Kind.VALIDATION and held.version >= evaluation_version), key=lambda e: e.seq)
    train = [e for e in pending if e.kind is not Kind.VALIDATION] if run.committed < run.total_steps else []
    begun = sorted((e for e in train if e.is_begun), key=_age)
    fresh = sorted((e for e in train if not e.is_begun), key=lambda e: e.seq)
    dues = [e.due(max_lag) for e in view.training() if e.is_begun]

    def room() -> int:
        return begin_room(held.version, dues, committed=run.committed, batch_groups=batch_groups, max_lag=max_lag)

    may_go_on: list[Entry] = []
    for entry in begun:
        if entry.version_begin > held.version:
            dues.remove(due := entry.due(max_lag))
            may_move = room() > 0
            dues.append(held.version + max_lag + 1 if may_move else due)
            if not may_move:
                continue
        may_go_on.append(entry)
    ready = [*exam, *may_go_on, *fresh[: room()]]  # I8: what has begun goes before what has not
    if ready:
        return Grant(tuple(ready[: max(1, min(wanted, math.ceil(len(ready) / max(1, waiting))))]), held.version)
    return Refused(_why_nothing(view, held, begun, fresh=len(fresh), num_exam=sum(e.kind is Kind.VALIDATION for e in pending)))


def _age(entry: Entry) -> tuple[int, int]:
    return entry.version_begin, entry.seq


def name_of(held: Weights, trainer_epoch: int) -> str:
    if not held.epoch:
        return "none"
    return f"v{held.version}" if held.epoch == trainer_epoch else f"v{held.version} of an earlier trainer"


def _why_nothing(view: View, held: Weights, begun: Sequence[Entry], *, fresh: int, num_exam: int) -> str:
    """`begun` and `fresh` are pending, and none of them may be worked on now."""
    run = view.run
    if begun:
        return f"{len(begun)} groups wait for weights v{begun[0].version_begin}, which began them: this replica holds v{held.version}"
    if fresh:
        if held.version < run.committed:
            return f"waiting for weights v{run.committed}: this replica holds v{held.version}"
        return f"{fresh} prompts wait: begun groups fill every step within max_lag"
    if num_exam:
        return f"validation waits for newer weights: this replica holds v{held.version}"
    if run.committed >= run.total_steps:
        return "run finished"
    return f"window full: {view.occupied}/{run.window}"
