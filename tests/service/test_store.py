from __future__ import annotations

import redis

from stretto import embedded, store


def test_fresh_removes_this_runs_keys_and_no_others(valkey: embedded.EmbeddedServer) -> None:
    with redis.Redis.from_url(valkey.url) as client:
        client.mset({"stretto:{a}:cursor": 1, "stretto:{a}:rev": 2, "stretto:{ab}:cursor": 3, "other": 4})
        assert store.forget_run(valkey.url, "a") == 2
        assert sorted(client.keys()) == [b"other", b"stretto:{ab}:cursor"]
