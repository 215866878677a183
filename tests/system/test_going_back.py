"""Whole runs that lose their store, or are sent back to an older checkpoint."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable

from tests.run_world import LiveRun
from tests.system.test_kills import NO_EVALUATION, VICTIMS


def test_a_run_that_loses_its_store_goes_on_from_the_newest_cut(new_run: Callable[..., LiveRun]) -> None:
    run = new_run("trainer.steps=20", "trainer.checkpoint_every_steps=5", *NO_EVALUATION)
    run.wait_for_step(12)
    (pid,) = run.pids(VICTIMS["embedded server"])
    shutil.rmtree(run.folder / "redis" / "appendonlydir")
    os.kill(pid, signal.SIGKILL)
    assert run.end() == 0, run.output[-3000:]
    assert [line["step"] for line in run.lines("train")] == list(range(1, 21))
    assert run.summary()["is_ledger_ok"]
    assert run.summary()["ledger"].startswith("640 prompts entered, 640 trained once"), run.summary()["ledger"]


def test_a_user_goes_back_to_an_older_checkpoint(new_run: Callable[..., LiveRun]) -> None:
    run = new_run("trainer.steps=12", "trainer.checkpoint_every_steps=3", "trainer.keep_checkpoints=9", *NO_EVALUATION)
    assert run.end() == 0, run.output[-3000:]
    first = run.lines("train")
    run.options = ("--resume", "step=6")
    run.start()
    assert run.end() == 0, run.output[-3000:]
    again = run.lines("train")
    assert [line["step"] for line in again] == list(range(1, 13))
    assert again[:6] == first[:6], "the history up to the cut is kept"
    assert all(new["time"] > first[-1]["time"] for new in again[6:]), "and what came after it was trained anew"
    assert run.summary()["ledger"].startswith("384 prompts entered, 384 trained once"), run.summary()["ledger"]
    names = {path.name for path in (run.folder / "checkpoints").iterdir()}
    assert {"step-6", "step-9", "step-12", "set-aside-step-9", "set-aside-step-12"} <= names
