"""From gradients to new weights: AdamW, its learning rate, and the two guards (gradient norm, numbers that are not finite)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stretto.errors import RefusedError
from stretto.recipe import Trainer

FUSED_DEVICES = ("cpu", "cuda")
"""Where torch has AdamW as one kernel; elsewhere it runs over lists of tensors."""


def learning_rate_at(step: int, t: Trainer) -> float:
    """Rate of train step `step` (1 is the first).

        0 -- warm-up, linear --> peak at warmup_steps -- schedule --> min_learning_rate at the last step ("constant": stays at the peak)

    A function of the step alone: a resumed run needs no scheduler state and goes on exactly where it was.
    """
    if step < t.warmup_steps:
        return t.learning_rate * step / t.warmup_steps
    if t.schedule == "constant":
        return t.learning_rate
    progress = min(1.0, (step - t.warmup_steps) / max(1, t.steps - t.warmup_steps))
    left = 1 - progress if t.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return t.min_learning_rate + (t.learning_rate - t.min_learning_rate) * left


def is_decayed(parameter: nn.Parameter) -> bool:
    """Weight decay is for matrices; norms and biases are vectors."""
    return parameter.ndim >= 2


@dataclass(frozen=True, slots=True)
class Update:
    """What one optimizer step did."""

    grad_norm: float
    """Before clipping; not finite when the step was left out."""
    is_applied: bool


class Optimizer:
    """AdamW over named parameters."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], t: Trainer) -> None:
        named = sorted(parameters, key=lambda item: not is_decayed(item[1]))  # the order of AdamW's groups below
        self._names = [name for name, _ in named]
        self._parameters = [p for _, p in named]
        self._grad_clip = t.grad_clip
        decayed = [p for p in self._parameters if is_decayed(p)]
        others = [p for p in self._parameters if not is_decayed(p)]
        groups = [{"params": decayed, "weight_decay": t.weight_decay}, {"params": others, "weight_decay": 0.0}]
        is_fused = all(p.device.type in FUSED_DEVICES for p in self._parameters)
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=t.learning_rate,
            betas=(t.adam_beta1, t.adam_beta2),
            eps=t.adam_eps,
            fused=is_fused,
            foreach=None if is_fused else True,
        )

    def step(self, learning_rate: float) -> Update:
        """Clip, apply and clear the gradients. One that is not finite is thrown away: weights and moments stay as they are."""
        norm = nn.utils.clip_grad_norm_(self._parameters, self._grad_clip).item()
        is_applied = math.isfinite(norm)
        if is_applied:
            for group in self._adamw.param_groups:
                group["lr"] = learning_rate
            self._adamw.step()
        self._adamw.zero_grad()
        return Update(norm, is_applied)

    def state(self) -> dict[str, Any]:
        """Moments and step counts by parameter name; live tensors."""
        by_index: dict[int, dict[str, Any]] = self._adamw.state_dict()["state"]
        return {self._names[i]: dict(moments) for i, moments in by_index.items()}

    def load_state(self, state: Mapping[str, dict[str, Any]]) -> None:
        """Take over moments; the recipe's rates and betas stay. Raises RefusedError for another model's."""
        unknown = sorted(set(state) - set(self._names))
        if unknown:
            raise RefusedError(f"the checkpoint has optimizer state for {unknown[0]!r}, which the model has not; it is of another model")
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if name in state and state[name]["exp_avg"].shape != parameter.shape:
                shapes = f"{tuple(state[name]['exp_avg'].shape)}, not {tuple(parameter.shape)}"
                raise RefusedError(f"the checkpoint's optimizer state for {name!r} has shape {shapes}; it is of another model")
        whole = self._adamw.state_dict()
        whole["state"] = {i: state[name] for i, name in enumerate(self._names) if name in state}
        self._adamw.load_state_dict(whole)
