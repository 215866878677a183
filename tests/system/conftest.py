"""Whole runs as a user starts them: `stretto run` in its own process, everything real."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stretto.client import Client
from stretto.errors import StrettoError

from ..procs import processes_of

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes/word-problems.toml"
MAKE_S, START_S, RUN_S = 300.0, 90.0, 400.0
"""Limits: the warm start, until the first step, a whole run. Generous: they only end what hangs."""
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/system" in item.nodeid:
            item.add_marker(pytest.mark.system)
            item.add_marker(pytest.mark.timeout(RUN_S + MAKE_S + 60))


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder in which data and model have been made, as `stretto run` makes them. To be copied, not used."""
    from stretto import prepare
    from stretto import recipe as recipes

    folder = tmp_path_factory.mktemp("made") / "run"
    recipe = recipes.load(RECIPE, [f"run.folder={folder}"])

    def execute(command: tuple[str, ...], log: Path) -> int:
        with log.open("wb") as output:
            return subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=MAKE_S, env=ENV).returncode

    for task in prepare.tasks(recipe):
        prepare.make(task, folder, execute)
    return folder


@dataclass
class LiveRun:
    """`stretto run` on a copy of `made`."""

    folder: Path
    overrides: tuple[str, ...]
    process: subprocess.Popen[str] | None = None
    said: list[Path] = field(default_factory=list)
    """Output of each start."""

    def start(self) -> LiveRun:
        out = self.folder / f"said-{len(self.said)}.txt"
        self.said.append(out)
        command = [sys.executable, "-m", "stretto", "run", str(RECIPE), "--headless", f"run.folder={self.folder}", *self.overrides]
        self.process = subprocess.Popen(command, stdout=out.open("w"), stderr=subprocess.STDOUT, text=True, env=ENV, start_new_session=True)
        return self

    @property
    def output(self) -> str:
        return self.said[-1].read_text()

    def ask(self, question: Callable[[Client], Any]) -> Any:
        """What the scheduler answers; None while it cannot be reached."""
        with contextlib.suppress(StrettoError, OSError), Client.local(self.folder) as client:
            return question(client)

    def wait_for_step(self, step: int, deadline_s: float = START_S) -> None:
        self.until(lambda: (s := self.ask(lambda c: c.status())) is not None and s.committed_step >= step, deadline_s, f"step {step}")

    def until(self, is_true: Callable[[], bool], deadline_s: float, what: str) -> None:
        end_s = time.monotonic() + deadline_s
        while not is_true():
            assert self.process is not None
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.output[-3000:]}"
            assert time.monotonic() < end_s, f"no {what} in {deadline_s} s; why: {self.ask(lambda c: c.why())}\n{self.output[-3000:]}"
            time.sleep(0.1)

    def end(self, deadline_s: float = RUN_S) -> int:
        """Waits for the run to end by itself; its exit code."""
        assert self.process is not None
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"no end in {deadline_s} s; why: {self.ask(lambda c: c.why())}\n{self.output[-3000:]}")

    def signal(self, number: int) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def pids(self, what: str) -> list[int]:
        """Processes of this run whose command line holds `what`."""
        return [pid for pid, command in processes_of(self.folder) if what in command]

    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """Of metrics.jsonl."""
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if line["kind"] == kind]

    def accuracies(self) -> dict[int, float]:
        """Sampled validation accuracy by step."""
        return {line["step"]: line["metrics"]["acc/mean@1"] for line in self.lines("validation")}

    def kill_all(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)


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

