"""The scheduler's events, read beside the loop: validation results find their way into the metrics files.

    WatchEvents(after the newest event we have a line for) --evaluation--> is_ours? --> on_evaluation(evaluation, event_id, unix_s)
          ^---- reconnect with the last id seen, for ever ----'

Reading starts before this process opened the run, so an evaluation that ended while the trainer was away is not lost.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import grpc

from stretto import rpc
from stretto.errors import DeadlineError, StrettoError
from stretto.v1 import scheduler_pb2 as pb
from stretto.v1 import scheduler_pb2_grpc as pb_grpc

log = logging.getLogger("stretto.trainer")

STREAM_S = 300.0
"""Deadline of one WatchEvents call; then it is opened again where it ended."""
RECONNECT_S = 0.5
"""Between two attempts to reach a scheduler that is away."""


def order(event_id: str) -> tuple[int, ...]:
    """Sort key of an event id ("1700000000000-3"); an empty one comes first."""
    return tuple(int(part) for part in event_id.split("-")) if event_id else ()


def is_ours(evaluation_step: int, event_id: str, *, opened_event_id: str, resume_step: int, current_step: int) -> bool:
    """Whether an evaluation belongs to the history this trainer continues.

    One from before it opened the run may be of a step that was lost with its predecessor; one from after may be too, if it
    was still running then.
    """
    if order(event_id) <= order(opened_event_id):
        return evaluation_step <= resume_step
    return evaluation_step <= current_step


class Feed:
    """A thread that watches until `stop`."""

    def __init__(
        self, scheduler: pb_grpc.SchedulerServiceStub, after_id: str, on_evaluation: Callable[[pb.Evaluation, str, float], bool]
    ) -> None:
        """`after_id` as in WatchEventsRequest.

        `on_evaluation` says whether the evaluation counts; it runs on the feed's thread and must not raise.
        """
        self._scheduler, self._last_id, self._on_evaluation = scheduler, after_id, on_evaluation
        self._seen: set[str] = set()
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._call: grpc.Call | None = None
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)
        self._thread.start()

    def wait_seen(self, evaluation_id: str, timeout_s: float) -> bool:
        """Whether the evaluation came by and counted, waiting for it up to `timeout_s`. A step that is done again reuses its id."""
        with self._changed:
            return self._changed.wait_for(lambda: evaluation_id in self._seen, timeout_s)

    def stop(self) -> None:
        self._stopping.set()
        if self._call is not None:
            self._call.cancel()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        is_away = False
        while not self._stopping.is_set():
            try:
                for event in self._open():
                    if is_away:
                        is_away = False
                        log.info("events_back")
                    self._take(event)
            except grpc.RpcError as raised:
                err: StrettoError = rpc.from_rpc_error(raised)
                if self._stopping.is_set() or isinstance(err, DeadlineError):
                    continue
                if not is_away:
                    is_away = True
                    log.warning("events_away", extra={"fields": {"error": err.message}})
            self._stopping.wait(RECONNECT_S)

    def _open(self) -> Iterator[pb.WatchEventsResponse]:
        self._call = call = self._scheduler.WatchEvents(pb.WatchEventsRequest(after_id=self._last_id), timeout=STREAM_S)
        if self._stopping.is_set():  # `stop` may have looked for the call just before it was made
            call.cancel()
        return call

    def _take(self, event: pb.WatchEventsResponse) -> None:
        is_result = event.HasField("evaluation") and bool(event.evaluation.outcome)
        counts = is_result and self._on_evaluation(event.evaluation, event.event_id, event.unix_s)
        self._last_id = event.event_id
        if counts:
            with self._changed:
                self._seen.add(event.evaluation.evaluation_id)
                self._changed.notify_all()
