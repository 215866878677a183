"""The cuts a run may be resumed from, by the names of their folders; the trainer alone looks inside.

checkpoints/step-120/STABLE               may be resumed from
checkpoints/set-aside-step-130/           newer than a cut the user went back to: never resumed from, kept until removed by hand
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from stretto.errors import InvalidArgumentError, NotFoundError, RefusedError

SET_ASIDE = "set-aside-"
LEDGER = "ledger.bin"
"""A checkpoint's snapshot of the ledger."""


def parse(text: str) -> int:
    """The step in "step=120". Raises InvalidArgumentError."""
    match = re.fullmatch(r"step=(\d+)", text)
    if match is None or int(match[1]) == 0:
        raise InvalidArgumentError(f"--resume {text}: say step=N, N > 0 (to begin anew: --fresh; the newest checkpoint: leave it out)")
    return int(match[1])


def steps(checkpoints: Path) -> list[int]:
    """Steps of the stable checkpoints, oldest first."""
    found = (re.fullmatch(r"step-(\d+)/STABLE", str(path.relative_to(checkpoints))) for path in checkpoints.glob("step-*/STABLE"))
    return sorted(int(match[1]) for match in found if match)


def go_back(checkpoints: Path, step: int) -> list[Path]:
    """Make the checkpoint of `step` the newest: later ones are set aside. Returns where they are now.

    Raises NotFoundError when there is no stable checkpoint of `step`, RefusedError when it is torn; nothing has changed then.
    """
    there = steps(checkpoints)
    if step not in there:
        known = ", ".join(map(str, there)) or "none"
        raise NotFoundError(f"--resume step={step}: {checkpoints} has no stable checkpoint of that step; there are: {known}")
    if flaw := _flaw(checkpoints / f"step-{step}"):
        raise RefusedError(f"--resume step={step}: {checkpoints / f'step-{step}'} cannot be resumed from: {flaw}")
    moved: list[Path] = []
    for path in sorted(checkpoints.glob("step-*")):
        match = re.fullmatch(r"step-(\d+)", path.name)
        if match and int(match[1]) > step:
            moved.append(path.rename(_free(checkpoints / f"{SET_ASIDE}{path.name}")))
    return moved


def _flaw(folder: Path) -> str:
    """Why the run cannot go back to this checkpoint; empty = it can, as far as names and sizes tell."""
    try:
        files: dict[str, int] = json.loads((folder / "STABLE").read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return "its STABLE marker is torn"
    for name, size in files.items():
        path = folder / name
        if (is_there := path.stat().st_size if path.is_file() else 0) != size:
            return f"{name} has {is_there} bytes, not {size}"
    return "" if LEDGER in files else f"it holds no {LEDGER}: an older build wrote it, and it can only continue the store as it was then"


def _free(wanted: Path) -> Path:
    """`wanted`, or the first of wanted-2, wanted-3, … that does not exist."""
    path, n = wanted, 2
    while path.exists():
        path, n = wanted.with_name(f"{wanted.name}-{n}"), n + 1
    return path
