"""What a resume re-opens and what an expiry takes away. Pure.

trainer resumes at k      groups of steps > k are finished again, with their own versions and payloads (I5)
store lost or past k      the snapshot in checkpoint k is put in its place
scheduler restarts        nothing moves; every replica gets a full lease to be heard again
replica silent            its leases are lost; reported trajectories stay
lease too old             the attempt failed, renewed or not (I9)
replica forgot a lease    lost, once the grant has had time to arrive
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from services.scheduler.groups import Entry, RunState, State, View

ORPHAN_GRACE_S = 10.0
"""A grant may still be on its way (or be asked for again) when a heartbeat leaves without it."""


@dataclass(frozen=True, slots=True)
class Reopening:
    """What OpenTrainer(k) does to the groups that steps have taken."""

    finished: tuple[str, ...]
    """Consumed by steps > k: finished again."""
    committed: tuple[str, ...]
    """Consumed by steps <= k whose commit was lost: the checkpoint proves that they were trained."""


@dataclass(frozen=True, slots=True)
class Refused:
    reason: str


@dataclass(frozen=True, slots=True)
class SnapshotNeeded:
    """The store cannot be continued at that step; with the ledger's snapshot from the checkpoint it can."""

    reason: str


def gap(resume_step: int, *, cut_id: str, cut_epoch: int, run: RunState, is_empty: bool) -> SnapshotNeeded | Refused | None:
    """What lies between the store and the cut a trainer resumes from; None = nothing.

    `cut_epoch` is the trainer epoch that wrote the cut. Opening raises the store's checkpoint to the resumed step, so steps
    beyond it are all of the newest epoch: a cut of such a step by another epoch is of a history that was left.
    A trainer without a cut (base weights, or a checkpoint from before there were snapshots) has nothing to restore from.
    """
    if resume_step == 0 or not cut_id:
        return None
    if is_empty:
        return SnapshotNeeded("the store is empty: it was lost")
    if resume_step > run.committed:
        return SnapshotNeeded(f"the store has lost the steps after {run.committed}")
    if resume_step < run.checkpoint:
        return SnapshotNeeded(f"the store is at the cut of step {run.checkpoint}, past this one")
    if resume_step > run.checkpoint and cut_epoch != run.trainer_epoch:
        return SnapshotNeeded(
            f"the store's steps after {run.checkpoint} are of trainer epoch {run.trainer_epoch}, this cut is of {cut_epoch}"
        )
    if resume_step == run.checkpoint and run.cut_id not in ("", cut_id):
        return Refused(
            f"the checkpoint of step {resume_step} is cut {cut_id}, but the store continues {run.cut_id}: they are of two histories; "
            "put the right checkpoint folder back, or start a new run.name"
        )
    return None


def reopen(resume_step: int, *, checkpoint: int, taken: Iterable[Entry]) -> Reopening | Refused:
    """I5. `taken` are the CONSUMED and COMMITTED groups."""
    if resume_step < checkpoint:
        return Refused(
            f"the trainer resumes at step {resume_step}, but a checkpoint of step {checkpoint} was committed and the groups up to it "
            f"have left the store; resume from step {checkpoint} or start a new run.name"
        )
    ordered = sorted(taken, key=lambda e: (e.step, e.place))
    return Reopening(
        finished=tuple(e.uid for e in ordered if e.step > resume_step),
        committed=tuple(e.uid for e in ordered if e.step <= resume_step and e.state is State.CONSUMED),
    )


@dataclass(frozen=True, slots=True)
class Session:
    """What expiry needs to know of a replica."""

    epoch: int
    heard_s: float
    """Unix time of its newest heartbeat."""


@dataclass(frozen=True, slots=True)
class Expiry:
    uid: str
    attempt: int
    reason: str
    is_failure: bool = True
    """Whether it counts against attempts_max."""


def lost_leases(view: View, sessions: Mapping[str, Session], *, now_s: float, lease_s: float, group_deadline_s: float) -> list[Expiry]:
    """I9: the leases that ended without a report, each with its reason."""
    lost: list[Expiry] = []
    for entry in view.entries.values():
        if entry.state is not State.RUNNING:
            continue
        session = sessions.get(entry.replica)
        if session is None or session.epoch != entry.replica_epoch:
            lost.append(Expiry(entry.uid, entry.attempt, f"replica {entry.replica} restarted"))
        elif now_s - session.heard_s > lease_s:
            lost.append(Expiry(entry.uid, entry.attempt, f"replica {entry.replica} silent for {lease_s:g} s"))
        elif now_s - entry.granted_ms / 1000 > group_deadline_s:
            lost.append(Expiry(entry.uid, entry.attempt, f"group deadline of {group_deadline_s:g} s"))
    return lost


def forgotten(view: View, replica: str, believed: Iterable[str], *, now_s: float, lease_s: float) -> list[Expiry]:
    """Leases the store counts as `replica`'s of which it knows nothing: the answer that granted them was lost, nobody tried."""
    known, grace_s = set(believed), min(ORPHAN_GRACE_S, lease_s)
    return [
        Expiry(e.uid, e.attempt, f"replica {replica} does not hold it", is_failure=False)
        for e in view.leases_of(replica)
        if e.uid not in known and now_s - e.granted_ms / 1000 > grace_s
    ]
