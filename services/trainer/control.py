"""What other threads may ask of the loop, and what they may read from it.

    signal handler ----> Stop           looked at between phases and in every wait
    gRPC thread -------> SaveRequests   served at the end of a step, or while the loop waits for a batch
    gRPC thread <------- Status         written by the loop only; single assignments, so no lock

Nothing here knows the learner or the network.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

from stretto.errors import UnavailableError

STOP_S = 4.5
"""From the request to stop to the end of the process, whatever it does then: supervisors give 5 s."""
OPERATIONS_MAX = 1024
"""Remembered SaveCheckpoint operation ids."""


class Stopping(Exception):  # noqa: N818 - not an error: the process was asked to end
    """The process was asked to end; raised out of a wait."""


class Stop:
    """A request to end, and waits that hear it."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._deadline_s = 0.0

    def request(self) -> None:
        if not self._event.is_set():
            self._deadline_s = time.monotonic() + STOP_S
            self._event.set()

    @property
    def is_requested(self) -> bool:
        return self._event.is_set()

    @property
    def left_s(self) -> float:
        """Until the process ends anyway; only after a request."""
        return max(0.0, self._deadline_s - time.monotonic())

    def check(self) -> None:
        """Raises Stopping once a stop was requested."""
        if self._event.is_set():
            raise Stopping

    def sleep(self, seconds: float) -> None:
        """Sleep, or raise Stopping as soon as a stop is requested."""
        if self._event.wait(seconds):
            raise Stopping


@dataclass(frozen=True, slots=True)
class Saved:
    """A durable checkpoint."""

    step: int
    path: str
    cut_id: str = ""


class SaveRequests:
    """Checkpoints that were asked for. The same operation id gets the same answer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_operation: OrderedDict[str, Future[Saved]] = OrderedDict()
        self._waiting: list[Future[Saved]] = []
        self._is_closed = False

    def ask(self, operation_id: str) -> Future[Saved]:
        """Fulfilled when a checkpoint of the step in progress, or of the newest one between steps, is durable."""
        with self._lock:
            known = self._by_operation.get(operation_id) if operation_id else None
            if known is not None:
                return known
            asked: Future[Saved] = Future()
            if self._is_closed:
                asked.set_exception(UnavailableError("the trainer is stopping; ask again when it is back"))
                return asked
            if operation_id:
                self._by_operation[operation_id] = asked
                while len(self._by_operation) > OPERATIONS_MAX:
                    self._by_operation.popitem(last=False)
            self._waiting.append(asked)
            return asked

    @property
    def any_waiting(self) -> bool:
        return bool(self._waiting)

    def take(self) -> list[Future[Saved]]:
        """Those not yet taken; the caller fulfils them."""
        with self._lock:
            taken, self._waiting = self._waiting, []
            return taken

    def close(self) -> None:
        """Whoever still waits is told that the trainer stops."""
        self._is_closed = True
        for asked in self.take():
            asked.set_exception(UnavailableError("the trainer is stopping; ask again when it is back"))


@dataclass(slots=True)
class Status:
    """What the trainer does now."""

    total_steps: int
    trainer_epoch: int = 0
    step: int = 0
    """Newest committed step."""
    optimizer_steps: int = 0
    checkpoint_step: int = 0
    cut_id: str = ""
    """Of the newest durable checkpoint."""
    wait_reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    activity: tuple[str, float] = field(default_factory=lambda: ("starting", time.monotonic()))
    """(name, since when): "starting", "sampling", "training", "publishing", "committing", "saving", "done"."""

    def enter(self, activity: str) -> None:
        self.activity = (activity, time.monotonic())

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Be in `activity`, then back in what was before."""
        before = self.activity
        self.enter(activity)
        try:
            yield
        finally:
            self.activity = before
