"""services/rollout/sampling.py against slow, obvious oracles."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from services.rollout.sampling import draw, truncate, uniforms

GRID = 20_000
"""Uniform numbers spread evenly: inverse CDF then gives each token its probability to within one grid cell."""


def slow_distribution(logits: list[float], temperature: float, top_p: float, top_k: int) -> list[float]:
    """Probabilities after temperature, then top-k, then top-p, by hand in float64."""
    scaled = [x / temperature for x in logits]
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    kept = order[:top_k] if top_k else order
    mass = {i: math.exp(scaled[i] - max(scaled)) for i in kept}
    total = sum(mass.values())
    nucleus: list[int] = []
    for i in kept:
        if nucleus and sum(mass[j] for j in nucleus) / total >= top_p:
            break
        nucleus.append(i)
    total = sum(mass[i] for i in nucleus)
    return [mass[i] / total if i in nucleus else 0.0 for i in range(len(scaled))]


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.6, 1.0, 0), (1.0, 0.8, 0), (1.0, 1.0, 5), (1.7, 0.7, 9), (0.5, 0.01, 3)]
)
def test_every_token_is_drawn_as_often_as_the_distribution_says(temperature: float, top_p: float, top_k: int) -> None:
    logits_V = torch.randn(40, generator=torch.Generator().manual_seed(3)) * 2
    grid = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    rows = logits_V.expand(GRID, -1)
    tokens, logprobs = draw(rows, grid, temperature, torch.full((GRID,), top_p), torch.full((GRID,), top_k))
    expected = slow_distribution(logits_V.tolist(), temperature, top_p, top_k)
    shares = np.bincount(tokens.numpy(), minlength=40) / GRID
    np.testing.assert_allclose(shares, expected, atol=2 / GRID)
    np.testing.assert_allclose(logprobs.numpy(), np.log(np.array(expected)[tokens.numpy()]), atol=2e-6)


def test_rows_with_different_settings_are_each_drawn_from_their_own_distribution() -> None:
    logits_BV = torch.randn(4, 30, generator=torch.Generator().manual_seed(1)) * 3
    temperature = torch.tensor([0.0, 1.0, 0.5, 2.0])
    top_p, top_k = torch.tensor([1.0, 1.0, 0.7, 1.0]), torch.tensor([0, 0, 0, 4])
    tokens, logprobs = draw(logits_BV, torch.tensor([0.99, 0.5, 0.5, 0.5], dtype=torch.float64), temperature, top_p, top_k)
    assert tokens[0] == logits_BV[0].argmax()
    for row in range(4):
        settings = (1.0, 1.0, 0) if row == 0 else (temperature[row].item(), top_p[row].item(), int(top_k[row]))
        expected = slow_distribution(logits_BV[row].tolist(), *settings)
        assert logprobs[row].item() == pytest.approx(math.log(expected[int(tokens[row])]), abs=2e-6)


def test_greedy_takes_the_most_likely_token_and_reports_the_models_own_logprob() -> None:
    logits_BV = torch.tensor([[0.0, 3.0, 1.0], [5.0, 5.0, 1.0]])
    tokens, logprobs = draw(logits_BV, torch.tensor([0.9, 0.9], dtype=torch.float64), 0.0)
    assert tokens.tolist() == [1, 0]
    torch.testing.assert_close(logprobs, logits_BV.log_softmax(-1)[[0, 1], [1, 0]])


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-52])
def test_a_token_of_probability_zero_is_never_drawn(uniform: float) -> None:
    logits_BV = torch.tensor([[-torch.inf, 1.0, -torch.inf, 0.5, -torch.inf]])
    tokens, logprobs = draw(logits_BV, torch.tensor([uniform], dtype=torch.float64), 1.0)
    assert tokens.item() in (1, 3)
    assert torch.isfinite(logprobs).all()


def test_logits_that_are_not_finite_give_a_valid_token_and_a_logprob_that_tells() -> None:
    logits_BV = torch.tensor([[torch.nan, 0.0, 0.0], [torch.inf, 0.0, 0.0], [0.0, 0.0, 0.0]])
    tokens, logprobs = draw(logits_BV, torch.full((3,), 0.4, dtype=torch.float64), 1.0)
    assert all(0 <= t < 3 for t in tokens.tolist())
    assert torch.isfinite(logprobs).tolist() == [False, False, True]


def test_top_k_keeps_exactly_k_of_equal_logits_and_the_most_likely_token_always_stays() -> None:
    kept = torch.isfinite(truncate(torch.zeros(2, 6), torch.tensor([1.0, 1e-9]), torch.tensor([2, 0])))
    assert kept.sum(-1).tolist() == [2, 1]


def test_random_streams_are_uniform_and_unrelated_between_neighbouring_keys_and_positions() -> None:
    keys = np.arange(400, dtype=np.uint64)
    table = np.stack([uniforms(keys, np.full(400, i)) for i in range(500)])
    assert table.min() >= 0
    assert table.max() < 1
    counts = np.histogram(table, bins=100, range=(0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 180, "chi-square of 99 degrees of freedom, p about 1e-6"
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.01


def test_a_stream_depends_on_key_and_position_alone() -> None:
    keys = np.array([7, 8, 9], dtype=np.uint64)
    whole = uniforms(keys, np.array([3, 3, 3]))
    assert uniforms(keys[1:2], np.array([3]))[0] == whole[1]
