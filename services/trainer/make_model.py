"""`python -m services.trainer.make_model word-problems --out DIR [--seed N]`: a tiny policy to start a run from.

A Qwen3 of 0.18 M parameters with its own tokenizer, warmed up by supervised learning on sloppy demonstrations: more than
half lack the #### line, and at the end a fifth of the sums are wrong. The result knows the format and the arithmetic but seldom shows
both (sampled accuracy about 0.3, greedy 0), which is what reinforcement learning then repairs.

    hold    constant rate until greedy arithmetic on 128 held-out questions is >= 0.7 in two checks running
    decay   150 steps to rate 0: 0.7 becomes 0.9 and more

The hold ends by rule, not by count: arithmetic appears suddenly, at step 300 to 700 depending on the seed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.errors import RefusedError, StrettoError
from stretto.recipe import TASKS

if TYPE_CHECKING:
    from services.trainer.warm_start import Report

FORMAT = 1
"""Counts up when the same task and seed would give another model."""
MARKER = "warm-start.json"
"""What the model was made from and how it did."""


def make(task: str, out: Path, seed: int, report: Callable[[Report], None] = lambda _: None) -> bool:
    """The model as a Hugging Face folder at `out`; False when the very same was there already.

    It is made beside and renamed, so a half-made model is never found. Raises RefusedError when `out` holds something else
    than a made model, StrettoError when the warm start does not succeed.
    """
    key = _key(task, seed)
    if _marker(out).get("key") == key:
        return False
    if out.exists() and any(out.iterdir()) and not _marker(out):
        raise RefusedError(f"{out} holds files that are not a made model; choose another folder or remove it")
    from services.trainer import warm_start  # torch: not for a second call

    beside = out.with_name(f".{out.name}.new")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        outcome = warm_start.build(beside, seed, report)
        (beside / MARKER).write_text(json.dumps({"key": key, "task": task, "seed": seed, "format": FORMAT, **outcome}, indent=1))
        shutil.rmtree(out, ignore_errors=True)
        beside.replace(out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return True


def _key(task: str, seed: int) -> str:
    return hashlib.blake2b(f"{task}/{seed}/{FORMAT}".encode(), digest_size=16).hexdigest()


def _marker(out: Path) -> dict[str, Any]:
    """Empty when there is none."""
    try:
        return json.loads((out / MARKER).read_text())
    except (OSError, ValueError):
        return {}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m services.trainer.make_model", description="Make the tiny model of a task.")
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads only spin for each other on matrices this small
    began = time.monotonic()
    try:
        with _Progress() as progress:
            made = make(given.task, given.out, given.seed, progress.show)
    except StrettoError as err:
        sys.stderr.write(f"{err.message}\n")
        return 1
    outcome = _marker(given.out)
    sys.stdout.write(
        f"{given.out}: {outcome['num_parameters']:,} parameters, {outcome['num_steps']} steps, arithmetic {outcome['arithmetic']:.2f}, "
        f"sampled accuracy {outcome['accuracy']:.2f}{f', {time.monotonic() - began:.0f} s' if made else ' (already there)'}\n"
    )
    return 0


class _Progress:
    """A bar on a terminal, a line every few seconds elsewhere."""

    LINE_S = 5.0

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._line_due = 0.0

    def __enter__(self) -> _Progress:
        if sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import Progress
            except ModuleNotFoundError:
                return self  # an image of the trainer alone has no rich
            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("warm start", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, report: Report) -> None:
        text = f"{report.phase}: arithmetic {report.arithmetic:.2f}, loss {report.loss:.3f}"
        if self._bar is not None:
            self._bar.update(self._task, completed=report.step, total=report.expected_steps, description=text)
        elif time.monotonic() >= self._line_due:
            self._line_due = time.monotonic() + self.LINE_S
            sys.stderr.write(f"step {report.step}/~{report.expected_steps}, {text}\n")


if __name__ == "__main__":
    sys.exit(main())
