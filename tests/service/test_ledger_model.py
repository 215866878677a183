"""The ledger against a plain model, in any order of transitions and crashes, on a real server.

After every transition the writer may die and repeat it (same operation id, perhaps as a new scheduler): the answer must be
the first one and nothing may move. Before it the server's memory may be full: then it happens wholly or not at all. The
model is a dict; the audit and the mirror are checked after every step.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from services.scheduler import audit, recovery
from services.scheduler.groups import State
from services.scheduler.ledger import RESTORED_ATTEMPTS, Ledger, TrajectoryEnd
from stretto import embedded
from stretto.errors import DeposedError, UnavailableError
from stretto.store import Store, forget_run
from stretto.v1 import types_pb2 as pb
from stretto.v1.ledger_pb2 import LedgerSnapshot

SIZE, BATCH, ATTEMPTS_MAX, REPLICA = 2, 2, 2, "r"
PICK = st.integers(0, 1000)
AGAIN = st.sampled_from(["", "", "repeat", "new scheduler repeats", "memory full before"])


@dataclass
class Model:
    """One open or committed group."""

    state: str = "pending"
    begin: int = -1
    attempt: int = 0
    failures: int = 0
    marks: list[str] = field(default_factory=lambda: ["0"] * SIZE)
    replica_epoch: int = 0
    step: int = 0

    def at_rest(self) -> Model:
        """As a snapshot keeps it, and as it comes back."""
        kept = replace(self, attempt=self.attempt + RESTORED_ATTEMPTS, marks=list(self.marks))
        if self.state in ("pending", "running"):
            kept.state, kept.replica_epoch, kept.marks = "pending", 0, ["0" if mark == "x" else mark for mark in self.marks]
        return kept

    def over(self, *, failed: bool) -> None:
        self.failures += failed
        self.marks = ["0" if mark == "x" else mark for mark in self.marks]
        self.state = "failed" if self.failures >= ATTEMPTS_MAX else "pending"
        self.replica_epoch = 0


@dataclass
class Kept:
    """A cut: the snapshot, and what the model was."""

    snapshot: LedgerSnapshot
    groups: dict[str, Model]
    steps: dict[int, list[str]]
    evicted: set[str]
    queued: list[str]
    cursor: int
    users: int
    step: int


def payload(uid: str) -> pb.Prompt:
    return pb.Prompt(uid=uid, group_size=SIZE, token_ids=uid.encode() + b"\x00\xff\r\n")


class Machine(RuleBasedStateMachine):
    store: ClassVar[Store]
    hurried: ClassVar[Store]
    """Gives up at once."""
    raw: ClassVar[redis.Redis]
    loop: ClassVar[asyncio.AbstractEventLoop]
    url: ClassVar[str]
    runs: ClassVar[itertools.count[int]] = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.run_name = f"model-{next(self.runs)}"
        self.groups: dict[str, Model] = {}
        self.steps: dict[int, list[str]] = {}
        self.evicted: set[str] = set()
        self.queued: list[str] = []
        self.cursor = self.users = self.committed = self.checkpoint = self.ops = 0
        self.trainer = self.replica = 0
        self.cut: Kept | None = None

    # ---- machinery

    def wait(self, awaitable: Awaitable[Any]) -> Any:
        return self.loop.run_until_complete(awaitable)  # type: ignore[arg-type]

    def do(self, again: str, act: Callable[[str, int], Awaitable[Any]]) -> Any:
        """Run `act(operation id, revision)`; then perhaps crash and repeat it."""
        self.ops += 1
        op, rev = f"op-{self.ops}", self.wait(self.ledger.view()).rev
        if again == "memory full before":
            self.when_full(act, op, rev)
        first = self.wait(act(op, rev))
        if again == "new scheduler repeats":
            self.open_scheduler()
        if again:
            assert self.wait(act(op, rev)) == first, "I1: a repeat returns the first answer"
        return first

    def when_full(self, act: Callable[[str, int], Awaitable[Any]], op: str, rev: int) -> None:
        """Refused, unless its first write frees memory: then all of it is done, and the next call repeats it."""
        ledger, before = self.ledger, self.seen()
        self.ledger = Ledger(self.hurried, self.run_name)
        self.ledger.epoch = ledger.epoch
        self.raw.config_set("maxmemory", 1)
        try:
            self.wait(act(op, rev))
        except UnavailableError:
            self.ledger = ledger
            assert self.seen() == before
        finally:
            self.raw.config_set("maxmemory", 0)
            self.ledger = ledger

    def seen(self) -> audit.Snapshot:
        """All of the store; hashes come in any order."""
        snapshot = self.wait(self.ledger.snapshot())
        entries, committed = (tuple(sorted(some, key=lambda e: e.uid)) for some in (snapshot.entries, snapshot.committed))
        return replace(snapshot, entries=entries, committed=committed)

    def of(self, *states: str) -> list[str]:
        return [uid for uid, group in self.groups.items() if group.state in states]

    def picked(self, pick: int, *states: str) -> str:
        found = self.of(*states)
        return found[pick % len(found)]

    # ---- writers come and go

    def open_scheduler(self) -> None:
        self.ledger = Ledger(self.store, self.run_name)
        self.wait(self.ledger.claim())

    @initialize()
    def begin(self) -> None:
        self.open_scheduler()
        self.open_trainer(back=0, again="")
        self.join("")

    @rule()
    def restart_scheduler(self) -> None:
        former = self.ledger
        self.open_scheduler()
        try:
            self.wait(former.configure({"window": 1}))
        except DeposedError:
            return
        raise AssertionError("I6: a former scheduler wrote")

    @rule(back=st.integers(0, 3), again=AGAIN)
    def open_trainer(self, back: int, again: str) -> None:
        resume = max(self.checkpoint, self.committed - back)
        taken = [*self.wait(self.ledger.committed()), *(e for e in self.wait(self.ledger.view()).entries.values() if e.step)]
        plan = recovery.reopen(resume, checkpoint=self.checkpoint, taken=taken)
        assert isinstance(plan, recovery.Reopening)
        gone = [step for step in self.steps if step > resume]
        opened = self.do(
            again,
            lambda op, rev: self.ledger.open_trainer(
                resume, finished=plan.finished, trained=plan.committed, steps=gone, total_steps=10**6, address="", rev=rev, op=op
            ),
        )
        self.trainer += 1
        assert opened.epoch == self.trainer
        for group in self.groups.values():
            if group.step > resume:
                group.state, group.step = "finished", 0
        self.steps = {step: uids for step, uids in self.steps.items() if step <= resume}
        self.committed, self.checkpoint = resume, max(self.checkpoint, resume)

    @rule(again=AGAIN)
    def join(self, again: str) -> None:
        self.replica = self.do(again, lambda op, rev: self.ledger.session(REPLICA, "join", {}, op=op))

    # ---- the life of a group

    @rule(number=st.integers(1, 4), again=AGAIN)
    def push(self, number: int, again: str) -> None:
        users = min(len(self.queued), number - 1)
        uids = [f"d{self.cursor + i}" for i in range(number - users)]
        cursor = self.cursor
        entered = self.do(
            again,
            lambda op, rev: self.ledger.push([payload(u) for u in uids], cursor=cursor, users=users, window=10**6, rev=rev, op=op),
        )
        assert entered == self.queued[:users]
        self.groups |= {uid: Model() for uid in [*entered, *uids]}
        self.queued, self.cursor = self.queued[users:], self.cursor + len(uids)

    @rule(number=st.integers(1, 2), again=AGAIN)
    def submit(self, number: int, again: str) -> None:
        first = self.users
        made = [payload(f"u{first + i}") for i in range(number)]
        self.queued += self.do(again, lambda op, rev: self.ledger.submit(made, first=first, op=op))
        self.users += number

    @precondition(lambda self: self.of("pending"))
    @rule(number=st.integers(1, 3), version=st.integers(0, 9), again=AGAIN)
    def lease(self, number: int, version: int, again: str) -> None:
        uids = self.of("pending")[:number]
        grants = self.do(again, lambda op, rev: self.ledger.lease(REPLICA, self.replica, uids, version=version, rev=rev, op=op))
        for grant in grants:
            group = self.groups[grant.uid]
            group.state, group.attempt, group.replica_epoch = "running", group.attempt + 1, self.replica
            group.begin = version if group.begin < 0 else min(group.begin, version)
            assert (grant.attempt, grant.version_begin) == (group.attempt, group.begin)

    @precondition(lambda self: self.of("running"))
    @rule(pick=PICK, index=st.integers(0, SIZE - 1), fails=st.booleans(), version=st.integers(0, 9), again=AGAIN)
    def report(self, pick: int, index: int, fails: bool, version: int, again: str) -> None:
        uid = self.picked(pick, "running")
        group = self.groups[uid]
        end = TrajectoryEnd(index, float(pick), "boom" if fails else "", f"{uid}/{index}".encode(), version=None if fails else version)
        self.report_end(uid, group.attempt, end, again)

    def report_end(self, uid: str, attempt: int, end: TrajectoryEnd, again: str) -> None:
        done = self.do(
            again,
            lambda op, rev: self.ledger.report(REPLICA, self.replica, {(uid, attempt): [end]}, attempts_max=ATTEMPTS_MAX, op=op),
        )
        group = self.groups.get(uid)
        if group is None or group.state in ("committed",) or group.state != "running" or group.replica_epoch != self.replica:
            assert done.accepted == 0
            return
        if group.marks[end.index] == "0":
            group.marks[end.index] = "x" if end.error else "1"
            group.begin = min(group.begin, group.begin if end.version is None else end.version)
            assert (done.accepted, done.failed) == ((0, 1) if end.error else (1, 0))
        if "0" in group.marks:
            return
        if "x" in group.marks:
            group.over(failed=True)
        else:
            group.state, group.replica_epoch = "finished", 0
            assert done.finished == (uid,)

    @precondition(lambda self: self.of("running"))
    @rule(pick=PICK, again=AGAIN)
    def finish(self, pick: int, again: str) -> None:
        uid = self.picked(pick, "running")
        for index in range(SIZE):
            self.report_end(uid, self.groups[uid].attempt, TrajectoryEnd(index, 0.0, "", f"{uid}/{index}".encode()), again)

    @precondition(lambda self: self.groups)
    @rule(pick=PICK, again=AGAIN)
    def report_under_a_lost_lease(self, pick: int, again: str) -> None:
        uid = self.picked(pick, *{group.state for group in self.groups.values()})
        stale = TrajectoryEnd(0, 9.0, "", b"too late")
        done = self.do(
            again,
            lambda op, rev: self.ledger.report(REPLICA, self.replica, {(uid, 10**6): [stale]}, attempts_max=ATTEMPTS_MAX, op=op),
        )
        assert (done.lost, done.accepted) == ((uid,), 0)

    @precondition(lambda self: self.of("running"))
    @rule(pick=PICK, again=AGAIN)
    def expire(self, pick: int, again: str) -> None:
        uid = self.picked(pick, "running")
        lost = [recovery.Expiry(uid, self.groups[uid].attempt, "silent")]
        assert self.do(again, lambda op, rev: self.ledger.expire(lost, attempts_max=ATTEMPTS_MAX, op=op)) == 1
        self.groups[uid].over(failed=True)

    @precondition(lambda self: any(self.groups[uid].replica_epoch == self.replica for uid in self.of("running")))
    @rule(again=AGAIN)
    def hand_back(self, again: str) -> None:
        uid = next(uid for uid in self.of("running") if self.groups[uid].replica_epoch == self.replica)
        leases = [(uid, self.groups[uid].attempt, {0: b"part"})]
        self.do(
            again,
            lambda op, rev: self.ledger.return_leases(
                REPLICA, self.replica, leases, reason="drain", failed=False, attempts_max=ATTEMPTS_MAX, op=op
            ),
        )
        self.groups[uid].over(failed="x" in self.groups[uid].marks)

    @precondition(lambda self: self.of("pending", "running", "finished", "failed"))
    @rule(pick=PICK, again=AGAIN)
    def evict(self, pick: int, again: str) -> None:
        failed = self.of("failed")
        uid = failed[0] if failed else self.picked(pick, "pending", "running", "finished")
        self.do(again, lambda op, rev: self.ledger.evict({uid: "stale"}, rev=rev, op=op))
        self.evicted.add(uid)
        del self.groups[uid]

    @precondition(lambda self: len(self.of("finished")) >= BATCH and not self.of("consumed"))
    @rule(again=AGAIN)
    def sample(self, again: str) -> None:
        uids, step = self.of("finished")[:BATCH], self.committed + 1
        self.do(again, lambda op, rev: self.ledger.consume(self.trainer, step, uids, rev=rev, op=op))
        for uid in uids:
            self.groups[uid].state, self.groups[uid].step = "consumed", step

    @precondition(lambda self: self.of("consumed"))
    @rule(again=AGAIN)
    def commit_step(self, again: str) -> None:
        uids, step = self.of("consumed"), self.committed + 1
        self.do(again, lambda op, rev: self.ledger.commit_step(self.trainer, step, uids, {"loss": 1.0}, op=op))
        for uid in uids:
            self.groups[uid].state = "committed"
        self.steps[step], self.committed = uids, step

    @rule(again=AGAIN)
    def commit_checkpoint(self, again: str) -> None:
        step = self.committed
        self.do(again, lambda op, rev: self.ledger.commit_checkpoint(self.trainer, step, "", op=op))
        for uid in self.of("committed"):
            del self.groups[uid]
        self.checkpoint = max(self.checkpoint, step)

    # ---- cuts

    @precondition(lambda self: self.trainer and not self.of("consumed"))
    @rule(again=AGAIN)
    def save_cut(self, again: str) -> None:
        snapshot = self.wait(self.ledger.dump(self.run_name, self.committed))
        groups = {uid: group.at_rest() for uid, group in self.groups.items() if group.state != "committed"}
        steps, evicted, queued = dict(self.steps), set(self.evicted), list(self.queued)
        self.cut = Kept(snapshot, groups, steps, evicted, queued, self.cursor, self.users, self.committed)
        self.commit_checkpoint(again)

    @precondition(lambda self: self.cut)
    @rule(is_store_lost=st.booleans(), again=AGAIN)
    def go_back(self, is_store_lost: bool, again: str) -> None:
        """To the newest cut; all that came after it is as if it had never been."""
        cut = self.cut
        assert cut is not None
        if is_store_lost:
            self.wait(asyncio.to_thread(forget_run, self.url, self.run_name))
            self.open_scheduler()
        again = "" if is_store_lost else again  # its own answer was lost with the store
        num = self.do(again, lambda op, rev: self.ledger.restore(cut.snapshot, "cut", rev=rev, op=op))
        assert num == len(cut.groups)
        self.groups = {uid: replace(group, marks=list(group.marks)) for uid, group in cut.groups.items()}
        self.steps, self.evicted, self.queued = dict(cut.steps), set(cut.evicted), list(cut.queued)
        self.cursor, self.users, self.committed, self.checkpoint = cut.cursor, cut.users, cut.step, cut.step
        self.trainer += 1
        epoch = self.do(
            "",
            lambda op, rev: self.ledger.open_trainer(
                cut.step, finished=[], trained=[], steps=[], total_steps=9, address="", epoch_floor=self.trainer - 1, rev=rev, op=op
            ),
        ).epoch
        assert epoch == self.trainer, "I6: epochs grow, also over a lost store"
        self.join("")

    @rule(again=AGAIN)
    def train_a_step(self, again: str) -> None:
        """Everything a step needs, so that histories get far."""
        if self.of("consumed"):
            self.commit_step(again)
        while len(self.of("finished")) < BATCH:
            if not self.of("pending"):
                self.push(BATCH, again)
            (uid, *_) = self.of("pending")
            self.lease(1, self.committed, again)
            self.finish(self.of("running").index(uid), again)
        self.sample(again)
        self.commit_step("")

    # ---- what must always hold

    @invariant()
    def the_store_is_the_model(self) -> None:
        if not self.trainer:
            return
        snapshot = self.wait(self.ledger.snapshot())
        assert audit.verify(snapshot).violations == []
        stored = {e.uid: e for e in (*snapshot.entries, *snapshot.committed)}
        assert {uid: e.state.value for uid, e in stored.items()} == {uid: group.state for uid, group in self.groups.items()}
        for uid, group in self.groups.items():
            e = stored[uid]
            assert (e.version_begin, e.attempt, e.failures, list(e.marks), e.step) == (
                group.begin,
                group.attempt,
                group.failures,
                group.marks,
                group.step,
            ), f"I8, I9: {uid}"
        assert snapshot.steps.keys() == self.steps.keys()
        assert snapshot.evicted.keys() == self.evicted
        assert (snapshot.run.cursor, snapshot.run.committed, snapshot.run.checkpoint) == (self.cursor, self.committed, self.checkpoint)
        open_ = {uid for uid in self.groups if self.groups[uid].state != State.COMMITTED}
        mirror = self.wait(self.ledger.view())
        assert mirror.entries == {e.uid: e for e in snapshot.entries}
        assert mirror.entries.keys() == open_
        assert mirror.run == snapshot.run
        found = self.wait(self.ledger.prompts(sorted(stored)))
        assert found == [payload(uid).SerializeToString() for uid in sorted(stored)], "I7"


def test_the_ledger_is_its_model_whatever_is_killed_and_repeated(valkey: embedded.EmbeddedServer) -> None:
    Machine.loop, Machine.url = asyncio.new_event_loop(), valkey.url
    Machine.store = Machine.loop.run_until_complete(Store.open(valkey.url))
    Machine.hurried = Machine.loop.run_until_complete(Store.open(valkey.url, outage_s=0.0))
    Machine.raw = redis.Redis.from_url(valkey.url)
    try:
        run_state_machine_as_test(
            Machine,
            settings=settings(max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]),
        )
    finally:
        Machine.raw.close()
        for store in (Machine.store, Machine.hurried):
            Machine.loop.run_until_complete(store.close())
        Machine.loop.close()
