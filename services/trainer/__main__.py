"""`python -m services.trainer --config recipe.toml [--set section.key=value …]`"""

from __future__ import annotations

import argparse
import os
import signal
import sys


def main() -> int:
    """Exit code; see server.py."""
    parser = argparse.ArgumentParser(prog="python -m services.trainer", description="The trainer of a run.")
    parser.add_argument("--config", required=True, help="recipe (TOML)")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="section.key=value", help="override the recipe")
    args = parser.parse_args()

    from stretto import recipe
    from stretto.errors import RecipeError

    try:
        loaded = recipe.load(args.config, args.set, os.environ)
    except RecipeError as err:
        sys.stderr.write(f"{err.message}\n")
        return 2
    os.environ.setdefault("OMP_NUM_THREADS", str(loaded.trainer.threads))  # before torch is imported

    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # nothing is begun yet; the server brings its own

    from services.trainer import server

    return server.main(loaded)


if __name__ == "__main__":
    sys.exit(main())
