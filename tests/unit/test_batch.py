from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer import batch as b
from stretto.errors import CorruptError
from stretto.v1 import types_pb2 as pb


def group(prompt: list[int], answers: list[list[int]], rewards: list[float], uid: str = "d0") -> pb.Group:
    """A group whose log-probs are -token / 1000 and whose first token is of version 3, the others of version 4."""
    made = pb.Group(prompt=pb.Prompt(uid=uid, token_ids=np.array(prompt, "<i4").tobytes()), version_begin=3)
    made.prompt.sampling.temperature = 1.0
    for index, (tokens, reward) in enumerate(zip(answers, rewards, strict=True)):
        spans = [pb.VersionSpan(version=3, num_tokens=min(1, len(tokens))), pb.VersionSpan(version=4, num_tokens=max(0, len(tokens) - 1))]
        made.trajectories.add(
            prompt_uid=uid,
            index=index,
            token_ids=np.array(tokens, "<i4").tobytes(),
            logprobs=(np.array(tokens, "<f4") / -1000).tobytes(),
            spans=[span for span in spans if span.num_tokens],
            finish_reason=pb.FINISH_REASON_STOP,
            reward=reward,
        )
    return made


def arrays(prompt: list[int], answers: list[list[int]], rewards: list[float]) -> b.GroupArrays:
    return b.read_group(group(prompt, answers, rewards))


@st.composite
def batches(draw: st.DrawFn) -> tuple[b.Batch, list[tuple[list[int], list[int], float]]]:
    """A batch, and its trained answers as (prompt, tokens, advantage without deviation). All token ids differ."""
    ids = iter(range(1, 1_000_000))
    groups, kept = [], []
    for _ in range(draw(st.integers(1, 5))):
        prompt = [next(ids) for _ in range(draw(st.integers(1, 9)))]
        answers = [[next(ids) for _ in range(n)] for n in draw(st.lists(st.integers(0, 12), min_size=1, max_size=8))]
        rewards = [float(draw(st.integers(0, 1))) for _ in answers]
        groups.append(arrays(prompt, answers, rewards))
        if len(set(rewards)) > 1 and any(answers):
            mean = sum(rewards) / len(rewards)
            kept += [(prompt, tokens, reward - mean) for tokens, reward in zip(answers, rewards, strict=True) if tokens]
    return b.make_batch(groups, "grpo_no_std"), kept


# ---- reading


def test_reading_a_group_gives_its_tokens_logprobs_and_per_token_versions() -> None:
    read = arrays([7, 8], [[10, 11, 12], [20]], [1.0, 0.0])
    assert read.prompt_P.tolist() == [7, 8]
    assert read.tokens_T.tolist() == [10, 11, 12, 20]
    assert read.lengths_N.tolist() == [3, 1]
    assert read.versions_T.tolist() == [3, 4, 4, 3]
    assert read.behaviour_T.tolist() == pytest.approx([-0.010, -0.011, -0.012, -0.020])
    assert read.rewards_N.tolist() == [1, 0]
    assert np.isnan(read.accuracy_N).all()


def test_an_accuracy_among_the_extras_is_read() -> None:
    made = group([7], [[1], [2]], [1.0, 0.0])
    made.trajectories[1].reward_extras["acc"] = 0.5
    read = b.read_group(made)
    assert math.isnan(read.accuracy_N[0])
    assert read.accuracy_N[1] == 0.5


@pytest.mark.parametrize("fault", ["logprobs", "spans", "failed", "infinite", "no prompt", "no answers"])
def test_a_group_whose_parts_do_not_fit_is_refused_by_name(fault: str) -> None:
    made = group([7], [[1, 2], [3]], [1.0, 0.0], uid="d42")
    bad = made.trajectories[0]
    if fault == "logprobs":
        bad.logprobs = bad.logprobs[:4]
    elif fault == "spans":
        bad.spans[0].num_tokens += 1
    elif fault == "failed":
        bad.finish_reason = pb.FINISH_REASON_FAILED
    elif fault == "infinite":
        bad.logprobs = np.array([-1, -np.inf], "<f4").tobytes()
    elif fault == "no prompt":
        made.prompt.token_ids = b""
    else:
        del made.trajectories[:]
    with pytest.raises(CorruptError, match="d42"):
        b.read_group(made)


# ---- the batch


def test_groups_without_signal_are_left_out_and_a_batch_of_only_such_is_empty() -> None:
    flat, signal = arrays([1], [[2], [3]], [1.0, 1.0]), arrays([4], [[5, 6], [7]], [1.0, 0.0])
    both = b.make_batch([flat, signal, flat], "grpo")
    alone = b.make_batch([signal], "grpo")
    assert both.num_groups == 1
    assert both.num_tokens == 3
    for name in ("store_S", "start_R", "advantage_T", "behaviour_T"):
        assert getattr(both, name).tolist() == getattr(alone, name).tolist()
    empty = b.make_batch([flat], "grpo")
    assert (empty.num_groups, empty.num_tokens) == (0, 0)
    assert b.minibatches(empty, 2) == []


def test_an_answer_without_tokens_counts_in_the_mean_and_is_in_no_row() -> None:
    made = b.make_batch([arrays([1], [[], [2, 3]], [0.0, 1.0])], "grpo_no_std")
    assert made.advantage_T.tolist() == [0.5, 0.5]
    assert b.plan(made, np.arange(1), "shared_prompt", 64, 100.0) == [[(0,)]]


# ---- planning


@given(batches(), st.integers(1, 4), st.sampled_from(["padded", "shared_prompt"]), st.integers(1, 120), st.floats(1, 1000))
@settings(deadline=None)
def test_every_response_token_is_in_every_plan_exactly_once_and_predicted_from_its_own_past(
    made: tuple[b.Batch, list[tuple[list[int], list[int], float]]], count: int, layout: b.Layout, max_tokens: int, parity: float
) -> None:
    batch, kept = made
    seen: list[int] = []
    for answers in b.minibatches(batch, count):
        for rows in b.plan(batch, answers, layout, max_tokens, parity):
            micro = b.assemble(batch, rows)
            assert micro.ids_BL.size <= max_tokens or len(rows) == 1
            assert layout == "shared_prompt" or micro.segments_BL is None
            seen += micro.token_t.tolist()
            check_pasts(micro, kept)
    assert sorted(seen) == list(range(batch.num_tokens))


def check_pasts(micro: b.MicroBatch, kept: list[tuple[list[int], list[int], float]]) -> None:
    """What each log-prob may see, walked token by token, is its prompt and the answer before it, in their own positions."""
    flat = [(prompt, tokens, i) for prompt, tokens, _ in kept for i in range(len(tokens))]
    width = micro.ids_BL.shape[1]
    for source, target, token in zip(micro.source_t.tolist(), micro.target_t.tolist(), micro.token_t.tolist(), strict=True):
        prompt, tokens, i = flat[token]
        assert target == tokens[i]
        row, column = divmod(source, width)
        visible = range(column + 1)
        if micro.segments_BL is not None:
            own = micro.segments_BL[row, column]
            visible = [k for k in visible if micro.segments_BL[row, k] in (0, own)]
        assert [micro.ids_BL[row, k] for k in visible] == prompt + tokens[:i]
        assert [micro.positions_BL[row, k] for k in visible] == list(range(len(prompt) + i))


@given(batches())
def test_flat_axes_carry_each_tokens_logprob_and_its_answers_advantage(
    made: tuple[b.Batch, list[tuple[list[int], list[int], float]]],
) -> None:
    batch, kept = made
    assert batch.behaviour_T.tolist() == pytest.approx([-t / 1000 for _, tokens, _ in kept for t in tokens], rel=1e-6)
    assert batch.advantage_T.tolist() == pytest.approx([advantage for _, tokens, advantage in kept for _ in tokens])


def test_the_quick_starts_groups_of_eight_share_one_row_and_long_answers_share_few() -> None:
    assert b.shares_of_group(8, prompt_length=17, answer_length=10, parity_tokens=417) == 1
    assert b.shares_of_group(8, prompt_length=17, answer_length=400, parity_tokens=417) == 8
    assert b.shares_of_group(8, prompt_length=400, answer_length=400, parity_tokens=11_000) in (2, 3)


def test_minibatches_are_whole_groups_in_order_as_equal_as_possible() -> None:
    made = b.make_batch([arrays([1], [[2], [3]], [1.0, 0.0]) for _ in range(5)], "grpo")
    parts = b.minibatches(made, 2)
    assert [sorted(set(made.group_R[part].tolist())) for part in parts] in ([[0, 1], [2, 3, 4]], [[0, 1, 2], [3, 4]])
    assert np.concatenate(parts).tolist() == list(range(10))


def test_rows_of_a_micro_batch_are_of_similar_width() -> None:
    lengths = [3, 40, 5, 38, 4, 41]
    made = b.make_batch([arrays([1], [[2] * n, [3] * n], [1.0, 0.0]) for n in lengths], "grpo")
    micros = [b.assemble(made, rows) for rows in b.plan(made, np.arange(12), "padded", 246, 100.0)]
    assert [m.ids_BL.shape for m in micros] == [(6, 41), (6, 5)]
