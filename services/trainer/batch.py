"""Groups as they arrive -> the rows of the forward passes. Pure planning over numpy arrays; no loop per token.

    N answers of a group   T response tokens of the batch   S stored tokens   R answers of the batch   B x L one forward pass

    read_group    proto -> GroupArrays                       bytes become arrays, faults are found
    make_batch    groups with signal -> Batch                one flat store, one flat axis T of response tokens
    plan          some answers -> rows -> micro-batches      who shares a row, who shares a forward pass
    assemble      a micro-batch's rows -> MicroBatch         token ids, positions, segments, where to read each log-prob

A row is a prompt followed by one or more of its answers:

    padded          p p p p a a a . . .        one answer a row: plain causal attention
                    p p p p b b b b b .
    shared_prompt   p p p p a a a b b b b b    the prompt once: each answer sees the prompt and itself (segments 0 1 1 1 2 2 …),
                                               and its positions go on after the prompt

The last token of an answer is never an input: nothing is predicted from it. The first is predicted from the prompt's last token.

Groups whose rewards are all equal have no policy gradient. They are left out before the forward pass, and neither their tokens
count in the token mean nor does the KL term pull on them: a batch with such groups trains exactly like the batch without them,
so `scheduler.filter = "zero_variance"` changes which groups fill a batch and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from services.trainer.advantage import Kind, advantages, has_signal
from stretto.errors import CorruptError
from stretto.v1.types_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, FinishReason, Group, Trajectory

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Layout = Literal["shared_prompt", "padded"]
Row = tuple[int, ...]
"""Answers (indices on the axis R) that follow one prompt in one row."""

PASS_TOKENS = 256
"""What one more forward and backward pass costs in padding that could be had instead; measured on a model small enough to feel it."""
PAD_SEGMENT = -1
"""Segment of the padding behind a row; 0 is the prompt, 1, 2, … its answers."""


# ------------------------------------------------------------------------------------------------------------ reading


@dataclass(frozen=True, slots=True)
class GroupArrays:
    """One group, decoded."""

    uid: str
    prompt_P: Ints
    tokens_T: Ints
    """Response tokens of all answers, one after the other."""
    behaviour_T: NDArray[np.float32]
    """Log-probs they were drawn with."""
    versions_T: Ints
    """Policy version that drew each token."""
    lengths_N: Ints
    rewards_N: Floats
    accuracy_N: Floats
    """The reward function's "acc"; NaN where it gave none."""
    is_cut_N: NDArray[np.bool_]
    """The token budget ended the answer."""
    version_begin: int
    temperature: float
    """What logits were divided by; 1 for greedy answers."""


def read_group(group: Group) -> GroupArrays:
    """Decode. Raises CorruptError, naming the answer, when its parts do not fit together or it is not a finished one."""
    uid, answers = group.prompt.uid, group.trajectories
    prompt_P = np.frombuffer(group.prompt.token_ids, "<i4").astype(np.int64)
    if not answers or not prompt_P.size:
        raise CorruptError(f"group {uid}: {len(answers)} answers, {prompt_P.size} prompt tokens; it needs some of both")
    for t in answers:
        _check(t)
    spans = [(span.version, span.num_tokens) for t in answers for span in t.spans]
    versions, counts = np.array(spans, np.int64).reshape(-1, 2).T
    behaviour_T = np.frombuffer(b"".join(t.logprobs for t in answers), "<f4")
    if not np.isfinite(behaviour_T).all():
        raise CorruptError(f"group {uid}: a log-prob of a sampled token is not finite")
    return GroupArrays(
        uid=uid,
        prompt_P=prompt_P,
        tokens_T=np.frombuffer(b"".join(t.token_ids for t in answers), "<i4").astype(np.int64),
        behaviour_T=behaviour_T,
        versions_T=np.repeat(versions, counts),
        lengths_N=np.array([len(t.token_ids) // 4 for t in answers], np.int64),
        rewards_N=np.array([t.reward for t in answers], np.float64),
        accuracy_N=np.array([t.reward_extras.get("acc", math.nan) for t in answers], np.float64),
        is_cut_N=np.array([t.finish_reason == FINISH_REASON_LENGTH for t in answers], np.bool_),
        version_begin=group.version_begin,
        temperature=group.prompt.sampling.temperature or 1.0,
    )


def _check(t: Trajectory) -> None:
    num_spanned = sum(span.num_tokens for span in t.spans)
    if not len(t.token_ids) == len(t.logprobs) == 4 * num_spanned:
        sizes = f"{len(t.token_ids)} bytes of tokens, {len(t.logprobs)} of log-probs, spans of {num_spanned} tokens"
        raise CorruptError(f"answer {t.prompt_uid}/{t.index}: {sizes}; the three must agree at 4 bytes a token")
    if t.finish_reason not in (FINISH_REASON_STOP, FINISH_REASON_LENGTH):
        raise CorruptError(f"answer {t.prompt_uid}/{t.index} is {FinishReason.Name(t.finish_reason)}; only finished ones can be trained")


# ------------------------------------------------------------------------------------------------------------ the batch


@dataclass(frozen=True, slots=True)
class Batch:
    """What is trained in one step. Axis R: answers with at least one token, group after group; axis T: their tokens in that order."""

    store_S: Ints
    """Every group's prompt, then its answers."""
    group_R: Ints
    """Counts the trained groups from 0."""
    prompt_start_R: Ints
    """Where the answer's prompt begins on S."""
    prompt_length_R: Ints
    start_R: Ints
    """Where the answer begins on S."""
    length_R: Ints
    first_R: Ints
    """Where the answer begins on T."""
    behaviour_T: NDArray[np.float32]
    advantage_T: NDArray[np.float32]
    temperature_T: NDArray[np.float32]

    @property
    def num_groups(self) -> int:
        return int(self.group_R[-1]) + 1 if self.group_R.size else 0

    @property
    def num_tokens(self) -> int:
        return self.behaviour_T.size


def make_batch(groups: Sequence[GroupArrays], kind: Kind) -> Batch:
    """The groups that have signal and tokens, on flat axes. May be empty."""
    kept = [g for g in groups if has_signal(g.rewards_N) and g.tokens_T.size]
    lengths_N = [g.lengths_N for g in kept]
    sizes = np.array([g.prompt_P.size + g.tokens_T.size for g in kept], np.int64)
    begins = np.cumsum(sizes) - sizes
    num_answers = np.array([n.size for n in lengths_N], np.int64)
    prompts = np.array([g.prompt_P.size for g in kept], np.int64)
    length_R = _ints(lengths_N)
    starts = [b + g.prompt_P.size + np.cumsum(g.lengths_N) - g.lengths_N for b, g in zip(begins, kept, strict=True)]
    advantage_R = _floats([advantages(g.rewards_N, kind) for g in kept])
    temperature_R = np.repeat(np.array([g.temperature for g in kept], np.float32), num_answers)
    some_R = length_R > 0
    return Batch(
        store_S=_ints([part for g in kept for part in (g.prompt_P, g.tokens_T)]),
        group_R=np.repeat(np.arange(len(kept)), num_answers)[some_R],
        prompt_start_R=np.repeat(begins, num_answers)[some_R],
        prompt_length_R=np.repeat(prompts, num_answers)[some_R],
        start_R=_ints(starts)[some_R],
        length_R=length_R[some_R],
        first_R=(np.cumsum(length_R) - length_R)[some_R],
        behaviour_T=_floats([g.behaviour_T for g in kept]),
        advantage_T=np.repeat(advantage_R, length_R),
        temperature_T=np.repeat(temperature_R, length_R),
    )


def _ints(arrays: Sequence[Ints]) -> Ints:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)


def _floats(arrays: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
    return np.concatenate(arrays).astype(np.float32, copy=False) if arrays else np.zeros(0, np.float32)


# ------------------------------------------------------------------------------------------------------------ planning


def minibatches(batch: Batch, count: int) -> list[Ints]:
    """The answers of each mini-batch: whole groups, in order, as equally many as possible; empty ones are left out."""
    bounds = np.linspace(0, batch.num_groups, count + 1).round().astype(np.int64)
    parts = [np.flatnonzero((batch.group_R >= low) & (batch.group_R < high)) for low, high in pairwise(bounds)]
    return [part for part in parts if part.size]


def shares_of_group(num_answers: int, prompt_length: int, answer_length: float, parity_tokens: float) -> int:
    """Into how many rows a group is cut so that it costs least.

    A row of W tokens costs W + W^2 / parity_tokens: linear layers, and attention over all its places, masked or not. m rows of
    N / m answers have W = P + A N / m: few rows repeat the prompt less, many rows mask less.
    """

    def cost(num_rows: int) -> float:
        width = prompt_length + answer_length * num_answers / num_rows
        return num_rows * (width + width**2 / parity_tokens)

    return min(range(1, num_answers + 1), key=cost)


def plan(batch: Batch, answers: Ints, layout: Layout, max_tokens: int, parity_tokens: float) -> list[list[Row]]:
    """Micro-batches of rows: every one of `answers` in exactly one row of exactly one micro-batch.

    Rows of a micro-batch are of similar width; rows x widest <= max_tokens, unless one row alone is wider. `parity_tokens` is the
    row width at which attention costs as much as all the rest of the model.
    """
    rows: list[Row] = []
    bounds = np.flatnonzero(np.diff(batch.group_R[answers])) + 1
    for members in np.split(answers, bounds):
        num_rows = members.size
        if layout == "shared_prompt":
            prompt, answer = int(batch.prompt_length_R[members[0]]), float(batch.length_R[members].mean() - 1)
            num_rows = shares_of_group(members.size, prompt, answer, parity_tokens)
        rows += _rows_of_group(batch, members.tolist(), num_rows, max_tokens)
    return _pack(rows, [row_width(batch, row) for row in rows], max_tokens)


def row_width(batch: Batch, row: Row) -> int:
    """Input tokens of a row."""
    return int(batch.prompt_length_R[row[0]]) + sum(int(batch.length_R[answer]) - 1 for answer in row)


def _rows_of_group(batch: Batch, members: list[int], num_rows: int, max_tokens: int) -> list[Row]:
    """`num_rows` nearly equal shares; one wider than `max_tokens` is halved until it fits or is one answer."""
    shares = [tuple(members[i * len(members) // num_rows : (i + 1) * len(members) // num_rows]) for i in range(num_rows)]
    rows: list[Row] = []
    while shares:
        share = shares.pop()
        if len(share) > 1 and row_width(batch, share) > max_tokens:
            shares += [share[: len(share) // 2], share[len(share) // 2 :]]
        else:
            rows.append(share)
    return rows


def _pack(rows: list[Row], widths: list[int], max_tokens: int) -> list[list[Row]]:
    """Cut the rows, widest first, into micro-batches so that places (padding included) + PASS_TOKENS for each pass are fewest.

    cost[j] = min over i < j of cost[i] + (j - i) width[i] + PASS_TOKENS: the last micro-batch is rows i to j - 1, as wide as row i.
    """
    order = sorted(range(len(rows)), key=lambda i: -widths[i])
    width = np.array([widths[i] for i in order], np.int64)
    cost, begin = np.zeros(len(rows) + 1, np.int64), np.zeros(len(rows) + 1, np.int64)
    for j in range(1, len(rows) + 1):
        places = np.arange(j, 0, -1) * width[:j]
        is_allowed = places <= max_tokens
        is_allowed[-1] = True  # a row that is too wide goes alone
        total = np.where(is_allowed, cost[:j] + places, np.iinfo(np.int64).max)
        begin[j] = np.argmin(total)
        cost[j] = total[begin[j]] + PASS_TOKENS
    packed: list[list[Row]] = []
    j = len(rows)
    while j > 0:
        packed.append([rows[i] for i in order[begin[j] : j]])
        j = int(begin[j])
    return packed[::-1]


# ------------------------------------------------------------------------------------------------------------ assembling


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass. t: its response tokens."""

    ids_BL: Ints
    """Padded with 0 on the right."""
    positions_BL: Ints
    segments_BL: Ints | None
    """Who may see whom, see PAD_SEGMENT; None = plain causal attention does it."""
    source_t: Ints
    """Place on B x L whose output predicts the token."""
    target_t: Ints
    """The token id."""
    token_t: Ints
    """Which token of the batch (axis T) it is."""


def _ranges(starts: Ints, lengths: Ints) -> Ints:
    """start, start + 1, … of each range, one after the other."""
    return np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(int(lengths.sum()))


def assemble(batch: Batch, rows: Sequence[Row]) -> MicroBatch:
    """Lay the rows out. Answers keep their order within a row; tokens of axis t are in the order of rows and answers."""
    answers = np.array([answer for row in rows for answer in row], np.int64)
    counts = np.array([len(row) for row in rows], np.int64)
    row_of = np.repeat(np.arange(len(rows)), counts)
    place_in_row = np.arange(answers.size) - np.repeat(np.cumsum(counts) - counts, counts)
    is_first = place_in_row == 0
    length, prompt = batch.length_R[answers], batch.prompt_length_R[answers]
    inputs = length - 1
    before = np.cumsum(inputs) - inputs
    column = prompt + before - np.repeat(before[is_first], counts)
    """Where each answer begins in its row."""
    width = int((column + inputs).max())

    # Pieces that are copied into the rows: all prompts, then all answers without their last tokens.
    begin_at = np.concatenate([np.arange(len(rows)) * width, row_of * width + column])
    lengths = np.concatenate([prompt[is_first], inputs])
    place = _ranges(begin_at, lengths)
    ids, positions, segments = (np.full(len(rows) * width, fill, np.int64) for fill in (0, 0, PAD_SEGMENT))
    ids[place] = batch.store_S[_ranges(np.concatenate([batch.prompt_start_R[answers][is_first], batch.start_R[answers]]), lengths)]
    positions[place] = _ranges(np.concatenate([np.zeros(len(rows), np.int64), prompt]), lengths)
    segments[place] = np.repeat(np.concatenate([np.zeros(len(rows), np.int64), place_in_row + 1]), lengths)

    source = _ranges(row_of * width + column - 1, length)
    first_t = np.cumsum(length) - length
    source[first_t] = row_of * width + prompt - 1
    shape = (len(rows), width)
    return MicroBatch(
        ids_BL=ids.reshape(shape),
        positions_BL=positions.reshape(shape),
        segments_BL=segments.reshape(shape) if counts.max() > 1 else None,
        source_t=source,
        target_t=batch.store_S[_ranges(batch.start_R[answers], length)],
        token_t=_ranges(batch.first_R[answers], length),
    )
