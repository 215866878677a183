from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stretto import runs
from stretto.errors import NotFoundError, RefusedError

HOLD = "import sys; import pathlib; from stretto import runs; l = runs.Lock(pathlib.Path(sys.argv[1])); print('held', flush=True); input()"


def a_file(started_unix_s: float) -> runs.RunFile:
    return runs.RunFile("r", os.getpid(), started_unix_s, "r.toml", {"scheduler": f"127.0.0.1:{started_unix_s:.0f}"})


def test_a_run_file_is_read_as_written_and_is_its_owners_only(tmp_path: Path) -> None:
    runs.write(tmp_path, a_file(5.0))
    assert runs.read(tmp_path) == a_file(5.0)
    assert (tmp_path / "run.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": "r"}'])
def test_a_run_file_that_is_torn_is_not_found(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(NotFoundError, match="cannot be read"):
        runs.read(tmp_path)


def test_the_newest_live_run_is_found_and_dead_ones_are_not(tmp_path: Path) -> None:
    locks: list[runs.Lock] = []
    for name, started_s, is_live in (("a", 1.0, True), ("b", 2.0, True), ("c", 3.0, False)):
        (tmp_path / name).mkdir()
        runs.write(tmp_path / name, a_file(started_s))
        if is_live:
            locks.append(runs.Lock(tmp_path / name))
    assert runs.newest(tmp_path) == tmp_path / "b"
    for lock in locks:
        lock.release()
    with pytest.raises(NotFoundError, match="no live run"):
        runs.newest(tmp_path)


def test_a_folder_is_free_when_its_holder_was_killed(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    assert (runs.is_live(tmp_path), runs.holder(tmp_path)) == (True, holder.pid)
    with pytest.raises(RefusedError, match=f"process {holder.pid} runs in it"):
        runs.Lock(tmp_path)
    holder.kill()
    holder.communicate()
    assert runs.holder(tmp_path) is None
    runs.Lock(tmp_path).release()


def test_the_latest_run_is_the_one_that_began_last_live_or_not(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no run under"):
        runs.latest(tmp_path)
    for name, began_s in (("a", 5.0), ("b", 9.0)):
        (tmp_path / name).mkdir()
        runs.write(tmp_path / name, a_file(began_s))
    assert runs.latest(tmp_path).name == "b"
