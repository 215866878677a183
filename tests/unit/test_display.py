from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from stretto import display, results
from stretto.client import Event, Status
from stretto.display import View
from stretto.history import History
from stretto.supervisor import Row
from stretto.v1 import scheduler_pb2 as pb
from stretto.v1 import types_pb2


def a_status() -> Status:
    message = pb.GetStatusResponse(
        run="word-problems",
        phase=pb.RUN_PHASE_RUNNING,
        total_steps=60,
        committed_step=23,
        checkpoint_step=20,
        occupancy=pb.Occupancy(window=96, occupied=90, pending=10, running=28, finished=20, consumed=32),
        max_lag=2,
        batch_groups=32,
        lag_trained_max=2,
        num_evicted=3,
        num_failed=1,
        num_reissued=4,
        completions_per_s=1234.5,
        trainer=pb.TrainerStatus(trainer_epoch=1, metrics={"busy_share": 0.62}),
        replicas=[
            pb.ReplicaStatus(
                replica_id="r-1",
                state=pb.REPLICA_STATE_RUNNING,
                held=types_pb2.WeightsId(trainer_epoch=1, version=22),
                address="127.0.0.1:7",
                tokens_per_s=15234.0,
                busy_share=0.93,
            )
        ],
    )
    return results.status(message)


def an_event(kind: str, step: int, text: str = "", **values: float) -> Event:
    accuracy = values.pop("accuracy", 0.0)
    judged = results.evaluation(pb.Evaluation(step=step, accuracy=accuracy)) if kind == "evaluation" else None
    return Event(f"{step}", kind, 1000.0 + 2 * step, text, {"step": float(step), **values}, {}, judged)


def a_history(num_steps: int = 23) -> History:
    history = History()
    for step in range(1, num_steps + 1):
        history.happened(an_event("step", step, reward_mean=0.2 + step / 40, lag_max=1.0, busy_share=0.6))
        if step % 10 == 0:
            history.happened(an_event("evaluation", step, f"step {step}: accuracy {step / 50}", accuracy=step / 50))
    return history


def a_view() -> View:
    rows = (Row("redis", 1, "running", 0, "", "127.0.0.1:1"), Row("trainer", 2, "running", 1, "signal 9", "127.0.0.1:2"))
    rows += (Row("rollout-0", 3, "restarting", 2, "exit code 1", "127.0.0.1:7"),)
    return View("word-problems", 75.0, a_status(), a_history(), rows, ("trainer ended by signal 9",), ("step 24 waits for 3 groups",))


def text_of(view: View, width: int = 110) -> str:
    console = Console(width=width, file=io.StringIO(), record=True, color_system=None)
    console.print(display.render(view, width))
    return console.export_text()


def test_the_picture_says_where_the_run_is_and_how_long_it_takes() -> None:
    text = text_of(a_view())
    for part in ("step 23/60", "1:15", "1:14 left", "0.775", "90/96", "1 now · 2 most · 2 allowed", "1,234 answers/s", "15,234 tokens/s"):
        assert part in text, part


def test_the_picture_names_every_process_its_work_and_what_is_wrong() -> None:
    text = text_of(a_view())
    for part in ("redis", "62%", "93%", "restarting", "trainer ended by signal 9", "step 24 waits for 3 groups", "step 20: accuracy 0.4"):
        assert part in text, part


@pytest.mark.parametrize("width", [60, 80, 140, 250])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert max(map(len, text_of(a_view(), width).splitlines())) <= width


@pytest.mark.parametrize("phase", ["starting", "paused", "finishing", "done"])
def test_every_phase_can_be_drawn_before_anything_happened(phase: str) -> None:
    assert phase in text_of(View("t", 0.0, replace(a_status(), phase=phase, replicas=(), trainer=None), History()))
    assert "starting" in text_of(View("t", 0.0, None, History()))


def test_bars_rise_with_the_values_and_fold_neighbours_when_there_are_many() -> None:
    assert display.bars([0.0, 0.5, 1.0], 3, 2) == ["  █", " ██"]
    assert {len(line) for line in display.bars([float(i) for i in range(1000)], 40, 4)} == {40}
    assert display.bars([], 10, 2) == ["", ""]


def test_a_resume_redraws_the_steps_that_are_trained_again() -> None:
    history = a_history(10)
    history.happened(an_event("step", 6, reward_mean=0.9))
    assert (history.reward.steps, history.reward.values[-1]) == ([1, 2, 3, 4, 5, 6], 0.9)


def test_a_step_is_one_line_without_a_terminal() -> None:
    assert (
        display.line(an_event("step", 3, reward_mean=0.5, lag_max=1.0, train_s=0.25), 60) == "step 3/60  reward 0.500  lag 1  train 0.25 s"
    )


@pytest.mark.parametrize(("seconds", "text"), [(7, "0:07"), (754.2, "12:34"), (3723, "1:02:03")])
def test_clock(seconds: float, text: str) -> None:
    assert display.clock(seconds) == text
