"""Train on prompts of your own while a run is live, and see what it changes.

stretto run recipes/word-problems.toml          # in one terminal
python examples/own_prompts.py                  # in another; --address HOST:PORT for a run elsewhere
"""

from __future__ import annotations

import argparse
import random

from stretto import Client, UserPrompt
from stretto.errors import StrettoError


def questions(count: int) -> list[UserPrompt]:
    """Prompts in the form the reward function of word-problems scores: it compares the number after "####"."""
    rng = random.Random(7)
    made: list[UserPrompt] = []
    for _ in range(count):
        a, b = rng.randint(0, 9), rng.randint(0, 9)
        made.append(UserPrompt(f"Tom has {a} pens. He buys {b} pens. How many pens?", str(a + b), data_source="own"))
    return made


def follow(client: Client, num_steps: int) -> None:
    """Print what happens until `num_steps` more steps are trained or the run is done."""
    left = num_steps
    for event in client.events():
        if event.kind == "step":
            left -= 1
            print(f"step {event.values.get('step', 0):.0f}: reward {event.values.get('reward_mean', float('nan')):.3f}")
        elif event.kind in ("evaluation", "checkpoint"):
            print(event.text)
        if left <= 0:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="host:port of the run's scheduler; default the newest live run under ./runs")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5, help="steps to follow")
    args = parser.parse_args()
    try:
        with Client(args.address) if args.address else Client.local() as client:
            status = client.status()
            print(f"run {status.run}: {status.phase}, step {status.committed_step}/{status.total_steps}")
            uids = client.submit(questions(args.prompts))
            print(f"submitted {len(uids)} prompts: {uids[0]} to {uids[-1]}")
            follow(client, args.steps)
            outcome = client.evaluate(max_prompts=64)
            print(f"accuracy of version {outcome.version_max} on held-out prompts: {outcome.accuracy:.3f}")
            ledger = client.verify_ledger()
            print(f"own prompts trained: {ledger.user_trained} of {ledger.user_entered}; ledger {'ok' if ledger.ok else ledger.violations}")
    except StrettoError as err:
        raise SystemExit(f"error: {err.message}") from None


if __name__ == "__main__":
    main()
