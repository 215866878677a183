"""The learner as a whole: a train step against a plain float64 one, and what must not change it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from services.trainer.step import Learner
from stretto import recipe
from stretto.errors import CorruptError, RefusedError
from stretto.v1 import types_pb2 as pb

VOCAB_SIZE = 24
LINEAR: dict[str, Any] = {"adam_eps": 10.0, "learning_rate": 1.0, "grad_clip": 1e9}
"""An epsilon far above the gradients makes AdamW's steps proportional to them, so that weights compare as gradients would."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    config = Qwen3Config(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=24,
        vocab_size=VOCAB_SIZE,
        tie_word_embeddings=True,
        initializer_range=0.3,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(made)
    (made / "tokenizer.json").write_text("{}")
    return made


def make_learner(folder: Path, **settings: Any) -> Learner:
    """`dtype` is the model's, everything else the trainer's."""
    dtype = settings.pop("dtype", "float32")
    tree = {"model": {"path": folder, "dtype": dtype}, "data": {"train": "unused.jsonl"}, "trainer": settings}
    return Learner(recipe.build(tree), folder, "cpu")


def make_groups(rewards: Iterable[list[float]], seed: int = 0) -> list[pb.Group]:
    """One group per list of rewards; answers of 1 to 6 tokens, begun by version 1 and ended by version 2."""
    random = np.random.default_rng(seed)
    groups = []
    for i, group_rewards in enumerate(rewards):
        prompt = random.integers(0, VOCAB_SIZE, int(random.integers(2, 7)), np.int32)
        group = pb.Group(prompt=pb.Prompt(uid=f"d{i}", token_ids=prompt.tobytes()), version_begin=1)
        group.prompt.sampling.temperature = 1.0
        for index, reward in enumerate(group_rewards):
            n = int(random.integers(1, 7))
            group.trajectories.add(
                prompt_uid=f"d{i}",
                index=index,
                token_ids=random.integers(0, VOCAB_SIZE, n, np.int32).tobytes(),
                logprobs=random.uniform(-5, -1, n).astype(np.float32).tobytes(),
                spans=[pb.VersionSpan(version=v, num_tokens=k) for v, k in ((1, 1), (2, n - 1)) if k],
                finish_reason=pb.FINISH_REASON_STOP,
                reward=reward,
            )
        groups.append(group)
    return groups


SOME = [[1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.5], [1.0, 0.0], [0.25, 1.0, 0.0]]


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.state()["weights"].items()}


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], base: dict[str, torch.Tensor], tolerance: float) -> None:
    """The changes from `base` agree to `tolerance` of the largest one."""
    largest = max(float((want[name] - base[name]).abs().max()) for name in base)
    assert largest > 1e-4
    for name in base:
        assert float((got[name] - want[name]).abs().max()) < tolerance * largest, name


# ---- against a plain train step


def slow_logprobs(model: Any, group: pb.Group, index: int) -> torch.Tensor:
    prompt, answer = (np.frombuffer(x, "<i4").tolist() for x in (group.prompt.token_ids, group.trajectories[index].token_ids))
    logits = model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0]
    return torch.stack([logits[len(prompt) + i - 1].log_softmax(-1)[token] for i, token in enumerate(answer)])


def slow_step(
    folder: Path, groups: list[pb.Group], kl_coef: float, minibatches: int = 1
) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """A train step by the formulas, token by token in float64: (new weights, gradient norms, all ratios)."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    start = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), eps=10.0, weight_decay=0)
    norms, ratios, size = [], [], len(groups) // minibatches
    for begin in range(0, len(groups), size):
        losses = []
        for group in groups[begin : begin + size]:
            rewards = [t.reward for t in group.trajectories]
            mean = sum(rewards) / len(rewards)
            std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
            for index, t in enumerate(group.trajectories):
                advantage = (t.reward - mean) / (std + 1e-4)
                old_T, base_T = np.frombuffer(t.logprobs, "<f4").tolist(), slow_logprobs(start, group, index)
                for current, old, base in zip(slow_logprobs(model, group, index), old_T, base_T, strict=True):
                    weight = min(math.exp(base.item() - old), 2.0)
                    ratio = (current - base).exp()
                    ratios.append(ratio.item())
                    kl = (base - current).exp() - 1 - (base - current)
                    losses.append(-torch.min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage) * weight + kl_coef * kl)
        (torch.stack(losses).sum() / len(losses)).backward()
        norms.append(math.sqrt(sum(float((p.grad**2).sum()) for p in model.parameters())))
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}, norms, ratios


@pytest.mark.parametrize("layout", ["padded", "shared_prompt"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
def test_a_step_equals_the_formulas_token_by_token(folder: Path, layout: str, kl_coef: float) -> None:
    learner = make_learner(folder, layout=layout, kl_coef=kl_coef, **LINEAR)
    base, groups = weights(learner), make_groups(SOME)
    metrics = learner.train(groups, 1).metrics
    want, norms, _ = slow_step(folder, groups, kl_coef)
    assert_close(weights(learner), want, base, 1e-3)
    assert metrics["grad_norm"] == pytest.approx(norms[0], rel=1e-4)
    assert metrics["ratio_min"] == metrics["ratio_max"] == 1
    assert ("kl_reference" in metrics) == (kl_coef > 0)


def test_the_kl_term_pulls_back_to_the_base_weights(folder: Path) -> None:
    free, held = make_learner(folder, learning_rate=0.01), make_learner(folder, learning_rate=0.01, kl_coef=10.0)
    groups = make_groups(SOME)
    for step in range(1, 6):
        free.train(groups, step)
        held.train(groups, step)
    base = weights(make_learner(folder))
    moved, stayed = (sum(float(((weights(x)[n] - base[n]) ** 2).sum()) for n in base) for x in (free, held))
    assert stayed < moved
    assert held.train(groups, 6).metrics["kl_reference"] > 0


# ---- what must not matter


@pytest.mark.parametrize("minibatches", [1, 2])
def test_cutting_into_micro_batches_changes_nothing(folder: Path, minibatches: int) -> None:
    groups = make_groups(SOME)
    found = []
    for layout, limit in (("padded", 10_000), ("padded", 12), ("shared_prompt", 10_000), ("shared_prompt", 12)):
        learner = make_learner(folder, layout=layout, micro_batch_tokens=limit, minibatches=minibatches, **LINEAR)
        base = weights(learner)
        metrics = learner.train(groups, 1).metrics
        found.append((weights(learner), metrics))
    for got, metrics in found[1:]:
        assert_close(got, found[0][0], base, 1e-3)
        assert {k: v for k, v in metrics.items() if k != "tokens_forward"} == pytest.approx(
            {k: v for k, v in found[0][1].items() if k != "tokens_forward"}, rel=1e-3, abs=1e-5
        )


def test_groups_without_signal_change_nothing_but_the_counts(folder: Path) -> None:
    groups, flat = make_groups(SOME), make_groups([[1.0] * 4, [0.0] * 2], seed=9)
    alone, mixed = make_learner(folder), make_learner(folder)
    a, m = alone.train(groups, 1).metrics, mixed.train([flat[0], *groups, flat[1]], 1).metrics
    assert all(torch.equal(x, y) for x, y in zip(weights(alone).values(), weights(mixed).values(), strict=True))
    assert (m["num_groups"], m["num_groups_zero_variance"]) == (6, 2)
    assert (a["num_groups"], a["num_groups_zero_variance"]) == (4, 0)
    assert m["loss"] == a["loss"]
    assert m["tokens_trained"] == a["tokens_trained"] == a["tokens"]


def test_a_batch_without_any_signal_is_no_update(folder: Path) -> None:
    learner = make_learner(folder)
    learner.train(make_groups(SOME), 1)
    before = weights(learner)
    metrics = learner.train(make_groups([[1.0] * 3, [0.0] * 3]), 2).metrics
    assert metrics["updates"] == metrics["updates_skipped"] == 0
    assert "loss" not in metrics
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(learner).items())


def test_a_flat_group_has_no_gradient_to_lose(folder: Path) -> None:
    # what dropping relies on: equal rewards give advantages of exactly zero, and those a gradient of exactly zero
    from services.trainer.advantage import advantages
    from services.trainer.loss import Objective, token_losses

    advantage = torch.from_numpy(advantages(np.full(3, 0.1), "grpo"))
    current = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    token_losses(current, current, current.detach() - 0.5, advantage, Objective()).sum().backward()
    assert current.grad is not None
    assert current.grad.tolist() == [0, 0, 0]


# ---- several optimizer steps a batch


@pytest.mark.parametrize("layout", ["padded", "shared_prompt"])
def test_minibatches_are_optimizer_steps_clipped_around_the_policy_at_the_start(folder: Path, layout: str) -> None:
    groups = make_groups(SOME)
    learner = make_learner(folder, layout=layout, minibatches=2, kl_coef=0.2, **LINEAR)
    base = weights(learner)
    metrics = learner.train(groups, 1).metrics
    want, norms, ratios = slow_step(folder, groups, kl_coef=0.2, minibatches=2)
    assert_close(weights(learner), want, base, 1e-3)
    assert metrics["updates"] == 2
    assert metrics["grad_norm"] == pytest.approx(sum(norms) / 2, rel=1e-4)
    assert max(ratios) > 1.28  # so that the clip had something to do
    assert metrics["ratio_max"] == pytest.approx(max(ratios), rel=1e-4)
    assert metrics["ratio_min"] == pytest.approx(min(ratios), rel=1e-4)


def test_a_gradient_that_is_not_finite_is_left_out_and_counted(folder: Path) -> None:
    learner = make_learner(folder)
    state = copy.deepcopy(learner.state())
    state["weights"]["model.norm.weight"][0] = math.inf
    learner.load_state(state)
    before = weights(learner)
    metrics = learner.train(make_groups(SOME), 1).metrics
    assert (metrics["updates"], metrics["updates_skipped"]) == (0, 1)
    assert not math.isfinite(metrics["grad_norm"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(learner).items())


# ---- learning


def test_training_makes_rewarded_answers_likelier_and_the_others_less_likely(folder: Path) -> None:
    learner = make_learner(folder, learning_rate=0.01)
    groups = make_groups([[1.0, 0.0]])
    model: Any = learner._policy.model
    with torch.no_grad():
        before = [slow_logprobs(model, groups[0], i).sum().item() for i in (0, 1)]
        for step in range(1, 6):
            with torch.enable_grad():
                learner.train(groups, step)
        after = [slow_logprobs(model, groups[0], i).sum().item() for i in (0, 1)]
    assert after[0] > before[0] + 1
    assert after[1] < before[1] - 1


# ---- metrics


def test_c13_lag_is_counted_once_per_group_and_age_per_token(folder: Path) -> None:
    groups = make_groups(SOME)
    groups[0].version_begin = 0
    metrics = make_learner(folder).train(groups, 4).metrics  # the trainer is at version 3
    assert metrics["lag_max"] == 3
    assert metrics["lag_mean"] == pytest.approx((3 + 2 + 2 + 2) / 4)
    lengths = [len(t.token_ids) // 4 for g in groups for t in g.trajectories]
    assert metrics["token_age_mean"] == pytest.approx(sum(2 + (n - 1) for n in lengths) / sum(lengths))
    assert metrics["tokens"] == sum(lengths)


def test_rewards_and_accuracies_are_averaged_over_answers(folder: Path) -> None:
    groups = make_groups([[1.0, 0.0, 0.0], [3.0, 0.0]])
    learner = make_learner(folder)
    assert "acc_mean" not in learner.train(groups, 1).metrics
    for answer, acc in zip(groups[0].trajectories, (1.0, 0.0, 0.5), strict=True):
        answer.reward_extras["acc"] = acc
    groups[1].trajectories[0].finish_reason = pb.FINISH_REASON_LENGTH
    metrics = learner.train(groups, 2).metrics
    assert metrics["reward_mean"] == pytest.approx(0.8)
    assert metrics["reward_std"] == pytest.approx(np.std([1, 0, 0, 3, 0]))
    assert metrics["acc_mean"] == pytest.approx(0.5)
    assert metrics["response_cut_fraction"] == pytest.approx(0.2)


def test_a_corrupt_group_is_refused_before_anything_changes(folder: Path) -> None:
    learner = make_learner(folder)
    before, groups = weights(learner), make_groups(SOME)
    groups[2].trajectories[0].logprobs = b""
    with pytest.raises(CorruptError, match="d2/0"):
        learner.train(groups, 1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(learner).items())


# ---- weights for others


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_published_tensors_are_the_models_own_names_once_and_rebuild_it_fully(folder: Path, dtype: str) -> None:
    learner = make_learner(folder, dtype=dtype, learning_rate=0.05)
    learner.tensors()
    learner.train(make_groups(SOME), 1)
    published = learner.tensors()
    assert {tensor.dtype for tensor in published.values()} == {getattr(torch, dtype)}
    assert not any(tensor.requires_grad for tensor in published.values())
    assert "lm_head.weight" not in published
    other: Any = AutoModelForCausalLM.from_config(learner._policy.model.config)
    assert set(published) == {name for name, _ in other.named_parameters()}
    unset = other.load_state_dict(published, strict=False)
    assert unset.unexpected_keys == []
    for name, tensor in learner._policy.model.state_dict().items():
        assert torch.equal(other.state_dict()[name].to(getattr(torch, dtype)), tensor.to(getattr(torch, dtype))), name


def test_the_cast_is_made_once_a_version(folder: Path) -> None:
    learner = make_learner(folder, dtype="bfloat16")
    first = learner.tensors()
    assert learner.tensors() is first
    learner.train(make_groups(SOME), 1)
    assert learner.tensors() is not first


def test_a_resumed_learner_goes_on_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"learning_rate": 0.01, "steps": 10, "schedule": "cosine", "warmup_steps": 2, "kl_coef": 0.1}
    through, first = make_learner(folder, **settings), make_learner(folder, **settings)
    for learner, steps in ((through, (1, 2, 3, 4)), (first, (1, 2))):
        for step in steps:
            learner.train(make_groups(SOME, seed=step), step)
    torch.save(first.state(), tmp_path / "state.pt")
    second = make_learner(folder, **settings)
    second.load_state(torch.load(tmp_path / "state.pt", weights_only=True))
    for step in (3, 4):
        second.train(make_groups(SOME, seed=step), step)
    assert all(torch.equal(x, y) for x, y in zip(weights(through).values(), weights(second).values(), strict=True))


def test_the_state_of_another_model_is_refused_and_nothing_changes(folder: Path) -> None:
    learner = make_learner(folder)
    before, state = weights(learner), copy.deepcopy(learner.state())
    state["weights"]["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(RefusedError, match=r"model\.norm\.weight"):
        learner.load_state(state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(learner).items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_folder_is_complete_and_loads_as_the_published_weights(folder: Path, tmp_path: Path, dtype: str) -> None:
    learner = make_learner(folder, dtype=dtype, learning_rate=0.05)
    learner.train(make_groups(SOME), 1)
    learner.save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").exists()
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == getattr(torch, dtype)
    for name, tensor in learner.tensors().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    again = make_learner(tmp_path)
    assert set(again.tensors()) == set(learner.tensors())
    assert learner._policy.model.dtype == torch.float32
