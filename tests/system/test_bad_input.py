"""`stretto run` on what cannot work: refused before anything is made or started, with one message that says what to change."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from stretto import embedded, runs
from tests.procs import processes_of
from tests.run_world import ENV

LIMIT_S = 60.0


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A valid recipe with a model (of which only the files are looked at) and data of its own."""
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1", "ground_truth": "2"}\n')
    path = tmp_path / "recipe.toml"
    path.write_text('[run]\nfolder = "run"\n[model]\npath = "model"\n[data]\ntrain = "train.jsonl"\nvalidation = "train.jsonl"\n')
    return path


def refused(recipe: Path, *overrides: str, creates: frozenset[str] = frozenset()) -> str:
    """What a refused run says, once it is sure that it left nothing but `creates`."""
    before = set(recipe.parent.rglob("*"))
    command = [sys.executable, "-m", "stretto", "run", recipe.name, "--headless", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=recipe.parent, env=ENV)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert {p.name for p in set(recipe.parent.rglob("*")) - before} == creates
    assert processes_of(recipe.parent) == []
    return done.stderr.strip()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.replica=2", "rollout.replica = 2: there is no such key; did you mean 'rollout.replicas'?"),
        ("trainr.steps=2", "trainr = {'steps': 2}: there is no such section; did you mean 'trainer'?"),
        ("trainer.steps=many", "trainer.steps = 'many': Input should be a valid integer, unable to parse string as an integer"),
        ("scheduler.batch_groups=0", "scheduler.batch_groups = 0: Input should be greater than or equal to 1"),
        (
            "scheduler.window=10",
            "scheduler.window = 10 must lie between scheduler.batch_groups = 32 and (scheduler.max_lag + 1) x scheduler.batch_groups = 96: "
            "below, no batch fills; above, max_lag cannot hold",
        ),
        ("data.train=trai.jsonl", "data.train = trai.jsonl: there is no such file; did you mean train.jsonl?"),
        ("model.path=modell", "model.path = modell: there is no such folder; did you mean model?"),
        (
            "reward.function=stretto.rewards:gsm8",
            "reward.function = stretto.rewards:gsm8: module 'stretto.rewards' has no 'gsm8'; did you mean 'gsm8k'?",
        ),
    ],
)
def test_a_setting_that_cannot_work_is_refused_with_its_rule_and_the_nearest_valid_one(recipe: Path, override: str, message: str) -> None:
    assert refused(recipe, override) == f"error: {message}"


def test_all_that_is_wrong_with_the_machine_is_said_at_once(recipe: Path) -> None:
    said = refused(recipe, "data.train=nowhere.jsonl", "model.path=nowhere", "reward.function=nowhere:f")
    assert [line.removeprefix("error: ").partition(" = ")[0] for line in said.splitlines()] == [
        "model.path",
        "data.train",
        "reward.function",
    ]


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def test_a_port_that_is_taken_is_refused_by_its_setting(recipe: Path, taken_port: int) -> None:
    said = refused(recipe, f"scheduler.listen=127.0.0.1:{taken_port}")
    assert said.startswith(f"error: scheduler.listen = '127.0.0.1:{taken_port}': port {taken_port} cannot be listened on")


def test_a_folder_in_which_a_run_lives_is_refused_with_the_pid_of_that_run(recipe: Path) -> None:
    lock = runs.Lock(recipe.parent / "run")
    try:
        said = refused(recipe)
    finally:
        lock.release()
    assert said == f"error: run.folder = run: process {os.getpid()} runs in it; stop that run or choose another folder"


@pytest.mark.parametrize(
    ("password", "durability", "says"),
    [
        ("nope", "normal", "cannot be used: invalid username-password pair or user is disabled"),
        (None, "strict", "its append-only file is off"),
    ],
)
def test_a_redis_that_refuses_the_password_or_the_durability_asked_for_is_named(
    recipe: Path, valkey: embedded.EmbeddedServer, password: str | None, durability: str, says: str
) -> None:
    with redis.Redis.from_url(valkey.url) as client:
        client.config_set("appendonly", "no")
        try:
            url = f"redis://:{password or valkey.password}@{valkey.address}/0"
            said = refused(recipe, f"redis.url={url}", f'run.durability="{durability}"')
        finally:
            client.config_set("appendonly", "yes")
    assert said.splitlines()[-1].startswith(f"error: redis.url = {valkey.address}/0: {says}")
    assert "nope" not in said
