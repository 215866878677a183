"""Forward passes of the torch engine over a KVCache: one for any transformers model, one fused for the Llama family.

    B rows   P prompts   L longest prompt   V vocabulary   h hidden   Q query heads   H key/value heads   D head size   T kv length

    prefill(ids_PL, last_P, …)   causal over right-padded prompts (padding comes after, nothing looks ahead) -> logits_PV
    decode(ids_B, pos_B, …)      one token per row against the cache                                         -> logits_BV

FusedForward reads the very parameters of the transformers model: q, k, v (and gate, up) become views of one matrix, so
loading weights by name fills both. On a small model, whose steps are mostly the cost of calls, it saves a third of the time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone reads
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from services.rollout.kv import KVCache

FUSED_MODELS = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Classes whose layers FusedForward computes: pre-norm, rotary, gated SiLU, optional biases and q/k norms."""
FUSED_ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary kinds whose angles depend on the position alone."""

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, q [N, Q, D], k [N, H, D], v [N, H, D]) -> [N, Q x D]."""


class Forward(Protocol):
    """Next-token logits. Writes keys and values where the cache was told to (at_prefill, at_decode)."""

    def prefill(self, ids_PL: torch.Tensor, last_P: torch.Tensor) -> torch.Tensor:
        """Logits after position last_P of each prompt."""
        ...

    def decode(self, ids_B: torch.Tensor, pos_B: torch.Tensor) -> torch.Tensor:
        """Logits after one more token per row."""
        ...


def make_forward(model: PreTrainedModel, cache: KVCache) -> Forward:
    """The fused pass where it is known to be the same function, else transformers' own."""
    if type(model).__name__ in FUSED_MODELS and _is_fusable(model):
        return FusedForward(model, cache)
    return TransformersForward(model, cache)


def _is_fusable(model: PreTrainedModel) -> bool:
    config: Any = model.config
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    return config.hidden_act == "silu" and rope in FUSED_ROPES


# ---- any model: transformers' forward with a cache layer that writes to our rows


class _SlotLayer(CacheLayerMixin):
    """What transformers sees of one layer of a KVCache."""

    is_sliding = False

    def __init__(self, cache: KVCache, layer: int) -> None:
        super().__init__()
        self.cache, self.layer = cache, layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        del key_states, value_states

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        del args, kwargs
        return self.cache.write(self.layer, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        del query_length
        return self.cache.kv_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.cache.max_len


class TransformersForward:
    """model.forward unchanged; only the rows that enter the output head are picked, by a hook."""

    def __init__(self, model: PreTrainedModel, cache: KVCache) -> None:
        self._model, self._cache = model, cache
        self._layers = Cache(layers=[_SlotLayer(cache, i) for i in range(cache.num_layers)])
        names = inspect.signature(model.forward).parameters
        self._keyword = "cache" if "cache" in names else "past_key_values"
        self._last_P: torch.Tensor | None = None
        head = model.get_output_embeddings()
        assert isinstance(head, nn.Module)
        head.register_forward_pre_hook(self._pick_last)

    def prefill(self, ids_PL: torch.Tensor, last_P: torch.Tensor) -> torch.Tensor:
        self._last_P = last_P
        positions = torch.arange(ids_PL.shape[1], device=ids_PL.device)[None]
        return self._logits(ids_PL, None, positions)

    def decode(self, ids_B: torch.Tensor, pos_B: torch.Tensor) -> torch.Tensor:
        self._last_P = None
        return self._logits(ids_B[:, None], self._cache.mask_BT[:, None, None], pos_B[:, None])

    def _logits(self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor:
        cache: dict[str, Any] = {self._keyword: self._layers, "use_cache": True}
        return self._model(input_ids=ids, attention_mask=mask, position_ids=positions, **cache).logits[:, -1]

    def _pick_last(self, _head: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if self._last_P is None:
            return None
        hidden_PLh = args[0]
        return (hidden_PLh[torch.arange(hidden_PLh.shape[0], device=hidden_PLh.device), self._last_P][:, None], *args[1:])


# ---- the Llama family


@dataclass(slots=True)
class _Layer:
    """The weights of one decoder layer; qkv and gate_up hold the parameters of several linears one below the other."""

    norm: nn.Module
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None
    """[2, D]: the weights of q_norm and k_norm."""
    qk_eps: float
    out: nn.Linear
    mlp_norm: nn.Module
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: nn.Linear


class FusedForward:
    """Llama, Qwen2 and Qwen3 with as few calls as plain PyTorch allows."""

    def __init__(self, model: PreTrainedModel, cache: KVCache) -> None:
        body: Any = model.get_decoder()
        config: Any = model.config
        self._cache, self._body = cache, body
        self._head: Any = model.get_output_embeddings()
        self._num_q: int = config.num_attention_heads
        self._num_kv: int = config.num_key_value_heads
        self._size: int = body.layers[0].self_attn.head_dim
        self._scale: float = body.layers[0].self_attn.scaling
        self._is_key = torch.tensor([0] * self._num_q + [1] * self._num_kv, device=cache.device)
        """[Q + H]: row of qk_norm for each head."""
        self._layers = [_fuse(layer) for layer in body.layers]
        self._cos, self._sin = _rotary_tables(body, cache.max_len)

    def prefill(self, ids_PL: torch.Tensor, last_P: torch.Tensor) -> torch.Tensor:
        prompts, length = ids_PL.shape
        cos = self._cos[:length].repeat(prompts, 1)[:, None]
        sin = self._sin[:length].repeat(prompts, 1)[:, None]
        hidden = self._run(ids_PL.view(-1), cos, sin, self._attend_causally(prompts, length))
        return self._logits(hidden.view(prompts, length, -1)[torch.arange(prompts, device=last_P.device), last_P])

    def decode(self, ids_B: torch.Tensor, pos_B: torch.Tensor) -> torch.Tensor:
        mask_B1T = torch.zeros_like(self._cache.mask_BT, dtype=self._cos.dtype).masked_fill_(~self._cache.mask_BT, -torch.inf)[:, None]
        return self._logits(self._run(ids_B, self._cos[pos_B][:, None], self._sin[pos_B][:, None], self._attend_to_rows(mask_B1T)))

    def _logits(self, hidden_Nh: torch.Tensor) -> torch.Tensor:
        return self._head(_normed(hidden_Nh, self._body.norm))

    def _run(self, ids_N: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Hidden states before the final norm; N tokens, each with its angles [N, 1, D]."""
        x_Nh = F.embedding(ids_N, self._body.embed_tokens.weight)
        for i, w in enumerate(self._layers):
            q, k, v = self._project(w, x_Nh, cos, sin)
            x_Nh = x_Nh + F.linear(attend(i, q, k, v), w.out.weight, w.out.bias)
            gate, up = F.linear(_normed(x_Nh, w.mlp_norm), w.gate_up, w.gate_up_bias).chunk(2, -1)
            x_Nh = x_Nh + F.linear(F.silu(gate).mul_(up), w.down.weight, w.down.bias)
        return x_Nh

    def _project(self, w: _Layer, x_Nh: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Normed and rotated q [N, Q, D], k [N, H, D], and v [N, H, D]."""
        num_q, num_kv = self._num_q, self._num_kv
        qkv = F.linear(_normed(x_Nh, w.norm), w.qkv, w.qkv_bias).view(-1, num_q + 2 * num_kv, self._size)
        qk, v = qkv[:, : num_q + num_kv], qkv[:, num_q + num_kv :]
        if w.qk_norm is not None:
            qk = F.rms_norm(qk, (self._size,), None, w.qk_eps) * w.qk_norm[self._is_key]
        qk = torch.addcmul(qk * cos, qk.roll(self._size // 2, -1), sin)
        return qk[:, :num_q], qk[:, num_q:], v

    def _attend_to_rows(self, mask_B1T: torch.Tensor) -> Attend:
        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys, values = self._cache.write(layer, k[:, :, None], v[:, :, None])
            grouped = q.reshape(-1, self._num_q // self._num_kv, self._size) * self._scale
            scores = torch.bmm(grouped, keys.flatten(0, 1).transpose(1, 2))
            scores.view(q.shape[0], self._num_q, -1).add_(mask_B1T)
            weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
            return torch.bmm(weights, values.flatten(0, 1)).view(q.shape[0], -1)

        return attend

    def _attend_causally(self, prompts: int, length: int) -> Attend:
        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (t.view(prompts, length, -1, self._size).transpose(1, 2) for t in (q, k, v))
            self._cache.write(layer, k, v)
            repeats = self._num_q // self._num_kv
            if repeats > 1:
                k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self._scale)
            return out.transpose(1, 2).reshape(prompts * length, -1)

        return attend


def _normed(x: torch.Tensor, norm: Any) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)


def _fuse(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    norms = [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
    return _Layer(
        norm=layer.input_layernorm,
        qkv=_stack([p.weight for p in qkv]),
        qkv_bias=None if qkv[0].bias is None else _stack([p.bias for p in qkv]),
        qk_norm=_stack([n.weight for n in norms]).view(2, -1) if norms else None,
        qk_eps=norms[0].variance_epsilon if norms else 0.0,
        out=attention.o_proj,
        mlp_norm=layer.post_attention_layernorm,
        gate_up=_stack([mlp.gate_proj.weight, mlp.up_proj.weight]),
        gate_up_bias=None if mlp.gate_proj.bias is None else _stack([mlp.gate_proj.bias, mlp.up_proj.bias]),
        down=mlp.down_proj,
    )


def _stack(parameters: list[nn.Parameter]) -> torch.Tensor:
    """One tensor with the parameters below each other; they become views of it, so copying into them fills it."""
    whole = torch.cat([p.detach() for p in parameters])
    for parameter, part in zip(parameters, whole.split([p.shape[0] for p in parameters]), strict=True):
        parameter.data = part
    return whole


def _rotary_tables(body: Any, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin [length, D]: rotate(x) = x cos + roll(x, D/2) sin', sin' negative in the first half."""
    positions = torch.arange(length, device=body.embed_tokens.weight.device)[None]
    cos, sin = body.rotary_emb(body.embed_tokens.weight[:1, None], positions)
    half = sin.shape[-1] // 2
    return cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)
