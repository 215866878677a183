"""The rollout service as a process of its own: real engine, reward pool and relay, a scripted scheduler."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from services.rollout.__main__ import default_replica_id
from stretto import rpc
from stretto.v1 import scheduler_pb2 as pb
from stretto.v1 import scheduler_pb2_grpc
from stretto.weights.layout import ArrayView
from tests import relay_world
from tests.rollout_world import GROUP, ScriptedScheduler, lease
from tests.waits import eventually

pytestmark = pytest.mark.system

WAIT_S = 90.0
"""Limit for a process to import torch on a busy machine."""
EXIT_S = 15.0
"""Limit for a drained process to end; about a second when the machine is idle."""


def _make_model(folder: Path) -> dict[str, ArrayView]:
    """A random model that never ends an answer by itself, with its tokenizer; its weights as they are published."""
    words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", *"abcdefghijklmnopq"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>").save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, max_position_embeddings=4096, eos_token_id=None, bos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    config.save_pretrained(folder)
    torch.manual_seed(0)
    named = AutoModelForCausalLM.from_config(config).named_parameters()
    return {n: ArrayView("F32", tuple(p.shape), p.detach().numpy().reshape(-1).view(np.uint8)) for n, p in named}


@asynccontextmanager
async def _process(folder: Path, scheduler: str, relay: str, *settings: str) -> AsyncIterator[asyncio.subprocess.Process]:
    recipe = folder / "recipe.toml"
    recipe.write_text(
        f'[model]\npath = "{folder}"\n[data]\ntrain = "none"\n[sampling]\nmax_new_tokens = 3000\n[rollout]\nslots = 16\n'
        f'[peers]\nscheduler = "{scheduler}"\nweightsync = "{relay}"\n'
    )
    command = [sys.executable, "-m", "services.rollout", "--config", str(recipe), "--replica-id", "r-process", "--set", *settings]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    child = await asyncio.create_subprocess_exec(*command, env=env, stderr=asyncio.subprocess.PIPE)
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def _eventually(is_so: Callable[[], object], child: asyncio.subprocess.Process) -> None:
    await eventually(lambda: child.returncode is not None or is_so(), deadline_s=WAIT_S)
    assert child.returncode is None, "the process ended"


def _long(uid: str) -> pb.Lease:
    made = lease(uid)
    made.prompt.sampling.max_new_tokens = 3000
    return made


async def test_a_replica_process_generates_scores_reports_and_hands_back_on_sigterm(tmp_path: Path) -> None:
    weights = _make_model(tmp_path)
    scheduler = ScriptedScheduler()
    server = await rpc.serve(
        "127.0.0.1:0", lambda s: scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(scheduler, s), ["stretto.v1.SchedulerService"]
    )
    async with relay_world.relay_here(tmp_path) as relay, _process(tmp_path, server.address, relay.address, "rollout.threads=1") as child:
        await asyncio.to_thread(relay.publisher().publish, 1, 4, weights)
        scheduler.offer(lease("d0"))
        await _eventually(lambda: scheduler.finished("d0"), child)
        t = scheduler.reported["d0", GROUP - 1]
        assert {s.version for s in t.spans} == {4}
        assert len(t.token_ids) == len(t.logprobs) > 0
        assert (t.error, t.reward, t.replica_id) == ("", 0.0, "r-process")
        scheduler.offer(_long("d1"))
        await _eventually(lambda: (b := scheduler.heartbeats[-1]).lease_uids == ["d1"] and b.running_sequences == GROUP, child)
        child.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(child.wait(), EXIT_S) == 0
        assert scheduler.return_reasons == ["drain"]
        assert [t.index for t in scheduler.returned["d1"].partials] == list(range(GROUP))
    await server.drain(0)


async def test_a_recipe_that_is_wrong_is_refused_with_exit_code_2(tmp_path: Path) -> None:
    async with _process(tmp_path, "127.0.0.1:1", "127.0.0.1:1", "rollout.slot=4") as child:
        _, stderr = await asyncio.wait_for(child.communicate(), WAIT_S)
    assert child.returncode == 2
    assert b"rollout.slot = 4: there is no such key; did you mean 'rollout.slots'?" in stderr


async def test_a_name_that_another_process_took_ends_the_process_with_exit_code_3(tmp_path: Path) -> None:
    _make_model(tmp_path)
    scheduler = ScriptedScheduler()
    scheduler.fence_all = True
    server = await rpc.serve(
        "127.0.0.1:0", lambda s: scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(scheduler, s), ["stretto.v1.SchedulerService"]
    )
    async with _process(tmp_path, server.address, "127.0.0.1:1", "rollout.threads=1") as child:
        _, stderr = await asyncio.wait_for(child.communicate(), WAIT_S)
    assert child.returncode == 3
    assert b"replica epoch 1 is over" in stderr
    await server.drain(0)


def test_a_replica_that_restarts_in_its_place_keeps_its_name_and_two_in_no_fixed_place_never_share_one() -> None:
    assert default_replica_id("box", "0.0.0.0:50053") == default_replica_id("box", "0.0.0.0:50053") == "r-box-50053"
    assert default_replica_id("box", "127.0.0.1:0") != default_replica_id("box", "127.0.0.1:0")
    assert default_replica_id("localhost", "0.0.0.0:50053") != default_replica_id("localhost", "0.0.0.0:50053")
