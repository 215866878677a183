"""The nouns of the ledger, without the store: what a decision sees.

    PENDING --lease--> RUNNING --all in--> FINISHED --sample--> CONSUMED --commit step--> COMMITTED --checkpoint--> removed
       ^                  |
       +--lease lost------+--attempts used up--> FAILED --> evicted, refilled by one

Every state but COMMITTED occupies the window. Validation groups pass through the same states in their own lane: they
are never in the occupancy and never trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

NOT_BEGUN = -1
"""`version_begin` of a group that was never leased."""


class State(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CONSUMED = "consumed"
    COMMITTED = "committed"


OPEN_STATES = (State.PENDING, State.RUNNING, State.FINISHED, State.FAILED, State.CONSUMED)
"""The states that occupy the window: everything not yet trained."""


class Kind(StrEnum):
    TRAIN = "t"
    USER = "u"
    VALIDATION = "v"


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one group stands. Its payload is stored elsewhere and never touched by a status change (I7)."""

    uid: str
    state: State
    kind: Kind
    seq: int
    """Order of admission; also the order of first leases."""
    ordinal: int
    """Place in the endless dataset; -1 unless TRAIN."""
    group_size: int
    marks: str
    """One character per trajectory: 0 owed, 1 in, x failed in this attempt."""
    version_begin: int = NOT_BEGUN
    """I8: at most the version of any of its tokens. Set by the first lease; only ever lowered."""
    attempt: int = 0
    """Number of the newest lease; 0 = never leased."""
    failures: int = 0
    """Attempts that were lost or failed; an orderly return is none."""
    replica: str = ""
    replica_epoch: int = 0
    granted_ms: int = 0
    """When the newest lease was granted, unix ms."""
    step: int = 0
    """Step that consumed it; 0 = none."""
    place: int = 0
    """Place in that step's batch."""
    reward_low: float | None = None
    reward_high: float | None = None
    reason: str = ""
    """Why it failed."""
    evaluation: str = ""
    """For VALIDATION: whose."""

    @property
    def is_begun(self) -> bool:
        return self.version_begin != NOT_BEGUN

    @property
    def missing(self) -> tuple[int, ...]:
        """Indices of the trajectories still owed."""
        return tuple(i for i, mark in enumerate(self.marks) if mark != "1")

    def due(self, max_lag: int) -> int:
        """The last step that may train it: step t trains on version t - 1, so lag = t - 1 - version_begin."""
        return self.version_begin + max_lag + 1


@dataclass(frozen=True, slots=True)
class RunState:
    """The numbers of the run, as stored."""

    window: int = 0
    """Prompts that may be un-trained at once; 0 = not configured yet."""
    window_recipe: int = 0
    """The recipe's window when it was last applied: SetWindow survives a restart until the recipe says something new."""
    committed: int = 0
    """Newest committed step = newest published version."""
    checkpoint: int = 0
    cut_id: str = ""
    """The cut that this checkpoint is; "" before the first."""
    total_steps: int = 0
    trainer_epoch: int = 0
    """0 = no trainer has opened the run."""
    trainer_address: str = ""
    cursor: int = 0
    """Next dataset ordinal to enter."""
    ordinal_first: int = 0
    """First ordinal this store knows: 0 but for a store that was lost."""
    user_next: int = 0
    user_queued: int = 0
    user_trained: int = 0
    pause_reason: str = ""
    phase: str = ""
    num_evicted: int = 0
    num_failed: int = 0
    num_reissued: int = 0
    num_trajectories: int = 0
    num_tokens: int = 0
    """Of those trajectories."""
    lag_trained_max: int = 0
    last_evaluation: str = ""
    metrics_json: str = "{}"
    """Scalars of the newest committed step."""
    data_key: str = ""
    """Fingerprint of (dataset size, seed, shuffle): the cursor means nothing on another one."""


@dataclass(frozen=True, slots=True)
class View:
    """One consistent snapshot of the ledger. Every decision is taken on one, and committed only if `rev` still holds."""

    rev: int
    run: RunState
    entries: Mapping[str, Entry]
    """Everything but COMMITTED groups."""
    occupancy: Mapping[str, int]
    """The store's own counters, by state (I2)."""

    @property
    def occupied(self) -> int:
        return sum(self.occupancy.get(state, 0) for state in OPEN_STATES)

    def counts(self, begun_since: int | None = None) -> Mapping[str, int]:
        """Groups by state; with `begun_since` only those begun by that version or a newer one, which leaves trained ones out."""
        if begun_since is None:
            return self.occupancy
        found = {state.value: 0 for state in State}
        for entry in self.training():
            found[entry.state] += entry.is_begun and entry.version_begin >= begun_since
        return found

    def training(self) -> Iterator[Entry]:
        return (e for e in self.entries.values() if e.kind is not Kind.VALIDATION)

    def validation(self) -> Iterator[Entry]:
        return (e for e in self.entries.values() if e.kind is Kind.VALIDATION)

    def leases_of(self, replica: str) -> list[Entry]:
        return [e for e in self.entries.values() if e.state is State.RUNNING and e.replica == replica]

    def batch(self, step: int) -> list[Entry]:
        """The groups `step` has consumed, in their order."""
        return sorted((e for e in self.entries.values() if e.state is State.CONSUMED and e.step == step), key=lambda e: e.place)


@dataclass(frozen=True, slots=True)
class Weights:
    """Which weights a replica holds; epoch 0 = none."""

    epoch: int = 0
    version: int = 0
