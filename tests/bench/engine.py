"""Tokens per second of the torch engine beside transformers' generate(), same model, prompts and lengths, in one run.

    OMP_NUM_THREADS=1 python -m tests.bench.engine [--sequences 256] [--slots 256] [--rounds 9] [--hidden 64 --layers 3]

The model has random weights (their values do not change the cost). Prompts of 17 tokens in groups of 8, answers of 8 to 14
tokens whose lengths are drawn beforehand; generate() waits for its longest row. All return a log-prob per token. Time is
CPU time of the process; the contenders alternate and the best of the rounds counts, so a busy machine disturbs little.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from services.rollout.engine import Request
from services.rollout.engine_torch import TorchEngine

PROMPT, GROUP, SHORTEST, LONGEST = 17, 8, 8, 14
VOCABULARY = 337


def main() -> None:
    arguments = _arguments()
    torch.manual_seed(0)
    rng = random.Random(0)
    lengths = [rng.randint(SHORTEST, LONGEST) for _ in range(arguments.sequences)]
    prompts = [[rng.randrange(VOCABULARY) for _ in range(PROMPT)] for _ in range(-(-arguments.sequences // GROUP))]
    with tempfile.TemporaryDirectory() as folder:
        model = _model(arguments, Path(folder))
        contenders: dict[str, Callable[[], int]] = {
            "generate()": lambda: _by_generate(model, prompts, lengths),
            "engine": _by_engine(model, Path(folder), arguments.slots, prompts, lengths, shared=True),
            "engine, no shared prompts": _by_engine(model, Path(folder), arguments.slots, prompts, lengths, shared=False),
        }
        best = {name: float("inf") for name in contenders}
        tokens = 0
        for _ in range(arguments.rounds):
            for name, run in contenders.items():
                start = time.process_time()
                tokens = run()
                best[name] = min(best[name], time.process_time() - start)
    _report(best, tokens, arguments.sequences)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.bench.engine")
    for name, default in (("sequences", 256), ("slots", 256), ("rounds", 9), ("hidden", 64), ("layers", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def _model(arguments: argparse.Namespace, folder: Path) -> Any:
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 16,
        num_key_value_heads=arguments.hidden // 16,
        head_dim=16,
        intermediate_size=3 * arguments.hidden,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        eos_token_id=None,
        bos_token_id=None,
    )
    config.save_pretrained(folder)
    return AutoModelForCausalLM.from_config(config).eval()


def _by_engine(model: Any, folder: Path, slots: int, prompts: list[list[int]], lengths: list[int], *, shared: bool) -> Callable[[], int]:
    engine = TorchEngine(folder, device="cpu", dtype=torch.float32, slots=slots, max_len=512)
    engine.load_weights(0, dict(model.named_parameters()), "in_flight")
    texts = [prompts[i // GROUP] if shared else [i % VOCABULARY, *prompts[i // GROUP][1:]] for i in range(len(lengths))]

    def run() -> int:
        engine.add([Request(f"{i // GROUP}/{i % GROUP}", texts[i], n) for i, n in enumerate(lengths)])
        tokens = 0
        while engine.has_work():
            tokens += sum(len(c.tokens) for c in engine.step())
        return tokens

    return run


@torch.inference_mode()
def _by_generate(model: Any, prompts: list[list[int]], lengths: list[int]) -> int:
    ids = torch.tensor([prompts[i // GROUP] for i in range(len(lengths))])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max(lengths),
        do_sample=True,
        top_k=0,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logprobs = torch.stack(out.logits, 1).log_softmax(-1).gather(-1, out.sequences[:, PROMPT:, None])
    assert logprobs.shape[1] == max(lengths)
    return sum(lengths)


def _report(best: dict[str, float], tokens: int, sequences: int) -> None:
    write = sys.stdout.write
    write(f"{sequences} sequences, {tokens} useful tokens, {torch.get_num_threads()} thread(s), torch {torch.__version__}\n")
    write(f"{'':28}{'tokens / CPU-s':>16}{'CPU-ms per 256':>16}{'x generate()':>14}\n")
    for name, seconds in best.items():
        per_256 = seconds * 1000 * 256 / sequences
        write(f"{name:28}{tokens / seconds:16,.0f}{per_256:16.1f}{best['generate()'] / seconds:14.2f}\n")


if __name__ == "__main__":
    main()
