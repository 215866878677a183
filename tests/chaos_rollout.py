"""`python -m tests.chaos_rollout …`: services.rollout with an engine whose answers are known; starts in a second, without torch."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

from services.rollout.__main__ import Parts, main
from stretto.recipe import Recipe
from tests.chaos_known import Tokenizer, answer_to
from tests.fakes import FakeEngine

TOKEN_S = 0.008
"""One decode step."""


@dataclass
class PacedEngine(FakeEngine):
    """Takes its time, so that kills find answers half done."""

    def step(self) -> Any:
        time.sleep(TOKEN_S)
        self.loads.clear()
        self.added.clear()
        return super().step()


def parts(recipe: Recipe) -> Parts:
    return Parts("known", "cpu", Tokenizer(), lambda: PacedEngine(slots=recipe.rollout.slots, answer=answer_to), dict)


if __name__ == "__main__":
    sys.exit(main(make_parts=parts))
