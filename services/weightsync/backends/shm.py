"""Same host: a slot's file descriptor is handed over, and bytes move by one memory copy (publish) or none (fetch).

    client --connect, one-time token--> unix socket --SO_PEERCRED: same user?--> length + descriptor by SCM_RIGHTS

A publisher gets the writable descriptor, a reader one that cannot be mapped for writing.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import socket
import stat
import struct
import tempfile
from collections.abc import Collection
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from services.weightsync.backends import Grant
from services.weightsync.memory import Memory
from stretto.errors import RecipeError, RefusedError

log = logging.getLogger("stretto.weightsync")

SOCKET_PATH_BYTES_MAX = 100
"""sun_path holds 108 bytes on Linux, 104 elsewhere; a few are for the temporary name."""
HANDOVER_S = 5.0
"""A client that connects but does not send its token in this time is dropped."""
ACCEPT_AGAIN_S = 0.2
"""After a connection could not be taken."""
TOKEN_BYTES = 16


def unavailable() -> str | None:
    """Why this host cannot hand out memory, or None."""
    if not hasattr(os, "memfd_create") or not hasattr(socket, "SO_PEERCRED") or not hasattr(fcntl, "F_ADD_SEALS"):
        return "needs Linux: memfd_create and SO_PEERCRED"
    return None


def socket_path(wanted: Path | None, run_folder: Path) -> Path:
    """Where the socket goes: `wanted`, else in the run folder, else in a private temporary folder named after it.

    Raises RecipeError when `wanted` is too long for a socket address, or the temporary folder is somebody else's.
    """
    path = (wanted or run_folder / "weightsync.sock").resolve()
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX:
        return path
    if wanted is not None:
        raise RecipeError(f"weightsync.socket = {str(path)!r}: longer than the {SOCKET_PATH_BYTES_MAX} bytes of a socket address")
    name = sha256(os.fsencode(path)).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"stretto-{os.getuid()}-{name}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise RecipeError(f"{folder} is not a folder of ours; set weightsync.socket")
    return folder / "weightsync.sock"


class _Granted(NamedTuple):
    slot_id: str
    token: bytes
    writable: bool


class Shm:
    """The shm backend."""

    name = "shm"
    is_shared = True

    def __init__(self, path: Path) -> None:
        self._path = path
        self._memories: dict[str, Memory] = {}
        self._granted: dict[str, _Granted] = {}
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def endpoint(self) -> str:
        return str(self._path)

    def admit(self, slot_id: str, memory: Memory) -> None:
        self._memories[slot_id] = memory

    def withdraw(self, slot_id: str) -> None:
        self._memories.pop(slot_id, None)
        self._granted = {owner: g for owner, g in self._granted.items() if g.slot_id != slot_id}

    def grant(self, slot_id: str, owner: str, *, writable: bool) -> Grant:
        granted = self._granted[owner] = _Granted(slot_id, secrets.token_bytes(TOKEN_BYTES), writable)
        return Grant(self.endpoint, granted.token)

    def retain(self, owners: Collection[str]) -> None:
        self._granted = {owner: g for owner, g in self._granted.items() if owner in owners}

    async def start(self) -> None:
        """Listen. Replaces the socket of a relay that was killed; raises RefusedError if one still answers there."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._listener = _listen(self._path)
        self._spawn(self._accept(self._listener))

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._listener is not None:
            self._listener.close()
            self._path.unlink(missing_ok=True)
            self._listener = None

    def _spawn(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(listener)
            except OSError as err:  # no descriptor left, or the client left first: the next one must still be heard
                log.warning("handover_failed", extra={"fields": {"error": str(err)}})
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            client.setblocking(False)
            self._spawn(self._hand_over(client))

    async def _hand_over(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(HANDOVER_S):
                token = await asyncio.get_running_loop().sock_recv(client, TOKEN_BYTES)
            if not token:
                return  # only tried whether we can be reached
            uid = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
            if uid != os.getuid():
                log.warning("handover_refused", extra={"fields": {"uid": uid}})
                client.send(f"user {uid} is not the relay's user {os.getuid()}".encode())
            elif (granted := self._redeem(token)) is None:
                client.send(b"the token is not valid (used, or its publish or lease has ended)")
            else:
                _send_descriptor(client, self._memories[granted.slot_id], writable=granted.writable)

    def _redeem(self, token: bytes) -> _Granted | None:
        for owner, granted in self._granted.items():
            if secrets.compare_digest(granted.token, token):
                del self._granted[owner]
                return granted
        return None


def _send_descriptor(client: socket.socket, memory: Memory, *, writable: bool) -> None:
    fd = memory.fd if writable else memory.open_read_only()
    try:
        client.sendmsg([struct.pack("<q", memory.nbytes)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
    finally:
        if not writable:
            os.close(fd)


def _listen(path: Path) -> socket.socket:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
        probe.settimeout(HANDOVER_S)
        probe.connect(str(path))
        raise RefusedError(f"another relay answers at {path}; stop it, or give this run another weightsync.socket")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    beside = path.with_name(f"{path.name}.new")
    beside.unlink(missing_ok=True)
    listener.bind(str(beside))
    beside.chmod(0o600)
    listener.listen(128)
    listener.setblocking(False)
    beside.replace(path)  # nobody ever finds a socket that does not answer
    return listener
