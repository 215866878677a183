"""From finished answers to scored ones: decode a batch, have it scored, drop what nobody wants any more.

    put(ended) --> backlog --batches of up to BATCH--> decode --> pool.score --> on_scored(trajectories)

A lost or returned session is dropped before it is scored and its late score is thrown away: nothing ever waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from services.rollout import metrics
from services.rollout.groups import Ended, mark_failed
from services.rollout.reward import RewardItem, Score, ScoreError
from stretto.v1.types_pb2 import Trajectory

log = logging.getLogger("stretto.rollout")

BATCH = 64
"""Most answers per hop to the reward pool: enough to make the hop cheap, few enough that a slow answer delays few others."""

Decode = Callable[[list[list[int]]], list[str]]
"""Texts of answers, special tokens left out."""


class Pool(Protocol):
    """Scores answers somewhere else."""

    async def score(self, items: Sequence[RewardItem]) -> Sequence[Score | ScoreError]: ...
    @property
    def num_workers(self) -> int: ...


def decoder(tokenizer: Any) -> Decode:
    """The tokenizer's own decode_batch: 1.5 us for a short answer instead of the 8 us of batch_decode's loop, the same text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return lambda answers: tokenizer.batch_decode(answers, skip_special_tokens=True)
    return lambda answers: backend.decode_batch(answers, skip_special_tokens=True)


def fill(trajectory: Trajectory, score: Score | ScoreError, reward_s: float) -> None:
    """Put a score into its trajectory; a failed one makes it FAILED."""
    trajectory.reward_s = reward_s
    if isinstance(score, ScoreError):
        metrics.REWARD_FAILURES.inc()
        mark_failed(trajectory, f"reward: {score.message}")
    elif not math.isfinite(score.reward):
        metrics.REWARD_FAILURES.inc()
        mark_failed(trajectory, f"reward: {score.reward} is not finite")
    else:
        trajectory.reward = score.reward
        for name, value in score.extras.items():
            trajectory.reward_extras[name] = value
        if score.prediction is not None:
            trajectory.prediction = score.prediction


class Scorer:
    """The stage between the engine and the reports."""

    def __init__(
        self, pool: Pool, decode: Decode, *, is_wanted: Callable[[Trajectory], bool], on_scored: Callable[[list[Trajectory]], None]
    ) -> None:
        self._pool, self._decode, self._is_wanted, self._on_scored = pool, decode, is_wanted, on_scored
        self._backlog: deque[Ended] = deque()
        self._changed = asyncio.Event()

    def put(self, ended: Iterable[Ended]) -> None:
        self._backlog.extend(ended)
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled. One batch more than workers is under way, so that none waits for the next."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._pool.num_workers + 1):
                tasks.create_task(self._work())

    async def _work(self) -> None:
        while True:
            while not self._backlog:
                self._changed.clear()
                await self._changed.wait()
            batch = self._take()
            if batch:
                await self._score(batch)

    def _take(self) -> list[Ended]:
        batch: list[Ended] = []
        while self._backlog and len(batch) < BATCH:
            ended = self._backlog.popleft()
            if self._is_wanted(ended.trajectory):
                batch.append(ended)
        return batch

    async def _score(self, batch: list[Ended]) -> None:
        began_s = time.monotonic()
        try:
            texts = self._decode([np.frombuffer(e.trajectory.token_ids, "<i4").tolist() for e in batch])
            scores = await self._pool.score([_item(e, text) for e, text in zip(batch, texts, strict=True)])
        except Exception as err:  # whatever happens here, these sessions end
            log.error("scoring_failed", exc_info=err, extra={"fields": {"answers": len(batch)}})
            scores = [ScoreError(f"{type(err).__name__}: {err}")] * len(batch)
        took_s = time.monotonic() - began_s
        metrics.REWARD_S.observe(took_s)
        for ended, score in zip(batch, scores, strict=True):
            fill(ended.trajectory, score, took_s)
        self._on_scored([e.trajectory for e in batch])


def _item(ended: Ended, response: str) -> RewardItem:
    held = ended.held
    p = held.prompt
    return RewardItem(response=response, ground_truth=p.ground_truth, data_source=p.data_source, prompt=p.text, extra=held.extra)
