"""`python -m services.weightsync --config recipe.toml [--set section.key=value …]`: the relay.

Exit codes: 0 drained, 1 crashed or the address is taken (start again: trainer and replicas come back by themselves), 2 bad recipe.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import sys
from collections.abc import Sequence

from stretto import recipe as recipes
from stretto.errors import InvalidArgumentError, RecipeError, RefusedError, UnavailableError
from stretto.recipe import Recipe

DRAIN_S = 3.0
"""For transfers in flight when the relay ends; the supervisor waits about 5 s."""


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m services.weightsync", description="The relay of weights.")
    parser.add_argument("--config", required=True, help="recipe (TOML)")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="section.key=value", help="override the recipe")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    try:
        recipe = recipes.load(arguments.config, arguments.set, os.environ)
    except RecipeError as err:
        sys.stderr.write(f"{err.message}\n")
        return 2

    from stretto import telemetry

    log = telemetry.setup("weightsync", recipe.run.log_level)
    try:
        asyncio.run(_serve(recipe))
    except InvalidArgumentError as err:
        sys.stderr.write(f"{err.message}\n")
        return 2
    except (RefusedError, UnavailableError) as err:
        log.error("cannot_start", extra={"fields": {"error": err.message}})
        return 1
    return 0


async def _serve(recipe: Recipe) -> None:
    """The relay's whole life: listen, work until told to drain, close."""
    import logging

    from services.weightsync import backends, server
    from services.weightsync.backends import shm
    from services.weightsync.relay import Relay
    from stretto import telemetry

    log = logging.getLogger("stretto.weightsync")
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    settings = recipe.weightsync
    available, missing = backends.available(settings.backend, shm.socket_path(settings.socket, recipe.run.folder))
    relay = Relay(secrets.token_hex(4), available, missing, settings.lease_s)
    await relay.start()
    try:
        listening = await server.serve(settings.listen, relay)
        metrics_port = telemetry.serve_metrics(settings.metrics_listen)
        fields = {"listen": listening.address, "metrics_port": metrics_port, "backends": sorted(available)}
        log.info("ready", extra={"fields": fields | {"socket": available["shm"].endpoint if "shm" in available else None}})
        await stop.wait()
        log.info("draining")
        relay.drain()
        await listening.drain(DRAIN_S)
    finally:
        await relay.close()


if __name__ == "__main__":
    sys.exit(main())
