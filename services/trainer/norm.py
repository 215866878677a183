"""RMS normalisation with a backward pass written out: the largest cost of a small model's train step after its matrix products.

    n one over its root mean square   y = x n w

    dx = n (g w - x n mean(g w x n))        dw = sum over tokens of g x n

Left to autograd, the same takes a dozen passes over the activations and keeps three copies of them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn


class RmsNorm(torch.autograd.Function):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; all in the type of x and weight, which must be the same."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        n = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, n, weight)
        return (x * n).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, n, weight = ctx.saved_tensors
        g = grads[0]
        normed = x * n
        product = g * normed
        grad_weight = product.flatten(0, -2).sum(0)
        mean = (product @ weight).unsqueeze(-1).div_(x.shape[-1])
        return (g * weight).addcmul_(normed, mean, value=-1).mul_(n), grad_weight, None


def install(model: nn.Module) -> int:
    """Let the model's RMS norms run through RmsNorm. Returns how many do: only those that then compute what they did before."""
    count = 0
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and _is_plain(module):
            module.forward = partial(_forward, module, module.forward)
            count += 1
    return count


def _forward(module: Any, original: Any, x: torch.Tensor) -> torch.Tensor:
    if x.dtype != module.weight.dtype:  # mixed precision: the module knows where it rounds
        return original(x)
    return RmsNorm.apply(x, module.weight, module.variance_epsilon)  # pyright: ignore[reportReturnType]


@torch.no_grad()
def _is_plain(module: Any) -> bool:
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, nn.Parameter) or eps is None:
        return False
    x = torch.linspace(-3, 2, 2 * weight.numel(), dtype=weight.dtype, device=weight.device).view(2, -1)
    return torch.allclose(module(x), RmsNorm.apply(x, weight, eps), rtol=1e-5, atol=1e-6)  # pyright: ignore[reportArgumentType]
