"""Processes are killed at the worst moment; whoever is left keeps whole weights, and the next sync works."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from stretto.errors import UnavailableError
from stretto.weights.layout import ArrayView
from stretto.weights.subscriber import Subscriber
from tests.relay_world import (
    WAIT_S,
    World,
    client_process,
    load,
    must_fetch,
    publish,
    relay_here,
    relay_process,
    same,
    tensors,
)
from tests.waits import eventually

both = pytest.mark.parametrize("backend", ["shm", "grpc"])


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def num_mapped_slots() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:stretto-weights")


@both
async def test_a_publisher_killed_in_the_middle_leaves_the_old_version_and_room_for_the_next(tmp_path: Path, backend: str) -> None:
    async with relay_here(tmp_path) as world:
        await publish(world.publisher(backend), 1, 0)
        killed = await asyncio.to_thread(client_process, "stage", world.address, backend, "1", "1")
        assert await world.states() == {(1, 0): "READY", (1, 1): "STAGING"}
        killed.kill()
        assert await load(world.subscriber("late", backend)) == (1, 0)
        restarted = world.publisher(backend)
        await publish(restarted, 2, 1)
        assert await world.states() == {(1, 0): "READY", (2, 1): "READY"}
        assert await load(world.subscriber("later", backend), (1, 0)) == (2, 1)
        killed.wait(WAIT_S)


@both
async def test_a_reader_killed_with_a_lease_frees_its_slot_when_the_lease_ends(tmp_path: Path, backend: str) -> None:
    async with relay_here(tmp_path, lease_s=0.5) as world:
        publisher = world.publisher(backend)
        await publish(publisher, 1, 0)
        killed = await asyncio.to_thread(client_process, "hold", world.address, backend, "victim")
        killed.kill()
        for version in (1, 2):
            await publish(publisher, 1, version)
        await eventually(lambda: world.relay.versions.leases == {}, "the victim's lease has ended")
        assert await world.states() == {(1, 1): "READY", (1, 2): "READY"}
        assert (await world.reader("victim")).last_error == "v0 of trainer epoch 1: the lease ended before it was released"
        for version in range(3, 7):
            await publish(publisher, 1, version)
        assert len(world.relay.versions.slots) == 3
        assert await load(world.subscriber("r", backend)) == (1, 6)
        killed.wait(WAIT_S)


@both
async def test_a_relay_killed_and_restarted_gets_its_trainer_and_replicas_back(tmp_path: Path, backend: str) -> None:
    async with relay_process(tmp_path) as (relay, world):
        publisher, subscriber = world.publisher(backend), world.subscriber("r0", backend)
        await publish(publisher, 1, 0)
        watch = subscriber.watch()
        async with asyncio.timeout(WAIT_S):
            assert await anext(watch) == (1, 0)
        held = await load(subscriber)
        in_use = await must_fetch(subscriber)
        await asyncio.to_thread(relay.kill)

        assert same(in_use.tensors, tensors(0))  # what was fetched stays whole
        assert await subscriber.release(in_use)  # nobody is left who could overwrite it
        with pytest.raises(UnavailableError):
            await asyncio.to_thread(publisher.newest)
        waiting = asyncio.create_task(publish(publisher, 1, 1))  # begun while the relay is away
        await asyncio.to_thread(relay.start)
        assert await waiting == backend
        async with asyncio.timeout(WAIT_S):
            assert await anext(watch) == (1, 1)
        assert await load(subscriber, held) == (1, 1)
        await watch.aclose()


async def test_a_relay_that_came_back_empty_says_so_and_takes_the_same_version_again(tmp_path: Path) -> None:
    async with relay_process(tmp_path) as (relay, world):
        publisher, subscriber = world.publisher(), world.subscriber("r0")
        await publish(publisher, 3, 17)
        await load(subscriber)
        await asyncio.to_thread(relay.kill)
        await asyncio.to_thread(relay.start)
        await eventually(lambda: newest_or_away(world, None), "the relay is back and empty")
        assert await subscriber.fetch((3, 17)) is None
        assert await publish(publisher, 3, 17) == "shm"
        assert await subscriber.fetch((3, 17)) is None  # held already
        assert await load(world.subscriber("new")) == (3, 17)


async def newest_or_away(world: World, wanted: tuple[int, int] | None) -> bool:
    publisher = world.publisher()
    try:
        return await asyncio.to_thread(publisher.newest) == wanted
    except UnavailableError:
        return False


async def test_killed_relays_leave_neither_descriptors_nor_memory(tmp_path: Path) -> None:
    async with relay_process(tmp_path) as (relay, world):
        publisher, subscriber = world.publisher("shm"), world.subscriber("r0", "shm")
        held, seen = None, []
        for round_ in range(3):
            if round_:
                await asyncio.to_thread(relay.kill)
                await asyncio.to_thread(relay.start)
            for version in range(4):
                await publish(publisher, 1 + round_, version)
                held = await load(subscriber, held)
            seen.append((num_descriptors(), num_mapped_slots()))
        assert {slots for _, slots in seen} == {6}, "3 slots, mapped by the publisher and by the subscriber"
        assert seen[-1][0] <= seen[1][0]
        assert sorted(os.listdir(tmp_path)) == ["recipe.toml", "weightsync.sock"]  # noqa: PTH208
        assert relay.stop() == 0
        assert os.listdir(tmp_path) == ["recipe.toml"]  # noqa: PTH208


async def test_a_second_relay_on_the_same_socket_gives_up_with_a_message(tmp_path: Path) -> None:
    async with relay_process(tmp_path):
        command = [sys.executable, "-m", "services.weightsync", "--config", str(tmp_path / "recipe.toml"), "--set"]
        second = await asyncio.to_thread(
            subprocess.run, [*command, "weightsync.listen=127.0.0.1:0"], capture_output=True, text=True, timeout=WAIT_S, check=False
        )
        assert second.returncode == 1
        assert "another relay answers at" in second.stderr
        third = await asyncio.to_thread(
            subprocess.run, [*command, "weightsync.bucket_mb=0"], capture_output=True, text=True, timeout=WAIT_S, check=False
        )
        assert third.returncode == 2
        assert "bucket_mb" in third.stderr


async def test_sigterm_ends_a_watched_relay_at_once_and_with_zero(tmp_path: Path) -> None:
    async with relay_process(tmp_path) as (relay, world):
        await publish(world.publisher(), 1, 0)
        watch = world.subscriber().watch()
        async with asyncio.timeout(WAIT_S):
            await anext(watch)
        async with asyncio.timeout(3.0):
            assert await asyncio.to_thread(relay.stop) == 0
        await watch.aclose()


async def test_metrics_tell_the_newest_version_and_outcomes(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        metrics = f"127.0.0.1:{probe.getsockname()[1]}"
    async with relay_process(tmp_path, f"weightsync.metrics_listen={metrics}") as (_, world):
        await publish(world.publisher(), 2, 41)
        await load(world.subscriber("r", "grpc"))
        reader, writer = await asyncio.open_connection(*metrics.split(":"))
        writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
        text = (await asyncio.wait_for(reader.read(), WAIT_S)).decode()
        writer.close()
        assert "stretto_weightsync_newest_version_number 41.0" in text
        assert 'stretto_weightsync_publishes_total{outcome="ready"} 1.0' in text
        assert 'stretto_weightsync_fetches_total{backend="grpc",outcome="loaded"} 1.0' in text


@both
async def test_two_hundred_versions_with_readers_that_come_and_go_are_bit_equal(tmp_path: Path, backend: str) -> None:
    num_versions = 200
    async with relay_process(tmp_path) as (relay, world):
        publisher = world.publisher(backend)
        last = (1, num_versions - 1)

        async def follow(name: str, num_loads: int | None) -> int:
            """Load what is newest until the last version, or until it leaves after some loads."""
            subscriber, held, loads = Subscriber(world.address, name, backend, "cpu", WAIT_S), None, 0
            async for _ in subscriber.watch():
                while (fetched := await subscriber.fetch(held)) is not None:
                    assert same(fetched.tensors, model_of(fetched.id.version))
                    if num_loads is not None and loads == num_loads:
                        await subscriber.close()  # leaves without a word, lease and all
                        return loads
                    assert await subscriber.release(fetched)
                    held, loads = fetched.id, loads + 1
                if held == last:
                    await subscriber.close()
                    return loads
            raise AssertionError("a watch never ends")

        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            steady = [group.create_task(follow(f"steady{i}", None)) for i in range(2)]
            for version in range(num_versions):
                if version % 40 == 10:
                    group.create_task(follow(f"guest{version}", 3))
                if version == num_versions - 1:
                    steady.append(group.create_task(follow("late", None)))
                await publish(publisher, 1, version, model_of(version))
        assert all(task.result() >= 1 for task in steady)
        assert sum(task.result() for task in steady) > 20
        assert len([v for v in (await world.states()).values() if v == "READY"]) == 2
        assert relay.process.poll() is None


_models = [tensors(seed, num=8, nbytes=10_000) for seed in range(7)]


def model_of(version: int) -> dict[str, ArrayView]:
    return _models[version % len(_models)]
