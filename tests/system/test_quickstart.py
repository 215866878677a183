"""The README's first command: a real asynchronous GRPO run through four services, from a sloppy model to a good one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from stretto.results import LedgerReport
from tests.run_world import ENV, LiveRun

PROCESSES = ("valkey-server", "-m services.scheduler ", "-m services.weightsync ", "-m services.trainer ", "-m services.rollout ")
GREEDY = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
question = "Tom has 47 apples and buys 6 more. How many apples now?"
ids = tokenizer(question, return_tensors="pt", add_special_tokens=False).input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=18, do_sample=False)[0, ids.shape[1]:], skip_special_tokens=True))
"""


def test_the_quick_start_lifts_sampled_accuracy_by_a_quarter_and_leaves_what_it_promises(new_run: Callable[..., LiveRun]) -> None:
    run = new_run()
    run.wait_for_step(3)
    pids = [run.pids(what) for what in PROCESSES]
    assert [len(found) for found in pids] == [1] * 5, pids
    has_torch = ["libtorch" in Path(f"/proc/{found[0]}/maps").read_text() for found in pids]
    assert has_torch == [False, False, False, True, True], "server, scheduler and weightsync need none"
    report: LedgerReport = run.ask(lambda c: c.verify_ledger())
    assert report.ok, report.violations

    assert run.end() == 0, run.output[-3000:]
    accuracies = run.accuracies()
    assert accuracies[60] >= accuracies[0] + 0.25, accuracies
    assert [line["step"] for line in run.lines("train")] == list(range(1, 61))
    assert max(line["metrics"]["lag_max"] for line in run.lines("train")) <= 2
    assert run.summary()["is_ledger_ok"]
    assert (run.folder / "reward.png").stat().st_size > 10_000
    answer = subprocess.run([sys.executable, "-c", GREEDY, str(run.folder / "final")], capture_output=True, text=True, env=ENV, timeout=120)
    assert "#### " in answer.stdout, answer.stderr
    assert list((run.folder / "tensorboard").iterdir())


def test_the_synchronous_mode_learns_and_never_trains_on_an_older_version(new_run: Callable[..., LiveRun]) -> None:
    run = new_run("scheduler.max_lag=0", "trainer.steps=30", "validation.every_steps=0")
    assert run.end() == 0, run.output[-3000:]
    assert run.accuracies()[30] >= run.accuracies()[0] + 0.25
    assert {line["metrics"]["lag_max"] for line in run.lines("train")} == {0.0}


def test_two_replicas_share_the_work(new_run: Callable[..., LiveRun]) -> None:
    run = new_run("rollout.replicas=2", "trainer.steps=16", "validation.every_steps=0", "validation.at_start=false")
    run.wait_for_step(10)
    status = run.ask(lambda c: c.status())
    tokens = [r.generated_tokens for r in status.replicas]
    assert len(tokens) == 2
    assert min(tokens) > 0.2 * max(tokens), tokens
    assert run.end() == 0, run.output[-3000:]
    assert run.summary()["is_ledger_ok"]
