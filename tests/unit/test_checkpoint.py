"""A checkpoint is whole or not there: every way to be half-written is named and never offered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.trainer import checkpoint
from services.trainer.checkpoint import Cut
from stretto.errors import CorruptError, FencedError, RefusedError


def cut(step: int) -> Cut:
    return Cut(step=step, optimizer_steps=4 * step, version=step, trainer_epoch=1, metrics_bytes=10, run="r", seed=0)


def write(folder: Path, step: int, token: str | None = None) -> Path:
    token = token or checkpoint.claim(folder)
    tmp = checkpoint.begin(folder, step)
    (tmp / "model.safetensors").write_bytes(b"m" * 100)
    (tmp / "model.safetensors").chmod(0o600)
    return checkpoint.finish(tmp, cut(step), {"w": torch.full((3,), float(step)), "optimizer_steps": 4 * step}, b"ledger", token)


def test_what_was_saved_is_what_is_loaded(tmp_path: Path) -> None:
    path = write(tmp_path, 100)
    found, state = checkpoint.load(path)
    assert found == cut(100)
    assert state["w"].tolist() == [100.0] * 3
    assert state["optimizer_steps"] == 400


def test_the_newest_stable_checkpoint_comes_first_by_number_not_by_name(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        write(tmp_path, step)
    assert [step for step, _ in checkpoint.survey(tmp_path).stable] == [100, 20, 9]


def test_an_absent_folder_holds_nothing(tmp_path: Path) -> None:
    assert checkpoint.survey(tmp_path / "none") == checkpoint.Survey([], [])


def no_marker(path: Path) -> None:
    (path / "STABLE").unlink()


def torn_marker(path: Path) -> None:
    (path / "STABLE").write_text('{"files": {"mod')


def short_file(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"m" * 99)


def lost_file(path: Path) -> None:
    (path / "state.pt").unlink()


@pytest.mark.parametrize(
    ("harm", "reason"), [(no_marker, "no STABLE"), (torn_marker, "torn"), (short_file, "99 bytes"), (lost_file, "state.pt")]
)
def test_c7_a_torn_checkpoint_is_named_and_the_one_before_is_offered(tmp_path: Path, harm: object, reason: str) -> None:
    write(tmp_path, 1)
    harm(write(tmp_path, 2))  # type: ignore[operator]
    found = checkpoint.survey(tmp_path)
    assert [step for step, _ in found.stable] == [1]
    assert [i.name for i in found.ignored] == ["step-2"]
    assert reason in found.ignored[0].reason


def test_c7_a_checkpoint_being_written_is_not_offered(tmp_path: Path) -> None:
    checkpoint.begin(tmp_path, 5)
    found = checkpoint.survey(tmp_path)
    assert found.stable == []
    assert found.ignored[0].name.startswith(".tmp-step-5-")


def test_only_what_dead_writers_left_is_swept(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-S", "-c", ""])
    dead.wait()
    for pid in (dead.pid, os.getppid(), os.getpid()):
        (tmp_path / f".tmp-step-3-{pid}").mkdir()
    removed = checkpoint.sweep(tmp_path)
    assert sorted(removed) == sorted([f".tmp-step-3-{dead.pid}", f".tmp-step-3-{os.getpid()}"])
    assert (tmp_path / f".tmp-step-3-{os.getppid()}").is_dir()


def test_a_torn_checkpoint_is_replaced_by_a_whole_one_of_its_step(tmp_path: Path) -> None:
    no_marker(write(tmp_path, 2))
    write(tmp_path, 2)
    assert [step for step, _ in checkpoint.survey(tmp_path).stable] == [2]


def test_the_newest_stable_ones_are_kept_and_torn_older_ones_go(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        write(tmp_path, step)
    no_marker(tmp_path / "step-3")
    assert sorted(checkpoint.prune(tmp_path, 2)) == ["step-1", "step-3"]
    assert [step for step, _ in checkpoint.survey(tmp_path).stable] == [4, 2]


def test_a_trainer_that_was_replaced_cannot_add_a_checkpoint(tmp_path: Path) -> None:
    old = checkpoint.claim(tmp_path)
    new = checkpoint.claim(tmp_path)
    write(tmp_path, 7, new)
    with pytest.raises(FencedError, match="another trainer"):
        write(tmp_path, 8, old)
    assert [step for step, _ in checkpoint.survey(tmp_path).stable] == [7]


def test_c8_a_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    raw = json.loads((path / "cut.json").read_text())
    (path / "cut.json").write_text(json.dumps(raw | {"format_version": 9}))
    with pytest.raises(RefusedError, match=r"step-3 has format version 9; this build reads up to 2"):
        checkpoint.load(path)


def written_by_format_1(folder: Path, step: int) -> Path:
    """A checkpoint as it was before there were ledger snapshots."""
    path = write(folder, step)
    raw = json.loads((path / "cut.json").read_text())
    (path / "cut.json").write_text(json.dumps({key: raw[key] for key in raw if key != "cut_id"} | {"format_version": 1}))
    return path


def test_a_checkpoint_of_the_previous_format_loads_and_has_no_cut_id(tmp_path: Path) -> None:
    found, state = checkpoint.load(written_by_format_1(tmp_path, 3))
    assert (found.step, found.cut_id, found.format_version, state["optimizer_steps"]) == (3, "", 2, 12)


def test_a_ledger_that_is_not_the_one_its_cut_was_named_by_is_corrupt(tmp_path: Path) -> None:
    path, named = write(tmp_path, 3), replace(cut(3), cut_id=checkpoint.name_cut(3, 1, b"ledger"))
    assert checkpoint.ledger_of(path, named) == b"ledger"
    (path / "ledger.bin").write_bytes(b"another")
    with pytest.raises(CorruptError, match=f"is not of cut {named.cut_id}"):
        checkpoint.ledger_of(path, named)


def test_c8_an_older_format_is_migrated_step_by_step_or_refused(tmp_path: Path) -> None:
    path = written_by_format_1(tmp_path, 3)

    def one_to_two(raw: dict[str, object], state: dict[str, object]) -> None:
        state["weight"] = state.pop("w")
        raw["cut_id"] = "x"

    def two_to_three(raw: dict[str, object], state: dict[str, object]) -> None:
        raw["seed"] = 5

    with pytest.raises(RefusedError, match="no migration from 2"):
        checkpoint.load(path, reads=3, migrations={1: one_to_two})
    found, state = checkpoint.load(path, reads=3, migrations={1: one_to_two, 2: two_to_three})
    assert (found.format_version, found.seed, "weight" in state, "w" in state) == (3, 5, True, False)


def test_bytes_that_do_not_parse_are_corrupt_and_nothing_is_loaded(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    size = (path / "state.pt").stat().st_size
    (path / "state.pt").write_bytes(b"x" * size)
    with pytest.raises(CorruptError, match=r"state\.pt"):
        checkpoint.load(path)


def test_a_copied_state_is_not_changed_by_further_training() -> None:
    weight = torch.zeros(2)
    held = checkpoint.copied({"a": [weight, {"b": weight}], "n": 3})
    weight += 1
    assert held["a"][0].tolist() == [0.0, 0.0]
    assert held["a"][1]["b"].tolist() == [0.0, 0.0]
    assert held["n"] == 3


def test_an_export_is_readable_by_others_and_replaces_the_one_before(tmp_path: Path) -> None:
    final = tmp_path / "final"
    for step in (1, 2):
        written = write(tmp_path / "checkpoints", step)
        assert not checkpoint.is_exported(written, final)
        checkpoint.export(written, final)
        assert checkpoint.is_exported(written, final)
    assert sorted(p.name for p in final.iterdir()) == ["cut.json", "model.safetensors"]
    assert (final / "model.safetensors").stat().st_mode & 0o044 == 0o044
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints", "final"]
