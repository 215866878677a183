"""Whether a service that ended is started again, and when. Pure: time and the run's progress are given.

    exit code            while the run is not done           when it is done
    0                    restart at once (it was drained)    ended
    2  bad recipe        give up                             give up
    3  fenced            give up                             ended
    anything else        restart after a back-off;           ended
                         give up after CRASHES_MAX in a row

A row of crashes ends when the service lives for HEALTHY_S. It also does not end the run while the run makes progress: a
replica that cannot start must not stop the others.
"""

from __future__ import annotations

from dataclasses import dataclass

BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.5, 10.0
"""Delay before a restart: doubles with each crash in a row."""
HEALTHY_S = 60.0
"""After this long a crash is a new one."""
CRASHES_MAX = 8
"""Crashes in a row without progress: half a minute of back-offs, longer than a peer needs to come back."""
RECIPE_CODE, FENCED_CODE = 2, 3
"""Exit codes of a service: its recipe is not valid; a newer incarnation took over."""


@dataclass(frozen=True, slots=True)
class History:
    """What is remembered of a service between its processes."""

    crashes: int = 0
    """In a row: each lived less than HEALTHY_S."""
    unproductive: int = 0
    """Of them, in a row without a committed step in between."""
    committed_step: int = -1
    """Of the run at the last crash."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Start it again after `delay_s`."""

    delay_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The run cannot go on; `exit_code` becomes the supervisor's."""

    exit_code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """It did its work."""


def after(history: History, code: int, ran_s: float, committed_step: int, is_done: bool) -> tuple[Restart | GiveUp | Ended, History]:
    """What to do about a service that ended with `code` (negative: signal) after `ran_s` seconds."""
    if code == RECIPE_CODE:
        return GiveUp(RECIPE_CODE, "the recipe is not valid (exit code 2)"), history
    if is_done:
        return Ended(), history
    if code == FENCED_CODE:
        return GiveUp(FENCED_CODE, "a newer incarnation took over this run (exit code 3)"), history
    if code == 0:
        return Restart(0.0, "ended before the run was done"), history
    crashes = history.crashes + 1 if ran_s < HEALTHY_S else 1
    unproductive = history.unproductive + 1 if ran_s < HEALTHY_S and committed_step <= history.committed_step else 1
    again = History(crashes, unproductive, committed_step)
    if unproductive >= CRASHES_MAX:
        return GiveUp(1, f"crashed {unproductive} times in a row, last by {describe(code)}"), again
    return Restart(min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** (crashes - 1)), f"ended by {describe(code)}"), again


def describe(code: int) -> str:
    """ "exit code 1", "signal 9"."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"
