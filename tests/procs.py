"""Processes as /proc shows them."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from pathlib import Path

from tests.waits import until

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def processes_of(folder: Path) -> list[tuple[int, str]]:
    """(pid, command line) of the processes that name `folder` in command or environment, or work in it; this one excepted."""
    found: list[tuple[int, str]] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            environ = (entry / "environ").read_bytes().decode(errors="replace")
            if command and (str(folder) in command or str(folder) in environ or str(folder) in str((entry / "cwd").readlink())):
                found.append((int(entry.name), command))
    return found


def children_of(parents: set[int]) -> set[int]:
    """Children of `parents` and theirs."""
    born: dict[int, set[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(entry.name)
            born.setdefault(int((entry / "stat").read_text().rpartition(")")[2].split()[1]), set()).add(pid)
    found: set[int] = set()
    fresh = set(parents)
    while fresh:
        fresh = {child for pid in fresh for child in born.get(pid, set())} - found
        found |= fresh
    return found


def cpu_s(pid: int) -> float:
    """User and system seconds of a process so far; 0 for one that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def address_of(service: subprocess.Popen[bytes], log: Path, deadline_s: float) -> str:
    """Where a service listens, once it says so in its log. Fails with the log when it ends instead."""

    def said() -> list[str]:
        return re.findall(r'"address": "([^"]+)"', log.read_text())

    until(lambda: said() or service.poll() is not None, f"an address in {log}", deadline_s)
    assert said(), f"it ended with exit code {service.returncode}:\n{log.read_text()}"
    return said()[0]
