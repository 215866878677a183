"""The real learner in the real loop: what a kill costs is time, not one bit of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from services.trainer import server
from stretto import recipe as recipes
from stretto.v1 import scheduler_pb2 as pb
from stretto.v1 import types_pb2 as t
from tests.trainer_world import ended, world
from tests.waits import until

VOCABULARY = 40


def make_model(folder: Path) -> None:
    """A Qwen3 of 10 thousand parameters, with a file that stands for the tokenizer's."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, head_dim=8, tie_word_embeddings=True, **sizes)).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")


def make_group(ordinal: int, version: int) -> t.Group:
    """Four answers of 1 to 4 tokens, half of them right; the same for the same ordinal."""
    random = np.random.default_rng(ordinal)
    group = t.Group(version_begin=version, attempts=1)
    prompt = random.integers(3, VOCABULARY, 5).astype("<i4").tobytes()
    sampling = t.SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=4)
    group.prompt.CopyFrom(t.Prompt(uid=f"d{ordinal}", ordinal=ordinal, token_ids=prompt, group_size=4, sampling=sampling))
    for index in range(4):
        answer = t.Trajectory(prompt_uid=f"d{ordinal}", index=index, finish_reason=t.FINISH_REASON_STOP, reward=float(index % 2))
        answer.token_ids = random.integers(3, VOCABULARY, index + 1).astype("<i4").tobytes()
        answer.logprobs = np.full(index + 1, -3.0, "<f4").tobytes()
        answer.spans.add(version=version, num_tokens=index + 1)
        group.trajectories.append(answer)
    return group


def test_weights_after_a_kill_and_a_resume_are_bit_for_bit_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    make_model(tmp_path / "base")
    settings = {"checkpoint_every_steps": 2, "learning_rate": 1e-3}
    with world(tmp_path, total=5) as w:
        w.make_learner, w.scheduler.make_group = server.make_learner, make_group
        w.scheduler.available = 4
        first = w.start(**settings)
        until(lambda: w.scheduler.checkpointed == 2, "checkpoint 2")
        w.scheduler.available = 6
        until(lambda: w.scheduler.committed == 3, "step 3")
        w.kill()
        ended(first)
        w.scheduler.available = 10
        last = w.start(**settings)
        until(lambda: w.scheduler.phase == pb.RUN_PHASE_FINISHING, "last checkpoint committed")
        w.scheduler.phase = pb.RUN_PHASE_DONE
        assert ended(last) == 0
        assert w.scheduler.first_versions == {1: 0, 2: 2}
        assert [line["step"] for line in w.lines("train")] == [1, 2, 3, 4, 5]
        undisturbed = server.make_learner(recipes.build(w.tree(**settings)))
    for step in range(1, 6):
        undisturbed.train([make_group(n, step - 1) for n in (2 * step - 2, 2 * step - 1)], step)
    final = AutoModelForCausalLM.from_pretrained(tmp_path / "final").state_dict()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
    for name, tensor in undisturbed.tensors().items():
        assert torch.equal(final[name], tensor), name
        assert not torch.equal(final[name], base[name]), name
    assert (tmp_path / "final" / "tokenizer.json").exists()
