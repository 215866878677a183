"""Draws one token per row and says how likely it was. Pure: randomness is an argument.

    B rows   V vocabulary   K kept candidates

    logits_BV -> / temperature -> top-k -> top-p -> renormalise -> inverse CDF at uniform_B -> token, log-prob

The log-prob is of the distribution the token was drawn from: after temperature, top-k and top-p, renormalised, float32.
A trainer that recomputes log-probs from logits / temperature gets the same numbers only while top_p = 1 and top_k = 0.
A greedy row (temperature 0) ignores top-k and top-p; its log-prob is the model's own at temperature 1, because "certain"
would say nothing.

Inverse CDF instead of the exponential race: one uniform number a row instead of one exponential a row and token (on a
CPU the race costs more than the rest of a small model's step), and so a row's stream can be a function of its seed.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

TEMPERATURE_MIN = 1e-5
"""Least temperature besides 0: float32 logits divided by less may overflow."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """In [0, 1), 52 bits: output number `positions` of the splitmix64 stream of each key (Steele et al. 2014).

    Counter-based: a continued answer goes on in its own stream, whichever engine and row it runs in.
    """
    z = keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _MIX[0]
    z = (z ^ (z >> np.uint64(27))) * _MIX[1]
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def draw(
    logits_BV: torch.Tensor,
    uniform_B: torch.Tensor,
    temperature: float | torch.Tensor,
    top_p_B: torch.Tensor | None = None,
    top_k_B: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens_B int64, logprobs_B float32).

    temperature: one for all rows, or [B]. top_p_B, top_k_B: None when no row truncates (1 and 0 switch a row off).
    A row whose logits are not finite gets some valid token and a log-prob that is not finite.
    """
    if not isinstance(temperature, torch.Tensor):
        if temperature == 0.0:
            return _argmax(logits_BV.float())
        scaled_BV = logits_BV.float() if temperature == 1.0 else logits_BV.float() / temperature
        return _invert(_truncated(scaled_BV, top_p_B, top_k_B), uniform_B)
    greedy_B = temperature.eq(0.0)
    scaled_BV = logits_BV.float() / temperature.masked_fill(greedy_B, 1.0)[:, None]
    best_B, best_logp_B = _argmax(scaled_BV)
    tokens_B, logp_B = _invert(_truncated(scaled_BV, top_p_B, top_k_B), uniform_B)
    return torch.where(greedy_B, best_B, tokens_B), torch.where(greedy_B, best_logp_B, logp_B)


def _argmax(logits_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    best_B, tokens_B = logits_BV.max(-1)
    return tokens_B, best_B - logits_BV.logsumexp(-1)


def _invert(logits_BV: torch.Tensor, uniform_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first token whose cumulated mass exceeds uniform x total: never one of mass 0, as uniform < 1.

    Cumulated in float64, so that a token of probability 1e-7 in a large vocabulary still has its share.
    """
    shifted_BV = logits_BV - logits_BV.amax(-1, keepdim=True)
    mass_BV = shifted_BV.exp().cumsum(-1, dtype=torch.float64)
    total_B1 = mass_BV[:, -1:]
    tokens_B1 = torch.searchsorted(mass_BV, uniform_B[:, None] * total_B1, right=True).clamp_(max=logits_BV.shape[-1] - 1)
    logp_B1 = shifted_BV.gather(-1, tokens_B1) - total_B1.log().float()
    return tokens_B1[:, 0], logp_B1[:, 0]


def _truncated(logits_BV: torch.Tensor, top_p_B: torch.Tensor | None, top_k_B: torch.Tensor | None) -> torch.Tensor:
    """Logits with -inf where a row's top-k or top-p drops the token; only rows that truncate are sorted."""
    if top_p_B is None or top_k_B is None:
        return logits_BV
    rows_R = ((top_p_B < 1.0) | (top_k_B > 0)).nonzero()[:, 0]
    if rows_R.numel() == 0:
        return logits_BV
    kept_RV = truncate(logits_BV[rows_R], top_p_B[rows_R], top_k_B[rows_R])
    return logits_BV.index_copy(0, rows_R, kept_RV)


def truncate(logits_BV: torch.Tensor, top_p_B: torch.Tensor, top_k_B: torch.Tensor) -> torch.Tensor:
    """Keeps the top_k largest (0 = all; ties: the lower id), then of those, renormalised, the smallest head of mass >= top_p."""
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(logits_BV.shape[-1], device=logits_BV.device)
    dropped_BV = (top_k_B[:, None] > 0) & (rank_V >= top_k_B[:, None])
    mass_BV = sorted_BV.masked_fill(dropped_BV, -torch.inf).softmax(-1, dtype=torch.float64)
    before_BV = mass_BV.cumsum(-1) - mass_BV
    dropped_BV |= (before_BV >= top_p_B[:, None]) & (top_p_B[:, None] < 1.0) & (rank_V > 0)
    return logits_BV.masked_fill(torch.zeros_like(dropped_BV).scatter(-1, order_BV, dropped_BV), -torch.inf)
