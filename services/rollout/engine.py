"""The seam between the rollout driver and whatever generates tokens.

    driver (one thread)                              engine
    add(requests) ------------------------------->   waiting
    step() -> [Completion ...]                       waiting -> running -> stop | length | failed
    abort(ids) -> [Completion ...]                   waiting, running -> aborted, with the tokens so far
    load_weights(version, tensors, policy)           between two steps; later tokens carry `version`

An engine is owned by one thread: no method may be called from another one, and none blocks longer than one decode step
(plus the prefill of what it admits). Tokens are never changed once drawn: each keeps the log-prob and the policy version
it was drawn with, over aborts, weight updates and continuation elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Finish = Literal["stop", "length", "aborted", "failed"]
"""stop: a stop token was drawn (it is the last token); length: the budget is spent; failed: `Completion.error` says why."""

LoadPolicy = Literal["in_flight", "abort"]
"""What happens to the KV cache of running sequences: kept, or recomputed under the new weights."""

NO_VERSION = -1
"""`Engine.version` before the first load_weights."""


@dataclass(slots=True)
class Request:
    """One sequence to generate."""

    id: str
    """"<uid>/<index>"; unique among the waiting and running ones."""
    prompt: Sequence[int]
    """Token ids, at least one."""
    max_new_tokens: int
    """Budget of the whole answer: the prefix counts."""
    temperature: float = 1.0
    """0 = greedy."""
    top_p: float = 1.0
    """1 = off."""
    top_k: int = 0
    """0 = off."""
    stop_token_ids: frozenset[int] = frozenset()
    """Stop on these, besides the model's own end-of-sequence ids."""
    seed: int = 0
    """The random stream is a function of (seed, id, position in the answer)."""
    prefix_tokens: list[int] = field(default_factory=list[int])
    """A partial answer to continue; comes back unchanged at the head of the completion."""
    prefix_logprobs: list[float] = field(default_factory=list[float])
    """One per prefix token."""
    prefix_spans: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(version, number of tokens) in order; the numbers sum to len(prefix_tokens)."""


@dataclass(slots=True)
class Completion:
    """An answer, whole or so far: prefix and new tokens alike."""

    id: str
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    """Of each token under the distribution it was drawn from."""
    spans: list[tuple[int, int]]
    """(version, number of tokens) in order; neighbours differ in version; the numbers sum to len(tokens)."""
    finish: Finish
    error: str = ""
    """Why it failed; empty otherwise."""


class Engine(Protocol):
    """Generates for many requests at once. See the module for the life of a request and the threading rule."""

    @property
    def slots(self) -> int:
        """Sequences that can run at once; more may wait."""
        ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def version(self) -> int:
        """Of the weights in use; NO_VERSION before the first load."""
        ...

    @property
    def generated_tokens(self) -> int:
        """Tokens drawn since the start, prefixes not counted."""
        ...

    def has_work(self) -> bool:
        """Whether step() would do or return something."""
        ...

    def add(self, requests: Sequence[Request]) -> None:
        """Queue. A request that can never run completes as "failed" at the next step; an id in use raises
        InvalidArgumentError, and then none of `requests` is queued."""
        ...

    def step(self) -> list[Completion]:
        """Admit waiting requests as slots allow, draw one token for each running sequence, return what ended.

        Raises RefusedError before the first load_weights.
        """
        ...

    def abort(self, ids: Iterable[str] | None = None) -> list[Completion]:
        """Drop these (None: all) and return their answers so far as "aborted"; unknown ids are ignored."""
        ...

    def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor], policy: LoadPolicy) -> None:
        """Later tokens are drawn with `tensors` and carry `version`.

        The values are copied: the caller may overwrite its tensors afterwards. Raises InvalidArgumentError naming what is
        missing, unexpected or of another shape; then the old weights and version stay. To drain, the caller stops adding
        and loads when nothing runs.
        """
        ...

    def progress(self, id: str) -> Completion:
        """The tokens so far of a waiting or running request, as abort would return them but it goes on (for streaming);
        raises NotFoundError for any other id."""
        ...
