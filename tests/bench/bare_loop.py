"""The reference: the same engine, learner, model, data and reward in two bare processes with a queue of one batch between.

    OMP_NUM_THREADS=1 python -m tests.bench.bare_loop RECIPE [section.key=value ...]     prints one JSON object

One process generates batch after batch with the newest weights it has been sent, and scores in place; the other trains and sends
weights. No ledger, no gRPC, no store, no verification, no recovery, nothing written to disk: what a service costs is the difference.
The model and data must have been made (the benchmark makes them).
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing as mp
import os
import queue
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stretto import recipe as recipes
from stretto.recipe import Recipe

WARM_STEPS = 5
"""First steps that are not measured: imports, allocations, an empty queue."""
QUEUE_S = 120.0
"""Longest wait for the other process."""


def generate(recipe: Recipe, batches: Any, weights: Any) -> None:
    """Child process: endless batches of scored groups, each a list of serialised Group messages."""
    import torch
    from transformers import AutoTokenizer

    from services.rollout.engine_torch import TorchEngine
    from stretto.rewards import resolve

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(recipe.model_path)
    reward = resolve(recipe.reward.function)
    engine = TorchEngine(recipe.model_path, device="cpu", dtype=torch.float32, slots=recipe.rollout.slots, max_len=256)
    rows = [json.loads(line) for line in recipe.train_path.read_text().splitlines()]
    prompts = tokenizer([row["prompt"] for row in rows], add_special_tokens=False)["input_ids"]
    version, state = weights.get(timeout=QUEUE_S)
    engine.load_weights(version, _tensors(state), "in_flight")
    for step in range(10**9):
        try:
            version, state = weights.get_nowait()
            engine.load_weights(version, _tensors(state), "in_flight")
        except queue.Empty:
            pass
        chosen = [(step * recipe.scheduler.batch_groups + i) % len(rows) for i in range(recipe.scheduler.batch_groups)]
        done = _answers(engine, [prompts[i] for i in chosen], recipe, step)
        batches.put(
            list(_groups(done, [rows[i] for i in chosen], [prompts[i] for i in chosen], recipe, tokenizer, reward)), timeout=QUEUE_S
        )


def _tensors(state: dict[str, Any]) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(array) for name, array in state.items()}


def _answers(engine: Any, prompts: list[list[int]], recipe: Recipe, step: int) -> dict[str, Any]:
    from services.rollout.engine import Request

    s = recipe.sampling
    engine.add(
        [
            Request(f"{g}/{i}", prompt, s.max_new_tokens, s.temperature, s.top_p, s.top_k, seed=step * 1000 + g)
            for g, prompt in enumerate(prompts)
            for i in range(s.group_size)
        ]
    )
    done: dict[str, Any] = {}
    while engine.has_work():
        done.update((c.id, c) for c in engine.step())
    return done


def _groups(
    done: dict[str, Any], rows: list[Any], prompts: list[list[int]], recipe: Recipe, tokenizer: Any, reward: Any
) -> Iterator[bytes]:
    import numpy as np

    from stretto.v1 import types_pb2 as pb

    n = recipe.sampling.group_size
    texts = tokenizer.batch_decode([done[f"{g}/{i}"].tokens for g in range(len(rows)) for i in range(n)], skip_special_tokens=True)
    for g, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        group = pb.Group(prompt=pb.Prompt(uid=str(g), token_ids=np.array(prompt, "<i4").tobytes(), group_size=n))
        group.prompt.sampling.temperature = recipe.sampling.temperature
        for i in range(n):
            c = done[f"{g}/{i}"]
            scored = reward(response=texts[g * n + i], ground_truth=row["ground_truth"], data_source="", prompt="", extra={})
            group.trajectories.append(
                pb.Trajectory(
                    index=i,
                    token_ids=c.tokens.tobytes(),
                    logprobs=c.logprobs.tobytes(),
                    spans=[pb.VersionSpan(version=v, num_tokens=k) for v, k in c.spans],
                    finish_reason=pb.FINISH_REASON_STOP if c.finish == "stop" else pb.FINISH_REASON_LENGTH,
                    reward=scored["reward"] if isinstance(scored, dict) else scored,
                )
            )
        group.version_begin = done[f"{g}/0"].spans[0][0]
        yield group.SerializeToString()


def run(recipe: Recipe) -> dict[str, float]:
    """Train recipe.trainer.steps steps; completions per second and shares after the first WARM_STEPS."""
    import torch

    from services.trainer.step import Learner
    from stretto.v1 import types_pb2 as pb

    torch.set_num_threads(1)
    spawn = mp.get_context("spawn")
    batches, weights = spawn.Queue(1), spawn.Queue(1)
    generator = spawn.Process(target=generate, args=(recipe, batches, weights), daemon=True)
    generator.start()
    learner = Learner(recipe, recipe.model_path, "cpu")
    rewards: list[float] = []
    try:
        _send(weights, 0, learner)
        waited_s = began_s = 0.0
        for step in range(1, recipe.trainer.steps + 1):
            asked_s = time.perf_counter()
            groups = [pb.Group.FromString(data) for data in batches.get(timeout=QUEUE_S)]
            if step == WARM_STEPS + 1:
                began_s, waited_s = time.perf_counter(), 0.0
            else:
                waited_s += time.perf_counter() - asked_s
            rewards.append(learner.train(groups, step).metrics["reward_mean"])
            _send(weights, step, learner)
        wall_s = time.perf_counter() - began_s
    finally:
        generator.terminate()
        generator.join(10)
        weights.cancel_join_thread()  # what was never taken must not hold the end
    num = (recipe.trainer.steps - WARM_STEPS) * recipe.scheduler.batch_groups * recipe.sampling.group_size
    return {
        "completions_per_s": num / wall_s,
        "step_s": wall_s / (recipe.trainer.steps - WARM_STEPS),
        "trainer_busy_share": 1 - waited_s / wall_s,
        "reward_last_5": sum(rewards[-5:]) / len(rewards[-5:]),
    }


def _send(weights: Any, version: int, learner: Any) -> None:
    """Replace whatever the generator has not taken yet."""
    with contextlib.suppress(queue.Empty):
        weights.get_nowait()
    weights.put((version, {name: t.numpy().copy() for name, t in learner.tensors().items()}))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.stdout.write(json.dumps(run(recipes.load(Path(sys.argv[1]), sys.argv[2:]))) + "\n")
