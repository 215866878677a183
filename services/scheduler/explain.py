"""What the run is doing, and why it does not: phase and blockers, in words that name them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from services.scheduler import admission
from services.scheduler.groups import Entry, Kind, State, View, Weights

MOVING_S = 10.0
"""A run in which nothing was reported or committed for so long stands still."""
Phase = Literal["STARTING", "RUNNING", "PAUSED", "FINISHING", "DONE"]


def phase_of(view: View, num_evaluations: int) -> Phase:
    """STARTING -> RUNNING <-> PAUSED -> FINISHING -> DONE; from the stored numbers alone, so a restart sees the same."""
    run = view.run
    if not run.trainer_epoch:
        return "STARTING"
    if run.committed >= run.total_steps:
        is_over = run.checkpoint >= run.total_steps and not num_evaluations
        return "DONE" if is_over else "FINISHING"
    return "PAUSED" if run.pause_reason else "RUNNING"


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    replica_id: str
    silent_s: float
    """Since its newest heartbeat."""
    is_gone: bool
    held: Weights


@dataclass(frozen=True, slots=True)
class Facts:
    """What the explanation may use besides the ledger."""

    batch_groups: int
    max_lag: int
    lease_s: float
    group_deadline_s: float
    now_s: float
    store_outage: str
    """What every change of the ledger waits for, and for how long; empty = nothing."""
    trainer_silent_s: float | None
    """Since the trainer was last heard; None = not since this scheduler started."""
    sample_reason: str
    """What SampleBatch answers now; empty when the trainer is not waiting for a batch."""
    blockers: tuple[str, ...]
    """uids that SampleBatch waits for."""
    replicas: Sequence[ReplicaFacts]
    evaluation: str
    """"evaluation s40: 17 of 256 prompts open", or empty."""
    quiet_s: float
    """Since a trajectory was last reported or a step committed."""


def is_moving(view: View, facts: Facts) -> bool:
    """Whether something is on its way to the next step. A paused run moves while the work given out before goes on."""
    run = view.run
    if facts.store_outage or run.committed >= run.total_steps > 0:
        return False
    if run.pause_reason and not _underway(view):
        return False
    return facts.quiet_s < MOVING_S


def _underway(view: View) -> int:
    return sum(e.state in (State.RUNNING, State.CONSUMED) for e in view.entries.values())


def explain(view: View, facts: Facts) -> list[str]:
    """Why nothing is moving, most important first."""
    run = view.run
    reasons: list[str] = []
    if facts.store_outage:
        reasons.append(f"{facts.store_outage}: nothing can move until then")
    if run.pause_reason:
        left = f"; {count} groups given out before go on" if (count := _underway(view)) else ""
        reasons.append(f"paused: {run.pause_reason}; no lease is granted until resume{left}")
    reasons += _trainer(view, facts)
    if facts.sample_reason:
        reasons.append("; ".join([facts.sample_reason, *_blockers(view, facts)]))
    reasons += _failures(view)
    reasons += _replicas(view, facts)
    if facts.evaluation:
        reasons.append(facts.evaluation)
    return reasons + _window(view, facts)


def _window(view: View, facts: Facts) -> list[str]:
    """Why no prompt enters."""
    run = view.run
    if view.occupied > run.window:
        return [f"window overfull: {view.occupied}/{run.window}; nothing enters until {view.occupied - run.window} are trained"]
    if not run.trainer_epoch or run.committed >= run.total_steps:
        return []
    needed = admission.effective_window(run.window, run.total_steps, run.committed, facts.batch_groups)
    if view.occupied >= needed and needed < run.window:
        left = run.total_steps - run.committed
        return [f"nothing more enters: the last {left} steps need only the {view.occupied} prompts that are open"]
    if view.occupied < run.window:
        return []
    full = f"window full: {view.occupied}/{run.window}"
    if facts.sample_reason or any(e.state in (State.FINISHED, State.CONSUMED) for e in view.training()):
        return [full]
    return ["; ".join([f"{full} and none is finished", *_whereabouts([*view.training()], facts)])]


def _trainer(view: View, facts: Facts) -> list[str]:
    run = view.run
    if not run.trainer_epoch:
        return ["no trainer has opened the run yet: nothing enters the window"]
    if run.committed >= run.total_steps:
        if run.checkpoint < run.total_steps:
            return [f"all {run.total_steps} steps are trained; waiting for the last checkpoint"]
        return [] if facts.evaluation else [f"the run is done: {run.total_steps} steps"]
    if facts.trainer_silent_s is None:
        return [f"trainer {run.trainer_epoch} at {run.trainer_address} has not been heard since the scheduler started"]
    if batch := view.batch(run.committed + 1):
        return [f"the trainer has had the {len(batch)} groups of step {run.committed + 1} for {facts.trainer_silent_s:.0f} s"]
    if not facts.sample_reason and facts.trainer_silent_s > facts.lease_s:
        return [f"trainer {run.trainer_epoch} at {run.trainer_address} has asked for nothing for {facts.trainer_silent_s:.0f} s"]
    return []


def _blockers(view: View, facts: Facts) -> list[str]:
    """Where the groups are that the next step waits for: those named, then what has not begun."""
    named = [view.entries[uid] for uid in facts.blockers if uid in view.entries]
    lacking = facts.batch_groups - sum(e.state is State.FINISHED for e in view.training())
    rest = [e for e in view.training() if e.state in (State.PENDING, State.RUNNING) and e not in named]
    entries = named + sorted(rest, key=lambda e: (not e.is_begun, e.seq))[: max(0, lacking - len(named))]
    unborn = max(0, lacking - len(entries))
    return [*_whereabouts(entries, facts), *([f"{unborn} have not entered the window"] if unborn else [])]


def _whereabouts(entries: Sequence[Entry], facts: Facts) -> list[str]:
    """Who holds them, and when that ends."""
    lines: list[str] = []
    silent = {r.replica_id: r.silent_s for r in facts.replicas}
    for replica in sorted({e.replica for e in entries if e.state is State.RUNNING}):
        held = [e for e in entries if e.state is State.RUNNING and e.replica == replica]
        heard_s = silent.get(replica, facts.lease_s)
        lines.append(
            f"{_are(len(held))} on replica {replica} (oldest {_name(held[0])}), last heard {heard_s:.0f} s ago; "
            f"lease ends in {max(0.0, facts.lease_s - heard_s):.0f} s, group deadline in {_deadline_s(held, facts):.0f} s"
        )
    if idle := [e for e in entries if e.state is State.PENDING]:
        lines.append(f"{len(idle)} wait for a replica (oldest {_name(idle[0])})")
    return lines


def _are(count: int) -> str:
    return f"{count} is" if count == 1 else f"{count} are"


def _failures(view: View) -> list[str]:
    """A reward that always raises, say, evicts and refills for ever: nothing else says why no batch fills."""
    failing = [e for e in view.training() if e.reason and e.state in (State.PENDING, State.RUNNING, State.FAILED)]
    if not failing:
        return []
    newest = max(failing, key=lambda e: e.granted_ms)
    given_up = f", {view.run.num_failed} have failed for good" if view.run.num_failed else ""
    return [f"{len(failing)} prompts are tried again{given_up}: {newest.uid}: {newest.reason}"]


def _name(entry: Entry) -> str:
    return f"{entry.uid}, attempt {entry.attempt}, {len(entry.missing)} of {entry.group_size} answers owed"


def _deadline_s(entries: Sequence[Entry], facts: Facts) -> float:
    return max(0.0, min(e.granted_ms for e in entries) / 1000 + facts.group_deadline_s - facts.now_s)


def _replicas(view: View, facts: Facts) -> list[str]:
    here = [r for r in facts.replicas if not r.is_gone]
    if view.run.committed >= view.run.total_steps > 0 and not any(e.kind is Kind.VALIDATION for e in view.entries.values()):
        return []
    if not here:
        gone = f"; gone: {', '.join(r.replica_id for r in facts.replicas)}" if facts.replicas else ""
        return [f"no replica is there{gone}"]
    waiting: dict[str, list[str]] = {}
    for replica in here:
        if _waits_for_weights(view, facts, replica.replica_id, replica.held):
            waiting.setdefault(admission.name_of(replica.held, view.run.trainer_epoch), []).append(replica.replica_id)
    lines: list[str] = []
    for held, names in waiting.items():
        who, has = (f"replica {names[0]} is", "holds") if len(names) == 1 else (f"replicas {', '.join(names)} are", "hold")
        lines.append(f"{who} waiting for weights v{view.run.committed}, {has} {held}")
    return lines


def _waits_for_weights(view: View, facts: Facts, replica: str, held: Weights) -> bool:
    """It has none of this trainer's, or those it has are too old for every prompt that waits."""
    if not view.run.trainer_epoch:
        return False
    if held.epoch != view.run.trainer_epoch:
        return True
    if held.version >= view.run.committed or view.run.pause_reason or view.leases_of(replica):
        return False
    waits = any(e.state is State.PENDING for e in view.training())
    found = admission.grant(view, held, wanted=1, batch_groups=facts.batch_groups, max_lag=facts.max_lag)
    return waits and isinstance(found, admission.Refused)
