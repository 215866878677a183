from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stretto import embedded, preflight, recipe, runs
from stretto.errors import RecipeError
from stretto.preflight import Machine, Problem

ROOMY = Machine(cores=64, memory_bytes=1 << 40, devices={"cuda": 0, "npu": 0})


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Any]:
    """A recipe whose files are all there."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"\0" * 4000)
    train = tmp_path / "train.jsonl"
    train.write_text(json.dumps({"prompt": "1+1", "reward_model": {"ground_truth": "2"}}) + "\n")
    return {
        "run": {"folder": str(tmp_path / "runs" / "a")},
        "model": {"path": str(model)},
        "data": {"train": str(train), "validation": str(train), "answer_column": "reward_model.ground_truth"},
    }


def found(tree: dict[str, Any], machine: Machine = ROOMY) -> list[Problem]:
    return preflight.check(recipe.build(tree), machine)


def keys(problems: list[Problem]) -> list[str]:
    return [p.key for p in problems]


def test_a_recipe_whose_parts_are_all_there_has_no_problem(tree: dict[str, Any]) -> None:
    assert found(tree) == []


def test_all_problems_are_listed_at_once_with_key_value_rule_and_advice(tree: dict[str, Any], tmp_path: Path) -> None:
    tree["model"]["path"] = str(tmp_path / "modle")
    tree["data"]["answer_column"] = "answer"
    tree["reward"] = {"function": "stretto.rewards:gsm8kk"}
    problems = found(tree)
    assert keys(problems) == ["model.path", "data.answer_column", "data.answer_column", "reward.function"]
    assert str(problems[0]) == f"model.path = {tmp_path}/modle: there is no such folder; did you mean {tmp_path}/model?"
    assert "row 1 of" in problems[1].rule
    assert "it has: prompt, reward_model" in problems[1].advice
    assert "gsm8k" in problems[3].rule
    with pytest.raises(RecipeError, match=r"(?s)model.path.*data.answer_column.*reward.function"):
        preflight.refuse(problems)


@pytest.mark.parametrize(
    ("text", "rule"), [("", "has no rows"), ("[1]\n", "line 1 is not an object"), ('{"prompt": 1}\n{x\n', "cannot be read: line 2: ")]
)
def test_a_data_file_that_cannot_be_used_is_named_to_the_line(tree: dict[str, Any], tmp_path: Path, text: str, rule: str) -> None:
    (tmp_path / "bad.jsonl").write_text(text)
    tree["data"]["train"] = str(tmp_path / "bad.jsonl")
    assert rule in found(tree)[0].rule


@pytest.mark.parametrize(
    ("positions", "key", "is_warning"), [(256, "sampling.max_new_tokens", False), (1279, "data.max_prompt_tokens", True)]
)
def test_an_answer_that_the_model_has_no_positions_for_is_said_at_start(
    tree: dict[str, Any], tmp_path: Path, positions: int, key: str, is_warning: bool
) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": positions}))
    (problem,) = found(tree)
    assert (problem.key, problem.is_warning) == (key, is_warning)
    assert f"= 1280 positions; {tmp_path / 'model'} has {positions}" in problem.rule
    (tmp_path / "model" / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 1280}}))
    assert found(tree) == []


def test_parquet_is_read_too(tree: dict[str, Any], tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"prompt": ["1+1"], "reward_model": [{"ground_truth": "2"}]}), tmp_path / "t.parquet")
    tree["data"]["train"] = str(tmp_path / "t.parquet")
    assert found(tree) == []
    (tmp_path / "t.parquet").write_bytes(b"no parquet")
    assert "cannot be read" in found(tree)[0].rule


def test_c20_too_few_cores_are_said_with_the_numbers_and_do_not_stop_the_run(tree: dict[str, Any]) -> None:
    tree["rollout"] = {"replicas": 3, "threads": 2}
    (problem,) = found(tree, Machine(2, 1 << 40, {}))
    assert problem.is_warning
    assert "trainer.threads 1 + rollout.replicas 3 x rollout.threads 2 = 7 busy threads on 2 cores" in problem.rule
    preflight.refuse([problem])


def test_c20_too_little_memory_is_said_with_the_numbers(tree: dict[str, Any]) -> None:
    (problem,) = found(tree, Machine(64, 1000, {}))
    assert problem.is_warning
    assert "0 M parameters need about 0.0 GB" in problem.rule


def test_c20_a_device_that_is_not_there_is_a_problem(tree: dict[str, Any]) -> None:
    tree["trainer"] = {"device": "cuda:1"}
    tree["rollout"] = {"device": "tpu"}
    problems = found(tree, Machine(64, 1 << 40, {"cuda": 1, "npu": 0}))
    assert [p.rule for p in problems] == ["this machine has 1 cuda devices", "is not auto, cpu, cuda or npu"]


def test_c20_more_replicas_than_devices_are_said_with_the_numbers(tree: dict[str, Any]) -> None:
    tree["rollout"] = {"device": "cuda", "replicas": 4}
    (problem,) = found(tree, Machine(64, 1 << 40, {"cuda": 2, "npu": 0}))
    assert (problem.is_warning, problem.rule) == (True, "rollout.replicas 4 share 2 cuda devices")


def test_a_cut_distribution_in_training_warns_of_its_bias(tree: dict[str, Any]) -> None:
    tree["sampling"] = {"top_p": 0.9, "top_k": 20}
    problems = found(tree, Machine(64, 1 << 40, {}))
    assert [(p.key, p.value, p.is_warning) for p in problems] == [("sampling.top_p", "0.9", True), ("sampling.top_k", "20", True)]


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        yield s.getsockname()[1]


def test_a_named_port_that_is_taken_and_one_that_is_none_are_problems(tree: dict[str, Any], taken_port: int) -> None:
    tree["scheduler"] = {"listen": f"127.0.0.1:{taken_port}"}
    tree["trainer"] = {"listen": "nonsense"}
    problems = found(tree)
    assert keys(problems) == ["scheduler.listen", "trainer.listen"]
    assert f"port {taken_port} cannot be listened on" in problems[0].rule
    assert "host:port" in problems[1].rule


def test_a_folder_in_use_and_a_folder_that_is_a_file_are_problems(tree: dict[str, Any], tmp_path: Path) -> None:
    lock = runs.Lock(Path(tree["run"]["folder"]))
    assert [p.rule for p in found(tree)] == [f"process {os.getpid()} runs in it"]
    lock.release()
    assert found(tree) == []
    (tmp_path / "file").touch()
    tree["run"]["folder"] = str(tmp_path / "file" / "run")
    assert keys(found(tree)) == ["run.folder"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_not_writable_is_a_problem(tree: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "shut").mkdir(mode=0o500)
    tree["run"]["folder"] = str(tmp_path / "shut" / "run")
    assert "is not writable" in found(tree)[0].rule


def test_a_redis_that_does_not_answer_is_a_problem_without_its_password(tree: dict[str, Any]) -> None:
    tree["redis"] = {"url": "redis://:secret@127.0.0.1:1/0"}
    (problem,) = found(tree)
    assert (problem.key, problem.value) == ("redis.url", "127.0.0.1:1/0")
    assert "secret" not in str(problem)


def test_a_redis_without_persistence_warns_and_is_refused_when_strict(tree: dict[str, Any], valkey: embedded.EmbeddedServer) -> None:
    import redis

    tree["redis"] = {"url": valkey.url}
    assert found(tree) == []
    with redis.Redis.from_url(valkey.url) as client:
        client.config_set("appendonly", "no")
        try:
            (problem,) = found(tree)
            assert problem.is_warning
            tree["run"]["durability"] = "strict"
            (problem,) = found(tree)
            assert not problem.is_warning
        finally:
            client.config_set("appendonly", "yes")


def test_a_missing_server_program_is_a_problem(tree: dict[str, Any]) -> None:
    (problem,) = preflight.check(recipe.build(tree), ROOMY, "no-such-server")
    assert "no-such-server" in problem.rule
