"""`python -m services.trainer --config recipe.toml [--set section.key=value …]`: the trainer of one run.

Exit codes: 0 done or asked to stop, 1 crashed (start again), 2 cannot run as configured, 3 fenced (another trainer took over).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from stretto import service


def main(argv: Sequence[str] | None = None) -> int:
    recipe = service.begin("trainer", service.parser("trainer", "The trainer of one run.").parse_args(argv))
    service.limit_threads(recipe.trainer.threads)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # in the midst of an import, too; the server brings its own

    from services.trainer import server

    return server.main(recipe)


if __name__ == "__main__":
    sys.exit(main())
