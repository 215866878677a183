"""Which version is whose, in which slot, and who may still be reading it. Pure: no memory, no wire, time is an argument.

prepare          commit                 two newer READY           last lease ends
-------> STAGING -------> READY (newest two) -------> RETIRED (while leased) -------> gone
            | another prepare, a failed verification
            +-------> gone

W1  Readers see READY versions only. Ids only grow, and an older trainer epoch can neither prepare nor commit.
W2  A slot is given to a writer only if no version lies in it and everyone who was ever handed it has said he is done.
    The slot of an abandoned publish or of a lapsed lease is dropped instead: a late write lands, and a slow reader
    reads, in memory that nobody else has.
W3  The two newest READY versions are kept; there are never more than `slots_max` slots.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from stretto.errors import FencedError, FullError, NotFoundError, RefusedError, StaleError
from stretto.weights.layout import Digests, Layout, VersionId

READY_KEPT = 2
"""The newest, and one for readers that began before it."""
FREE_KEPT = 2
"""Free slots kept warm: one for the next publish, one as readers hold a third version now and then."""
SLOTS_MAX = 8
"""Two READY, one STAGING, five that slow readers hold; each is a whole model."""
SLOT_BYTES_MIN = 4096
ENDED_KEPT = 1024
"""Ended leases remembered, so that a repeated release gets the same answer."""
READER_FORGOTTEN_S = 60.0
"""A reader that neither watches nor asks for this long leaves the table."""


class State(Enum):
    STAGING = 1
    READY = 2
    RETIRED = 3


@dataclass
class Entry:
    """One version."""

    id: VersionId
    slot_id: str
    layout: Layout
    state: State = State.STAGING
    digests: Digests | None = None
    """Set when READY."""
    ready_at_s: float = 0.0


@dataclass
class Slot:
    """Memory for one version."""

    id: str
    nbytes: int
    is_reusable: bool = True
    """W2: false once somebody who was handed it went silent."""


@dataclass
class Lease:
    """The right to read one version until `deadline_s`."""

    id: str
    replica_id: str
    operation_id: str
    version: VersionId
    slot_id: str
    deadline_s: float
    backend: str
    is_shared: bool
    """The reader looks into the slot itself; false: it is sent copies."""


@dataclass
class Reader:
    """What a replica said about itself."""

    replica_id: str
    backend: str
    is_shared: bool
    last_heard_s: float
    held: VersionId | None = None
    last_error: str = ""
    lease_id: str = ""
    num_watches: int = 0
    past_operations: deque[str] = field(default_factory=lambda: deque[str](maxlen=16))


class Versions:
    """The relay's whole state except for the bytes."""

    def __init__(self, name: str, lease_s: float, slots_max: int = SLOTS_MAX) -> None:
        """`name` is unique per incarnation of the relay: it begins the ids of slots and leases."""
        self._name, self._lease_s, self._slots_max = name, lease_s, slots_max
        self._count = 0
        self.fence = 0
        """The newest trainer epoch that prepared."""
        self.entries: dict[VersionId, Entry] = {}
        self.slots: dict[str, Slot] = {}
        self.leases: dict[str, Lease] = {}
        self.readers: dict[str, Reader] = {}
        self._ended: dict[str, bool] = {}
        """Ended leases, oldest first: whether they were valid to their end."""

    # ---- publishing

    def prepare(self, id: VersionId, layout: Layout, now_s: float) -> Entry:
        """A STAGING entry with a slot to write to, or the READY entry when `id` is READY already.

        An earlier publish that did not commit is abandoned, also one of the same id: each attempt has its own slot.
        Raises FencedError, StaleError (something newer is READY), RefusedError (same id, other layout), FullError.
        """
        self.expire(now_s)
        self._check_fence(id)
        self.fence = id.epoch
        known, newest = self.entries.get(id), self.newest()
        if known is not None and known.state is State.READY:
            if known.layout.digest != layout.digest:
                raise RefusedError(f"{id} is READY with another layout; a version is published once")
            return known
        if newest is not None and id <= newest.id:
            raise StaleError(f"{id} is older than {newest.id}, which is READY; versions only grow")
        for entry in [e for e in self.entries.values() if e.state is State.STAGING]:
            self._drop(entry, is_reusable=False)
        slot = self._slot_for(layout.arena_bytes)
        self.entries[id] = Entry(id, slot.id, layout)
        return self.entries[id]

    def staging(self, slot_id: str) -> Entry:
        """The version being written to `slot_id`. Raises NotFoundError when that publish was abandoned."""
        for entry in self.entries.values():
            if entry.state is State.STAGING and entry.slot_id == slot_id:
                return entry
        raise NotFoundError(f"nothing is being published in slot {slot_id!r}: another publish took its place or the relay restarted")

    def check_commit(self, id: VersionId, slot_id: str, content: bytes) -> Entry:
        """The entry that may become READY once its bytes are verified, or was READY with this content digest already.

        Raises FencedError, NotFoundError (abandoned), RefusedError (READY with other bytes).
        """
        self._check_fence(id)
        entry = self.entries.get(id)
        if entry is None or (entry.state is State.STAGING and entry.slot_id != slot_id):
            raise NotFoundError(f"{id} is not being published in slot {slot_id!r}: another publish took its place or the relay restarted")
        if entry.digests is not None and entry.digests.content != content:
            raise RefusedError(f"{id} was published with other bytes; a version is published once")
        return entry

    def commit(self, id: VersionId, slot_id: str, digests: Digests, now_s: float) -> Entry:
        """The bytes were verified: READY. The same errors as check_commit, as things change during a verification."""
        entry = self.check_commit(id, slot_id, digests.content)
        if entry.state is State.STAGING:
            entry.state, entry.digests, entry.ready_at_s = State.READY, digests, now_s
            ready = sorted((e for e in self.entries.values() if e.state is State.READY), key=lambda e: e.id)
            for old in ready[:-READY_KEPT]:
                old.state = State.RETIRED
        self._settle()
        return entry

    def abandon(self, slot_id: str) -> None:
        """The publish in `slot_id` failed."""
        for entry in [e for e in self.entries.values() if e.state is State.STAGING and e.slot_id == slot_id]:
            self._drop(entry, is_reusable=False)

    def newest(self) -> Entry | None:
        """The newest READY version."""
        return max((e for e in self.entries.values() if e.state is State.READY), key=lambda e: e.id, default=None)

    def _check_fence(self, id: VersionId) -> None:
        if id.epoch < self.fence:
            raise FencedError(f"trainer epoch {id.epoch} is older than {self.fence}: another trainer took over this run; stop this one")

    # ---- reading

    def join(self, replica_id: str, backend: str, is_shared: bool, now_s: float) -> Reader:
        """Enter `replica_id` into the table, or change how its bytes come."""
        reader = self.readers.setdefault(replica_id, Reader(replica_id, backend, is_shared, now_s))
        reader.backend, reader.is_shared, reader.last_heard_s = backend, is_shared, now_s
        return reader

    def reader(self, replica_id: str, now_s: float) -> Reader:
        """Raises NotFoundError for one that has not joined this incarnation of the relay."""
        if (reader := self.readers.get(replica_id)) is None:
            raise NotFoundError(f"replica {replica_id!r} has not joined, or the relay restarted since; join first")
        reader.last_heard_s = now_s
        return reader

    def acquire(self, replica_id: str, operation_id: str, held: VersionId | None, now_s: float) -> Lease | None:
        """A lease on the newest READY version; None when it is not newer than `held`. The same operation gets the same lease.

        A reader has one lease: an earlier one lapses. Raises NotFoundError, RefusedError (an operation that ended).
        """
        self.expire(now_s)
        reader = self.reader(replica_id, now_s)
        current = self.leases.get(reader.lease_id)
        if current is not None and current.operation_id == operation_id:
            return current
        if operation_id in reader.past_operations:
            raise RefusedError(f"operation {operation_id!r} of replica {replica_id!r} has ended; acquire under a new id")
        if current is not None:
            self._lapse(current)
        reader.held = held
        newest = self.newest()
        if newest is None or (held is not None and newest.id <= held):
            return None
        lease_id, deadline_s = self._new_id("lease"), now_s + self._lease_s
        lease = Lease(lease_id, replica_id, operation_id, newest.id, newest.slot_id, deadline_s, reader.backend, reader.is_shared)
        self.leases[lease.id] = lease
        reader.lease_id = lease.id
        reader.past_operations.append(operation_id)
        return lease

    def lease(self, lease_id: str, now_s: float) -> Lease:
        """A lease that has not ended; a reader that is sent copies shows by each that it lives, and gets more time.

        Raises StaleError.
        """
        lease = self.leases.get(lease_id)
        if lease is None or lease.deadline_s <= now_s:
            raise StaleError(f"lease {lease_id!r} has ended; acquire again")
        if not lease.is_shared:
            lease.deadline_s = now_s + self._lease_s
        return lease

    def release(self, lease_id: str, replica_id: str, error: str, loaded: bytes, now_s: float) -> bool:
        """Whether the lease lasted until now, so that what was read is what was leased. Repeats get the same answer."""
        self.expire(now_s)
        reader, lease = self.readers.get(replica_id), self.leases.get(lease_id)
        if reader is not None:
            reader.last_heard_s = now_s
        if lease is None or lease.replica_id != replica_id:
            if reader is not None and error:
                reader.last_error = error
            return lease is None and self._ended.get(lease_id, False)
        digests = self.entries[lease.version].digests
        assert digests is not None, "a leased version was READY"
        is_right = bool(error) or loaded in (b"", digests.content)
        if not is_right:
            error = f"{lease.version}: loaded content {loaded.hex()}, leased {digests.content.hex()}"
        if reader is not None:
            reader.last_error = error
            reader.held = reader.held if error else lease.version
        self._end(lease, was_valid=is_right)
        self._settle()
        return is_right

    def expire(self, now_s: float) -> list[Lease]:
        """End the leases whose time is over, and forget silent readers. Returns the leases that lapsed."""
        late = [lease for lease in self.leases.values() if lease.deadline_s <= now_s]
        for lease in late:
            self._lapse(lease)
        silent = [r for r in self.readers.values() if not r.num_watches and r.last_heard_s + READER_FORGOTTEN_S <= now_s]
        for reader in silent:
            if reader.lease_id not in self.leases:
                del self.readers[reader.replica_id]
        return late

    def num_leases(self, id: VersionId) -> int:
        return sum(lease.version == id for lease in self.leases.values())

    def _lapse(self, lease: Lease) -> None:
        if lease.is_shared:
            self.slots[lease.slot_id].is_reusable = False  # W2: he may still be reading
        if (reader := self.readers.get(lease.replica_id)) is not None:
            reader.last_error = f"{lease.version}: the lease ended before it was released"
        self._end(lease, was_valid=False)
        self._settle()

    def _end(self, lease: Lease, *, was_valid: bool) -> None:
        del self.leases[lease.id]
        self._ended[lease.id] = was_valid
        while len(self._ended) > ENDED_KEPT:
            del self._ended[next(iter(self._ended))]

    # ---- slots

    def _slot_for(self, nbytes: int) -> Slot:
        """A slot that fits, reused or new (W2, W3). Raises FullError naming who holds the others."""
        needed = max(-(-nbytes // SLOT_BYTES_MIN) * SLOT_BYTES_MIN, SLOT_BYTES_MIN)
        free = self._free()
        fitting = [s for s in free if needed <= s.nbytes <= 2 * needed]
        if fitting:
            return min(fitting, key=lambda s: s.nbytes)
        for slot in free:  # of another layout
            del self.slots[slot.id]
        if len(self.slots) >= self._slots_max:
            holders = sorted({f"{lease.replica_id} ({lease.version})" for lease in self.leases.values()})
            readers = ", ".join(holders)
            raise FullError(f"all {self._slots_max} slots are in use; readers: {readers}; a lease ends within {self._lease_s} s")
        slot = Slot(self._new_id("slot"), needed)
        self.slots[slot.id] = slot
        return slot

    def _free(self) -> list[Slot]:
        used = {e.slot_id for e in self.entries.values()}
        return [s for s in self.slots.values() if s.id not in used]

    def _drop(self, entry: Entry, *, is_reusable: bool) -> None:
        self.slots[entry.slot_id].is_reusable &= is_reusable
        del self.entries[entry.id]
        self._settle()

    def _settle(self) -> None:
        """Let go of RETIRED versions without readers and of slots that are not worth keeping."""
        leased = {lease.version for lease in self.leases.values()}
        for id in [e.id for e in self.entries.values() if e.state is State.RETIRED and e.id not in leased]:
            del self.entries[id]
        free = self._free()
        worth = [s for s in free if s.is_reusable][-FREE_KEPT:]
        for slot in free:
            if slot not in worth:
                del self.slots[slot.id]

    def _new_id(self, kind: str) -> str:
        self._count += 1
        return f"{self._name}-{kind}{self._count}"
