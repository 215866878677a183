from __future__ import annotations

from pathlib import Path

import pytest

from stretto import logfile
from stretto.logfile import LogFile


def test_a_restarted_service_appends_and_the_tail_is_of_its_newest_process(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "logs" / "trainer.log")
    for number in (1, 2):
        with log.open() as output:
            output.write(f"process {number}\n".encode())
    assert log.path.read_text() == "process 1\nprocess 2\n"
    assert log.tail() == ["process 2"]


def test_a_log_is_bounded_while_its_process_goes_on_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logfile, "BYTES_MAX", 100)
    log = LogFile(tmp_path / "trainer.log")
    with log.open() as output:
        for number in range(30):
            output.write(f"line {number:04}\n".encode())
            output.flush()
            log.rotate()
    assert log.path.stat().st_size <= 110
    assert (tmp_path / "trainer.log.1").read_text().endswith("line 0021\n")
    assert log.tail(1) == ["line 0029"]
