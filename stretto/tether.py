"""A stand-alone script: what ties a child process to its parent. Run by `stretto/process.py`, imports only the standard library.

    tether.py launch PARENT PROGRAM ARGS…   ask the kernel for SIGKILL when PARENT dies, then become PROGRAM
    tether.py guard                         read "+pid" / "-pid" lines; at end of file end every group still listed

The kernel's signal is immediate but Linux only and does not reach grandchildren; the guard is neither. Both together leave
no orphan.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
TERM_S = 0.8
"""What the guard gives orphans between SIGTERM and SIGKILL; short, as a new run may be waiting for the folder."""


def launch(parent: int, command: list[str]) -> None:
    """Become `command`; it is killed when the thread of `parent` that started it ends. parent 0: no tie."""
    if parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call above
            sys.exit(1)
    os.execvp(command[0], command)


def _signal(group: int, number: int) -> bool:
    """Whether the group was still there."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def guard() -> None:
    """Returns after end of file on stdin, when every group still listed was ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        _signal(group, signal.SIGTERM)
    deadline = time.monotonic() + TERM_S
    while groups and time.monotonic() < deadline:
        groups = {g for g in groups if _signal(g, 0)}
        time.sleep(0.02)
    for group in groups:
        _signal(group, signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        launch(int(sys.argv[2]), sys.argv[3:])
    else:
        guard()
