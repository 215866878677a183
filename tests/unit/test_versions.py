"""Versions, slots, leases: examples that read as the contract, then any sequence of events against W1, W2, W3."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.weightsync.versions import READER_FORGOTTEN_S, READY_KEPT, SLOTS_MAX, Entry, State, Versions
from stretto.errors import FencedError, FullError, NotFoundError, RefusedError, StaleError
from stretto.weights import layout as layouts
from stretto.weights.layout import Digests, VersionId

LEASE_S = 10.0
SMALL, LARGE = layouts.plan({"w": ("U8", (1000,))}), layouts.plan({"w": ("U8", (100_000,))})


def digests(seed: int) -> Digests:
    return Digests(1 << 20, (bytes([seed % 256]) * 16,), b"content" + seed.to_bytes(8, "little", signed=True))


def publish(versions: Versions, epoch: int, version: int, now_s: float = 0.0) -> Entry:
    id = VersionId(epoch, version)
    entry = versions.prepare(id, SMALL, now_s)
    return versions.commit(id, entry.slot_id, digests(version), now_s)


def reading(versions: Versions, name: str, *, is_shared: bool = True, now_s: float = 0.0) -> None:
    versions.join(name, "shm" if is_shared else "grpc", is_shared, now_s)


def states(versions: Versions) -> dict[tuple[int, int], str]:
    return {(id.epoch, id.version): entry.state.name for id, entry in versions.entries.items()}


def test_a_version_is_seen_only_after_its_commit() -> None:
    v = Versions("n", LEASE_S)
    reading(v, "r")
    entry = v.prepare(VersionId(1, 0), SMALL, 0.0)
    assert v.newest() is None
    assert v.acquire("r", "op", None, 0.0) is None
    v.commit(entry.id, entry.slot_id, digests(0), 0.0)
    assert v.newest() is entry
    assert v.acquire("r", "op", None, 0.0) is not None


def test_two_ready_versions_are_kept_and_three_slots_are_enough() -> None:
    v = Versions("n", LEASE_S)
    for version in range(10):
        publish(v, 1, version)
    assert states(v) == {(1, 8): "READY", (1, 9): "READY"}
    assert len(v.slots) == 3


def test_nothing_is_leased_to_a_reader_that_holds_the_newest_or_something_newer() -> None:
    v = Versions("n", LEASE_S)
    publish(v, 1, 5)
    reading(v, "r")
    for held in (VersionId(1, 5), VersionId(1, 6), VersionId(2, 0)):
        assert v.acquire("r", f"op{held}", held, 0.0) is None
        assert v.readers["r"].held == held
    assert v.acquire("r", "op", VersionId(1, 4), 0.0) is not None


def test_an_older_trainer_epoch_can_neither_prepare_nor_commit() -> None:
    v = Versions("n", LEASE_S)
    old = v.prepare(VersionId(1, 5), SMALL, 0.0)
    v.prepare(VersionId(2, 3), SMALL, 0.0)
    with pytest.raises(FencedError, match="trainer epoch 1 is older than 2"):
        v.commit(old.id, old.slot_id, digests(5), 0.0)
    with pytest.raises(FencedError):
        v.prepare(VersionId(1, 6), SMALL, 0.0)


def test_a_newer_epoch_wins_with_a_lower_version() -> None:
    v = Versions("n", LEASE_S)
    publish(v, 1, 40)
    publish(v, 2, 37)
    reading(v, "r")
    lease = v.acquire("r", "op", VersionId(1, 40), 0.0)
    assert lease is not None
    assert lease.version == (2, 37)


def test_the_same_version_again_is_accepted_with_the_same_bytes_only() -> None:
    v = Versions("n", LEASE_S)
    entry = publish(v, 1, 3)
    assert v.prepare(entry.id, SMALL, 0.0).state is State.READY
    assert v.commit(entry.id, "", digests(3), 0.0) is entry
    with pytest.raises(RefusedError, match="other bytes"):
        v.commit(entry.id, "", digests(4), 0.0)
    with pytest.raises(RefusedError, match="another layout"):
        v.prepare(entry.id, LARGE, 0.0)
    with pytest.raises(StaleError, match="versions only grow"):
        v.prepare(VersionId(1, 2), SMALL, 0.0)


def test_the_slot_of_an_abandoned_publish_is_never_used_again() -> None:
    v = Versions("n", LEASE_S)
    dead = v.prepare(VersionId(1, 0), SMALL, 0.0).slot_id
    again = v.prepare(VersionId(1, 0), SMALL, 0.0)
    assert dead not in v.slots
    with pytest.raises(NotFoundError, match="another publish took its place"):
        v.commit(again.id, dead, digests(0), 0.0)
    v.commit(again.id, again.slot_id, digests(0), 0.0)
    v.abandon(again.slot_id)  # late news of a failure that did not happen
    assert states(v) == {(1, 0): "READY"}


def test_a_leased_version_outlives_its_successors_and_its_slot_is_reused_after_release() -> None:
    v = Versions("n", LEASE_S)
    first = publish(v, 1, 0)
    reading(v, "r")
    lease = v.acquire("r", "op", None, 0.0)
    assert lease is not None
    for version in range(1, 6):
        publish(v, 1, version)
        assert states(v)[(1, 0)] == ("READY" if version == 1 else "RETIRED")
    assert v.release(lease.id, "r", "", digests(0).content, 1.0)
    assert (1, 0) not in states(v)
    assert publish(v, 1, 6).slot_id in v.slots
    assert first.slot_id in v.slots  # kept for the next publish
    assert v.readers["r"].held == (1, 0)


def test_a_lease_ends_at_its_deadline_and_its_slot_is_dropped_when_it_was_shared() -> None:
    for is_shared in (True, False):
        v = Versions("n", LEASE_S)
        first = publish(v, 1, 0)
        reading(v, "r", is_shared=is_shared)
        lease = v.acquire("r", "op", None, 0.0)
        assert lease is not None
        publish(v, 1, 1)
        publish(v, 1, 2)
        assert v.expire(LEASE_S - 0.1) == []
        assert v.expire(LEASE_S) == [lease]
        assert (first.slot_id in v.slots) is not is_shared
        assert not v.release(lease.id, "r", "", b"", LEASE_S)
        with pytest.raises(StaleError, match="has ended"):
            v.lease(lease.id, LEASE_S)


def test_each_chunk_sent_gives_a_reader_more_time() -> None:
    v = Versions("n", LEASE_S)
    publish(v, 1, 0)
    reading(v, "r", is_shared=False)
    lease = v.acquire("r", "op", None, 0.0)
    assert lease is not None
    for now_s in (9.0, 18.0, 27.0):
        assert v.lease(lease.id, now_s) is lease
    assert v.release(lease.id, "r", "", b"", 36.0)


def test_acquire_is_idempotent_by_operation_and_a_late_duplicate_changes_nothing() -> None:
    v = Versions("n", LEASE_S)
    publish(v, 1, 0)
    reading(v, "r")
    one = v.acquire("r", "op1", None, 0.0)
    assert v.acquire("r", "op1", None, 0.0) is one
    two = v.acquire("r", "op2", None, 0.0)
    assert two is not None
    assert list(v.leases) == [two.id]
    with pytest.raises(RefusedError, match=r"'op1'.*has ended"):
        v.acquire("r", "op1", None, 0.0)
    assert list(v.leases) == [two.id]


def test_release_is_idempotent_and_knows_its_reader() -> None:
    v = Versions("n", LEASE_S)
    publish(v, 1, 0)
    reading(v, "r")
    reading(v, "thief")
    lease = v.acquire("r", "op", None, 0.0)
    assert lease is not None
    assert not v.release(lease.id, "thief", "", b"", 0.0)
    assert v.release(lease.id, "r", "", b"", 0.0)
    assert v.release(lease.id, "r", "", b"", LEASE_S * 9)
    assert not v.release("n-lease99", "r", "", b"", 0.0)


def test_a_failed_load_is_remembered_and_the_reader_keeps_what_it_held() -> None:
    v = Versions("n", LEASE_S)
    publish(v, 1, 0)
    publish(v, 1, 1)
    reading(v, "r")
    lease = v.acquire("r", "op", VersionId(1, 0), 0.0)
    assert lease is not None
    v.release(lease.id, "r", "bucket 3 of 10 …", b"", 0.0)
    assert v.readers["r"].held == (1, 0)
    assert v.readers["r"].last_error == "bucket 3 of 10 …"
    lease = v.acquire("r", "op2", VersionId(1, 0), 0.0)
    assert lease is not None
    assert not v.release(lease.id, "r", "", b"something else", 0.0)
    assert "loaded content" in v.readers["r"].last_error


def test_full_names_the_readers_and_ends_with_their_leases() -> None:
    v = Versions("n", LEASE_S)
    for number in range(SLOTS_MAX - READY_KEPT):
        publish(v, 1, number)
        reading(v, f"r{number}")
        v.acquire(f"r{number}", "op", None, 0.0)
    publish(v, 1, 100)
    publish(v, 1, 101)
    with pytest.raises(FullError, match=r"all 8 slots are in use; readers: r0 \(v0 of trainer epoch 1\), r1"):
        v.prepare(VersionId(1, 102), SMALL, 0.0)
    publish(v, 1, 102, LEASE_S)


def test_a_changed_layout_gets_new_slots_and_lets_the_old_ones_go() -> None:
    v = Versions("n", LEASE_S)
    for version in range(4):
        publish(v, 1, version)
    for version in range(4, 8):
        entry = v.prepare(VersionId(1, version), LARGE, 0.0)
        assert v.slots[entry.slot_id].nbytes >= LARGE.arena_bytes
        v.commit(entry.id, entry.slot_id, digests(version), 0.0)
    assert {s.nbytes for s in v.slots.values()} == {v.slots[v.entries[VersionId(1, 7)].slot_id].nbytes}


def test_a_silent_reader_is_forgotten_unless_it_watches() -> None:
    v = Versions("n", LEASE_S)
    reading(v, "gone")
    reading(v, "watching")
    v.readers["watching"].num_watches = 1
    v.expire(READER_FORGOTTEN_S)
    assert list(v.readers) == ["watching"]
    with pytest.raises(NotFoundError, match="join first"):
        v.acquire("gone", "op", None, READER_FORGOTTEN_S)


class AnySequence(RuleBasedStateMachine):
    """Trainers and readers that come, go silent, lie late; the clock only moves forward."""

    def __init__(self) -> None:
        super().__init__()
        self.v = Versions("n", LEASE_S)
        self.now_s, self.epoch, self.version, self.op = 0.0, 1, 0, 0
        self.tainted: set[str] = set()
        """Slots that somebody silent may still write to or read from."""
        self.staged: Entry | None = None
        self.newest_seen: VersionId | None = None

    def stage(self, id: VersionId, *, is_large: bool) -> None:
        before = self.staged
        leased = {lease.slot_id for lease in self.v.leases.values() if lease.deadline_s > self.now_s}
        ready = {e.slot_id for e in self.v.entries.values() if e.state is State.READY}
        try:
            entry = self.v.prepare(id, LARGE if is_large else SMALL, self.now_s)
        except FullError:
            assert len(leased | ready) >= SLOTS_MAX - 1
            self.staged = None
        else:
            self.staged = entry
            assert entry.slot_id not in leased | ready | self.tainted, "W2"
        if before is not None:
            self.tainted.add(before.slot_id)

    @rule(is_large=st.booleans())
    def prepare(self, is_large: bool) -> None:
        self.stage(VersionId(self.epoch, self.version), is_large=is_large)

    @rule(back=st.integers(0, 5))
    def a_new_trainer_resumes(self, back: int) -> None:
        self.epoch, self.version = self.epoch + 1, max(0, self.version - back)
        self.stage(VersionId(self.epoch, self.version), is_large=False)

    @precondition(lambda self: self.staged)
    @rule()
    def commit(self) -> None:
        assert self.staged is not None
        self.v.commit(self.staged.id, self.staged.slot_id, digests(self.version), self.now_s)
        self.staged, self.version = None, self.version + 1

    @precondition(lambda self: self.staged)
    @rule()
    def verification_fails(self) -> None:
        assert self.staged is not None
        self.v.abandon(self.staged.slot_id)
        self.tainted.add(self.staged.slot_id)
        self.staged = None

    @precondition(lambda self: self.epoch > 1)
    @rule()
    def an_old_trainer_wakes_up(self) -> None:
        with pytest.raises(FencedError):
            self.v.prepare(VersionId(self.epoch - 1, self.version + 100), SMALL, self.now_s)

    @rule(name=st.sampled_from("abcdefg"), is_shared=st.booleans())
    def acquire(self, name: str, is_shared: bool) -> None:
        self.op += 1
        self.v.join(name, "shm" if is_shared else "grpc", is_shared, self.now_s)
        before = self.v.leases.get(self.v.readers[name].lease_id)
        lease = self.v.acquire(name, f"op{self.op}", None, self.now_s)
        newest = self.v.newest()
        assert (lease and lease.version) == (newest and newest.id), "W1"
        if before is not None and before.is_shared:
            self.tainted.add(before.slot_id)

    @precondition(lambda self: self.v.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.v.leases.values(), key=lambda each: each.id)))
        in_time = lease.deadline_s > self.now_s
        if not in_time and lease.is_shared:
            self.tainted.add(lease.slot_id)
        assert self.v.release(lease.id, lease.replica_id, "", b"", self.now_s) is in_time

    @rule(by_s=st.floats(0.1, LEASE_S))
    def time_passes(self, by_s: float) -> None:
        self.now_s += by_s
        self.tainted |= {lease.slot_id for lease in self.v.expire(self.now_s) if lease.is_shared}

    @invariant()
    def w1_readers_see_growing_ready_versions(self) -> None:
        newest = self.v.newest()
        if newest is not None:
            assert newest.digests is not None
            assert self.newest_seen is None or newest.id >= self.newest_seen
            self.newest_seen = newest.id

    @invariant()
    def w2_every_version_has_its_own_slot(self) -> None:
        slots = [e.slot_id for e in self.v.entries.values()]
        assert len(slots) == len(set(slots))
        assert set(slots) <= set(self.v.slots)
        assert {lease.version for lease in self.v.leases.values()} <= set(self.v.entries)

    @invariant()
    def w3_slots_are_bounded_and_idle_ones_few(self) -> None:
        assert len(self.v.slots) <= SLOTS_MAX
        assert sum(e.state is State.READY for e in self.v.entries.values()) <= READY_KEPT
        assert sum(e.state is State.STAGING for e in self.v.entries.values()) == (self.staged is not None)
        if not self.v.leases:
            assert len(self.v.slots) <= 5


AnySequence.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
test_any_sequence_keeps_w1_w2_and_w3 = AnySequence.TestCase
