"""kill -9 of every part of a live run, once each: it goes on by itself, and the ledger proves that nothing was lost or trained twice."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable

import pytest

from tests.procs import processes_of
from tests.run_world import START_S, LiveRun

VICTIMS = {
    "trainer": "-m services.trainer ",
    "rollout": "-m services.rollout ",
    "scheduler": "-m services.scheduler ",
    "weightsync": "-m services.weightsync ",
    "embedded server": "valkey-server",
}
NO_EVALUATION = ("validation.every_steps=0", "validation.at_start=false", "validation.at_end=false")


def kill(run: LiveRun, what: str) -> None:
    (pid,) = run.pids(VICTIMS[what])[:1]
    os.kill(pid, signal.SIGKILL)
    run.until(lambda: run.pids(VICTIMS[what]) not in ([], [pid]), 60, f"another {what}")


def test_c4_every_part_is_killed_once_and_the_run_ends_as_good_with_a_proven_ledger(new_run: Callable[..., LiveRun]) -> None:
    run = new_run("trainer.checkpoint_every_steps=5", "trainer.steps=45", "validation.every_steps=0")
    for step, what in zip((7, 14, 21, 28, 35), VICTIMS, strict=True):
        run.wait_for_step(step)
        kill(run, what)
    assert run.end() == 0, run.output[-3000:]
    assert run.summary()["is_ledger_ok"], run.output[-3000:]
    assert run.summary()["restarts"] == len(VICTIMS), run.output
    assert [line["step"] for line in run.lines("train")] == list(range(1, 46))
    assert max(line["metrics"]["lag_max"] for line in run.lines("train")) <= 2
    assert run.accuracies()[45] >= run.accuracies()[0] + 0.25


def test_ctrl_c_and_the_same_command_again_trains_no_step_twice_and_misses_none(new_run: Callable[..., LiveRun]) -> None:
    run = new_run("trainer.steps=16", *NO_EVALUATION)
    run.wait_for_step(8)
    run.signal(signal.SIGINT)
    assert run.end(60) == 130, run.output[-3000:]
    assert processes_of(run.folder) == []
    run.start()
    assert run.end() == 0, run.output[-3000:]
    assert [line["step"] for line in run.lines("train")] == list(range(1, 17))
    assert run.summary()["is_ledger_ok"]
    assert run.summary()["ledger"].startswith("512 prompts entered, 512 trained once"), "16 steps of 32"


def test_a_killed_supervisor_leaves_no_orphan_and_the_same_command_resumes(new_run: Callable[..., LiveRun]) -> None:
    run = new_run("trainer.steps=14", "trainer.checkpoint_every_steps=3", *NO_EVALUATION)
    run.wait_for_step(7)
    run.signal(signal.SIGKILL)
    assert run.process is not None
    run.process.wait(10)
    end_s = time.monotonic() + 2.0
    while (left := processes_of(run.folder)) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not left
    run.start()
    assert run.end() == 0, run.output[-3000:]
    assert [line["step"] for line in run.lines("train")] == list(range(1, 15))
    assert run.summary()["is_ledger_ok"]


def test_c9_a_killed_trainer_lets_nothing_be_generated_again(new_run: Callable[..., LiveRun]) -> None:
    """Rollout and ledger keep what the lost steps were trained on: the run needs no more answers than it trains."""
    run = new_run("trainer.steps=12", *NO_EVALUATION)
    run.wait_for_step(7)
    kill(run, "trainer")
    assert run.end() == 0, run.output[-3000:]
    assert run.summary()["is_ledger_ok"]
    assert [line["step"] for line in run.lines("train")] == list(range(1, 13))
    assert run.summary()["completions"] == 12 * 32 * 8


@pytest.mark.parametrize("first", ["trainer", "rollout"])
def test_c19_whoever_ends_while_the_last_evaluation_runs_it_is_judged_and_every_process_ends_in_order(
    new_run: Callable[..., LiveRun], first: str
) -> None:
    run = new_run("trainer.steps=3", "rollout.slots=8", "validation.every_steps=0", "validation.at_start=false")
    run.until(
        lambda: any("evaluation s3" in reason for reason in getattr(run.ask(lambda c: c.why()), "reasons", ())),
        START_S,
        "the last evaluation",
    )
    (pid,) = run.pids(VICTIMS[first])[:1]
    os.kill(pid, signal.SIGTERM)
    assert run.end() == 0, run.output[-3000:]
    assert processes_of(run.folder) == []
    assert re.search(r"evaluation s3 of v3: accuracy 0\.\d+ \(complete\)", run.output), run.output[-3000:]
    assert run.summary()["is_ledger_ok"]
    assert "killed" not in run.output
