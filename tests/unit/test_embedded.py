from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from stretto import embedded, process
from stretto.errors import NotFoundError, UnavailableError
from tests.waits import until

PARENT = """
import sys, time
from pathlib import Path
from stretto import embedded
server = embedded.start(Path(sys.argv[1]))
print(server.pid, server.url, flush=True)
time.sleep(60)
"""


def test_a_server_answers_and_persists_when_start_returns(valkey: embedded.EmbeddedServer) -> None:
    with redis.Redis.from_url(valkey.url) as client:
        assert client.config_get("appendonly") == {"appendonly": "yes"}
        assert client.config_get("appendfsync") == {"appendfsync": "everysec"}
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}


def test_nobody_gets_in_without_the_password_and_it_is_in_no_argument_or_file(valkey: embedded.EmbeddedServer) -> None:
    assert embedded.ping(valkey.port, "wrong") == "-NOAUTH Authentication required."
    argv = subprocess.run(["ps", "-o", "args=", "-p", str(valkey.pid)], capture_output=True, text=True, check=True).stdout
    assert valkey.password not in argv


def test_a_killed_server_comes_back_on_its_port_with_its_data(tmp_path: Path) -> None:
    first = embedded.start(tmp_path)
    with redis.Redis.from_url(first.url) as client:
        client.set("k", "v")
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: first.exit_code() is not None)
    second = embedded.start(tmp_path, first.port, first.password)
    with redis.Redis.from_url(first.url) as client:
        assert client.get("k") == b"v"
    first.stop()
    second.stop()
    assert not any(stat.S_IMODE(f.stat().st_mode) & 0o022 for f in tmp_path.rglob("*"))


def test_no_server_outlives_a_killed_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline().split()[0])
    parent.kill()
    parent.wait()
    until(lambda: not process.is_alive(pid), deadline_s=2.0)


def test_a_taken_port_is_an_error_with_the_servers_own_words(valkey: embedded.EmbeddedServer, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="in use"):
        embedded.start(tmp_path, valkey.port)


def test_a_named_program_that_is_missing_is_refused_not_replaced() -> None:
    with pytest.raises(NotFoundError, match="no-such-server"):
        embedded.binary("no-such-server")
