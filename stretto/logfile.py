"""The log file of a service: its stdout and stderr, appended over restarts, bounded in size."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import IO

from stretto.telemetry import readable

BYTES_MAX = 16 << 20
"""A file that grows past it moves to <name>.1, whose old content is dropped."""


class LogFile:
    """A child writes to it through `open()`'s descriptor, so nothing of ours stands between a service and its log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = 0
        path.parent.mkdir(parents=True, exist_ok=True)

    def open(self) -> IO[bytes]:
        """For one process; `tail` then shows what that process wrote."""
        self.rotate()
        file = self.path.open("ab")
        self._start = file.tell()
        return file

    def rotate(self) -> None:
        """Copies and truncates, because the child keeps its descriptor; lines written between the two are lost."""
        if self.path.exists() and self.path.stat().st_size > BYTES_MAX:
            shutil.copyfile(self.path, self.path.with_name(self.path.name + ".1"))
            with self.path.open("r+b") as file:
                file.truncate(0)
            self._start = 0

    def tail(self, num_lines: int = 15) -> list[str]:
        """The last lines for people that the newest process wrote."""
        try:
            with self.path.open("rb") as file:
                file.seek(max(self._start, self.path.stat().st_size - (256 << 10)))
                text = file.read().decode(errors="replace")
        except OSError:
            return []
        return "\n".join(map(readable, text.splitlines())).splitlines()[-num_lines:]
