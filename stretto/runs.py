"""The runs on this machine: who works in a run folder, and where it can be reached.

<folder>/lock       held (flock) by the supervisor and its guard while anything of the run lives; contains the supervisor's pid
<folder>/run.json   name, pid, addresses; never a password; readable by its owner only
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from stretto import process
from stretto.errors import NotFoundError, RefusedError

ENDING_S = 3.0
"""How long a run that is just ending may still hold its folder."""


@dataclass(frozen=True, slots=True)
class RunFile:
    """What run.json says."""

    name: str
    pid: int
    """The supervisor."""
    started_unix_s: float
    recipe: str
    """Absolute path of the recipe."""
    addresses: Mapping[str, str]
    """host:port by part: "scheduler", "weightsync", "trainer", "rollout-0", "redis", and "<part> metrics"."""
    overrides: list[str] = field(default_factory=list[str])
    """Settings of the command line, but for redis.url, which may hold a password."""

    @property
    def scheduler(self) -> str:
        return self.addresses["scheduler"]


class Lock:
    """The right to run in a folder. `fd` may be passed to a child, which then holds it too."""

    def __init__(self, folder: Path, wait_s: float = ENDING_S) -> None:
        """Raises RefusedError naming the holder's pid."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "lock"
        self.fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + wait_s
        while not self._try():
            if ((holder := self._path.read_text().strip()) and process.is_alive(int(holder))) or time.monotonic() > deadline:
                os.close(self.fd)
                raise RefusedError(f"run.folder = {folder}: process {holder or '?'} runs in it; stop that run or choose another folder")
            time.sleep(0.05)
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, str(os.getpid()).encode(), 0)

    def _try(self) -> bool:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        os.close(self.fd)


def holder(folder: Path) -> int | None:
    """pid of the supervisor that works in `folder`; None when there is none, or only what it left is just being ended."""
    if not is_live(folder):
        return None
    with contextlib.suppress(OSError, ValueError):
        pid = int((folder / "lock").read_text())
        return pid if process.is_alive(pid) else None
    return None


def is_live(folder: Path) -> bool:
    """Whether something of a run still works in `folder`."""
    try:
        fd = os.open(folder / "lock", os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def write(folder: Path, run: RunFile) -> None:
    """Replaces run.json whole; mode 0600."""
    beside = folder / "run.json.new"
    beside.touch(mode=0o600)
    beside.write_text(json.dumps(asdict(run), indent=2))
    beside.replace(folder / "run.json")


def read(folder: Path) -> RunFile:
    """Raises NotFoundError when there never was a run in `folder`, or its file is not readable."""
    path = folder / "run.json"
    try:
        return RunFile(**json.loads(path.read_text()))
    except FileNotFoundError:
        raise NotFoundError(f"{path}: there is no such file; nothing was run in that folder") from None
    except (OSError, ValueError, TypeError) as err:
        raise NotFoundError(f"{path}: cannot be read: {err}") from None


def latest(root: Path) -> Path:
    """The folder under `root` whose run began last, live or not. Raises NotFoundError when there is none."""
    known = [f.parent for f in root.glob("*/run.json")]
    if not known:
        raise NotFoundError(f"no run under {root.resolve()}: name one with --run FOLDER or --address HOST:PORT")
    return max(known, key=lambda folder: (is_live(folder), read(folder).started_unix_s))


def newest(root: Path) -> Path:
    """The folder under `root` whose live run began last. Raises NotFoundError when none is live."""
    live = [f.parent for f in root.glob("*/run.json") if is_live(f.parent)]
    if not live:
        raise NotFoundError(
            f"no live run under {root.resolve()}: start one (stretto run RECIPE), or name it with --run FOLDER or --address HOST:PORT"
        )
    return max(live, key=lambda folder: read(folder).started_unix_s)
