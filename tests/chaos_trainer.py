"""`python -m tests.chaos_trainer …`: services.trainer with a learner that checks every byte it gets and remembers what it trained.

Loop, ledger, checkpoints, publishing are the real ones. What the checkpoint says was seen is a second proof beside the ledger's.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto import service
from stretto.recipe import Recipe
from stretto.v1.types_pb2 import Group
from tests.chaos_known import faults_of, oldest_version

TRAIN_S = 0.05
"""One train step."""
WEIGHTS = 1 << 18
"""Numbers in the model: 1 MiB."""


def main() -> int:
    recipe = service.begin("trainer", service.parser("trainer", "The trainer of one chaos run.").parse_args())
    service.limit_threads(recipe.trainer.threads)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

    import torch
    from safetensors.torch import save_file

    from services.trainer import server
    from services.trainer.loop import StepReport

    class Report:
        def __init__(self, metrics: dict[str, float]) -> None:
            self.metrics = metrics

    class CheckingLearner:
        """Obeys services.trainer.loop.Learner."""

        def __init__(self, recipe: Recipe) -> None:
            self.weights = torch.zeros(WEIGHTS)
            self.seen: list[int] = []
            """Ordinals in the order they were trained."""
            self.bounds: list[int] = []
            """len(seen) after each step."""
            self.lag_max = 0
            """Trainer version minus that of the oldest token."""

        def train(self, groups: Sequence[Group], step: int) -> StepReport:
            if len(self.bounds) != step - 1:
                raise AssertionError(f"step {step} is trained on weights of step {len(self.bounds)}")
            wrong = [fault for group in groups for fault in faults_of(group)]
            if wrong:
                raise AssertionError(f"step {step} got groups that are not what they must be: {'; '.join(wrong[:5])}")
            time.sleep(TRAIN_S)
            self.seen += [group.prompt.ordinal for group in groups]
            self.bounds.append(len(self.seen))
            self.weights.fill_(float(step))
            lag = step - 1 - min(map(oldest_version, groups))  # of tokens, whatever the group's label says
            self.lag_max = max(self.lag_max, lag)
            return Report({"updates": 1.0, "lag_max": float(lag), "num_seen": float(len(self.seen))})

        def tensors(self) -> Mapping[str, torch.Tensor]:
            return {"weights": self.weights}

        def state(self) -> dict[str, Any]:
            seen, bounds = (torch.tensor(numbers, dtype=torch.int64) for numbers in (self.seen, self.bounds))
            return {"weights": self.weights, "seen": seen, "bounds": bounds, "lag_max": self.lag_max}

        def load_state(self, state: dict[str, Any]) -> None:
            self.weights = state["weights"].clone()
            self.seen, self.bounds, self.lag_max = state["seen"].tolist(), state["bounds"].tolist(), state["lag_max"]

        def save_pretrained(self, folder: Path, state: Mapping[str, Any]) -> None:
            (folder / "config.json").write_text("{}")
            save_file({"weights": state["weights"]}, folder / "model.safetensors")

    return server.main(recipe, CheckingLearner)


if __name__ == "__main__":
    sys.exit(main())
