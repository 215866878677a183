"""What may go wrong between two steps of the scheduler: cancelled calls, a recipe that changed, a scheduler that heard nobody."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from services.scheduler.groups import View
from stretto import embedded
from stretto.errors import InvalidArgumentError
from stretto.v1 import scheduler_pb2 as spb
from tests.scheduler_world import SOON_S, Replica, Trainer, recipe_of, ring, running

Valkey = embedded.EmbeddedServer
JUDGED_AT_START = {"every_steps": 0, "at_start": True, "at_end": False}


async def test_an_open_that_was_cut_off_behind_its_script_still_begins_its_evaluation(valkey: Valkey) -> None:
    async with running(valkey.url, recipe_of(validation=JUDGED_AT_START), with_exam=True) as world:
        evaluations, trainer = world.controller.evaluations, Trainer(world)
        load = evaluations.load

        async def hangs(view: View) -> None:
            await asyncio.sleep(SOON_S)

        evaluations.load = hangs  # type: ignore[method-assign]
        request = spb.OpenTrainerRequest(operation_id="once", address="t:1", total_steps=1000, batch_groups=4)
        with pytest.raises(grpc.RpcError):
            await world.stub.OpenTrainer(request, timeout=0.3)
        evaluations.load = load  # type: ignore[method-assign]
        await trainer.open(op="once")
        replica = Replica(world)
        await replica.hold(trainer.epoch, 0)
        answer = await replica.poll(wait_s=2)
        assert any(lease.pin_version for lease in answer.leases)


async def test_plans_that_are_older_than_the_store_are_read_again_and_stop_nobody(valkey: Valkey) -> None:
    async with ring(valkey.url, recipe_of(validation=JUDGED_AT_START), with_exam=True) as (world, _, _):
        await world.until(lambda s: bool(world.controller.evaluations.running))
        running_plan = dict(world.controller.evaluations.plans[0])
        await world.controller.ledger.end_evaluation("s0", [f"vs0-{n}" for n in range(3)])
        world.controller.evaluations.plans = [running_plan | {"started_ms": 0}]
        await world.controller.settle()
        assert world.controller.evaluations.plans == []
        assert not world.work.done()


@pytest.mark.parametrize("gone", ["the validation set", "the version"])
async def test_an_evaluation_that_can_never_begin_does_not_keep_the_run_from_its_end(valkey: Valkey, gone: str) -> None:
    async with ring(valkey.url, recipe_of(validation={"every_steps": 0, "at_start": False, "at_end": False}), with_exam=True) as (
        world,
        trainer,
        replica,
    ):
        await world.call("Evaluate", spb.EvaluateRequest(version=2))
        world._with_exam = gone != "the validation set"
        await world.restart()
        await trainer.open(total=1)
        await replica.hold(trainer.epoch, 0)
        await replica.poll(4, wait_s=2)
        await replica.finish()
        assert (await trainer.sample(1, wait_s=5))[0]
        await trainer.commit(1)
        await trainer.save(1)
        status = await world.until(lambda s: s.phase == spb.RUN_PHASE_DONE)
        assert status.committed_step == 1


async def test_a_lost_lease_says_that_its_replica_was_silent(valkey: Valkey) -> None:
    async with ring(valkey.url, recipe_of()) as (world, _, replica):
        await replica.poll(1)
        await world.pass_s(70)
        (event,) = [e for e in await world.events(until="reissued") if e.kind == "reissued"]
        assert "replica r-1 silent for" in event.text


async def test_a_scheduler_that_heard_nobody_for_long_blames_no_replica(valkey: Valkey) -> None:
    """It was stopped, or its store was away: nobody could renew his lease meanwhile."""
    async with ring(valkey.url, recipe_of()) as (world, _, replica):
        await replica.poll(2)
        world.offset_s += 300
        await world.controller.tick()
        assert (await world.status()).num_reissued == 0
        assert (await replica.beat()).lost_uids == []
        await world.pass_s(70)
        assert (await world.status()).num_reissued == 2


async def test_numbers_that_json_cannot_carry_do_not_break_a_session(valkey: Valkey) -> None:
    async with ring(valkey.url, recipe_of()) as (world, _, _):
        request = spb.HeartbeatRequest(replica_id="r-2", state=spb.REPLICA_STATE_RUNNING, update_stall_ms=float("nan"))
        first = await world.call("Heartbeat", request)
        assert first.replica_epoch == 1


@pytest.mark.parametrize("wait_s", [float("nan"), -1.0])
async def test_a_wait_that_is_no_length_of_time_is_refused(valkey: Valkey, wait_s: float) -> None:
    async with ring(valkey.url, recipe_of()) as (world, _, _):
        with pytest.raises(InvalidArgumentError, match="wait_s"):
            await world.call("GetEvaluation", spb.GetEvaluationRequest(evaluation_id="e1", wait_s=wait_s))


async def test_an_answer_whose_parts_do_not_fit_counts_as_failed_and_never_reaches_the_trainer(valkey: Valkey) -> None:
    async with ring(valkey.url, recipe_of()) as (world, _, replica):
        await replica.poll(1)
        ends: list[Any] = replica.ends("d0")
        ends[0].trajectory.logprobs = ends[0].trajectory.logprobs[:-4]
        await replica.report(ends)
        status = await world.status()
        assert (status.num_reissued, status.occupancy.finished) == (1, 0)


async def test_why_names_what_makes_attempts_fail(valkey: Valkey) -> None:
    async with ring(valkey.url, recipe_of()) as (world, _, replica):
        await replica.poll(2)
        await replica.report(replica.ends("d1", fails=True))
        (reason,) = [r for r in await world.controller.explain() if "tried again" in r]
        assert reason == "1 prompts are tried again: d1: it broke"
