"""Waiting for a change without losing one."""

from __future__ import annotations

import asyncio


class Changes:
    """A counter that can be waited on: read `count`, look, and wait `after` it; a change in between ends the wait at once."""

    def __init__(self) -> None:
        self.count = 0
        self._next = asyncio.Event()

    def note(self) -> None:
        self.count += 1
        happened, self._next = self._next, asyncio.Event()
        happened.set()

    async def after(self, seen: int, timeout_s: float) -> bool:
        """True once `count` differs from `seen`, False after `timeout_s`."""
        if self.count != seen:  # C18: no await between this line and holding the event that the next note() sets
            return True
        happened = self._next
        if timeout_s <= 0:
            return False
        try:
            async with asyncio.timeout(timeout_s):
                await happened.wait()
        except TimeoutError:
            return False
        return True
