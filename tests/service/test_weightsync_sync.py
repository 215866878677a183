"""Publishing and reading through a real relay on this event loop, over both backends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from services.weightsync import backends
from services.weightsync.backends import shm as shm_backend
from stretto import rpc
from stretto.errors import (
    CorruptError,
    DeadlineError,
    FencedError,
    FullError,
    InvalidArgumentError,
    RecipeError,
    RefusedError,
    StaleError,
    UnavailableError,
)
from stretto.v1 import weightsync_pb2 as pb
from stretto.v1 import weightsync_pb2_grpc as pb_grpc
from stretto.weights import layout as layouts
from stretto.weights import shm
from stretto.weights.layout import ArrayView, VersionId
from stretto.weights.subscriber import Subscriber
from tests.relay_world import (
    BUCKET_BYTES,
    MODEL,
    WAIT_S,
    World,
    arena_of,
    load,
    map_for_writing,
    must_fetch,
    prepare_request,
    publish,
    relay_here,
    same,
    tensors,
)
from tests.waits import eventually

both = pytest.mark.parametrize("backend", ["shm", "grpc"])


@both
async def test_what_is_published_is_fetched_bit_for_bit(tmp_path: Path, backend: str) -> None:
    async with relay_here(tmp_path) as world:
        publisher, subscriber = world.publisher(backend), world.subscriber("r0", backend)
        assert await asyncio.to_thread(publisher.newest) is None
        assert await subscriber.fetch(None) is None
        held = None
        for version in range(5):
            assert await publish(publisher, 1, version) == backend
            held = await load(subscriber, held)
            assert held == (1, version)
        assert await subscriber.fetch(held) is None
        assert await asyncio.to_thread(publisher.newest) == (1, 4)
        assert await world.states() == {(1, 3): "READY", (1, 4): "READY"}
        reader = await world.reader("r0")
        assert (reader.backend, reader.held.version, reader.last_error) == (backend, 4, "")


@both
async def test_odd_tensors_arrive_too(tmp_path: Path, backend: str) -> None:
    rng = np.random.default_rng(0)
    odd = {
        "empty": ArrayView("F32", (0, 4), b""),
        "scalar": ArrayView("F64", (), rng.bytes(8)),
        "one byte": ArrayView("BOOL", (1,), b"\x01"),
        "large": ArrayView("BF16", (3, 1 << 20), rng.integers(0, 256, 6 << 20, np.uint8)),  # larger than bucket and chunk
        "ünïcode": ArrayView("I64", (3,), np.arange(3)),
    }
    async with relay_here(tmp_path) as world:
        await publish(world.publisher(backend), 1, 0, odd)
        fetched = await must_fetch(world.subscriber("r0", backend))
        assert {n: (v.dtype, v.shape, bytes(v.data)) for n, v in fetched.tensors.items()} == {
            n: (v.dtype, v.shape, bytes(memoryview(v.data).cast("B"))) for n, v in odd.items()
        }


@both
async def test_a_changed_model_can_follow(tmp_path: Path, backend: str) -> None:
    async with relay_here(tmp_path) as world:
        publisher, subscriber = world.publisher(backend), world.subscriber("r0", backend)
        for version, nbytes in enumerate([20_000, 20_000, 200_000, 2_000, 20_000]):
            model = tensors(version, num=3 + version, nbytes=nbytes)
            await publish(publisher, 1, version, model)
            fetched = await must_fetch(subscriber)
            assert same(fetched.tensors, model)
            assert await subscriber.release(fetched)


async def test_a_watch_begins_with_the_newest_and_goes_on_with_newer_ones(tmp_path: Path) -> None:
    async with relay_here(tmp_path) as world:
        publisher = world.publisher()
        await publish(publisher, 1, 6)
        await publish(publisher, 1, 7)
        async with asyncio.timeout(WAIT_S):
            early, late = world.subscriber("early").watch(), world.subscriber("late").watch()
            assert await anext(early) == (1, 7)
            await publish(publisher, 1, 8)
            assert await anext(early) == (1, 8)
            assert await anext(late) == (1, 8)
            await publish(publisher, 2, 3)  # a resumed trainer counts again
            assert await anext(early) == (2, 3)
            await early.aclose()
            await late.aclose()
        assert await load(world.subscriber("later still")) == (2, 3)


async def test_an_old_trainer_is_fenced_and_a_repeat_is_not(tmp_path: Path) -> None:
    async with relay_here(tmp_path) as world:
        old, new = world.publisher(), world.publisher()
        await publish(old, 1, 10)
        await publish(new, 2, 8)
        with pytest.raises(FencedError, match="epoch 1 is older than 2"):
            await publish(old, 1, 11)
        assert await publish(new, 2, 8) == "none"  # the same bytes: nothing to send
        with pytest.raises(RefusedError, match="other bytes"):
            await publish(new, 2, 8, tensors(99))
        with pytest.raises(StaleError, match="versions only grow"):
            await publish(new, 2, 7)
        assert await load(world.subscriber()) == (2, 8)


@both
async def test_a_byte_that_changed_before_the_commit_is_named_refused_and_forgotten(tmp_path: Path, backend: str) -> None:
    async with relay_here(tmp_path) as world:
        publisher, subscriber = world.publisher(backend), world.subscriber("r0", backend)
        await publish(publisher, 1, 0)
        with pytest.raises(
            grpc.RpcError, match=r"v1 of trainer epoch 1 in slot here-slot\d+: bucket 4 of 8 \(bytes 400000-500000"
        ) as caught:
            await publish_damaged(world, backend, 1, flip_at=432_100)
        assert isinstance(rpc.from_rpc_error(caught.value), CorruptError)
        assert await world.states() == {(1, 0): "READY"}
        assert await load(subscriber) == (1, 0)
        await publish(publisher, 1, 1)
        assert await load(subscriber, (1, 0)) == (1, 1)


async def publish_damaged(world: World, backend: str, version: int, flip_at: int) -> None:
    """As a publisher does it, except that one bit changes after the bytes were hashed."""
    digests = layouts.hash_arena(MODEL, arena_of(version), BUCKET_BYTES)
    damaged = arena_of(version)
    damaged[flip_at] ^= 1
    prepared = await world.stub.PreparePublish(prepare_request(backend, 1, version), timeout=WAIT_S)
    if backend == "shm":
        (await asyncio.to_thread(map_for_writing, prepared))[: len(damaged)] = damaged
    else:
        messages = [pb.PublishRequest(slot_id=prepared.slot_id), pb.PublishRequest(data=damaged.tobytes())]
        await world.stub.Publish(iter(messages), timeout=WAIT_S)
    manifest = layouts.manifest(VersionId(1, version), MODEL, digests)
    await world.stub.CommitPublish(pb.CommitPublishRequest(slot_id=prepared.slot_id, manifest=manifest), timeout=WAIT_S)


class DamagingProxy(pb_grpc.WeightSyncServiceServicer):
    """Passes a reader's calls on to the relay; while `damages`, flips one bit of each stream."""

    def __init__(self, address: str) -> None:
        self._stub: Any = pb_grpc.WeightSyncServiceStub(rpc.connect(address))
        self.damages = True

    async def Join(self, request: pb.JoinRequest, context: object) -> pb.JoinResponse:  # noqa: N802
        return await self._stub.Join(request, timeout=WAIT_S)

    async def Acquire(self, request: pb.AcquireRequest, context: object) -> pb.AcquireResponse:  # noqa: N802
        return await self._stub.Acquire(request, timeout=WAIT_S)

    async def Release(self, request: pb.ReleaseRequest, context: object) -> pb.ReleaseResponse:  # noqa: N802
        return await self._stub.Release(request, timeout=WAIT_S)

    async def Fetch(self, request: pb.FetchRequest, context: object) -> AsyncIterator[pb.FetchResponse]:  # noqa: N802
        async for message in self._stub.Fetch(request, timeout=WAIT_S):
            data = bytearray(message.data)
            data[250_000] ^= 0x10 * self.damages
            yield pb.FetchResponse(data=bytes(data))


async def test_a_byte_that_changed_on_the_way_to_a_reader_is_named_and_the_next_fetch_works(tmp_path: Path) -> None:
    async with relay_here(tmp_path) as world:
        await publish(world.publisher(), 1, 0)
        proxy = DamagingProxy(world.address)
        between = await rpc.serve("127.0.0.1:0", lambda s: pb_grpc.add_WeightSyncServiceServicer_to_server(proxy, s), [])
        subscriber = Subscriber(between.address, "far", "grpc", "cpu", WAIT_S)
        with pytest.raises(CorruptError, match=r"v0 of trainer epoch 1 received by far over grpc: bucket 2 of 8"):
            await subscriber.fetch(None)
        assert "bucket 2 of 8" in (await world.reader("far")).last_error
        assert not (await world.reader("far")).HasField("held")
        assert world.relay.versions.leases == {}
        proxy.damages = False
        assert await load(subscriber) == (1, 0)
        assert (await world.reader("far")).last_error == ""
        await subscriber.close()
        await between.drain(0.0)


async def test_a_slow_shm_reader_never_sees_other_bytes_and_is_told_that_it_was_late(tmp_path: Path) -> None:
    async with relay_here(tmp_path, lease_s=0.1) as world:
        publisher, subscriber = world.publisher("shm"), world.subscriber("slow", "shm")
        await publish(publisher, 1, 0)
        fetched = await must_fetch(subscriber)
        await eventually(lambda: world.relay.versions.leases == {}, "the lease has ended")
        for version in range(1, 7):
            await publish(publisher, 1, version)
        assert same(fetched.tensors, tensors(0))
        assert not await subscriber.release(fetched)
        assert "lease ended" in (await world.reader("slow")).last_error
        fetched = await must_fetch(subscriber)
        assert await subscriber.release(fetched)
        assert fetched.id == (1, 6)


async def test_a_reader_that_is_slow_but_in_time_does_not_hold_up_the_publisher(tmp_path: Path) -> None:
    async with relay_here(tmp_path) as world:
        publisher, subscriber = world.publisher("shm"), world.subscriber("slow", "shm")
        await publish(publisher, 1, 0)
        fetched = await must_fetch(subscriber)
        for version in range(1, 7):
            await publish(publisher, 1, version)
            assert same(fetched.tensors, tensors(0))
        assert (await world.states())[(1, 0)] == "RETIRED"
        assert await subscriber.release(fetched)
        assert (1, 0) not in await world.states()


async def test_a_full_relay_names_its_readers_once_the_publisher_has_waited(tmp_path: Path) -> None:
    async with relay_here(tmp_path) as world:
        publisher, held = world.publisher("shm", deadline_s=0.3), []
        for version in range(6):
            await publish(publisher, 1, version)
            held.append((subscriber := world.subscriber(f"r{version}", "shm"), await must_fetch(subscriber)))
        await publish(publisher, 1, 6)
        await publish(publisher, 1, 7)
        with pytest.raises(FullError, match=r"given up after 0.3 s.*readers: r0 \(v0 of trainer epoch 1\)"):
            await publish(publisher, 1, 8)
        for subscriber, fetched in held:
            assert await subscriber.release(fetched)
        await publish(publisher, 1, 8)


async def test_without_a_reachable_socket_auto_falls_back_to_grpc_and_shm_says_why(tmp_path: Path) -> None:
    async with relay_here(tmp_path) as world:
        (tmp_path / "ws.sock").rename(tmp_path / "elsewhere.sock")
        assert await publish(world.publisher("auto"), 1, 0) == "grpc"
        subscriber = world.subscriber("r0", "auto")
        fetched = await must_fetch(subscriber)
        assert fetched.backend == "grpc"
        await subscriber.release(fetched)
        with pytest.raises(UnavailableError, match=r"shm: .*ws\.sock cannot be reached from here"):
            await publish(world.publisher("shm", deadline_s=0.2), 1, 1)
        with pytest.raises(UnavailableError, match=r"shm: .*ws\.sock cannot be reached from here"):
            await world.subscriber("r1", "shm", deadline_s=0.2).fetch(None)


async def test_a_token_opens_its_slot_once_and_readers_cannot_write(tmp_path: Path) -> None:
    async with relay_here(tmp_path) as world:
        await publish(world.publisher("shm"), 1, 0)
        await world.stub.Join(pb.JoinRequest(replica_id="r", backends=["shm"], device_type="cpu"), timeout=WAIT_S)
        leased = await world.stub.Acquire(pb.AcquireRequest(replica_id="r", operation_id="op"), timeout=WAIT_S)
        fd, nbytes = await asyncio.to_thread(shm.ask_for, leased.socket_path, leased.token)
        with pytest.raises(PermissionError):
            shm.map_slot(fd, nbytes, writable=True)
        with pytest.raises(UnavailableError, match="token is not valid"):
            await asyncio.to_thread(shm.ask_for, leased.socket_path, leased.token)
        with pytest.raises(UnavailableError, match="token is not valid"):
            await asyncio.to_thread(shm.ask_for, leased.socket_path, b"guess")


async def test_an_abandoned_publisher_cannot_write_into_what_is_read(tmp_path: Path) -> None:
    async with relay_here(tmp_path) as world:
        prepared = await world.stub.PreparePublish(prepare_request("shm", 1, 0), timeout=WAIT_S)
        mapped = await asyncio.to_thread(map_for_writing, prepared)
        new = world.publisher("shm")
        for version in range(4):
            await publish(new, 2, version)
            mapped[:] = 0xEE
        assert await load(world.subscriber("r", "shm")) == (2, 3)


async def test_a_second_stream_into_a_slot_ends_the_first(tmp_path: Path) -> None:
    async with relay_here(tmp_path) as world:
        prepared = await world.stub.PreparePublish(prepare_request("grpc", 1, 0), timeout=WAIT_S)
        start, arena = pb.PublishRequest(slot_id=prepared.slot_id), arena_of(0)
        first = world.stub.Publish()
        await first.write(start)
        await eventually(lambda: prepared.slot_id in world.relay._writers, "the first stream writes")
        await world.stub.Publish(iter([start, pb.PublishRequest(data=arena.tobytes())]), timeout=WAIT_S)
        await first.write(pb.PublishRequest(data=b"\xee" * 1000))
        with pytest.raises(grpc.RpcError, match="another stream writes"):
            await first
        manifest = layouts.manifest(VersionId(1, 0), MODEL, layouts.hash_arena(MODEL, arena, BUCKET_BYTES))
        await world.stub.CommitPublish(pb.CommitPublishRequest(slot_id=prepared.slot_id, manifest=manifest), timeout=WAIT_S)
        assert await load(world.subscriber()) == (1, 0)


async def test_a_phase_without_an_answer_ends_at_its_deadline_by_name() -> None:
    class Silent(pb_grpc.WeightSyncServiceServicer):
        async def PreparePublish(self, request: object, context: object) -> pb.PreparePublishResponse:  # noqa: N802
            await asyncio.Event().wait()
            raise AssertionError

        async def Join(self, request: object, context: object) -> pb.JoinResponse:  # noqa: N802
            return pb.JoinResponse(backend="grpc")

        async def Acquire(self, request: object, context: object) -> pb.AcquireResponse:  # noqa: N802
            await asyncio.Event().wait()
            raise AssertionError

    silent = await rpc.serve("127.0.0.1:0", lambda s: pb_grpc.add_WeightSyncServiceServicer_to_server(Silent(), s), [])
    world = World(silent.address)
    with pytest.raises(DeadlineError, match=r"publish of v0 of trainer epoch 1: phase prepare: no answer .* within 0.2 s"):
        await publish(world.publisher(deadline_s=0.2), 1, 0)
    with pytest.raises(DeadlineError, match=r"fetch: phase acquire: no answer .* within 0.2 s"):
        await world.subscriber(deadline_s=0.2).fetch(None)
    await world.close()
    await silent.drain(0.0)


async def test_what_is_not_valid_is_refused_with_the_value(tmp_path: Path) -> None:
    async with relay_here(tmp_path) as world:
        with pytest.raises(InvalidArgumentError, match="trainer_epoch = 0"):
            await publish(world.publisher(), 0, 0)
        with pytest.raises(InvalidArgumentError, match=r"'a'.*needs 4 bytes, 2 given"):
            await publish(world.publisher(), 1, 0, {"a": ArrayView("F32", (1,), b"12")})
        with pytest.raises(grpc.RpcError, match="replica_id is empty"):
            await world.stub.Join(pb.JoinRequest(backends=["grpc"]), timeout=WAIT_S)
        with pytest.raises(grpc.RpcError, match="lease 'x' has ended"):
            async for _ in world.stub.Fetch(pb.FetchRequest(lease_id="x"), timeout=WAIT_S):
                pass


async def test_an_unknown_or_missing_backend_is_refused_with_what_there_is(tmp_path: Path) -> None:
    async with relay_here(tmp_path) as world:
        cases = [
            ("carrier-pigeon", "cpu", "available here: grpc, shm; carrier-pigeon: there is no such backend"),
            ("nccl", "npu", "nccl: is hccl on a npu device: not in this build"),
            ("hccl", "cuda", r"hccl: needs an Ascend device \(npu\), not cuda"),
            ("nccl", "cpu", "nccl: is gloo on a cpu device: not in this build"),
            ("mooncake", "cuda", "mooncake: not in this build"),
        ]
        for name, device, message in cases:
            with pytest.raises(grpc.RpcError, match=message):
                await world.stub.Join(pb.JoinRequest(replica_id="r", backends=[name], device_type=device), timeout=WAIT_S)
        told = (await world.status()).backends
        assert {n for n, text in told.items() if text == "yes"} == {"grpc", "shm"}
        assert {n for n, text in told.items() if text.startswith("no: ")} == {"gloo", "nccl", "hccl", "mooncake"}


async def test_a_relay_with_one_backend_says_why_not_the_other(tmp_path: Path) -> None:
    async with relay_here(tmp_path, wanted="grpc") as world:
        assert await publish(world.publisher("auto"), 1, 0) == "grpc"
        with pytest.raises(RefusedError, match=r"available here: grpc; shm: weightsync\.backend = 'grpc'"):
            await publish(world.publisher("shm"), 1, 1)
        assert world.relay.backends.keys() == {"grpc"}
    with pytest.raises(RecipeError, match="'telepathy': there is no such backend"):
        backends.available("telepathy", tmp_path / "s")


def test_a_long_run_folder_gets_a_private_socket_folder_always_the_same(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)
    path = shm_backend.socket_path(None, deep)
    assert path == shm_backend.socket_path(None, deep)
    assert path != shm_backend.socket_path(None, deep / "y")
    assert len(str(path)) <= shm_backend.SOCKET_PATH_BYTES_MAX
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert shm_backend.socket_path(None, Path("/runs/a")) == Path("/runs/a/weightsync.sock")
    with pytest.raises(RecipeError, match=r"weightsync\.socket"):
        shm_backend.socket_path(deep / "s", tmp_path)
    path.parent.rmdir()
