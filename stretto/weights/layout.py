"""Which byte of the arena belongs to which tensor, and which digests prove that bytes arrived. Pure.

    arena    |embed......|0|layers.0.q......|layers.0.v..|0|norm|          tensors by name, each at a multiple of 64
    buckets  |--------- 0 ---------|--------- 1 ---------|--- 2 --|        cut every bucket_bytes, one xxh3_128 each
    digest   xxh3_128(layout digest, bucket digests)                       the identity of the content

Gaps between tensors are zero, so that equal tensors always make equal arenas.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import xxhash

from stretto.errors import CorruptError, InvalidArgumentError
from stretto.v1 import types_pb2
from stretto.v1 import weightsync_pb2 as pb

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
"""A flat array of uint8."""
ALIGNMENT = 64
"""Bytes. A cache line, and enough for every dtype's alignment."""
COPY_BYTES = 256 << 10
"""Bytes copied and then hashed while they are still in the core's own cache."""
_DTYPES_BY_BYTES = {1: "BOOL U8 I8 F8_E4M3 F8_E5M2", 2: "U16 I16 F16 BF16", 4: "U32 I32 F32", 8: "U64 I64 F64"}
DTYPE_BYTES: Mapping[str, int] = {name: n for n, names in _DTYPES_BY_BYTES.items() for name in names.split()}
"""safetensors' names and the bytes of one element."""


class VersionId(NamedTuple):
    """The identity of one set of weights, in the order in which they win."""

    epoch: int
    """Incarnation of the trainer that published it."""
    version: int
    """Policy version."""

    def __str__(self) -> str:
        return f"v{self.version} of trainer epoch {self.epoch}"


class ArrayView(NamedTuple):
    """One tensor's bytes and what they mean; needs no framework."""

    dtype: str
    """safetensors' name: "F32", "BF16", …"""
    shape: tuple[int, ...]
    data: Any
    """C-contiguous bytes: memoryview, bytes or numpy uint8 array."""


class Place(NamedTuple):
    """One tensor's place in the arena."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Byte offset, a multiple of 64."""
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True)
class Layout:
    """Where each tensor of a model lies; ordered by name, which is also the order of the offsets."""

    places: tuple[Place, ...]

    @cached_property
    def arena_bytes(self) -> int:
        return _aligned(self.places[-1].end) if self.places else 0

    @cached_property
    def digest(self) -> bytes:
        """xxh3_128 of the canonical text: equal layouts, equal digests, on every machine."""
        rows = [[p.name, p.dtype, list(p.shape), p.offset, p.nbytes] for p in self.places]
        return xxhash.xxh3_128_digest(json.dumps(rows, separators=(",", ":"), ensure_ascii=True).encode())

    def to_proto(self) -> list[pb.TensorLayout]:
        return [pb.TensorLayout(name=p.name, dtype=p.dtype, shape=p.shape, offset=p.offset, nbytes=p.nbytes) for p in self.places]

    def views(self, arena: Bytes) -> dict[str, ArrayView]:
        """Every tensor as a view of `arena` (uint8): nothing is copied."""
        return {p.name: ArrayView(p.dtype, p.shape, arena[p.offset : p.end]) for p in self.places}


@dataclass(frozen=True)
class Digests:
    """What proves the content of an arena."""

    bucket_bytes: int
    buckets: tuple[bytes, ...]
    """xxh3_128 of each bucket, in order."""
    content: bytes
    """xxh3_128 over the layout's digest and `buckets`."""


# ------------------------------------------------------------------------------------------------------------ layouts


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _tensor_bytes(name: str, dtype: str, shape: Sequence[int]) -> int:
    if dtype not in DTYPE_BYTES:
        raise InvalidArgumentError(f"tensor {name!r}: dtype {dtype!r} is none of {', '.join(DTYPE_BYTES)}")
    if any(n < 0 for n in shape):
        raise InvalidArgumentError(f"tensor {name!r}: shape {tuple(shape)} has a negative length")
    return DTYPE_BYTES[dtype] * math.prod(shape)


def plan(kinds: Mapping[str, tuple[str, tuple[int, ...]]]) -> Layout:
    """The layout of tensors given as name -> (dtype, shape). The same for every order of `kinds`.

    Raises InvalidArgumentError for no tensor at all, an unknown dtype or a negative length.
    """
    if not kinds:
        raise InvalidArgumentError("no tensors to lay out")
    places: list[Place] = []
    offset = 0
    for name in sorted(kinds):
        dtype, shape = kinds[name]
        places.append(Place(name, dtype, tuple(shape), offset, _tensor_bytes(name, dtype, shape)))
        offset = _aligned(places[-1].end)
    return Layout(tuple(places))


def from_proto(tensors: Iterable[pb.TensorLayout]) -> Layout:
    """A layout that came over the wire. Raises InvalidArgumentError unless it is exactly what `plan` makes."""
    given = Layout(tuple(Place(t.name, t.dtype, tuple(t.shape), t.offset, t.nbytes) for t in tensors))
    planned = plan({p.name: (p.dtype, p.shape) for p in given.places})
    for ours, theirs in zip(planned.places, given.places, strict=False):
        if ours != theirs:
            raise InvalidArgumentError(f"tensor {theirs.name!r} is laid out as {tuple(theirs)}, expected {tuple(ours)}")
    if len(planned.places) != len(given.places):
        raise InvalidArgumentError(f"{len(given.places)} tensors but only {len(planned.places)} different names")
    return given


# ------------------------------------------------------------------------------------------------------------ digests


def num_buckets(arena_bytes: int, bucket_bytes: int) -> int:
    return -(-arena_bytes // bucket_bytes)


def content_digest(layout_digest: bytes, buckets: Iterable[bytes]) -> bytes:
    return xxhash.xxh3_128_digest(layout_digest + b"".join(buckets))


class Hasher:
    """Digests of an arena that arrives in order, in pieces of any size."""

    def __init__(self, arena_bytes: int, bucket_bytes: int) -> None:
        if bucket_bytes <= 0:
            raise InvalidArgumentError(f"bucket_bytes = {bucket_bytes}: must be positive")
        self._left_in_bucket = self.bucket_bytes = bucket_bytes
        self._left = arena_bytes
        self._running = xxhash.xxh3_128()
        self._done: list[bytes] = []

    def update(self, data: Bytes) -> None:
        """`data` (uint8) is next. Raises InvalidArgumentError when the arena is already complete."""
        if len(data) > self._left:
            raise InvalidArgumentError(f"{len(data)} bytes given, {self._left} are left of the arena")
        self._left -= len(data)
        while len(data):
            piece, data = data[: self._left_in_bucket], data[self._left_in_bucket :]
            self._running.update(piece.data)
            self._left_in_bucket -= len(piece)
            if not self._left_in_bucket:
                self._close_bucket()

    def _close_bucket(self) -> None:
        self._done.append(self._running.digest())
        self._running, self._left_in_bucket = xxhash.xxh3_128(), self.bucket_bytes

    def finish(self, layout_digest: bytes) -> Digests:
        assert not self._left, f"{self._left} bytes are missing"
        if self._left_in_bucket < self.bucket_bytes:
            self._close_bucket()
        return Digests(self.bucket_bytes, tuple(self._done), content_digest(layout_digest, self._done))


def hash_arena(layout: Layout, arena: Bytes, bucket_bytes: int) -> Digests:
    """Digests of bytes already in place."""
    hasher = Hasher(layout.arena_bytes, bucket_bytes)
    hasher.update(arena[: layout.arena_bytes])
    return hasher.finish(layout.digest)


def first_difference(expected: Digests, found: Digests, layout: Layout) -> str | None:
    """The first bucket that differs, with its bytes and the tensors in it, for people; None when there is none."""
    for index, (want, got) in enumerate(zip(expected.buckets, found.buckets, strict=True)):
        if want != got:
            begin = index * expected.bucket_bytes
            end = min(begin + expected.bucket_bytes, layout.arena_bytes)
            names = [p.name for p in layout.places if p.offset < end and p.end > begin]
            span = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}" if names else "no tensor"
            return f"bucket {index} of {len(expected.buckets)} (bytes {begin}-{end}, {span}) hashes to {got.hex()}, expected {want.hex()}"
    if expected.content != found.content:
        return f"the content hashes to {found.content.hex()}, expected {expected.content.hex()}"
    return None


def check(expected: Digests, found: Digests, layout: Layout, what: str) -> None:
    """Raises CorruptError that names `what` and the first bucket that differs."""
    if (difference := first_difference(expected, found, layout)) is not None:
        raise CorruptError(f"{what}: {difference}")


# ------------------------------------------------------------------------------------------------------------ manifests


def manifest(id: VersionId, layout: Layout, digests: Digests | None = None, *, bucket_bytes: int = 0, tensors: bool = True) -> pb.Manifest:
    """What travels; `tensors` may be left out where the other side knows the layout by its digest."""
    return pb.Manifest(
        id=id_to_proto(id),
        tensors=layout.to_proto() if tensors else (),
        arena_bytes=layout.arena_bytes,
        layout_digest=layout.digest,
        bucket_bytes=digests.bucket_bytes if digests else bucket_bytes,
        bucket_digests=digests.buckets if digests else (),
        digest=digests.content if digests else b"",
    )


def read_layout(m: pb.Manifest) -> Layout:
    """The layout in a manifest. Raises InvalidArgumentError where the manifest contradicts itself."""
    layout = from_proto(m.tensors)
    if m.arena_bytes != layout.arena_bytes:
        raise InvalidArgumentError(f"arena_bytes = {m.arena_bytes}, but its tensors need {layout.arena_bytes}")
    if m.layout_digest != layout.digest:
        raise InvalidArgumentError(f"layout_digest is {m.layout_digest.hex()}, but its tensors have {layout.digest.hex()}")
    if m.bucket_bytes <= 0:
        raise InvalidArgumentError(f"bucket_bytes = {m.bucket_bytes}: must be positive")
    return layout


def read_digests(m: pb.Manifest, layout: Layout) -> Digests:
    """The digests in a manifest for `layout`. Raises InvalidArgumentError where they cannot belong to it."""
    if m.layout_digest != layout.digest or m.arena_bytes != layout.arena_bytes:
        raise InvalidArgumentError(f"the manifest is of layout {m.layout_digest.hex()}, not {layout.digest.hex()}")
    if m.bucket_bytes <= 0:
        raise InvalidArgumentError(f"bucket_bytes = {m.bucket_bytes}: must be positive")
    if len(m.bucket_digests) != (wanted := num_buckets(layout.arena_bytes, m.bucket_bytes)):
        raise InvalidArgumentError(f"{len(m.bucket_digests)} bucket digests for {wanted} buckets")
    if m.digest != content_digest(layout.digest, m.bucket_digests):
        raise InvalidArgumentError("digest is not that of layout_digest and bucket_digests")
    return Digests(m.bucket_bytes, tuple(m.bucket_digests), m.digest)


def id_to_proto(id: VersionId) -> types_pb2.WeightsId:
    return types_pb2.WeightsId(trainer_epoch=id.epoch, version=id.version)


def id_from_proto(id: types_pb2.WeightsId) -> VersionId:
    return VersionId(id.trainer_epoch, id.version)


# ------------------------------------------------------------------------------------------------------------ packing


def as_bytes(name: str, view: ArrayView, nbytes: int) -> Bytes:
    """The bytes of `view` as a flat uint8 array. Raises InvalidArgumentError when there are not `nbytes` contiguous ones."""
    data = view.data
    if not isinstance(data, np.ndarray):
        data = np.frombuffer(data, np.uint8) if memoryview(data).nbytes else np.empty(0, np.uint8)
    if not data.flags.c_contiguous:
        raise InvalidArgumentError(f"tensor {name!r}: its bytes are not contiguous")
    data = data.reshape(-1).view(np.uint8)
    if data.nbytes != nbytes:
        raise InvalidArgumentError(f"tensor {name!r}: {view.dtype} {view.shape} needs {nbytes} bytes, {data.nbytes} given")
    return data


def flatten(layout: Layout, tensors: Mapping[str, ArrayView]) -> list[Bytes]:
    """The tensors' bytes in the layout's order. Raises InvalidArgumentError where they do not fit it."""
    return [as_bytes(p.name, tensors[p.name], p.nbytes) for p in layout.places]


def pieces(layout: Layout, arrays: Iterable[Bytes]) -> Iterator[tuple[int, Bytes]]:
    """(offset, bytes) of the whole arena in order, at most COPY_BYTES each, gaps as zeros. Copies nothing."""
    gap = np.zeros(ALIGNMENT, np.uint8)
    for place, data in zip(layout.places, arrays, strict=True):
        for begin in range(0, place.nbytes, COPY_BYTES):
            yield place.offset + begin, data[begin : begin + COPY_BYTES]
        if padding := _aligned(place.end) - place.end:
            yield place.end, gap[:padding]
