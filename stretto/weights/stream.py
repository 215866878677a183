"""The grpc backend's two streams, without protobuf's copies.

The bytes on the wire are those of `PublishRequest` and `FetchResponse`, so any client speaks them; but protobuf copies a
`bytes` field on each side, which halves the throughput of 1 MiB messages. These functions write and read the field's tag
and length themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stretto.v1 import weightsync_pb2 as pb
from stretto.weights.layout import Bytes

PUBLISH = "/stretto.v1.WeightSyncService/Publish"
FETCH = "/stretto.v1.WeightSyncService/Fetch"
CHUNK_BYTES = 1 << 20
"""Payload of a message. Measured best: 4 MiB and 256 KiB are both about a fifth slower."""
_PUBLISH_DATA, _FETCH_DATA = b"\x12", b"\x0a"
"""Tags: field 2 and field 1, length-delimited."""


def _varint(n: int) -> bytes:
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


def _message(tag: bytes, parts: list[Bytes]) -> bytes:
    return b"".join((tag, _varint(sum(map(len, parts))), *map(memoryview, parts)))  # type: ignore[arg-type]


def _payload(tag: bytes, message: bytes) -> memoryview | None:
    """The field's bytes when the message is that one field, else None."""
    if message[:1] != tag:
        return None
    length, shift, at = 0, 0, 1
    while True:
        byte = message[at]
        length |= (byte & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if byte < 0x80:
            break
    return memoryview(message)[at:] if at + length == len(message) else None


def encode_publish(parts: list[Bytes]) -> bytes:
    """A serialized PublishRequest with the concatenation of `parts` as its data."""
    return _message(_PUBLISH_DATA, parts)


def decode_publish(message: bytes) -> tuple[str, memoryview]:
    """(slot_id, data) of a serialized PublishRequest."""
    if (data := _payload(_PUBLISH_DATA, message)) is not None:
        return "", data
    parsed = pb.PublishRequest.FromString(message)
    return parsed.slot_id, memoryview(parsed.data)


def encode_fetch(part: Bytes) -> bytes:
    """A serialized FetchResponse with `part` as its data."""
    return _message(_FETCH_DATA, [part])


def decode_fetch(message: bytes) -> memoryview:
    """The data of a serialized FetchResponse."""
    if (data := _payload(_FETCH_DATA, message)) is not None:
        return data
    return memoryview(pb.FetchResponse.FromString(message).data)


def batched(pieces: Iterable[Bytes]) -> Iterator[list[Bytes]]:
    """Consecutive pieces in lists of about CHUNK_BYTES: small tensors share a message."""
    batch: list[Bytes] = []
    nbytes = 0
    for piece in pieces:
        if batch and nbytes + len(piece) > CHUNK_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(piece)
        nbytes += len(piece)
    if batch:
        yield batch
