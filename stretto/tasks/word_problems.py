"""GSM8K-format word problems, made from a seed.

    "Tom has 47 apples and buys 6 more. How many apples now?"  ->  " 47+6=53\\n#### 53"

a in 10..89, b in 2..9, + and -, 4 templates x 8 names x 6 things: 245,760 questions over 1,280 sums. A fifth of the sums
is held out for validation, chosen by crc32: a linear rule such as (7a + 3b) % 5 would take whole pairs of last digits out of
training, and what is never shown is never learnt (0.18 held-out accuracy at 0.95 in training).
"""

from __future__ import annotations

import hashlib
import json
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from stretto.errors import InvalidArgumentError

NAME = "word-problems"
NUM_TRAIN = 8192
NUM_VALIDATION = 512
FORMAT = 1
"""Counts up when the same seed would give other questions."""
MARKER = "word-problems.json"
"""What the files in a folder were made from, and their digests."""
HELD_OUT_SHARE = 5
"""One sum in this many."""

Split = Literal["train", "validation"]

TEMPLATES = (
    ("{name} has {a} {things} and {verb} {b}{more}. How many {things} now?", ("buys", "sells")),
    ("{name} had {a} {things} and {verb} {b}{more}. How many are there?", ("found", "lost")),
    ("There are {a} {things}. {name} {verb} {b}{more}. How many now?", ("adds", "takes")),
    ("With {a} {things}, {name} {verb} {b}{more}. How many {things} now?", ("gets", "gives")),
)
"""Each with its verb for + and for -."""
NAMES = ("Tom", "Ann", "Sam", "Mia", "Ben", "Eva", "Leo", "Zoe")
THINGS = ("apples", "books", "coins", "pens", "cards", "shells")
NUM_WORDINGS = len(TEMPLATES) * len(NAMES) * len(THINGS)


@dataclass(frozen=True, slots=True)
class Sum:
    """a + b or a - b."""

    a: int
    op: Literal["+", "-"]
    b: int

    @property
    def value(self) -> int:
        return self.a + self.b if self.op == "+" else self.a - self.b

    @property
    def is_held_out(self) -> bool:
        return zlib.crc32(f"{self.a}{self.op}{self.b}".encode()) % HELD_OUT_SHARE == 0

    def question(self, wording: int) -> str:
        """In one of the 192 wordings."""
        wording, thing = divmod(wording, len(THINGS))
        template, name = divmod(wording, len(NAMES))
        text, verbs = TEMPLATES[template]
        is_plus = self.op == "+"
        words = {"name": NAMES[name], "things": THINGS[thing], "verb": verbs[0 if is_plus else 1], "more": " more" if is_plus else ""}
        return text.format(a=self.a, b=self.b, **words)

    def solution(self, value: int | None = None, *, with_mark: bool = True) -> str:
        """The worked answer; `value` in place of the right one, without the #### line on request."""
        shown = self.value if value is None else value
        return f" {self.a}{self.op}{self.b}={shown}" + (f"\n#### {shown}" if with_mark else "")


@cache
def sums(split: Split) -> tuple[Sum, ...]:
    """All of a split, in a fixed order."""
    every = (Sum(a, op, b) for a in range(10, 90) for b in range(2, 10) for op in ("+", "-"))
    return tuple(s for s in every if s.is_held_out == (split == "validation"))


def questions(seed: int, split: Split, num: int) -> Iterator[tuple[Sum, str]]:
    """`num` different questions. Raises InvalidArgumentError when the split has fewer."""
    pool = sums(split)
    if num > len(pool) * NUM_WORDINGS:
        raise InvalidArgumentError(f"there are {len(pool) * NUM_WORDINGS} {split} questions, not {num}")
    for pick in random.Random(f"{NAME}/{seed}/{split}").sample(range(len(pool) * NUM_WORDINGS), num):
        at, wording = divmod(pick, NUM_WORDINGS)
        yield pool[at], pool[at].question(wording)


def rows(seed: int, split: Split, num: int) -> Iterator[dict[str, str]]:
    """The rows of a dataset file."""
    for asked, question in questions(seed, split, num):
        yield {"prompt": question, "ground_truth": str(asked.value), "data_source": NAME}


def write(folder: Path, seed: int, num_train: int = NUM_TRAIN, num_validation: int = NUM_VALIDATION) -> bool:
    """train.jsonl and validation.jsonl in `folder`; False when the very same were there already."""
    request = {"task": NAME, "format": FORMAT, "seed": seed, "train": num_train, "validation": num_validation}
    if _is_made(folder, request):
        return False
    splits: tuple[tuple[Split, int], ...] = (("train", num_train), ("validation", num_validation))
    texts = {f"{split}.jsonl": "".join(f"{json.dumps(row)}\n" for row in rows(seed, split, num)) for split, num in splits}
    folder.mkdir(parents=True, exist_ok=True)
    marker = {**request, "digests": {name: _digest(text.encode()) for name, text in texts.items()}}
    for name, text in (*texts.items(), (MARKER, json.dumps(marker))):  # the marker last: with it, all is there
        beside = folder / f"{name}.new"
        beside.write_text(text)
        beside.replace(folder / name)
    return True


def _is_made(folder: Path, request: dict[str, str | int]) -> bool:
    try:
        marker = json.loads((folder / MARKER).read_text())
        digests = marker.pop("digests")
        return marker == request and all(_digest((folder / name).read_bytes()) == digest for name, digest in digests.items())
    except (OSError, ValueError, KeyError, AttributeError):
        return False


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
