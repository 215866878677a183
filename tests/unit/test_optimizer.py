from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from services.trainer.optimizer import Optimizer, learning_rate_at
from stretto.errors import RefusedError
from stretto.recipe import Trainer


def settings(**changes: object) -> Trainer:
    return Trainer.model_validate({"learning_rate": 0.1, "grad_clip": 1e9, **changes})


def parameters(dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"norm.weight": (3,), "linear.weight": (2, 3), "linear.bias": (2,)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for name, shape in shapes.items()}


def set_gradients(named: dict[str, nn.Parameter], scale: float) -> None:
    for i, p in enumerate(named.values()):
        p.grad = torch.linspace(-1, 1 + i, p.numel(), dtype=p.dtype).view(p.shape) * scale


# ---- learning rate


def test_the_rate_warms_up_linearly_from_zero_and_reaches_its_peak_at_the_end_of_the_warm_up() -> None:
    t = settings(steps=20, warmup_steps=4)
    assert [learning_rate_at(step, t) for step in (1, 2, 3, 4, 5, 20)] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])


@pytest.mark.parametrize(("schedule", "middle"), [("linear", 0.055), ("cosine", 0.055)])
def test_a_decay_starts_at_the_peak_and_ends_at_the_minimum_with_the_last_step(schedule: str, middle: float) -> None:
    t = settings(steps=24, warmup_steps=4, schedule=schedule, min_learning_rate=0.01)
    assert learning_rate_at(4, t) == pytest.approx(0.1)
    assert learning_rate_at(14, t) == pytest.approx(middle)
    assert learning_rate_at(24, t) == pytest.approx(0.01)
    assert learning_rate_at(30, t) == pytest.approx(0.01)
    rates = [learning_rate_at(step, t) for step in range(4, 25)]
    assert rates == sorted(rates, reverse=True)


def test_a_cosine_is_flatter_than_a_line_at_both_ends() -> None:
    line, cosine = (settings(steps=20, schedule=kind) for kind in ("linear", "cosine"))
    assert learning_rate_at(2, cosine) > learning_rate_at(2, line)
    assert learning_rate_at(18, cosine) < learning_rate_at(18, line)


def test_a_run_that_is_all_warm_up_divides_by_nothing() -> None:
    assert learning_rate_at(5, settings(steps=5, warmup_steps=5, schedule="cosine")) == pytest.approx(0.1)


# ---- AdamW


def test_two_steps_equal_adamw_by_hand_and_only_matrices_decay() -> None:
    t = settings(adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-3, weight_decay=0.3)
    named = parameters()
    by_hand = {name: [*map(list, [p.detach().flatten().tolist(), [0.0] * p.numel(), [0.0] * p.numel()])] for name, p in named.items()}
    optimizer = Optimizer(named.items(), t)
    for step, rate in ((1, 0.1), (2, 0.05)):
        set_gradients(named, 0.5**step)
        grads = {name: p.grad.flatten().tolist() for name, p in named.items() if p.grad is not None}
        optimizer.step(rate)
        for name, (w, m, v) in by_hand.items():
            for i, g in enumerate(grads[name]):
                w[i] *= 1 - rate * (0.3 if name == "linear.weight" else 0.0)
                m[i] = 0.8 * m[i] + 0.2 * g
                v[i] = 0.9 * v[i] + 0.1 * g * g
                w[i] -= rate * (m[i] / (1 - 0.8**step)) / (math.sqrt(v[i] / (1 - 0.9**step)) + 1e-3)
    for name, p in named.items():
        assert p.detach().flatten().tolist() == pytest.approx(by_hand[name][0], rel=1e-12)


def test_the_norm_is_of_all_gradients_before_clipping_and_clipping_scales_them_to_the_limit() -> None:
    # eps far above the gradients makes AdamW's first step proportional to them
    clipped, whole = parameters(), parameters()
    for named, limit, scale in ((clipped, 0.5, 10.0), (whole, 1e9, 1.0)):
        set_gradients(named, scale)
        norm = math.sqrt(sum(float((p.grad**2).sum()) for p in named.values() if p.grad is not None))
        update = Optimizer(named.items(), settings(grad_clip=limit, adam_eps=1e6)).step(0.1)
        assert update.grad_norm == pytest.approx(norm)
        assert update.is_applied
    before, unit = parameters(), norm
    for name, p in before.items():
        moved, reference = clipped[name] - p, whole[name] - p
        assert torch.allclose(moved, reference * (0.5 / unit), rtol=1e-4, atol=1e-14)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_changes_neither_weights_nor_moments(poison: float) -> None:
    named = parameters()
    optimizer = Optimizer(named.items(), settings())
    set_gradients(named, 1.0)
    optimizer.step(0.1)
    before = {name: p.detach().clone() for name, p in named.items()}
    moments = {name: state["exp_avg"].clone() for name, state in optimizer.state().items()}
    set_gradients(named, 1.0)
    bad = named["linear.bias"].grad
    assert bad is not None
    bad[0] = poison
    update = optimizer.step(0.1)
    assert not update.is_applied
    assert not math.isfinite(update.grad_norm)
    assert all(torch.equal(p, before[name]) for name, p in named.items())
    assert all(torch.equal(state["exp_avg"], moments[name]) for name, state in optimizer.state().items())
    assert all(p.grad is None for p in named.values())


def test_a_restored_optimizer_goes_on_bit_for_bit_with_the_recipes_own_rates() -> None:
    named, other = parameters(torch.float32), parameters(torch.float32)
    first, second = Optimizer(named.items(), settings()), Optimizer(other.items(), settings(learning_rate=0.7))
    set_gradients(named, 1.0)
    first.step(0.1)
    with torch.no_grad():
        for name, p in other.items():
            p.copy_(named[name])
    second.load_state({name: {key: value.clone() for key, value in state.items()} for name, state in first.state().items()})
    for optimizer, mine in ((first, named), (second, other)):
        set_gradients(mine, 0.3)
        optimizer.step(0.01)
    assert all(torch.equal(named[name], other[name]) for name in named)


def test_the_optimizer_state_of_another_model_is_refused_by_name() -> None:
    named = parameters()
    optimizer = Optimizer(named.items(), settings())
    set_gradients(named, 1.0)
    optimizer.step(0.1)
    state = optimizer.state()
    with pytest.raises(RefusedError, match=r"lora\.weight"):
        optimizer.load_state(state | {"lora.weight": state["norm.weight"]})
    with pytest.raises(RefusedError, match=r"norm\.weight"):
        optimizer.load_state(state | {"norm.weight": state["linear.bias"]})
