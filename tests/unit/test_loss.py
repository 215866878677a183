"""Every formula against plain Python loops in float64, gradients against central differences of those loops."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.loss import Objective, importance_weight, k3, token_losses, token_metrics

logprob = st.floats(-8, -0.01)
Row = tuple[float, float, float, float, float]
"""current, proximal, behaviour, reference, advantage"""
tokens = st.lists(st.tuples(logprob, logprob, logprob, logprob, st.floats(-3, 3)), min_size=1, max_size=12)
objectives = st.builds(
    Objective,
    clip_low=st.floats(0, 0.9),
    clip_high=st.floats(0, 2),
    correction=st.sampled_from(["none", "truncated"]),
    correction_cap=st.floats(1, 5),
    kl_coef=st.sampled_from([0.0, 0.3]),
)


def slow_loss(current: float, proximal: float, behaviour: float, reference: float, advantage: float, o: Objective) -> float:
    ratio = math.exp(current - proximal)
    clipped = min(max(ratio, 1 - o.clip_low), 1 + o.clip_high)
    weight = min(math.exp(proximal - behaviour), o.correction_cap) if o.correction == "truncated" else 1.0
    kl = math.exp(reference - current) - 1 - (reference - current)
    return -min(ratio * advantage, clipped * advantage) * weight + o.kl_coef * kl


def columns(rows: list[Row]) -> list[torch.Tensor]:
    return list(torch.tensor(rows, dtype=torch.float64).unbind(1))


@given(tokens, objectives)
@settings(deadline=None)
def test_losses_equal_the_formula_by_hand(rows: list[Row], o: Objective) -> None:
    current, proximal, behaviour, reference, advantage = columns(rows)
    got = token_losses(current, proximal, behaviour, advantage, o, reference)
    assert got.tolist() == pytest.approx([slow_loss(*row, o) for row in rows], rel=1e-10, abs=1e-10)


@given(tokens, objectives)
@settings(deadline=None)
def test_gradients_equal_central_differences_away_from_the_kinks(rows: list[Row], o: Objective) -> None:
    h = 1e-6
    current, proximal, behaviour, reference, advantage = columns(rows)
    current.requires_grad_()
    token_losses(current, proximal, behaviour, advantage, o, reference).sum().backward()
    assert current.grad is not None
    for got, (c, p, b, r, a) in zip(current.grad.tolist(), rows, strict=True):
        ratio = math.exp(c - p)
        if min(abs(ratio - (1 - o.clip_low)), abs(ratio - (1 + o.clip_high))) < 1e-4 * ratio:
            continue
        slope = (slow_loss(c + h, p, b, r, a, o) - slow_loss(c - h, p, b, r, a, o)) / (2 * h)
        assert got == pytest.approx(slope, rel=1e-4, abs=1e-4 * (1 + math.exp(r - c) + ratio))


def test_no_gradient_reaches_proximal_behaviour_or_reference() -> None:
    leaves = [torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True) for _ in range(4)]
    current, proximal, behaviour, reference = leaves
    loss = token_losses(current, proximal, behaviour.detach(), torch.tensor([1.0, -1.0]), Objective(kl_coef=0.1), reference.detach())
    loss.sum().backward()
    assert current.grad is not None
    assert proximal.grad is None


def test_one_step_a_batch_is_the_truncated_importance_weighted_policy_gradient() -> None:
    current = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    behaviour = torch.tensor([-1.0, -1.5, -4.0], dtype=torch.float64)
    advantage = torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64)
    token_losses(current, current, behaviour, advantage, Objective(correction_cap=2.0)).sum().backward()
    assert current.grad is not None
    assert current.grad.tolist() == pytest.approx([-1.0, -2.0 * math.exp(0.5), 2.0])


def test_the_clip_takes_the_gradient_only_where_the_step_went_too_far_in_the_good_direction() -> None:
    o = Objective(clip_low=0.2, clip_high=0.28, correction="none")
    ratios, signs = (0.5, 0.79, 0.81, 1.0, 1.27, 1.29, 3.0), (1.0, -1.0)
    for ratio, advantage in itertools.product(ratios, signs):
        current = torch.tensor([math.log(ratio) - 1], dtype=torch.float64, requires_grad=True)
        start = torch.tensor([-1.0], dtype=torch.float64)
        token_losses(current, start, start, torch.tensor([advantage], dtype=torch.float64), o).sum().backward()
        is_clipped = (advantage > 0 and ratio > 1.28) or (advantage < 0 and ratio < 0.8)
        assert current.grad is not None
        assert current.grad.item() == pytest.approx(0.0 if is_clipped else -ratio * advantage)


def test_absurd_log_ratios_give_finite_losses_and_gradients() -> None:
    current = torch.tensor([-1.0, -900.0, -1.0, -900.0], requires_grad=True)
    proximal = torch.tensor([-900.0, -1.0, -900.0, -1.0])
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0])
    loss = token_losses(current, proximal, proximal.flip(0), advantage, Objective(kl_coef=1.0), proximal)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert current.grad is not None
    assert current.grad.isfinite().all()


def test_without_correction_every_weight_is_one_and_with_it_none_exceeds_the_cap() -> None:
    proximal, behaviour = torch.tensor([-1.0, -1.0, -5.0]), torch.tensor([-1.0, -4.0, -1.0])
    assert importance_weight(proximal, behaviour, Objective(correction="none")).tolist() == [1, 1, 1]
    assert importance_weight(proximal, behaviour, Objective(correction_cap=2.0)).tolist() == pytest.approx([1, 2, math.exp(-4)])


def test_k3_is_zero_at_equality_positive_elsewhere_and_unbiased_for_the_kl() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    log_ratio = (q / p).log()
    assert k3(torch.zeros(1)).item() == 0
    assert (k3(log_ratio) > 0).all()
    assert (p * k3(log_ratio)).sum().item() == pytest.approx((p * (p / q).log()).sum().item(), rel=1e-12)


@given(tokens, objectives)
@settings(deadline=None)
def test_metrics_equal_plain_loops(rows: list[Row], o: Objective) -> None:
    current, proximal, behaviour, reference, advantage = columns(rows)
    got = {name: value.item() for name, value in token_metrics(current, proximal, behaviour, advantage, o, reference).items()}
    n = len(rows)
    ratios = [math.exp(c - p) for c, p, *_ in rows]
    raw = [math.exp(p - b) for _, p, b, *_ in rows]
    weights = [min(x, o.correction_cap) if o.correction == "truncated" else 1.0 for x in raw]
    want = {
        "ratio_mean": sum(ratios) / n,
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "clip_low_fraction": sum(x < 1 - o.clip_low and row[4] < 0 for x, row in zip(ratios, rows, strict=True)) / n,
        "clip_high_fraction": sum(x > 1 + o.clip_high and row[4] > 0 for x, row in zip(ratios, rows, strict=True)) / n,
        "importance_mean": sum(weights) / n,
        "importance_max": max(weights),
        "importance_cap_fraction": sum(o.correction == "truncated" and x > o.correction_cap for x in raw) / n,
        "kl_behaviour_k1": sum(b - c for c, _, b, *_ in rows) / n,
        "kl_behaviour_k3": sum(math.exp(c - b) - 1 - (c - b) for c, _, b, *_ in rows) / n,
        "kl_reference": sum(math.exp(r - c) - 1 - (r - c) for c, _, _, r, _ in rows) / n,
    }
    assert got == pytest.approx(want, rel=1e-9, abs=1e-9)
