"""Follows a run over the SDK, in threads of its own, for whoever shows it.

events  --> History.happened, and a queue of events to print
status  --> twice a second; why, when no step was committed for a while
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from stretto.client import Client, Event, Status
from stretto.errors import StrettoError
from stretto.history import History

STATUS_EVERY_S = 0.5
STALLED_S = 5.0
"""Without a committed step for this long, the run is asked why."""
AWAY_S = 0.5
"""Before a scheduler that is away is tried again."""
LAST_EVENTS_S = 2.0
"""For the last events to arrive once the run is done."""


@dataclass(frozen=True, slots=True)
class Heard:
    """The newest state of a run; `status` None before the first answer."""

    status: Status | None
    reasons: tuple[str, ...]
    """Why nothing moves; empty while something does."""
    error: str
    """Why the scheduler does not answer; empty when it does."""


class Monitor:
    """Follows the run at `address` until closed. Its threads are daemons and share the client."""

    def __init__(self, address: str) -> None:
        self._client = Client(address)
        self._closed, self._told_end = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._history = History()
        self._events: deque[Event] = deque()
        self._heard = Heard(None, (), "not reached yet")
        self._threads = [threading.Thread(target=f, daemon=True, name=f.__name__) for f in (self._follow_events, self._follow_status)]
        for thread in self._threads:
            thread.start()

    @property
    def heard(self) -> Heard:
        """The newest state; never waits."""
        return self._heard

    @property
    def history(self) -> History:
        """Curves and means; owned by the threads, read while they write (each read sees whole points)."""
        return self._history

    def take_events(self) -> Sequence[Event]:
        """Events since the last call, oldest first."""
        taken: list[Event] = []
        while self._events:
            taken.append(self._events.popleft())
        return taken

    def wait_for_end(self) -> None:
        """Until every event of a run that is done was taken in; at most LAST_EVENTS_S."""
        self._told_end.wait(LAST_EVENTS_S)

    def close(self) -> None:
        self._closed.set()
        self._client.close()
        for thread in self._threads:
            thread.join(2.0)

    def _follow_events(self) -> None:
        after = "0"
        while not self._closed.is_set():
            try:
                for event in self._client.events(after):
                    self._told_end.clear()  # a run that was done and got more steps goes on
                    after = event.event_id
                    with self._lock:
                        self._history.happened(event)
                    self._events.append(event)
                self._told_end.set()
            except (StrettoError, ValueError):  # ValueError: the channel was closed
                pass
            self._closed.wait(AWAY_S)

    def _follow_status(self) -> None:
        moved_s, place = time.monotonic(), ("", -1, 0)
        while not self._closed.is_set():
            try:
                status = self._client.status()
                now_s = time.monotonic()
                now_at = (status.phase, status.committed_step, len(status.replicas))
                if now_at != place or status.is_done:
                    moved_s, place = now_s, now_at
                reasons = self._client.why().reasons if now_s - moved_s > STALLED_S else ()
                with self._lock:
                    self._history.saw(status, now_s)
                self._heard = Heard(status, reasons, "")
            except (StrettoError, ValueError) as err:
                self._heard = Heard(self._heard.status, (), str(err))
            self._closed.wait(STATUS_EVERY_S)
