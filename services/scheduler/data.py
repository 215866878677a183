"""The endless shuffled dataset and the validation set, as prompts ready to be leased.

    file --rows.read--> Row --tokens.Encoder, in batches--> token ids      once, when opened
    ordinal = epoch x size + place     row = permutation(seed, epoch)[place]      stateless: a cursor is one number

Every row is checked when the file is opened, so that a run never stops at row 9,000. Prompts longer than
data.max_prompt_tokens are skipped and counted; they are no part of `len`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from services.scheduler import rows
from services.scheduler.rows import Row
from services.scheduler.tokens import Encoder, load_tokenizer
from stretto.errors import InvalidArgumentError, RecipeError
from stretto.recipe import Recipe
from stretto.v1 import types_pb2 as pb
from stretto.v1.scheduler_pb2 import UserPrompt

log = logging.getLogger("stretto.scheduler")

TOKENIZE_ROWS = 1000
"""Rows per call of the tokenizer: enough to be fast, few enough to bound memory."""


class Dataset:
    """Rows and their tokens by dataset ordinal. Immutable, so any thread may read it."""

    def __init__(self, recipe: Recipe, encoder: Encoder, kept: Sequence[Row], tokens: Sequence[bytes], num_skipped: int) -> None:
        """`tokens[i]` belongs to `kept[i]`. See `open`."""
        self._recipe, self._encoder, self._rows, self._tokens = recipe, encoder, kept, tokens
        self.num_skipped = num_skipped
        """Rows left out because their prompt is longer than data.max_prompt_tokens."""

    @classmethod
    def open(cls, path: Path, *, recipe: Recipe) -> Dataset:
        """Read, check and tokenise the whole file. Raises RecipeError."""
        key = "data.validation" if path == recipe.validation_path else "data.train"
        encoder = Encoder(load_tokenizer(recipe.model_path), recipe.data.chat_template)
        limit = recipe.data.max_prompt_tokens
        kept: list[Row] = []
        tokens: list[bytes] = []
        num_rows, shortest = 0, sys.maxsize
        for chunk in _chunks(rows.read(path, recipe.data, key), TOKENIZE_ROWS):
            num_rows += len(chunk)
            for row, ids in zip(chunk, _encode(encoder, chunk, path), strict=True):
                shortest = min(shortest, len(ids))
                if len(ids) <= limit:
                    kept.append(row)
                    tokens.append(_packed(ids))
        if not kept:
            reason = f"none of its {num_rows} prompts fits data.max_prompt_tokens = {limit}: the shortest has {shortest}"
            raise RecipeError(f"{key} = '{path}': {reason if num_rows else 'there are no rows'}")
        num_skipped = num_rows - len(kept)
        fields = {"path": str(path), "num_prompts": len(kept), "num_skipped_too_long": num_skipped, "max_prompt_tokens": limit}
        log.log(logging.WARNING if num_skipped else logging.INFO, "dataset_opened", extra={"fields": fields})
        return cls(recipe, encoder, kept, tokens, num_skipped)

    def __len__(self) -> int:
        return len(self._rows)

    def fingerprint(self) -> str:
        """Differs where an ordinal would mean another prompt: other tokens, answers, seed or shuffling."""
        digest = hashlib.blake2b(f"{self._recipe.run.seed}/{self._recipe.data.shuffle}/{len(self)}".encode(), digest_size=8)
        for row, tokens in zip(self._rows, self._tokens, strict=True):
            digest.update(tokens)
            digest.update(row.ground_truth.encode())
        return digest.hexdigest()

    def prompt(self, ordinal: int) -> pb.Prompt:
        """The training prompt at `ordinal` >= 0: the same bytes in any process, at any time."""
        epoch, place = divmod(ordinal, len(self))
        at = int(permutation(len(self), self._recipe.run.seed, epoch)[place]) if self._recipe.data.shuffle else place
        prompt = self._prompt(at, f"d{ordinal}", pb.PROMPT_KIND_TRAIN)
        prompt.ordinal = ordinal
        _for_training(prompt, self._recipe)
        return prompt

    def validation_prompts(self, evaluation_id: str, max_prompts: int) -> list[pb.Prompt]:
        """The first `max_prompts` rows in file order, 0 = all. Every evaluation draws from the same seeds."""
        num = min(max_prompts, len(self)) if max_prompts else len(self)
        prompts = [self._prompt(n, f"v{evaluation_id}-{n}", pb.PROMPT_KIND_VALIDATION) for n in range(num)]
        judged = self._recipe.validation
        for n, prompt in enumerate(prompts):
            prompt.group_size = judged.group_size
            prompt.sampling.CopyFrom(
                pb.SamplingParams(
                    temperature=judged.temperature,
                    top_p=judged.top_p,
                    top_k=judged.top_k,
                    max_new_tokens=self._recipe.sampling.max_new_tokens,
                    seed=group_seed(self._recipe.run.seed, f"v{n}"),
                )
            )
        return prompts

    def user_prompt(self, user: UserPrompt) -> pb.Prompt:
        """A user's own prompt, to be trained once `named` has given it a uid. Raises InvalidArgumentError."""
        ids, text = self._user_tokens(user)
        limit = self._recipe.data.max_prompt_tokens
        if not 0 < len(ids) <= limit:
            raise InvalidArgumentError(f"the prompt has {len(ids)} tokens; it must have between 1 and data.max_prompt_tokens = {limit}")
        prompt = pb.Prompt(
            kind=pb.PROMPT_KIND_USER,
            ordinal=-1,
            row=-1,
            token_ids=_packed(ids),
            data_source=user.data_source or rows.DEFAULT_SOURCE,
            ground_truth=user.ground_truth,
            extra_json=_object(user.extra_json),
            text=text,
        )
        _for_training(prompt, self._recipe)
        return prompt

    def named(self, prompt: pb.Prompt, uid: str) -> pb.Prompt:
        """A user's prompt under its uid, from which its sampling seed follows."""
        prompt.uid = uid
        prompt.sampling.seed = group_seed(self._recipe.run.seed, uid)
        return prompt

    def _user_tokens(self, user: UserPrompt) -> tuple[Sequence[int], str]:
        """(token ids, text for people)"""
        given = [name for name in ("text", "messages_json", "token_ids") if getattr(user, name)]
        if len(given) != 1:
            raise InvalidArgumentError(f"exactly one of text, messages_json and token_ids must be set, not {given or 'none'}")
        if user.token_ids:
            if len(user.token_ids) % 4:
                raise InvalidArgumentError(f"token_ids has {len(user.token_ids)} bytes; it must be int32, so a multiple of 4")
            ids = np.frombuffer(user.token_ids, "<i4").tolist()
            self._encoder.check(ids)
            return ids, self._encoder.decode(ids)
        if user.text:
            return self._encoder.encode([user.text])[0], user.text
        try:
            messages = rows.check_messages(json.loads(user.messages_json))
        except ValueError as err:
            raise InvalidArgumentError(f"messages_json: {err}") from None
        return self._encoder.encode([messages])[0], rows.last_user_turn(messages)

    def _prompt(self, at: int, uid: str, kind: pb.PromptKind.ValueType) -> pb.Prompt:
        row = self._rows[at]
        return pb.Prompt(
            uid=uid,
            kind=kind,
            ordinal=-1,
            row=row.number,
            token_ids=self._tokens[at],
            data_source=row.data_source,
            ground_truth=row.ground_truth,
            extra_json=row.extra_json,
            text=row.text,
        )


@lru_cache(maxsize=2)
def permutation(size: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The order of rows in one epoch: rows sorted by splitmix64 of (seed, epoch, row).

    Made from integer arithmetic alone: numpy's own generators may change between versions, and an order that changed
    under a resumed run would train some prompts twice and others never. Two are kept as a window may span two epochs.
    """
    start = np.uint64(group_seed(seed, f"epoch {epoch}"))
    with np.errstate(over="ignore"):
        x = start + np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    order = np.argsort(x ^ (x >> np.uint64(31)), kind="stable")
    order.flags.writeable = False
    return order


def group_seed(seed: int, label: str) -> int:
    """64 bits that differ for every label of a run and for every run seed."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{label}".encode(), digest_size=8).digest(), "little")


def _for_training(prompt: pb.Prompt, recipe: Recipe) -> None:
    """Fill in how a training prompt is sampled."""
    drawn = recipe.sampling
    prompt.group_size = drawn.group_size
    prompt.sampling.CopyFrom(
        pb.SamplingParams(
            temperature=drawn.temperature,
            top_p=drawn.top_p,
            top_k=drawn.top_k,
            max_new_tokens=drawn.max_new_tokens,
            seed=group_seed(recipe.run.seed, prompt.uid),
        )
    )


def _encode(encoder: Encoder, chunk: Sequence[Row], path: Path) -> list[list[int]]:
    """Token ids of a chunk; when the chunk fails, the row at fault is found and named."""
    try:
        encoded = encoder.encode([row.prompt for row in chunk])
    except InvalidArgumentError:
        encoded = [_encode_one(encoder, row, path) for row in chunk]
    for row, ids in zip(chunk, encoded, strict=True):
        if not ids:
            raise RecipeError(f"{path}, {row.where}: the prompt has no tokens")
    return encoded


def _encode_one(encoder: Encoder, row: Row, path: Path) -> list[int]:
    try:
        return encoder.encode([row.prompt])[0]
    except InvalidArgumentError as err:
        raise RecipeError(f"{path}, {row.where}: {err.message}") from None


def _chunks(source: Iterator[Row], size: int) -> Iterator[list[Row]]:
    while chunk := list(islice(source, size)):
        yield chunk


def _packed(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, "<i4").tobytes()


def _object(extra_json: str) -> str:
    """The same text if it is a JSON object; "{}" for none."""
    if not extra_json:
        return "{}"
    try:
        value = json.loads(extra_json)
    except ValueError as err:
        raise InvalidArgumentError(f"extra_json is not JSON: {err}") from None
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"extra_json must be a JSON object, not {type(value).__name__}")
    return extra_json
