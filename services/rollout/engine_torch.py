"""The built-in engine: continuous batching of a transformers causal LM on one device, in plain PyTorch.

    add ---> waiting (FIFO) --admit--> rows 0..n-1 of the slot table and the KV cache --ended--> completions
                 ^                     |
                 +--- load_weights(policy "abort"): back to the head of the queue, to be prefilled under the new weights

    step     1 admit    identical prompt + prefix is prefilled once; its keys and values are copied to each of its rows
             2 decode   the rows that ran before: newest token in, logits out
             3 draw     one token per row, new rows from their prefill's logits
             4 record   one transfer to the host; ended rows are replaced by the last ones

    slots.py     table of rows (numpy)        kv.py   keys and values        forward.py   logits
    sampling.py  tokens and log-probs         B rows   P distinct prompts   L longest of them   V vocabulary

Random streams: the i-th token of an answer is drawn with uniform number i of the stream of (seed, id), so a run can be
repeated up to the rounding of batched arithmetic, wherever and with whomever the answer runs. Greedy needs no stream.
"""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from services.rollout import sampling
from services.rollout.engine import NO_VERSION, Completion, LoadPolicy, Request
from services.rollout.forward import make_forward
from services.rollout.kv import KVCache
from services.rollout.slots import Ended, Sequence, SlotTable
from stretto.errors import InvalidArgumentError, NotFoundError, RefusedError

PREFILL_TOKENS = 8192
"""Most padded tokens of one prefill pass (one longer prompt is a pass of its own): bounds its activations."""
ADMIT_SHARE = 8
"""New sequences are admitted when 1/8 of the slots is free (or all that wait fit): a prefill costs about a decode step."""


class TorchEngine:
    """See services.rollout.engine.Engine for the contract of each public method."""

    def __init__(self, model_path: Path, *, device: str, dtype: torch.dtype, slots: int, max_len: int) -> None:
        """Builds the architecture of `model_path`/config.json, without weights.

        max_len: most tokens of prompt + budget; lowered to what the model has positions for. Raises InvalidArgumentError
        for a model whose layers are not all full attention.
        """
        self._device = torch.device(device)
        self._model = _architecture(model_path, self._device, dtype)
        self._parameters = _parameters(self._model)
        self._eos = _end_of_sequence_ids(model_path, self._model)
        self.slots, self.version = slots, NO_VERSION
        self.generated_tokens = 0
        self.prefilled_tokens = 0
        """Without padding; a prompt shared by a group counts once."""
        config: Any = self._model.config.get_text_config()
        self.max_len = min(max_len, getattr(config, "max_position_embeddings", None) or max_len)
        self._vocabulary: int = config.vocab_size
        self._cache = KVCache(config.num_hidden_layers, slots, self.max_len, self._device)
        self.forward = make_forward(self._model, self._cache)
        self._table = SlotTable(slots)
        self._waiting: deque[Sequence] = deque()
        self._ended: list[Completion] = []

    # ---- state

    @property
    def num_running(self) -> int:
        return self._table.n

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def has_work(self) -> bool:
        return bool(self._table.n or self._waiting or self._ended)

    def progress(self, id: str) -> Completion:
        row = self._table.rows.get(id)
        if row is not None:
            return self._table.sequence(row, self.version).completion("aborted")
        for sequence in self._waiting:
            if sequence.request.id == id:
                return sequence.completion("aborted")
        raise NotFoundError(f"request {id} is neither waiting nor running")

    # ---- requests in and out

    def add(self, requests: Items[Request]) -> None:
        used = self._table.rows.keys() | {s.request.id for s in self._waiting}
        for request in requests:
            if request.id in used:
                raise InvalidArgumentError(f"request {request.id} is already waiting or running; ids must be unique")
            used.add(request.id)
        for request in requests:
            error = self._refusal(request)
            sequence = Sequence.of(request)
            if error:
                self._ended.append(sequence.completion("failed", error))
            elif request.prefix_tokens and request.prefix_tokens[-1] in self._stops(request):
                self._ended.append(sequence.completion("stop"))
            elif len(request.prefix_tokens) >= request.max_new_tokens:
                self._ended.append(sequence.completion("length"))
            else:
                self._waiting.append(sequence)

    def abort(self, ids: Iterable[str] | None = None) -> list[Completion]:
        wanted = self._table.rows.keys() | {s.request.id for s in self._waiting} if ids is None else set(ids)
        rows = [row for id, row in self._table.rows.items() if id in wanted]
        stopped = [self._table.sequence(row, self.version) for row in rows]
        stopped += [s for s in self._waiting if s.request.id in wanted]
        self._waiting = deque(s for s in self._waiting if s.request.id not in wanted)
        self._remove(rows)
        return [s.completion("aborted") for s in stopped]

    def _stops(self, request: Request) -> frozenset[int]:
        return self._eos | request.stop_token_ids

    def _refusal(self, r: Request) -> str:
        """Why this request can never run; empty if it can."""
        longest = len(r.prompt) + r.max_new_tokens
        counts = (len(r.prefix_tokens), len(r.prefix_logprobs), sum(n for _, n in r.prefix_spans))
        if not r.prompt:
            return "the prompt is empty"
        if longest > self.max_len:
            return f"{len(r.prompt)} prompt + {r.max_new_tokens} new tokens = {longest}, more than max_len = {self.max_len}"
        if (
            not 0
            <= min(min(r.prompt), min(r.prefix_tokens, default=0))
            <= max(max(r.prompt), max(r.prefix_tokens, default=0))
            < self._vocabulary
        ):
            return f"a token id of prompt or prefix is outside the vocabulary of {self._vocabulary}"
        if len(set(counts)) > 1 or r.max_new_tokens < 1:
            return f"prefix of {counts[0]} tokens, {counts[1]} log-probs, spans of {counts[2]} tokens, budget {r.max_new_tokens}"
        if not (r.temperature == 0 or sampling.TEMPERATURE_MIN <= r.temperature < math.inf) or not 0 < r.top_p <= 1 or r.top_k < 0:
            return f"temperature {r.temperature}, top_p {r.top_p}, top_k {r.top_k} is no sampling distribution"
        return ""

    # ---- one step

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        if self.version == NO_VERSION:
            raise RefusedError("no weights are loaded yet; call load_weights before step")
        done, self._ended = self._ended, []
        old = self._table.n
        logits = [self._decode(old)] if old else []
        for groups in self._admitted():
            try:
                logits.append(self._prefill(groups))
            except RuntimeError as err:  # out of memory: those prompts fail, the running ones go on
                done += [s.completion("failed", f"prefill failed: {err}") for group in groups for s in group]
        if logits:
            drawn = self._draw(logits[0] if len(logits) == 1 else torch.cat(logits))
            done += self._finish(self._table.record(*drawn))
        return done

    def _admitted(self) -> Iterable[list[list[Sequence]]]:
        """Passes of groups of waiting sequences with the same tokens, as many as the free slots take; shortest first."""
        free = self.slots - self._table.n
        if free == 0 or (self._table.n and free < min(len(self._waiting), max(1, self.slots // ADMIT_SHARE))):
            return
        groups: dict[tuple[int, ...], list[Sequence]] = {}
        for _ in range(min(free, len(self._waiting))):
            sequence = self._waiting.popleft()
            groups.setdefault((*sequence.request.prompt, *sequence.tokens.tolist()), []).append(sequence)
        chunk: list[list[Sequence]] = []
        for tokens in sorted(groups, key=len):
            if chunk and (len(chunk) + 1) * len(tokens) > PREFILL_TOKENS:
                yield chunk
                chunk = []
            chunk.append(groups[tokens])
        if chunk:
            yield chunk

    def _prefill(self, groups: list[list[Sequence]]) -> torch.Tensor:
        """Gives each sequence a row and its cache; next-token logits of the new rows, in order."""
        texts = [(*g[0].request.prompt, *g[0].tokens.tolist()) for g in groups]
        lengths = np.array([len(t) for t in texts])
        ids_PL = np.zeros((len(texts), int(lengths.max())), dtype=np.int64)
        for row, text in zip(ids_PL, texts, strict=True):
            row[: len(text)] = text
        copies = [len(g) for g in groups]
        self._cache.at_prefill(self._table.n, copies, ids_PL.shape[1])
        logits_PV = self.forward.prefill(self._to_device(ids_PL), self._to_device(lengths - 1))
        self.prefilled_tokens += int(lengths.sum())
        for sequence in (s for g in groups for s in g):
            self._table.append(sequence, self._stops(sequence.request))
        return logits_PV.repeat_interleave(self._to_device(np.array(copies)), 0, output_size=sum(copies))

    def _decode(self, rows: int) -> torch.Tensor:
        positions = self._table.positions(rows)
        inputs = self._to_device(np.stack((self._table.last_tokens(rows), positions)))
        self._cache.at_decode(inputs[1], int(positions.max()))
        return self.forward.decode(inputs[0], inputs[1])

    def _draw(self, logits_BV: torch.Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        table = self._table
        uniform_B = self._to_device(sampling.uniforms(table.field("key"), table.field("length")))
        temperatures, top_p, top_k = table.field("temperature"), table.field("top_p"), table.field("top_k")
        same = (temperatures == temperatures[0]).all()
        temperature = float(temperatures[0]) if same else self._to_device(temperatures)
        truncation = (self._to_device(top_p), self._to_device(top_k)) if top_k.any() or (top_p < 1).any() else ()
        tokens_B, logprobs_B = sampling.draw(logits_BV, uniform_B, temperature, *truncation)
        self.generated_tokens += table.n
        return tokens_B.cpu().numpy(), logprobs_B.cpu().numpy()

    def _finish(self, ended: Ended) -> list[Completion]:
        if not ended:
            return []
        self._table.drop_last(ended.broken)
        take = [(row, "stop", "") for row in ended.stopped.tolist()] + [(row, "length", "") for row in ended.spent.tolist()]
        error = f"the logits under version {self.version} are not finite"
        take += [(row, "failed", error) for row in ended.broken.tolist()]
        done = [self._table.sequence(row, self.version).completion(cast(Any, finish), why) for row, finish, why in take]
        if ended.broken.size:
            self._cache.clear(self._to_device(ended.broken))
        self._remove([row for row, _, _ in take])
        return done

    @torch.inference_mode()
    def _remove(self, rows: list[int]) -> None:
        if not rows:
            return
        target, source = self._table.remove(rows)
        if target.size:
            self._cache.move(self._to_device(target), self._to_device(source))

    def _to_device(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    # ---- weights

    @torch.no_grad()
    def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor], policy: LoadPolicy) -> None:
        chosen = self._matched(version, tensors)
        for parameter, tensor in chosen:
            parameter.copy_(tensor)
        self._table.close_spans(self.version)
        self.version = version
        if policy == "abort":
            running = [self._table.sequence(row, version) for row in range(self._table.n)]
            self._remove(list(range(self._table.n)))
            self._waiting.extendleft(reversed(running))

    def _matched(self, version: int, tensors: Mapping[str, torch.Tensor]) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Each parameter with its tensor; raises before anything is copied."""
        names = {name for aliases, _ in self._parameters for name in aliases}
        wrong = [f"{name} is not a parameter of this model" for name in tensors if name not in names]
        chosen: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        for aliases, parameter in self._parameters:
            given = next((name for name in aliases if name in tensors), None)
            if given is None:
                wrong.append(f"{aliases[0]} is missing")
            elif tensors[given].shape != parameter.shape:
                wrong.append(f"{given} is {list(tensors[given].shape)} instead of {list(parameter.shape)}")
            else:
                chosen.append((parameter, tensors[given]))
        if wrong:
            more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
            raise InvalidArgumentError(
                f"weights of version {version} do not fit, version {self.version} stays: {'; '.join(wrong[:8])}{more}"
            )
        return chosen


# ---- construction


def _architecture(path: Path, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    config: Any = AutoConfig.from_pretrained(path)
    refused = f"the torch engine cannot run {path}: "
    if reason := _unsupported(config.get_text_config()):
        raise InvalidArgumentError(refused + reason)
    try:
        with device, no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    except ValueError as err:  # no causal LM of this kind, or one that cannot attend through SDPA
        raise InvalidArgumentError(f"{refused}{err}") from err
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise InvalidArgumentError(f"{refused}{type(model).__name__} takes no position_ids")
    model.tie_weights()  # no_init_weights leaves that out too
    return model.eval().requires_grad_(False)


def _unsupported(config: Any) -> str:
    """Why rows of keys and values with a full causal mask are not this model's state; empty if they are."""
    kinds: set[str] = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if kinds - {"full_attention"}:
        return f"its layers are of kinds {sorted(kinds)}, not all full_attention"
    if not kinds and window is not None and getattr(config, "use_sliding_window", True):
        return f"its attention has a sliding window of {window} tokens"
    if not getattr(config, "num_attention_heads", None):
        return "it has no attention layers"
    return ""


def _parameters(model: PreTrainedModel) -> list[tuple[list[str], torch.nn.Parameter]]:
    """Each parameter once, with all its names: tied weights have several, and any of them may be given."""
    found: dict[int, tuple[list[str], torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), ([], parameter))[0].append(name)
    return list(found.values())


def _end_of_sequence_ids(path: Path, model: PreTrainedModel) -> frozenset[int]:
    """From generation_config.json if there is one, else from config.json."""
    source: Any = GenerationConfig.from_pretrained(path) if (path / "generation_config.json").exists() else model.config
    ids: int | list[int] | None = source.eos_token_id
    return frozenset(() if ids is None else [ids] if isinstance(ids, int) else ids)
