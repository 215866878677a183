"""`python -m services.scheduler --config recipe.toml [--set section.key=value …]`: the scheduler of one run.

Several may run on one Redis behind one name: one leads, the others stand by (health NOT_SERVING) and take over when it
resigns or is not heard for scheduler.leader_s.

Exit codes: 0 drained, 1 crashed (start again), 2 bad recipe, 3 fenced (another scheduler took over this run).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stretto import prepare, service
from stretto.errors import InvalidArgumentError, RecipeError, RefusedError, StrettoError
from stretto.recipe import Recipe

if TYPE_CHECKING:
    import grpc.aio

    from services.scheduler.controller import Controller

SERVER_GRACE_S = 2.0
"""For calls in flight when the scheduler ends; long polls are cut."""
RESIGN_S = 1.0
"""For the store to take our resignation; without it a standby waits for scheduler.leader_s."""


def main(argv: Sequence[str] | None = None) -> int:
    recipe = service.begin("scheduler", service.parser("scheduler", "The scheduler of one run.").parse_args(argv))
    return service.exit_code("scheduler", lambda: _run(recipe), (InvalidArgumentError, RefusedError))


def _run(recipe: Recipe) -> None:
    if not recipe.redis.url:
        raise RecipeError("redis.url is empty: `stretto run` starts an embedded server; a scheduler on its own needs one")
    service.limit_threads(1)
    prepare.make_missing(recipe, "data", prepare.write_data)
    prepare.wait_until_made(recipe, "model")  # its tokenizer
    service.run(_serve(recipe))


async def _serve(recipe: Recipe) -> None:
    """The scheduler's whole life: open the store and the data, listen, take over the run, serve until told to drain."""
    from services.scheduler.controller import Controller
    from services.scheduler.data import Dataset
    from services.scheduler.ledger import Ledger
    from stretto.store import Store

    drain_asked = asyncio.Event()
    service.drain_on_signals(drain_asked.set)
    store = await Store.open(
        recipe.redis.url,
        timeout_s=recipe.redis.timeout_s,
        outage_s=recipe.redis.outage_s,
        strict=recipe.run.durability == "strict",
    )
    try:
        dataset = await asyncio.to_thread(Dataset.open, recipe.train_path, recipe=recipe)
        held_out = recipe.validation_path and await asyncio.to_thread(Dataset.open, recipe.validation_path, recipe=recipe)
        exam = held_out.validation_prompts if held_out else None

        controller = Controller(recipe, Ledger(store, recipe.run.name), dataset, exam)
        await _serve_with(recipe, controller, drain_asked)
    finally:
        await store.close()


async def _serve_with(recipe: Recipe, controller: Controller, drain_asked: asyncio.Event) -> None:
    from services.scheduler.server import SchedulerServicer
    from stretto import rpc, telemetry
    from stretto.v1.scheduler_pb2_grpc import add_SchedulerServiceServicer_to_server

    listen = recipe.scheduler.listen

    def register(server: grpc.aio.Server) -> None:
        add_SchedulerServiceServicer_to_server(SchedulerServicer(controller), server)

    server = await rpc.serve(listen, register, [rpc.SCHEDULER], closed="this scheduler does not lead the run")
    metrics_port = telemetry.serve_metrics(recipe.scheduler.metrics_listen)

    async def lead() -> None:
        await controller.start(f"{socket.gethostname()}/{listen}")
        await server.open()
        fields = {"address": server.address, "metrics_port": metrics_port, "epoch": controller.ledger.epoch}
        logging.getLogger("stretto.scheduler").info("started", extra={"fields": fields})
        await controller.run()

    work, drain = asyncio.create_task(lead()), asyncio.create_task(drain_asked.wait())
    try:
        await asyncio.wait((work, drain), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()  # raises what ended it
        logging.getLogger("stretto.scheduler").info("draining")
    finally:
        await server.drain(SERVER_GRACE_S)
        for task in (work, drain):
            task.cancel()
        await asyncio.gather(work, drain, return_exceptions=True)
        with contextlib.suppress(StrettoError, TimeoutError):
            async with asyncio.timeout(RESIGN_S):
                await controller.resign()


if __name__ == "__main__":
    from services.scheduler.tokens import hide_torch

    hide_torch()  # the tokenizer needs none, and its import would cost 2 s
    sys.exit(main())
