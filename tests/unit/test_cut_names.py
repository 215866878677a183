from __future__ import annotations

import json
from pathlib import Path

import pytest

from stretto import cuts
from stretto.errors import InvalidArgumentError, NotFoundError, RefusedError


def checkpoints(folder: Path, *steps: int, torn: tuple[int, ...] = ()) -> Path:
    for step in (*steps, *torn):
        (folder / f"step-{step}").mkdir()
        if step in steps:
            (folder / f"step-{step}" / "ledger.bin").write_bytes(b"ledger")
            (folder / f"step-{step}" / "STABLE").write_text(json.dumps({"files": {"ledger.bin": 6}}))
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("text", ["120", "step=", "step=0", "step=-1", "step=1x", "steps=3"])
def test_what_is_no_step_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="say step=N"):
        cuts.parse(text)


def test_going_back_sets_later_checkpoints_aside_torn_ones_too(tmp_path: Path) -> None:
    folder = checkpoints(tmp_path, 5, 10, 15, torn=(20,))
    assert cuts.parse("step=10") == 10
    assert [path.name for path in cuts.go_back(folder, 10)] == ["set-aside-step-15", "set-aside-step-20"]
    assert names(folder) == ["set-aside-step-15", "set-aside-step-20", "step-10", "step-5"]


def test_going_back_twice_keeps_both_histories(tmp_path: Path) -> None:
    folder = checkpoints(tmp_path, 5, 10)
    cuts.go_back(folder, 5)
    checkpoints(folder, 10)
    cuts.go_back(folder, 5)
    assert names(folder) == ["set-aside-step-10", "set-aside-step-10-2", "step-5"]


def test_a_step_without_a_stable_checkpoint_is_named_with_those_there_are(tmp_path: Path) -> None:
    folder = checkpoints(tmp_path, 5, 10, torn=(15,))
    with pytest.raises(NotFoundError, match=r"step=15: .* there are: 5, 10"):
        cuts.go_back(folder, 15)
    assert names(folder) == ["step-10", "step-15", "step-5"]


@pytest.mark.parametrize(
    ("file", "content", "flaw"),
    [
        ("ledger.bin", "", "ledger.bin has 0 bytes, not 6"),
        ("STABLE", "{", "its STABLE marker is torn"),
        ("STABLE", '{"files": {}}', "it holds no ledger.bin: an older build wrote it"),
    ],
)
def test_a_checkpoint_that_the_run_cannot_go_back_to_moves_nothing(tmp_path: Path, file: str, content: str, flaw: str) -> None:
    folder = checkpoints(tmp_path, 5, 10, 15)
    (folder / "step-10" / file).write_text(content)
    with pytest.raises(RefusedError, match=flaw):
        cuts.go_back(folder, 10)
    assert names(folder) == ["step-10", "step-15", "step-5"]
