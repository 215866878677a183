"""From a prompt to the token ids a model reads, with the model's own tokenizer and without torch.

text                 --tokenizer-->                  ids    data.chat_template auto, never
text                 --as one user turn, template--> ids    always
messages             --chat template, tokenizer-->   ids    auto, always
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from services.scheduler.rows import Message
from stretto.errors import InvalidArgumentError, RecipeError


def hide_torch() -> None:
    """Make this process one in which PyTorch is not installed: transformers then imports in 1.1 s instead of 3.3 s.

    Only for the __main__ of a process, before anything imports transformers: it cannot be undone.
    """
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # pyright: ignore[reportArgumentType] - how Python marks a module that cannot be imported
        logging.getLogger("transformers").addFilter(lambda record: "PyTorch was not found" not in record.getMessage())


@cache
def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a Hugging Face folder, never from the network. Raises RecipeError."""
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise RecipeError(f"model.path = '{path}': there is no tokenizer.json or tokenizer_config.json")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as err:  # a damaged folder fails in many ways; to the recipe all of them mean the same
        raise RecipeError(f"model.path = '{path}': its tokenizer cannot be loaded: {type(err).__name__}: {err}") from err


class Encoder:
    """One tokenizer with the recipe's rule for the chat template."""

    def __init__(self, tokenizer: Any, chat_template: Literal["auto", "always", "never"]) -> None:
        self._tokenizer, self._rule = tokenizer, chat_template

    def encode(self, prompts: Sequence[str | list[Message]]) -> list[list[int]]:
        """Token ids per prompt. One call for many prompts is ten times cheaper than many calls. Raises InvalidArgumentError."""
        encoded: list[list[int]] = [[] for _ in prompts]
        templated = [i for i, prompt in enumerate(prompts) if self._uses_template(prompt)]
        raw = [i for i, prompt in enumerate(prompts) if not self._uses_template(prompt)]
        # A template writes the special tokens itself; raw text gets those the tokenizer adds by itself (a BOS).
        for places, texts, special in (
            (templated, [self._render(prompts[i]) for i in templated], False),
            (raw, [prompts[i] for i in raw], True),
        ):
            if texts:
                ids = self._tokenizer(texts, add_special_tokens=special, return_attention_mask=False, verbose=False)["input_ids"]
                for place, row in zip(places, ids, strict=True):
                    encoded[place] = row
        return encoded

    def check(self, ids: Sequence[int]) -> None:
        """Raises InvalidArgumentError for an id outside the vocabulary."""
        size = len(self._tokenizer)
        outside = next((i for i in ids if not 0 <= i < size), None)
        if outside is not None:
            raise InvalidArgumentError(f"token id {outside} is outside the model's vocabulary of {size}")

    def decode(self, ids: Sequence[int]) -> str:
        """Text for people, special tokens included."""
        return self._tokenizer.decode(list(ids))

    def _uses_template(self, prompt: str | list[Message]) -> bool:
        if isinstance(prompt, str):
            return self._rule == "always"
        if self._rule == "never":
            raise InvalidArgumentError("messages need a chat template, and data.chat_template = 'never'; set it to 'auto' or give text")
        return True

    def _render(self, prompt: str | list[Message]) -> str:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not getattr(self._tokenizer, "chat_template", None):
            raise InvalidArgumentError(
                "the model's tokenizer has no chat template; give the prompts as text with data.chat_template = 'auto'"
            )
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as err:  # templates raise what they like ("roles must alternate"): a fault of the messages
            raise InvalidArgumentError(f"the chat template refuses the messages: {err}") from err
