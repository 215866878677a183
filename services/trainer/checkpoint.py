"""Checkpoints: one folder a step, which is whole or not there.

    checkpoints/.tmp-step-12-4711/    being written by process 4711
          | every file and the folder fsynced, then renamed
    checkpoints/step-12/              complete, nobody vouches for it yet
          | STABLE written and fsynced: names and sizes of all files
    checkpoints/step-12/STABLE        may be resumed from
    checkpoints/OWNER                 token of the process that writes here

    step-12/  config.json, model.safetensors, tokenizer…   a Hugging Face folder: `from_pretrained` takes it as it is
              state.pt                                      Learner.state(): torch.load(weights_only=True)
              ledger.bin                                    the scheduler's ledger after this step (LedgerSnapshot)
              cut.json                                      the Cut below

A kill at any point leaves either a stable checkpoint or one that `survey` names and never offers (C7).
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from stretto.cuts import LEDGER, SET_ASIDE
from stretto.errors import CorruptError, FencedError, RefusedError
from stretto.process import is_alive

FORMAT_VERSION = 2
"""Of cut.json, ledger.bin and state.pt together. Raise it when an older reader would misunderstand; add the step to MIGRATIONS."""
Migration = Callable[[dict[str, Any], dict[str, Any]], None]


def _without_ledger(cut: dict[str, Any], state: dict[str, Any]) -> None:
    """1 -> 2: there was no snapshot of the ledger, so the cut has no id: it continues the store it finds, and no other."""
    cut["cut_id"] = ""


MIGRATIONS: dict[int, Migration] = {1: _without_ledger}
"""From format n to n + 1: changes (cut, state) in place. A version without an entry is refused by name (C8)."""

STABLE, CUT, STATE, OWNER = "STABLE", "cut.json", "state.pt", "OWNER"
_TMP = re.compile(r"\.tmp-(?P<what>[a-z]+(?:-\d+)?)-(?P<pid>\d+)")
_STEP = re.compile(r"step-(?P<step>\d+)")


@dataclass(frozen=True, slots=True)
class Cut:
    """The numbers that make one recovery point over all services."""

    step: int
    """Newest step it contains; the scheduler makes everything consumed later finished again."""
    optimizer_steps: int
    """Updates made so far: minibatches a step."""
    version: int
    """Policy version of the weights; equals step."""
    trainer_epoch: int
    """Incarnation that wrote it."""
    metrics_bytes: int
    """Length of metrics.jsonl when it was written: all lines of steps <= step lie before."""
    run: str
    seed: int
    cut_id: str = ""
    """Names this point, and no other point of any history: "step-40-1f2e3d4c", from `name_cut`."""
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True, slots=True)
class Ignored:
    """A folder that is never resumed from, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Survey:
    """What a checkpoint folder holds."""

    stable: list[tuple[int, Path]]
    """(step, folder), newest first."""
    ignored: list[Ignored]


def name_cut(step: int, trainer_epoch: int, ledger: bytes) -> str:
    """The id of the cut after `step`: its ledger's digest tells histories apart that are at the same step."""
    return f"step-{step}-{hashlib.sha256(b'%d:' % trainer_epoch + ledger).hexdigest()[:8]}"


# ------------------------------------------------------------------------------------------------------------ durable files


def fsync(path: Path) -> None:
    """Bytes of a file, or names in a folder, are on disk afterwards."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _seal(folder: Path) -> None:
    """fsync everything in `folder`, and let others read it (safetensors makes its files 0600)."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(path.stat().st_mode | 0o444)
        fsync(path)
    fsync(folder)


def _sizes(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file() and p.name != STABLE}


# ------------------------------------------------------------------------------------------------------------ write


def copied(state: Any) -> Any:
    """`state` with every tensor copied to host memory: training goes on while it is written."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, Mapping):
        return {key: copied(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(copied(value) for value in state)
    return state


def begin(folder: Path, step: int) -> Path:
    """An empty folder to fill for `step`; `finish` makes it a checkpoint."""
    tmp = folder / f".tmp-step-{step}-{os.getpid()}"
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    return tmp


def claim(folder: Path) -> str:
    """Make this process the one that writes checkpoints into `folder`. Returns what `finish` shows."""
    folder.mkdir(parents=True, exist_ok=True)
    token = uuid.uuid4().hex
    tmp = folder / f".tmp-owner-{os.getpid()}"
    _write(tmp, token)
    tmp.replace(folder / OWNER)
    fsync(folder)
    return token


def finish(tmp: Path, cut: Cut, state: Mapping[str, Any], ledger: bytes, token: str) -> Path:
    """Add cut, state and ledger to what `tmp` holds and make it the stable checkpoint of its step. Durable when it returns.

    Raises FencedError when another process claimed the folder since `token` was given out: what a trainer that was
    replaced still has to write belongs to a history that is not continued.
    """
    torch.save(dict(state), tmp / STATE)
    (tmp / LEDGER).write_bytes(ledger)
    _write(tmp / CUT, json.dumps(asdict(cut), indent=1) + "\n")
    _seal(tmp)
    final = tmp.parent / f"step-{cut.step}"
    if (tmp.parent / OWNER).read_text() != token:
        shutil.rmtree(tmp)
        raise FencedError(f"checkpoint of step {cut.step} not kept: another trainer writes to {tmp.parent}; stop this one")
    if final.exists():  # torn, or from a run that was started over: never the one resumed from
        shutil.rmtree(final)
    tmp.rename(final)
    fsync(final.parent)
    # Danger: STABLE comes last. Whoever sees it may rely on every byte it lists.
    _write(final / STABLE, json.dumps({"format_version": cut.format_version, "files": _sizes(final)}) + "\n")
    fsync(final)
    return final


def prune(folder: Path, keep: int) -> list[str]:
    """Remove all but the newest `keep` stable checkpoints, and what is torn and older than the newest. Returns names."""
    found = survey(folder)
    if not found.stable:
        return []
    kept, removed = {path.name for _, path in found.stable[:keep]}, list[str]()
    for path in sorted(folder.glob("step-*")):
        match = _STEP.fullmatch(path.name)
        if match and path.is_dir() and path.name not in kept and int(match["step"]) < found.stable[0][0]:
            (path / STABLE).unlink(missing_ok=True)  # first: a removal cut short leaves nothing that looks stable
            shutil.rmtree(path)
            removed.append(path.name)
    return removed


def sweep(folder: Path) -> list[str]:
    """Remove what writers that are gone left half-written. Returns names."""
    removed = list[str]()
    for path in sorted(folder.glob(".tmp-*")):
        match = _TMP.fullmatch(path.name)
        # Our own number is a former process's too: containers all start as 1, and this one has written nothing yet.
        if match and (int(match["pid"]) == os.getpid() or not is_alive(int(match["pid"]))):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            removed.append(path.name)
    return removed


# ------------------------------------------------------------------------------------------------------------ read


def _flaw(folder: Path) -> str | None:
    """Why `folder` must not be resumed from; None = stable."""
    try:
        listed: dict[str, int] = json.loads((folder / STABLE).read_text())["files"]
    except FileNotFoundError:
        return f"no {STABLE} marker: its writer did not finish"
    except (ValueError, KeyError, TypeError):
        return f"its {STABLE} marker is torn"
    present = _sizes(folder)
    for name, size in listed.items():
        if present.get(name) != size:
            return f"{name} has {present.get(name, 0)} bytes, not {size}"
    return None


def survey(folder: Path) -> Survey:
    """All checkpoints in `folder`, split into those one may resume from and those one may not. Changes nothing."""
    stable, ignored = list[tuple[int, Path]](), list[Ignored]()
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name == OWNER or path.name.startswith(SET_ASIDE):
            continue
        if _TMP.fullmatch(path.name):
            ignored.append(Ignored(path.name, "being written, or its writer died"))
        elif (match := _STEP.fullmatch(path.name)) and path.is_dir():
            flaw = _flaw(path)
            if flaw is None:
                stable.append((int(match["step"]), path))
            else:
                ignored.append(Ignored(path.name, flaw))
        else:
            ignored.append(Ignored(path.name, "not a checkpoint"))
    return Survey(sorted(stable, reverse=True), ignored)


def load(path: Path, *, reads: int = FORMAT_VERSION, migrations: Mapping[int, Migration] = MIGRATIONS) -> tuple[Cut, dict[str, Any]]:
    """Cut and learner state of a stable checkpoint, migrated to format `reads`.

    Raises RefusedError for a format this build cannot read, CorruptError for bytes that do not parse; never loads half.
    """
    try:
        raw: dict[str, Any] = json.loads((path / CUT).read_text())
        written = int(raw["format_version"])
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise CorruptError(f"checkpoint {path}: {CUT} cannot be read: {err!r}; remove the folder to resume from an older one") from err
    if written > reads:
        raise RefusedError(f"checkpoint {path} has format version {written}; this build reads up to {reads}; use the build that wrote it")
    steps_up = range(written, reads)
    for version in steps_up:
        if version not in migrations:
            raise RefusedError(f"checkpoint {path} has format version {written}; this build reads {reads}, no migration from {version}")
    try:
        state: dict[str, Any] = torch.load(path / STATE, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError) as err:
        raise CorruptError(f"checkpoint {path}: {STATE} cannot be read: {err}; remove the folder to resume from an older one") from err
    for version in steps_up:
        migrations[version](raw, state)
    try:
        raw["format_version"] = reads
        return Cut(**{f.name: raw[f.name] for f in fields(Cut)}), state
    except KeyError as err:
        raise CorruptError(f"checkpoint {path}: {CUT} has no {err}") from err


def ledger_of(path: Path, cut: Cut) -> bytes:
    """The ledger's snapshot in a stable checkpoint. Raises CorruptError when it is not the one the cut was named by."""
    try:
        ledger = (path / LEDGER).read_bytes()
    except OSError as err:
        raise CorruptError(f"checkpoint {path}: {LEDGER} cannot be read: {err}; remove the folder to resume from an older one") from err
    if name_cut(cut.step, cut.trainer_epoch, ledger) != cut.cut_id:
        raise CorruptError(f"checkpoint {path}: {LEDGER} is not of cut {cut.cut_id}; remove the folder to resume from an older one")
    return ledger


# ------------------------------------------------------------------------------------------------------------ export


def is_exported(checkpoint: Path, target: Path) -> bool:
    """Whether `target` holds the model of exactly this checkpoint."""
    try:
        return (target / CUT).read_bytes() == (checkpoint / CUT).read_bytes()
    except OSError:
        return False


def export(checkpoint: Path, target: Path) -> None:
    """Copy the Hugging Face part of a stable checkpoint to `target`, which is replaced as a whole or not at all."""
    tmp = target.with_name(f".tmp-{target.name}-{os.getpid()}")
    old = target.with_name(f".tmp-old-{os.getpid()}")
    for leftover in (tmp, old):
        shutil.rmtree(leftover, ignore_errors=True)
    shutil.copytree(checkpoint, tmp, ignore=shutil.ignore_patterns(STATE, LEDGER, STABLE))
    _seal(tmp)
    if target.exists():
        target.rename(old)
    tmp.rename(target)
    fsync(target.parent)
    shutil.rmtree(old, ignore_errors=True)
