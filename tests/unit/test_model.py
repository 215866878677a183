"""Log-probs and gradients of both layouts against one plain forward pass per answer, in float64."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM as Auto
from transformers import Gemma2Config, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from services.trainer import batch as b
from services.trainer.model import Inputs, Policy, TokenLogprobs, choose_layout, load, logprobs, make_inputs
from stretto.errors import InvalidArgumentError

SIZE: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 24,
    "vocab_size": 40,
    "initializer_range": 0.4,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
QWEN3 = Qwen3Config(**SIZE, tie_word_embeddings=True)
LLAMA = LlamaConfig(**SIZE, tie_word_embeddings=False)
GEMMA2 = Gemma2Config(**SIZE, final_logit_softcapping=2.0, layer_types=["full_attention"] * 2)
SLIDING = Qwen2Config(**SIZE, use_sliding_window=True, sliding_window=4, max_window_layers=0)


def make(config: PreTrainedConfig, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    torch.manual_seed(0)
    model: Any = Auto.from_config(config, attn_implementation="eager" if config is GEMMA2 else "sdpa")
    if dtype == torch.float64 and config is not GEMMA2:
        for module in list(model.modules()):  # transformers' norms round to float32 whatever the model is in; these do not
            for name, child in module.named_children():
                if type(child).__name__.endswith("RMSNorm"):
                    setattr(module, name, nn.RMSNorm(child.weight.shape[0], child.variance_epsilon))
    return model.to(dtype).eval()


def make_batch(temperature: float = 1.0) -> b.Batch:
    """Three groups of different prompt lengths; answers of 1 to 9 tokens."""
    random = np.random.default_rng(1)
    groups = []
    for prompt, lengths in ((5, [3, 1, 9, 4]), (2, [6, 6]), (11, [1, 8, 2])):
        total = sum(lengths)
        groups.append(
            b.GroupArrays(
                uid="d",
                prompt_P=random.integers(0, 40, prompt),
                tokens_T=random.integers(0, 40, total),
                behaviour_T=np.zeros(total, np.float32),
                versions_T=np.zeros(total, np.int64),
                lengths_N=np.array(lengths),
                rewards_N=np.arange(len(lengths), dtype=np.float64),
                accuracy_N=np.zeros(len(lengths)),
                is_cut_N=np.zeros(len(lengths), np.bool_),
                version_begin=0,
                temperature=temperature,
            )
        )
    return b.make_batch(groups, "grpo_no_std")


def token_weights(batch: b.Batch) -> torch.Tensor:
    """Some weight for every token, so that gradients of different tokens cannot be mistaken for each other."""
    return torch.linspace(-1, 2, batch.num_tokens, dtype=torch.float64)


def slow(model: PreTrainedModel, batch: b.Batch, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Each answer alone, without padding: (log-probs, entropies, gradients of the weighted sum)."""
    model.zero_grad()
    found, entropies = [], []
    for r in range(batch.length_R.size):
        prompt = batch.store_S[batch.prompt_start_R[r] :][: batch.prompt_length_R[r]]
        answer = batch.store_S[batch.start_R[r] :][: batch.length_R[r]]
        ids = torch.from_numpy(np.concatenate([prompt, answer]))
        logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1] / temperature
        p = torch.softmax(logits, -1)
        found.append(torch.stack([p[i, token].log() for i, token in enumerate(answer)]))
        entropies.append(-(p * p.log()).sum(-1).detach())
    logprob_T = torch.cat(found)
    (logprob_T * token_weights(batch)).sum().backward()
    return logprob_T.detach(), torch.cat(entropies), gradients(model)


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def inputs_of(batch: b.Batch, layout: b.Layout, max_tokens: int, parity_tokens: float, dtype: torch.dtype = torch.float64) -> list[Inputs]:
    answers = np.arange(batch.length_R.size)
    packed = b.plan(batch, answers, layout, max_tokens, parity_tokens)
    return [make_inputs(b.assemble(batch, rows), batch.temperature_T, "cpu", dtype) for rows in packed]


def fast(policy: Policy, batch: b.Batch, inputs: list[Inputs]) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    policy.model.zero_grad()
    logprob_T, entropy_T = torch.zeros(batch.num_tokens, dtype=torch.float64), torch.zeros(batch.num_tokens, dtype=torch.float64)
    for each in inputs:
        logprob_t, entropy_t = policy.score(each)
        logprob_T[each.token_t], entropy_T[each.token_t] = logprob_t.detach().double(), entropy_t.double()
        (logprob_t * token_weights(batch)[each.token_t]).sum().backward()
    return logprob_T, entropy_T, gradients(policy.model)


def assert_same(got: tuple[Any, ...], want: tuple[Any, ...], tolerance: float) -> None:
    assert torch.allclose(got[0], want[0], rtol=0, atol=tolerance)
    assert torch.allclose(got[1], want[1], rtol=0, atol=tolerance)
    assert got[2].keys() == want[2].keys()
    for name, gradient in want[2].items():
        assert torch.allclose(got[2][name], gradient, rtol=tolerance, atol=tolerance * 10), name


@pytest.mark.parametrize("config", [QWEN3, LLAMA, GEMMA2], ids=["qwen3 tied", "llama grouped heads", "gemma2 soft-capped"])
@pytest.mark.parametrize(
    ("layout", "max_tokens", "parity_tokens"),
    [
        ("padded", 10_000, 1e6),
        ("padded", 30, 1e6),
        ("shared_prompt", 10_000, 1e6),
        ("shared_prompt", 10_000, 1.0),
        ("shared_prompt", 20, 1e6),
    ],
)
def test_every_layout_gives_the_logprobs_entropies_and_gradients_of_one_pass_per_answer(
    config: PreTrainedConfig, layout: b.Layout, max_tokens: int, parity_tokens: float
) -> None:
    model, batch = make(config), make_batch()
    policy = Policy(model, "cpu", torch.float64)
    assert_same(
        fast(policy, batch, inputs_of(batch, layout, max_tokens, parity_tokens)), slow(model, batch), 1e-5 if config is GEMMA2 else 1e-10
    )


@pytest.mark.parametrize("layout", ["padded", "shared_prompt"])
def test_logprobs_are_of_the_distribution_at_the_sampling_temperature(layout: b.Layout) -> None:
    model, batch = make(QWEN3), make_batch(temperature=0.5)
    policy = Policy(model, "cpu", torch.float64)
    assert_same(fast(policy, batch, inputs_of(batch, layout, 10_000, 1e6)), slow(model, batch, temperature=0.5), 1e-10)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logits_too_large_to_keep_are_recomputed_with_the_same_result(temperature: float) -> None:
    model, batch = make(QWEN3), make_batch(temperature=float(np.float32(temperature)))
    policy = Policy(model, "cpu", torch.float64, logits_bytes_max=40 * 4 * 7)  # chunks of 7 tokens
    assert_same(
        fast(policy, batch, inputs_of(batch, "shared_prompt", 10_000, 1e6)), slow(model, batch, float(np.float32(temperature))), 1e-10
    )


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_token_logprobs_passes_gradcheck(chunk: int) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 4, dtype=torch.float64, requires_grad=True), torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    target, temperature = torch.tensor([0, 6, 3, 3, 1]), torch.tensor([[1.0], [0.5], [2.0], [1.0], [1.0]], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda h, w: TokenLogprobs.apply(h, w, target, temperature, chunk)[0], (hidden, weight))  # pyright: ignore[reportOptionalSubscript]
    plain, entropy = logprobs(hidden @ weight.T / temperature, target)
    chunked, chunked_entropy = TokenLogprobs.apply(hidden, weight, target, temperature, chunk)  # pyright: ignore[reportGeneralTypeIssues]
    assert torch.allclose(chunked, plain, atol=1e-13)
    assert torch.allclose(chunked_entropy, entropy, atol=1e-13)


def test_a_token_that_cannot_be_drawn_adds_nothing_to_the_entropy() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    assert logprobs(logits, torch.tensor([0]))[1].item() == pytest.approx(np.log(2))


def test_a_head_followed_by_a_soft_cap_is_never_taken_for_a_plain_one() -> None:
    model, batch = make(GEMMA2), make_batch()
    policy = Policy(model, "cpu", torch.float64, logits_bytes_max=1)
    assert_same(fast(policy, batch, inputs_of(batch, "padded", 10_000, 1e6)), slow(model, batch), 1e-5)


def test_products_in_bfloat16_leave_float32_logprobs_and_gradients_near_the_exact_ones() -> None:
    model, batch = make(QWEN3, torch.float32), make_batch()
    exact = Policy(model, "cpu", torch.float32)
    want = fast(exact, batch, inputs_of(batch, "padded", 10_000, 1e6, torch.float32))
    layouts: list[b.Layout] = ["padded", "shared_prompt", "shared_prompt"]
    for layout, limit in zip(layouts, (1 << 30, 1 << 30, 40 * 4 * 7), strict=True):
        mixed = Policy(model, "cpu", torch.bfloat16, logits_bytes_max=limit)
        got = fast(mixed, batch, inputs_of(batch, layout, 10_000, 1e6, torch.float32))
        assert 0 < (got[0] - want[0]).abs().mean() < 0.05
        assert all(g.dtype == torch.float32 for g in got[2].values())
        a, c = (torch.cat([g.flatten() for g in each[2].values()]) for each in (got, want))
        assert torch.cosine_similarity(a, c, dim=0) > 0.99


# ---- choosing a layout


@pytest.mark.parametrize("config", [QWEN3, LLAMA])
def test_auto_shares_prompts_where_the_model_attends_fully(config: PreTrainedConfig) -> None:
    assert choose_layout(Policy(make(config, torch.float32), "cpu", torch.float32), "auto") == "shared_prompt"


def test_auto_falls_back_to_padded_for_a_sliding_window_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    policy = Policy(make(SLIDING, torch.float32), "cpu", torch.float32)
    with caplog.at_level(logging.INFO, "stretto.trainer"):
        assert choose_layout(policy, "auto") == "padded"
    assert "sliding" in str(caplog.records[0].__dict__["fields"])
    with pytest.raises(InvalidArgumentError, match="sliding"):
        choose_layout(policy, "shared_prompt")


def test_auto_falls_back_to_padded_when_the_model_does_not_heed_the_mask() -> None:
    model = make(QWEN3, torch.float32)
    body: Any = model.get_decoder()
    body.register_forward_pre_hook(lambda _m, _a, kwargs: (_a, kwargs | {"attention_mask": None}), with_kwargs=True)
    assert choose_layout(Policy(model, "cpu", torch.float32), "auto") == "padded"


def test_padded_is_taken_as_wanted() -> None:
    assert choose_layout(Policy(make(QWEN3, torch.float32), "cpu", torch.float32), "padded") == "padded"


def test_parity_is_where_attention_costs_as_much_as_the_linear_layers() -> None:
    # per token and layer: q, o 16 x 16, k, v 16 x 8, three of 16 x 24, 2 operations each; attention 2 x 2 x 16 for each place
    matrices = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24
    assert Policy(make(QWEN3), "cpu", torch.float64).parity_tokens == pytest.approx(2 * matrices / (4 * 16))


# ---- loading


def test_a_folder_without_a_model_is_refused_with_the_recipes_key(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"model\.path"):
        load(tmp_path, "cpu")


def test_a_bfloat16_checkpoint_is_loaded_into_float32_masters_without_dropout(tmp_path: Path) -> None:
    make(QWEN3, torch.bfloat16).save_pretrained(tmp_path)
    model = load(tmp_path, "cpu")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not model.training
