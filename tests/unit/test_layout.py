"""Layouts and digests: deterministic, gapless in content, and every flipped byte has a name."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stretto.errors import CorruptError, InvalidArgumentError
from stretto.v1 import weightsync_pb2 as pb
from stretto.weights import layout as layouts
from stretto.weights import stream
from stretto.weights.layout import ALIGNMENT, DTYPE_BYTES, ArrayView, Hasher, Layout, VersionId

Kinds = dict[str, tuple[str, tuple[int, ...]]]
ID = VersionId(1, 7)
quick = settings(max_examples=40, deadline=None)

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
kinds = st.dictionaries(st.text(min_size=1, max_size=12), st.tuples(st.sampled_from(sorted(DTYPE_BYTES)), shapes), min_size=1, max_size=12)


def tensors_for(layout: Layout, seed: int) -> dict[str, ArrayView]:
    rng = np.random.default_rng(seed)
    return {p.name: ArrayView(p.dtype, p.shape, rng.integers(0, 256, p.nbytes, np.uint8)) for p in layout.places}


def pack(layout: Layout, tensors: Mapping[str, ArrayView], arena: np.ndarray) -> None:
    for offset, piece in layouts.pieces(layout, layouts.flatten(layout, tensors)):
        arena[offset : offset + len(piece)] = piece


@quick
@given(kinds, st.randoms())
def test_the_layout_does_not_depend_on_the_order_of_the_tensors(given_kinds: Kinds, random: object) -> None:
    names = list(given_kinds)
    random.shuffle(names)  # type: ignore[attr-defined]
    assert layouts.plan({name: given_kinds[name] for name in names}).digest == layouts.plan(given_kinds).digest


@quick
@given(kinds)
def test_places_are_aligned_sorted_and_do_not_overlap(given_kinds: Kinds) -> None:
    layout = layouts.plan(given_kinds)
    assert [p.name for p in layout.places] == sorted(given_kinds)
    end = 0
    for place in layout.places:
        assert place.offset % ALIGNMENT == 0
        assert end <= place.offset < end + ALIGNMENT
        assert place.nbytes == DTYPE_BYTES[place.dtype] * int(np.prod(place.shape, dtype=int))
        end = place.end
    assert layout.arena_bytes % ALIGNMENT == 0
    assert end <= layout.arena_bytes < end + ALIGNMENT


@quick
@given(kinds, kinds)
def test_different_layouts_have_different_digests(one: Kinds, other: Kinds) -> None:
    assume(one != other)
    assert layouts.plan(one).digest != layouts.plan(other).digest


@quick
@given(kinds, st.integers(0, 2**32), st.integers(1, 300))
def test_tensors_come_back_bit_for_bit_whatever_the_arena_held_before(given_kinds: Kinds, seed: int, bucket_bytes: int) -> None:
    layout = layouts.plan(given_kinds)
    tensors = tensors_for(layout, seed)
    clean, dirty = np.zeros(layout.arena_bytes, np.uint8), np.full(layout.arena_bytes, 0xAB, np.uint8)
    pack(layout, tensors, clean)
    pack(layout, tensors, dirty)
    assert clean.tobytes() == dirty.tobytes()
    for name, view in layout.views(dirty).items():
        assert (view.dtype, view.shape) == tensors[name][:2]
        assert bytes(view.data) == bytes(tensors[name].data)


@quick
@given(kinds, st.integers(0, 2**32), st.integers(1, 300), st.lists(st.integers(1, 200), min_size=1))
def test_digests_do_not_depend_on_how_the_arena_was_cut_on_its_way(given_kinds: Kinds, seed: int, bucket: int, cuts: list[int]) -> None:
    layout = layouts.plan(given_kinds)
    arena = np.zeros(layout.arena_bytes, np.uint8)
    pack(layout, tensors_for(layout, seed), arena)
    hasher, offset, turn = Hasher(layout.arena_bytes, bucket), 0, 0
    while offset < layout.arena_bytes:
        size = cuts[turn % len(cuts)]
        hasher.update(arena[offset : offset + size])
        offset, turn = offset + size, turn + 1
    assert hasher.finish(layout.digest) == layouts.hash_arena(layout, arena, bucket)


@quick
@given(kinds, st.integers(0, 2**32), st.integers(1, 300), st.data())
def test_any_flipped_bit_is_found_and_its_bucket_named(given_kinds: Kinds, seed: int, bucket: int, data: st.DataObject) -> None:
    layout = layouts.plan(given_kinds)
    assume(layout.arena_bytes > 0)
    arena = np.zeros(layout.arena_bytes, np.uint8)
    pack(layout, tensors_for(layout, seed), arena)
    expected = layouts.hash_arena(layout, arena, bucket)
    layouts.check(expected, expected, layout, "nothing changed")
    at = data.draw(st.integers(0, layout.arena_bytes - 1))
    arena[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptError, match=rf"^here: bucket {at // bucket} of {len(expected.buckets)} "):
        layouts.check(expected, layouts.hash_arena(layout, arena, bucket), layout, "here")


@quick
@given(kinds, st.integers(0, 2**32), st.integers(1, 300))
def test_a_manifest_survives_the_wire(given_kinds: Kinds, seed: int, bucket: int) -> None:
    layout = layouts.plan(given_kinds)
    arena = np.zeros(layout.arena_bytes, np.uint8)
    pack(layout, tensors_for(layout, seed), arena)
    digests = layouts.hash_arena(layout, arena, bucket)
    back = pb.Manifest.FromString(layouts.manifest(ID, layout, digests).SerializeToString())
    assert layouts.read_layout(back) == layout
    assert layouts.read_digests(back, layout) == digests
    assert layouts.id_from_proto(back.id) == ID


def test_a_manifest_that_contradicts_itself_is_refused_by_field() -> None:
    layout = layouts.plan({"a": ("F32", (3,)), "b": ("BF16", (100,))})
    digests = layouts.hash_arena(layout, np.zeros(layout.arena_bytes, np.uint8), 100)
    good = layouts.manifest(ID, layout, digests)

    def broken(**fields: object) -> pb.Manifest:
        m = pb.Manifest.FromString(good.SerializeToString())
        for name, value in fields.items():
            setattr(m, name, value)
        return m

    for field, value in {"arena_bytes": 1, "layout_digest": b"x", "bucket_bytes": 0}.items():
        with pytest.raises(InvalidArgumentError, match=field):
            layouts.read_layout(broken(**{field: value}))
    with pytest.raises(InvalidArgumentError, match="digest is not that of"):
        layouts.read_digests(broken(digest=b"x"), layout)
    with pytest.raises(InvalidArgumentError, match="4 bucket digests for 1 buckets"):
        layouts.read_digests(broken(bucket_bytes=1000), layout)
    shifted = broken()
    shifted.tensors[1].offset += 64
    with pytest.raises(InvalidArgumentError, match="tensor 'b' is laid out as"):
        layouts.read_layout(shifted)
    twice = broken()
    twice.tensors.append(twice.tensors[1])
    with pytest.raises(InvalidArgumentError, match="3 tensors but only 2 different names"):
        layouts.read_layout(twice)


def test_what_cannot_be_laid_out_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match="no tensors"):
        layouts.plan({})
    with pytest.raises(InvalidArgumentError, match=r"'w': dtype 'F4'"):
        layouts.plan({"w": ("F4", (1,))})
    with pytest.raises(InvalidArgumentError, match="'w': shape"):
        layouts.plan({"w": ("F32", (-1,))})
    layout = layouts.plan({"w": ("F32", (2,))})
    with pytest.raises(InvalidArgumentError, match=r"'w'.*needs 8 bytes, 7 given"):
        layouts.flatten(layout, {"w": ArrayView("F32", (2,), b"1234567")})
    with pytest.raises(InvalidArgumentError, match=r"'w'.*not contiguous"):
        layouts.flatten(layout, {"w": ArrayView("F32", (2,), np.zeros(16, np.uint8)[::2])})


def test_bytes_may_be_given_as_anything_with_a_buffer() -> None:
    layout = layouts.plan({"w": ("F32", (2,))})
    array = np.array([1.5, -2.5], np.float32)
    for data in (array, array.view(np.uint8), array.tobytes(), bytearray(array.tobytes()), array.data):
        assert bytes(layouts.flatten(layout, {"w": ArrayView("F32", (2,), data)})[0]) == array.tobytes()


@quick
@given(st.lists(st.binary(max_size=200), max_size=5))
def test_streamed_messages_are_those_of_protobuf(parts: list[bytes]) -> None:
    whole = b"".join(parts)
    arrays = [np.frombuffer(part, np.uint8) for part in parts if part]
    assert pb.PublishRequest.FromString(stream.encode_publish(arrays)).data == whole
    assert (
        pb.FetchResponse.FromString(stream.encode_fetch(np.frombuffer(whole, np.uint8) if whole else np.empty(0, np.uint8))).data == whole
    )
    assert stream.decode_publish(pb.PublishRequest(data=whole).SerializeToString()) == ("", memoryview(whole))
    assert stream.decode_publish(pb.PublishRequest(slot_id="s", data=whole).SerializeToString()) == ("s", memoryview(whole))
    assert stream.decode_fetch(pb.FetchResponse(data=whole).SerializeToString()) == memoryview(whole)
