"""The ledger on a real server: what each transition keeps. tests/service/test_ledger_model.py explores their orders."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from services.scheduler import audit, recovery
from services.scheduler.groups import State
from services.scheduler.ledger import Ledger, TrajectoryEnd
from stretto import embedded
from stretto.errors import DeposedError, FencedError, RefusedError
from stretto.store import ChangedError, Store
from stretto.v1 import types_pb2 as pb

REPLICA = "r-1"


def prompt(ordinal: int, size: int = 2) -> pb.Prompt:
    return pb.Prompt(
        uid=f"d{ordinal}",
        kind=pb.PROMPT_KIND_TRAIN,
        ordinal=ordinal,
        row=ordinal % 7,
        token_ids=bytes([ordinal % 256, 0, 255, 13, 10, 0, 0, 0]),
        ground_truth="\x00 é \r\n",
        group_size=size,
        sampling=pb.SamplingParams(temperature=1.0, seed=2**64 - 1 - ordinal),
    )


def end(index: int, *, reward: float = 0.0, error: str = "") -> TrajectoryEnd:
    made = pb.Trajectory(index=index, token_ids=b"\x00\xff\r\n", logprobs=b"\x00\x00\x80\xbf", reward=reward)
    made.spans.add(num_tokens=1)
    blob = made.SerializeToString()
    return TrajectoryEnd(index, reward, error, blob)


@pytest.fixture
async def store(valkey: embedded.EmbeddedServer) -> AsyncIterator[Store]:
    opened = await Store.open(valkey.url, outage_s=5)
    yield opened
    await opened.close()


@pytest.fixture
async def ledger(store: Store) -> Ledger:
    """Opened by a scheduler and a trainer of 2-group steps; window 6."""
    made = Ledger(store, "test")
    await made.claim()
    await made.configure({"window": 6})
    await reopen(made, 0)
    await made.session(REPLICA, "join", {})
    return made


async def reopen(ledger: Ledger, resume: int, op: str = "") -> int:
    view = await ledger.view()
    taken = [*await ledger.committed(), *(e for e in view.entries.values() if e.state is State.CONSUMED)]
    plan = recovery.reopen(resume, checkpoint=view.run.checkpoint, taken=taken)
    assert isinstance(plan, recovery.Reopening)
    steps = [s for s in await ledger.steps() if s > resume]
    opened = await ledger.open_trainer(
        resume,
        finished=plan.finished,
        trained=plan.committed,
        steps=steps,
        total_steps=100,
        address="t:1",
        rev=view.rev,
        op=op or f"open-{view.rev}",
    )
    return opened.epoch


async def push(ledger: Ledger, count: int, window: int = 100) -> None:
    view = await ledger.view()
    cursor = view.run.cursor
    await ledger.push([prompt(cursor + i) for i in range(count)], cursor=cursor, users=0, window=window, rev=view.rev)


async def lease(ledger: Ledger, *uids: str, version: int = 0, op: str = "") -> None:
    view = await ledger.view()
    await ledger.lease(REPLICA, 1, uids, version=version, rev=view.rev, op=op or f"lease-{view.rev}")


async def finish(ledger: Ledger, *uids: str) -> None:
    entries = (await ledger.view()).entries
    ends = {(uid, entries[uid].attempt): [end(i) for i in range(entries[uid].group_size)] for uid in uids}
    await ledger.report(REPLICA, 1, ends, attempts_max=2)


async def train(ledger: Ledger, step: int, *uids: str) -> None:
    view = await ledger.view()
    await ledger.consume(view.run.trainer_epoch, step, uids, rev=view.rev)
    await ledger.commit_step(view.run.trainer_epoch, step, uids, {"loss": float("nan")})


async def check(ledger: Ledger) -> audit.Verdict:
    verdict = audit.verify(await ledger.snapshot())
    assert verdict.violations == []
    return verdict


async def states(ledger: Ledger) -> dict[str, str]:
    return {uid: e.state.value for uid, e in (await ledger.view()).entries.items()}


async def test_i1_a_repeated_operation_returns_the_first_answer_and_changes_nothing(ledger: Ledger) -> None:
    await push(ledger, 3)
    view = await ledger.view()
    first = await ledger.lease(REPLICA, 1, ["d0", "d1"], version=0, rev=view.rev, op="same")
    again = await ledger.lease(REPLICA, 1, ["d2"], version=5, rev=view.rev, op="same")
    assert first == again
    assert await states(ledger) == {"d0": "running", "d1": "running", "d2": "pending"}


async def test_i1_the_first_end_of_a_trajectory_counts(ledger: Ledger) -> None:
    await push(ledger, 1)
    await lease(ledger, "d0")
    first = await ledger.report(REPLICA, 1, {("d0", 1): [end(0, reward=1.0)]}, attempts_max=2)
    again = await ledger.report(REPLICA, 1, {("d0", 1): [end(0, reward=0.5), end(1)]}, attempts_max=2)
    late = await ledger.report(REPLICA, 1, {("d0", 1): [end(1, reward=9)]}, attempts_max=2)
    assert (first.accepted, again.accepted, late.accepted) == (1, 1, 0)
    assert not (first.lost)
    assert not (again.lost)
    assert not (late.lost)
    (group,) = await ledger.groups([(await ledger.view()).entries["d0"]])
    assert isinstance(group, pb.Group)
    assert [t.reward for t in group.trajectories] == [1.0, 0.0]
    await check(ledger)


async def test_i2_the_counters_equal_the_sizes_of_the_states(ledger: Ledger) -> None:
    await push(ledger, 6)
    await lease(ledger, "d0", "d1", "d2", "d3")
    await finish(ledger, "d0", "d1", "d2")
    await train(ledger, 1, "d0", "d1")
    await ledger.evict({"d2": "stale"}, rev=(await ledger.view()).rev)
    await check(ledger)
    occupancy = (await ledger.view()).occupancy
    assert {k: v for k, v in occupancy.items() if v} == {"pending": 2, "running": 1, "committed": 2}


async def test_i3_the_cursor_advances_with_the_push_and_an_ordinal_enters_once(ledger: Ledger) -> None:
    await push(ledger, 2)
    view = await ledger.view()
    assert view.run.cursor == 2
    with pytest.raises(ChangedError, match="cursor is at 2"):
        await ledger.push([prompt(0)], cursor=0, users=0, window=6, rev=view.rev)
    await push(ledger, 2)
    assert sorted(await states(ledger)) == ["d0", "d1", "d2", "d3"]
    assert (await check(ledger)).open == 4


async def test_i3_the_audit_names_what_is_lost_or_doubled(ledger: Ledger, store: Store) -> None:
    await push(ledger, 4)
    await lease(ledger, "d0", "d1")
    await finish(ledger, "d0", "d1")
    await train(ledger, 1, "d0", "d1")
    raw = store._client  # a fault is made behind the ledger's back
    await raw.hset(ledger.key("evicted"), "d1", "stale")
    await raw.hdel(ledger.key("groups"), "d2")
    found = audit.verify(await ledger.snapshot())
    assert (found.duplicates, found.gaps, found.ok) == (1, 1, False)
    text = "\n".join(found.violations)
    assert "d1 is in 2 places: trained in step 1, evicted" in text
    assert "ordinal 2 entered and is nowhere" in text
    assert "counter pending is 2, but 1 groups are" in text


async def test_i4_the_push_itself_refuses_more_than_the_window(ledger: Ledger) -> None:
    await push(ledger, 5)
    with pytest.raises(RefusedError, match="window 6 has 5"):
        await push(ledger, 2, window=6)
    assert len(await states(ledger)) == 5


async def test_i5_nothing_leaves_the_store_before_its_checkpoint_and_a_resumed_trainer_gets_it_back(ledger: Ledger) -> None:
    await push(ledger, 6)
    await lease(ledger, *[f"d{i}" for i in range(6)], version=0)
    await finish(ledger, *[f"d{i}" for i in range(6)])
    await train(ledger, 1, "d0", "d1")
    before = await ledger.groups([e for e in await ledger.committed() if e.uid == "d0"])
    assert await ledger.commit_checkpoint(1, 1, "ckpt/1") == 2
    await train(ledger, 2, "d2", "d3")
    kept = await ledger.groups(sorted(await ledger.committed(), key=lambda e: e.uid))
    epoch = await reopen(ledger, 1)
    view = await ledger.view()
    assert (epoch, view.run.committed) == (2, 1)
    assert [view.entries[uid].state for uid in ("d2", "d3", "d4")] == [State.FINISHED] * 3
    assert await ledger.groups([view.entries["d2"], view.entries["d3"]]) == kept
    assert [g if isinstance(g, str) else g.prompt.uid for g in before] == ["d0"]
    with pytest.raises(RefusedError, match="older than checkpoint 1"):
        await ledger.open_trainer(0, finished=[], trained=[], steps=[], total_steps=9, address="", rev=view.rev, op="too-old")
    await train(ledger, 2, "d2", "d3")
    await check(ledger)


async def test_i5_a_step_in_the_checkpoint_whose_commit_was_lost_counts_as_trained(ledger: Ledger) -> None:
    await push(ledger, 4)
    await lease(ledger, "d0", "d1")
    await finish(ledger, "d0", "d1")
    view = await ledger.view()
    await ledger.consume(1, 1, ["d0", "d1"], rev=view.rev)
    await reopen(ledger, 1)
    verdict = await check(ledger)
    assert (verdict.trained, verdict.open) == (2, 2)


async def test_i6_an_older_scheduler_trainer_or_replica_changes_nothing(ledger: Ledger, store: Store) -> None:
    await push(ledger, 4)
    await lease(ledger, "d0", "d1")
    await ledger.session(REPLICA, "join", {})
    with pytest.raises(FencedError, match="replica r-1 epoch 1"):
        await finish(ledger, "d0")
    with pytest.raises(FencedError, match="replica r-1 epoch 1"):
        await lease(ledger, "d2")
    assert await reopen(ledger, 0) == 2
    with pytest.raises(FencedError, match="trainer epoch 1"):
        await ledger.commit_step(1, 1, ["d0"], {})
    with pytest.raises(FencedError, match="trainer epoch 1"):
        await ledger.commit_checkpoint(1, 0, "")
    with pytest.raises(FencedError, match="trainer epoch 1"):
        await ledger.consume(1, 1, ["d0"], rev=(await ledger.view()).rev)
    newer = Ledger(store, "test")
    await newer.claim()
    before = await states(newer)
    with pytest.raises(DeposedError, match="scheduler epoch 1 is not 2"):
        await push(ledger, 1)
    assert await states(newer) == before


async def test_i7_payload_bytes_survive_every_status_change(ledger: Ledger) -> None:
    await push(ledger, 2)
    expected = [prompt(0).SerializeToString(), prompt(1).SerializeToString()]
    await lease(ledger, "d0", "d1")
    await ledger.expire([recovery.Expiry("d0", 1, "silent")], attempts_max=3)
    assert await ledger.prompts(["d0", "d1"]) == expected
    await lease(ledger, "d0")
    await finish(ledger, "d0", "d1")
    await train(ledger, 1, "d0", "d1")
    await reopen(ledger, 0)
    assert await ledger.prompts(["d0", "d1"]) == expected


async def test_i8_a_group_keeps_the_version_of_its_first_lease(ledger: Ledger) -> None:
    await push(ledger, 1)
    await lease(ledger, "d0", version=4)
    await ledger.expire([recovery.Expiry("d0", 1, "silent")], attempts_max=3)
    await lease(ledger, "d0", version=9)
    entry = (await ledger.view()).entries["d0"]
    assert (entry.version_begin, entry.attempt, entry.failures) == (4, 2, 1)


async def test_i8_work_of_older_weights_makes_a_group_older(ledger: Ledger) -> None:
    await push(ledger, 2)
    await lease(ledger, "d0", "d1", version=7)
    await ledger.expire([recovery.Expiry("d0", 1, "silent")], attempts_max=3)
    await lease(ledger, "d0", version=5)
    late = TrajectoryEnd(0, 0.0, "", b"", version=3)
    await ledger.report(REPLICA, 1, {("d1", 1): [late]}, attempts_max=3)
    entries = (await ledger.view()).entries
    assert [entries[uid].version_begin for uid in ("d0", "d1")] == [5, 3]


async def test_i9_attempts_are_bounded_and_end_in_a_named_eviction(ledger: Ledger) -> None:
    await push(ledger, 1)
    for attempt in (1, 2):
        await lease(ledger, "d0")
        await ledger.expire([recovery.Expiry("d0", attempt, "group deadline of 5 s")], attempts_max=2)
    entry = (await ledger.view()).entries["d0"]
    assert (entry.state, entry.reason) == (State.FAILED, "group deadline of 5 s")
    await ledger.evict({"d0": f"attempts exhausted: {entry.reason}"}, rev=(await ledger.view()).rev)
    verdict = await check(ledger)
    assert verdict.evicted_by_reason == {"attempts exhausted": 1}
    assert (await ledger.view()).run.num_failed == 1


async def test_a_failed_trajectory_is_generated_again_alone(ledger: Ledger) -> None:
    await push(ledger, 1)
    await lease(ledger, "d0")
    await ledger.report(REPLICA, 1, {("d0", 1): [end(0, error="boom")]}, attempts_max=2)
    assert (await states(ledger))["d0"] == "running"
    await ledger.report(REPLICA, 1, {("d0", 1): [end(1, reward=1.0)]}, attempts_max=2)
    entry = (await ledger.view()).entries["d0"]
    assert (entry.state, entry.missing, entry.failures) == (State.PENDING, (0,), 1)
    await lease(ledger, "d0")
    done = await ledger.report(REPLICA, 1, {("d0", 2): [end(0, reward=0.5)]}, attempts_max=2)
    assert done.finished == ("d0",)
    await check(ledger)


async def test_a_report_under_a_lost_lease_is_ignored_and_named(ledger: Ledger) -> None:
    await push(ledger, 1)
    await lease(ledger, "d0")
    await ledger.expire([recovery.Expiry("d0", 1, "silent")], attempts_max=3)
    await lease(ledger, "d0")
    answer = await ledger.report(REPLICA, 1, {("d0", 1): [end(0)], ("d77", 1): [end(0)]}, attempts_max=3)
    assert (set(answer.lost), answer.accepted) == ({"d0", "d77"}, 0)


async def test_partial_answers_come_back_with_the_next_lease_and_go_when_the_answer_is_in(ledger: Ledger) -> None:
    await push(ledger, 1)
    await lease(ledger, "d0")
    kept = await ledger.return_leases(REPLICA, 1, [("d0", 1, {1: b"part"})], reason="drain", failed=False, attempts_max=1, op="back")
    assert kept == 1
    assert await ledger.trajectories(["d0"]) == [{"p1": b"part"}]
    entry = (await ledger.view()).entries["d0"]
    assert (entry.state, entry.failures) == (State.PENDING, 0)
    await lease(ledger, "d0")
    await ledger.report(REPLICA, 1, {("d0", 2): [end(0), end(1)]}, attempts_max=1)
    assert sorted((await ledger.trajectories(["d0"]))[0]) == ["0", "1"]


async def test_users_prompts_enter_before_the_dataset_and_are_counted_apart(ledger: Ledger) -> None:
    users = [pb.Prompt(uid=f"u{i}", kind=pb.PROMPT_KIND_USER, group_size=2) for i in range(2)]
    assert await ledger.submit(users, first=0, op="s1") == ["u0", "u1"]
    assert await ledger.submit(users, first=0, op="s1") == ["u0", "u1"]
    with pytest.raises(ChangedError):
        await ledger.submit(users, first=0, op="s2")
    view = await ledger.view()
    assert await ledger.push([prompt(0)], cursor=0, users=2, window=6, rev=view.rev) == ["u0", "u1"]
    await lease(ledger, "u0", "u1", "d0")
    await finish(ledger, "u0", "u1", "d0")
    await train(ledger, 1, "u0", "d0")
    verdict = await check(ledger)
    assert (verdict.entered, verdict.trained, verdict.user_trained) == (1, 1, 1)


async def test_a_decision_on_an_old_revision_is_refused(ledger: Ledger) -> None:
    await push(ledger, 2)
    old = (await ledger.view()).rev
    await lease(ledger, "d0")
    with pytest.raises(ChangedError, match="ledger is at revision"):
        await ledger.lease(REPLICA, 1, ["d1"], version=0, rev=old, op="late")


async def test_the_mirror_always_equals_the_store(ledger: Ledger, store: Store) -> None:
    await push(ledger, 4)
    await lease(ledger, "d0", "d1", "d2")
    await finish(ledger, "d0", "d1")
    await train(ledger, 1, "d0", "d1")
    await reopen(ledger, 0)
    mirrored = await ledger.view()
    fresh = Ledger(store, "test")
    fresh.epoch = ledger.epoch
    assert await fresh.view() == mirrored


async def test_events_tell_each_transition_once(ledger: Ledger) -> None:
    start = await ledger.newest_event()
    await push(ledger, 2)
    await lease(ledger, "d0", "d1")
    await finish(ledger, "d0", "d1")
    await train(ledger, 1, "d0", "d1")
    await ledger.commit_checkpoint(1, 1, "folder")
    events = await ledger.events_after(start)
    assert [e.kind for e in events] == ["step", "checkpoint"]
    assert events[0].values["step"] == 1
    assert events[1].labels == {"path": "folder"}
