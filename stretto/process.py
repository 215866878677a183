"""Child processes that end with us, whatever ends us.

    we --spawn--> tether launch --exec--> program      killed by the kernel with us (Linux)
     \\--pipe---> tether guard                          sees the pipe close, ends every group we told it of

Each child leads its own session, so the terminal's Ctrl-C reaches only us, and its helpers (reward workers) are in its group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_TETHER = [sys.executable, "-SI", str(Path(__file__).with_name("tether.py"))]


class Guard:
    """A process that outlives us by a moment and ends the groups we watch."""

    def __init__(self, pass_fds: Sequence[int] = ()) -> None:
        """`pass_fds` stay open in the guard: a lock among them is free only when the orphans are gone."""
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [*_TETHER, "guard"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=pass_fds,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def _tell(self, sign: str, group: int) -> None:
        assert self._process.stdin is not None
        with self._lock:
            try:
                self._process.stdin.write(f"{sign}{group}\n".encode())
                self._process.stdin.flush()
            except (BrokenPipeError, ValueError):
                return  # the guard was killed; the kernel's signal still ties our children

    def watch(self, group: int) -> None:
        self._tell("+", group)

    def forget(self, group: int) -> None:
        self._tell("-", group)

    def close(self) -> None:
        """Ends what is still watched, then the guard itself."""
        assert self._process.stdin is not None
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def spawn(
    command: Sequence[str],
    guard: Guard,
    *,
    env: Mapping[str, str] | None = None,
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    output: int | IO[bytes] = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Start `command` as the leader of its own session, tied to us. stdout and stderr go to `output`.

    The kernel's tie holds the *thread* that spawned, so off the main thread only the guard's is made.
    """
    parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
    child = subprocess.Popen(
        [*_TETHER, "launch", str(parent), *command],
        stdin=stdin,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=None if env is None else dict(env),
        start_new_session=True,
    )
    guard.watch(child.pid)
    return child


def reap(child: subprocess.Popen[bytes], guard: Guard) -> int | None:
    """Exit code (negative: signal) if the child has ended, None while it runs. Sweeps what it left in its group."""
    if child.returncode is not None:
        return child.returncode
    # The dead leader is kept as a zombie while its group is swept: until then nobody else can get that group's number.
    if os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        return None
    signal_group(child.pid, signal.SIGKILL)
    guard.forget(child.pid)
    return child.wait()


def end(child: subprocess.Popen[bytes], guard: Guard, deadline_s: float) -> int:
    """SIGTERM to the leader; after `deadline_s` SIGKILL to its whole group. Returns the exit code."""
    if reap(child, guard) is None:
        child.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + deadline_s
    while (code := reap(child, guard)) is None:
        if time.monotonic() > deadline:
            signal_group(child.pid, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.01)
    return code


def signal_group(group: int, number: int) -> None:
    """As os.killpg; a group that is gone is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def is_alive(pid: int) -> bool:
    """Whether a process of that number runs. A zombie does not: it only waits for its parent (or a slow init) to notice."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return sys.platform != "linux"  # gone between the two looks; elsewhere there is no /proc
    return state not in "ZX"
