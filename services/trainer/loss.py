"""What a train step minimises, token by token. Pure functions of tensors.

    T   response tokens, of any number of answers one after the other

    behaviour_T   log-prob under the policy that drew the token (old, perhaps several versions within one answer)
    proximal_T    log-prob under the policy at the start of this train step
    current_T     log-prob under the policy being changed; the only input with a gradient
    reference_T   log-prob under the base weights, for the KL term

                              behaviour ----- importance weight -----> proximal ----- clipped ratio -----> current
                              how old the data is; truncated,          how far this step moved;
                              no gradient                              the trust region

Decoupled PPO (Hilton et al. 2022; AReaL, Fu et al. 2025): the trust region is around the proximal policy, so that data of age
2 is not clipped merely for being old. With one optimizer step per train step, proximal is the detached current value, the ratio is
1 and the gradient is that of the truncated-importance-weighted policy gradient (Yao et al. 2025, "TIS").

The clip is asymmetric (DAPO's clip-higher, Yu et al. 2025). A batch's loss is the sum over its tokens divided by their number
(DAPO's token mean): the caller divides by the number for the whole mini-batch, known before the first forward pass, so that
cutting it into micro-batches changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

LOG_RATIO_MAX = 20.0
"""Log ratios are cut to +-20 before exp: infinity times a masked zero would make the whole gradient NaN."""


@dataclass(frozen=True, slots=True)
class Objective:
    """The knobs of the loss; see the recipe's trainer section."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    correction: Literal["none", "truncated"] = "truncated"
    correction_cap: float = 2.0
    kl_coef: float = 0.0


def _ratio(numerator_T: torch.Tensor, denominator_T: torch.Tensor) -> torch.Tensor:
    return (numerator_T - denominator_T).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()


def importance_weight(proximal_T: torch.Tensor, behaviour_T: torch.Tensor, objective: Objective) -> torch.Tensor:
    """min(exp(proximal - behaviour), cap) for each token, without gradient; 1 when there is no correction."""
    if objective.correction == "none":
        return torch.ones_like(proximal_T)
    return _ratio(proximal_T.detach(), behaviour_T).clamp(max=objective.correction_cap)


def k3(log_ratio_T: torch.Tensor) -> torch.Tensor:
    """exp(x) - 1 - x: Schulman's low-variance estimate of KL(p || q) from tokens drawn from p, with x = log q - log p. Never negative."""
    log_ratio_T = log_ratio_T.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    return log_ratio_T.expm1() - log_ratio_T


def token_losses(
    current_T: torch.Tensor,
    proximal_T: torch.Tensor,
    behaviour_T: torch.Tensor,
    advantage_T: torch.Tensor,
    objective: Objective,
    reference_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """Loss of each token: -min(ratio A, clip(ratio) A) x weight + kl_coef x k3(reference - current). Gradient through current_T only."""
    ratio_T = _ratio(current_T, proximal_T.detach())
    clipped_T = ratio_T.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    surrogate_T = torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T)
    loss_T = -surrogate_T * importance_weight(proximal_T, behaviour_T, objective)
    if reference_T is not None and objective.kl_coef > 0:
        loss_T = loss_T + objective.kl_coef * k3(reference_T - current_T)
    return loss_T


@torch.no_grad()
def token_metrics(
    current_T: torch.Tensor,
    proximal_T: torch.Tensor,
    behaviour_T: torch.Tensor,
    advantage_T: torch.Tensor,
    objective: Objective,
    reference_T: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Scalars about a batch of T > 0 tokens.

    ratio_*                 exp(current - proximal): movement within the step; 1 with one optimizer step
    clip_low_fraction       tokens whose gradient the lower clip took away (ratio too small, advantage negative)
    clip_high_fraction      the same above (ratio too large, advantage positive)
    importance_*            exp(proximal - behaviour), truncated: the age of the data; cap_fraction = truncated tokens
    kl_behaviour_k1, _k3    KL(behaviour || current): plain and low-variance estimate
    kl_reference            the k3 term of the loss, before kl_coef; only with a reference
    """
    ratio_T = _ratio(current_T, proximal_T)
    raw_T = _ratio(proximal_T, behaviour_T)
    weight_T = importance_weight(proximal_T, behaviour_T, objective)
    is_capped_T = (raw_T > objective.correction_cap) & (objective.correction == "truncated")
    low_T = (ratio_T < 1 - objective.clip_low) & (advantage_T < 0)
    high_T = (ratio_T > 1 + objective.clip_high) & (advantage_T > 0)
    found = {
        "ratio_mean": ratio_T.mean(),
        "ratio_min": ratio_T.min(),
        "ratio_max": ratio_T.max(),
        "clip_low_fraction": low_T.to(ratio_T.dtype).mean(),
        "clip_high_fraction": high_T.to(ratio_T.dtype).mean(),
        "importance_mean": weight_T.mean(),
        "importance_max": weight_T.max(),
        "importance_cap_fraction": is_capped_T.to(ratio_T.dtype).mean(),
        "kl_behaviour_k1": (behaviour_T - current_T).mean(),
        "kl_behaviour_k3": k3(current_T - behaviour_T).mean(),
    }
    if reference_T is not None:
        found["kl_reference"] = k3(reference_T - current_T).mean()
    return found
