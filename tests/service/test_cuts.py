"""A cut is one point over the trainer and the ledger: what comes back when the store is lost, or when an older cut is chosen."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import redis.asyncio

from services.scheduler.ledger import RESTORED_ATTEMPTS
from stretto.embedded import EmbeddedServer as Valkey
from stretto.errors import FencedError, NotFoundError, RefusedError, StaleError, UnavailableError
from stretto.store import StoreLostError
from stretto.v1 import scheduler_pb2 as spb
from stretto.v1.ledger_pb2 import LedgerSnapshot
from tests.scheduler_world import NumberedPrompts, Replica, Trainer, World, recipe_of, ring

CUT = "step-2-0a1b2c3d"


@dataclass
class Held:
    """A run after step 2, of which there is a cut, and what its open groups were."""

    world: World
    trainer: Trainer
    replica: Replica
    snapshot: bytes
    trained: list[str]
    finished: list[str]
    unfinished: list[str]
    payloads: dict[str, bytes]
    trajectories: dict[str, dict[str, bytes]]


@pytest.fixture
async def held(valkey: Valkey) -> AsyncIterator[Held]:
    """Of the first 12 groups 8 are trained and 4 finished; of the next 8, 2 are leased with one answer in and 6 pending."""
    async with ring(valkey.url, recipe_of()) as (world, trainer, replica):
        await replica.poll()
        await replica.finish()
        trained = [uid for step in (1, 2) for uid in await trainer.step(step)]
        await replica.hold(trainer.epoch, 2)
        await world.until_full()
        await replica.poll(2)
        for uid in replica.leases:
            await replica.report(replica.ends(uid, indices=[0]))
        ledger = world.controller.ledger
        view = await ledger.view()
        open_ = sorted(view.entries, key=lambda uid: view.entries[uid].seq)
        snapshot = await trainer.snapshot(2)
        await trainer.save(2, CUT)
        yield Held(
            world,
            trainer,
            replica,
            snapshot,
            trained,
            [uid for uid in open_ if view.entries[uid].state == "finished"],
            [uid for uid in open_ if view.entries[uid].state != "finished"],
            {uid: payload or b"" for uid, payload in zip(open_, await ledger.prompts(open_), strict=True)},
            dict(zip(open_, await ledger.trajectories(open_), strict=True)),
        )


async def wipe(url: str) -> None:
    async with redis.asyncio.Redis.from_url(url) as client:
        await client.flushall()


async def is_as_it_was(held: Held) -> None:
    """Everything open at the cut is back: finished groups whole, the others pending with what they had; nothing else is there."""
    ledger = held.world.controller.ledger
    view = await ledger.view()
    assert [view.entries[uid].state for uid in held.finished] == ["finished"] * len(held.finished)
    assert {view.entries[uid].state.value for uid in held.unfinished} == {"pending"}
    uids = [*held.finished, *held.unfinished]
    assert set(view.entries) == set(uids)
    assert dict(zip(uids, await ledger.prompts(uids), strict=True)) == held.payloads
    assert dict(zip(uids, await ledger.trajectories(uids), strict=True)) == held.trajectories


async def goes_on(held: Held, trainer: Trainer, replica: Replica) -> None:
    """Six more steps; the same prompts come first and in order, no other is skipped or repeated."""
    trained = list(held.trained)
    for step in range(3, 9):
        await replica.hold(trainer.epoch, step - 1)
        await replica.poll()
        await replica.finish()
        trained += await trainer.step(step)
    assert sorted(trained, key=lambda uid: int(uid[1:])) == [f"d{n}" for n in range(8 * 4)]
    assert trained[: 8 + len(held.finished)] == [*held.trained, *held.finished]
    verdict = await held.world.verify()
    assert (verdict.duplicates, verdict.gaps, verdict.committed_step) == (0, 0, 8)


async def test_a_lost_store_is_rebuilt_from_the_cut_and_costs_only_what_was_in_flight(valkey: Valkey, held: Held) -> None:
    world, trainer = held.world, held.trainer
    await trainer.step(3)  # after the cut: lost with the store
    await wipe(valkey.url)
    with pytest.raises(StoreLostError):
        await world.work
    await world.restart()
    trainer = Trainer(world)
    opened = await trainer.open(2, cut_id=CUT, epoch_floor=7)
    assert (opened.snapshot_needed, opened.trainer_epoch) == ("the store is empty: it was lost", 0)
    world.work.cancel()  # nothing is admitted while we look
    restored = await trainer.restore(2, CUT, held.snapshot)
    assert restored.num_groups == len(held.finished) + len(held.unfinished) == 12
    await is_as_it_was(held)
    await world.verify()
    await world.restart()
    opened = await trainer.open(2, cut_id=CUT, epoch_floor=7)
    assert (opened.snapshot_needed, opened.trainer_epoch) == ("", 8), "above every epoch that the relay has seen"
    await goes_on(held, trainer, Replica(world))


async def test_of_a_store_that_was_emptied_a_moment_ago_neither_a_snapshot_nor_a_batch_is_given_out(valkey: Valkey, held: Held) -> None:
    """The scheduler has not noticed, and its mirror still knows everything: an empty cut would begin the run anew."""
    world, trainer = held.world, held.trainer
    world.work.cancel()
    assert (await trainer.sample(3, wait_s=5))[0]
    await wipe(valkey.url)
    with pytest.raises(UnavailableError, match="the store was emptied"):
        await trainer.snapshot(2)
    with pytest.raises(UnavailableError, match="the store was emptied"):
        await trainer.sample(3)


async def test_an_older_cut_takes_the_place_of_what_came_after_it(held: Held) -> None:
    world, trainer, replica = held.world, held.trainer, held.replica
    await replica.finish(*replica.leases)
    await trainer.step(3)
    await trainer.save(3, "step-3-later")
    await replica.hold(trainer.epoch, 3)
    late = [lease.prompt.uid for lease in (await replica.poll()).leases]
    again = Trainer(world)
    assert (await again.open(2, cut_id=CUT)).snapshot_needed == "the store is at the cut of step 3, past this one"
    cursor = (await world.status()).cursor
    restored = await again.restore(2, CUT, held.snapshot)
    assert restored.num_ordinals_again == cursor - 20 > 0
    opened = await again.open(2, cut_id=CUT)
    assert (opened.snapshot_needed, opened.trainer_epoch) == ("", trainer.epoch + 1)
    status = await world.status()
    assert (status.cut_id, status.checkpoint_step, status.committed_step) == (CUT, 2, 2)
    with pytest.raises(FencedError):
        await trainer.commit(4)
    assert sorted(await replica.report([end for uid in late for end in replica.ends(uid)])) == sorted(late), "work of the other history"
    await replica.beat()
    await goes_on(held, again, replica)


async def test_a_report_of_the_lost_history_does_not_count_for_a_new_lease_of_the_same_prompt(held: Held) -> None:
    world, trainer, replica = held.world, held.trainer, held.replica
    await trainer.step(3)
    await trainer.save(3, "step-3-later")
    old = {uid: replica.ends(uid) for uid in replica.leases}
    again = Trainer(world)
    await again.open(2, cut_id=CUT)
    await again.restore(2, CUT, held.snapshot)
    await again.open(2, cut_id=CUT)
    await replica.hold(again.epoch, 2)
    leases = {lease.prompt.uid: lease.attempt for lease in (await replica.poll()).leases}
    assert all(leases[uid] > RESTORED_ATTEMPTS for uid in old)
    assert sorted(await replica.report([end for ends in old.values() for end in ends])) == sorted(old)


async def test_the_same_restore_again_answers_the_same_and_changes_nothing(valkey: Valkey, held: Held) -> None:
    world = held.world
    await wipe(valkey.url)
    await world.restart()
    trainer = Trainer(world)
    first = await trainer.restore(2, CUT, held.snapshot, op="once")
    await trainer.open(2, cut_id=CUT)
    replica = Replica(world)
    await replica.hold(trainer.epoch, 2)
    await replica.poll()
    assert (await trainer.restore(2, CUT, held.snapshot, op="once")).num_groups == first.num_groups
    await replica.finish()
    await trainer.step(3)
    await world.verify()


async def test_two_histories_are_not_mixed(held: Held) -> None:
    trainer = Trainer(held.world)
    with pytest.raises(RefusedError, match="is cut step-2-other, but the store continues step-2-0a1b2c3d: they are of two histories"):
        await trainer.open(2, cut_id="step-2-other")
    with pytest.raises(FencedError, match="asked for under trainer epoch 0: 1 has opened the run since"):
        await trainer.restore(2, CUT, held.snapshot)
    trainer.epoch = held.trainer.epoch
    with pytest.raises(RefusedError, match="nothing to restore"):
        await trainer.restore(2, CUT, held.snapshot)
    wrong = LedgerSnapshot.FromString(held.snapshot)
    wrong.run = "another"
    with pytest.raises(RefusedError, match="of run 'another', step 2"):
        await trainer.restore(2, CUT, wrong.SerializeToString())
    await held.trainer.step(3)  # nobody was fenced by all this


async def test_only_the_present_trainer_takes_snapshots_and_only_of_the_newest_step(held: Held) -> None:
    with pytest.raises(StaleError, match="snapshot of step 1 cannot be taken: step 2 is the newest"):
        await held.trainer.snapshot(1)
    first = held.trainer.epoch
    await Trainer(held.world).open(2, cut_id=CUT)
    with pytest.raises(FencedError):
        await held.trainer.snapshot(2)
    held.trainer.epoch = first + 5
    with pytest.raises(NotFoundError, match="does not know trainer epoch"):
        await held.trainer.snapshot(2)


async def test_a_store_that_lost_its_newest_steps_is_put_back_to_the_cut(held: Held) -> None:
    """As after a power cut: the append-only file may lack the last second, the checkpoint does not."""
    later = LedgerSnapshot.FromString(held.snapshot)
    later.step = 5
    trainer = Trainer(held.world)
    assert (await trainer.open(5, cut_id="step-5-x")).snapshot_needed == "the store has lost the steps after 2"
    await trainer.restore(5, "step-5-x", later.SerializeToString())
    assert not (await trainer.open(5, cut_id="step-5-x")).snapshot_needed


async def test_users_prompts_that_waited_at_the_cut_wait_again(valkey: Valkey, held: Held) -> None:
    request = spb.SubmitPromptsRequest(prompts=[spb.UserPrompt(text="one"), spb.UserPrompt(text="two")])
    await held.world.call("SubmitPrompts", request)
    snapshot = await held.trainer.snapshot(2)
    assert [json.loads(item)["u"] for item in LedgerSnapshot.FromString(snapshot).queue] == ["u0", "u1"]
    await wipe(valkey.url)
    await held.world.restart()
    trainer = Trainer(held.world)
    await trainer.restore(2, CUT, snapshot)
    await trainer.open(2, cut_id=CUT)
    replica = Replica(held.world)
    await replica.hold(trainer.epoch, 2)
    trained: list[str] = []
    for step in range(3, 8):
        await replica.hold(trainer.epoch, step - 1)
        await replica.poll()
        await replica.finish()
        trained += await trainer.step(step)
    assert {"u0", "u1"} <= set(trained)
    await held.world.verify()


# ------------------------------------------------------------------------------------------------ what must not get through


async def test_a_trainer_that_stood_still_before_it_restored_does_not_rewind_its_successor(valkey: Valkey, held: Held) -> None:
    world = held.world
    await wipe(valkey.url)
    await world.restart()
    zombie, trainer, replica = Trainer(world), Trainer(world), Replica(world)
    assert (await zombie.open(2, cut_id=CUT)).snapshot_needed  # and is stopped here
    await trainer.open(2, cut_id=CUT)
    await trainer.restore(2, CUT, held.snapshot)
    await trainer.open(2, cut_id=CUT)
    await replica.hold(trainer.epoch, 2)
    await replica.poll()
    await replica.finish()
    await trainer.step(3)
    with pytest.raises(FencedError, match="has opened the run since"):
        await zombie.restore(2, CUT, held.snapshot)
    assert (await world.status()).committed_step == 3


async def test_a_checkpoint_of_a_history_that_was_left_is_not_continued_as_if_it_were_the_stores(held: Held) -> None:
    """Its trainer was stopped while it wrote step 3; another took over at 2, trained its own step 3, and died."""
    world, first = held.world, held.trainer
    await first.step(3)
    second = Trainer(world)
    await second.open(2, cut_id=CUT)
    await second.step(3)
    opened = await Trainer(world).open(3, cut_id="step-3-first", cut_epoch=first.epoch)
    assert opened.snapshot_needed == "the store's steps after 2 are of trainer epoch 2, this cut is of 1"
    assert not (await Trainer(world).open(3, cut_id="step-3-second", cut_epoch=second.epoch)).snapshot_needed


async def test_another_dataset_is_refused_before_anything_is_replaced(valkey: Valkey, held: Held) -> None:
    world = held.world
    await wipe(valkey.url)
    await world.stop()
    world.prompts = NumberedPrompts(fingerprint="others")
    await world.start()
    trainer = Trainer(world)
    with pytest.raises(RefusedError, match="would mean other prompts"):
        await trainer.restore(2, CUT, held.snapshot)
    assert (await trainer.open(2, cut_id=CUT)).snapshot_needed, "still: nothing was restored"


async def test_a_pause_that_was_lifted_after_the_cut_does_not_come_back(valkey: Valkey, held: Held) -> None:
    world = held.world
    await world.call("Pause", spb.PauseRequest(reason="backup"))
    snapshot = await held.trainer.snapshot(2)
    await world.call("Resume", spb.ResumeRequest())
    await wipe(valkey.url)
    await world.restart()
    await Trainer(world).restore(2, CUT, snapshot)
    assert (await world.status()).pause_reason == ""


async def test_a_new_trainer_is_above_what_any_replica_holds_also_if_store_and_relay_are_lost(valkey: Valkey, held: Held) -> None:
    world = held.world
    await wipe(valkey.url)
    await world.restart()
    survivor, trainer = Replica(world, "r-elsewhere"), Trainer(world)
    await survivor.hold(9, 5)
    await trainer.restore(2, CUT, held.snapshot)
    assert (await trainer.open(2, cut_id=CUT, epoch_floor=0)).trainer_epoch == 10


async def test_the_mirror_follows_a_store_that_lost_its_newest_second(valkey: Valkey, held: Held) -> None:
    """As after a power cut of the store's machine under a scheduler that lives on."""
    world, trainer = held.world, held.trainer
    async with redis.asyncio.Redis.from_url(valkey.url) as client:
        before = {key: await client.dump(key) for key in [key async for key in client.scan_iter()]}
        await trainer.step(3)
        async with client.pipeline(transaction=True) as pipe:
            pipe.flushall()
            for key, value in before.items():
                pipe.restore(key, 0, value or b"")
            await pipe.execute()
    await held.replica.beat()
    again = Trainer(world)
    assert (await again.open(3, cut_id="step-3-x")).snapshot_needed == "the store has lost the steps after 2"
    assert (await world.status()).committed_step == 2


async def test_a_poisonous_prompt_ends_by_name_and_does_not_come_back_after_a_resume(valkey: Valkey, held: Held) -> None:
    world, replica = held.world, held.replica
    (poison, *_) = list(replica.leases)
    for _ in range(world.recipe.scheduler.attempts_max):
        await replica.poll()
        await replica.report(replica.ends(poison, fails=True, indices=[1]))
        replica.leases.pop(poison)
    failed = (await world.events(until="failed"))[-1]
    assert (failed.labels["uid"], failed.labels["reason"]) == (poison, "attempts exhausted: it broke")
    snapshot = await held.trainer.snapshot(2)
    await wipe(valkey.url)
    await world.restart()
    trainer = Trainer(world)
    await trainer.restore(2, CUT, snapshot)
    await trainer.open(2, cut_id=CUT)
    await world.until_full()
    assert poison not in (await world.controller.ledger.view()).entries
    verdict = await world.verify()
    assert dict(verdict.evicted_by_reason) == {"attempts exhausted": 1}
