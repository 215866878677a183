"""Anywhere gRPC reaches: the arena in order, in chunks of about 1 MiB, on the service's own port."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncIterator, Callable, Collection

import numpy as np

from services.weightsync.backends import Grant
from services.weightsync.memory import Memory
from stretto.errors import InvalidArgumentError
from stretto.weights import stream

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
MALLOC_MMAP_BYTES = 32 << 20
"""The largest value glibc takes. Below it, freed chunks are reused instead of being unmapped and faulted in again."""
MALLOC_TRIM_BYTES = 512 << 20


class GrpcStream:
    """The grpc backend: nothing to hand out, the RPCs Publish and Fetch carry the bytes."""

    name = "grpc"
    is_shared = False
    endpoint = ""

    async def start(self) -> None:
        """Tune malloc for messages of 1 MiB: a third more throughput. No effect on a libc without mallopt."""
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, MALLOC_MMAP_BYTES)
            mallopt(_M_TRIM_THRESHOLD, MALLOC_TRIM_BYTES)

    async def close(self) -> None:
        """Nothing is held."""

    def admit(self, slot_id: str, memory: Memory) -> None:
        """Nothing to register."""

    def withdraw(self, slot_id: str) -> None:
        """Nothing is registered."""

    def grant(self, slot_id: str, owner: str, *, writable: bool) -> Grant:
        return Grant()

    def retain(self, owners: Collection[str]) -> None:
        """Nothing is granted."""


async def receive(messages: AsyncIterator[tuple[str, memoryview]], memory: Memory, nbytes: int, check: Callable[[], None]) -> int:
    """Write a publisher's stream into the slot. `check` raises once the slot is not his any more.

    Raises InvalidArgumentError unless exactly `nbytes` come.
    """
    offset = 0
    async for _, data in messages:
        check()  # no await between here and the copy
        if offset + len(data) > nbytes:
            raise InvalidArgumentError(f"more than the {nbytes} bytes of the arena were sent")
        if data:
            memory.bytes[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        offset += len(data)
    if offset != nbytes:
        raise InvalidArgumentError(f"{offset} of {nbytes} bytes were sent")
    return offset


async def send(memory: Memory, offset: int, nbytes: int, check: Callable[[], None]) -> AsyncIterator[bytes]:
    """The slot's bytes [offset, nbytes) as messages. `check` raises once the lease has ended."""
    for begin in range(offset, nbytes, stream.CHUNK_BYTES):
        check()  # no await between here and the copy
        yield stream.encode_fetch(memory.bytes[begin : min(begin + stream.CHUNK_BYTES, nbytes)])
        await asyncio.sleep(0)
