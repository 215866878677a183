"""The leased groups of a replica, from the lease to the acknowledged report. Pure: no clock, no IO, no threads.

    begin(lease) --requests--> generating --end(completion)--> ended --queue(trajectory)--> reports() --acknowledge--> forgotten
                                   |  failed ------------------------------------^
                                   +--- lose(): lease lost, nothing is owed any more (the ids to abort come back)
                                   +--- give_back(): partial answers for the scheduler

A session is one trajectory of one lease, named "<uid>/<index>" in the engine. `owed` says where it stands: None while the
engine has it, its Trajectory once it ended.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from services.rollout.engine import Completion, Request
from stretto.v1.scheduler_pb2 import Lease, ReturnedLease, TrajectoryReport
from stretto.v1.types_pb2 import (
    FINISH_REASON_ABORTED,
    FINISH_REASON_FAILED,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FinishReason,
    Prompt,
    Trajectory,
)

FINISH_REASONS: dict[str, FinishReason.ValueType] = {
    "stop": FINISH_REASON_STOP,
    "length": FINISH_REASON_LENGTH,
    "aborted": FINISH_REASON_ABORTED,
    "failed": FINISH_REASON_FAILED,
}
ENDED_BACKLOG_FACTOR = 4
"""Ended sessions that may await a score or an acknowledgement, in capacities: beyond, no new lease is asked for."""
SEED_STRIDE = 0x9E37_79B9_7F4A_7C15
"""Odd and far from any pattern: attempts of a group never share a random stream."""


@dataclass(slots=True)
class Held:
    """A lease being worked on."""

    prompt: Prompt
    attempt: int
    """Goes into every report; a newer lease of the same prompt replaces it."""
    pin_version: bool
    began_s: float
    """Caller's clock at the first lease."""
    extra: Mapping[str, Any]
    """prompt.extra_json, parsed once per lease."""
    owed: dict[int, Trajectory | None] = field(default_factory=dict[int, Trajectory | None])
    partials: list[Trajectory] = field(default_factory=list[Trajectory])
    """Aborted answers, to be given back."""

    @property
    def is_generating(self) -> bool:
        return any(t is None for t in self.owed.values())


class Begun(NamedTuple):
    """What a lease asks of the engine."""

    requests: list[Request]
    aborts: list[str]
    """Sessions of an older lease of the same prompt that are no longer owed."""


class Ended(NamedTuple):
    """A session whose generation is over."""

    held: Held
    trajectory: Trajectory


def session_id(uid: str, index: int) -> str:
    """Name of a session in the engine."""
    return f"{uid}/{index}"


def prompts_wanted(*, slots: int, prefetch_groups: int, group_size: int, num_generating: int, num_ended: int) -> int:
    """Groups to ask for now: enough to fill the slots and the prefetch queue.

    Asks in bites of half the prefetch queue, so that a lease call brings several groups, unless slots stand empty.
    """
    capacity = slots + prefetch_groups * group_size
    if num_ended >= ENDED_BACKLOG_FACTOR * capacity:
        return 0
    free = (capacity - num_generating) // group_size
    bite = max(1, prefetch_groups // 2)
    return free if free >= bite or num_generating < slots else 0


def trajectory_of(completion: Completion, replica_id: str, generation_s: float) -> Trajectory:
    """The completion as it travels; not scored."""
    uid, _, index = completion.id.rpartition("/")
    trajectory = Trajectory(
        prompt_uid=uid,
        index=int(index),
        token_ids=completion.tokens.astype("<i4", copy=False).tobytes(),
        logprobs=completion.logprobs.astype("<f4", copy=False).tobytes(),
        finish_reason=FINISH_REASONS[completion.finish],
        error=completion.error,
        generation_s=generation_s,
        replica_id=replica_id,
    )
    for version, num_tokens in completion.spans:
        trajectory.spans.add(version=version, num_tokens=num_tokens)
    return trajectory


def mark_failed(trajectory: Trajectory, error: str) -> Trajectory:
    """The same session as FAILED, without tokens: it is never trained."""
    for name in ("token_ids", "logprobs", "spans", "reward", "reward_extras", "prediction"):
        trajectory.ClearField(name)
    trajectory.finish_reason, trajectory.error = FINISH_REASON_FAILED, error
    return trajectory


def _request(lease: Lease, index: int, prompt: Sequence[int], partial: Trajectory | None) -> Request:
    s = lease.prompt.sampling
    request = Request(
        id=session_id(lease.prompt.uid, index),
        prompt=prompt,
        max_new_tokens=s.max_new_tokens,
        temperature=s.temperature,
        top_p=s.top_p or 1.0,
        top_k=s.top_k,
        stop_token_ids=frozenset(s.stop_token_ids),
        seed=(s.seed + (lease.attempt - 1) * SEED_STRIDE) % 2**63,
    )
    if partial is not None and partial.token_ids:
        request.prefix_tokens = np.frombuffer(partial.token_ids, "<i4").tolist()
        request.prefix_logprobs = np.frombuffer(partial.logprobs, "<f4").tolist()
        request.prefix_spans = [(span.version, span.num_tokens) for span in partial.spans]
    return request


class LeaseBook:
    """Every lease this replica holds and how far each of its sessions is."""

    def __init__(self, replica_id: str) -> None:
        self.replica_id = replica_id
        self.num_generating = 0
        """Sessions with the engine, waiting or running."""
        self.num_ended = 0
        """Sessions that await a score or the acknowledgement of their report."""
        self._held: dict[str, Held] = {}
        self._queued: dict[tuple[str, int], Trajectory] = {}

    # ---- what is held

    def attempts(self) -> dict[str, int]:
        """uid -> attempt of every lease held."""
        return {uid: held.attempt for uid, held in self._held.items()}

    @property
    def num_queued(self) -> int:
        """Trajectories ready to be reported."""
        return len(self._queued)

    @property
    def is_pinned(self) -> bool:
        """Whether sessions are being generated that must end on the version they began with."""
        return any(held.pin_version and held.is_generating for held in self._held.values())

    def wants(self, trajectory: Trajectory) -> bool:
        """Whether this very trajectory is still owed: its lease was not lost meanwhile."""
        held = self._held.get(trajectory.prompt_uid)
        return held is not None and held.owed.get(trajectory.index) is trajectory

    # ---- the life of a lease

    def begin(self, lease: Lease, now_s: float) -> Begun:
        """Take a lease: a request for each missing session, continuing its partial answer where there is one.

        If the prompt is held already (its lease expired and came back here) the new attempt adopts what is being worked on.
        """
        uid, missing = lease.prompt.uid, set(lease.missing)
        held = self._held.get(uid)
        if held is None:
            extra = json.loads(lease.prompt.extra_json) if lease.prompt.extra_json else {}
            held = self._held[uid] = Held(lease.prompt, lease.attempt, lease.pin_version, now_s, extra)
        held.attempt, held.pin_version = lease.attempt, lease.pin_version
        aborts = [self._drop(held, index) for index in sorted(held.owed.keys() - missing)]
        new = sorted(missing - held.owed.keys())
        if not missing:
            del self._held[uid]
        partials = {t.index: t for t in lease.partials}
        prompt: list[int] = np.frombuffer(lease.prompt.token_ids, "<i4").tolist()
        for index in new:
            held.owed[index] = None
        self.num_generating += len(new)
        return Begun([_request(lease, i, prompt, partials.get(i)) for i in new], [a for a in aborts if a])

    def end(self, completion: Completion, now_s: float) -> Ended | None:
        """A session left the engine. The answer needs a score, except when it is None: lost, given back, or queued as FAILED."""
        uid, _, index_text = completion.id.rpartition("/")
        held, index = self._held.get(uid), int(index_text)
        if held is None or held.owed.get(index, completion) is not None:
            return None  # its lease was lost while it ran
        trajectory = trajectory_of(completion, self.replica_id, now_s - held.began_s)
        self.num_generating -= 1
        if completion.finish == "aborted":
            del held.owed[index]
            held.partials.append(trajectory)
            return None
        held.owed[index] = trajectory
        self.num_ended += 1
        if completion.finish == "failed":
            self._queued[uid, index] = mark_failed(trajectory, completion.error or "generation failed")
            return None
        return Ended(held, trajectory)

    def queue(self, trajectory: Trajectory) -> None:
        """It is scored, or failed: report it, if it is still owed."""
        if self.wants(trajectory):
            self._queued[trajectory.prompt_uid, trajectory.index] = trajectory

    def reports(self, num_max: int, bytes_max: int) -> list[TrajectoryReport]:
        """The oldest unacknowledged ends, at least one if there is any; they stay queued until `acknowledge`."""
        reports: list[TrajectoryReport] = []
        num_bytes = 0
        for (uid, _), trajectory in self._queued.items():
            num_bytes += len(trajectory.token_ids) + len(trajectory.logprobs)
            if reports and (len(reports) >= num_max or num_bytes > bytes_max):
                break
            reports.append(TrajectoryReport(attempt=self._held[uid].attempt, trajectory=trajectory))
        return reports

    def acknowledge(self, reports: Iterable[TrajectoryReport], lost_uids: Iterable[str]) -> list[str]:
        """The scheduler has these. Returns the ids to abort: sessions of leases it says are lost."""
        sent: dict[str, int] = {}
        lost = set(lost_uids)
        for report in reports:
            uid, index = report.trajectory.prompt_uid, report.trajectory.index
            sent[uid] = report.attempt
            held = self._held.get(uid)
            if uid in lost or held is None or self._queued.pop((uid, index), None) is None:
                continue
            del held.owed[index]
            self.num_ended -= 1
            if not held.owed and not held.partials:
                del self._held[uid]
        return self.lose(lost, sent)

    def lose(self, uids: Iterable[str], attempts: Mapping[str, int]) -> list[str]:
        """Forget lost leases; returns the ids to abort.

        `attempts` is what the caller knew when it asked: a lease granted since then (a newer attempt) is kept.
        """
        aborts: list[str] = []
        for uid in uids:
            held = self._held.get(uid)
            if held is None or attempts.get(uid) != held.attempt:
                continue
            aborts += [a for index in list(held.owed) if (a := self._drop(held, index))]
            del self._held[uid]
        return aborts

    def generating(self) -> list[str]:
        """Ids of the sessions with the engine."""
        return [session_id(uid, index) for uid, held in self._held.items() for index, t in held.owed.items() if t is None]

    def give_back(self) -> list[ReturnedLease]:
        """Forget every lease; each with its partial answers, for the scheduler. Whole answers must be reported before."""
        returned = [
            ReturnedLease(prompt_uid=uid, attempt=held.attempt, partials=[t for t in held.partials if t.token_ids])
            for uid, held in self._held.items()
        ]
        self.lose(list(self._held), self.attempts())
        return returned

    def _drop(self, held: Held, index: int) -> str | None:
        """Stop owing one session; its engine id when the engine has it."""
        trajectory = held.owed.pop(index)
        if trajectory is None:
            self.num_generating -= 1
            return session_id(held.prompt.uid, index)
        self.num_ended -= 1
        self._queued.pop((held.prompt.uid, index), None)
        return None
