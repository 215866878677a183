"""Where `stretto ledger` reads: a live run's scheduler, the store of a run that is not running, or a checkpoint's snapshot.

--address, or a live --run  ->  RPC
--run that is not live      ->  lock the folder, start the embedded server on its data (unless redis.url is set),
                                `python -m services.scheduler.inspection`, stop the server
--checkpoint step-40        ->  `python -m services.scheduler.inspection --checkpoint`, on that file alone
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from stretto import embedded, recipe, runs
from stretto.client import Client
from stretto.errors import NotFoundError, StrettoError
from stretto.results import Answer, LedgerGroup, LedgerReport, Occupancy


class Source(Protocol):
    """A ledger that can be read."""

    name: str
    """For people: "the scheduler at 127.0.0.1:50051"."""

    def report(self) -> LedgerReport: ...
    def groups(self, uid: str = "", *, open_only: bool = False) -> Iterator[LedgerGroup]: ...


class Live:
    """By RPC."""

    def __init__(self, client: Client) -> None:
        self._client, self.name = client, f"the scheduler at {client.address}"

    def report(self) -> LedgerReport:
        return self._client.verify_ledger()

    def groups(self, uid: str = "", *, open_only: bool = False) -> Iterator[LedgerGroup]:
        return self._client.ledger(uid, open_only=open_only)


class AtRest:
    """By a process that reads and ends."""

    def __init__(self, name: str, options: Sequence[str], env: Mapping[str, str]) -> None:
        self.name, self._options, self._env = name, options, env

    def report(self) -> LedgerReport:
        (line,) = self._lines("verify")
        said = json.loads(line)
        said |= {name: tuple(said[name]) for name in ("violations", "checked", "notes")}
        return LedgerReport(**said | {"occupancy": Occupancy(**said["occupancy"])})

    def groups(self, uid: str = "", *, open_only: bool = False) -> Iterator[LedgerGroup]:
        for line in self._lines(*(["show", uid] if uid else ["show"] if open_only else ["export"])):
            said = json.loads(line)
            answers = tuple(Answer(**one | {"spans": tuple(map(tuple, one["spans"]))}) for one in said["answers"])
            yield LedgerGroup(**said | {"answers": answers})

    def _lines(self, *verb: str) -> Iterator[str]:
        """Raises StrettoError with what the process said when it could not look."""
        command = [sys.executable, "-m", "services.scheduler.inspection", *verb, *self._options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self._env) as child:
            assert child.stdout is not None
            assert child.stderr is not None
            try:
                yield from child.stdout
                said = child.stderr.read()
            finally:
                child.terminate()
        if child.returncode:
            raise StrettoError(said.strip().splitlines()[-1] if said.strip() else f"the inspection ended with {child.returncode}")


@contextmanager
def opened(address: str, folder: Path | None, checkpoint: str) -> Generator[Source, None, None]:
    """The ledger meant by --address, --run and --checkpoint; without any: of the newest live run, else of the newest run.

    Raises NotFoundError when there is none, RefusedError when something else works in the folder.
    """
    if address and not checkpoint:
        with Client(address) as client:
            yield Live(client)
        return
    folder = folder or runs.latest(Path("runs"))
    if checkpoint:
        yield _cut(folder, checkpoint)
    elif runs.is_live(folder):
        with Client.local(folder) as client:
            yield Live(client)
    else:
        with _store(folder) as source:
            yield source


def _cut(folder: Path, checkpoint: str) -> AtRest:
    path = folder / "checkpoints" / checkpoint / "ledger.bin"
    if not path.is_file():
        found = sorted(p.parent.name for p in folder.glob("checkpoints/*/ledger.bin"))
        raise NotFoundError(f"{path}: there is no such file; checkpoints with a ledger: {', '.join(found) or 'none'}")
    return AtRest(f"{path}", ["--checkpoint", str(path), *_options(folder)], os.environ)


def _options(folder: Path) -> list[str]:
    run = runs.read(folder)
    return ["--config", run.recipe, "--set", *run.overrides, f"run.folder={folder.resolve()}"]


@contextmanager
def _store(folder: Path) -> Generator[AtRest, None, None]:
    run = runs.read(folder)
    loaded = recipe.load(Path(run.recipe), [*run.overrides, f"run.folder={folder.resolve()}"], os.environ)
    if loaded.redis.url:
        yield AtRest("the store at redis.url", _options(folder), os.environ)
        return
    data = folder / "redis"
    if not (data / "appendonlydir").is_dir():
        raise NotFoundError(
            f"{data}: there is no store in it; if the run has a server of its own, name it: STRETTO_REDIS__URL=redis://…; "
            "a checkpoint has a snapshot too: --checkpoint step-N"
        )
    with contextlib.ExitStack() as stack:
        lock = runs.Lock(folder)
        stack.callback(lock.release)
        server = embedded.start(data, program=os.environ.get("STRETTO_REDIS_SERVER"))
        stack.callback(server.stop)
        yield AtRest(f"the store in {data}", _options(folder), {**os.environ, "STRETTO_REDIS__URL": server.url})
