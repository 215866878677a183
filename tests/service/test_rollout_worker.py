"""A replica against a scripted scheduler over real gRPC."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from services.rollout.worker import EngineLostError
from stretto import rpc
from stretto.errors import DeadlineError, FencedError, UnavailableError
from stretto.v1 import scheduler_pb2 as pb
from stretto.v1 import scheduler_pb2_grpc
from stretto.v1.types_pb2 import FINISH_REASON_ABORTED, FINISH_REASON_FAILED, FINISH_REASON_STOP, WeightsId
from tests.fakes import fake_logprob
from tests.rollout_world import GROUP, lease, replica
from tests.waits import eventually


async def test_leased_groups_come_back_generated_scored_and_complete() -> None:
    async with replica() as w:
        w.scheduler.offer(*(lease(f"d{k}") for k in range(40)))
        await eventually(lambda: all(w.scheduler.finished(f"d{k}") for k in range(40)))
        t = w.scheduler.reported["d7", 2]
        tokens = np.frombuffer(t.token_ids, "<i4").tolist()
        assert tokens == [10, 11, 12, 13, 14, 2]
        assert np.frombuffer(t.logprobs, "<f4").tolist() == [fake_logprob(0, i) for i in range(6)]
        assert [(s.version, s.num_tokens) for s in t.spans] == [(0, 6)]
        assert (t.finish_reason, t.reward, t.prediction, dict(t.reward_extras)) == (FINISH_REASON_STOP, 16.0, "42", {"acc": 1.0})
        assert t.replica_id == "r-test"
        await eventually(lambda: not w.worker.book.attempts())


async def test_a_replica_leases_nothing_before_it_holds_weights_and_says_so() -> None:
    """C6."""
    async with replica(publish=False) as w:
        w.scheduler.offer(lease("d0"))
        await eventually(lambda: len(w.scheduler.heartbeats) > 3)
        assert w.scheduler.polls == []
        assert w.scheduler.heartbeats[-1].state == pb.REPLICA_STATE_WAITING_FOR_WEIGHTS
        assert w.worker.wait_reason == "waiting for weights"
        w.source.publish(3, 37)
        await eventually(lambda: w.scheduler.finished("d0"))
        assert w.scheduler.polls[0].held == WeightsId(trainer_epoch=3, version=37)
        assert [s.version for s in w.scheduler.reported["d0", 0].spans] == [37]


async def test_an_open_poll_is_asked_again_when_newer_weights_are_held() -> None:
    async with replica() as w:
        await eventually(lambda: w.scheduler.polls)
        w.source.publish(1, 1)
        await eventually(lambda: any(p.held.version == 1 for p in w.scheduler.polls))
        assert len({p.operation_id for p in w.scheduler.polls}) == 1  # what the old poll may have been granted comes with the new
        assert not w.scheduler.answers


async def test_no_more_is_leased_than_slots_and_prefetch_take() -> None:
    async with replica(slots=8, prefetch_groups=2) as w:
        w.engine.hold(1)
        w.scheduler.offer(*(lease(f"d{k}") for k in range(20)))
        await eventually(lambda: w.worker.book.num_generating == 16)
        assert len(w.scheduler.granted) == 4
        w.engine.release()
        await eventually(lambda: all(w.scheduler.finished(f"d{k}") for k in range(20)))


async def test_c15_a_failing_generation_and_a_failing_reward_fail_one_session_each() -> None:
    """C15."""
    async with replica() as w:
        w.engine.fail.add("d0/1")
        w.pool.failing.add("10 11 12 13 14 2")
        w.scheduler.offer(lease("d0"))
        await eventually(lambda: w.scheduler.finished("d0"))
        errors = [w.scheduler.reported["d0", i].error for i in range(GROUP)]
        assert errors == ["", "told to fail", "reward: ValueError: no", ""]
        assert w.scheduler.reported["d0", 2].finish_reason == FINISH_REASON_FAILED
        assert w.scheduler.reported["d0", 2].token_ids == b""


async def test_c15_a_lost_lease_stops_the_work_on_it() -> None:
    """C15: stale work is cancelled, not finished and thrown away."""
    async with replica() as w:
        w.engine.hold(2)
        w.scheduler.offer(lease("d0"), lease("d1"))
        await eventually(lambda: w.driver.vitals.num_running == 2 * GROUP)
        w.scheduler.lost.add("d0")
        await eventually(lambda: w.driver.vitals.num_running == GROUP)
        w.engine.release()
        await eventually(lambda: w.scheduler.finished("d1"))
        assert not any(uid == "d0" for uid, _ in w.scheduler.reported)


async def test_c14_a_lost_trajectory_does_not_wait_for_its_reward() -> None:
    """C14."""
    async with replica() as w:
        w.pool.stuck.add("10 11 12 2")  # session 0 of each group
        w.scheduler.offer(lease("d0", n=1))
        await eventually(lambda: w.pool.items)
        w.scheduler.lost.add("d0")
        await eventually(lambda: not w.worker.book.attempts())
        w.scheduler.offer(lease("d1", missing=[1, 2, 3]))
        await eventually(lambda: ("d1", 3) in w.scheduler.reported)
        w.pool.unstick.set()
        w.scheduler.offer(lease("d2", n=1))
        await eventually(lambda: w.scheduler.finished("d2", 1))
        assert ("d0", 0) not in w.scheduler.reported


async def test_ends_are_kept_while_the_scheduler_is_away_and_reported_when_it_is_back() -> None:
    async with replica() as w:
        w.engine.hold(1)
        w.scheduler.offer(lease("d0"))
        await eventually(lambda: w.driver.vitals.num_running == GROUP)
        address = w.server.address
        await w.server.drain(0)
        w.engine.release()
        await eventually(lambda: w.worker.book.num_queued == GROUP)
        again = await rpc.serve(
            address, lambda s: scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(w.scheduler, s), ["stretto.v1.SchedulerService"]
        )
        await eventually(lambda: w.scheduler.finished("d0"))
        assert {h.replica_epoch for h in w.scheduler.heartbeats} == {0, 1}
        await again.drain(0)


async def test_a_session_that_another_process_took_over_ends_the_replica_at_once() -> None:
    async with replica() as w:
        w.scheduler.fenced.add(1)
        with pytest.raises(FencedError, match="replica epoch 1 is over"):
            await asyncio.wait_for(w.running, 5)
        assert w.scheduler.epoch == 1, "it does not take the name back"


async def test_a_replica_that_was_forgotten_joins_again_however_often_and_drops_its_work() -> None:
    """Its scheduler's store was emptied, twice within a minute: nobody took its name."""
    async with replica() as w:
        w.engine.hold(1)
        w.scheduler.offer(lease("d0"))
        await eventually(lambda: w.driver.vitals.num_running == GROUP)
        for epoch in (1, 2):
            w.scheduler.forgotten.add(epoch)
            await eventually(lambda epoch=epoch: w.worker.link.epoch == epoch + 1)
        await eventually(lambda: w.driver.vitals.num_running == 0)
        w.engine.release()
        w.scheduler.offer(lease("d1"))
        await eventually(lambda: w.scheduler.finished("d1"))
        assert not any(uid == "d0" for uid, _ in w.scheduler.reported)
        assert len({h.incarnation for h in w.scheduler.heartbeats}) == 1


async def test_draining_reports_what_is_whole_and_hands_back_the_rest_with_partial_answers() -> None:
    async with replica() as w:
        w.engine.answer = lambda request: [2] if request.id == "d0/0" else [10] * 50
        w.engine.hold(3)
        w.scheduler.offer(lease("d0"), lease("d1", attempt=2))
        await eventually(lambda: w.engine.reached.is_set() and w.driver.vitals.num_running == 2 * GROUP - 1)
        w.worker.drain()
        await asyncio.wait_for(w.running, 5)
        assert set(w.scheduler.reported) == {("d0", 0)}
        assert w.scheduler.return_reasons == ["drain"]
        assert w.scheduler.returned["d1"].attempt == 2
        partials = {t.index: t for t in w.scheduler.returned["d1"].partials}
        assert sorted(partials) == [0, 1, 2, 3]
        assert all(len(t.token_ids) == 12 and t.finish_reason == FINISH_REASON_ABORTED for t in partials.values())
        goodbye = w.scheduler.heartbeats[-1]
        assert (goodbye.state, list(goodbye.lease_uids)) == (pb.REPLICA_STATE_DRAINING, [])


async def test_a_draining_replica_hands_back_to_a_scheduler_that_is_away_for_a_moment() -> None:
    async with replica() as w:
        w.engine.answer = lambda _: [10] * 50
        w.engine.hold(3)
        w.scheduler.offer(lease("d0"))
        await eventually(w.engine.reached.is_set)
        w.scheduler.return_failures += [UnavailableError("restarting"), DeadlineError("late")]
        w.worker.drain()
        await asyncio.wait_for(w.running, 5)
        assert len(w.scheduler.returned["d0"].partials) == GROUP


async def test_a_partial_answer_handed_back_by_one_replica_is_continued_by_another() -> None:
    """C11, C12."""
    async with replica() as w:
        w.engine.answer = lambda _: [10] * 50
        w.engine.hold(5)
        w.scheduler.offer(lease("d0", n=1))
        await eventually(w.engine.reached.is_set)
        w.worker.drain()
        await asyncio.wait_for(w.running, 5)
        partials = list(w.scheduler.returned["d0"].partials)
    async with replica(publish=False) as w:
        w.source.publish(1, 9)
        await eventually(lambda: w.worker.follower.held)
        w.engine.answer = lambda _: [10] * 50
        w.scheduler.offer(lease("d0", n=1, attempt=2, partials=partials))
        await eventually(lambda: w.scheduler.finished("d0", 1))
        t = w.scheduler.reported["d0", 0]
        assert [(s.version, s.num_tokens) for s in t.spans] == [(0, 5), (9, 11)]
        assert np.frombuffer(t.logprobs, "<f4").tolist() == [fake_logprob(0 if i < 5 else 9, i) for i in range(16)]


async def test_i8_work_begun_by_newer_weights_goes_back_before_a_trainer_that_fell_back_may_draw_a_token_of_it() -> None:
    async with replica() as w:
        w.source.publish(1, 9)
        await eventually(lambda: w.worker.follower.held == (1, 9))
        w.engine.answer = lambda _: [10] * 50
        w.engine.hold(5)
        w.scheduler.offer(lease("d0", n=1, version_begin=9))
        await eventually(lambda: w.engine.reached.is_set())
        w.source.publish(2, 4)
        await eventually(lambda: w.worker.follower.held == (2, 4))
        assert w.scheduler.return_reasons == ["the trainer fell back to v4"]
        (partial,) = w.scheduler.returned["d0"].partials
        assert [(s.version, s.num_tokens) for s in partial.spans] == [(9, 5)]
        assert w.driver.vitals.num_running == 0
        w.scheduler.offer(lease("d1", n=1, version_begin=9), lease("d2", n=1, version_begin=4))
        await eventually(lambda: "d1" in w.scheduler.returned)
        w.engine.release()
        await eventually(lambda: w.scheduler.finished("d2", 1))
        assert "d1" not in {uid for uid, _ in w.scheduler.reported}


async def test_a_drain_directive_ends_the_replica() -> None:
    async with replica() as w:
        w.scheduler.directives = [pb.Directive(kind=pb.Directive.KIND_DRAIN)]
        await asyncio.wait_for(w.running, 5)


async def test_a_paused_replica_leases_nothing_until_it_is_resumed() -> None:
    async with replica() as w:
        w.scheduler.directives = [pb.Directive(kind=pb.Directive.KIND_PAUSE)]
        await eventually(lambda: w.worker._is_paused)
        w.scheduler.directives = [pb.Directive(kind=pb.Directive.KIND_RESUME)]
        w.scheduler.offer(lease("d0"))
        await eventually(lambda: w.scheduler.finished("d0"))


async def test_a_dead_engine_hands_its_leases_back_and_is_built_anew_with_the_newest_weights() -> None:
    async with replica() as w:
        w.engine.hold(2)
        w.scheduler.offer(lease("d0"))
        await eventually(lambda: w.driver.vitals.num_running == GROUP)
        w.engine.dies.set()
        await eventually(lambda: "d0" in w.scheduler.returned)
        assert w.scheduler.return_reasons == ["engine failed"]
        w.scheduler.offer(lease("d0", attempt=2))
        await eventually(lambda: w.scheduler.finished("d0"))
        assert len(w.engines) == 2
        assert w.engine.loads == [(0, "in_flight")]
        assert pb.REPLICA_STATE_DEAD in [h.state for h in w.scheduler.heartbeats]


async def test_an_engine_that_keeps_dying_ends_the_process() -> None:
    async with replica() as w:
        for deaths in range(1, 5):
            engines = len(w.engines)
            w.engine.hold(1)
            w.scheduler.offer(lease(f"d{deaths}"))
            await eventually(lambda: w.driver.vitals.num_running == GROUP)
            w.engine.dies.set()
            if deaths < 4:
                await eventually(lambda n=engines: len(w.engines) == n + 1 and w.worker.follower.held)
        with pytest.raises(EngineLostError, match="died 4 times"):
            await asyncio.wait_for(w.running, 5)
