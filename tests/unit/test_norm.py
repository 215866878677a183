from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from services.trainer import norm


@pytest.mark.parametrize("shape", [(5, 4), (2, 3, 4), (2, 3, 2, 4)])
def test_forward_equals_torchs_norm_and_backward_passes_gradcheck(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape, dtype=torch.float64, requires_grad=True), torch.randn(4, dtype=torch.float64, requires_grad=True)
    apply: Any = norm.RmsNorm.apply
    assert torch.allclose(apply(x, weight, 1e-3), torch.nn.functional.rms_norm(x, (4,), weight, 1e-3), rtol=1e-14, atol=1e-14)
    assert torch.autograd.gradcheck(lambda x, w: apply(x, w, 1e-3), (x, weight))


def test_only_norms_that_compute_the_same_are_replaced() -> None:
    plain, shifted = Qwen3RMSNorm(4, eps=1e-6), Gemma2RMSNorm(4)  # the second scales by 1 + weight
    assert norm.install(torch.nn.ModuleList([plain, shifted, torch.nn.LayerNorm(4)])) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replaced_norm_gives_what_it_gave_also_for_inputs_of_lower_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    original, replaced = Qwen3RMSNorm(8, eps=1e-6), Qwen3RMSNorm(8, eps=1e-6)
    norm.install(torch.nn.ModuleList([replaced]))
    x = torch.randn(3, 8).to(dtype)
    assert replaced(x).dtype == original(x).dtype
    assert torch.allclose(replaced(x), original(x), atol=1e-6)
