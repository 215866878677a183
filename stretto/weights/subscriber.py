"""A replica's side: learn of newer weights, read them whole and verified, say when they are loaded.

watch:  Join -> Watch ... newest, newer, newer ... (relay gone: join and watch again, for ever)
fetch:  Acquire -> manifest + lease -> bytes (shm: the mapped slot itself; grpc: a stream into our buffer) -> verify
release: ends the lease; False = it had ended before, so fetch again

async for _ in subscriber.watch():
    while fetched := await subscriber.fetch(held):
        load(fetched.tensors)
        if await subscriber.release(fetched):
            held = fetched.id
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import numpy as np

from stretto import rpc
from stretto.errors import DeadlineError, NotFoundError, StaleError, StrettoError, UnavailableError
from stretto.v1 import weightsync_pb2 as pb
from stretto.v1 import weightsync_pb2_grpc as pb_grpc
from stretto.weights import layout as layouts
from stretto.weights import shm, stream
from stretto.weights.layout import ArrayView, Bytes, Digests, Hasher, Layout, VersionId
from stretto.weights.publisher import offers

log = logging.getLogger("stretto.weights")
T = TypeVar("T")

WATCH_S = 600.0
"""A watch is begun anew this often, so that none hangs for ever on a half-dead connection."""
RELEASE_S = 5.0
"""A relay that does not answer a release for this long is taken for gone."""


@dataclass(frozen=True)
class Fetched:
    """One verified version. Its tensors may be read until it is released."""

    id: VersionId
    tensors: Mapping[str, ArrayView]
    """Views of the relay's own memory (shm, read-only) or of our buffer (grpc)."""
    digest: bytes
    nbytes: int
    backend: str
    lease_id: str
    receive_ms: float
    verify_ms: float
    arena: Bytes


class Subscriber:
    """One reader. `watch` and `fetch` may run in two tasks; fetch and release one version at a time."""

    def __init__(self, target: str, replica_id: str, backend: str = "auto", device_type: str = "cpu", deadline_s: float = 60.0) -> None:
        """`deadline_s` bounds a fetch; a relay that is away is tried again until then."""
        self._target, self._replica_id, self._backend, self._device_type = target, replica_id, backend, device_type
        self._deadline_s = deadline_s
        self._channel = rpc.connect(target)
        self._stub: Any = pb_grpc.WeightSyncServiceStub(self._channel)
        self._receive = self._channel.unary_stream(
            stream.FETCH, request_serializer=pb.FetchRequest.SerializeToString, response_deserializer=stream.decode_fetch
        )
        self._slots = shm.Slots(writable=False)
        self._layout = Layout(())
        self._spare: Bytes | None = None
        self._has_joined = False

    async def watch(self) -> AsyncGenerator[VersionId, None]:
        """The newest READY version at once, then each newer one; survives restarts of the relay.

        Nothing older or equal to what was yielded before is yielded. Raises only what waiting cannot cure (RefusedError…).
        """
        last: VersionId | None = None
        delay_s, away = rpc.BACKOFF_FIRST_S, False
        while True:
            call: Any = None
            try:
                await self._join()
                call = self._stub.Watch(pb.WatchRequest(replica_id=self._replica_id), timeout=WATCH_S)
                async for message in call:
                    if away:
                        log.warning("relay_back", extra={"fields": {"relay": self._target}})
                    delay_s, away = rpc.BACKOFF_FIRST_S, False
                    newest = layouts.id_from_proto(message.newest)
                    if last is None or newest > last:
                        last = newest
                        yield newest
            except (grpc.RpcError, StrettoError) as raw:
                err = _as_stretto(raw)
                if not isinstance(err, UnavailableError | DeadlineError | NotFoundError):
                    raise err from None
                if not away and not isinstance(err, DeadlineError):
                    away = True
                    log.warning("relay_away", extra={"fields": {"relay": self._target, "error": err.message}})
            finally:
                if call is not None:
                    call.cancel()
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, rpc.BACKOFF_MAX_S)

    async def fetch(self, held: tuple[int, int] | None) -> Fetched | None:
        """The newest READY version, verified; None when there is none newer than `held`.

        Raises CorruptError naming the bucket (the relay is told), DeadlineError naming the phase, UnavailableError when the
        relay stayed away for `deadline_s`. After any of these the next fetch starts afresh.
        """
        end_s, delay_s = time.monotonic() + self._deadline_s, rpc.BACKOFF_FIRST_S
        while True:
            try:
                if not self._has_joined:
                    await self._phase("join", self._join, end_s)
                return await self._attempt(held, end_s)
            except (UnavailableError, NotFoundError, StaleError) as err:
                # away; restarted and does not know us; or our lease ended while we were reading
                self._has_joined = False
                if time.monotonic() + delay_s > end_s:
                    raise UnavailableError(f"fetch: relay {self._target}: given up after {self._deadline_s} s: {err.message}") from None
                log.info("fetch_again", extra={"fields": {"relay": self._target, "error": err.message}})
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, rpc.BACKOFF_MAX_S)

    async def release(self, fetched: Fetched, error: str = "") -> bool:
        """End the lease of `fetched` and say how loading went (empty `error` = well).

        False: the lease had ended before, so the bytes may have been overwritten while they were loaded; fetch again.
        A relay that is gone cannot have overwritten them.
        """
        request = pb.ReleaseRequest(
            lease_id=fetched.lease_id, replica_id=self._replica_id, error=error, loaded_digest=b"" if error else fetched.digest
        )
        was_valid = True
        try:
            was_valid = (await self._stub.Release(request, timeout=min(RELEASE_S, self._deadline_s))).was_valid
        except grpc.RpcError as raw:
            err = rpc.from_rpc_error(raw)
            if not isinstance(err, UnavailableError | DeadlineError):
                raise err from None
        if fetched.backend != "grpc":
            return was_valid
        self._spare = fetched.arena
        return True  # our own buffer, verified: nobody else writes there

    async def close(self) -> None:
        self._slots.clear()
        self._spare = None
        await self._channel.close()

    # ---- one fetch

    async def _join(self) -> None:
        """Announce ourselves with the best backend that works from here."""
        offered = offers(self._backend)
        joined = await self._announce(offered)
        if joined.backend == "shm" and not await asyncio.to_thread(shm.is_reachable, joined.socket_path):
            if "grpc" not in offered:
                raise UnavailableError(f"shm: {joined.socket_path} cannot be reached from here, and weightsync.backend allows only shm")
            log.info("shm_not_reachable", extra={"fields": {"socket": joined.socket_path, "backend": "grpc"}})
            await self._announce(("grpc",))
        self._has_joined = True

    async def _announce(self, offered: tuple[str, ...]) -> pb.JoinResponse:
        request = pb.JoinRequest(replica_id=self._replica_id, backends=offered, device_type=self._device_type)
        try:
            return await self._stub.Join(request, timeout=min(RELEASE_S, self._deadline_s))
        except grpc.RpcError as raw:
            raise rpc.from_rpc_error(raw) from None

    async def _attempt(self, held: tuple[int, int] | None, end_s: float) -> Fetched | None:
        request = pb.AcquireRequest(
            replica_id=self._replica_id,
            operation_id=uuid.uuid4().hex,
            held=layouts.id_to_proto(VersionId(*held)) if held is not None else None,
        )
        acquired = await self._phase("acquire", lambda: self._stub.Acquire(request, timeout=self._deadline_s), end_s)
        if not acquired.HasField("manifest"):
            return None
        try:
            return await self._read(acquired, end_s)
        except StrettoError as err:
            await self._give_up(acquired.lease_id, err.message)
            raise

    async def _read(self, acquired: pb.AcquireResponse, end_s: float) -> Fetched:
        m = acquired.manifest
        layout = self._layout if m.layout_digest == self._layout.digest else layouts.read_layout(m)
        self._layout = layout
        expected = layouts.read_digests(m, layout)
        begun_s = time.perf_counter()
        if acquired.backend == "shm":
            map_slot = lambda: asyncio.to_thread(  # noqa: E731 - each phase is a call to make
                self._slots.get, acquired.slot_id, acquired.socket_path, acquired.token, layout.digest
            )
            arena = await self._phase("map", map_slot, end_s)
            received_s = time.perf_counter()
            hash_all = lambda: asyncio.to_thread(layouts.hash_arena, layout, arena, expected.bucket_bytes)  # noqa: E731
            found = await self._phase("verify", hash_all, end_s)
        else:
            arena, found = await self._phase("receive", lambda: self._stream(acquired.lease_id, layout, expected), end_s)
            received_s = time.perf_counter()
        id = layouts.id_from_proto(m.id)
        layouts.check(expected, found, layout, f"{id} received by {self._replica_id} over {acquired.backend}")
        return Fetched(
            id=id,
            tensors=layout.views(arena),
            digest=expected.content,
            nbytes=layout.arena_bytes,
            backend=acquired.backend,
            lease_id=acquired.lease_id,
            receive_ms=(received_s - begun_s) * 1e3,
            verify_ms=(time.perf_counter() - received_s) * 1e3,
            arena=arena,
        )

    async def _stream(self, lease_id: str, layout: Layout, expected: Digests) -> tuple[Bytes, Digests]:
        """The bytes, into a buffer that nobody else uses, hashed as they come."""
        arena, self._spare = self._spare, None
        if arena is None or len(arena) != layout.arena_bytes:
            arena = np.empty(layout.arena_bytes, np.uint8)
        hasher, offset = Hasher(layout.arena_bytes, expected.bucket_bytes), 0
        call = self._receive(pb.FetchRequest(lease_id=lease_id), timeout=self._deadline_s)
        try:
            async for data in call:
                piece = np.frombuffer(data, np.uint8)
                hasher.update(piece)
                arena[offset : offset + len(piece)] = piece
                offset += len(piece)
        finally:
            call.cancel()
        if offset != layout.arena_bytes:
            raise UnavailableError(f"the stream ended after {offset} of {layout.arena_bytes} bytes")
        return arena, hasher.finish(layout.digest)

    async def _give_up(self, lease_id: str, error: str) -> None:
        """Tell the relay why we did not load; a relay that cannot be told ends the lease by itself."""
        request = pb.ReleaseRequest(lease_id=lease_id, replica_id=self._replica_id, error=error)
        try:
            await self._stub.Release(request, timeout=RELEASE_S)
        except grpc.RpcError as raw:
            log.info("release_not_heard", extra={"fields": {"error": rpc.from_rpc_error(raw).message}})

    async def _phase(self, phase: str, begin: Callable[[], Awaitable[T]], end_s: float) -> T:
        """The result of `begin()`. Raises DeadlineError naming the phase at `end_s`."""
        late = DeadlineError(f"fetch: phase {phase}: no answer from relay {self._target} within {self._deadline_s} s")
        try:
            async with asyncio.timeout(max(0.0, end_s - time.monotonic())):
                return await begin()
        except TimeoutError:
            raise late from None
        except (grpc.RpcError, StrettoError) as raw:
            err = _as_stretto(raw)
            raise late if isinstance(err, DeadlineError) else err from None


def _as_stretto(err: BaseException) -> StrettoError:
    return err if isinstance(err, StrettoError) else rpc.from_rpc_error(err)  # type: ignore[arg-type]
