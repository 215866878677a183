"""The slot table of the torch engine: which sequence runs in which row, and all it has drawn. numpy only.

    S slots   n rows in use   A longest answer so far (grows)

    row      request   spans        state (one record a row)                              tokens_SA   logprobs_SA
    0        uid/3     [(6, 4)]     prompt_length length since budget key temperature …   5 9 3 7 2   -.1 -.4 …
    …
    n-1      uid/0     []
    n…S-1    free

Rows 0..n-1 are always in use: who ends is replaced by the last rows (`remove` says which moved, for the KV cache).
`since` is the answer's length at which the current policy version began; the tokens before it are in `spans`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.rollout.engine import Completion, Finish, Request

ANSWER_BLOCK = 64
"""The answer columns grow by at least this many."""

_ROW = np.dtype(
    [
        ("prompt_length", np.int64),
        ("length", np.int64),
        ("since", np.int64),
        ("budget", np.int64),
        ("key", np.uint64),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("top_k", np.int64),
    ]
)


@dataclass(slots=True)
class Sequence:
    """A request and what was drawn for it before it (again) got a row."""

    request: Request
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    spans: list[tuple[int, int]]

    @classmethod
    def of(cls, request: Request) -> Sequence:
        tokens = np.asarray(request.prefix_tokens, dtype=np.int32)
        return cls(request, tokens, np.asarray(request.prefix_logprobs, dtype=np.float32), list(request.prefix_spans))

    def completion(self, finish: Finish, error: str = "") -> Completion:
        return Completion(self.request.id, self.tokens, self.logprobs, self.spans, finish, error)


@dataclass(frozen=True, slots=True)
class Ended:
    """Rows that end after a step, by why."""

    stopped: NDArray[np.intp]
    spent: NDArray[np.intp]
    broken: NDArray[np.intp]
    """Their logits were not finite; the last token is no answer."""

    def __bool__(self) -> bool:
        return bool(self.stopped.size or self.spent.size or self.broken.size)


class SlotTable:
    """The running sequences. Every method keeps rows 0..n-1 in use and the rest free."""

    def __init__(self, slots: int) -> None:
        self.n = 0
        self.state: NDArray[Any] = np.zeros(slots, dtype=_ROW)
        self.requests: list[Request] = []
        self.rows: dict[str, int] = {}
        """Request id -> row."""
        self._spans: list[list[tuple[int, int]]] = []
        self._tokens_SA: NDArray[np.int32] = np.zeros((slots, 0), dtype=np.int32)
        self._logprobs_SA: NDArray[np.float32] = np.zeros((slots, 0), dtype=np.float32)
        self._stops_SK: NDArray[np.int32] = np.full((slots, 1), -1, dtype=np.int32)

    def field(self, name: str) -> NDArray[Any]:
        """A column of the rows in use (a view)."""
        return self.state[name][: self.n]

    def append(self, sequence: Sequence, stops: frozenset[int]) -> None:
        """Gives the sequence the next row."""
        r, row, length = sequence.request, self.n, len(sequence.tokens)
        self._widen(r.max_new_tokens, len(stops))
        key = _mix(r.seed & 0xFFFFFFFF, zlib.crc32(r.id.encode()))
        self.state[row] = (len(r.prompt), length, length, r.max_new_tokens, key, r.temperature, r.top_p, r.top_k)
        self._tokens_SA[row, :length] = sequence.tokens
        self._logprobs_SA[row, :length] = sequence.logprobs
        self._stops_SK[row] = -1
        self._stops_SK[row, : len(stops)] = list(stops)
        self.requests.append(r)
        self._spans.append(sequence.spans)
        self.rows[r.id] = row
        self.n += 1

    def last_tokens(self, rows: int) -> NDArray[np.int64]:
        """The newest token of rows 0..rows-1, each of which has drawn one."""
        return self._tokens_SA[np.arange(rows), self.state["length"][:rows] - 1].astype(np.int64)

    def positions(self, rows: int) -> NDArray[np.int64]:
        """Where those tokens stand in prompt + answer."""
        return self.state["prompt_length"][:rows] + self.state["length"][:rows] - 1

    def record(self, tokens_B: NDArray[np.int64], logprobs_B: NDArray[np.float32]) -> Ended:
        """Appends one drawn token to every row; who ends by it."""
        rows, length = np.arange(self.n), self.field("length")
        self._tokens_SA[rows, length] = tokens_B
        self._logprobs_SA[rows, length] = logprobs_B
        length += 1
        broken = ~np.isfinite(logprobs_B)
        stopped = (self._stops_SK[: self.n] == tokens_B[:, None]).any(1) & ~broken
        spent = (length >= self.field("budget")) & ~stopped & ~broken
        return Ended(np.flatnonzero(stopped), np.flatnonzero(spent), np.flatnonzero(broken))

    def drop_last(self, rows: NDArray[np.intp]) -> None:
        """Takes the newest token of these rows back."""
        self.state["length"][rows] -= 1

    def close_spans(self, version: int) -> None:
        """What was drawn up to now carries `version`; later tokens carry another."""
        for row in np.flatnonzero(self.field("length") > self.field("since")):
            self._spans[row] = self._spans_of(int(row), version)
        self.field("since")[:] = self.field("length")

    def sequence(self, row: int, version: int) -> Sequence:
        """The row's answer so far, copied; `version` is the one in use since the last close_spans."""
        length = int(self.state["length"][row])
        tokens, logprobs = self._tokens_SA[row, :length].copy(), self._logprobs_SA[row, :length].copy()
        return Sequence(self.requests[row], tokens, logprobs, self._spans_of(row, version))

    def remove(self, rows: Iterable[int]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Frees these rows; returns (target, source): the last rows in use moved from source to target."""
        gone = np.zeros(self.n, dtype=bool)
        gone[list(rows)] = True
        left = self.n - int(gone.sum())
        target, source = np.flatnonzero(gone[:left]), left + np.flatnonzero(~gone[left:])
        for row in np.flatnonzero(gone):
            del self.rows[self.requests[row].id]
        for array in (self.state, self._tokens_SA, self._logprobs_SA, self._stops_SK):
            array[target] = array[source]
        for to, row in zip(target.tolist(), source.tolist(), strict=True):
            self.requests[to], self._spans[to] = self.requests[row], self._spans[row]
            self.rows[self.requests[to].id] = to
        del self.requests[left:], self._spans[left:]
        self.n = left
        return target, source

    def _spans_of(self, row: int, version: int) -> list[tuple[int, int]]:
        spans, drawn = list(self._spans[row]), int(self.state["length"][row] - self.state["since"][row])
        if drawn and spans and spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1] + drawn)
        elif drawn:
            spans.append((version, drawn))
        return spans

    def _widen(self, answer: int, stops: int) -> None:
        slots, columns = self._tokens_SA.shape
        if answer > columns:
            more = np.zeros((slots, max(answer - columns, ANSWER_BLOCK)), dtype=np.int32)
            self._tokens_SA = np.concatenate((self._tokens_SA, more), axis=1)
            self._logprobs_SA = np.concatenate((self._logprobs_SA, more.astype(np.float32)), axis=1)
        if stops > self._stops_SK.shape[1]:
            more = np.full((slots, stops - self._stops_SK.shape[1]), -1, dtype=np.int32)
            self._stops_SK = np.concatenate((self._stops_SK, more), axis=1)


def _mix(seed: int, name: int) -> int:
    """64-bit key of a random stream: equal seeds with different ids give unrelated streams."""
    z = ((seed << 32) | name) * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 32)) * 0xDABA0B6EB09322E3 & 0xFFFFFFFFFFFFFFFF
