"""Cost of a train step on the quick-start shape, layouts against each other: `python tests/bench/trainer.py [--steps 12]`

    shared_prompt   one row per group                              what `trainer.layout = "auto"` picks
    padded          one row per answer, sorted by length
    naive           the whole batch in one padded forward pass, log-softmax of all logits, groups without signal too

All three in one process, alternating, so that a busy machine slows them alike. CPU seconds of this process, one thread.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from services.trainer.step import Learner
from stretto import recipe
from stretto.v1 import types_pb2 as pb

NUM_GROUPS, GROUP_SIZE, PROMPT_TOKENS, VOCAB_SIZE = 32, 8, 17, 337


def make_model(folder: Path) -> None:
    """The quick start's architecture with random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        intermediate_size=192,
        vocab_size=VOCAB_SIZE,
        tie_word_embeddings=True,
        initializer_range=0.06,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def make_groups(seed: int, solved: float) -> list[pb.Group]:
    """Random answers of 8 to 14 tokens, each right with probability `solved`."""
    random = np.random.default_rng(seed)
    groups: list[pb.Group] = []
    for i in range(NUM_GROUPS):
        prompt = random.integers(0, VOCAB_SIZE, PROMPT_TOKENS, np.int32).tobytes()
        group = pb.Group(prompt=pb.Prompt(uid=f"d{i}", token_ids=prompt))
        group.prompt.sampling.temperature = 1.0
        for index in range(GROUP_SIZE):
            n = int(random.integers(8, 15))
            group.trajectories.add(
                prompt_uid=f"d{i}",
                index=index,
                token_ids=random.integers(0, VOCAB_SIZE, n, np.int32).tobytes(),
                logprobs=(-random.random(n)).astype(np.float32).tobytes(),
                spans=[pb.VersionSpan(version=0, num_tokens=n)],
                finish_reason=pb.FINISH_REASON_STOP,
                reward=float(random.random() < solved),
            )
        groups.append(group)
    return groups


def naive_step(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, groups: list[pb.Group]) -> None:
    """What one writes first."""
    rows, masks, advantages = [], [], []
    for group in groups:
        prompt = np.frombuffer(group.prompt.token_ids, "<i4").tolist()
        rewards = torch.tensor([t.reward for t in group.trajectories])
        for t, advantage in zip(group.trajectories, (rewards - rewards.mean()) / (rewards.std() + 1e-4), strict=True):
            answer = np.frombuffer(t.token_ids, "<i4").tolist()
            rows.append(torch.tensor(prompt + answer))
            masks.append(torch.tensor([0.0] * len(prompt) + [1.0] * len(answer)))
            advantages.append(advantage)
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)[:, 1:]
    logprobs = model(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    ratio = (logprobs - logprobs.detach()).exp()
    (-(ratio * torch.stack(advantages)[:, None] * mask).sum() / mask.sum()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def learner_step(folder: Path, layout: str) -> Callable[[list[pb.Group], int], dict[str, float]]:
    settings = recipe.build(
        {"model": {"path": folder}, "data": {"train": "unused.jsonl"}, "trainer": {"layout": layout, "learning_rate": 5e-4}}
    )
    learner = Learner(settings, folder, "cpu")
    return lambda groups, step: learner.train(groups, step).metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12, help="measured steps of each")
    parser.add_argument("--solved", type=float, default=0.85, help="chance that an answer is right; 0.85 leaves about 23 of 32 groups")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder)
        model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
        steps: dict[str, Callable[[list[pb.Group], int], object]] = {
            "shared_prompt": learner_step(folder, "shared_prompt"),
            "padded": learner_step(folder, "padded"),
            "naive": lambda groups, _: naive_step(model, optimizer, groups),
        }
        costs: dict[str, list[float]] = {kind: [] for kind in steps}
        for step in range(1, args.steps + 3):
            groups = make_groups(step, args.solved)
            for kind, run in steps.items():
                begin_s = time.process_time()
                run(groups, step)
                costs[kind].append(time.process_time() - begin_s)
    best = min(costs["shared_prompt"][2:])
    for kind, seconds in costs.items():
        low, middle = min(seconds[2:]), statistics.median(seconds[2:])
        sys.stdout.write(f"{kind:14} {low * 1e3:7.1f} ms best  {middle * 1e3:7.1f} ms median  x{low / best:.2f}\n")


if __name__ == "__main__":
    main()
