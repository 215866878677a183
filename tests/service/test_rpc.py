"""The wire: errors survive as classes, ports are never shared, drains finish calls in flight, retries end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from stretto import errors, rpc
from stretto.v1 import scheduler_pb2 as pb
from stretto.v1 import scheduler_pb2_grpc as pb_grpc

SERVICE = "stretto.v1.SchedulerService"


class Scheduler(pb_grpc.SchedulerServiceServicer):
    """Raises what the test says."""

    def __init__(self) -> None:
        self.raises: Exception | None = None
        self.entered, self.go_on = asyncio.Event(), asyncio.Event()

    async def GetStatus(self, request: pb.GetStatusRequest, context: object) -> pb.GetStatusResponse:  # noqa: N802
        if self.raises:
            raise self.raises
        return pb.GetStatusResponse(run="r")

    async def ExplainWait(self, request: pb.ExplainWaitRequest, context: object) -> pb.ExplainWaitResponse:  # noqa: N802
        self.entered.set()
        await self.go_on.wait()
        return pb.ExplainWaitResponse(reasons=["late"])

    async def WatchEvents(self, request: pb.WatchEventsRequest, context: object) -> AsyncIterator[pb.WatchEventsResponse]:  # noqa: N802
        yield pb.WatchEventsResponse(event_id="1")
        if self.raises:
            raise self.raises


async def start() -> tuple[Scheduler, rpc.Server, pb_grpc.SchedulerServiceAsyncStub]:
    servicer = Scheduler()
    server = await rpc.serve("127.0.0.1:0", lambda s: pb_grpc.add_SchedulerServiceServicer_to_server(servicer, s), [SERVICE])
    return servicer, server, pb_grpc.SchedulerServiceStub(rpc.connect(server.address))  # type: ignore[return-value]


def classes(root: type[errors.StrettoError]) -> list[type[errors.StrettoError]]:
    return [root, *(c for child in root.__subclasses__() for c in classes(child))]


async def test_every_error_class_survives_the_wire_with_its_message() -> None:
    servicer, server, stub = await start()
    for cls in classes(errors.StrettoError):
        servicer.raises = cls(f"épreuve of {cls.__name__}")
        with pytest.raises(grpc.RpcError) as caught:
            await stub.GetStatus(pb.GetStatusRequest(), timeout=5)
        back = rpc.from_rpc_error(caught.value)
        assert type(back) is cls
        assert back.message == f"épreuve of {cls.__name__}"
    await server.drain(0.1)


async def test_an_error_in_the_middle_of_a_stream_arrives_after_what_was_sent() -> None:
    servicer, server, stub = await start()
    servicer.raises = errors.FencedError("epoch 3 is older than 4")
    events = stub.WatchEvents(pb.WatchEventsRequest(), timeout=5)
    assert (await events.read()).event_id == "1"  # type: ignore[union-attr]
    with pytest.raises(grpc.RpcError) as caught:
        await events.read()
    assert isinstance(rpc.from_rpc_error(caught.value), errors.FencedError)
    await server.drain(0.1)


async def test_an_unexpected_exception_is_internal_and_names_its_method() -> None:
    servicer, server, stub = await start()
    servicer.raises = KeyError("oops")
    with pytest.raises(grpc.RpcError, match="GetStatus: KeyError"):
        await stub.GetStatus(pb.GetStatusRequest(), timeout=5)
    await server.drain(0.1)


async def test_two_servers_never_share_a_port() -> None:
    _, server, _ = await start()
    with pytest.raises(errors.UnavailableError, match="port taken"):
        await rpc.serve(server.address, lambda s: None, [])
    await server.drain(0.1)


async def test_a_drain_lets_the_call_in_flight_finish() -> None:
    servicer, server, stub = await start()
    call = asyncio.ensure_future(stub.ExplainWait(pb.ExplainWaitRequest(), timeout=10))  # type: ignore[arg-type]
    await servicer.entered.wait()
    drain = asyncio.ensure_future(server.drain(5.0))
    servicer.go_on.set()
    assert list((await call).reasons) == ["late"]
    await drain


async def test_a_retry_outlives_a_restart_of_its_peer_and_ends_at_its_deadline() -> None:
    servicer, server, stub = await start()
    await server.drain(0.1)

    async def ask() -> pb.GetStatusResponse:
        return await stub.GetStatus(pb.GetStatusRequest(), timeout=1)

    with pytest.raises(errors.UnavailableError, match="scheduler: no answer before the deadline"):
        await rpc.retry(ask, deadline_s=0.2, what="scheduler")
    waiting = asyncio.ensure_future(rpc.retry(ask, deadline_s=20, what="scheduler"))
    again = await rpc.serve(server.address, lambda s: pb_grpc.add_SchedulerServiceServicer_to_server(servicer, s), [SERVICE])
    assert (await waiting).run == "r"
    await again.drain(0.1)


async def test_a_refusal_is_never_retried() -> None:
    calls: list[int] = []

    async def refuse() -> None:
        calls.append(1)
        raise errors.RefusedError("no")

    with pytest.raises(errors.RefusedError):
        await rpc.retry(refuse, deadline_s=5, what="x")
    assert calls == [1]
