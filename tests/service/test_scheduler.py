"""The scheduler end to end: real gRPC, a real store, hand-driven workers."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from services.scheduler.controller import FORGET_LEASES, Prompts
from services.scheduler.data import Dataset
from services.scheduler.recovery import Expiry
from stretto import embedded
from stretto import recipe as recipes
from stretto.errors import DeposedError, FencedError, FullError, InvalidArgumentError, NotFoundError, RefusedError, StaleError
from stretto.store import Store
from stretto.v1 import scheduler_pb2 as spb
from stretto.v1 import types_pb2 as pb
from tests.scheduler_world import NumberedPrompts, Replica, Trainer, World, recipe_of, ring, running

Valkey = embedded.EmbeddedServer


async def train(trainer: Trainer, step: int) -> list[str]:
    groups, reason = await trainer.sample(step, wait_s=5)
    assert groups, reason
    await trainer.commit(step, loss=0.5)
    return [g.prompt.uid for g in groups]


# --------------------------------------------------------------------------------------------------- the normal life


async def test_a_prompt_goes_from_the_dataset_through_a_replica_into_a_committed_step(valkey: Valkey) -> None:
    async with ring(valkey.url, recipe_of()) as (world, trainer, replica):
        answer = await replica.poll(4, wait_s=2)
        assert [lease.prompt.uid for lease in answer.leases] == ["d0", "d1", "d2", "d3"]
        assert [list(lease.missing) for lease in answer.leases] == [[0, 1]] * 4
        await replica.finish()
        assert await train(trainer, 1) == ["d0", "d1", "d2", "d3"]
        status = await world.until(lambda s: s.occupancy.occupied == 12)
        assert (status.committed_step, status.cursor, status.occupancy.committed) == (1, 16, 4)
        assert await trainer.save(1) == 4
        verdict = await world.verify()
        assert (verdict.ordinals_trained, verdict.ordinals_open, verdict.gaps, verdict.duplicates) == (4, 12, 0, 0)
        events = await world.events(until="checkpoint")
        assert [e.kind for e in events if e.kind != "phase"] == ["trainer_opened", "replica_joined", "step", "checkpoint"]


async def test_the_same_step_returns_the_same_batch_until_its_commit(valkey: Valkey) -> None:
    async with ring(valkey.url, recipe_of()) as (world, trainer, replica):
        await replica.poll(8)
        await replica.finish()
        first, _ = await trainer.sample(1)
        await world.restart()
        again, _ = await trainer.sample(1)
        assert again == first
        await trainer.commit(1)
        await trainer.commit(1)
        with pytest.raises(StaleError, match="step 1 cannot be sampled"):
            await trainer.sample(1)
        assert (await world.status()).committed_step == 1


async def test_c10_ten_finished_groups_eight_are_trained_oldest_first_and_the_other_two_come_next(valkey: Valkey) -> None:
    async with ring(valkey.url, recipe_of(batch_groups=8)) as (world, trainer, replica):
        await replica.poll(10)
        await replica.finish()
        assert await train(trainer, 1) == [f"d{i}" for i in range(8)]
        await replica.hold(trainer.epoch, 1)
        await replica.poll(6)
        await replica.finish()
        assert (await train(trainer, 2))[:2] == ["d8", "d9"]
        await world.verify()


async def test_a_replayed_lease_call_returns_the_first_answer_also_after_a_restart(valkey: Valkey) -> None:
    async with ring(valkey.url, recipe_of()) as (world, _, replica):
        first = await replica.poll(3, op="once")
        again = await replica.poll(3, op="once")
        await world.restart()
        after = await replica.poll(3, op="once")
        assert first == again == after
        assert (await world.status()).occupancy.running == 3


async def test_c18_a_poll_that_waits_is_woken_by_the_work_that_arrives(valkey: Valkey) -> None:
    async with running(valkey.url, recipe_of()) as world:
        trainer, replica = Trainer(world), Replica(world)
        await replica.beat()
        replica.held = pb.WeightsId(trainer_epoch=1, version=0)
        poll = asyncio.create_task(replica.poll(4, wait_s=5))
        await trainer.open()
        assert len((await poll).leases) == 4


async def test_c18_a_trainer_that_waits_is_woken_by_the_report_that_completes_its_batch(valkey: Valkey) -> None:
    async with ring(valkey.url, recipe_of()) as (_, trainer, replica):
        await replica.poll(4)
        sample = asyncio.create_task(trainer.sample(1, wait_s=5))
        for uid in list(replica.leases):
            await replica.finish(uid)
        groups, _ = await sample
        assert len(groups) == 4


async def test_users_prompts_are_trained_between_the_datasets(valkey: Valkey) -> None:
    async with ring(valkey.url, recipe_of()) as (world, trainer, replica):
        request = spb.SubmitPromptsRequest(operation_id="s", prompts=[spb.UserPrompt(text="hi"), spb.UserPrompt(text="ho")])
        assert list((await world.call("SubmitPrompts", request)).uids) == ["u0", "u1"]
        assert list((await world.call("SubmitPrompts", request)).uids) == ["u0", "u1"]
        await replica.poll(12)
        await replica.finish()
        await train(trainer, 1)
        await world.until_full()
        await replica.hold(trainer.epoch, 1)
        assert [lease.prompt.uid for lease in (await replica.poll(4)).leases][:3] == ["u0", "u1", "d12"]
        await world.verify()


async def test_users_prompts_beyond_the_queues_limit_are_refused_whole_and_fit_again_later(valkey: Valkey) -> None:
    async with ring(valkey.url, recipe_of(user_queue_max=3)) as (world, trainer, replica):
        two = [spb.UserPrompt(text="hi"), spb.UserPrompt(text="ho")]
        assert list((await world.call("SubmitPrompts", spb.SubmitPromptsRequest(operation_id="a", prompts=two))).uids) == ["u0", "u1"]
        full = spb.SubmitPromptsRequest(operation_id="b", prompts=two)
        with pytest.raises(FullError, match=r"2 users' prompts wait already and 2 more would pass scheduler\.user_queue_max = 3"):
            await world.call("SubmitPrompts", full)
        await replica.poll(12)
        await replica.finish()
        await train(trainer, 1)
        await world.until_full()
        assert list((await world.call("SubmitPrompts", full)).uids) == ["u2", "u3"]
        await world.verify()


# --------------------------------------------------------------------------------------------------- the window (S4)


async def restored(world: World, trainer: Trainer, replica: Replica, count: int) -> None:
    """Leave exactly `count` open groups; of 6 two are pending, one runs, two are finished, one has failed."""
    await trainer.open()
    await replica.hold(trainer.epoch, 0)
    ledger = world.controller.ledger
    view = await ledger.view()
    await ledger.push([world.prompts.prompt(i) for i in range(count)], cursor=0, users=0, window=count, rev=view.rev)
    if count == 6:
        await replica.poll(4)
        await replica.finish("d0", "d1")
        await ledger.expire([Expiry("d3", 1, "lost")], attempts_max=1)


@pytest.fixture(params=["numbers", "dataset"])
def prompts(request: pytest.FixtureRequest, tmp_path: Path, byte_model: Path) -> Prompts:
    """Numbers, or the real data cursor over ten rows: a window of 12 reaches into the second epoch's order."""
    if request.param == "numbers":
        return NumberedPrompts()
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}+1=", "ground_truth": str(n + 1)}) + "\n" for n in range(10)))
    recipe = recipes.build({"model": {"path": str(byte_model)}, "data": {"train": str(file)}, "sampling": {"group_size": 2}})
    return Dataset.open(file, recipe=recipe)


@pytest.mark.parametrize(("count", "enter"), [(0, [12]), (6, [6, 1]), (12, []), (13, [])])
async def test_s4_c1_a_resume_admits_what_the_window_has_room_for_and_nothing_else(
    valkey: Valkey, caplog: pytest.LogCaptureFixture, prompts: Prompts, count: int, enter: list[int]
) -> None:
    caplog.set_level(logging.WARNING, "stretto.scheduler")
    world = World(valkey.url, recipe_of(), prompts=prompts)
    await world.start()
    world.work.cancel()  # the store is filled by hand
    trainer, replica = Trainer(world), Replica(world)
    await restored(world, trainer, replica, count)
    before = await world.controller.ledger.view()
    payloads = dict(zip(before.entries, await world.controller.ledger.prompts(list(before.entries)), strict=True))
    await world.restart()
    await trainer.open(0)
    await world.until(lambda s: s.occupancy.occupied >= 12 and not s.occupancy.failed)
    await world.pass_s(1)
    # 6: the window rule lets 6 in while the failed group still occupies it; that one then leaves and is refilled by 1.
    assert world.pushes == enter
    occupancy = (await world.status()).occupancy
    assert (occupancy.occupied, occupancy.window) == (max(12, count), 12)
    assert [r.message for r in caplog.records].count("window_overfull") == (1 if count > 12 else 0)
    after = await world.controller.ledger.view()
    kept = [uid for uid in before.entries if uid in after.entries]
    assert set(before.entries) - set(kept) == ({"d3"} if count == 6 else set())
    assert dict(zip(kept, await world.controller.ledger.prompts(kept), strict=True)) == {uid: payloads[uid] for uid in kept}
    assert [after.entries[uid] for uid in kept] == [before.entries[uid] for uid in kept]
    await world.verify()
    await replica.hold(trainer.epoch, 0)
    if count == 6:  # the running one is its replica's still; only what is pending is leased again, in dataset order
        leased = [lease.prompt for lease in (await replica.poll()).leases]
        assert [prompt.uid for prompt in leased] == ["d4", "d5", *(f"d{i}" for i in range(6, 13))]
        assert [prompt.SerializeToString() for prompt in leased] == [prompts.prompt(p.ordinal).SerializeToString() for p in leased]
    await world.stop()


async def test_c2_thirteen_restored_into_a_window_of_twelve_are_kept_with_one_warning(
    valkey: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "stretto.scheduler")
    world = World(valkey.url, recipe_of())
    await world.start()
    world.work.cancel()
    await Trainer(world).open()
    view = await world.controller.ledger.view()
    await world.controller.ledger.push([world.prompts.prompt(i) for i in range(13)], cursor=0, users=0, window=13, rev=view.rev)
    await world.stop()
    await world.start()
    await Trainer(world).open(0)
    await world.pass_s(1)
    await world.pass_s(1)
    status = await world.status()
    assert (status.occupancy.occupied, status.occupancy.window, status.cursor) == (13, 12, 13)
    assert [r.message for r in caplog.records].count("window_overfull") == 1
    assert "window overfull: 13/12; nothing enters until 1 are trained" in await world.controller.explain()
    gauges = [REGISTRY.get_sample_value(f"stretto_scheduler_{name}_groups") for name in ("occupied", "window")]
    assert gauges == [13, 12]
    assert world.pushes == []
    assert len((await world.controller.ledger.view()).entries) == 13
    await world.verify()
    await world.stop()


async def test_s4_counts_can_be_filtered_by_the_version_that_began_the_groups(valkey: Valkey) -> None:
    async with ring(valkey.url, recipe_of()) as (world, trainer, replica):
        await replica.poll(6)
        await replica.finish(*(f"d{n}" for n in range(4)))
        await train(trainer, 1)
        await world.until_full()
        await replica.hold(trainer.epoch, 1)
        await replica.poll(3)
        await replica.finish("d6")
        seen = {}
        for since in (None, 0, 1, 2):
            o = (await world.call("GetStatus", spb.GetStatusRequest(begun_since=since))).occupancy
            seen[since] = (o.occupied, o.pending, o.running, o.finished, o.committed, o.window)
        assert seen == {None: (12, 7, 4, 1, 4, 12), 0: (5, 0, 4, 1, 0, 12), 1: (3, 0, 2, 1, 0, 12), 2: (0, 0, 0, 0, 0, 12)}


async def test_c5_a_trainer_that_resumes_at_500_with_nothing_stored_admits_one_window(valkey: Valkey) -> None:
    async with running(valkey.url, recipe_of(batch_groups=8)) as world:
        await Trainer(world).open(500)
        status = await world.until(lambda s: s.occupancy.occupied >= 24)
        assert (status.occupancy.occupied, status.committed_step) == (24, 500)
        await world.verify()


async def test_the_last_steps_generate_nothing_that_is_not_trained(valkey: Valkey) -> None:
    async with running(valkey.url, recipe_of()) as world:
        trainer, replica = Trainer(world), Replica(world)
        await trainer.open(0, total=2)
        await replica.hold(trainer.epoch, 0)
        await world.until(lambda s: s.occupancy.occupied == 8)
        await replica.poll(8)
        await replica.finish()
        await train(trainer, 1)
        await train(trainer, 2)
        await trainer.save(2)
        status = await world.until(lambda s: s.phase == spb.RUN_PHASE_DONE)
        assert (status.cursor, status.occupancy.occupied) == (8, 0)
        assert (await replica.poll()).wait_reason == "run finished"


async def test_set_window_changes_the_window_survives_a_restart_and_drops_nothing(valkey: Valkey) -> None:
    async with ring(valkey.url, recipe_of()) as (world, _, _replica):
        occupancy = (await world.call("SetWindow", spb.SetWindowRequest(window=8))).occupancy
        assert (occupancy.occupied, occupancy.window) == (12, 8)
        await world.restart()
        assert (await world.status()).occupancy.window == 8
        with pytest.raises(InvalidArgumentError, match="window = 13 must lie between"):
            await world.call("SetWindow", spb.SetWindowRequest(window=13))


async def test_a_window_that_a_lower_max_lag_no_longer_allows_gives_way_to_the_recipes(valkey: Valkey) -> None:
    async with ring(valkey.url, recipe_of(window=4)) as (world, _, _replica):
        await world.call("SetWindow", spb.SetWindowRequest(window=12))
        await world.stop()
        world.recipe = recipe_of(window=4, max_lag=0)
        await world.start()
        assert (await world.status()).occupancy.window == 4


# --------------------------------------------------------------------------------------------------- weights and lag


async def test_c9_what_was_produced_after_the_last_checkpoint_survives_scheduler_trainer_and_replica(valkey: Valkey) -> None:
    async with ring(valkey.url, recipe_of()) as (world, trainer, replica):
        await replica.poll()
        await replica.finish()
        await train(trainer, 1)
        await trainer.save(1)
        produced, _ = await trainer.sample(2)
        await trainer.commit(2)
        before = (await world.status()).num_trajectories
        await world.restart()
        again = Trainer(world)
        await again.open(1)
        await world.until_full()
        groups, _ = await again.sample(2)
        assert [g.SerializeToString(deterministic=True) for g in groups] == [g.SerializeToString(deterministic=True) for g in produced]
        other = Replica(world, "r-2")
        await other.hold(again.epoch, 1)
        trained = {uid for g in groups for uid in [g.prompt.uid]} | {f"d{n}" for n in range(12)}
        assert trained.isdisjoint(lease.prompt.uid for lease in (await other.poll()).leases)  # nothing is generated again
        assert (await world.status()).num_trajectories == before
        await world.verify()


@pytest.mark.parametrize("ends", ["in time", "at its deadline"])
async def test_c19_the_last_steps_evaluation_completes_or_is_reported_as_cut_and_then_the_run_is_done(valkey: Valkey, ends: str) -> None:
    validation = {"every_steps": 0, "at_start": False, "at_end": True, "deadline_s": 100}
    async with running(valkey.url, recipe_of(lease_s=60, validation=validation), with_exam=True) as world:
        trainer, replica = Trainer(world), Replica(world)
        await trainer.open(total=1)
        await replica.hold(trainer.epoch, 0)
        await answer_training(replica, 4)
        await train(trainer, 1)
        await trainer.save(1)
        await replica.hold(trainer.epoch, 1)
        await world.until(lambda s: s.phase == spb.RUN_PHASE_FINISHING)
        assert len((await replica.poll(wait_s=5)).leases) == 3
        await world.restart()  # whoever ends first: the scheduler, and the trainer that only waits
        await trainer.open(1, total=1)
        await replica.hold(trainer.epoch, 1)
        assert (await world.status()).phase == spb.RUN_PHASE_FINISHING
        assert any(r.startswith("evaluation s1 of v1: 3 of 3") for r in await world.controller.explain())
        if ends == "in time":
            await replica.poll(wait_s=5)
            await replica.finish()
        else:
            await world.pass_s(101)
        status = await world.until(lambda s: s.phase == spb.RUN_PHASE_DONE)
        evaluation = status.last_evaluation
        outcome, failed = ("complete", 0) if ends == "in time" else ("cut: deadline", 6)
        assert (evaluation.evaluation_id, evaluation.outcome, evaluation.num_sessions, evaluation.num_failed) == ("s1", outcome, 6, failed)


async def test_c6_replicas_with_other_weights_wait_and_say_for_what(valkey: Valkey) -> None:
    async with running(valkey.url, recipe_of()) as world:
        trainer, replica = Trainer(world), Replica(world)
        await trainer.open(37)
        await replica.hold(trainer.epoch, 0)
        await world.until_full()
        assert (await replica.poll()).wait_reason == "waiting for weights v37: this replica holds v0"
        replica.held = pb.WeightsId()
        assert (await replica.poll()).wait_reason == "waiting for weights v37: this replica holds none"
        await replica.beat()
        assert "replica r-1 is waiting for weights v37, holds none" in (await world.call("ExplainWait", spb.ExplainWaitRequest())).reasons
        await replica.hold(trainer.epoch, 37)
        assert len((await replica.poll()).leases) == 12


async def test_a_straggler_under_policy_wait_holds_the_batch_and_is_named(valkey: Valkey) -> None:
    async with ring(valkey.url, recipe_of(max_lag=1)) as (_, trainer, replica):
        await replica.poll(5)
        await replica.finish("d1", "d2", "d3", "d4")
        assert await train(trainer, 1) == ["d1", "d2", "d3", "d4"]
        await replica.hold(trainer.epoch, 1)
        await replica.poll(4)
        await replica.finish(*[uid for uid in replica.leases if uid != "d0"])
        groups, reason = await trainer.sample(2)
        assert groups == []
        assert reason.startswith("step 2 waits for 1 groups that would exceed max_lag = 1; 1 is on replica r-1 (oldest d0")
        await replica.finish("d0")
        assert (await train(trainer, 2))[0] == "d0"


async def test_a_stale_group_is_evicted_and_refilled_by_exactly_one(valkey: Valkey) -> None:
    async with ring(valkey.url, recipe_of(max_lag=1, stragglers="drop")) as (world, trainer, replica):
        await replica.poll(5)
        await replica.finish("d1", "d2", "d3", "d4")
        await train(trainer, 1)
        await world.until_full()
        cursor = (await world.status()).cursor
        await replica.hold(trainer.epoch, 1)
        await replica.poll(4)
        await replica.finish(*[uid for uid in replica.leases if uid != "d0"])
        groups, reason = await trainer.sample(2, wait_s=2)
        assert len(groups) == 4, reason
        status = await world.until_full() and await world.status()
        assert (status.cursor, status.num_evicted) == (cursor + 1, 1)
        assert await replica.report(replica.ends("d0")) == ["d0"]
        await trainer.commit(2)
        assert (await world.verify()).evicted_by_reason == {"stale": 1}
        assert (await world.status()).lag_trained_max <= 1


async def test_groups_without_variance_are_filtered_and_refilled(valkey: Valkey) -> None:
    async with ring(valkey.url, recipe_of(filter="zero_variance")) as (world, trainer, replica):
        await replica.poll(5)
        flat = list(replica.ends("d0"))
        for end in flat:
            end.trajectory.reward = 1.0
        await replica.report(flat)
        del replica.leases["d0"]
        await replica.finish()
        assert await train(trainer, 1) == ["d1", "d2", "d3", "d4"]
        assert (await world.verify()).evicted_by_reason == {"zero_variance": 1}


# --------------------------------------------------------------------------------------------------- losses


async def test_leases_of_a_silent_replica_are_issued_again_first_and_only_for_what_is_missing(valkey: Valkey) -> None:
    async with ring(valkey.url, recipe_of(lease_s=60)) as (world, trainer, replica):
        await replica.poll(2)
        await replica.report(replica.ends("d0", indices=[1]))
        await world.pass_s(61)
        status = await world.status()
        assert (status.occupancy.running, status.num_reissued, status.replicas[0].state) == (0, 2, spb.REPLICA_STATE_DEAD)
        other = Replica(world, "r-2")
        await other.hold(trainer.epoch, 0)
        leases = (await other.poll(3)).leases
        assert [(lease.prompt.uid, list(lease.missing), lease.attempt) for lease in leases] == [
            ("d0", [0], 2),
            ("d1", [0, 1], 2),
            ("d2", [0, 1], 1),
        ]
        assert sorted(await replica.report([*replica.ends("d0"), *replica.ends("d1")])) == ["d0", "d1"]
        assert list((await replica.beat()).lost_uids) == ["d0", "d1"]
        await other.finish()
        await world.verify()


async def test_a_replica_that_is_gone_for_ten_leases_is_forgotten_and_may_come_back(valkey: Valkey) -> None:
    async with ring(valkey.url, recipe_of(lease_s=60)) as (world, _, replica):
        await replica.poll(2)
        await world.pass_s(61)
        await world.pass_s(60 * FORGET_LEASES - 62)
        assert [r.state for r in (await world.status()).replicas] == [spb.REPLICA_STATE_DEAD]
        await world.pass_s(2)
        assert list((await world.status()).replicas) == []
        await world.restart()
        assert list((await world.status()).replicas) == []
        for call in (replica.poll, replica.beat):
            with pytest.raises(NotFoundError, match="r-1 epoch 1 is unknown here"):
                await call()
        replica.epoch = 0
        await replica.beat()
        assert [r.replica_id for r in (await world.status()).replicas] == [replica.name]
        assert replica.epoch == 2  # I6: whoever still runs under the first one is fenced
        await world.verify()


async def test_i6_a_first_heartbeat_that_is_repeated_begins_one_session_and_another_process_takes_the_name_over(valkey: Valkey) -> None:
    async with ring(valkey.url, recipe_of()) as (world, _, _):

        async def beat(epoch: int, incarnation: str) -> int:
            request = spb.HeartbeatRequest(replica_id="r-2", replica_epoch=epoch, incarnation=incarnation)
            return (await world.call("Heartbeat", request)).replica_epoch

        assert [await beat(0, "one"), await beat(0, "one")] == [1, 1]
        await world.restart()
        assert await beat(0, "one") == 1
        assert await beat(0, "two") == 2
        assert await beat(2, "two") == 2
        with pytest.raises(FencedError, match="r-2 epoch 1 is older than 2; another process runs under its name"):
            await beat(1, "one")


async def test_c16_a_trajectory_that_never_answers_ends_at_its_deadline_with_one_refill(valkey: Valkey) -> None:
    recipe = recipe_of(lease_s=60, group_deadline_s=100, attempts_max=2)
    async with ring(valkey.url, recipe) as (world, trainer, replica):
        await replica.poll(12)
        await replica.finish(*[f"d{i}" for i in range(1, 5)])
        for attempt in (1, 2):
            assert replica.leases["d0"].attempt == attempt
            for _ in range(2):
                await world.pass_s(50.5)
                await replica.beat()
            if attempt == 1:
                await replica.poll(1)
        assert "d0" not in replica.leases
        await replica.poll(12)
        status = await world.until_full() and await world.status()
        assert (status.cursor, status.num_failed) == (13, 1)
        assert "d12" in replica.leases
        await world.restart()
        assert await train(trainer, 1) == ["d1", "d2", "d3", "d4"]
        assert (await world.verify()).evicted_by_reason == {"attempts exhausted": 1}


async def test_c15_one_failed_answer_is_generated_again_alone(valkey: Valkey) -> None:
    async with ring(valkey.url, recipe_of()) as (world, _, replica):
        await replica.poll(1)
        await replica.report([*replica.ends("d0", indices=[0]), *replica.ends("d0", indices=[1], fails=True)])
        lease = next(iter((await replica.poll(1)).leases))
        assert (lease.prompt.uid, list(lease.missing), lease.attempt) == ("d0", [1], 2)
        await replica.finish("d0")
        assert (await world.status()).occupancy.finished == 1


async def test_returned_leases_bring_their_partial_answers_to_the_next_replica(valkey: Valkey) -> None:
    async with ring(valkey.url, recipe_of()) as (world, trainer, replica):
        await replica.poll(1)
        partial = pb.Trajectory(prompt_uid="d0", index=1, token_ids=b"\x07\x00\x00\x00", finish_reason=pb.FINISH_REASON_ABORTED)
        request = spb.ReturnLeasesRequest(
            replica_id=replica.name,
            replica_epoch=replica.epoch,
            operation_id="back",
            leases=[spb.ReturnedLease(prompt_uid="d0", attempt=1, partials=[partial])],
            reason="drain",
        )
        await world.call("ReturnLeases", request)
        await world.call("ReturnLeases", request)
        other = Replica(world, "r-2")
        await other.hold(trainer.epoch, 0)
        (lease,) = (await other.poll(1)).leases
        assert (list(lease.partials), list(lease.missing), lease.attempt) == ([partial], [0, 1], 2)


async def test_a_lease_its_replica_never_heard_of_is_issued_again(valkey: Valkey) -> None:
    async with ring(valkey.url, recipe_of()) as (world, _, replica):
        await replica.poll(2)
        replica.leases.clear()
        await replica.beat()
        assert (await world.status()).occupancy.running == 2
        await world.pass_s(11)
        await replica.beat()
        assert (await world.status()).occupancy.running == 0
        entries = (await world.controller.ledger.view()).entries
        assert {(entries[uid].attempt, entries[uid].failures) for uid in ("d0", "d1")} == {(1, 0)}, "nobody tried"


async def test_a_restarted_replica_fences_its_former_self(valkey: Valkey) -> None:
    async with ring(valkey.url, recipe_of()) as (world, trainer, replica):
        await replica.poll(2)
        again = Replica(world, replica.name)
        await again.hold(trainer.epoch, 0)
        assert again.epoch == replica.epoch + 1
        assert (await world.status()).occupancy.running == 0
        for call in (replica.beat(), replica.poll(1), replica.report(replica.ends("d0"))):
            with pytest.raises(FencedError, match="r-1 epoch 1"):
                await call


async def test_a_second_trainer_fences_the_first_and_gets_back_what_is_in_no_checkpoint(valkey: Valkey) -> None:
    async with ring(valkey.url, recipe_of()) as (world, first, replica):
        await replica.poll(12)
        await replica.finish()
        await train(first, 1)
        await first.save(1)
        batch = await train(first, 2)
        second = Trainer(world)
        assert (await second.open(1)).num_reopened == 4
        for call in (first.sample(2), first.commit(2), first.save(2)):
            with pytest.raises(FencedError, match="trainer epoch 1 is older than 2"):
                await call
        assert await train(second, 2) == batch
        with pytest.raises(RefusedError, match="a checkpoint of step 1 was committed"):
            await Trainer(world).open(0)
        assert (await world.verify()).ordinals_trained == 8


async def test_a_replayed_open_does_not_fence_itself(valkey: Valkey) -> None:
    async with running(valkey.url, recipe_of()) as world:
        trainer = Trainer(world)
        assert await trainer.open(op="same") == await trainer.open(op="same")


async def test_c17_a_second_scheduler_takes_over_and_the_first_changes_nothing_more(valkey: Valkey) -> None:
    async with ring(valkey.url, recipe_of()) as (first, trainer, replica), running(valkey.url, recipe_of()) as second:
        with pytest.raises(DeposedError, match="another scheduler took over"):  # callers ask again; none takes itself for fenced
            await replica.poll(1)
        with pytest.raises(FencedError, match="scheduler epoch 1 is not 2"):
            await first.work
        trainer.world = replica.world = second
        await trainer.open()
        await replica.hold(trainer.epoch, 0)
        assert len((await replica.poll()).leases) == 12
        assert (await second.status()).cursor == 12
        await second.verify()


async def test_everything_goes_on_after_a_kill_of_the_scheduler(valkey: Valkey) -> None:
    async with ring(valkey.url, recipe_of()) as (world, trainer, replica):
        await replica.poll(6)
        await replica.finish("d0", "d1", "d2")
        await world.call("Pause", spb.PauseRequest(reason="lunch"))
        await world.restart()
        status = await world.status()
        assert (status.phase, status.pause_reason, status.occupancy.running) == (spb.RUN_PHASE_PAUSED, "lunch", 3)
        assert (await replica.poll()).wait_reason == "paused: lunch"
        assert (await replica.beat()).directives[0].kind == spb.Directive.KIND_PAUSE
        await world.call("Resume", spb.ResumeRequest())
        await replica.finish()
        await train(trainer, 1)
        assert (await world.verify()).ordinals_trained == 4


async def test_another_dataset_under_the_same_run_name_is_refused(valkey: Valkey) -> None:
    async with ring(valkey.url, recipe_of()) as (world, _, _replica):
        await world.stop()
        world.prompts._fingerprint = "other"
        with pytest.raises(RefusedError, match=r"was begun with 40 prompts \(numbers\)"):
            await world.start()
        await world.store.close()
        world.prompts._fingerprint = "numbers"
        await world.start()


# --------------------------------------------------------------------------------------------------- evaluations


async def answer_training(replica: Replica, count: int) -> None:
    """Finish the `count` oldest training groups, leased already or now."""
    while len(replica.leases) < count:
        await replica.poll(count - len(replica.leases), wait_s=5)
    await replica.finish(*list(replica.leases)[:count])


EVERY_TWO = {"every_steps": 2, "at_start": True, "at_end": True, "group_size": 2, "deadline_s": 50}


async def answer_exam(replica: Replica, *, failing: int = 0) -> list[spb.Lease]:
    leases = [lease for lease in (await replica.poll(64, wait_s=5)).leases if lease.pin_version]
    for n, lease in enumerate(leases):
        await replica.report(replica.ends(lease.prompt.uid, fails=n < failing))
        del replica.leases[lease.prompt.uid]
    return leases


async def test_an_evaluation_runs_at_the_start_outside_the_window_and_its_failures_count_as_wrong(valkey: Valkey) -> None:
    async with ring(valkey.url, recipe_of(validation=EVERY_TWO), with_exam=True) as (world, _, replica):
        leases = await answer_exam(replica, failing=1)
        assert len(leases) == 3
        event = (await world.events(until="evaluation"))[-1]
        assert event.evaluation.evaluation_id == "s0"
        assert event.evaluation.accuracy == pytest.approx(2 / 3)
        assert (event.evaluation.num_sessions, event.evaluation.num_failed, event.evaluation.outcome) == (6, 2, "complete")
        status = await world.until(lambda s: s.last_evaluation == event.evaluation)
        assert status.occupancy.occupied == 12
        await world.verify()


async def test_an_evaluation_survives_a_restart_and_is_cut_at_its_deadline(valkey: Valkey) -> None:
    async with ring(valkey.url, recipe_of(validation=EVERY_TWO), with_exam=True) as (world, _, replica):
        leases = [lease for lease in (await replica.poll(64, wait_s=5)).leases if lease.pin_version]
        await replica.report(replica.ends(leases[0].prompt.uid))
        await world.restart()
        await world.pass_s(51)
        event = (await world.events(until="evaluation"))[-1]
        assert (event.evaluation.outcome, event.evaluation.num_failed) == ("cut: deadline", 4)
        assert event.evaluation.accuracy == pytest.approx(1 / 3)
        await world.verify()


async def test_evaluations_follow_the_steps_one_at_a_time_and_the_run_ends_after_the_last(valkey: Valkey) -> None:
    async with running(valkey.url, recipe_of(validation=EVERY_TWO), with_exam=True) as world:
        trainer, replica = Trainer(world), Replica(world)
        opened = await trainer.open(total=2)
        await replica.hold(trainer.epoch, 0)
        await answer_exam(replica)
        for step in (1, 2):
            await answer_training(replica, 4)
            await train(trainer, step)
            await replica.hold(trainer.epoch, step - 1)
        await trainer.save(2)
        await world.until(lambda s: s.phase == spb.RUN_PHASE_FINISHING)
        assert (await replica.poll()).wait_reason == "validation waits for newer weights: this replica holds v1"
        await replica.hold(trainer.epoch, 2)
        await answer_exam(replica)
        await world.until(lambda s: s.phase == spb.RUN_PHASE_DONE)
        events = await world.events(opened.event_id, until="evaluation")
        assert events[-1].evaluation.evaluation_id == "s0"
        events = await world.events(events[-1].event_id, until="evaluation")
        assert (events[-1].evaluation.evaluation_id, events[-1].evaluation.version_min) == ("s2", 2)


async def test_a_user_can_ask_for_an_evaluation_and_wait_for_it(valkey: Valkey) -> None:
    async with ring(valkey.url, recipe_of(), with_exam=True) as (world, _, replica):
        asked = await world.call("Evaluate", spb.EvaluateRequest(operation_id="e", max_prompts=2))
        assert asked == await world.call("Evaluate", spb.EvaluateRequest(operation_id="e", max_prompts=2))
        request = spb.GetEvaluationRequest(evaluation_id=asked.evaluation_id, wait_s=5)
        waiting = asyncio.create_task(world.call("GetEvaluation", request))
        assert len(await answer_exam(replica)) == 2
        answer = await waiting
        assert (answer.done, answer.evaluation.accuracy) == (True, 1.0)
        with pytest.raises(NotFoundError, match="there is no evaluation 'nope'"):
            await world.call("GetEvaluation", spb.GetEvaluationRequest(evaluation_id="nope"))


async def test_a_resumed_trainer_has_later_evaluations_made_again_and_earlier_ones_not(valkey: Valkey) -> None:
    async with ring(valkey.url, recipe_of(validation=EVERY_TWO), with_exam=True) as (world, trainer, replica):
        await answer_exam(replica)
        for step in (1, 2):
            await answer_training(replica, 4)
            await train(trainer, step)
            await replica.hold(trainer.epoch, step)
        await answer_exam(replica)
        await world.until(lambda s: s.last_evaluation.evaluation_id == "s2")
        await trainer.open(1)
        assert [p["id"] for p in world.controller.evaluations.plans] == ["s1"]
        assert sorted(await world.controller.ledger.results()) == ["s0"]


# --------------------------------------------------------------------------------------------------- the store


async def test_a_store_that_goes_away_and_comes_back_loses_and_doubles_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("own")
    server = embedded.start(folder)
    async with ring(server.url, recipe_of()) as (world, trainer, replica):
        await replica.poll(8)
        port, password = server.port, server.password
        server.stop()
        poll = asyncio.create_task(replica.poll(2))
        report = asyncio.create_task(replica.finish("d0", "d1", "d2", "d3"))
        await asyncio.sleep(0)
        server = embedded.start(folder, port=port, password=password)
        await asyncio.gather(poll, report)
        await train(trainer, 1)
        await world.verify()
    server.stop()


async def test_a_wrong_password_and_a_store_without_persistence_are_said_at_once(
    valkey: Valkey, tmp_path_factory: pytest.TempPathFactory
) -> None:
    wrong = valkey.url.replace(":" + valkey.password + "@", ":nope@")
    with pytest.raises(RefusedError, match=r"refuses the user or password in redis\.url"):
        await Store.open(wrong, outage_s=5)
    import redis

    with redis.Redis.from_url(valkey.url) as raw:
        raw.config_set("appendonly", "no")
        try:
            with pytest.raises(RefusedError, match="without append-only persistence"):
                await Store.open(valkey.url, strict=True)
        finally:
            raw.config_set("appendonly", "yes")
