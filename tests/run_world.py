"""A whole run as a user starts it: `stretto run` in its own process, everything real."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stretto.client import Client
from stretto.errors import StrettoError
from tests.procs import processes_of

RECIPE = Path(__file__).parents[1] / "recipes/word-problems.toml"
START_S, RUN_S = 90.0, 400.0
"""Limits: until the first step, a whole run. Generous: they only end what hangs."""
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@dataclass
class LiveRun:
    """`stretto run` on a copy of `made`."""

    folder: Path
    overrides: tuple[str, ...]
    process: subprocess.Popen[str] | None = None
    said: list[Path] = field(default_factory=list)
    """Output of each start."""
    options: tuple[str, ...] = ()
    """Of the next start."""

    def start(self) -> LiveRun:
        out = self.folder / f"said-{len(self.said)}.txt"
        self.said.append(out)
        command = [
            sys.executable,
            "-m",
            "stretto",
            "run",
            str(RECIPE),
            "--headless",
            f"run.folder={self.folder}",
            *self.overrides,
            *self.options,
        ]
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
        return {line["step"]: line["accuracy"] for line in self.lines("validation")}

    def kill_all(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
