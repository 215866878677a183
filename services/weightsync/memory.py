"""The bytes of a slot: allocated once, every page touched once, then reused.

First touch costs ten times a copy, which is why slots are kept; a memfd has no name, so nothing is left behind when the
processes that hold it end, however they end.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os

import numpy as np

from stretto.weights.layout import Bytes

_MADV_POPULATE_WRITE = 23
"""Linux 5.14; not in Python's mmap before 3.13."""
_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")
"""Nobody who is handed the descriptor can change the length under a mapping (SIGBUS)."""


class Memory:
    """One slot's bytes, and a descriptor to hand out where the kernel has memfd."""

    def __init__(self, nbytes: int, *, is_shareable: bool) -> None:
        """Takes about 0.5 s per GB: call it off the event loop."""
        self.nbytes = nbytes
        self.fd = -1
        if is_shareable:
            self.fd = os.memfd_create("stretto-weights", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
            os.ftruncate(self.fd, nbytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, sum(getattr(fcntl, seal) for seal in _SEALS))
        mapped = mmap.mmap(self.fd, nbytes, flags=mmap.MAP_SHARED)
        touched = False
        with contextlib.suppress(OSError, ValueError):
            mapped.madvise(_MADV_POPULATE_WRITE)
            touched = True
        self.bytes: Bytes = np.frombuffer(mapped, np.uint8)
        if not touched:
            self.bytes[::4096] = 0

    def open_read_only(self) -> int:
        """A new descriptor that cannot be mapped for writing; the caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Let go. The pages live on while anybody else has them mapped."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.bytes = np.empty(0, np.uint8)  # the mapping ends with its last view
