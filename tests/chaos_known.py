"""What the chaos suite knows beforehand about every answer: tokens from (prompt uid, index), log-probs from (version, position).

So whoever gets a batch can check each byte of it, however often its parts were interrupted, continued elsewhere, repeated or
consumed again. No torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from services.rollout.engine import Request
from stretto.v1.types_pb2 import FINISH_REASON_STOP, Group, Trajectory
from tests.fakes import FAKE_EOS, fake_logprob

LENGTH_MIN, LENGTH_MAX = 12, 60
"""Tokens of an answer."""
VOCABULARY = 256


def known_answer(uid: str, index: int) -> list[int]:
    """Of trajectory `index` of a prompt."""
    noise = hashlib.blake2b(f"{uid}/{index}".encode(), digest_size=64).digest()
    length = LENGTH_MIN + noise[0] % (LENGTH_MAX - LENGTH_MIN)
    return [*(3 + byte % (VOCABULARY - 3) for byte in noise[1:length]), FAKE_EOS]


def answer_to(request: Request) -> list[int]:
    """The same for what an engine is asked."""
    uid, _, index = request.id.rpartition("/")
    return known_answer(uid, int(index))


def known_reward(*, response: str, **_: Any) -> dict[str, float]:
    """Of an answer's text, as `Tokenizer` writes it."""
    total = sum(map(int, response.split()))
    return {"reward": total % 7 / 7, "acc": float(total % 2)}


class Tokenizer:
    """Numbers with spaces between."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return " ".join(map(str, tokens))

    def batch_decode(self, answers: Sequence[Sequence[int]], **_: Any) -> list[str]:
        return [self.decode(answer) for answer in answers]


def oldest_version(group: Group) -> int:
    """That drew any of its tokens."""
    return min(span.version for t in group.trajectories for span in t.spans)


def faults_of(group: Group) -> Iterator[str]:
    """What is wrong with a group that is handed to the trainer; nothing, if it is what it must be."""
    uid = group.prompt.uid
    if [t.index for t in group.trajectories] != list(range(group.prompt.group_size)):
        yield f"{uid}: answers {[t.index for t in group.trajectories]} of {group.prompt.group_size}"
    for t in group.trajectories:
        yield from (f"{uid}/{t.index}: {fault}" for fault in _faults_of_answer(uid, t))
    if group.version_begin > (oldest := oldest_version(group)):  # I8: the label bounds the age of every token
        yield f"{uid}: is said to begin on version {group.version_begin}, but has tokens of {oldest}"


def _faults_of_answer(uid: str, t: Trajectory) -> Iterator[str]:
    tokens = np.frombuffer(t.token_ids, "<i4").tolist()
    if t.prompt_uid != uid or tokens != known_answer(uid, t.index):
        yield f"{len(tokens)} tokens that are not its own"
    versions = [span.version for span in t.spans for _ in range(span.num_tokens)]
    if np.frombuffer(t.logprobs, "<f4").tolist() != [fake_logprob(v, i) for i, v in enumerate(versions)]:
        yield f"log-probs do not belong to spans {[(s.version, s.num_tokens) for s in t.spans]}"
    if t.finish_reason != FINISH_REASON_STOP:
        yield f"finish reason {t.finish_reason}"
    if t.reward != known_reward(response=Tokenizer().decode(tokens))["reward"]:
        yield f"reward {t.reward}"
