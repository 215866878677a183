"""What a recipe asks to be made before the run: data (`data.make`) and a model (`model.make`), cached in the run folder.

A made folder holds made.json with what it was made from. It is made beside and renamed, so a half-made one is never used.

    stretto run               make, before it starts the services
    services on their own     scheduler: make_missing("data"), trainer: make_missing("model"); scheduler, rollout: wait_until_made("model")
"""

from __future__ import annotations

import fcntl
import importlib
import json
import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.errors import DeadlineError, NotFoundError, RefusedError, StrettoError
from stretto.recipe import TASKS, Recipe

log = logging.getLogger("stretto.prepare")

STAMP = "made.json"
MADE_DEADLINE_S = 900.0
"""How long a service waits for what another process makes; a warm start takes about half a minute on an idle core."""
POLL_S = 0.2
Build = Callable[[str, Path, int], object]
"""Fills an empty folder with what a task and a seed give."""
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
    """Make it anew, a model in a process of its own. Raises what `make_with` raises, StrettoError with the end of the log
    when that process fails.
    """
    log_path = run_folder / "logs" / "make-model.log"

    def build_model(name: str, folder: Path, seed: int) -> None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        command = model_command(name, folder, seed)
        code = execute(command, log_path)
        if code != 0:
            tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-10:])
            raise StrettoError(f"{' '.join(command[1:4])} failed with exit code {code}; {log_path} ends:\n{tail}")

    make_with(task, run_folder, write_data if task.what == "data" else build_model)


def make_with(task: Task, run_folder: Path, build: Build) -> None:
    """Make it anew. Raises RefusedError when a run already trained on another one, and what `build` raises."""
    if task.folder.exists() and any((run_folder / "checkpoints").glob("*")):
        raise RefusedError(
            f"{task.folder} was not made from {dict(task.stamp)}, and {run_folder} holds checkpoints of the old one: "
            "start over with --fresh, or choose another run.folder"
        )
    beside = task.folder.with_name(f"{task.folder.name}.new")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    build(str(task.stamp["task"]), beside, int(task.stamp["seed"]))
    (beside / STAMP).write_text(json.dumps(dict(task.stamp)))
    shutil.rmtree(task.folder, ignore_errors=True)
    beside.replace(task.folder)


def make_missing(recipe: Recipe, what: str, build: Build, deadline_s: float = MADE_DEADLINE_S) -> None:
    """Afterwards the "model" or "data" that the recipe asks to be made is there. Of several processes one makes it.

    Raises what `make_with` raises, DeadlineError when another process still makes it after `deadline_s`.
    """
    for task in tasks(recipe):
        if task.what != what or task.is_made:
            continue
        with _alone(task, deadline_s):
            if not task.is_made:
                log.info("making", extra={"fields": {"what": what, "folder": str(task.folder)}})
                make_with(task, recipe.run.folder, build)


def wait_until_made(recipe: Recipe, what: str, deadline_s: float = MADE_DEADLINE_S) -> None:
    """Wait until another process has made the "model" or "data" that the recipe asks for. Raises DeadlineError."""
    for task in tasks(recipe):
        if task.what == what:
            _wait(lambda task=task: task.is_made, task, deadline_s)


@contextmanager
def _alone(task: Task, deadline_s: float) -> Iterator[None]:
    """The right to make it; lost with the process that has it."""
    task.folder.parent.mkdir(parents=True, exist_ok=True)
    with task.folder.with_name(f".{task.folder.name}.lock").open("wb") as file:

        def is_ours() -> bool:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        _wait(is_ours, task, deadline_s)
        yield


def _wait(is_so: Callable[[], bool], task: Task, deadline_s: float) -> None:
    """Until it is so, saying once what is waited for."""
    end_s, is_said = time.monotonic() + deadline_s, False
    while not is_so():
        if time.monotonic() >= end_s:
            raise DeadlineError(f"the {task.what} {task.folder} was not made from {dict(task.stamp)} within {deadline_s:.0f} s")
        if not is_said:
            is_said = True
            log.info("waiting", extra={"fields": {"what": task.what, "folder": str(task.folder), "stamp": dict(task.stamp)}})
        time.sleep(POLL_S)


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
