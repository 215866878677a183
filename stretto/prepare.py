"""What a recipe asks to be made before the run: data (`data.make`) and a model (`model.make`), cached in the run folder.

A made folder holds made.json with what it was made from. It is made beside and renamed, so a half-made one is never used.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.errors import NotFoundError, RefusedError, StrettoError
from stretto.recipe import TASKS, Recipe

STAMP = "made.json"
Execute = Callable[[tuple[str, ...], Path], int]
"""Runs a command to its end with its output in the log at that path; the exit code."""


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to make."""

    what: str
    """ "model" or "data"."""
    folder: Path
    stamp: Mapping[str, Any]

    @property
    def is_made(self) -> bool:
        try:
            return json.loads((self.folder / STAMP).read_text()) == self.stamp
        except (OSError, ValueError):
            return False


def tasks(recipe: Recipe) -> list[Task]:
    """What the recipe asks for, made or not."""
    wanted: list[Task] = []
    if recipe.data.make is not None:
        wanted.append(Task("data", recipe.run.folder / "data", {"task": recipe.data.make, "seed": recipe.run.seed}))
    if recipe.model.make is not None:
        wanted.append(Task("model", recipe.model_path, {"task": recipe.model.make, "seed": recipe.run.seed}))
    return wanted


def model_command(task: str, folder: Path, seed: int) -> tuple[str, ...]:
    """What makes a task's model into `folder`; a process of its own, as it needs torch."""
    return (sys.executable, "-m", "services.trainer.make_model", task, "--out", str(folder), "--seed", str(seed))


def write_data(task: str, folder: Path, seed: int, num_train: int | None = None, num_validation: int | None = None) -> None:
    """Write a task's train.jsonl and validation.jsonl into `folder`; None: as many rows as the task thinks right.

    Raises NotFoundError for an unknown task.
    """
    if task not in TASKS:
        raise NotFoundError(f"there is no task {task!r}; there is: {', '.join(TASKS)}")
    module = importlib.import_module(f"stretto.tasks.{task.replace('-', '_')}")
    module.write(folder, seed, num_train or module.NUM_TRAIN, num_validation or module.NUM_VALIDATION)


def make(task: Task, run_folder: Path, execute: Execute) -> None:
    """Make it anew. Raises RefusedError when a run already trained on another one, StrettoError when making fails."""
    if task.folder.exists() and any((run_folder / "checkpoints").glob("*")):
        raise RefusedError(
            f"{task.folder} was not made from {dict(task.stamp)}, and {run_folder} holds checkpoints of the old one: "
            "start over with --fresh, or choose another run.folder"
        )
    beside = task.folder.with_name(f"{task.folder.name}.new")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    name, seed = str(task.stamp["task"]), int(task.stamp["seed"])
    if task.what == "data":
        write_data(name, beside, seed)
    else:
        execute_logged(model_command(name, beside, seed), run_folder / "logs" / "make-model.log", execute)
    (beside / STAMP).write_text(json.dumps(dict(task.stamp)))
    shutil.rmtree(task.folder, ignore_errors=True)
    beside.replace(task.folder)


def execute_logged(command: tuple[str, ...], log: Path, execute: Execute) -> None:
    """Raises StrettoError with the end of the log when the command fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    code = execute(command, log)
    if code != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
        raise StrettoError(f"{' '.join(command[1:4])} failed with exit code {code}; {log} ends:\n{tail}")


RUN_FILES = ("redis", "checkpoints", "final", "tensorboard", "logs", "metrics.jsonl", "reward.png", "summary.json", "run.json")
"""What a run leaves in its folder; a model and data that were made stay."""


def forget(folder: Path) -> None:
    """`--fresh`: removes what earlier runs left in `folder`."""
    for name in RUN_FILES:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def forget_keys(url: str, run_name: str) -> int:
    """`--fresh` on a server that is not ours: removes the keys of that run, and no others. Returns how many."""
    import redis

    count = 0
    with redis.Redis.from_url(url) as client:  # pyright: ignore[reportUnknownMemberType]
        for key in client.scan_iter(match=f"stretto:{{{run_name}}}:*", count=1000):
            count += int(client.unlink(key))  # pyright: ignore[reportArgumentType]
    return count
