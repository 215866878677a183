"""The trainer's process: its parts put together, its gRPC face.

main thread    Loop: sample, train, publish, commit
control        asyncio loop with TrainerService, health and reflection
feed, writer   see feed.py and loop.py
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import grpc.aio

from services.trainer.control import STOP_S, SaveRequests, Status, Stop, Stopping
from services.trainer.ledger import Ledger
from services.trainer.loop import CannotResumeError, Learner, Loop
from services.trainer.publish import Relay
from stretto import endpoints, prepare, rpc, service, telemetry
from stretto.errors import RefusedError
from stretto.recipe import Recipe
from stretto.v1 import trainer_pb2 as pb
from stretto.v1 import trainer_pb2_grpc as pb_grpc
from stretto.weights.publisher import Publisher

log = logging.getLogger("stretto.trainer")

SERVICE = "stretto.v1.TrainerService"
DRAIN_S = 1.0
"""What calls in flight get when the process ends."""


class TrainerService(pb_grpc.TrainerServiceServicer):
    """Answers from the loop's status; passes requests to it."""

    def __init__(self, status: Status, saves: SaveRequests) -> None:
        self._status, self._saves = status, saves

    async def GetStatus(self, request: pb.TrainerServiceGetStatusRequest, context: Any) -> pb.TrainerServiceGetStatusResponse:  # noqa: N802
        s = self._status
        activity, since_s = s.activity
        return pb.TrainerServiceGetStatusResponse(
            trainer_epoch=s.trainer_epoch,
            step=s.step,
            total_steps=s.total_steps,
            optimizer_steps=s.optimizer_steps,
            checkpoint_step=s.checkpoint_step,
            activity=activity,
            activity_s=time.monotonic() - since_s,
            wait_reason=s.wait_reason,
            metrics=s.metrics,
            cut_id=s.cut_id,
        )

    async def SaveCheckpoint(self, request: pb.SaveCheckpointRequest, context: Any) -> pb.SaveCheckpointResponse:  # noqa: N802
        # shielded: a caller that leaves must not cancel the answer of another with the same operation id
        saved = await asyncio.shield(asyncio.wrap_future(self._saves.ask(request.operation_id)))
        return pb.SaveCheckpointResponse(step=saved.step, path=saved.path, cut_id=saved.cut_id)


class ControlServer:
    """TrainerService on a thread with its own event loop, so that it answers while the main thread trains."""

    def __init__(self, listen: str, servicer: TrainerService) -> None:
        """Returns when the server listens. Raises UnavailableError when the port is taken."""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="control", daemon=True).start()

        def register(server: grpc.aio.Server) -> None:
            pb_grpc.add_TrainerServiceServicer_to_server(servicer, server)

        async def start() -> rpc.Server:
            return await rpc.serve(listen, register, [SERVICE])

        self._server = asyncio.run_coroutine_threadsafe(start(), self._loop).result(timeout=30.0)
        self.host, self.port = self._server.host, self._server.port

    def drain(self) -> None:
        """Let calls in flight end, then stop."""
        asyncio.run_coroutine_threadsafe(self._server.drain(DRAIN_S), self._loop).result(timeout=DRAIN_S + 5.0)
        self._loop.call_soon_threadsafe(self._loop.stop)


def stop_on_signals(stop: Stop) -> None:
    """SIGTERM and SIGINT ask the loop to stop; STOP_S later the process ends wherever it is: it may be killed anywhere."""

    def request(number: int, frame: FrameType | None) -> None:
        if stop.is_requested:
            return
        stop.request()
        last = threading.Timer(STOP_S, _leave)
        last.daemon = True
        last.start()

    signal.signal(signal.SIGTERM, request)
    signal.signal(signal.SIGINT, request)


def _leave() -> None:
    log.warning("stopped_in_the_middle", extra={"fields": {"after_s": STOP_S}})
    os._exit(0)


def resolve_device(wanted: str) -> str:
    """A torch device for "auto", "cpu", "cuda" or "npu". Raises RefusedError naming what is missing."""
    import torch

    present = ["cpu"]
    if torch.cuda.is_available():
        present.insert(0, "cuda")
    elif (npu := getattr(torch, "npu", None)) is not None and npu.is_available():
        present.insert(0, "npu")
    if wanted == "auto":
        return present[0]
    if wanted.split(":")[0] not in present:
        raise RefusedError(f"trainer.device = {wanted!r}: this machine has {present}")
    return wanted


def make_learner(recipe: Recipe) -> Learner:
    """The real one, of a model that is made if it is missing. Takes seconds; the control server answers meanwhile."""
    from transformers.utils import logging as transformers_logging

    from services.trainer import make_model
    from services.trainer.step import Learner as RealLearner

    transformers_logging.disable_progress_bar()
    prepare.make_missing(recipe, "model", make_model.make)
    return RealLearner(recipe, recipe.model_path, resolve_device(recipe.trainer.device))


def serve(recipe: Recipe, make: Callable[[], Learner], stop: Stop) -> None:
    """Run the trainer to its end. Raises what Loop.run raises."""
    status, saves = Status(recipe.trainer.steps), SaveRequests()
    metrics_port = telemetry.serve_metrics(recipe.trainer.metrics_listen)
    control = ControlServer(recipe.trainer.listen, TrainerService(status, saves))
    host = recipe.trainer.advertise or endpoints.reachable_host(control.host, recipe.peers.scheduler)
    address = f"{host}:{control.port}"
    log.info("listening", extra={"fields": {"address": address, "metrics_port": metrics_port, "pid": os.getpid()}})
    limit_s = recipe.trainer.sample_deadline_s
    ledger = Ledger(recipe.peers.scheduler, limit_s, stop.sleep)
    weights = recipe.weightsync
    publisher = Publisher(recipe.peers.weightsync, weights.backend, weights.bucket_mb << 20, weights.phase_deadline_s)
    try:
        Loop(recipe, ledger, Relay(publisher, limit_s, stop.sleep), stop, saves, status, address).run(make)
    finally:
        control.drain()


def main(recipe: Recipe, make: Callable[[Recipe], Learner] = make_learner) -> int:
    """The whole life of the process after its start; its exit code."""
    stop = Stop()
    stop_on_signals(stop)

    def work() -> None:
        try:
            serve(recipe, lambda: make(recipe), stop)
        except Stopping:
            log.info("stopped")
        else:
            log.info("done")

    return service.exit_code("trainer", work, (CannotResumeError,))
