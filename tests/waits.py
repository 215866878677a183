"""Waiting for what another thread, task or process does."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable

DEADLINE_S = 30.0
"""For what takes milliseconds while nothing else runs: only a state that never comes fails."""
POLL_S = 0.005


def until(is_so: Callable[[], object], what: str = "", deadline_s: float = DEADLINE_S) -> float:
    """Poll until it holds; the seconds it took. Fails by name at the deadline."""
    start_s = time.monotonic()
    while not is_so():
        assert time.monotonic() - start_s < deadline_s, f"not within {deadline_s} s: {what or inspect.getsource(is_so).strip()}"
        time.sleep(POLL_S)
    return time.monotonic() - start_s


async def eventually(is_so: Callable[[], object], what: str = "", deadline_s: float = DEADLINE_S) -> None:
    """`until` in an event loop; what `is_so` answers may be awaitable."""
    try:
        async with asyncio.timeout(deadline_s):
            while not (await answer if inspect.isawaitable(answer := is_so()) else answer):  # noqa: ASYNC110 - what it waits for may be another process
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(f"not within {deadline_s} s: {what or inspect.getsource(is_so).strip()}") from None
