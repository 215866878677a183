"""A gRPC server between callers and one service that passes bytes on, and disturbs one call when it is told to.

caller --request bytes--> Proxy --request bytes--> service         every method, unary and streamed
       <--answer bytes---       <--answer bytes---
       <--status, trailers      <--status, trailers (the class of a StrettoError survives)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from stretto import rpc
from tests.chaos_plan import Fault

STREAMS_WITHOUT_END = ("WatchEvents", "Watch")
"""Their answer is never read to its end: a fault takes hold of the first message."""
CALL_MAX_S = 900.0
"""Of a call that came without a deadline."""


class Proxy:
    """Stands at `address` for the service at `target`. Make and close it inside the event loop."""

    def __init__(self, service: Any, target: str, on_fault: Callable[[Fault], None]) -> None:
        """`service`: its descriptor. `on_fault` is told of each call that was disturbed."""
        self._methods = {f"/{service.full_name}/{m.name}": m for m in service.methods}
        self._channel = rpc.connect(target)
        self._on_fault = on_fault
        self._armed: dict[str, deque[Fault]] = {}
        self._server: grpc.aio.Server
        self.address = ""

    async def start(self) -> None:
        options = [("grpc.max_receive_message_length", rpc.MESSAGE_BYTES_MAX), ("grpc.max_send_message_length", rpc.MESSAGE_BYTES_MAX)]
        options += [("grpc.http2.min_ping_interval_without_data_ms", 5000), ("grpc.http2.max_ping_strikes", 0)]
        self._server = grpc.aio.server(options=[*options, ("grpc.keepalive_permit_without_calls", 1), ("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((_Handlers(self._methods, self._serve),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def close(self) -> None:
        await self._server.stop(0)
        await self._channel.close()

    def arm(self, fault: Fault) -> None:
        """The next call of `fault.method` suffers it."""
        self._armed.setdefault(fault.method, deque()).append(fault)

    def disarm(self) -> int:
        """Forget the faults that met no call; how many."""
        num_left = sum(map(len, self._armed.values()))
        self._armed.clear()
        return num_left

    # ---- one call

    async def _serve(self, path: str, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        method = self._methods[path]
        waiting = self._armed.get(method.name)
        fault = waiting.popleft() if waiting else None
        try:
            if fault is None:
                async for answer in self._call(path, requests, context):
                    yield answer
                return
            async for answer in self._disturbed(fault, path, requests, context):
                yield answer
        except grpc.aio.AioRpcError as err:
            context.set_trailing_metadata(tuple(err.trailing_metadata() or ()))
            await context.abort(err.code(), err.details() or "")

    async def _disturbed(self, fault: Fault, path: str, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        sent = [request async for request in requests]
        name = self._methods[path].name
        self._on_fault(fault)
        if fault.kind == "delay_request":
            await asyncio.sleep(fault.length_s)
        if fault.kind in ("drop_answer", "double_request"):
            with contextlib.suppress(grpc.aio.AioRpcError):
                async with contextlib.aclosing(self._call(path, _each(sent), context)) as answers:  # pyright: ignore[reportArgumentType]
                    async for _ in answers:
                        if name in STREAMS_WITHOUT_END:
                            break
        if fault.kind == "drop_answer":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the answer was lost on its way")
        is_first = True
        async for answer in self._call(path, _each(sent), context):
            if is_first and fault.kind == "delay_answer":
                await asyncio.sleep(fault.length_s)
            is_first = False
            yield answer

    async def _call(self, path: str, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """The service's answers. Raises AioRpcError as the service does. A caller who leaves takes the call with him."""
        method = self._methods[path]
        name = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
        left_s = context.time_remaining()
        given: Any = requests if method.client_streaming else await anext(requests)
        call = getattr(self._channel, name)(path)(given, timeout=min(left_s, CALL_MAX_S) if left_s is not None else CALL_MAX_S)
        try:
            if method.server_streaming:
                async for answer in call:
                    yield answer
            else:
                yield await call
        finally:
            call.cancel()


async def _each(sent: list[bytes]) -> AsyncIterator[bytes]:
    for one in sent:
        yield one


async def _only(request: bytes) -> AsyncIterator[bytes]:
    yield request


class _Handlers(grpc.GenericRpcHandler):
    """Every method of the service, with bytes for messages."""

    def __init__(self, methods: dict[str, Any], serve: Callable[[str, AsyncIterator[bytes], Any], AsyncIterator[bytes]]) -> None:
        self._methods, self._serve = methods, serve

    def service(self, handler_call_details: Any) -> Any:
        path = handler_call_details.method
        method = self._methods.get(path)
        if method is None:
            return None

        async def unary(request: Any, context: Any) -> bytes:
            requests = request if method.client_streaming else _only(request)
            async with contextlib.aclosing(self._serve(path, requests, context)) as answers:  # pyright: ignore[reportArgumentType]
                async for answer in answers:
                    return answer
            raise AssertionError(f"{path} gave no answer")

        async def stream(request: Any, context: Any) -> AsyncIterator[bytes]:
            requests = request if method.client_streaming else _only(request)
            async with contextlib.aclosing(self._serve(path, requests, context)) as answers:  # pyright: ignore[reportArgumentType]
                async for answer in answers:
                    yield answer

        name = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
        return getattr(grpc, f"{name}_rpc_method_handler")(stream if method.server_streaming else unary)
