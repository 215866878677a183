"""The scheduler alone, as a process with a real store: transitions per second through gRPC, and how fast a lease wakes up.

    OMP_NUM_THREADS=1 python -m tests.bench.ledger [--seconds 8] [--json]

A transition is one lease granted or one trajectory's end reported: each is durable in the store before it is answered. One client
stands for replica and trainer, so the ring turns as in a run: lease, report, sample, commit.
A wake-up is the time from the answer that makes room (a commit) to the lease a waiting replica gets for it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stretto import embedded, endpoints, prepare, rpc
from stretto import recipe as recipes
from stretto.errors import StrettoError
from stretto.v1 import scheduler_pb2 as pb
from stretto.v1 import types_pb2 as types
from stretto.v1.scheduler_pb2_grpc import SchedulerServiceStub

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes/word-problems.toml"
MADE = ROOT / "build/bench/made"
TOKENS, CALL_S, START_S = 12, 20.0, 60.0
WAKE_UPS = 300


class Ring:
    """The callers of one scheduler."""

    def __init__(self, target: str) -> None:
        self.stub: Any = SchedulerServiceStub(rpc.connect(target))
        self.held = types.WeightsId()
        self.replica_epoch = self.trainer_epoch = self.num_calls = 0

    async def open(self, batch_groups: int) -> None:
        opened = await self.stub.OpenTrainer(
            pb.OpenTrainerRequest(operation_id="bench", address="-", total_steps=1_000_000, batch_groups=batch_groups), timeout=CALL_S
        )
        self.trainer_epoch = opened.trainer_epoch
        self.held = types.WeightsId(trainer_epoch=self.trainer_epoch, version=0)
        await self.beat()

    async def beat(self) -> None:
        request = pb.HeartbeatRequest(replica_id="r", replica_epoch=self.replica_epoch, state=pb.REPLICA_STATE_RUNNING, held=self.held)
        self.replica_epoch = (await self.stub.Heartbeat(request, timeout=CALL_S)).replica_epoch

    async def lease(self, wanted: int, wait_s: float = 5.0) -> list[pb.Lease]:
        """A real replica asks again when it holds newer weights; a short `wait_s` stands for that."""
        self.num_calls += 1
        request = pb.LeasePromptsRequest(
            replica_id="r",
            replica_epoch=self.replica_epoch,
            operation_id=f"l{self.num_calls}",
            max_prompts=wanted,
            held=self.held,
            wait_s=wait_s,
        )
        return list((await self.stub.LeasePrompts(request, timeout=CALL_S)).leases)

    async def report(self, leases: list[pb.Lease]) -> int:
        reports = [_report(lease, index) for lease in leases for index in lease.missing]
        await self.stub.ReportTrajectories(
            pb.ReportTrajectoriesRequest(replica_id="r", replica_epoch=self.replica_epoch, reports=reports), timeout=CALL_S
        )
        return len(reports)

    async def train(self, step: int) -> bool:
        """False when no batch came within 5 s."""
        request = pb.SampleBatchRequest(trainer_epoch=self.trainer_epoch, step=step, wait_s=5.0)
        if not [message async for message in self.stub.SampleBatch(request, timeout=CALL_S) if message.groups]:
            return False
        self.held = types.WeightsId(trainer_epoch=self.trainer_epoch, version=step)
        await self.stub.CommitStep(pb.CommitStepRequest(trainer_epoch=self.trainer_epoch, step=step), timeout=CALL_S)
        if step % 10 == 0:
            await self.stub.CommitCheckpoint(pb.CommitCheckpointRequest(trainer_epoch=self.trainer_epoch, step=step), timeout=CALL_S)
        return True


def _report(lease: pb.Lease, index: int) -> pb.TrajectoryReport:
    spans = [types.VersionSpan(version=lease.version_begin, num_tokens=TOKENS)]
    trajectory = types.Trajectory(
        prompt_uid=lease.prompt.uid,
        index=index,
        token_ids=bytes(4 * TOKENS),
        logprobs=bytes(4 * TOKENS),
        spans=spans,
        finish_reason=types.FINISH_REASON_STOP,
        reward=float(index % 2),
    )
    return pb.TrajectoryReport(attempt=lease.attempt, trajectory=trajectory)


async def throughput(ring: Ring, seconds: float) -> dict[str, float]:
    """Replica and trainer side by side, as fast as the scheduler lets them."""
    num, step, began_s = 0, 0, time.perf_counter()

    async def replica() -> None:
        nonlocal num
        while time.perf_counter() - began_s < seconds:
            leases = await ring.lease(32, wait_s=0.02)
            num += len(leases) + (await ring.report(leases) if leases else 0)

    async def trainer() -> None:
        nonlocal step
        while time.perf_counter() - began_s < seconds and await ring.train(step + 1):
            step += 1

    await asyncio.gather(replica(), trainer())
    wall_s = time.perf_counter() - began_s
    return {"ledger_transitions_per_s": num / wall_s, "ledger_steps_per_s": step / wall_s}


async def wake_ups(ring: Ring, batch_groups: int) -> dict[str, float]:
    """Synchronous window: every commit makes room for exactly one batch, for which a replica already waits."""
    waits_ms: list[float] = []
    leases = await ring.lease(batch_groups)
    for step in range(1, WAKE_UPS + 1):
        while len(leases) < batch_groups:
            leases += await ring.lease(batch_groups)
        await ring.report(leases)
        ring.held = types.WeightsId(trainer_epoch=ring.trainer_epoch, version=step)
        waiting = asyncio.create_task(ring.lease(batch_groups))
        await ring.train(step)
        freed_s = time.perf_counter()
        leases = await waiting
        waits_ms.append(1000 * (time.perf_counter() - freed_s))
    waits_ms.sort()
    return {"lease_wakeup_p50_ms": waits_ms[len(waits_ms) // 2], "lease_wakeup_p99_ms": waits_ms[int(0.99 * len(waits_ms))]}


@contextmanager
def scheduler(folder: Path, batch_groups: int, max_lag: int) -> Iterator[str]:
    """A scheduler process on an embedded server; its address."""
    folder.mkdir()
    server = embedded.start(folder / "redis")
    address = f"127.0.0.1:{endpoints.free_port()}"
    settings = [
        f"redis.url={server.url}",
        f"scheduler.listen={address}",
        f"scheduler.batch_groups={batch_groups}",
        f"scheduler.max_lag={max_lag}",
    ]
    quiet = [
        "validation.every_steps=0",
        "validation.at_start=false",
        "validation.at_end=false",
        "trainer.steps=1000000",
        "run.log_level=WARNING",
    ]
    command = [sys.executable, "-m", "services.scheduler", "--config", str(RECIPE), "--set", f"run.folder={MADE}", *settings, *quiet]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT)
    try:
        yield address
    finally:
        process.terminate()
        process.wait(20)
        server.stop()


async def ring_of(address: str, batch_groups: int) -> Ring:
    ring = Ring(address)
    await rpc.retry(lambda: ring.open(batch_groups), deadline_s=START_S, what="scheduler")
    return ring


async def measure_throughput(address: str, seconds: float) -> dict[str, float]:
    return await throughput(await ring_of(address, 32), seconds)


async def measure_wake_ups(address: str) -> dict[str, float]:
    return await wake_ups(await ring_of(address, 4), 4)


def measure(seconds: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        with scheduler(Path(folder) / "fast", 32, 2) as address:
            found = asyncio.run(measure_throughput(address, seconds))
        with scheduler(Path(folder) / "woken", 4, 0) as address:
            return found | asyncio.run(measure_wake_ups(address))


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.bench.ledger", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    for task in prepare.tasks(recipes.load(RECIPE, [f"run.folder={MADE}"])):
        if not task.is_made:
            prepare.make(
                task, MADE, lambda command, log: subprocess.run(command, stdout=log.open("w"), stderr=subprocess.STDOUT).returncode
            )
    try:
        found = measure(given.seconds)
    except StrettoError as err:
        sys.exit(err.message)
    lines = [json.dumps(found)] if given.json else [f"{name:28} {value:10,.1f}" for name, value in found.items()]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
