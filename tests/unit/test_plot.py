from __future__ import annotations

import json
from pathlib import Path

import pytest

from stretto import plot
from stretto.errors import NotFoundError


def train(step: int, reward: float | None) -> str:
    return json.dumps({"kind": "train", "step": step, "time": 1.0, "metrics": {"reward_mean": reward}}) + "\n"


def validation(step: int, accuracy: float) -> str:
    return json.dumps({"kind": "validation", "step": step, "time": 1.0, "accuracy": accuracy, "metrics": {}}) + "\n"


def test_curves_leave_out_missing_values_and_torn_lines() -> None:
    curves = plot.read([train(1, 0.5), train(2, None), validation(2, 0.25), train(3, 0.75), '{"kind": "train", "st'])
    assert (curves.reward.steps, curves.reward.values) == ([1, 3], [0.5, 0.75])
    assert (curves.accuracy.steps, curves.accuracy.values) == ([2], [0.25])


def test_smoothing_averages_what_was_and_never_looks_ahead() -> None:
    assert plot.smooth([1.0, 3.0, 5.0, 9.0], 2) == [1.0, 2.0, 4.0, 7.0]
    assert plot.smooth([1.0, 3.0], 1) == [1.0, 3.0]


def test_a_picture_is_drawn_from_a_single_step(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(train(1, 0.5))
    assert plot.draw(tmp_path, "t").read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw_is_an_error_by_name(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no step was trained yet"):
        plot.draw(tmp_path, "t")
    (tmp_path / "metrics.jsonl").write_text("\n")
    with pytest.raises(NotFoundError, match="no step with a reward"):
        plot.draw(tmp_path, "t")
