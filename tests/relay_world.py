"""A relay with real clients, in this process or in its own; and as a script, the clients that tests kill."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from services.weightsync import backends, server
from services.weightsync.relay import Relay
from stretto import endpoints, rpc
from stretto.v1 import weightsync_pb2 as pb
from stretto.v1 import weightsync_pb2_grpc as pb_grpc
from stretto.weights import layout as layouts
from stretto.weights import shm
from stretto.weights.layout import ArrayView, Bytes, VersionId
from stretto.weights.publisher import Publisher
from stretto.weights.subscriber import Fetched, Subscriber

WAIT_S = 20.0
"""Limit for whatever a test waits for; generous, as it is only ever reached by a failure."""
BUCKET_BYTES = 100_000
"""Several buckets in a model of 0.7 MB."""


def tensors(seed: int, num: int = 35, nbytes: int = 20_000) -> dict[str, ArrayView]:
    """A small model: `num` tensors with random bytes."""
    rng = np.random.default_rng(seed)
    return {f"layers.{i}.w": ArrayView("BF16", (nbytes // 2,), rng.integers(0, 256, nbytes, np.uint8)) for i in range(num)}


def same(got: Mapping[str, ArrayView], want: Mapping[str, ArrayView]) -> bool:
    """Bit for bit, and the same names, dtypes and shapes."""
    return got.keys() == want.keys() and all(
        (got[n].dtype, got[n].shape) == (want[n].dtype, want[n].shape) and np.array_equal(got[n].data, want[n].data) for n in want
    )


class World:
    """One relay's address, and clients for it that are closed at the end."""

    def __init__(self, address: str, relay: Relay | None = None) -> None:
        self.address, self._relay = address, relay
        self._publishers: list[Publisher] = []
        self._subscribers: list[Subscriber] = []
        self.stub: Any = pb_grpc.WeightSyncServiceStub(rpc.connect(address))

    @property
    def relay(self) -> Relay:
        assert self._relay is not None, "the relay is another process"
        return self._relay

    def publisher(self, backend: str = "auto", deadline_s: float = WAIT_S) -> Publisher:
        self._publishers.append(Publisher(self.address, backend, BUCKET_BYTES, deadline_s))
        return self._publishers[-1]

    def subscriber(self, name: str = "r0", backend: str = "auto", deadline_s: float = WAIT_S) -> Subscriber:
        self._subscribers.append(Subscriber(self.address, name, backend, "cpu", deadline_s))
        return self._subscribers[-1]

    async def status(self) -> pb.WeightSyncServiceGetStatusResponse:
        return await self.stub.GetStatus(pb.WeightSyncServiceGetStatusRequest(), timeout=WAIT_S)

    async def reader(self, name: str) -> pb.ReaderStatus:
        return next(r for r in (await self.status()).readers if r.replica_id == name)

    async def states(self) -> dict[tuple[int, int], str]:
        short = {pb.VERSION_STATE_STAGING: "STAGING", pb.VERSION_STATE_READY: "READY", pb.VERSION_STATE_RETIRED: "RETIRED"}
        return {(v.id.trainer_epoch, v.id.version): short[v.state] for v in (await self.status()).versions}

    async def close(self) -> None:
        for publisher in self._publishers:
            publisher.close()
        for subscriber in self._subscribers:
            await subscriber.close()


async def publish(publisher: Publisher, epoch: int, version: int, what: Mapping[str, ArrayView] | None = None) -> str:
    """Publish off the event loop (the relay may be on it); the backend that was used."""
    given = tensors(version) if what is None else what
    return (await asyncio.to_thread(publisher.publish, epoch, version, given)).backend


async def load(subscriber: Subscriber, held: tuple[int, int] | None = None) -> VersionId:
    """Fetch, compare with what `publish` sent under this version, release."""
    fetched = await must_fetch(subscriber, held)
    assert same(fetched.tensors, tensors(fetched.id.version)), f"{fetched.id} differs"
    assert await subscriber.release(fetched)
    return fetched.id


async def must_fetch(subscriber: Subscriber, held: tuple[int, int] | None = None) -> Fetched:
    fetched = await subscriber.fetch(held)
    assert fetched is not None, "nothing newer was offered"
    return fetched


@asynccontextmanager
async def relay_here(folder: Path, *, lease_s: float = 30.0, wanted: str = "auto") -> AsyncIterator[World]:
    """A relay on this event loop."""
    available, missing = backends.available(wanted, folder / "ws.sock")
    relay = Relay("here", available, missing, lease_s)
    await relay.start()
    listening = await server.serve("127.0.0.1:0", relay)
    world = World(listening.address, relay)
    try:
        yield world
    finally:
        await world.close()
        relay.drain()
        await listening.drain(0.0)
        await relay.close()


class RelayProcess:
    """`python -m services.weightsync`, on one port for as long as the test wants it."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self._folder = folder
        self.address = f"127.0.0.1:{endpoints.free_port()}"
        (folder / "recipe.toml").write_text(
            f'run = {{folder = "{folder}"}}\nmodel = {{make = "word-problems"}}\ndata = {{make = "word-problems"}}\n'
        )
        self._settings = [f"weightsync.listen={self.address}", *settings]
        self._process: subprocess.Popen[str] | None = None

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self._process is not None, "not started"
        return self._process

    def start(self) -> None:
        """Returns when it serves."""
        command = [sys.executable, "-m", "services.weightsync", "--config", str(self._folder / "recipe.toml"), "--set", *self._settings]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        _wait_for(self.process, self.process.stderr, '"event": "ready"')
        threading.Thread(target=self.process.stderr.read, daemon=True).start()  # type: ignore[union-attr] - or the pipe fills up

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)

    def stop(self) -> int:
        """Exit code after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)


@asynccontextmanager
async def relay_process(folder: Path, *settings: str) -> AsyncIterator[tuple[RelayProcess, World]]:
    """A relay in a process of its own."""
    process = RelayProcess(folder, *settings)
    process.start()
    world = World(process.address)
    try:
        yield process, world
    finally:
        await world.close()
        process.kill()


def client_process(role: str, address: str, *arguments: str) -> subprocess.Popen[str]:
    """This file as a script, once it has said that it is where it should be killed."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.relay_world", role, address, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    _wait_for(child, child.stdout, "there")
    return child


def _wait_for(process: subprocess.Popen[str], lines: Any, text: str) -> None:
    timer = threading.Timer(WAIT_S, process.kill)
    timer.start()
    try:
        seen: list[str] = []
        for line in lines:
            seen.append(line)
            if text in line:
                return
        raise AssertionError(f"ended before {text!r}: {''.join(seen)}")
    finally:
        timer.cancel()


# --------------------------------------------------------------------------------------- a publisher taken to pieces

MODEL = layouts.plan({name: (view.dtype, view.shape) for name, view in tensors(0).items()})
"""The layout of `tensors(…)`."""


def prepare_request(backend: str, epoch: int, version: int) -> pb.PreparePublishRequest:
    id = VersionId(epoch, version)
    layout = layouts.manifest(id, MODEL, bucket_bytes=BUCKET_BYTES)
    return pb.PreparePublishRequest(id=layouts.id_to_proto(id), layout=layout, backends=[backend])


def arena_of(version: int) -> Bytes:
    """The arena's bytes that `publish` sends under this version."""
    arena = np.empty(MODEL.arena_bytes, np.uint8)
    for offset, piece in layouts.pieces(MODEL, layouts.flatten(MODEL, tensors(version))):
        arena[offset : offset + len(piece)] = piece
    return arena


def map_for_writing(prepared: pb.PreparePublishResponse) -> Bytes:
    return shm.Slots(writable=True).get(prepared.slot_id, prepared.socket_path, prepared.token, MODEL.digest)


# ---------------------------------------------------------------------------------------------------- clients to kill


def _halt() -> None:
    sys.stdout.write("there\n")
    sys.stdout.flush()
    sys.stdin.read()


def _stage(address: str, backend: str, epoch: str, version: str) -> None:
    """A publisher that stops in the middle of its bytes."""
    stub: Any = pb_grpc.WeightSyncServiceStub(rpc.connect_blocking(address))
    prepared = stub.PreparePublish(prepare_request(backend, int(epoch), int(version)), timeout=WAIT_S)
    half = b"\xee" * (MODEL.arena_bytes // 2)
    if backend == "shm":
        map_for_writing(prepared)[: len(half)] = np.frombuffer(half, np.uint8)
        _halt()
        return

    def messages() -> Iterator[pb.PublishRequest]:
        yield pb.PublishRequest(slot_id=prepared.slot_id)
        yield pb.PublishRequest(data=half)
        _halt()

    stub.Publish(messages(), timeout=WAIT_S)


async def _hold(address: str, backend: str, name: str) -> None:
    """A reader that stops between fetch and release."""
    subscriber = Subscriber(address, name, backend)
    fetched = await subscriber.fetch(None)
    assert fetched is not None
    await asyncio.to_thread(_halt)


if __name__ == "__main__":
    if sys.argv[1] == "stage":
        _stage(*sys.argv[2:])
    else:
        asyncio.run(_hold(*sys.argv[2:]))
