from __future__ import annotations

import json
from pathlib import Path

import pytest

from stretto import embedded, prepare, recipe
from stretto.errors import RefusedError, StrettoError


def a_task(folder: Path, seed: int = 0) -> prepare.Task:
    tree = {"run": {"folder": str(folder), "seed": seed}, "model": {"make": "word-problems"}, "data": {"make": "word-problems"}}
    return next(t for t in prepare.tasks(recipe.build(tree)) if t.what == "model")


def makes_a_model(command: tuple[str, ...], log: Path) -> int:
    (Path(command[command.index("--out") + 1]) / "config.json").write_text("{}")
    log.write_text("")
    return 0


def fails(command: tuple[str, ...], log: Path) -> int:
    makes_a_model(command, log)
    log.write_text("out of memory\n")
    return 1


def test_what_was_made_is_made_once_per_seed(tmp_path: Path) -> None:
    prepare.make(a_task(tmp_path), tmp_path, makes_a_model)
    assert a_task(tmp_path).is_made
    assert not a_task(tmp_path, seed=1).is_made


def test_a_failure_leaves_nothing_that_looks_made_and_shows_the_log(tmp_path: Path) -> None:
    with pytest.raises(StrettoError, match=r"(?s)make_model.*exit code 1.*out of memory"):
        prepare.make(a_task(tmp_path), tmp_path, fails)
    assert not a_task(tmp_path).is_made
    assert not (tmp_path / "model").exists()


def test_a_model_that_a_run_trained_on_is_not_replaced(tmp_path: Path) -> None:
    prepare.make(a_task(tmp_path), tmp_path, makes_a_model)
    (tmp_path / "checkpoints" / "step-1").mkdir(parents=True)
    with pytest.raises(RefusedError, match="--fresh"):
        prepare.make(a_task(tmp_path, seed=1), tmp_path, makes_a_model)
    assert a_task(tmp_path).is_made


def test_fresh_forgets_the_run_and_keeps_what_was_made(tmp_path: Path) -> None:
    prepare.make(a_task(tmp_path), tmp_path, makes_a_model)
    (tmp_path / "checkpoints" / "step-1").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "notes.txt").touch()
    prepare.forget(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "notes.txt"]
    assert json.loads((tmp_path / "model" / "made.json").read_text()) == {"task": "word-problems", "seed": 0}


def test_fresh_removes_this_runs_keys_and_no_others(valkey: embedded.EmbeddedServer) -> None:
    import redis

    with redis.Redis.from_url(valkey.url) as client:
        client.mset({"stretto:{a}:cursor": 1, "stretto:{a}:rev": 2, "stretto:{ab}:cursor": 3, "other": 4})
        assert prepare.forget_keys(valkey.url, "a") == 2
        assert sorted(client.keys()) == [b"other", b"stretto:{ab}:cursor"]
