"""The relay: versions with bytes behind them.

    prepare -> slot allocated, granted by a backend -> (bytes) -> commit: hashed here, in a thread -> READY -> watchers told
    acquire -> lease + grant -> (bytes) -> release

Decisions are in `versions`; this file gives them memory, a clock and waiting. After every decision `_settle` makes memory and
grants follow: slots and leases that are no more lose theirs.

    W4  A version becomes READY only when the relay itself has hashed its bytes to the digests given.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass

from services.weightsync import metrics
from services.weightsync.backends import Backend, Grant, choose, grpc_stream
from services.weightsync.memory import Memory
from services.weightsync.versions import Entry, Lease, State, Versions
from stretto.errors import CorruptError, InvalidArgumentError, NotFoundError
from stretto.v1 import weightsync_pb2 as pb
from stretto.weights import layout as layouts
from stretto.weights.layout import Layout, VersionId

log = logging.getLogger("stretto.weightsync")

TICK_S_MAX = 1.0
"""Leases are looked at this often, or four times per lease."""


@dataclass(frozen=True)
class Prepared:
    """Where to write a version."""

    backend: str
    slot_id: str
    grant: Grant
    is_ready: bool


@dataclass(frozen=True)
class Leased:
    """What to read, where, for how long."""

    lease: Lease
    entry: Entry
    grant: Grant


class Relay:
    """One incarnation of the relay. Everything runs on one event loop; hashing and first touch run in threads."""

    def __init__(
        self,
        name: str,
        backends: Mapping[str, Backend],
        missing: Mapping[str, str],
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.versions = Versions(name, lease_s)
        self.backends, self.missing = backends, missing
        self._clock, self._tick_s = clock, min(TICK_S_MAX, lease_s / 4)
        self._memories: dict[str, Memory] = {}
        self._writers: dict[str, object] = {}
        """The latest Publish stream of each slot: an earlier one must not write any more."""
        self._begun_s: dict[VersionId, float] = {}
        self._changed = asyncio.Event()
        self._is_closing = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        for backend in self.backends.values():
            await backend.start()
        self._own(asyncio.create_task(self._keep_time()))

    def drain(self) -> None:
        """End all watches, so that a server that stops does not wait for them."""
        self._is_closing = True
        self._wake()

    async def close(self) -> None:
        self.drain()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for backend in self.backends.values():
            await backend.close()
        for memory in self._memories.values():
            memory.close()
        self._memories.clear()

    # ---- publishing

    async def prepare(self, id: VersionId, layout: Layout, offered: Sequence[str]) -> Prepared:
        """A slot for `id`. Raises what Versions.prepare raises, RefusedError without a common backend, NotFoundError when
        another publish came while memory was being allocated."""
        backend = choose(offered, "cpu", self.backends, self.missing)
        now_s = self._tick()
        entry = self.versions.prepare(id, layout, now_s)
        self._settle()
        if entry.state is State.READY:
            return Prepared(backend.name, "", Grant(), is_ready=True)
        self._begun_s[id] = now_s
        if entry.slot_id not in self._memories:
            # Not cancelled with the call: a half-made memory would have no owner.
            await asyncio.shield(self._own(asyncio.create_task(self._allocate(entry.slot_id))))
        self.versions.staging(entry.slot_id)
        return Prepared(backend.name, entry.slot_id, backend.grant(entry.slot_id, entry.slot_id, writable=True), is_ready=False)

    async def receive(self, slot_id: str, messages: AsyncIterator[tuple[str, memoryview]]) -> int:
        """grpc: the bytes written to the slot. Raises NotFoundError once another publish or stream took its place."""
        entry = self.versions.staging(slot_id)
        writer = self._writers[slot_id] = object()

        def check() -> None:
            if self.versions.staging(slot_id) is not entry or self._writers.get(slot_id) is not writer:
                raise NotFoundError(f"another stream writes to slot {slot_id!r}")

        return await grpc_stream.receive(messages, self._memories[slot_id], entry.layout.arena_bytes, check)

    async def commit(self, id: VersionId, slot_id: str, manifest: pb.Manifest) -> float:
        """W4: verify and make READY; seconds spent verifying. Raises CorruptError naming the bucket, and what
        Versions.commit raises."""
        entry = self.versions.check_commit(id, slot_id, manifest.digest)
        if entry.state is not State.STAGING:
            return 0.0
        digests = layouts.read_digests(manifest, entry.layout)
        verifying_s = self._clock()
        found = await asyncio.to_thread(layouts.hash_arena, entry.layout, self._memories[slot_id].bytes, digests.bucket_bytes)
        verify_s = self._clock() - verifying_s
        try:
            layouts.check(digests, found, entry.layout, f"{id} in slot {slot_id}")
        except CorruptError as err:
            log.error("publish_corrupt", extra={"fields": {"version": id.version, "epoch": id.epoch, "error": err.message}})
            metrics.published.labels("corrupt").inc()
            self.versions.abandon(slot_id)
            self._settle()
            raise
        now_s = self._tick()
        begun_s = self._begun_s.get(id, now_s)
        self.versions.commit(id, slot_id, digests, now_s)
        self._settle()
        self._wake()
        _record(entry, now_s - begun_s, verify_s)
        return verify_s

    # ---- reading

    def join(self, replica_id: str, offered: Sequence[str], device_type: str) -> Backend:
        """Raises RefusedError without a common backend."""
        if not replica_id:
            raise InvalidArgumentError("replica_id is empty")
        backend = choose(offered, device_type or "cpu", self.backends, self.missing)
        is_new = replica_id not in self.versions.readers
        self.versions.join(replica_id, backend.name, backend.is_shared, self._tick())
        self._settle()
        if is_new:
            log.info("reader_joined", extra={"fields": {"replica": replica_id, "backend": backend.name}})
        return backend

    async def watch(self, replica_id: str) -> AsyncIterator[VersionId]:
        """The newest READY version now, then each newer one, until `drain`. Skips what nobody had time to see."""
        reader = self.versions.reader(replica_id, self._tick())
        reader.num_watches += 1
        last: VersionId | None = None
        try:
            while not self._is_closing:
                changed, newest = self._changed, self.versions.newest()
                if newest is not None and newest.id != last:
                    last = newest.id
                    yield newest.id
                else:
                    await changed.wait()
        finally:
            reader.num_watches -= 1
            reader.last_heard_s = self._clock()

    def acquire(self, replica_id: str, operation_id: str, held: VersionId | None) -> Leased | None:
        """A lease on the newest version, None when `held` is as new."""
        lease = self.versions.acquire(replica_id, operation_id, held, self._tick())
        self._settle()
        if lease is None:
            return None
        grant = self.backends[lease.backend].grant(lease.slot_id, lease.id, writable=False)
        return Leased(lease, self.versions.entries[lease.version], grant)

    async def send(self, lease_id: str, offset: int) -> AsyncIterator[bytes]:
        """grpc: the leased version's bytes as messages. Raises StaleError once the lease has ended."""
        lease = self.versions.lease(lease_id, self._clock())
        nbytes = self.versions.entries[lease.version].layout.arena_bytes
        if not 0 <= offset <= nbytes:
            raise InvalidArgumentError(f"offset = {offset}: the arena has {nbytes} bytes")

        def check() -> None:
            self.versions.lease(lease_id, self._clock())  # renews, and raises at the end

        async for message in grpc_stream.send(self._memories[lease.slot_id], offset, nbytes, check):
            yield message
            metrics.sent_bytes.inc(len(message))

    def release(self, lease_id: str, replica_id: str, error: str, loaded: bytes) -> bool:
        """Whether the lease lasted until now."""
        now_s = self._tick()
        lease = self.versions.leases.get(lease_id)
        was_valid = self.versions.release(lease_id, replica_id, error, loaded, now_s)
        self._settle()
        if lease is not None:
            metrics.fetched.labels(lease.backend, "failed" if error or not was_valid else "loaded").inc()
        if error:
            log.warning("reader_failed", extra={"fields": {"replica": replica_id, "lease": lease_id, "error": error}})
        return was_valid

    # ---- status

    def age_s(self, at_s: float) -> float:
        """Seconds since a moment in `versions`."""
        return self._clock() - at_s

    def resident_bytes(self) -> int:
        return sum(memory.nbytes for memory in self._memories.values())

    # ---- upkeep

    def _tick(self) -> float:
        """The time, after ending what has ended by now."""
        now_s = self._clock()
        for lease in self.versions.expire(now_s):
            metrics.lapsed.inc()
            fields = {"replica": lease.replica_id, "version": lease.version.version, "epoch": lease.version.epoch}
            log.warning("lease_lapsed", extra={"fields": fields})
        return now_s

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            self._tick()
            self._settle()

    async def _allocate(self, slot_id: str) -> None:
        is_shareable = any(backend.is_shared for backend in self.backends.values())
        memory = await asyncio.to_thread(Memory, self.versions.slots[slot_id].nbytes, is_shareable=is_shareable)
        self._memories[slot_id] = memory
        for backend in self.backends.values():
            backend.admit(slot_id, memory)
        self._settle()  # the slot may be gone already

    def _settle(self) -> None:
        """Memory and grants follow the decisions."""
        for slot_id in [s for s in self._memories if s not in self.versions.slots]:
            for backend in self.backends.values():
                backend.withdraw(slot_id)
            self._memories.pop(slot_id).close()
            self._writers.pop(slot_id, None)
        staging = {e.id: e.slot_id for e in self.versions.entries.values() if e.state is State.STAGING}
        self._begun_s = {id: at_s for id, at_s in self._begun_s.items() if id in staging}
        owners = {*self.versions.leases, *staging.values()}
        for backend in self.backends.values():
            backend.retain(owners)
        metrics.leases.set(len(self.versions.leases))
        metrics.readers.set(len(self.versions.readers))
        metrics.slots.set(len(self._memories))
        metrics.resident_bytes.set(self.resident_bytes())

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _own(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _record(entry: Entry, publish_s: float, verify_s: float) -> None:
    nbytes = entry.layout.arena_bytes
    fields = {"version": entry.id.version, "epoch": entry.id.epoch, "bytes": nbytes, "verify_ms": round(verify_s * 1e3, 2)}
    log.info("version_ready", extra={"fields": fields})
    metrics.published.labels("ready").inc()
    metrics.published_bytes.inc(nbytes)
    metrics.publish_seconds.observe(publish_s)
    metrics.verify_seconds.observe(verify_s)
    metrics.newest_version.set(entry.id.version)
    metrics.newest_epoch.set(entry.id.epoch)
