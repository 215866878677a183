from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.advantage import Kind, advantages, has_signal

rewards = st.lists(st.floats(-10, 10), min_size=2, max_size=16).map(np.array)


def by_hand(rewards: list[float], *, with_std: bool) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    return [(r - mean) / (std + 1e-4) if with_std else r - mean for r in rewards]


def test_grpo_divides_by_the_sample_deviation() -> None:
    # two of four solved: mean 1/2, sample deviation sqrt(1/3)
    got = advantages(np.array([1.0, 0.0, 1.0, 0.0]), "grpo")
    assert got == pytest.approx([0.5 / (math.sqrt(1 / 3) + 1e-4) * sign for sign in (1, -1, 1, -1)], rel=1e-14)


@given(rewards)
def test_advantages_equal_the_formula_by_hand(r: np.ndarray) -> None:
    if has_signal(r):
        assert advantages(r, "grpo") == pytest.approx(by_hand(r.tolist(), with_std=True), rel=1e-9, abs=1e-9)
        assert advantages(r, "grpo_no_std") == pytest.approx(by_hand(r.tolist(), with_std=False), rel=1e-9, abs=1e-12)


@given(rewards, st.sampled_from(["grpo", "grpo_no_std"]), st.floats(-5, 5))
def test_a_constant_added_to_all_rewards_changes_nothing(r: np.ndarray, kind: Kind, shift: float) -> None:
    if has_signal(r) and has_signal(r + shift):
        assert advantages(r + shift, kind) == pytest.approx(advantages(r, kind), abs=1e-8)


@pytest.mark.parametrize("equal", [[1.0] * 8, [0.1] * 3, [0.0], []])
def test_equal_rewards_have_no_signal_and_exactly_zero_advantage(equal: list[float]) -> None:
    # 0.1 three times: the mean is not exactly 0.1, and the rest must not be blown up by 1 / (0 + 1e-4)
    assert not has_signal(np.array(equal))
    assert advantages(np.array(equal), "grpo").tolist() == [0.0] * len(equal)


def test_a_reward_that_is_not_a_number_takes_the_signal_from_its_group() -> None:
    assert not has_signal(np.array([1.0, math.nan, 0.0]))
    assert not has_signal(np.array([1.0, math.inf, 0.0]))
