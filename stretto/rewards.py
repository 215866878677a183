"""Rewards: plain functions that score one answer.

    def my_reward(*, response: str, ground_truth: str, data_source: str, prompt: str, extra: Mapping[str, Any]) -> float | Mapping[str, Any]

    response      the decoded answer, without special tokens     data_source   which data set the row says it is from
    ground_truth  what the row's answer column holds, as text    extra         every other column of the row
    prompt        the question as people read it

A number is the reward. A mapping has "reward" (finite number) and, if it likes, "acc" (0..1: what validation reports as
accuracy), "prediction" (the parsed answer, for maj@n; None or absent = abstained) and more numbers, reported by name.
It runs in a process of its own, one answer at a time, with a deadline. What it raises fails that one session.

    exact_match   the answer, trimmed, is the ground truth
    gsm8k         the number after the last "####" equals the ground truth's
    math_verify   symbolic equality of LaTeX or plain expressions (package math-verify)
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import cache
from typing import Any, TypeAlias, cast

from stretto.errors import RecipeError

Reward: TypeAlias = Callable[..., float | Mapping[str, Any]]

PARAMETERS = ("response", "ground_truth", "data_source", "prompt", "extra")
"""Keyword arguments of every reward function."""
BUILT_IN = ("exact_match", "gsm8k", "math_verify")

_GSM8K = re.compile(r"####[ \t]*\$?[ \t]*([-+\u2212]?[\d,]*\.?\d+|[-+\u2212]?[\d,]+)")
"""`#### 1,234.50`, `#### -7`, `#### $12`: group 1 is the number."""
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?|[-+]?\.\d+")


def exact_match(*, response: str, ground_truth: str, **_: Any) -> dict[str, Any]:
    """1 when the answer equals the ground truth, both trimmed."""
    answer = response.strip()
    acc = float(answer == ground_truth.strip())
    return {"reward": acc, "acc": acc, "prediction": answer}


def gsm8k(*, response: str, ground_truth: str, **_: Any) -> dict[str, Any]:
    """1 when the number after the last `####` of the answer equals the ground truth's.

    The ground truth may be the bare number or GSM8K's whole worked solution. Without `####` there is no answer: 0, abstained.
    """
    prediction, truth = last_gsm8k_number(response), last_gsm8k_number(ground_truth) or as_number(ground_truth)
    if truth is None:
        raise ValueError(f"ground truth {ground_truth!r} is neither a number nor ends in '#### <number>'")
    acc = float(prediction == truth)
    return {"reward": acc, "acc": acc, "prediction": prediction}


def last_gsm8k_number(text: str) -> str | None:
    """The canonical number after the last `####`, or None."""
    found = _GSM8K.findall(text)
    return as_number(found[-1]) if found else None


def as_number(text: str) -> str | None:
    """One spelling per value: "1,234.50" -> "1234.5", "+7" -> "7", "-0" -> "0"; None when it is no number."""
    plain = text.strip().removeprefix("$").replace(",", "").replace("\u2212", "-")
    if not _NUMBER.fullmatch(plain):
        return None
    value = f"{Decimal(plain):f}"
    value = value.rstrip("0").rstrip(".") if "." in value else value
    return "0" if value == "-0" else value


def math_verify(*, response: str, ground_truth: str, **_: Any) -> dict[str, Any]:
    r"""1 when the answer is symbolically equal to the ground truth: \boxed{…}, LaTeX or plain expressions.

    Time is limited by the caller's deadline, which kills a process that hangs; the package's own limits are off because
    they use SIGALRM, which only a main thread may set.
    """
    package = _math_verify()
    gold = package.parse(_in_math(ground_truth), parsing_timeout=None, raise_on_error=True)
    if not gold:
        raise ValueError(f"ground truth {ground_truth!r} holds no expression that math-verify can parse")
    answer = package.parse(response, parsing_timeout=None)
    acc = float(bool(answer) and package.verify(gold, answer, timeout_seconds=None))
    return {"reward": acc, "acc": acc, "prediction": str(answer[0]) if answer else None}


def _in_math(text: str) -> str:
    r"""LaTeX is only looked for inside a math environment: "\frac{1}{2}" becomes "$\frac{1}{2}$"."""
    return text if re.search(r"\$|\\\(|\\\[|\\boxed", text) else f"${text.strip()}$"


@cache
def _math_verify() -> Any:
    """The package, imported once; 0.5 s, so only where it is used."""
    import logging

    import math_verify as package

    for name in ("math_verify.parser", "math_verify.grader"):  # both warn at each process start that their timeouts are off
        logging.getLogger(name).setLevel(logging.ERROR)
    return package


def as_prediction(value: object) -> str | None:
    """What votes in maj@n, as text; None = abstained.

    None, NaN, blank text, an empty list and a list with a None in it are no answer. Other values vote as their JSON or text.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, str):
        return value.strip() or None
    if isinstance(value, list | tuple):
        if not value or any(as_prediction(part) is None for part in value):
            return None
        return json.dumps(value, default=str)
    return str(value)


def resolve(dotted: str) -> Reward:
    """The function named `module:function` or `module.function`. Raises RecipeError that names what is near."""
    module_name, _, name = dotted.partition(":") if ":" in dotted else dotted.rpartition(".")
    if not module_name or not name:
        example = next((full for full in _BUILT_IN_NAMES if full.endswith(f":{dotted}")), _BUILT_IN_NAMES[1])
        raise RecipeError(f"reward.function = {dotted!r} must be module:function, such as {example!r}")
    found = _attribute(_module(module_name, dotted), name, dotted)
    if not callable(found):
        raise RecipeError(f"reward.function = {dotted!r} is {type(found).__name__}, not a function")
    function = cast("Reward", found)
    _check_signature(function, dotted)
    return function


_BUILT_IN_NAMES = tuple(f"stretto.rewards:{name}" for name in BUILT_IN)


def _module(module_name: str, dotted: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as err:
        missing = err.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise RecipeError(f"reward.function = {dotted!r}: there is no module {missing!r}{_near(dotted, _BUILT_IN_NAMES)}") from None
        raise RecipeError(f"reward.function = {dotted!r}: importing {module_name!r} failed: there is no module {missing!r}") from err
    except Exception as err:  # a user's module may raise anything; all of it means the same to the recipe
        raise RecipeError(f"reward.function = {dotted!r}: importing {module_name!r} failed: {type(err).__name__}: {err}") from err


def _attribute(module: Any, name: str, dotted: str) -> object:
    found: object = module
    for part in name.split("."):
        if not hasattr(found, part):
            public = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
            known = BUILT_IN if module.__name__ == __name__ else public
            hint = _near(name, known) or f"; it has {', '.join(sorted(known)) or 'no function'}"
            raise RecipeError(f"reward.function = {dotted!r}: module {module.__name__!r} has no {name!r}{hint}")
        found = getattr(found, part)
    return found


def _check_signature(function: Reward, dotted: str) -> None:
    if inspect.iscoroutinefunction(function):
        raise RecipeError(f"reward.function = {dotted!r} is a coroutine function; a reward is a plain function, it has its own process")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # written in C: the first call will tell
    try:
        signature.bind(**dict.fromkeys(PARAMETERS))
    except TypeError as err:
        asked = ", ".join(PARAMETERS)
        raise RecipeError(f"reward.function = {dotted!r} must accept the keyword arguments {asked}: {err}") from None


def _near(name: str, known: tuple[str, ...] | list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
