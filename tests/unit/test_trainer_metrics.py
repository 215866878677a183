"""Metrics files after a resume look as if the lost steps had never been; busy time and events are told apart exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from services.trainer.feed import is_ours, order
from services.trainer.metrics import BusyShare, MetricsFiles
from stretto.v1 import scheduler_pb2 as pb


def evaluation(id: str, step: int) -> pb.Evaluation:
    return pb.Evaluation(evaluation_id=id, step=step, metrics={"acc/mean@1": 0.25}, accuracy=0.25, outcome="complete")


def records(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_lines_of_later_steps_and_a_torn_one_are_cut_and_no_step_is_twice(tmp_path: Path) -> None:
    files = MetricsFiles(tmp_path, 0)
    for step in range(1, 6):
        files.train(step, 1.0, {"loss": float(step)})
    files.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 3, "tim')
    again = MetricsFiles(tmp_path, 3)
    assert again.num_cut == 3  # steps 4 and 5 and the torn line
    for step in (4, 5):
        again.train(step, 2.0, {"loss": 10.0 * step})
    again.close()
    assert [(r["step"], r["time"]) for r in records(tmp_path)] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0)]


def test_a_predecessor_that_wakes_up_late_writes_no_line_into_its_successors_file(tmp_path: Path) -> None:
    """I6. Nothing was to be cut, and both have the file open."""
    zombie = MetricsFiles(tmp_path, 0)
    zombie.train(1, 1.0, {"loss": 1.0})
    successor = MetricsFiles(tmp_path, 1)
    assert successor.num_cut == 0
    for files, time in ((zombie, 2.0), (successor, 3.0)):
        files.train(2, time, {"loss": 1.0})
        files.validation(evaluation("s1", 1), "5-0", time)
    zombie.close()
    successor.close()
    assert [(r["kind"], r["step"], r["time"]) for r in records(tmp_path)] == [("train", 1, 1.0), ("train", 2, 3.0), ("validation", 1, 3.0)]


def test_an_evaluation_has_one_line_also_when_its_event_comes_again_after_a_restart(tmp_path: Path) -> None:
    files = MetricsFiles(tmp_path, 0)
    assert files.validation(evaluation("e1", 0), "7-1", 1.0)
    assert not files.validation(evaluation("e1", 0), "7-1", 1.0)
    files.close()
    again = MetricsFiles(tmp_path, 0)
    assert again.last_event_id == "7-1"
    assert not again.validation(evaluation("e1", 0), "7-1", 1.0)
    again.close()
    assert [r["evaluation_id"] for r in records(tmp_path)] == ["e1"]


def test_what_is_not_a_number_is_null_in_the_file(tmp_path: Path) -> None:
    files = MetricsFiles(tmp_path, 0)
    files.train(1, 1.0, {"loss": float("nan"), "grad_norm": float("inf")})
    files.close()
    assert records(tmp_path)[0]["metrics"] == {"loss": None, "grad_norm": None}


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    for resume, value in ((0, 1.0), (2, 2.0)):
        files = MetricsFiles(tmp_path, resume)
        for step in range(resume + 1, 5):
            files.train(step, value, {"loss": value})
        files.validation(evaluation(f"e{resume}", 4), "1-1", value)
        files.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(e.step, e.value) for e in board.Scalars("train/loss")] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]
    assert [e.step for e in board.Scalars("validation/acc/mean@1")] == [4]


def test_the_length_counts_what_is_durable(tmp_path: Path) -> None:
    files = MetricsFiles(tmp_path, 0)
    files.train(1, 1.0, {"loss": 1.0})
    assert files.make_durable() == (tmp_path / "metrics.jsonl").stat().st_size > 0
    files.close()


def test_busy_share_is_work_over_the_last_ten_seconds() -> None:
    busy = BusyShare(begin_s=0.0)
    busy.add(0.0, 2.0)
    assert busy.share(4.0) == pytest.approx(0.5)  # younger than the window: since the beginning
    busy.add(4.0, 10.0)
    assert busy.share(10.0) == pytest.approx(0.8)
    assert busy.share(11.0) == pytest.approx(0.7)  # 1 s of the first span has left
    assert busy.share(15.0) == pytest.approx(0.5)
    assert busy.share(30.0) == 0.0


def test_busy_share_of_no_time_is_zero() -> None:
    assert BusyShare(begin_s=5.0).share(5.0) == 0.0


def test_event_ids_are_ordered_as_numbers() -> None:
    assert order("9-0") < order("10-0") < order("10-2") < order("10-10")
    assert order("") < order("0")


@pytest.mark.parametrize(
    ("step", "event_id", "ours"),
    [
        (10, "5-0", True),  # before we opened the run, of a step the checkpoint contains
        (15, "5-0", False),  # before we opened the run, of a step that was lost
        (15, "9-0", False),  # began before the resume, ended after it
        (12, "9-0", True),
        (13, "9-0", True),  # begun by the commit that is being answered
    ],
)
def test_an_evaluation_counts_when_its_step_is_in_the_history_that_goes_on(step: int, event_id: str, ours: bool) -> None:
    assert is_ours(step, event_id, opened_event_id="6-0", resume_step=10, current_step=13) is ours
