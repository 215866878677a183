"""The store's client against a real server: stalls, and forgetting a run."""

from __future__ import annotations

import asyncio

import pytest
import redis

from stretto import embedded
from stretto.errors import UnavailableError
from stretto.store import CONNECTIONS_MAX, Store, forget_run


async def test_a_stalled_command_is_repeated_and_its_late_answer_is_never_read_as_the_next_ones(valkey: embedded.EmbeddedServer) -> None:
    store = await Store.open(valkey.url, timeout_s=0.1, outage_s=5)
    with redis.Redis.from_url(valkey.url) as other:
        other.mset({"a": "1", "b": "2"})
        for commands, answer in (([("GET", "a")], [b"1"]), ([("GET", "a"), ("GET", "a")], [b"1", b"1"])):
            other.execute_command("CLIENT", "PAUSE", "400", "ALL")
            assert await store.read(*commands) == answer
            assert await asyncio.gather(*(store.read(("GET", "b")) for _ in range(4))) == [[b"2"]] * 4
            assert store.outage is None
    await store.close()


async def test_a_server_that_stays_stalled_is_named_after_the_outage(valkey: embedded.EmbeddedServer) -> None:
    store = await Store.open(valkey.url, timeout_s=0.1, outage_s=0.2)
    with redis.Redis.from_url(valkey.url) as other:
        other.execute_command("CLIENT", "PAUSE", "1500", "ALL")
        with pytest.raises(UnavailableError, match=r"gave up read after 0\.2 s: Redis at .* does not answer \(TimeoutError\)"):
            await store.read(("GET", "a"))
    await store.close()


async def test_more_commands_at_once_than_connections_are_no_outage(
    valkey: embedded.EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    store = await Store.open(valkey.url)
    assert await asyncio.gather(*(store.read(("GET", "c")) for _ in range(3 * CONNECTIONS_MAX))) == [[None]] * 3 * CONNECTIONS_MAX
    assert "store_away" not in caplog.messages
    await store.close()


def test_fresh_removes_this_runs_keys_and_no_others(valkey: embedded.EmbeddedServer) -> None:
    with redis.Redis.from_url(valkey.url) as client:
        client.mset({"stretto:{a}:cursor": 1, "stretto:{a}:rev": 2, "stretto:{ab}:cursor": 3, "other": 4})
        assert forget_run(valkey.url, "a") == 2
        assert sorted(client.keys()) == [b"other", b"stretto:{ab}:cursor"]
