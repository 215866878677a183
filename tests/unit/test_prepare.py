from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

from stretto import prepare, recipe
from stretto.errors import DeadlineError, NotFoundError, RefusedError, StrettoError
from stretto.recipe import Recipe

WAIT_S = 30.0


def a_recipe(folder: Path, seed: int = 0) -> Recipe:
    return recipe.build(
        {"run": {"folder": str(folder), "seed": seed}, "model": {"make": "word-problems"}, "data": {"make": "word-problems"}}
    )


def a_task(folder: Path, seed: int = 0) -> prepare.Task:
    return next(t for t in prepare.tasks(a_recipe(folder, seed)) if t.what == "model")


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


def test_of_services_that_start_together_one_makes_and_the_others_wait(tmp_path: Path) -> None:
    has_begun, may_end, num_built = threading.Event(), threading.Event(), count()

    def build(task: str, folder: Path, seed: int) -> None:
        next(num_built)
        (folder / "config.json").write_text(f"{task} {seed}")
        has_begun.set()
        assert may_end.wait(WAIT_S)

    here = a_recipe(tmp_path, seed=3)
    with ThreadPoolExecutor() as pool:
        makers = [pool.submit(prepare.make_missing, here, "model", build, WAIT_S) for _ in range(2)]
        assert has_begun.wait(WAIT_S)
        with pytest.raises(DeadlineError, match=r"model .*/model was not made from .*'seed': 3.* within 0 s"):
            prepare.wait_until_made(here, "model", 0.0)
        waiter = pool.submit(prepare.wait_until_made, here, "model", WAIT_S)
        may_end.set()
        for future in (*makers, waiter):
            future.result(WAIT_S)
    assert next(num_built) == 1
    assert (tmp_path / "model" / "config.json").read_text() == "word-problems 3"


def test_a_wait_says_once_what_it_waits_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "stretto.prepare"), pytest.raises(DeadlineError):
        prepare.wait_until_made(a_recipe(tmp_path), "model", 3 * prepare.POLL_S)
    assert [(r.message, vars(r)["fields"]["folder"]) for r in caplog.records] == [("waiting", str(tmp_path / "model"))]


def test_what_the_recipe_names_itself_is_neither_made_nor_waited_for(tmp_path: Path) -> None:
    given = recipe.build({"run": {"folder": str(tmp_path)}, "model": {"path": "m"}, "data": {"train": "t"}})
    prepare.wait_until_made(given, "model", 0.0)
    prepare.make_missing(given, "data", prepare.write_data, 0.0)
    assert list(tmp_path.iterdir()) == []


def test_a_maker_that_fails_leaves_the_work_to_the_next(tmp_path: Path) -> None:
    def fail(task: str, folder: Path, seed: int) -> None:
        raise NotFoundError("no such task")

    with pytest.raises(NotFoundError):
        prepare.make_missing(a_recipe(tmp_path), "data", fail)
    prepare.make_missing(a_recipe(tmp_path), "data", prepare.write_data)
    assert {p.name for p in (tmp_path / "data").iterdir()} >= {"made.json", "train.jsonl", "validation.jsonl"}
