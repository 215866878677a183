"""The trainer's side: put one whole set of weights into the relay.

    PreparePublish -> slot -> copy + hash (shm: into the mapped slot; grpc: a stream) -> CommitPublish -> READY

Blocking; one publish at a time. Either the version is READY when `publish` returns, or it raised by name and the relay still
serves the version before.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from stretto import rpc
from stretto.errors import DeadlineError, FullError, NotFoundError, StrettoError, UnavailableError
from stretto.v1 import weightsync_pb2 as pb
from stretto.v1 import weightsync_pb2_grpc as pb_grpc
from stretto.weights import layout as layouts
from stretto.weights import shm, stream
from stretto.weights.layout import ArrayView, Bytes, Digests, Hasher, Layout, VersionId

log = logging.getLogger("stretto.weights")

DEFAULT_BUCKET_BYTES = 2048 << 20


@dataclass(frozen=True)
class PublishReport:
    """What one publish cost."""

    bytes: int
    """Arena bytes, gaps included."""
    copy_ms: float
    """Copying into the slot, or sending."""
    hash_ms: float
    verify_ms: float
    """The relay's own hash of what arrived."""
    total_ms: float
    backend: str
    """ "shm" or "grpc"; "none" when the relay had these very bytes already."""


def offers(backend: str) -> tuple[str, ...]:
    """What a client with this recipe value offers, best first."""
    return ("shm", "grpc") if backend == "auto" else (backend,)


class Publisher:
    """The only writer of a trainer epoch."""

    def __init__(
        self,
        target: str,
        backend: str = "auto",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        deadline_s: float = 60.0,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """`deadline_s` bounds each phase, and for how long an absent or full relay is tried again; `sleep` may raise to end
        such a wait early."""
        self._target, self._backend, self._bucket_bytes, self._deadline_s = target, backend, bucket_bytes, deadline_s
        self._sleep = sleep
        self._channel = rpc.connect_blocking(target)
        self._stub = pb_grpc.WeightSyncServiceStub(self._channel)
        self._send = self._channel.stream_unary(stream.PUBLISH, response_deserializer=pb.PublishResponse.FromString)
        self._offers = offers(backend)
        self._slots = shm.Slots(writable=True)
        self._kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._layout = Layout(())

    def publish(self, epoch: int, version: int, tensors: Mapping[str, ArrayView]) -> PublishReport:
        """Make `tensors` the newest READY version. Safe to repeat with the same tensors.

        Raises FencedError (a newer trainer epoch published), StaleError (a newer version is READY), RefusedError (other
        bytes are READY under this id), CorruptError (what arrived is not what was sent), DeadlineError naming the phase,
        and, after `deadline_s` of trying, UnavailableError or FullError.
        """
        id = VersionId(epoch, version)
        layout = self._layout_of(tensors)
        arrays = layouts.flatten(layout, tensors)
        return self._until_deadline(lambda: self._attempt(id, layout, arrays), f"publish of {id}")

    def newest(self) -> tuple[int, int] | None:
        """(epoch, version) of the newest READY version at the relay; None when it has none. Raises UnavailableError."""
        return max((layouts.id_from_proto(v.id) for v in self._versions() if v.state == pb.VERSION_STATE_READY), default=None)

    def newest_epoch(self) -> int:
        """Newest trainer epoch that has published or begun to; 0 when none has. Raises UnavailableError."""
        return max((v.id.trainer_epoch for v in self._versions()), default=0)

    def _versions(self) -> Sequence[pb.VersionStatus]:
        return self._call("status", "status", self._stub.GetStatus, pb.WeightSyncServiceGetStatusRequest()).versions

    def close(self) -> None:
        self._slots.clear()
        self._channel.close()

    # ---- one publish

    def _layout_of(self, tensors: Mapping[str, ArrayView]) -> Layout:
        kinds = {name: (view.dtype, tuple(view.shape)) for name, view in tensors.items()}
        if kinds != self._kinds:
            self._layout, self._kinds = layouts.plan(kinds), kinds
        return self._layout

    def _attempt(self, id: VersionId, layout: Layout, arrays: list[Bytes]) -> PublishReport:
        start_s = time.perf_counter()
        what = f"publish of {id}"
        request = pb.PreparePublishRequest(
            id=layouts.id_to_proto(id),
            layout=layouts.manifest(id, layout, bucket_bytes=self._bucket_bytes),
            backends=self._offers,
        )
        prepared = self._call(what, "prepare", self._stub.PreparePublish, request)
        try:
            filled = self._fill(what, prepared, layout, arrays)
            digested = layouts.manifest(id, layout, filled.digests, tensors=False)
            commit = pb.CommitPublishRequest(slot_id=prepared.slot_id, manifest=digested)
            committed = self._call(what, "commit", self._stub.CommitPublish, commit)
        except BaseException:
            self._slots.forget(prepared.slot_id)  # the relay never reuses the slot of a failed attempt
            raise
        total_ms = (time.perf_counter() - start_s) * 1e3
        return PublishReport(layout.arena_bytes, filled.copy_ms, filled.hash_ms, committed.verify_ms, total_ms, filled.backend)

    def _fill(self, what: str, prepared: pb.PreparePublishResponse, layout: Layout, arrays: list[Bytes]) -> _Filled:
        if prepared.already_ready:
            return self._copy(what, None, layout, arrays)
        if prepared.backend == "grpc":
            return self._stream(what, prepared.slot_id, layout, arrays)
        try:
            arena = self._slots.get(prepared.slot_id, prepared.socket_path, prepared.token, layout.digest)
        except UnavailableError as err:
            if self._backend == "auto" and self._offers != ("grpc",):
                log.warning("shm_not_reachable", extra={"fields": {"backend": "grpc", "reason": err.message}})
                self._offers = ("grpc",)
            raise
        return self._copy(what, arena, layout, arrays)

    def _copy(self, what: str, arena: Bytes | None, layout: Layout, arrays: list[Bytes]) -> _Filled:
        """Hash all bytes and, unless `arena` is None, copy them there: each piece is hashed while it is in the cache."""
        clock, hasher = time.perf_counter, Hasher(layout.arena_bytes, self._bucket_bytes)
        copy_s = hash_s = 0.0
        end_s = clock() + self._deadline_s
        for offset, piece in layouts.pieces(layout, arrays):
            begun_s = clock()
            if arena is not None:
                arena[offset : offset + len(piece)] = piece
            copied_s = clock()
            hasher.update(piece)
            hashed_s = clock()
            copy_s += copied_s - begun_s
            hash_s += hashed_s - copied_s
            if hashed_s > end_s:
                raise DeadlineError(f"{what}: phase copy did not end within {self._deadline_s} s ({offset} of {layout.arena_bytes} bytes)")
        return _Filled(hasher.finish(layout.digest), copy_s * 1e3, hash_s * 1e3, "none" if arena is None else "shm")

    def _stream(self, what: str, slot_id: str, layout: Layout, arrays: list[Bytes]) -> _Filled:
        hasher = Hasher(layout.arena_bytes, self._bucket_bytes)
        hash_s = 0.0

        def messages() -> Iterator[bytes]:
            nonlocal hash_s
            yield pb.PublishRequest(slot_id=slot_id).SerializeToString()
            for batch in stream.batched(piece for _, piece in layouts.pieces(layout, arrays)):
                begun_s = time.perf_counter()
                for piece in batch:
                    hasher.update(piece)
                hash_s += time.perf_counter() - begun_s
                yield stream.encode_publish(batch)

        begun_s = time.perf_counter()
        self._call(what, "send", self._send, messages())
        elapsed_s = time.perf_counter() - begun_s
        return _Filled(hasher.finish(layout.digest), (elapsed_s - hash_s) * 1e3, hash_s * 1e3, "grpc")

    # ---- calls

    def _call(self, what: str, phase: str, method: Callable[..., Any], request: Any) -> Any:
        try:
            return method(request, timeout=self._deadline_s)
        except grpc.RpcError as raw:
            err = rpc.from_rpc_error(raw)
            if isinstance(err, UnavailableError):
                raise UnavailableError(f"{what}: phase {phase}: relay {self._target}: {err.message}") from None
            if isinstance(err, DeadlineError):
                raise DeadlineError(f"{what}: phase {phase}: no answer from relay {self._target} within {self._deadline_s} s") from None
            raise err from None

    def _until_deadline(self, attempt: Callable[[], PublishReport], what: str) -> PublishReport:
        """Repeat while the relay is away, has lost the slot (it restarted) or has no free slot."""
        end_s, delay_s, noted = time.monotonic() + self._deadline_s, rpc.BACKOFF_FIRST_S, False
        while True:
            offered = self._offers
            try:
                return attempt()
            except (UnavailableError, NotFoundError, FullError) as err:
                if time.monotonic() + delay_s > end_s:
                    raise self._at_deadline(err, what) from None
                if not noted:
                    noted = True
                    log.warning("publish_waits", extra={"fields": {"what": what, "error": err.message}})
                if offered == self._offers:  # else: shm was just found out of reach, and grpc is next
                    self._offers = offers(self._backend)
                    self._sleep(delay_s)
                    delay_s = min(delay_s * 2, rpc.BACKOFF_MAX_S)

    def _at_deadline(self, err: StrettoError, what: str) -> StrettoError:
        cls = UnavailableError if isinstance(err, NotFoundError) else type(err)
        return cls(f"{what}: given up after {self._deadline_s} s: {err.message}")

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ValueError):  # closed already
            self.close()


@dataclass(frozen=True)
class _Filled:
    digests: Digests
    copy_ms: float
    hash_ms: float
    backend: str
