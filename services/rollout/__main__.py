"""`python -m services.rollout --config recipe.toml [--set section.key=value …] [--replica-id NAME]`: one replica.

Exit codes: 0 drained, 1 crashed (start again), 2 bad recipe, 3 fenced (another process runs under this name).
"""

from __future__ import annotations

import asyncio
import gc
import platform
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stretto import prepare, service
from stretto.errors import RecipeError
from stretto.recipe import Recipe

if TYPE_CHECKING:
    from services.rollout.engine import Engine
    from services.rollout.reward import RewardPool
    from stretto.weights.layout import ArrayView

SWITCH_INTERVAL_S = 0.0001
"""The engine's thread and the event loop share one interpreter lock: neither may keep the other for 5 ms, the default."""
SERVER_GRACE_S = 1.0
"""For Generate calls in flight when the replica ends."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What of a replica depends on the engine."""

    engine: str
    """For people: "torch 2.9.0"."""
    device: str
    """Where weights are wanted: cpu, cuda, npu."""
    tokenizer: Any
    """Hugging Face's interface: encode, decode, batch_decode, apply_chat_template."""
    build: Callable[[], Engine]
    """A new engine, called on the thread that owns it."""
    convert: Callable[[Mapping[str, ArrayView]], Mapping[str, Any]]
    """Fetched weights as the engine's load_weights takes them."""


def main(argv: Sequence[str] | None = None, make_parts: Callable[[Recipe], Parts] | None = None) -> int:
    """The life of the process; `make_parts` takes the place of the recipe's engine."""
    parser = service.parser("rollout", "One rollout replica.")
    parser.add_argument("--replica-id", default=None, help="unique in the run; the same after a restart (default r-<host>-<port>)")
    arguments = parser.parse_args(argv)
    recipe = service.begin("rollout", arguments)
    return service.exit_code("rollout", lambda: _run(recipe, arguments.replica_id, make_parts or torch_parts))


def _run(recipe: Recipe, replica_id: str | None, make_parts: Callable[[Recipe], Parts]) -> None:
    service.limit_threads(recipe.rollout.threads)  # before the reward pool forks, too
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    prepare.wait_until_made(recipe, "model")
    service.run(_serve(recipe, replica_id or default_replica_id(platform.node(), recipe.rollout.listen), make_parts))


def default_replica_id(host: str, listen: str) -> str:
    """The same for the next process in this place, where one can tell: its first heartbeat gives back what this one held."""
    port = listen.rpartition(":")[2]
    place = port if port != "0" and host not in ("", "localhost") else secrets.token_hex(3)
    return f"r-{host}-{place}"


async def _serve(recipe: Recipe, replica_id: str, make_parts: Callable[[Recipe], Parts]) -> None:
    """The replica's whole life: build, work until told to drain, close."""
    from services.rollout.reward import RewardPool

    pool = RewardPool(recipe.reward.function, recipe.reward.workers, recipe.reward.deadline_s)  # its processes before our threads
    try:
        await _serve_with(recipe, replica_id, pool, make_parts(recipe))
    finally:
        await pool.close()


async def _serve_with(recipe: Recipe, replica_id: str, pool: RewardPool, parts: Parts) -> None:
    from services.rollout.driver import Driver
    from services.rollout.link import SchedulerLink
    from services.rollout.scoring import Scorer, decoder
    from services.rollout.server import SERVICE, RolloutServicer
    from services.rollout.weights import Follower
    from services.rollout.worker import Settings, Worker
    from stretto import endpoints, rpc, telemetry
    from stretto.v1 import rollout_pb2_grpc
    from stretto.weights.subscriber import Subscriber

    settings = Settings(
        recipe.sampling.group_size, recipe.rollout.prefetch_groups, recipe.scheduler.wait_max_s, recipe.scheduler.heartbeat_s
    )
    worker = Worker(settings, SchedulerLink(recipe.peers.scheduler, replica_id))
    service.drain_on_signals(worker.drain)
    driver = Driver(
        parts.build,
        policy=recipe.rollout.update_policy,
        keep_partials=recipe.scheduler.partial_rollout,
        on_ended=worker.on_ended,
        on_died=worker.on_died,
    )
    sync = recipe.weightsync
    subscriber = Subscriber(recipe.peers.weightsync, replica_id, sync.backend, parts.device, sync.phase_deadline_s)
    follower = Follower(
        subscriber,
        driver,
        is_pinned=lambda: worker.book.is_pinned,
        give_back=worker.give_back,
        on_change=worker.on_weights,
        lease_s=sync.lease_s,
        convert=parts.convert,
    )
    scorer = Scorer(pool, decoder(parts.tokenizer), is_wanted=worker.book.wants, on_scored=worker.on_scored)
    worker.attach(driver, follower, scorer)
    await driver.start()
    await pool.ready()
    servicer = RolloutServicer(recipe, worker, driver, parts.tokenizer, engine=parts.engine, num_reward_workers=pool.num_workers)
    server = await rpc.serve(recipe.rollout.listen, lambda s: rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, s), [SERVICE])
    metrics_port = telemetry.serve_metrics(recipe.rollout.metrics_listen)
    host = recipe.rollout.advertise or await asyncio.to_thread(endpoints.reachable_host, server.host, recipe.peers.scheduler)
    worker.address = f"{host}:{server.port}"
    _log_start(worker, parts.device, driver.vitals.slots, metrics_port)
    gc.collect()
    gc.freeze()  # what was imported is for ever: neither a collection in between nor the one at the exit visits them
    try:
        await worker.run()
    finally:
        await server.drain(SERVER_GRACE_S)
        await driver.stop()
        await subscriber.close()
        await worker.link.close()


def _log_start(worker: Any, device: str, slots: int, metrics_port: int) -> None:
    import logging

    fields = {
        "replica_id": worker.link.replica_id,
        "address": worker.address,
        "device": device,
        "slots": slots,
        "metrics_port": metrics_port,
    }
    logging.getLogger("stretto.rollout").info("started", extra={"fields": fields})


def torch_parts(recipe: Recipe) -> Parts:
    """Of the built-in engine. Imports torch: seconds."""
    import torch

    from services.rollout.engine_torch import TorchEngine
    from services.rollout.weights import as_torch

    torch.set_num_threads(recipe.rollout.threads)
    device = _device(recipe.rollout.device)

    def build() -> TorchEngine:
        return TorchEngine(
            recipe.model_path,
            device=device,
            dtype=getattr(torch, recipe.model.dtype),
            slots=recipe.rollout.slots,
            max_len=recipe.data.max_prompt_tokens + recipe.sampling.max_new_tokens,
        )

    return Parts(f"torch {torch.__version__}", device, _tokenizer(recipe), build, as_torch)


def _device(wanted: str) -> str:
    """ "auto" is the accelerator torch sees, else the CPU."""
    import torch

    if wanted != "auto":
        return wanted
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None or accelerator.type == "mps" else accelerator.type


def _tokenizer(recipe: Recipe) -> Any:
    from transformers import AutoTokenizer

    path = recipe.model_path
    if not (path / "config.json").is_file():
        raise RecipeError(f"model.path = '{path}': there is no config.json")
    return AutoTokenizer.from_pretrained(path)


if __name__ == "__main__":
    sys.exit(main())
