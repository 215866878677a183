"""What a run leaves to look at: metrics.jsonl, TensorBoard, Prometheus.

    metrics.jsonl   {"kind": "train", "step": 7, "time": unix seconds, "metrics": {"loss": …}}            one per step
                    {"kind": "validation", "step": 10, "time": …, "evaluation_id": …, "event_id": …,
                     "version_min": …, "version_max": …, "outcome": …, "accuracy": …, "metrics": {…}}     one per evaluation
    tensorboard/    train/<name> and validation/<name> over the step

After a resume at step k the files look as if the lost steps had never been: lines of later steps are cut off in one atomic
replacement, TensorBoard is told to purge them (C3: no step twice, none missing).
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import Counter, Gauge
from torch.utils.tensorboard import SummaryWriter

from stretto.v1 import scheduler_pb2 as pb

METRICS_FILE, TENSORBOARD_FOLDER = "metrics.jsonl", "tensorboard"
BUSY_WINDOW_S = 10.0
"""Over which busy_share is taken; the replicas use the same."""

STEP = Gauge("stretto_trainer_step", "Newest committed step.")
STEPS = Counter("stretto_trainer_steps_total", "Steps committed by this process.")
CHECKPOINT_STEP = Gauge("stretto_trainer_checkpoint_step", "Step of the newest durable checkpoint.")
CHECKPOINTS_FAILED = Counter("stretto_trainer_checkpoints_failed_total", "Checkpoints that could not be written.")
PHASE_SECONDS = Counter("stretto_trainer_phase_seconds_total", "Wall time of the loop by phase.", ["phase"])
PUBLISHED_BYTES = Counter("stretto_trainer_published_bytes_total", "Bytes of weights handed to the relay.")
REPUBLISHED = Counter("stretto_trainer_republished_total", "Versions published again because the relay had lost them.")
BUSY_SHARE = Gauge("stretto_trainer_busy_share", "Share of the last 10 s spent training or publishing.")
LATEST = Gauge("stretto_trainer_metric", "Scalars of the newest step.", ["name"])


PHASES = {"sampling": "sample_wait_s", "training": "train_s", "publishing": "publish_s", "committing": "commit_s", "saving": "checkpoint_s"}
"""Phase of the loop -> the scalar that times it."""


def observe(scalars: Mapping[str, float]) -> None:
    """Show the scalars of a step to Prometheus."""
    for phase, name in PHASES.items():
        PHASE_SECONDS.labels(phase).inc(scalars[name])
    BUSY_SHARE.set(scalars["busy_share"])
    for name, value in scalars.items():
        LATEST.labels(name).set(value)


# ------------------------------------------------------------------------------------------------------------ decisions


class BusyShare:
    """Share of the last `window_s` in which the trainer worked. Time is given by the caller."""

    def __init__(self, begin_s: float, window_s: float = BUSY_WINDOW_S) -> None:
        self._begin_s, self._window_s = begin_s, window_s
        self._spans: deque[tuple[float, float]] = deque()

    def add(self, start_s: float, end_s: float) -> None:
        """Work from start to end; spans are added in order and do not overlap."""
        self._spans.append((start_s, end_s))

    def share(self, now_s: float) -> float:
        """In [0, 1]; over the time since the beginning while that is shorter than the window."""
        since_s = max(now_s - self._window_s, self._begin_s)
        while self._spans and self._spans[0][1] <= since_s:
            self._spans.popleft()
        if now_s <= since_s:
            return 0.0
        return sum(end - max(start, since_s) for start, end in self._spans) / (now_s - since_s)


def parsed(lines: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(line, its object) for every whole line; one torn by a kill is left out."""
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if line.endswith("\n") and isinstance(record, dict) and isinstance(record.get("step"), int):
            yield line, record


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has no NaN: null stands for it."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


# ------------------------------------------------------------------------------------------------------------ files


class MetricsFiles:
    """The two files of a run, opened where step `resume_step` ended. Owned by one thread at a time."""

    def __init__(self, folder: Path, resume_step: int) -> None:
        self.path = folder / METRICS_FILE
        folder.mkdir(parents=True, exist_ok=True)
        self.num_cut, kept = self._cut(resume_step)
        self.evaluation_ids = {str(r["evaluation_id"]) for r in kept if r.get("kind") == "validation"}
        """Evaluations that have their line."""
        self.last_event_id = next((str(r["event_id"]) for r in reversed(kept) if r.get("event_id")), "")
        """Event of the newest validation line; empty when there is none."""
        self._file = self.path.open("a")
        self._board = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=resume_step + 1)

    def _cut(self, resume_step: int) -> tuple[int, list[dict[str, Any]]]:
        """Drop later steps and torn lines. Returns (lines dropped, records kept).

        I6: the file is a new one in any case. A predecessor that is stopped and wakes up later appends to the old one, which is gone.
        """
        if not self.path.exists():
            return 0, []
        with self.path.open() as file:
            lines = file.readlines()
        keep = [(line, record) for line, record in parsed(lines) if record["step"] <= resume_step]
        tmp = self.path.with_name(f".{METRICS_FILE}.{os.getpid()}")
        with tmp.open("w") as file:
            file.writelines(line for line, _ in keep)
            file.flush()
            os.fsync(file.fileno())
        tmp.replace(self.path)
        return len(lines) - len(keep), [record for _, record in keep]

    def _append(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def train(self, step: int, unix_s: float, metrics: Mapping[str, float]) -> None:
        """The line of one step."""
        self._append({"kind": "train", "step": step, "time": unix_s, "metrics": finite(metrics)})
        for name, value in metrics.items():
            self._board.add_scalar(f"train/{name}", value, step, walltime=unix_s)

    def validation(self, evaluation: pb.Evaluation, event_id: str, unix_s: float) -> bool:
        """The line of one evaluation; False when it has one already."""
        if evaluation.evaluation_id in self.evaluation_ids:
            return False
        metrics = dict(evaluation.metrics)
        for name, value in metrics.items():
            self._board.add_scalar(f"validation/{name}", value, evaluation.step, walltime=unix_s)
        self._board.flush()  # before the line: a kill in between draws a point twice instead of losing it
        self._append(
            {"kind": "validation", "step": evaluation.step, "time": unix_s, "evaluation_id": evaluation.evaluation_id, "event_id": event_id}
            | {"version_min": evaluation.version_min, "version_max": evaluation.version_max, "outcome": evaluation.outcome}
            | {"num_sessions": evaluation.num_sessions, "num_failed": evaluation.num_failed, "wall_s": evaluation.wall_s}
            | finite({"accuracy": evaluation.accuracy})
            | {"metrics": finite(metrics)}
        )
        self.evaluation_ids.add(evaluation.evaluation_id)
        return True

    @property
    def num_bytes(self) -> int:
        """Length of metrics.jsonl."""
        return os.fstat(self._file.fileno()).st_size

    def make_durable(self) -> int:
        """Everything written so far is on disk. Returns the length of metrics.jsonl."""
        self._board.flush()
        os.fsync(self._file.fileno())
        return self.num_bytes

    def close(self) -> None:
        self._board.close()
        self._file.close()
