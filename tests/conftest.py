"""Real parts that tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import redis

from stretto import embedded
from stretto.errors import NotFoundError


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[embedded.EmbeddedServer]:
    """One real server for the session, on a free port, with a password and an append-only file."""
    try:
        server = embedded.start(tmp_path_factory.mktemp("valkey"), program=os.environ.get("STRETTO_REDIS_SERVER"))
    except NotFoundError as err:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(err))
    yield server
    server.stop()


@pytest.fixture
def valkey(valkey_server: embedded.EmbeddedServer) -> embedded.EmbeddedServer:
    """The session's server, emptied. `valkey.url` is what a client connects to."""
    with redis.Redis.from_url(valkey_server.url) as client:
        client.flushall()
        client.script_flush()
    return valkey_server
