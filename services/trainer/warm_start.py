"""The supervised warm start of the word-problems model: tokenizer, architecture, demonstrations, the adaptive rule.

Shapes: B demonstrations, T tokens (prompt and response, right-padded).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from stretto.errors import StrettoError
from stretto.tasks import word_problems
from stretto.tasks.word_problems import Sum

EOS, PAD = "<|end|>", "<|pad|>"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The model knows questions, not roles."""
NUM_TOKENIZER_TEXTS = 2000

BATCH = 48
LEARNING_RATE = 4e-3
RAMP_STEPS = 50
DECAY_STEPS = 150
CHECK_STEPS = 25
HOLD_ARITHMETIC = 0.7
"""The decay begins after two checks running at or above this."""
HOLD_STEPS_MAX = 2000
"""Over three times what the slowest of the tried seeds took."""
HOLD_STEPS_USUAL = 550
"""For the progress bar."""
NUM_CHECKED = 128
WRONG_SHARE, UNMARKED_SHARE = 0.20, 0.60
"""Of demonstrations: a wrong sum, in the decay only, as it delays arithmetic by a third; no #### line."""
CHUNK_BATCHES = 50
"""Batches tokenised at once."""
_IGNORE = -100


@dataclass(frozen=True, slots=True)
class Report:
    """Where the warm start stands."""

    phase: str
    step: int
    expected_steps: int
    arithmetic: float
    """At the last check."""
    loss: float


def build(folder: Path, seed: int, report: Callable[[Report], None]) -> dict[str, Any]:
    """Make, warm up and save the model. Returns its numbers. Raises StrettoError when arithmetic never appears."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more only spin for each other on matrices this small
    try:
        return _build(folder, seed, report)
    finally:
        torch.set_num_threads(num_threads)


def _build(folder: Path, seed: int, report: Callable[[Report], None]) -> dict[str, Any]:
    torch.manual_seed(seed)
    logging.disable_progress_bar()  # ours is the only one
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    num_steps = train(model, tokenizer, random.Random(f"warm start {seed}"), report)
    model.eval()
    arithmetic, accuracy = judge(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "num_steps": num_steps,
        "arithmetic": round(arithmetic, 4),
        "accuracy": round(accuracy, 4),
    }


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of the task's own texts, one token per digit. The same for every seed."""
    texts = [question + asked.solution() for asked, question in word_problems.questions(0, "train", NUM_TOKENIZER_TEXTS)]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=512, special_tokens=[PAD, EOS], initial_alphabet=alphabet, show_progress=False)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=EOS, pad_token=PAD, padding_side="left", model_max_length=2048, chat_template=CHAT_TEMPLATE
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Randomly initialised from torch's seed."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        intermediate_size=192,
        tie_word_embeddings=True,
        initializer_range=0.06,
        max_position_embeddings=2048,
        eos_token_id=_id(tokenizer, EOS),
        pad_token_id=_id(tokenizer, PAD),
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def _id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    found = tokenizer.backend_tokenizer.token_to_id(token)
    assert found is not None
    return found


def train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    report: Callable[[Report], None],
    hold_steps_max: int = HOLD_STEPS_MAX,
) -> int:
    """Hold, then decay; returns the steps taken. Raises StrettoError when arithmetic never appears."""
    lesson = _Lesson(model, tokenizer, rng)
    num_good = 0
    while num_good < 2:
        if lesson.step >= hold_steps_max:
            raise StrettoError(
                f"the warm start did not learn to add: greedy arithmetic is {lesson.arithmetic:.2f} after {lesson.step} steps and "
                f"should be {HOLD_ARITHMETIC} in two checks running; choose another run.seed"
            )
        if lesson.advance(min(1.0, (lesson.step + 1) / RAMP_STEPS)):
            num_good = num_good + 1 if lesson.arithmetic >= HOLD_ARITHMETIC else 0
            report(lesson.report("hold", max(HOLD_STEPS_USUAL, lesson.step) + DECAY_STEPS))
    lesson.set_demonstrations(WRONG_SHARE)
    end = lesson.step + DECAY_STEPS
    while lesson.step < end:
        if lesson.advance((end - lesson.step) / DECAY_STEPS):
            report(lesson.report("decay", end))
    return lesson.step


class _Lesson:
    """The optimizer's steps and the checks between them."""

    def __init__(self, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> None:
        self._model, self._tokenizer, self._rng = model, tokenizer, rng
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
        self.set_demonstrations(0.0)
        self._checked = arithmetic_check(tokenizer)
        self.step = 0
        self.arithmetic = 0.0
        self._loss = 0.0

    def set_demonstrations(self, wrong_share: float) -> None:
        self._batches = demonstrations(self._tokenizer, self._rng, wrong_share)

    def advance(self, rate: float) -> bool:
        """One step at `rate` of the full learning rate; True when it ended with a check."""
        for group in self._optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate
        ids_BT, labels_BT = next(self._batches)
        loss = -response_logprobs(self._model, ids_BT, labels_BT)[0].mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        if self.step % CHECK_STEPS:
            return False
        self._loss = float(loss.detach())
        self.arithmetic = share_greedy(self._model, *self._checked)
        return True

    def report(self, phase: str, expected_steps: int) -> Report:
        return Report(phase, self.step, expected_steps, self.arithmetic, self._loss)


# ------------------------------------------------------------------------------------------------ demonstrations


def demonstrations(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, wrong_share: float
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(ids_BT, labels_BT) for ever. Tokenised CHUNK_BATCHES at a time: 0.05 ms a demonstration."""
    pool = word_problems.sums("train")
    while True:
        chosen = [rng.choice(pool) for _ in range(BATCH * CHUNK_BATCHES)]
        pairs = _encode(
            tokenizer, [(asked.question(rng.randrange(word_problems.NUM_WORDINGS)), _sloppy(asked, rng, wrong_share)) for asked in chosen]
        )
        for start in range(0, len(pairs), BATCH):
            yield pad(pairs[start : start + BATCH], tokenizer)


def _sloppy(asked: Sum, rng: random.Random, wrong_share: float) -> str:
    value = asked.value
    if rng.random() < wrong_share:
        value = max(0, value + rng.choice((-10, -2, -1, 1, 2, 10)))
    return asked.solution(value, with_mark=rng.random() >= UNMARKED_SHARE)


def _encode(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[tuple[str, str]], *, with_end: bool = True
) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, response ids) of (prompt, response) texts, tokenised apart as in a rollout."""
    core, end = tokenizer.backend_tokenizer, [_id(tokenizer, EOS)] if with_end else []
    prompts = core.encode_batch([prompt for prompt, _ in texts])
    responses = core.encode_batch([response for _, response in texts])
    return [(p.ids, r.ids + end) for p, r in zip(prompts, responses, strict=True)]


def pad(pairs: Sequence[tuple[list[int], list[int]]], tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids_BT, labels_BT): labels are the ids where the response is, _IGNORE elsewhere."""
    filler = _id(tokenizer, PAD)
    length = max(len(p) + len(r) for p, r in pairs)
    ids = [p + r + [filler] * (length - len(p) - len(r)) for p, r in pairs]
    labels = [[_IGNORE] * len(p) + r + [_IGNORE] * (length - len(p) - len(r)) for p, r in pairs]
    return torch.tensor(ids), torch.tensor(labels)


# ------------------------------------------------------------------------------------------------ judging


def response_logprobs(
    model: Qwen3ForCausalLM, ids_BT: torch.Tensor, labels_BT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-prob, is it the likeliest token, row) of every response token, flat. Padding is on the right, so no mask is needed."""
    hidden_BTH = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state[:, :-1]
    targets_BT = labels_BT[:, 1:]
    places_BT = targets_BT != _IGNORE
    logits_NV = model.lm_head(hidden_BTH[places_BT])
    targets_N = targets_BT[places_BT]
    return -F.cross_entropy(logits_NV, targets_N, reduction="none"), logits_NV.argmax(-1) == targets_N, places_BT.nonzero()[:, 0]


def arithmetic_check(tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Held-out questions with their right sums, without #### and end."""
    asked = word_problems.questions(0, "validation", NUM_CHECKED)
    return pad(_encode(tokenizer, [(question, s.solution(with_mark=False)) for s, question in asked], with_end=False), tokenizer)


@torch.no_grad()
def share_greedy(model: Qwen3ForCausalLM, ids_BT: torch.Tensor, labels_BT: torch.Tensor) -> float:
    """Share of rows that greedy decoding would begin with exactly this response: where every token of it is the likeliest."""
    _, is_likeliest_N, rows_N = response_logprobs(model, ids_BT, labels_BT)
    num_missed_B = torch.zeros(len(ids_BT), dtype=torch.long).index_add(0, rows_N, (~is_likeliest_N).long())
    return float((num_missed_B == 0).float().mean())


@torch.no_grad()
def judge(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> tuple[float, float]:
    """(greedy arithmetic, sampled accuracy at temperature 1) on held-out questions.

    The accuracy is the mean probability of the right worked answer, so it needs no sampling and has no noise; other ways to the
    right number (a wrong sum, then the right ####) are too rare to count.
    """
    arithmetic = share_greedy(model, *arithmetic_check(tokenizer))
    asked = word_problems.questions(0, "validation", 2 * NUM_CHECKED)
    ids_BT, labels_BT = pad(_encode(tokenizer, [(question, s.solution()) for s, question in asked]), tokenizer)
    logprobs_N, _, rows_N = response_logprobs(model, ids_BT, labels_BT)
    total_B = torch.zeros(len(ids_BT)).index_add(0, rows_N, logprobs_N)
    return arithmetic, float(total_B.exp().mean())
