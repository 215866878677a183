"""The main table: the whole system beside the bare loop, asynchronous beside synchronous, and where the time goes.

    make bench        or        OMP_NUM_THREADS=1 python -m tests.bench.main [--rounds 3] [--steps 60]

Every round runs the bare loop before and after the run with max_lag 2, then the run with max_lag 0 and the bare loop that pads
(each answer with its own copy of the prompt, as most trainers do), so that ratios are of one and the same minute; medians over the
rounds count. Completions per second are counted from the end of step 5 to the end of the last.
Writes build/bench/main.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from stretto import recipe as recipes
from stretto.client import Client
from stretto.errors import StrettoError
from tests.bench.bare_loop import WARM_STEPS
from tests.procs import children_of, cpu_s, processes_of

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes/word-problems.toml"
OUT = ROOT / "build/bench"
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
LIMIT_S = 180.0
SERVICES = {
    "trainer": "-m services.trainer ",
    "rollout": "-m services.rollout ",
    "reward": "",
    "scheduler": "-m services.scheduler ",
    "weightsync": "-m services.weightsync ",
    "store": "valkey-server",
    "command line": "stretto run",
}
"""What a process's command line holds; the reward workers are the children of rollout."""
QUIET = ("validation.every_steps=0", "validation.at_start=false", "validation.at_end=false")


@dataclass
class Measured:
    """One run of the system."""

    completions_per_s: float = 0.0
    step_s: float = 0.0
    accuracy: dict[int, float] = field(default_factory=dict)
    reward_last: float = 0.0
    lag_mean: float = 0.0
    trainer_busy: float = 0.0
    rollout_busy: float = 0.0
    wall_s: float = 0.0
    cpu_ms_per_step: dict[str, float] = field(default_factory=dict)


def run_system(made: Path, name: str, *overrides: str) -> Measured:
    """`stretto run` on a copy of `made`, watched from outside."""
    folder = OUT / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(made, folder)
    command = [sys.executable, "-m", "stretto", "run", str(RECIPE), "--headless", f"run.folder={folder}", *overrides]
    start_s = time.monotonic()
    with (folder / "said.txt").open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=ENV)
        marks = _watch(folder, process)
    if process.returncode:
        sys.exit(f"{name} failed:\n{(folder / 'said.txt').read_text()[-3000:]}")
    found = _read(folder)
    found.wall_s = time.monotonic() - start_s
    if len(marks) > 1:
        (first, cpu_first, busy_first), (last, cpu_last, busy_last) = marks[0], marks[-1]
        found.rollout_busy = (busy_first + busy_last) / 2
        found.cpu_ms_per_step = {what: 1000 * (cpu_last[what] - cpu_first[what]) / (last - first) for what in SERVICES}
    return found


def _watch(folder: Path, process: subprocess.Popen[bytes]) -> list[tuple[int, dict[str, float], float]]:
    """(committed step, CPU seconds by service, rollout busy share), once a second from step WARM_STEPS on."""
    marks: list[tuple[int, dict[str, float], float]] = []
    client: Client | None = None
    pids: dict[str, set[int]] = {}
    end_s = time.monotonic() + LIMIT_S
    while process.poll() is None:
        if time.monotonic() > end_s:
            process.kill()
            sys.exit(f"{folder.name}: no end in {LIMIT_S:.0f} s")
        time.sleep(1.0)
        try:
            client = client or Client.local(folder)
            status = client.status()
        except (StrettoError, OSError):
            continue
        if WARM_STEPS <= status.committed_step < status.total_steps:
            pids = pids or _pids(folder)
            spent = {what: sum(map(cpu_s, those)) for what, those in pids.items()}
            marks.append((status.committed_step, spent, max((r.busy_share for r in status.replicas), default=0.0)))
    return marks


def _pids(folder: Path) -> dict[str, set[int]]:
    every = processes_of(folder)
    found = {what: {pid for pid, command in every if mark and mark in command} for what, mark in SERVICES.items()}
    found["reward"] = children_of(found["rollout"])
    return found


def _read(folder: Path) -> Measured:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    measured, first = steps[WARM_STEPS:], steps[WARM_STEPS - 1]
    wall_s = measured[-1]["time"] - first["time"]
    recipe = recipes.load(RECIPE)
    return Measured(
        completions_per_s=len(measured) * recipe.scheduler.batch_groups * recipe.sampling.group_size / wall_s,
        step_s=wall_s / len(measured),
        accuracy={line["step"]: line["metrics"]["acc/mean@1"] for line in lines if line["kind"] == "validation"},
        reward_last=sum(line["metrics"]["reward_mean"] for line in steps[-5:]) / 5,
        lag_mean=sum(line["metrics"]["lag_mean"] for line in measured) / len(measured),
        trainer_busy=1 - sum(line["metrics"]["sample_wait_s"] for line in measured) / wall_s,
    )


def run_bare(made: Path, steps: int, *overrides: str) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.bench.bare_loop", str(RECIPE), f"run.folder={made}", f"trainer.steps={steps}", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, env=ENV, timeout=LIMIT_S, cwd=ROOT)
    if done.returncode:
        sys.exit(f"the bare loop failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run_ledger() -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.ledger", "--json"], capture_output=True, text=True, env=ENV, timeout=LIMIT_S, cwd=ROOT
    )
    if done.returncode:
        sys.exit(f"the ledger bench failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.bench.main", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    made = _made()
    bare: list[dict[str, float]] = []
    padded: list[dict[str, float]] = []
    runs: dict[str, list[Measured]] = {"async": [], "sync": []}
    for number in range(given.rounds):
        before = run_bare(made, given.steps)
        for name, lag in (("async", 2), ("sync", 0)):
            runs[name].append(run_system(made, f"{name}-{number}", *QUIET, f"scheduler.max_lag={lag}", f"trainer.steps={given.steps}"))
            if name == "async":
                after = run_bare(made, given.steps)
                bare.append({key: (before[key] + after[key]) / 2 for key in before})
        padded.append(run_bare(made, given.steps, "trainer.layout=padded"))
    judged = run_system(made, "judged", f"trainer.steps={given.steps}")
    found = _figures(bare, padded, runs, judged, run_ledger())
    (OUT / "main.json").write_text(json.dumps(found, indent=2) + "\n")
    _show({"bare loop": bare, "bare loop, padded": padded}, runs, found)


def _made() -> Path:
    """Data and model, made once; cached between benchmarks."""
    from stretto import prepare

    folder = OUT / "made"
    for task in prepare.tasks(recipes.load(RECIPE, [f"run.folder={folder}"])):
        if not task.is_made:
            prepare.make(
                task,
                folder,
                lambda command, log: subprocess.run(command, stdout=log.open("w"), stderr=subprocess.STDOUT, env=ENV).returncode,
            )
    return folder


def _figures(
    bare: list[dict[str, float]],
    padded: list[dict[str, float]],
    runs: dict[str, list[Measured]],
    judged: Measured,
    ledger: dict[str, float],
) -> dict[str, Any]:
    def mid(name: str, what: str) -> float:
        return median(getattr(m, what) for m in runs[name])

    trainer, rollout = mid("async", "trainer_busy"), mid("async", "rollout_busy")

    def over(loop: list[dict[str, float]]) -> float:
        return median(m.completions_per_s / b["completions_per_s"] for m, b in zip(runs["async"], loop, strict=True))

    return {
        "accuracy_start": judged.accuracy[min(judged.accuracy)],
        "accuracy_end": judged.accuracy[max(judged.accuracy)],
        "wall_s": judged.wall_s,
        "completions_per_s": mid("async", "completions_per_s"),
        "completions_over_bare_loop": over(bare),
        "completions_over_bare_loop_padded": over(padded),
        "bare_loop_completions_per_s": median(b["completions_per_s"] for b in bare),
        "async_over_sync_throughput": median(
            a.completions_per_s / s.completions_per_s for a, s in zip(runs["async"], runs["sync"], strict=True)
        ),
        "step_time_over_busiest_service": 1 / max(trainer, rollout, 1e-9),
        "trainer_busy_share": trainer,
        "rollout_busy_share": rollout,
        **ledger,
    }


def _show(loops: dict[str, list[dict[str, float]]], runs: dict[str, list[Measured]], found: dict[str, Any]) -> None:
    table = Table("", "completions/s", "ms/step", "trainer busy", "rollout busy", "mean lag", "reward, last 5 steps")
    for label, loop in loops.items():
        keys = ("completions_per_s", "step_s", "trainer_busy_share", "reward_last_5")
        per_s, step_s, busy, reward = (median(b[key] for b in loop) for key in keys)
        table.add_row(label, f"{per_s:,.0f}", f"{1000 * step_s:.0f}", f"{busy:.0%}", "", "", f"{reward:.2f}")
    for name, label in (("async", "max_lag = 2"), ("sync", "max_lag = 0")):
        m = {
            k: median(getattr(r, k) for r in runs[name])
            for k in ("completions_per_s", "step_s", "trainer_busy", "rollout_busy", "lag_mean", "reward_last")
        }
        cells = (f"{m['trainer_busy']:.0%}", f"{m['rollout_busy']:.0%}", f"{m['lag_mean']:.2f}", f"{m['reward_last']:.2f}")
        table.add_row(label, f"{m['completions_per_s']:,.0f}", f"{1000 * m['step_s']:.0f}", *cells)
    where = Table("CPU ms per step (busy share)", *SERVICES, "sum")
    for name, label in (("async", "max_lag = 2"), ("sync", "max_lag = 0")):
        spent = {what: median(r.cpu_ms_per_step.get(what, 0.0) for r in runs[name]) for what in SERVICES}
        step_ms = 1000 * median(r.step_s for r in runs[name])
        where.add_row(
            label, *(f"{ms:.0f} ({ms / step_ms:.0%})" for ms in spent.values()), f"{sum(spent.values()):.0f} of {step_ms:.0f} x cores"
        )
    figures = Table("figure", "value")
    for key, value in found.items():
        figures.add_row(key, f"{value:,.3f}" if isinstance(value, float) else str(value))
    console = Console(width=160)
    for each in (table, where, figures):
        console.print(each)


if __name__ == "__main__":
    main()
