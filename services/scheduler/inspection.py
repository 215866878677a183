"""`python -m services.scheduler.inspection --config recipe.toml verify | show [UID] | export`: reads a ledger nobody serves.

    store, or --checkpoint FOLDER/ledger.bin --> Snapshot --> JSON on stdout: the report, or a line per prompt

It opens the store, reads and ends: it never claims the run, and every transition of an unclaimed ledger is refused by its
scripts. `stretto ledger …` starts it for a run that is not running; a live run answers by RPC.
Exit codes: 0 said, 2 could not look: one message on stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from stretto import service
from stretto.errors import CorruptError, NotFoundError, RecipeError, StrettoError, UnavailableError
from stretto.recipe import Recipe

if TYPE_CHECKING:
    from services.scheduler.audit import Snapshot
    from services.scheduler.ledger import Ledger
    from stretto.v1.ledger_pb2 import LedgerGroup, LedgerSnapshot

READS_MAX = 5
"""A store that somebody writes meanwhile is read again so often."""


def main(argv: Sequence[str] | None = None) -> int:
    made = service.parser("scheduler.inspection", "Reads the ledger of a run that is not running.")
    made.add_argument("--checkpoint", type=Path, help="read this ledger.bin instead of the store")
    made.add_argument("verb", choices=["verify", "show", "export"])
    made.add_argument("uid", nargs="?", default="", help="for show: one prompt, by uid or ordinal")
    arguments = made.parse_args(argv)
    recipe = service.begin("inspection", arguments)
    return service.exit_code("inspection", lambda: service.run(_say(recipe, arguments)), (StrettoError,))


async def _say(recipe: Recipe, arguments: argparse.Namespace) -> None:
    if arguments.checkpoint is not None:
        _say_cut(recipe, arguments, _cut(arguments.checkpoint))
        return
    from services.scheduler.ledger import Ledger
    from stretto.store import Store

    if not recipe.redis.url:
        raise RecipeError("redis.url is empty: `stretto ledger` starts an embedded server on the run's data; this needs a running one")
    store = await Store.open(recipe.redis.url, timeout_s=recipe.redis.timeout_s, outage_s=recipe.redis.timeout_s)
    try:
        ledger = Ledger(store, recipe.run.name)
        seen = await _read(ledger, with_payloads=arguments.verb == "verify")
        if not seen.run.window:
            raise NotFoundError(f"the store knows no run {recipe.run.name!r}")
        if arguments.verb == "show" and arguments.uid:
            _print(iter([await ledger.life(seen, arguments.uid)]))
        else:
            _print_all(recipe, arguments.verb, seen)
    finally:
        await store.close()


async def _read(ledger: Ledger, *, with_payloads: bool) -> Snapshot:
    """All rounds of one revision. Raises UnavailableError when the store never stood still."""
    for _ in range(READS_MAX):
        before = (await ledger.reread()).rev
        seen = await ledger.snapshot(with_payloads=with_payloads)
        if (await ledger.reread()).rev == before:
            return seen
    raise UnavailableError("the store changed during every reading: a scheduler serves it; ask that one with --address HOST:PORT")


def _cut(path: Path) -> LedgerSnapshot:
    from google.protobuf.message import DecodeError

    from stretto.v1.ledger_pb2 import LedgerSnapshot

    try:
        return LedgerSnapshot.FromString(path.read_bytes())
    except OSError as err:
        raise NotFoundError(f"{path}: {err.strerror}") from None
    except DecodeError as err:
        raise CorruptError(f"{path} is no ledger snapshot: {err}") from None


def _say_cut(recipe: Recipe, arguments: argparse.Namespace, cut: LedgerSnapshot) -> None:
    from services.scheduler import ledger, lines

    seen = ledger.snapshot_of_cut(cut)
    if not (arguments.verb == "show" and arguments.uid):
        _print_all(recipe, arguments.verb, seen)
        return
    if (group := lines.find(seen, arguments.uid)) is None:
        raise NotFoundError(f"{arguments.uid} is not in the snapshot of step {cut.step}")
    answers = dict(cut.hashes[f"traj:{group.uid}"].fields) if f"traj:{group.uid}" in cut.hashes else {}
    _print(iter([lines.fill(group, cut.hashes["prompts"].fields.get(group.uid), answers)]))


def _print_all(recipe: Recipe, verb: str, seen: Snapshot) -> None:
    from services.scheduler import lines
    from stretto import results

    if verb == "verify":
        json.dump(asdict(results.ledger_report(lines.report(seen, recipe.scheduler.max_lag))), sys.stdout)
    else:
        _print(lines.lines(seen, open_only=verb == "show"))


def _print(groups: Iterator[LedgerGroup]) -> None:
    from stretto import results

    for group in groups:
        sys.stdout.write(json.dumps(asdict(results.ledger_group(group))) + "\n")


if __name__ == "__main__":
    sys.exit(main())
