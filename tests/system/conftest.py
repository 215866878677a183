"""Whole runs share what takes longest to make."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stretto import prepare
from stretto import recipe as recipes
from tests.run_world import ENV, RECIPE, RUN_S, LiveRun

MAKE_S = 300.0
"""Limit of the warm start."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/system" in item.nodeid:
            item.add_marker(pytest.mark.system)
            item.add_marker(pytest.mark.timeout(RUN_S + MAKE_S + 60))


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder in which data and model have been made, as `stretto run` makes them. To be copied, not used."""
    folder = tmp_path_factory.mktemp("made") / "run"

    def execute(command: tuple[str, ...], log: Path) -> int:
        with log.open("wb") as output:
            return subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=MAKE_S, env=ENV).returncode

    for task in prepare.tasks(recipes.load(RECIPE, [f"run.folder={folder}"])):
        prepare.make(task, folder, execute)
    return folder


@pytest.fixture
def new_run(made: Path, tmp_path: Path) -> Iterator[Callable[..., LiveRun]]:
    """new_run("trainer.steps=20", …) starts a run of its own; killed at the end of the test if it still lives."""
    runs: list[LiveRun] = []

    def start(*overrides: str) -> LiveRun:
        folder = tmp_path / f"run{len(runs)}"
        shutil.copytree(made, folder)
        runs.append(LiveRun(folder, overrides))
        return runs[-1].start()

    yield start
    for run in runs:
        run.kill_all()
