"""The chaos suite's proxies: unseen while nothing is armed, and each fault does to one call what its name says."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from stretto import rpc
from stretto.errors import FencedError, UnavailableError
from stretto.v1 import scheduler_pb2 as pb
from stretto.v1 import scheduler_pb2_grpc as pb_grpc
from stretto.v1 import weightsync_pb2 as ws
from stretto.v1 import weightsync_pb2_grpc as ws_grpc
from tests.chaos_plan import Fault
from tests.chaos_proxy import Proxy

LATE_S = 0.3


class Scheduler(pb_grpc.SchedulerServiceServicer):
    """Counts what reaches it."""

    def __init__(self) -> None:
        self.pauses: list[str] = []
        self.num_batches = 0

    async def Pause(self, request: pb.PauseRequest, context: Any) -> pb.PauseResponse:  # noqa: N802
        self.pauses.append(request.reason)
        if request.reason == "fenced":
            raise FencedError("a newer one took over")
        return pb.PauseResponse()

    async def SampleBatch(self, request: pb.SampleBatchRequest, context: Any) -> AsyncIterator[pb.SampleBatchResponse]:  # noqa: N802
        self.num_batches += 1
        for n in range(3):
            yield pb.SampleBatchResponse(num_groups=n)


class Relay(ws_grpc.WeightSyncServiceServicer):
    """Takes streams."""

    def __init__(self) -> None:
        self.received: list[bytes] = []

    async def Publish(self, request_iterator: Any, context: Any) -> ws.PublishResponse:  # noqa: N802
        data = b"".join([request.data async for request in request_iterator])
        self.received.append(data)
        return ws.PublishResponse(received_bytes=len(data))


class Wire:
    """A caller, a proxy, the two services behind it."""

    def __init__(self, scheduler: Scheduler, relay: Relay, stub: Any, relay_stub: Any, proxies: list[Proxy], struck: list[Fault]) -> None:
        self.scheduler, self.relay, self.stub, self.relay_stub, self.struck = scheduler, relay, stub, relay_stub, struck
        self._proxies = proxies

    def arm(self, kind: str, method: str) -> None:
        for proxy in self._proxies:
            proxy.arm(Fault(0.0, kind, "scheduler", method, LATE_S))

    async def pause(self, reason: str = "why not") -> None:
        try:
            await self.stub.Pause(pb.PauseRequest(reason=reason), timeout=5)
        except grpc.RpcError as err:
            raise rpc.from_rpc_error(err) from None

    async def batch(self) -> list[int]:
        try:
            return [message.num_groups async for message in self.stub.SampleBatch(pb.SampleBatchRequest(), timeout=5)]
        except grpc.RpcError as err:
            raise rpc.from_rpc_error(err) from None

    async def publish(self) -> int:
        async def chunks() -> AsyncIterator[ws.PublishRequest]:
            for part in (b"one", b"two"):
                yield ws.PublishRequest(data=part)

        return (await self.relay_stub.Publish(chunks(), timeout=5)).received_bytes


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    scheduler, relay, struck = Scheduler(), Relay(), list[Fault]()
    servers = [
        await rpc.serve("127.0.0.1:0", lambda s: pb_grpc.add_SchedulerServiceServicer_to_server(scheduler, s), []),
        await rpc.serve("127.0.0.1:0", lambda s: ws_grpc.add_WeightSyncServiceServicer_to_server(relay, s), []),
    ]
    described = [pb.DESCRIPTOR.services_by_name["SchedulerService"], ws.DESCRIPTOR.services_by_name["WeightSyncService"]]
    proxies = [Proxy(service, server.address, struck.append) for service, server in zip(described, servers, strict=True)]
    for proxy in proxies:
        await proxy.start()
    channels = [rpc.connect(proxy.address) for proxy in proxies]
    stubs: tuple[Any, Any] = (pb_grpc.SchedulerServiceStub(channels[0]), ws_grpc.WeightSyncServiceStub(channels[1]))
    yield Wire(scheduler, relay, *stubs, proxies, struck)
    for channel in channels:
        await channel.close()
    for proxy in proxies:
        await proxy.close()
    for server in servers:
        await server.drain(0)


async def test_calls_streams_and_errors_pass_unchanged_while_nothing_is_armed(wire: Wire) -> None:
    await wire.pause()
    assert await wire.batch() == [0, 1, 2]
    assert await wire.publish() == 6
    with pytest.raises(FencedError, match="a newer one took over"):
        await wire.pause("fenced")
    assert (wire.scheduler.pauses, wire.scheduler.num_batches, wire.relay.received) == (["why not", "fenced"], 1, [b"onetwo"])
    assert wire.struck == []


async def test_a_dropped_answer_leaves_the_call_done_and_the_caller_without_word(wire: Wire) -> None:
    wire.arm("drop_answer", "Pause")
    wire.arm("drop_answer", "SampleBatch")
    with pytest.raises(UnavailableError, match="lost on its way"):
        await wire.pause()
    with pytest.raises(UnavailableError, match="lost on its way"):
        await wire.batch()
    assert (wire.scheduler.pauses, wire.scheduler.num_batches) == (["why not"], 1)
    await wire.pause()  # one call only
    assert len(wire.struck) == 2


async def test_a_doubled_request_takes_effect_twice_and_is_answered_once(wire: Wire) -> None:
    for method in ("Pause", "SampleBatch", "Publish"):
        wire.arm("double_request", method)
    await wire.pause()
    assert await wire.batch() == [0, 1, 2]
    assert await wire.publish() == 6
    assert (len(wire.scheduler.pauses), wire.scheduler.num_batches, wire.relay.received) == (2, 2, [b"onetwo"] * 2)


@pytest.mark.parametrize("kind", ["delay_request", "delay_answer"])
async def test_a_delayed_message_is_late_and_whole(wire: Wire, kind: str) -> None:
    wire.arm(kind, "SampleBatch")
    began_s = time.monotonic()
    assert await wire.batch() == [0, 1, 2]
    assert time.monotonic() - began_s >= LATE_S
    assert wire.scheduler.num_batches == 1
