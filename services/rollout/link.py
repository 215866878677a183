"""The line to the scheduler: calls that outlive its restarts, and the session (replica epoch) they belong to."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

import grpc

from stretto import rpc
from stretto.errors import DeadlineError, FullError, StrettoError, UnavailableError
from stretto.v1.scheduler_pb2_grpc import SchedulerServiceStub

log = logging.getLogger("stretto.rollout")

BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.05, 1.0
"""Delays between repeats while the scheduler is away: doubling, with jitter in [0.5, 1]."""


def is_passing(err: StrettoError) -> bool:
    """Whether the same call may succeed later: the peer is away, full, or failed on its own side (INTERNAL)."""
    return isinstance(err, UnavailableError | DeadlineError | FullError) or type(err) is StrettoError


class SchedulerLink:
    """One channel for all calls of a replica; says once that the scheduler is away and once that it is back."""

    def __init__(self, target: str, replica_id: str) -> None:
        self.replica_id = replica_id
        self.epoch = 0
        """Of this replica's session; 0 until the first heartbeat is answered."""
        self._target = target
        self._channel = rpc.connect(target, service=rpc.SCHEDULER)
        self._stub: Any = SchedulerServiceStub(self._channel)
        self._is_away = False

    async def close(self) -> None:
        await self._channel.close()

    async def call(self, method: str, request: Any, timeout_s: float) -> Any:
        """One try. Raises the scheduler's StrettoError."""
        try:
            answer = await getattr(self._stub, method)(request, timeout=timeout_s)
        except grpc.RpcError as err:
            failure = rpc.from_rpc_error(err)
            self._note_away(failure)
            raise failure from None
        if self._is_away:
            self._is_away = False
            log.warning("scheduler_back", extra={"fields": {"target": self._target}})
        return answer

    async def call_until_answered(self, method: str, make_request: Callable[[], Any], timeout_s: float) -> Any:
        """Repeat while the scheduler is away or in trouble, each time with a fresh `make_request()`; raises what it refuses."""
        delay_s = BACKOFF_FIRST_S
        while True:
            try:
                return await self.call(method, make_request(), timeout_s)
            except StrettoError as err:
                if not is_passing(err):
                    raise
                await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
                delay_s = min(delay_s * 2, BACKOFF_MAX_S)

    def _note_away(self, failure: StrettoError) -> None:
        if is_passing(failure) and not self._is_away:
            self._is_away = True
            log.warning("scheduler_away", extra={"fields": {"target": self._target, "error": failure.message}})
