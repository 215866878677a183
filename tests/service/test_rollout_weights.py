"""Weight updates of a running replica: when they happen, what becomes of running answers, and what a failure leaves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from services.rollout.weights import as_torch
from stretto.errors import CorruptError, InvalidArgumentError
from stretto.v1 import scheduler_pb2 as pb
from stretto.weights.layout import ArrayView
from tests.fakes import fake_logprob
from tests.rollout_world import GROUP, World, lease, replica
from tests.waits import eventually


async def _running_at(w: World, tokens: int, *leases: pb.Lease) -> None:
    """Sequences of `leases` that stand at `tokens` tokens and would go on to their budget of 16."""
    w.engine.answer = lambda _: [10] * 50
    w.engine.hold(tokens)
    w.scheduler.offer(*leases)
    await eventually(lambda: w.engine.reached.is_set() and w.worker.book.num_generating == sum(len(x.missing) for x in leases))


def _spans(w: World, uid: str, index: int = 0) -> list[tuple[int, int]]:
    return [(s.version, s.num_tokens) for s in w.scheduler.reported[uid, index].spans]


async def test_in_flight_answers_go_on_and_keep_the_version_and_logprob_of_every_token() -> None:
    """C11, C22: the choice is visible in each trajectory."""
    async with replica(policy="in_flight") as w:
        await _running_at(w, 5, lease("d0"))
        w.source.publish(1, 1)
        await eventually(lambda: w.worker.follower.held == (1, 1))
        w.engine.release()
        await eventually(lambda: w.scheduler.finished("d0"))
        assert w.engine.loads == [(0, "in_flight"), (1, "in_flight")]
        assert _spans(w, "d0") == [(0, 5), (1, 11)]
        logprobs = np.frombuffer(w.scheduler.reported["d0", 0].logprobs, "<f4").tolist()
        assert logprobs == [fake_logprob(0 if i < 5 else 1, i) for i in range(16)]


async def test_c11_aborted_answers_go_on_after_their_old_tokens_with_partial_rollout_on() -> None:
    async with replica(policy="abort", keep_partials=True) as w:
        await _running_at(w, 5, lease("d0"))
        w.source.publish(1, 1)
        await eventually(lambda: w.worker.follower.held == (1, 1))
        w.engine.release()
        await eventually(lambda: w.scheduler.finished("d0"))
        assert w.engine.loads[-1] == (1, "abort")
        assert _spans(w, "d0") == [(0, 5), (1, 11)]


async def test_c11_aborted_answers_begin_anew_with_partial_rollout_off() -> None:
    """C11: no token of the old version is left."""
    async with replica(policy="abort", keep_partials=False) as w:
        await _running_at(w, 5, lease("d0"))
        w.source.publish(1, 1)
        await eventually(lambda: w.worker.follower.held == (1, 1))
        w.engine.release()
        await eventually(lambda: w.scheduler.finished("d0"))
        assert [_spans(w, "d0", i) for i in range(GROUP)] == [[(1, 16)]] * GROUP


async def test_a_draining_update_lets_running_answers_end_and_begins_nothing_meanwhile() -> None:
    async with replica(policy="drain", slots=4, prefetch_groups=2) as w:
        await _running_at(w, 5, lease("d0"), lease("d1"))
        w.source.publish(1, 1)
        await eventually(lambda: w.worker.follower.is_updating)
        assert w.worker.follower.held == (1, 0)
        w.engine.release()
        await eventually(lambda: w.scheduler.finished("d0") and w.scheduler.finished("d1"))
        assert _spans(w, "d0") == [(0, 16)]
        assert _spans(w, "d1") == [(1, 16)]


async def test_weights_wait_for_pinned_work_and_nothing_new_is_leased_meanwhile() -> None:
    async with replica() as w:
        await _running_at(w, 5, lease("v1-0", n=1, pin_version=True))
        w.source.publish(1, 1)
        await eventually(lambda: w.worker.follower.has_newer)
        num_polls = len(w.scheduler.polls)
        w.scheduler.offer(lease("d0"))
        beats = len(w.scheduler.heartbeats)
        await eventually(lambda: len(w.scheduler.heartbeats) > beats + 3)
        assert w.worker.follower.held == (1, 0)
        assert len(w.scheduler.polls) == num_polls
        assert w.worker.wait_reason == "new weights wait for pinned work to end"
        w.engine.release()
        await eventually(lambda: w.scheduler.finished("d0"))
        assert _spans(w, "v1-0") == [(0, 16)]
        assert _spans(w, "d0") == [(1, 16)]


async def test_pinned_work_leased_while_weights_are_fetched_still_ends_on_its_version() -> None:
    async with replica() as w:
        w.source.fetching.clear()
        w.source.may_fetch.clear()
        w.source.publish(1, 1)
        await eventually(w.source.fetching.is_set)
        await _running_at(w, 5, lease("v1-0", n=1, pin_version=True))
        w.source.may_fetch.set()
        beats = len(w.scheduler.heartbeats)
        await eventually(lambda: len(w.scheduler.heartbeats) > beats + 3)
        assert w.engine.loads == [(0, "in_flight")]
        w.engine.release()
        await eventually(lambda: w.worker.follower.held == (1, 1))
        await eventually(lambda: w.scheduler.finished("v1-0", 1))
        assert _spans(w, "v1-0") == [(0, 16)]


async def test_pinned_work_that_has_not_begun_does_not_block_a_draining_update() -> None:
    async with replica(policy="drain") as w:
        w.source.fetching.clear()
        w.source.may_fetch.clear()
        w.source.publish(1, 1)
        await eventually(w.source.fetching.is_set)
        w.scheduler.offer(lease("v1-0", n=1, pin_version=True))
        await eventually(lambda: w.worker.book.is_pinned)
        w.source.may_fetch.set()
        await eventually(lambda: w.scheduler.finished("v1-0", 1))
        assert {version for version, _ in _spans(w, "v1-0")} == {1}


async def test_a_resumed_trainer_is_followed_to_a_lower_version_of_a_newer_epoch() -> None:
    """C6."""
    async with replica() as w:
        w.source.publish(1, 40)
        await eventually(lambda: w.worker.follower.held == (1, 40))
        w.source.publish(2, 37)
        await eventually(lambda: w.worker.follower.held == (2, 37))


async def test_the_held_version_advances_one_by_one_with_the_published_ones() -> None:
    """C23."""
    async with replica() as w:
        for version in range(1, 6):
            w.source.publish(1, version)
            await eventually(lambda v=version: w.worker.follower.held == (1, v))
        assert [version for version, _ in w.engine.loads] == [0, 1, 2, 3, 4, 5]
        assert w.worker.follower.num_updates == 6


async def test_a_failed_fetch_leaves_the_old_version_at_work_and_is_tried_again() -> None:
    """C21."""
    async with replica() as w:
        w.source.failures.append(CorruptError("bucket 3 of 10"))
        w.source.publish(1, 1)
        await eventually(lambda: not w.source.failures)
        w.scheduler.offer(lease("d0"))
        await eventually(lambda: w.scheduler.finished("d0"))
        await eventually(lambda: w.worker.follower.held == (1, 1))


async def test_weights_that_do_not_fit_are_reported_and_the_old_ones_stay() -> None:
    async with replica() as w:
        load = w.engine.load_weights

        def refuse(*_: object) -> None:
            raise InvalidArgumentError("lm_head is missing")

        w.engine.load_weights = refuse  # type: ignore[method-assign]
        w.source.publish(1, 1)
        await eventually(lambda: ((1, 1), "lm_head is missing") in w.source.released)
        w.scheduler.offer(lease("d0"))
        await eventually(lambda: w.scheduler.finished("d0"))
        assert w.worker.follower.held == (1, 0)
        w.engine.load_weights = load  # type: ignore[method-assign]
        await eventually(lambda: w.worker.follower.held == (1, 1))


async def test_no_token_is_drawn_with_bytes_that_were_overwritten_while_they_were_loaded() -> None:
    """C21: nobody reports a version it holds only in part."""
    async with replica() as w:
        await _running_at(w, 5, lease("d0"))
        w.source.torn.append(True)
        w.source.publish(1, 1)
        await eventually(lambda: w.worker.follower.held is None)
        w.engine.release()
        drawn = w.engine.generated_tokens
        await eventually(lambda: any(h.state == pb.REPLICA_STATE_WAITING_FOR_WEIGHTS for h in w.scheduler.heartbeats[-1:]))
        assert w.engine.generated_tokens == drawn
        await eventually(lambda: w.scheduler.finished("d0"))
        assert w.worker.follower.held == (1, 1)
        assert w.engine.loads == [(0, "in_flight"), (1, "in_flight"), (1, "in_flight")]


async def test_a_heartbeat_tells_how_many_updates_and_how_long_the_engine_stood_still() -> None:
    async with replica() as w:
        w.source.publish(1, 1)
        await eventually(lambda: any(h.num_weight_updates == 2 for h in w.scheduler.heartbeats))
        assert 0 < w.scheduler.heartbeats[-1].update_stall_ms < 1000
        assert (w.scheduler.heartbeats[-1].held.trainer_epoch, w.scheduler.heartbeats[-1].held.version) == (1, 1)


async def test_an_update_neither_beats_at_once_nor_ends_an_open_poll_before_it_is_loaded() -> None:
    async with replica() as w:
        w.worker.settings = replace(w.worker.settings, poll_s=30.0)
        w.scheduler.interval_s = 30.0
        w.scheduler.offer(lease("d0"))
        await eventually(lambda: w.scheduler.finished("d0"))
        polls, beats = len(w.scheduler.polls), len(w.scheduler.heartbeats)
        w.source.may_fetch.clear()
        w.source.publish(1, 1)
        await eventually(lambda: w.worker.follower.is_updating)
        assert len(w.scheduler.polls) <= polls + 1  # the one that follows the answer before
        w.source.may_fetch.set()
        await eventually(lambda: w.scheduler.polls[-1].held.version == 1)
        assert [poll.held.version for poll in w.scheduler.polls[polls:]].count(0) <= 1
        assert len(w.scheduler.heartbeats) <= beats + 1  # one that was due when the interval was changed


def test_array_views_become_tensors_over_the_same_bytes() -> None:
    arena = np.arange(64, dtype=np.uint8)
    arena.flags.writeable = False
    views = {
        "f": ArrayView("F32", (2, 2), arena[:16]),
        "b": ArrayView("BF16", (4,), arena[16:24]),
        "scalar": ArrayView("F32", (), arena[32:36]),
        "none": ArrayView("F32", (0, 3), arena[:0]),
    }
    tensors = as_torch(views)
    assert {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()} == {
        "f": (torch.float32, (2, 2)),
        "b": (torch.bfloat16, (4,)),
        "scalar": (torch.float32, ()),
        "none": (torch.float32, (0, 3)),
    }
    assert tensors["f"].numpy().tobytes() == bytes(range(16))
    assert tensors["f"].data_ptr() == arena.ctypes.data
