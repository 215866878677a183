"""The policy as the trainer needs it: log-probs of response tokens, differentiable, in either layout.

    B x L one forward pass   t its response tokens   V vocabulary   h hidden

    Policy.score(inputs) -> (logprob_t, entropy_t)

        ids_BL -> body -> hidden_BLh -> only the places that predict a response token -> hidden_th -> head -> logits_tV

Logits of prompts and padding are never computed: a hook in front of the output head picks the places, so whatever a model does
after its head (soft caps, scales) still happens. Above LOGITS_BYTES_MAX the logits are not kept either: TokenLogprobs goes
through them in chunks, and again in the backward pass.

Danger: every forward pass has use_cache=False. With a cache, transformers takes packed positions for one long sequence and the
gradient is silently wrong.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from services.trainer import batch as planning
from services.trainer import norm
from services.trainer.batch import Layout, MicroBatch
from stretto.errors import InvalidArgumentError

log = logging.getLogger("stretto.trainer")

LOGITS_BYTES_MAX = 1 << 30
"""Largest float32 logits that are kept for the backward pass; larger ones are recomputed in chunks."""
CHUNK_BYTES = 128 << 20
"""Logits of one chunk: large enough that the matrix product is at full speed."""
SAME_LOGPROB = 2e-3
"""Log-probs of two layouts may differ by this much in float32: kernels add in different orders. A wrong mask is off by 0.1 and more."""


def load(path: Path, device: str) -> PreTrainedModel:
    """The causal LM in `path`: float32 masters on `device`, dropout off. Nothing is downloaded, no code in the folder is run."""
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as err:
        raise InvalidArgumentError(f"model.path = '{path}' is not a causal LM that transformers can load: {err}") from err
    norm.install(model)
    return model.to(device).eval()


# ------------------------------------------------------------------------------------------------------------ inputs


@dataclass(frozen=True, slots=True)
class Inputs:
    """A MicroBatch on the device."""

    ids_BL: torch.Tensor
    positions_BL: torch.Tensor | None
    mask_B1LL: torch.Tensor | None
    """Added to attention scores: 0 or -inf; None = plain causal."""
    source_t: torch.Tensor
    target_t: torch.Tensor
    token_t: torch.Tensor
    """Which tokens of the batch they are."""
    temperature_t1: torch.Tensor | None
    """None = 1 everywhere."""


def make_inputs(micro: MicroBatch, temperature_T: np.ndarray[Any, np.dtype[np.float32]], device: str, dtype: torch.dtype) -> Inputs:
    """Move a micro-batch to `device`; its mask is in `dtype`, that of the parameters."""
    temperature_t = temperature_T[micro.token_t]
    segments_BL = micro.segments_BL
    return Inputs(
        ids_BL=torch.from_numpy(micro.ids_BL).to(device),
        positions_BL=None if segments_BL is None else torch.from_numpy(micro.positions_BL).to(device),
        mask_B1LL=None if segments_BL is None else block_mask(torch.from_numpy(segments_BL).to(device), dtype),
        source_t=torch.from_numpy(micro.source_t).to(device),
        target_t=torch.from_numpy(micro.target_t).to(device),
        token_t=torch.from_numpy(micro.token_t).to(device),
        temperature_t1=None if (temperature_t == 1).all() else torch.from_numpy(temperature_t)[:, None].to(device),
    )


def block_mask(segments_BL: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[B, 1, L, L], 0 where a place may look and -inf elsewhere: back, at the prompt (segment 0) and its own segment.

    Padding may look too, so that no row of the mask is all -inf (NaN); it comes last, so nothing real sees it.
    """
    length = segments_BL.shape[1]
    past_LL = torch.ones(length, length, dtype=torch.bool, device=segments_BL.device).tril()
    shared_BLL = (segments_BL[:, None, :] == 0) | (segments_BL[:, None, :] == segments_BL[:, :, None])
    mask_BLL = torch.zeros(shared_BLL.shape, dtype=dtype, device=segments_BL.device)
    return mask_BLL.masked_fill_(~(past_LL & shared_BLL), -torch.inf)[:, None]


# ------------------------------------------------------------------------------------------------------------ log-probs


def logprobs(logits_tV: torch.Tensor, target_t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-prob of each target, entropy of its distribution); the entropy has no gradient."""
    log_p_tV = logits_tV.log_softmax(-1)
    with torch.no_grad():  # a token that cannot be drawn has log-prob -inf and adds nothing
        entropy_t = -(log_p_tV.exp() * log_p_tV.clamp(min=torch.finfo(log_p_tV.dtype).min)).sum(-1)
    return log_p_tV.gather(-1, target_t[:, None]).squeeze(-1), entropy_t


class TokenLogprobs(torch.autograd.Function):
    """`logprobs(hidden W^T / temperature, target)` without keeping t x V numbers: chunks of rows, recomputed in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden_th: torch.Tensor, weight_Vh: torch.Tensor, target_t: torch.Tensor, temperature_t1: torch.Tensor | None, chunk: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprob_t = torch.empty(hidden_th.shape[0], dtype=_wide(hidden_th.dtype), device=hidden_th.device)
        entropy_t, lse_t = torch.empty_like(logprob_t), torch.empty_like(logprob_t)
        for low in range(0, hidden_th.shape[0], chunk):
            part = slice(low, low + chunk)
            logits_cV = _chunk_logits(hidden_th[part], weight_Vh, temperature_t1, part)
            lse_t[part] = logits_cV.logsumexp(-1)
            logprob_t[part] = logits_cV.gather(-1, target_t[part, None]).squeeze(-1) - lse_t[part]
            log_p_cV = logits_cV.sub_(lse_t[part, None])
            entropy_t[part] = -(log_p_cV.exp() * log_p_cV.clamp_(min=torch.finfo(log_p_cV.dtype).min)).sum(-1)
        ctx.save_for_backward(hidden_th, weight_Vh, target_t, temperature_t1, lse_t)
        ctx.chunk = chunk
        ctx.mark_non_differentiable(entropy_t)
        return logprob_t, entropy_t

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_th, weight_Vh, target_t, temperature_t1, lse_t = ctx.saved_tensors
        grad_hidden_th, grad_weight_Vh = torch.empty_like(hidden_th), torch.zeros_like(weight_Vh)
        for low in range(0, hidden_th.shape[0], ctx.chunk):
            part = slice(low, low + ctx.chunk)
            grad_c1 = grads[0][part, None]
            # d logprob / d logits = onehot(target) - softmax
            grad_cV = _chunk_logits(hidden_th[part], weight_Vh, temperature_t1, part).sub_(lse_t[part, None]).exp_().mul_(-grad_c1)
            grad_cV.scatter_add_(-1, target_t[part, None], grad_c1)
            if temperature_t1 is not None:
                grad_cV.div_(temperature_t1[part])
            grad_cV = grad_cV.to(hidden_th.dtype)
            grad_hidden_th[part] = grad_cV @ weight_Vh
            grad_weight_Vh.addmm_(grad_cV.T, hidden_th[part])
        return grad_hidden_th, grad_weight_Vh, None, None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize >= 4 else torch.float32


def _chunk_logits(hidden_ch: torch.Tensor, weight_Vh: torch.Tensor, temperature_t1: torch.Tensor | None, part: slice) -> torch.Tensor:
    logits_cV = (hidden_ch @ weight_Vh.T).to(_wide(hidden_ch.dtype))
    return logits_cV if temperature_t1 is None else logits_cV.div_(temperature_t1[part])


# ------------------------------------------------------------------------------------------------------------ the policy


class Policy:
    """A causal LM with its forward pass for training."""

    def __init__(self, model: PreTrainedModel, device: str, dtype: torch.dtype, *, logits_bytes_max: int = LOGITS_BYTES_MAX) -> None:
        """`dtype` is what matrix products run in; parameters stay as they are."""
        self.model, self.device, self.dtype = model, device, dtype
        self._logits_bytes_max = logits_bytes_max
        self._body: Any = model.get_decoder()
        head: Any = model.get_output_embeddings()
        if head is None:
            raise InvalidArgumentError(f"{type(model).__name__} has no output head: it is not a causal LM")
        self._head = head
        self._source_t: torch.Tensor | None = None
        head.register_forward_pre_hook(self._pick)
        self._is_head_plain = self._check_head()

    @property
    def vocab_size(self) -> int:
        return self._head.weight.shape[0]

    @property
    def parity_tokens(self) -> float:
        """Row width at which attention costs as much as the linear layers; see batch.plan.

        Per token and layer, attention over W places is 2 x 2 W (heads x head size) operations, a matrix of n entries 2 n.
        """
        config: Any = self.model.config.get_text_config()
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        matrices = sum(module.weight.numel() for module in self._body.modules() if isinstance(module, nn.Linear))
        return max(1.0, matrices / (2 * config.num_hidden_layers * config.num_attention_heads * head_size))

    def score(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-prob, entropy) of each response token under logits / temperature; at least float32. Gradient if enabled by the caller."""
        if self._head.weight.dtype == self.dtype:
            return self.score_exactly(inputs)
        with torch.autocast(torch.device(self.device).type, self.dtype):
            return self.score_exactly(inputs)

    def score_exactly(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """As `score`, in the precision of the parameters."""
        if inputs.target_t.numel() * self.vocab_size * 4 > self._logits_bytes_max and self._is_head_plain:
            return self._score_in_chunks(inputs)
        self._source_t = inputs.source_t
        try:
            logits_tV = self.model(**_arguments(inputs)).logits.squeeze(0)
        finally:
            self._source_t = None
        logits_tV = logits_tV.to(_wide(logits_tV.dtype))
        if inputs.temperature_t1 is not None:
            logits_tV = logits_tV / inputs.temperature_t1
        return logprobs(logits_tV, inputs.target_t)

    def _pick(self, _head: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if self._source_t is None:
            return None
        return (args[0].flatten(0, 1)[self._source_t][None], *args[1:])

    def _score_in_chunks(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_th = self._body(**_arguments(inputs)).last_hidden_state.flatten(0, 1)[inputs.source_t]
        device = hidden_th.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_th.dtype
        chunk = max(1, min(CHUNK_BYTES, self._logits_bytes_max) // (4 * self.vocab_size))
        outputs: Any = TokenLogprobs.apply(hidden_th.to(dtype), self._head.weight.to(dtype), inputs.target_t, inputs.temperature_t1, chunk)
        return outputs

    @torch.no_grad()
    def _check_head(self) -> bool:
        """Whether logits are hidden states times the head's weight and nothing else."""
        ids_BL = torch.arange(1, 5, device=self.device)[None] % self.vocab_size
        logits = self.model(input_ids=ids_BL, use_cache=False).logits
        hidden = self._body(input_ids=ids_BL, use_cache=False).last_hidden_state
        return torch.allclose(logits, hidden @ self._head.weight.T, atol=1e-4, rtol=1e-4)


def _arguments(inputs: Inputs) -> dict[str, Any]:
    arguments: dict[str, Any] = {"input_ids": inputs.ids_BL, "use_cache": False}
    if inputs.mask_B1LL is not None:
        arguments |= {"attention_mask": inputs.mask_B1LL, "position_ids": inputs.positions_BL}
    return arguments


# ------------------------------------------------------------------------------------------------------------ layout


def choose_layout(policy: Policy, wanted: Literal["auto", "shared_prompt", "padded"]) -> Layout:
    """The layout to train with. "auto" shares prompts where this very model then gives the same log-probs.

    Raises InvalidArgumentError when "shared_prompt" is wanted from a model that cannot.
    """
    if wanted == "padded":
        return "padded"
    why_not = _why_not_shared(policy)
    if why_not and wanted == "shared_prompt":
        raise InvalidArgumentError(f"trainer.layout = 'shared_prompt': {why_not}; use 'auto' or 'padded'")
    layout: Layout = "padded" if why_not else "shared_prompt"
    log.info("layout", extra={"fields": {"layout": layout, "reason": why_not or "same log-probs as padded"}})
    return layout


def _why_not_shared(policy: Policy) -> str | None:
    """What keeps the model from sharing prompts; None when it computes the same on random tokens either way."""
    config: Any = policy.model.config.get_text_config()
    others = {kind for kind in getattr(config, "layer_types", None) or () if kind != "full_attention"}
    if others:
        return f"the model has layers of {sorted(others)}"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return f"the model attends within a sliding window of {config.sliding_window}"
    worst = _layout_difference(policy)
    return None if worst <= SAME_LOGPROB else f"log-probs differ from padded rows by {worst:.2g}"


@torch.no_grad()
def _layout_difference(policy: Policy) -> float:
    """Largest difference in log-prob between the layouts, on one group of random tokens."""
    random = np.random.default_rng(0)
    lengths_N = np.array([5, 1, 7, 4])
    tokens_T = random.integers(0, policy.vocab_size, 9 + lengths_N.sum())
    group = planning.GroupArrays(
        uid="probe",
        prompt_P=tokens_T[:9],
        tokens_T=tokens_T[9:],
        behaviour_T=np.zeros(lengths_N.sum(), np.float32),
        versions_T=np.zeros(lengths_N.sum(), np.int64),
        lengths_N=lengths_N,
        rewards_N=np.arange(4.0),
        accuracy_N=np.zeros(4),
        version_begin=0,
        is_cut_N=np.zeros(4, np.bool_),
        temperature=1.0,
    )
    probe = planning.make_batch([group], "grpo_no_std")
    found = []
    for rows in ([(0,), (1,), (2,), (3,)], [(0, 1, 2, 3)]):
        inputs = make_inputs(planning.assemble(probe, rows), probe.temperature_T, policy.device, torch.float32)
        found.append(policy.score_exactly(inputs)[0])
    return (found[0] - found[1]).abs().max().item()
