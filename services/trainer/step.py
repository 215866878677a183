"""One train step: groups in, new weights out.

    groups --read--> arrays --advantages, signal--> Batch --plan--> micro-batches
                                                               |
       [reference log-probs: base weights, no gradient]        |  kl_coef > 0 only
       [proximal log-probs: current weights, no gradient]      |  minibatches > 1 only; with one they are the current ones, detached
                                                               v
       for each mini-batch:  for each micro-batch: score -> loss / tokens of the mini-batch -> backward      then one optimizer step

There is no randomness in here: weights, optimizer state, groups and step number decide the next weights.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.trainer.advantage import has_signal
from services.trainer.batch import Batch, GroupArrays, Ints, Layout, assemble, make_batch, minibatches, plan, read_group
from services.trainer.loss import Objective, token_losses, token_metrics
from services.trainer.model import Inputs, Policy, choose_layout, load, make_inputs
from services.trainer.optimizer import Optimizer, Update, learning_rate_at
from stretto.errors import RefusedError
from stretto.recipe import Recipe
from stretto.v1.types_pb2 import Group

TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "chat_template*")
"""Copied beside saved weights, so that the folder is complete."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a train step says about itself."""

    metrics: dict[str, float]
    """Scalars by name; those of the update (loss, entropy, ratio_*, …) are missing when no group had signal."""


class Learner:
    """The model, its optimizer and the train step. One thread at a time."""

    def __init__(self, recipe: Recipe, model_path: Path, device: str) -> None:
        """Weights are those in `model_path`, the base weights of the run; `load_state` replaces them on a resume."""
        t = recipe.trainer
        self._settings, self._model_path, self._device = t, model_path, device
        self._dtype = getattr(torch, recipe.model.dtype)
        self._model = load(model_path, device)
        self._policy = Policy(self._model, device, self._dtype)
        self._reference = (
            Policy(load(model_path, device).requires_grad_(requires_grad=False), device, self._dtype) if t.kl_coef > 0 else None
        )
        self._layout: Layout = choose_layout(self._policy, t.layout)
        self._optimizer = Optimizer(self._model.named_parameters(), t)
        self._objective = Objective(
            clip_low=t.clip_low, clip_high=t.clip_high, correction=t.correction, correction_cap=t.correction_cap, kl_coef=t.kl_coef
        )
        self._published: dict[str, torch.Tensor] | None = None
        """The cast weights of `tensors`, until the next train step."""

    # -------------------------------------------------------------------------------------------------------- train

    def train(self, groups: Sequence[Group], step: int) -> StepReport:
        """Turn version step - 1 into version step. Raises CorruptError for groups whose parts do not fit."""
        arrays = [read_group(group) for group in groups]
        batch = make_batch(arrays, self._settings.advantage)
        metrics = group_metrics(arrays, batch, version=step - 1)
        metrics["learning_rate"] = learning_rate_at(step, self._settings)
        metrics |= self._update(batch, metrics["learning_rate"])
        return StepReport(metrics)

    def _update(self, batch: Batch, learning_rate: float) -> dict[str, float]:
        self._published = None
        parts = [self._lay_out(batch, answers) for answers in minibatches(batch, self._settings.minibatches)]
        if not parts:
            return {"updates": 0.0, "updates_skipped": 0.0}
        everything = [inputs for part in parts for inputs in part]
        behaviour_T = torch.from_numpy(batch.behaviour_T).to(self._device)
        advantage_T = torch.from_numpy(batch.advantage_T).to(self._device)
        reference_T = self._score_all(self._reference, everything, batch.num_tokens) if self._reference else None
        proximal_T = self._score_all(self._policy, everything, batch.num_tokens) if len(parts) > 1 else None
        current_T, entropy_T, loss_T = (torch.empty(batch.num_tokens, device=self._device) for _ in range(3))
        updates: list[Update] = []
        for part in parts:
            num_tokens = sum(inputs.token_t.numel() for inputs in part)
            for inputs in part:
                token_t = inputs.token_t
                current_t, entropy_T[token_t] = self._policy.score(inputs)
                proximal_t = current_t.detach() if proximal_T is None else proximal_T[token_t]
                reference_t = None if reference_T is None else reference_T[token_t]
                loss_t = token_losses(current_t, proximal_t, behaviour_T[token_t], advantage_T[token_t], self._objective, reference_t)
                (loss_t.sum() / num_tokens).backward()
                current_T[token_t], loss_T[token_t] = current_t.detach(), loss_t.detach()
            updates.append(self._optimizer.step(learning_rate))
        proximal_T = current_T if proximal_T is None else proximal_T
        scalars = token_metrics(current_T, proximal_T, behaviour_T, advantage_T, self._objective, reference_T)
        scalars |= {"loss": loss_T.mean(), "entropy": entropy_T.mean()}
        values = torch.stack(list(scalars.values())).tolist()  # one wait for the device
        return dict(zip(scalars, values, strict=True)) | update_metrics(updates) | {"tokens_forward": _num_places(everything)}

    def _lay_out(self, batch: Batch, answers: Ints) -> list[Inputs]:
        """The micro-batches of one mini-batch, on the device."""
        packed = plan(batch, answers, self._layout, self._settings.micro_batch_tokens, self._policy.parity_tokens)
        return [make_inputs(assemble(batch, rows), batch.temperature_T, self._device, torch.float32) for rows in packed]

    @torch.no_grad()
    def _score_all(self, policy: Policy, inputs: Sequence[Inputs], num_tokens: int) -> torch.Tensor:
        """Log-probs of every token of the batch under `policy`, without gradient."""
        logprob_T = torch.empty(num_tokens, device=self._device)
        for each in inputs:
            logprob_T[each.token_t] = policy.score(each)[0]
        return logprob_T

    # -------------------------------------------------------------------------------------------------------- weights

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The weights to publish, in model.dtype: names of `state_dict()`, tied ones once (under their first name).

        A model of the same config.json takes them all with `load_state_dict(strict=False)` and has nothing left unset: what is missing
        is tied to what is there. In float32 they are the parameters themselves, else copies cast once a step; both are valid until
        the next `train` or `load_state`.
        """
        if self._published is None:
            self._published = {name: tensor.detach().to(self._dtype) for name, tensor in self._weights().items()}
        return self._published

    def _weights(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name, each once; live."""
        seen: set[int] = set()
        found: dict[str, torch.Tensor] = {}
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                found[name] = tensor
        return found

    def state(self) -> dict[str, Any]:
        """All that the next step depends on besides groups and step number: float32 weights and the optimizer's moments. Live tensors."""
        return {"weights": {name: tensor.detach() for name, tensor in self._weights().items()}, "optimizer": self._optimizer.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from `state`. Raises RefusedError, before anything is changed, when it is of another model."""
        weights, given = self._weights(), state["weights"]
        for name in sorted(set(weights) | set(given)):
            if name not in given or name not in weights or given[name].shape != weights[name].shape:
                raise RefusedError(
                    f"the checkpoint does not fit the model in '{self._model_path}': {name!r} is missing or has another shape"
                )
        self._optimizer.load_state(state["optimizer"])
        with torch.no_grad():
            for name, tensor in weights.items():
                tensor.copy_(given[name])
        self._published = None

    def save_pretrained(self, folder: Path, state: Mapping[str, Any] | None = None) -> None:
        """Write weights in model.dtype, configuration and tokenizer: a folder that transformers (and this trainer) loads.

        The weights are those of `state`, by default the present ones. With a copy of `state()` another thread may call this
        while the learner trains.
        """
        state = self.state() if state is None else state
        self._model.save_pretrained(folder, state_dict={name: tensor.to(self._dtype) for name, tensor in state["weights"].items()})
        config = folder / "config.json"  # transformers notes the masters' precision, not that of the tensors it was given
        config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": str(self._dtype).removeprefix("torch.")}, indent=2) + "\n")
        for pattern in TOKENIZER_FILES:
            for file in self._model_path.glob(pattern):
                shutil.copy(file, folder)


# ------------------------------------------------------------------------------------------------------------ metrics


def group_metrics(groups: Sequence[GroupArrays], batch: Batch, version: int) -> dict[str, float]:
    """What the batch of a step was made of, trained or not. `version` = that of the trainer before the step.

    A group's lag is the version minus the one that began it: once per group, however many versions drew its tokens.
    """
    rewards_R = np.concatenate([g.rewards_N for g in groups])
    lengths_R = np.concatenate([g.lengths_N for g in groups])
    accuracy_R = np.concatenate([g.accuracy_N for g in groups])
    lags = np.array([version - g.version_begin for g in groups])
    num_tokens = int(lengths_R.sum())
    found = {
        "num_groups": float(len(groups)),
        "num_groups_zero_variance": float(sum(not has_signal(g.rewards_N) for g in groups)),
        "reward_mean": float(rewards_R.mean()),
        "reward_std": float(rewards_R.std()),
        "response_tokens_mean": float(lengths_R.mean()),
        "response_tokens_max": float(lengths_R.max()),
        "response_cut_fraction": float(np.concatenate([g.is_cut_N for g in groups]).mean()),
        "lag_mean": float(lags.mean()),
        "lag_max": float(lags.max()),
        "token_age_mean": float(sum(int((version - g.versions_T).sum()) for g in groups) / max(1, num_tokens)),
        "tokens": float(num_tokens),
        "tokens_trained": float(batch.num_tokens),
    }
    if not np.isnan(accuracy_R).all():
        found["acc_mean"] = float(np.nanmean(accuracy_R))
    return found


def update_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Of the optimizer steps of one train step. The norm is their mean, and not finite if one of them was left out."""
    num_applied = sum(update.is_applied for update in updates)
    return {
        "grad_norm": math.fsum(update.grad_norm for update in updates) / len(updates),
        "updates": float(num_applied),
        "updates_skipped": float(len(updates) - num_applied),
    }


def _num_places(inputs: Sequence[Inputs]) -> float:
    """Places of all forward passes, padding included."""
    return float(sum(each.ids_BL.numel() for each in inputs))
