"""What goes wrong, when, and to whom: an endless sequence that a seed decides. Pure.

kind             what happens to the target
kill             SIGKILL; started again after `pause_s`
term             SIGTERM; started again when it has ended
stop             SIGSTOP, SIGCONT after `length_s`, within the lease
freeze           the same for longer than a lease: it comes back as one whom nobody expects
double           frozen, and another process starts under its name meanwhile: the one that comes back is a zombie
move             a replica is told to leave, another one joins under a new name
forget           SCRIPT FLUSH: the store forgets its scripts
delay_request    one call reaches the target `length_s` late
delay_answer     the answer of one call reaches the caller `length_s` late
drop_answer      one call is made, its caller hears UNAVAILABLE
double_request   one call is made twice, the caller gets the second answer
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ROLLOUT = "rollout"
"""Stands for "one of the replicas"; `Fault.pick` says which."""
WORKERS = ("scheduler", "weightsync", "trainer", ROLLOUT)
MESSAGE_KINDS = ("delay_request", "delay_answer", "drop_answer", "double_request")
MESSAGE_SHARE = 0.55
"""Of all faults."""

PROCESS_FAULTS: Sequence[tuple[str, str, float]] = (
    *(("kill", target, 3.0) for target in ("scheduler", "weightsync", "trainer", "store")),
    ("kill", ROLLOUT, 5.0),
    *(("term", target, 1.5) for target in (*WORKERS, "store")),
    *(("stop", target, 3.0) for target in (*WORKERS, "store")),
    *(("freeze", target, 1.5) for target in (*WORKERS, "store")),
    ("double", "trainer", 2.0),
    ("double", ROLLOUT, 2.5),
    ("move", ROLLOUT, 2.5),
    ("forget", "store", 2.0),
    ("wipe", "store", 1.0),
)
"""(kind, target, weight)"""

METHODS: Sequence[tuple[str, str, float]] = (
    ("scheduler", "LeasePrompts", 4.0),
    ("scheduler", "ReportTrajectories", 5.0),
    ("scheduler", "ReturnLeases", 1.0),
    ("scheduler", "Heartbeat", 3.0),
    ("scheduler", "OpenTrainer", 1.0),
    ("scheduler", "SampleBatch", 4.0),
    ("scheduler", "CommitStep", 5.0),
    ("scheduler", "CommitCheckpoint", 2.5),
    ("scheduler", "WatchEvents", 0.5),
    ("weightsync", "PreparePublish", 2.5),
    ("weightsync", "Publish", 1.0),
    ("weightsync", "CommitPublish", 2.5),
    ("weightsync", "Join", 0.5),
    ("weightsync", "Watch", 1.0),
    ("weightsync", "Acquire", 3.0),
    ("weightsync", "Fetch", 1.5),
    ("weightsync", "Release", 2.0),
    ("weightsync", "GetStatus", 1.0),
)
"""(service, method, weight)"""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    after_s: float
    """Since the fault before it began; they may overlap."""
    kind: str
    target: str
    """scheduler, weightsync, trainer, rollout or store."""
    method: str = ""
    """Message faults: whose next call is disturbed."""
    length_s: float = 0.0
    """How long it is stopped or late."""
    pause_s: float = 0.0
    """How long it stays down."""
    pick: float = 0.0
    """In [0, 1): which of the replicas."""

    @property
    def is_message(self) -> bool:
        return self.kind in MESSAGE_KINDS


def faults(seed: int, *, gap_s: float, lease_s: float) -> Iterator[Fault]:
    """Without end; the same for the same arguments. `gap_s`: mean time between two faults."""
    rng = random.Random(seed)
    while True:
        after_s = gap_s * rng.uniform(0.3, 1.7)
        pick, pause_s = rng.random(), rng.choice((0.0, 0.3, 1.0, 2.0)) * rng.random()
        if rng.random() < MESSAGE_SHARE:
            target, method, _ = rng.choices(METHODS, [w for *_, w in METHODS])[0]
            yield Fault(
                after_s, rng.choice(MESSAGE_KINDS), target, method, rng.choice((0.1, 0.5, 1.5, 4.0)) * rng.uniform(0.5, 1.0), pick=pick
            )
        else:
            kind, target, _ = rng.choices(PROCESS_FAULTS, [w for *_, w in PROCESS_FAULTS])[0]
            yield Fault(after_s, kind, target, "", _length_s(rng, kind, lease_s), pause_s, pick)


def _length_s(rng: random.Random, kind: str, lease_s: float) -> float:
    if kind == "stop":
        return rng.uniform(0.5, lease_s * 0.6)
    if kind in ("freeze", "double"):
        return lease_s + rng.uniform(0.5, 3.0)
    return 0.0
