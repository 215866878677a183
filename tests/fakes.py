"""Stand-ins for what costs minutes. FakeEngine obeys services.rollout.engine.Engine without torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.rollout.engine import NO_VERSION, Completion, Finish, LoadPolicy, Request
from stretto.errors import InvalidArgumentError, NotFoundError, RefusedError

FAKE_EOS = 2
"""The fake model's end-of-sequence id."""
HOLD_POLL_S = 0.005
"""How long a step() of a held engine waits before it returns empty-handed."""


def counting_answer(request: Request) -> list[int]:
    """10, 11, 12, … then FAKE_EOS: 4 to 11 tokens in all, by the index at the end of the id."""
    tail = request.id.rpartition("/")[2]
    length = 4 + (int(tail) if tail.isdigit() else len(request.id)) % 8
    return [*range(10, 10 + length - 1), FAKE_EOS]


def fake_logprob(version: int, position: int) -> float:
    """Of the token at `position` (0-based) drawn by `version`; exact in float32, different for each pair."""
    return -(position + 1) / 64 - (version + 1) / 4096


@dataclass
class _Sequence:
    request: Request
    answer: list[int]
    tokens: list[int]
    logprobs: list[float]
    spans: list[tuple[int, int]]

    def completion(self, finish: Finish, error: str = "") -> Completion:
        return Completion(
            self.request.id, np.array(self.tokens, np.int32), np.array(self.logprobs, np.float32), list(self.spans), finish, error
        )


@dataclass
class FakeEngine:
    """Answers by `answer(request)`, one token a step, log-probs by fake_logprob.

    hold(n): sequences do not grow past n tokens until release(), so that a test can abort or load weights exactly there;
    `reached` is set when every running sequence stands at n. Both may be called from another thread.
    fail: ids that complete as "failed" instead of drawing their first token.
    """

    slots: int = 64
    max_len: int = 4096
    answer: Callable[[Request], Sequence[int]] = counting_answer
    fail: set[str] = field(default_factory=set)
    version: int = NO_VERSION
    generated_tokens: int = 0
    loads: list[tuple[int, str]] = field(default_factory=list)
    """(version, policy) of every load_weights."""
    tensors: dict[str, Any] = field(default_factory=dict)
    """Of the last load_weights, as passed."""
    added: list[Request] = field(default_factory=list)
    """Every request ever added."""
    reached: threading.Event = field(default_factory=threading.Event)
    _waiting: list[_Sequence] = field(default_factory=list)
    _running: list[_Sequence] = field(default_factory=list)
    _hold_at: int | None = None
    _released: threading.Event = field(default_factory=threading.Event)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def hold(self, tokens: int) -> None:
        self.reached.clear()
        self._released.clear()
        self._hold_at = tokens

    def release(self) -> None:
        self._hold_at = None
        self._released.set()

    def add(self, requests: Sequence[Request]) -> None:
        used = {s.request.id for s in (*self._waiting, *self._running)}
        if twice := [r.id for r in requests if r.id in used]:
            raise InvalidArgumentError(f"already generating {twice}")
        for r in requests:
            self.added.append(r)
            begun = (list(r.prefix_tokens), list(r.prefix_logprobs), list(r.prefix_spans))
            self._waiting.append(_Sequence(r, list(self.answer(r)), *begun))

    def step(self) -> list[Completion]:
        if self.version == NO_VERSION:
            raise RefusedError("no weights loaded yet")
        free = self.slots - len(self._running)
        self._running += self._waiting[:free]
        del self._waiting[:free]
        done = [c for s in list(self._running) if (c := self._ended_before(s) or self._draw(s)) is not None]
        ended = {c.id for c in done}
        self._running = [s for s in self._running if s.request.id not in ended]
        if self._running and all(self._is_held(s) for s in self._running):
            self.reached.set()
            self._released.wait(HOLD_POLL_S)
        return done

    def abort(self, ids: Iterable[str] | None = None) -> list[Completion]:
        wanted = None if ids is None else set(ids)
        gone = [s for s in (*self._running, *self._waiting) if wanted is None or s.request.id in wanted]
        dropped = {s.request.id for s in gone}
        self._running = [s for s in self._running if s.request.id not in dropped]
        self._waiting = [s for s in self._waiting if s.request.id not in dropped]
        return [s.completion("aborted") for s in gone]

    def load_weights(self, version: int, tensors: Mapping[str, Any], policy: LoadPolicy) -> None:
        self.loads.append((version, policy))
        self.tensors = dict(tensors)
        self.version = version

    def progress(self, id: str) -> Completion:
        for s in (*self._running, *self._waiting):
            if s.request.id == id:
                return s.completion("aborted")
        raise NotFoundError(f"{id} is neither waiting nor running")

    def _is_held(self, s: _Sequence) -> bool:
        hold_at = self._hold_at
        return hold_at is not None and len(s.tokens) >= hold_at

    def _ended_before(self, s: _Sequence) -> Completion | None:
        r = s.request
        if r.id in self.fail:
            return s.completion("failed", "told to fail")
        if not r.prompt or len(r.prompt) + r.max_new_tokens > self.max_len:
            return s.completion("failed", f"{len(r.prompt)} prompt + {r.max_new_tokens} new tokens, at most {self.max_len} fit")
        return self._ended(s)

    def _draw(self, s: _Sequence) -> Completion | None:
        if self._is_held(s):
            return None
        position = len(s.tokens)
        s.tokens.append(s.answer[position] if position < len(s.answer) else FAKE_EOS)
        s.logprobs.append(fake_logprob(self.version, position))
        same = bool(s.spans) and s.spans[-1][0] == self.version
        s.spans[-1:] = [(self.version, s.spans[-1][1] + 1)] if same else [*s.spans[-1:], (self.version, 1)]
        self.generated_tokens += 1
        return self._ended(s)

    def _ended(self, s: _Sequence) -> Completion | None:
        if s.tokens and (s.tokens[-1] == FAKE_EOS or s.tokens[-1] in s.request.stop_token_ids):
            return s.completion("stop")
        return s.completion("length") if len(s.tokens) >= s.request.max_new_tokens else None
