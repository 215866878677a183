"""How much better an answer is than its siblings: rewards of one group -> advantages.

    N answers of one prompt

    grpo          (r - mean) / (std + 1e-4)     Shao et al. 2024 (DeepSeekMath), eq. 3
    grpo_no_std   r - mean                      Liu et al. 2025 (Dr. GRPO): no bias towards prompts that are nearly always or never solved

The standard deviation is the sample one (divides by N - 1), as in TRL (`rewards.view(-1, n).std(dim=1)`) and verl
(`compute_grpo_outcome_advantage`, torch.std); the papers leave it open. 1e-4 is TRL's.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

STD_FLOOR = 1e-4
"""Added to the standard deviation, in units of reward: nearly equal rewards must not become large advantages."""

Kind = Literal["grpo", "grpo_no_std"]


def has_signal(rewards_N: NDArray[np.float64]) -> bool:
    """Whether the answers differ in reward. If not, every advantage is exactly zero."""
    return rewards_N.size > 1 and bool(np.isfinite(rewards_N).all()) and bool(rewards_N.max() > rewards_N.min())


def advantages(rewards_N: NDArray[np.float64], kind: Kind) -> NDArray[np.float64]:
    """Advantage of each answer of one group; they add up to zero. All zero when there is no signal."""
    if not has_signal(rewards_N):
        return np.zeros_like(rewards_N)
    centred_N = rewards_N - rewards_N.mean()
    if kind == "grpo_no_std":
        return centred_N
    return centred_N / (rewards_N.std(ddof=1) + STD_FLOOR)
