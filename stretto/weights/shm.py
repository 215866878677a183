"""Mapping a relay's slot into this process.

    client --connect, token--> relay's unix socket --length + file descriptor (SCM_RIGHTS)--> client maps it

The descriptor is of anonymous memory (memfd): it needs no name, no /dev/shm, and is freed when its last user ends, however
it ends. A mapping is kept for as long as the relay keeps reusing the slot.
"""

from __future__ import annotations

import array
import contextlib
import mmap
import os
import socket
import struct
import threading

import numpy as np

from stretto.errors import UnavailableError
from stretto.weights.layout import Bytes

MAPPINGS_MAX = 4
"""Mappings kept: two READY slots, one being written, one leased by somebody slow. A dropped slot's memory lives while mapped."""
HANDOVER_S = 5.0
"""Limit for each socket operation of a handover."""
_ANSWER_BYTES = 512


def ask_for(path: str, token: bytes) -> tuple[int, int]:
    """(file descriptor, length) of the slot that `token` is for; the caller closes the descriptor.

    Raises UnavailableError when the socket cannot be reached or the relay refuses.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
            s.settimeout(HANDOVER_S)
            s.connect(path)
            s.sendall(token)
            fds = array.array("i")
            answer, ancillary, _, _ = s.recvmsg(_ANSWER_BYTES, socket.CMSG_SPACE(fds.itemsize))
    except OSError as err:
        raise UnavailableError(f"shm: {path} cannot be reached from here: {err}") from None
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    if not fds:
        raise UnavailableError(f"shm: {path} refused: {answer.decode(errors='replace') or 'closed the connection'}")
    return fds[0], struct.unpack("<q", answer)[0]


def is_reachable(path: str) -> bool:
    """Whether the relay's socket can be connected to from this process."""
    if not path:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
        s.settimeout(HANDOVER_S)
        with contextlib.suppress(OSError):
            s.connect(path)
            return True
    return False


def map_slot(fd: int, nbytes: int, *, writable: bool) -> Bytes:
    """The slot's bytes, with every page present. Unmapped when the last view of it is gone."""
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    return np.frombuffer(mmap.mmap(fd, nbytes, flags=flags, prot=access), np.uint8)


class Slots:
    """The mappings this process has, by slot id. Thread-safe."""

    def __init__(self, *, writable: bool) -> None:
        self._writable = writable
        self._mapped: dict[str, Bytes] = {}
        self._layout_digest = b""
        self._lock = threading.Lock()

    def get(self, slot_id: str, path: str, token: bytes, layout_digest: bytes) -> Bytes:
        """The slot's bytes. Slots of a relay that restarted or of another layout are let go.

        Raises UnavailableError when it is not mapped yet and cannot be.
        """
        with self._lock:
            incarnation = slot_id.partition("-")[0] + "-"
            if layout_digest != self._layout_digest:
                self._mapped, self._layout_digest = {}, layout_digest
            self._mapped = {i: a for i, a in self._mapped.items() if i.startswith(incarnation)}
            if (mapped := self._mapped.pop(slot_id, None)) is None:
                fd, nbytes = ask_for(path, token)
                try:
                    mapped = map_slot(fd, nbytes, writable=self._writable)
                finally:
                    os.close(fd)
            self._mapped[slot_id] = mapped  # newest last
            while len(self._mapped) > MAPPINGS_MAX:
                del self._mapped[next(iter(self._mapped))]
            return mapped

    def forget(self, slot_id: str) -> None:
        with self._lock:
            self._mapped.pop(slot_id, None)

    def clear(self) -> None:
        with self._lock:
            self._mapped.clear()
