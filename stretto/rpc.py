"""gRPC the way all services use it: serve, connect, deadlines, retries by idempotency, health, drain, errors as classes.

    server                                          wire                                   client
    handler raises FencedError --_ErrorInterceptor--> FAILED_PRECONDITION + stretto-error --from_rpc_error--> FencedError

Only grpcio and protobuf are imported at module level (the SDK has no more); a server needs grpcio-health-checking and
grpcio-reflection as well.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

import grpc
import grpc.aio

from stretto import endpoints, errors
from stretto.errors import DeadlineError, StrettoError, UnavailableError

log = logging.getLogger("stretto.rpc")
T = TypeVar("T")

SCHEDULER = "stretto.v1.SchedulerService"
"""Of several schedulers behind one name, only the one that leads says SERVING for it."""
MESSAGE_BYTES_MAX = 64 << 20
"""Largest message either side takes; larger payloads are streamed in chunks."""
DRAIN_NOTICE_S = 0.3
"""From NOT_SERVING to the stop of a server: time for clients' health watches to turn away."""
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.05, 1.0
"""Delays between repeats: doubling, with jitter in [0.5, 1]."""
_ERROR_KEY = "stretto-error"


# ------------------------------------------------------------------------------------------------------------ errors


def from_rpc_error(err: grpc.RpcError) -> StrettoError:
    """The StrettoError that the server raised, as the same class; the general class of its code for anything else."""
    failed = cast(Any, err)  # both flavours of RpcError have these three, the base class has none
    code, details, trailing = failed.code(), failed.details() or "", failed.trailing_metadata() or ()
    for key, value in trailing:
        if key == _ERROR_KEY and (cls := errors.by_name(str(value))) is not None:
            return cls(details)
    if code == grpc.StatusCode.CANCELLED:  # a server that stops cancels what is in flight
        return UnavailableError(details or "the server ended the call")
    return errors.by_code(code.name)(details or code.name)


class _ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns what a handler raises into a status that `from_rpc_error` turns back; while `closed`, calls reach no handler."""

    def __init__(self, closed: str) -> None:
        self.closed = closed
        """Why nothing is answered but health and reflection; empty: everything is."""

    def check(self, method: str) -> None:
        if self.closed and not method.startswith("/grpc."):
            raise UnavailableError(self.closed)

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        if handler.response_streaming:
            make = grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
            inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
            wrapped: Any = _guard_stream(inner, method, self)
        else:
            make = grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
            inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
            wrapped = _guard_unary(inner, method, self)
        return make(wrapped, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer)


async def _fail(context: Any, method: str, err: Exception) -> None:
    if isinstance(err, StrettoError):
        context.set_trailing_metadata(((_ERROR_KEY, type(err).__name__),))
        await context.abort(getattr(grpc.StatusCode, err.code), err.message)
    log.error("rpc_failed", exc_info=err, extra={"fields": {"method": method}})
    await context.abort(grpc.StatusCode.INTERNAL, f"{method}: {type(err).__name__}: {err}")


def _guard_unary(inner: Any, method: str, gate: _ErrorInterceptor) -> Any:
    async def guarded(request: Any, context: Any) -> Any:
        try:
            gate.check(method)
            return await inner(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as err:  # noqa: BLE001 - the edge of the server: everything becomes a status
            await _fail(context, method, err)

    return guarded


def _guard_stream(inner: Any, method: str, gate: _ErrorInterceptor) -> Any:
    async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            gate.check(method)
            answers = inner(request, context)
            if inspect.isawaitable(answers):
                await answers
                return
            async for answer in answers:
                yield answer
        except grpc.aio.AbortError:
            raise
        except Exception as err:  # noqa: BLE001 - the edge of the server: everything becomes a status
            await _fail(context, method, err)

    return guarded


# ------------------------------------------------------------------------------------------------------------ server


class Server:
    """A running gRPC server with health and reflection."""

    def __init__(
        self, server: grpc.aio.Server, health: Any, gate: _ErrorInterceptor, services: Sequence[str], host: str, port: int
    ) -> None:
        self._server, self._health, self._gate, self._services = server, health, gate, services
        self.host, self.port = host, port

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    async def open(self) -> None:
        """Answer calls, and say SERVING."""
        from grpc_health.v1 import health_pb2

        self._gate.closed = ""
        for name in self._services:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def drain(self, grace_s: float = 5.0) -> None:
        """Say NOT_SERVING, give clients a moment, let calls in flight end within `grace_s`, stop."""
        await self._health.enter_graceful_shutdown()
        await asyncio.sleep(min(DRAIN_NOTICE_S, grace_s))
        await self._server.stop(grace_s)

    async def wait(self) -> None:
        await self._server.wait_for_termination()


async def serve(
    listen: str,
    register: Callable[[grpc.aio.Server], None],
    services: Sequence[str],
    *,
    options: Sequence[tuple[str, Any]] = (),
    closed: str = "",
) -> Server:
    """Start a server on "host:port" (port 0 = any) with the servicers that `register` adds.

    `services` are full names ("stretto.v1.RolloutService") for health and reflection. `closed`: with what UNAVAILABLE calls
    are answered until `Server.open`; the process ("") is healthy meanwhile, its services are NOT_SERVING. Raises
    UnavailableError when the port is taken: SO_REUSEPORT is off, so two servers never share one silently.
    """
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection

    endpoints.split(listen, "listen")
    gate = _ErrorInterceptor(closed)
    server = grpc.aio.server(
        interceptors=[gate],
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
            ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 5000),
            ("grpc.http2.max_ping_strikes", 0),
            *options,
        ],
    )
    register(server)
    servicer = cast(Any, health).aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as err:
        raise UnavailableError(f"cannot listen on {listen}: {err}; is the port taken?") from None
    for name in services:
        await servicer.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
    await server.start()
    made = Server(server, servicer, gate, services, listen.rpartition(":")[0], port)
    if not closed:
        await made.open()
    return made


# ------------------------------------------------------------------------------------------------------------ client


def _options(service: str, idempotent: Sequence[str]) -> list[tuple[str, Any]]:
    """Channel options; `idempotent` are "stretto.v1.SchedulerService/GetStatus" names the channel may retry."""
    retry = {
        "maxAttempts": 4,
        "initialBackoff": "0.05s",
        "maxBackoff": "1s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    names = [dict(zip(("service", "method"), name.split("/"), strict=True)) for name in idempotent]
    config: dict[str, Any] = {"loadBalancingConfig": [{"round_robin": {}}]}
    if service:
        config["healthCheckConfig"] = {"serviceName": service}
    if names:
        config["methodConfig"] = [{"name": names, "retryPolicy": retry}]
    return [
        ("grpc.service_config", json.dumps(config)),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 3_000),
        ("grpc.http2.ping_timeout_ms", 3_000),  # without it a hung peer is never noticed
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.dns_min_time_between_resolutions_ms", 1_000),  # a name may stand for another server after a failure
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ]


def connect(target: str, *, service: str = "", idempotent: Sequence[str] = ()) -> grpc.aio.Channel:
    """An asyncio channel. Every call on it must pass a timeout. `service`: call only servers that say SERVING for it."""
    return grpc.aio.insecure_channel(target, options=_options(service, idempotent))


def connect_blocking(target: str, *, service: str = "", idempotent: Sequence[str] = ()) -> grpc.Channel:
    """`connect` for code without an event loop."""
    return grpc.insecure_channel(target, options=_options(service, idempotent))


class _Repeats:
    """When to repeat and how long to wait; logs once when a peer goes away and once when it is back."""

    def __init__(self, deadline_s: float, what: str) -> None:
        self.what, self.end_s, self.delay_s, self.away = what, time.monotonic() + deadline_s, BACKOFF_FIRST_S, False

    def after(self, err: StrettoError) -> float:
        """Seconds to sleep before the next try. Raises `err`, or UnavailableError naming `what` once the deadline is over."""
        if not isinstance(err, UnavailableError | DeadlineError):
            raise err
        left_s = self.end_s - time.monotonic()
        if left_s <= 0:
            raise type(err)(f"{self.what}: no answer before the deadline: {err.message}") from err
        if not self.away:
            self.away = True
            log.warning("peer_away", extra={"fields": {"what": self.what, "error": err.message}})
        self.delay_s = min(self.delay_s * 2, BACKOFF_MAX_S)
        return min(self.delay_s * random.uniform(0.5, 1.0), left_s)

    def answered(self) -> None:
        if self.away:
            log.warning("peer_back", extra={"fields": {"what": self.what}})


async def retry(call: Callable[[], Awaitable[T]], *, deadline_s: float, what: str) -> T:
    """Repeat `call` (which must be safe to repeat) while its peer is away, until `deadline_s` has passed.

    Raises the peer's own StrettoError at once, UnavailableError or DeadlineError naming `what` at the deadline.
    """
    repeats = _Repeats(deadline_s, what)
    while True:
        try:
            answer = await call()
        except grpc.RpcError as err:
            await asyncio.sleep(repeats.after(from_rpc_error(err)))
        except StrettoError as err:
            await asyncio.sleep(repeats.after(err))
        else:
            repeats.answered()
            return answer


def retry_blocking(call: Callable[[], T], *, deadline_s: float, what: str, sleep: Callable[[float], object] = time.sleep) -> T:
    """`retry` for code without an event loop. `sleep` may raise to end the wait early (shutdown)."""
    repeats = _Repeats(deadline_s, what)
    while True:
        try:
            answer = call()
        except grpc.RpcError as err:
            sleep(repeats.after(from_rpc_error(err)))
        except StrettoError as err:
            sleep(repeats.after(err))
        else:
            repeats.answered()
            return answer
