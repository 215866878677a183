"""Waiting for a change without losing one."""

from __future__ import annotations

import asyncio

from services.scheduler.changes import Changes

LONG_S = 5.0
"""A lost wake-up would wait so long."""


async def test_c18_a_change_between_looking_and_waiting_ends_the_wait_at_once() -> None:
    changes = Changes()
    seen = changes.count
    changes.note()
    async with asyncio.timeout(LONG_S / 5):
        assert await changes.after(seen, LONG_S)


async def test_c18_every_waiter_sees_a_change_and_none_sees_one_twice() -> None:
    changes = Changes()
    waiters = [asyncio.create_task(changes.after(changes.count, LONG_S)) for _ in range(3)]
    await asyncio.sleep(0)  # each holds the event now
    changes.note()
    assert await asyncio.gather(*waiters) == [True] * 3
    assert not await changes.after(changes.count, 0.0)
