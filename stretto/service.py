"""The process of a service: its arguments, the recipe, its end.

    parser -> begin -> recipe -> work                        exit code
                |                | returns                       0    drained or done
                |                | raises what is incurable      2    one message on stderr
                +-- not valid ---|---------------------------->  2
                                 | raises FencedError            3    a newer incarnation took over
                                 | raises anything else          1    crashed: start it again

`restarts.py` says what the supervisor does about each. Imports what parsing needs and no more, so that a wrong word on the
command line is answered at once: what is heavy is imported by the work.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from stretto import recipe as recipes
from stretto import telemetry
from stretto.errors import FencedError, InvalidArgumentError, RecipeError, StrettoError
from stretto.recipe import Recipe
from stretto.restarts import FENCED_CODE, RECIPE_CODE


def parser(name: str, about: str) -> argparse.ArgumentParser:
    """With the arguments that all services take."""
    made = argparse.ArgumentParser(prog=f"python -m services.{name}", description=about)
    made.add_argument("--config", required=True, help="recipe (TOML)")
    made.add_argument("--set", nargs="+", action="extend", default=[], metavar="section.key=value", help="override the recipe")
    return made


def begin(name: str, arguments: argparse.Namespace) -> Recipe:
    """The recipe, with the process's log set up. SIGTERM ends the process at once until somebody else takes it.

    Raises SystemExit(2) with one message when the recipe is not valid.
    """
    try:
        recipe = recipes.load(arguments.config, arguments.set, os.environ)
    except RecipeError as err:
        sys.stderr.write(f"{err.message}\n")
        raise SystemExit(RECIPE_CODE) from None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    telemetry.setup(name, recipe.run.log_level)
    return recipe


def exit_code(name: str, work: Callable[[], object], incurable: tuple[type[StrettoError], ...] = (InvalidArgumentError,)) -> int:
    """Do the work; the exit code that says how it ended. `incurable`: what it raises where a restart would not help."""
    log = logging.getLogger(f"stretto.{name}")
    try:
        work()
    except FencedError as err:
        log.error("fenced", extra={"fields": {"error": err.message}})
        return FENCED_CODE
    except incurable as err:
        sys.stderr.write(f"{err.message}\n")
        return RECIPE_CODE
    except StrettoError as err:
        log.error("crashed", extra={"fields": {"error": err.message}})
        return 1
    return 0


def limit_threads(num_threads: int) -> None:
    """Threads of the libraries that compute. Only before they are imported, as that is when they look."""
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def run(serve: Coroutine[Any, Any, None]) -> None:
    """The service's event loop until `serve` ends. libuv's loop: a fifth less CPU per call than asyncio's own."""
    import uvloop

    uvloop.run(serve)


def drain_on_signals(drain: Callable[[], object]) -> None:
    """SIGTERM and SIGINT call `drain` in the running event loop."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, drain)
