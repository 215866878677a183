"""kill -9 of every part of a live run, once each: it goes on by itself, and the ledger proves that nothing was lost or trained twice."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from ..procs import processes_of
from .conftest import LiveRun

VICTIMS = {
    "trainer": "-m services.trainer ",
    "rollout": "-m services.rollout ",
    "scheduler": "-m services.scheduler ",
    "weightsync": "-m services.weightsync ",
    "embedded server": "valkey-server",
}


def kill(run: LiveRun, what: str) -> None:
    (pid,) = run.pids(VICTIMS[what])[:1]
    os.kill(pid, signal.SIGKILL)
    run.until(lambda: run.pids(VICTIMS[what]) not in ([], [pid]), 60, f"another {what}")


def test_every_part_is_killed_once_and_the_run_ends_as_good_with_a_proven_ledger(new_run: Callable[..., LiveRun]) -> None:
    run = new_run("trainer.checkpoint_every_steps=5")
    for step, what in zip((8, 16, 24, 32, 40), VICTIMS, strict=True):
        run.wait_for_step(step, 120)
        kill(run, what)
    assert run.end() == 0, run.output[-3000:]
    assert run.summary()["is_ledger_ok"], run.output[-3000:]
    assert [line["step"] for line in run.lines("train")] == list(range(1, 61))
    assert max(line["metrics"]["lag_max"] for line in run.lines("train")) <= 2
    assert run.accuracies()[60] >= run.accuracies()[0] + 0.25


def test_ctrl_c_and_the_same_command_again_trains_no_step_twice_and_misses_none(new_run: Callable[..., LiveRun]) -> None:
    run = new_run("trainer.steps=30", "validation.every_steps=0")
    run.wait_for_step(12)
    run.signal(signal.SIGINT)
    assert run.end(60) == 130, run.output[-3000:]
    assert processes_of(run.folder) == []
    run.start()
    assert run.end() == 0, run.output[-3000:]
    assert [line["step"] for line in run.lines("train")] == list(range(1, 31))
    assert run.summary()["is_ledger_ok"]


def test_a_killed_supervisor_leaves_no_orphan_and_the_same_command_resumes(new_run: Callable[..., LiveRun]) -> None:
    run = new_run("trainer.steps=25", "validation.every_steps=0", "trainer.checkpoint_every_steps=5")
    run.wait_for_step(8)
    run.signal(signal.SIGKILL)
    assert run.process is not None
    run.process.wait(10)
    end_s = time.monotonic() + 2.0
    while (left := processes_of(run.folder)) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not left
    run.start()
    assert run.end() == 0, run.output[-3000:]
    assert [line["step"] for line in run.lines("train")] == list(range(1, 26))
    assert run.summary()["is_ledger_ok"]


def test_a_second_run_on_the_same_folder_is_refused_with_the_pid_of_the_first(new_run: Callable[..., LiveRun]) -> None:
    run = new_run("trainer.steps=40")
    run.wait_for_step(1)
    assert run.process is not None
    second = LiveRun(run.folder, run.overrides, said=[*run.said])
    second.start()
    assert second.end(60) != 0
    assert str(run.process.pid) in second.output
    assert run.process.poll() is None


@pytest.mark.parametrize("what", ["trainer"])
def test_a_killed_trainer_generates_nothing_again(new_run: Callable[..., LiveRun], what: str) -> None:
    """Rollout and ledger keep what the lost steps were trained on: the run needs no more answers than it trains."""
    run = new_run("trainer.steps=30", "trainer.checkpoint_every_steps=10", "validation.every_steps=0", "validation.at_start=false", "validation.at_end=false")
    run.wait_for_step(17)
    kill(run, what)
    assert run.end() == 0, run.output[-3000:]
    assert run.summary()["is_ledger_ok"]
    status = run.lines("train")
    assert [line["step"] for line in status] == list(range(1, 31))
    assert run.summary()["completions"] == 30 * 32 * 8
