"""What a display remembers of a run: curves, notable events, means. Pure: fed with the SDK's events and statuses."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from stretto.client import Event, Status

NOTABLE = (
    "checkpoint",
    "evaluation",
    "failed",
    "reissued",
    "replica_joined",
    "replica_left",
    "trainer_opened",
    "paused",
    "resumed",
    "phase",
)
"""Kinds of events worth a line; steps are curves, evictions a count."""
PACE_STEPS = 10
"""Steps over which the time of a step is taken."""


@dataclass(slots=True)
class Curve:
    """Points in order of step."""

    steps: list[int] = field(default_factory=list[int])
    values: list[float] = field(default_factory=list[float])

    def add(self, step: int, value: float) -> None:
        """Points of this step or later ones go: after a resume the run passes them a second time."""
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.values.pop()
        self.steps.append(step)
        self.values.append(value)


@dataclass(slots=True)
class Mean:
    """Of what was added."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass(slots=True)
class History:
    """One display's memory."""

    reward: Curve = field(default_factory=Curve)
    accuracy: Curve = field(default_factory=Curve)
    lag: Curve = field(default_factory=Curve)
    unix_s: Curve = field(default_factory=Curve)
    """When each step was committed."""
    lines: deque[str] = field(default_factory=lambda: deque[str](maxlen=50))
    trainer_busy: Mean = field(default_factory=Mean)
    rollout_busy: Mean = field(default_factory=Mean)
    tokens_per_s: Mean = field(default_factory=Mean)
    trajectories_begin: int | None = None
    """Trajectories reported when the display began to look."""
    running_since_s: float | None = None
    """When the run was first seen running, in the clock of `saw`."""
    running_until_s: float | None = None

    def happened(self, event: Event) -> None:
        """Take in one event."""
        if event.kind == "step":
            self._stepped(event)
        elif event.kind == "evaluation" and event.evaluation is not None:
            self.accuracy.add(event.evaluation.step, event.evaluation.accuracy)
        if event.kind in NOTABLE:
            self.lines.append(told(event))

    def _stepped(self, event: Event) -> None:
        step = step_of(event)
        self.unix_s.add(step, event.unix_s)
        for curve, name in ((self.reward, "reward_mean"), (self.lag, "lag_max")):
            if (value := event.values.get(name)) is not None:
                curve.add(step, value)
        if (busy := event.values.get("busy_share")) is not None:
            self.trainer_busy.add(busy)

    def saw(self, status: Status, now_s: float) -> None:
        """Take in one status."""
        if self.trajectories_begin is None:
            self.trajectories_begin = status.num_trajectories
        if status.phase not in ("running", "finishing"):
            return
        if self.running_since_s is None and any(r.version is not None for r in status.replicas):
            self.running_since_s = now_s
        self.running_until_s = now_s
        working = [r for r in status.replicas if r.state in ("running", "updating")]
        if working and status.phase == "running":
            self.tokens_per_s.add(sum(r.tokens_per_s for r in working))
            self.rollout_busy.add(sum(r.busy_share for r in working) / len(working))

    @property
    def running_s(self) -> float | None:
        """Seconds the run was seen running."""
        if self.running_since_s is None or self.running_until_s is None:
            return None
        return self.running_until_s - self.running_since_s

    @property
    def step_s(self) -> float | None:
        """Seconds of a step, over the last few."""
        times = self.unix_s.values[-PACE_STEPS - 1 :]
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    def left_s(self, status: Status) -> float | None:
        """Seconds to the last step at the present pace."""
        return None if self.step_s is None else self.step_s * max(0, status.total_steps - status.committed_step)


def told(event: Event) -> str:
    """An event other than a step as one line."""
    return f"phase {event.text.lower()}" if event.kind == "phase" else event.text


def step_of(event: Event) -> int:
    """The step an event of kind "step" or "checkpoint" tells of."""
    return int(event.values.get("step", 0))


def short(metrics: Mapping[str, float], name: str, form: str = ".3f", missing: str = "-") -> str:
    """One metric as text."""
    value = metrics.get(name)
    return missing if value is None else format(value, form)
