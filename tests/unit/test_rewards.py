"""Built-in rewards and how a recipe's dotted name becomes one."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto import rewards
from stretto.errors import RecipeError


def score(function: rewards.Reward, response: str, ground_truth: str) -> dict[str, Any]:
    found = function(response=response, ground_truth=ground_truth, data_source="s", prompt="p", extra={})
    assert isinstance(found, dict)
    return found


def test_exact_match_ignores_only_surrounding_white_space() -> None:
    assert score(rewards.exact_match, " yes\n", "yes")["reward"] == 1
    assert score(rewards.exact_match, "yes.", "yes")["reward"] == 0


@pytest.mark.parametrize(
    ("response", "truth", "reward", "prediction"),
    [
        (" 47+6=53\n#### 53", "53", 1, "53"),
        ("#### 1,234", "1234", 1, "1234"),
        ("####-7", "-7", 1, "-7"),
        ("#### \u22127", "-7", 1, "-7"),
        ("#### +7", "7", 1, "7"),
        ("#### $12.50", "12.5", 1, "12.5"),
        ("#### 5.", "5", 1, "5"),
        ("#### .5", "0.5", 1, "0.5"),
        ("#### 100", "100", 1, "100"),
        ("#### 53 apples", "53", 1, "53"),
        ("#### 1\n#### 2", "2", 1, "2"),
        ("#### 530", "53", 0, "530"),
        ("the answer is 53", "53", 0, None),
        ("#### ", "53", 0, None),
        ("####\n53", "53", 0, None),
        ("#### -", "53", 0, None),
        ("#### ,", "53", 0, None),
        ("#### 53", "40+13=53 <<40+13=53>>\n#### 53", 1, "53"),
        ("#### 0", "-0.0", 1, "0"),
    ],
)
def test_gsm8k_reads_the_number_after_the_last_mark(response: str, truth: str, reward: float, prediction: str | None) -> None:
    assert score(rewards.gsm8k, response, truth) == {"reward": reward, "acc": reward, "prediction": prediction}


def test_gsm8k_refuses_a_ground_truth_without_a_number_instead_of_paying_silence() -> None:
    with pytest.raises(ValueError, match="neither a number"):
        score(rewards.gsm8k, "I do not know", "many")


@given(st.integers(-(10**12), 10**12))
def test_gsm8k_pays_every_spelling_of_an_integer(value: int) -> None:
    for spelling in (str(value), f"{value:,}", f"{value}.0", f"{value}.00"):
        assert score(rewards.gsm8k, f"so\n#### {spelling}", str(value))["reward"] == 1
    assert score(rewards.gsm8k, f"#### {value + 1}", str(value))["reward"] == 0


@pytest.mark.parametrize(
    ("response", "truth", "reward"),
    [
        (r"so $\boxed{\frac{1}{2}}$", "0.5", 1),
        (r"\boxed{x^2+2x+1}", "$(x+1)^2$", 1),
        (r"the answer is $\frac{2}{4}$", r"\frac{1}{2}", 1),
        (r"\boxed{3}", "4", 0),
        ("no idea", "4", 0),
    ],
)
def test_math_verify_compares_values_not_spellings(response: str, truth: str, reward: float) -> None:
    pytest.importorskip("math_verify")
    found = score(rewards.math_verify, response, truth)
    assert (found["reward"], found["acc"]) == (reward, reward)
    assert (found["prediction"] is None) == (response == "no idea")


def test_math_verify_works_off_the_main_thread() -> None:
    pytest.importorskip("math_verify")
    found: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: found.append(score(rewards.math_verify, r"\boxed{7}", "7")))
    thread.start()
    thread.join()
    assert found[0]["reward"] == 1


@pytest.mark.parametrize("value", [None, "", "  ", math.nan, [], [None], ["3", None], ("3", [None])])
def test_what_is_no_answer_never_becomes_a_vote(value: object) -> None:
    assert rewards.as_prediction(value) is None


@pytest.mark.parametrize(("value", "text"), [(" 3 ", "3"), (3, "3"), (["a", 2], '["a", 2]'), (False, "False"), (0, "0")])
def test_what_is_an_answer_votes_as_text(value: object, text: str) -> None:
    assert rewards.as_prediction(value) == text


@pytest.mark.parametrize("dotted", ["stretto.rewards:gsm8k", "stretto.rewards.gsm8k"])
def test_both_spellings_of_a_dotted_name_resolve(dotted: str) -> None:
    assert rewards.resolve(dotted) is rewards.gsm8k


@pytest.mark.parametrize(
    ("dotted", "says"),
    [
        ("stretto.rewards:gsmk8", "did you mean 'gsm8k'"),
        ("stretto.reward:gsm8k", "did you mean 'stretto.rewards:gsm8k'"),
        ("exact_match", "must be module:function, such as 'stretto.rewards:exact_match'"),
        ("gsm8k", "must be module:function, such as 'stretto.rewards:gsm8k'"),
        ("no_such_module_at_all:f", "no module 'no_such_module_at_all'"),
        ("stretto.rewards:BUILT_IN", "tuple, not a function"),
        ("math:sqrt", "keyword arguments response, ground_truth"),
        ("", "must be module:function"),
    ],
)
def test_a_wrong_name_is_refused_with_what_to_write(dotted: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        rewards.resolve(dotted)


def test_a_module_that_fails_to_import_is_named_with_its_reason(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_reward_module.py").write_text("import module_that_is_not_there\n")
    (tmp_path / "raising_reward_module.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RecipeError, match="importing 'broken_reward_module' failed: there is no module 'module_that_is_not_there'"):
        rewards.resolve("broken_reward_module:f")
    with pytest.raises(RecipeError, match="RuntimeError: no licence"):
        rewards.resolve("raising_reward_module:f")


def test_a_function_that_lacks_a_parameter_is_refused_by_its_name(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "narrow_reward_module.py").write_text("def f(*, response, ground_truth): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RecipeError, match="must accept the keyword arguments response"):
        rewards.resolve("narrow_reward_module:f")


def test_a_coroutine_function_is_refused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "async_reward_module.py").write_text("async def f(**_): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RecipeError, match="coroutine"):
        rewards.resolve("async_reward_module:f")
