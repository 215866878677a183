"""`python -m tests.bench.weights [--mib 512] [--rounds 7]`: weight sync against memcpy, in one run on one machine.

The relay is a process of its own, publisher and subscriber are here. Best of all rounds: on a shared machine the others say
more about the neighbours. GB = 1e9 bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from services.weightsync.memory import Memory
from stretto.weights.layout import ArrayView, Bytes
from stretto.weights.publisher import Publisher, PublishReport
from stretto.weights.subscriber import Subscriber
from tests.relay_world import RelayProcess, relay_process, tensors

SMALL = {"num": 35, "nbytes": 20_000}
"""The quick start's model: 0.7 MB in 35 tensors."""


@dataclass
class Row:
    name: str
    nbytes: int
    seconds: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.nbytes / min(self.seconds) / 1e9

    def line(self, memcpy: float) -> str:
        best, median = min(self.seconds) * 1e3, sorted(self.seconds)[len(self.seconds) // 2] * 1e3
        return f"{self.name:44} {best:10.2f} {median:10.2f} {self.rate:8.2f} {self.rate / memcpy:8.2f}\n"


def large_model(mib: int) -> dict[str, ArrayView]:
    """200 tensors, from norms of 4 KiB to matrices of an eighth of the whole."""
    rng, total, model = np.random.default_rng(0), mib << 20, {}
    sizes = [total // 8] * 2 + [total * 3 // 4 // 150] * 150 + [4096] * 48
    for i, nbytes in enumerate(sizes):
        nbytes -= nbytes % 64
        model[f"layers.{i:03}.w"] = ArrayView("BF16", (nbytes // 2,), rng.integers(0, 256, nbytes, np.uint8))
    return model


def arena_bytes(model: Mapping[str, ArrayView]) -> int:
    return sum(len(view.data) for view in model.values())


def bench_memcpy(model: Mapping[str, ArrayView], rounds: int) -> Row:
    """One thread, tensor by tensor, into shared memory whose pages are all present: what a publish cannot beat."""
    nbytes = arena_bytes(model)
    row, memory = Row("memcpy into warm shared memory, 1 thread", nbytes), Memory(nbytes, is_shareable=True)
    for _ in range(rounds):
        begun_s, offset = time.perf_counter(), 0
        for view in model.values():
            memory.bytes[offset : offset + len(view.data)] = view.data
            offset += len(view.data)
        row.seconds.append(time.perf_counter() - begun_s)
    memory.close()
    return row


def copy_out(tensors_read: Mapping[str, ArrayView], into: Bytes) -> None:
    offset = 0
    for view in tensors_read.values():
        into[offset : offset + len(view.data)] = view.data
        offset += len(view.data)


async def timed(row: Row, work: Callable[[], Awaitable[Any]]) -> Any:
    begun_s = time.perf_counter()
    result = await work()
    row.seconds.append(time.perf_counter() - begun_s)
    return result


async def bench_sync(address: str, epoch: int, backend: str, model: Mapping[str, ArrayView], what: str, rounds: int) -> list[Row]:
    """Publish, fetch, copy out, again and again. The first round warms slots, mappings and connections."""
    nbytes = arena_bytes(model)
    published, copied = Row(f"{backend}: publish {what}", nbytes), Row(f"{backend}:   of it copy or send, without hashes", nbytes)
    fetched_row, loaded = Row(f"{backend}: fetch + verify {what}", nbytes), Row(f"{backend}: fetch + verify + copy out", nbytes)
    publisher, subscriber = Publisher(address, backend), Subscriber(address, f"bench-{epoch}", backend)
    into, held = np.zeros(nbytes, np.uint8), None
    for version in range(rounds + 4):  # 3 slots to warm, and one more
        if version == 4:
            for row in (published, copied, fetched_row, loaded):
                row.seconds.clear()
        report: PublishReport = await timed(published, lambda v=version: asyncio.to_thread(publisher.publish, epoch, v, model))
        copied.seconds.append(report.copy_ms / 1e3)
        begun_s = time.perf_counter()
        fetched = await timed(fetched_row, lambda h=held: subscriber.fetch(h))
        copy_out(fetched.tensors, into)
        loaded.seconds.append(time.perf_counter() - begun_s)
        assert await subscriber.release(fetched)
        held = fetched.id
    publisher.close()
    await subscriber.close()
    return [published, copied, fetched_row, loaded]


async def main(mib: int, rounds: int) -> None:
    large, small = large_model(mib), tensors(0, **SMALL)
    memcpy = await asyncio.to_thread(bench_memcpy, large, rounds)
    rows = [memcpy]
    with tempfile.TemporaryDirectory() as folder:
        async with relay_process(Path(folder)) as (relay, _):
            rows += await bench_all(relay, large, small, f"{mib} MiB", rounds)
    load = os.getloadavg()[0]
    sys.stdout.write(f"{os.cpu_count()} cores, load {load:.1f}\n{'':44} {'best ms':>10} {'median ms':>10} {'GB/s':>8} {'/memcpy':>8}\n")
    for row in rows:
        sys.stdout.write(row.line(memcpy.rate))


async def bench_all(
    relay: RelayProcess, large: Mapping[str, ArrayView], small: Mapping[str, ArrayView], what: str, rounds: int
) -> list[Row]:
    rows: list[Row] = []
    for epoch, backend in enumerate(("shm", "grpc"), start=1):
        rows += await bench_sync(relay.address, epoch, backend, large, what, rounds)
    for epoch, backend in enumerate(("shm", "grpc"), start=3):
        rows += await bench_sync(relay.address, epoch, backend, small, "0.7 MB, 35 tensors", 30)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.mib, arguments.rounds))
