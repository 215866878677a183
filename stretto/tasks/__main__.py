"""`python -m stretto.tasks word-problems --out DIR [--seed N]`: writes train.jsonl and validation.jsonl."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from stretto.errors import StrettoError
from stretto.recipe import TASKS
from stretto.tasks import word_problems


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stretto.tasks", description="Make the data of a task.")
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--out", type=Path, required=True, help="folder for train.jsonl and validation.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=word_problems.NUM_TRAIN, help="questions to train on")
    parser.add_argument("--validation", type=int, default=word_problems.NUM_VALIDATION, help="held-out questions")
    given = parser.parse_args(argv)
    try:
        written = word_problems.write(given.out, given.seed, given.train, given.validation)
    except StrettoError as err:
        sys.stderr.write(f"{err.message}\n")
        return 2
    sys.stdout.write(
        f"{given.out}: {given.train} questions to train on, {given.validation} held out{'' if written else ' (already there)'}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
