"""`python -m services.weightsync --config recipe.toml [--set section.key=value …]`: the relay.

Exit codes: 0 drained, 1 crashed or the address is taken (start again: trainer and replicas come back by themselves), 2 bad recipe.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Sequence

from stretto import service
from stretto.recipe import Recipe

DRAIN_S = 3.0
"""For transfers in flight when the relay ends; the supervisor waits about 5 s."""


def main(argv: Sequence[str] | None = None) -> int:
    recipe = service.begin("weightsync", service.parser("weightsync", "The relay of weights.").parse_args(argv))
    return service.exit_code("weightsync", lambda: service.run(_serve(recipe)))


async def _serve(recipe: Recipe) -> None:
    """The relay's whole life: listen, work until told to drain, close."""
    import logging

    from services.weightsync import backends, server
    from services.weightsync.backends import shm
    from services.weightsync.relay import Relay
    from stretto import telemetry

    log = logging.getLogger("stretto.weightsync")
    stop = asyncio.Event()
    service.drain_on_signals(stop.set)

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
