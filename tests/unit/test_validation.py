"""Validation accuracy does not forget failed sessions."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.validation import Session, accuracy, evaluate


def right(index: int, uid: str = "p", source: str = "s", **more: Any) -> Session:
    return Session(source, uid, index, 1.0, {"acc": 1.0}, **{"prediction": "53", "num_tokens": 10, **more})


def wrong(index: int, uid: str = "p", source: str = "s", **more: Any) -> Session:
    return Session(source, uid, index, 0.0, {"acc": 0.0}, **{"prediction": "54", "num_tokens": 20, **more})


def failed(index: int, uid: str = "p", source: str = "s") -> Session:
    return Session(source, uid, index, failed=True)


def test_one_failed_and_three_right_of_four_is_three_quarters_not_one() -> None:
    for sessions in ([right(0), right(1), failed(2), right(3)], [right(0), right(1), right(3)]):
        metrics = evaluate({("s", "p"): 4}, sessions)
        for prefix in ("", "s/"):
            assert metrics[f"{prefix}acc/mean@4"] == 0.75
            assert metrics[f"{prefix}acc_success_only/mean@3"] == 1.0
            assert metrics[f"{prefix}acc_failure_gap"] == 0.25
            assert metrics[f"{prefix}failure_rate"] == 0.25
            assert metrics[f"{prefix}num_failed"] == 1
            assert metrics[f"{prefix}acc/best@4"] == metrics[f"{prefix}acc/maj@4"] == 1.0
        assert "acc/mean@3" not in metrics
        assert accuracy(metrics) == 0.75


def test_all_four_failed_is_zero_and_stays_in_the_denominator() -> None:
    expected = {("s", "p"): 4, ("s", "q"): 4}
    metrics = evaluate(expected, [*(right(i, "p") for i in range(4)), *(failed(i, "q") for i in range(4))])
    assert metrics["s/acc/mean@4"] == metrics["acc/mean@4"] == 0.5
    assert metrics["acc/best@4"] == metrics["acc/maj@4"] == 0.5
    assert metrics["acc_success_only/mean@4"] == 1.0
    assert metrics["failure_rate"] == 0.5


@pytest.mark.parametrize("sessions", [[], [failed(i) for i in range(4)]])
def test_an_evaluation_from_which_nothing_came_back_is_zero(sessions: list[Session]) -> None:
    metrics = evaluate({("s", "p"): 4}, sessions)
    assert metrics["acc/mean@4"] == metrics["s/acc/mean@4"] == metrics["acc/best@4"] == metrics["acc/maj@4"] == 0.0
    assert metrics["failure_rate"] == 1.0
    assert not [key for key in metrics if "success_only" in key or "reward" in key or "tokens" in key]


def test_scores_and_lengths_are_never_filled() -> None:
    sessions = [right(0, num_tokens=10), wrong(1, num_tokens=30), failed(2)]
    metrics = evaluate({("s", "p"): 4}, sessions)
    assert metrics["reward/mean"] == 0.5
    assert metrics["response_tokens/mean"] == 20
    assert metrics["acc/mean@4"] == 0.25


def test_other_extras_are_means_over_those_that_report_them() -> None:
    sessions = [Session("s", "p", 0, 1.0, {"acc": 1.0, "format": 1.0}), Session("s", "p", 1, 0.0, {"acc": 0.0})]
    metrics = evaluate({("s", "p"): 4}, sessions)
    assert metrics["format/mean"] == metrics["s/format/mean"] == 1.0
    assert "acc/mean" not in metrics


def test_a_source_that_reports_no_acc_is_not_filled_and_not_judged() -> None:
    expected = {("judged", "p"): 2, ("style", "q"): 2}
    sessions = [right(0, "p", "judged"), right(1, "p", "judged"), Session("style", "q", 0, 0.7)]
    metrics = evaluate(expected, sessions)
    assert metrics["acc/mean@2"] == 1.0
    assert not [key for key in metrics if key.startswith("style/acc")]
    assert metrics["style/reward/mean"] == 0.7
    assert metrics["style/failure_rate"] == 0.5
    assert metrics["failure_rate"] == 0.25


def test_no_source_reports_acc_and_none_is_invented_for_a_silent_one() -> None:
    metrics = evaluate({("style", "q"): 1, ("silent", "q"): 1}, [Session("style", "q", 0, 0.7)])
    assert not [key for key in metrics if "acc" in key]
    assert accuracy(metrics) is None


def test_a_silent_source_counts_as_wrong_where_others_report_acc() -> None:
    metrics = evaluate({("a", "p"): 2, ("b", "p"): 2}, [right(0, "p", "a"), right(1, "p", "a")])
    assert metrics["b/acc/mean@2"] == 0.0
    assert metrics["acc/mean@2"] == metrics["acc/maj@2"] == 0.5


def test_the_same_prompt_id_in_two_sources_never_mixes() -> None:
    expected = {("a", "7"): 2, ("b", "7"): 2}
    sessions = [right(0, "7", "a"), right(1, "7", "a"), wrong(0, "7", "b"), wrong(1, "7", "b")]
    metrics = evaluate(expected, sessions)
    assert (metrics["a/acc/mean@2"], metrics["b/acc/mean@2"], metrics["acc/mean@2"]) == (1.0, 0.0, 0.5)
    assert (metrics["a/acc/best@2"], metrics["b/acc/best@2"]) == (1.0, 0.0)


def test_ids_are_compared_as_text_on_both_sides() -> None:
    number: Any = 7
    metrics = evaluate({("s", number): 1, (number, "8"): 1}, [right(0, "7"), right(0, number + 1, "7")])
    assert metrics["acc/mean@1"] == 1.0
    assert "num_unexpected" not in metrics


@pytest.mark.parametrize("nothing", [None, "", [None], ["53", None], float("nan")])
def test_an_abstention_can_never_win_a_vote(nothing: object) -> None:
    sessions = [wrong(0, prediction=nothing), wrong(1, prediction=nothing), wrong(2, prediction=nothing), right(3)]
    assert evaluate({("s", "p"): 4}, sessions)["acc/maj@4"] == 1.0


def test_a_failed_session_can_never_win_a_vote_and_its_prediction_is_not_read() -> None:
    ghosts = [Session("s", "p", i, 1.0, {"acc": 1.0}, "99", failed=True) for i in range(3)]
    metrics = evaluate({("s", "p"): 4}, [*ghosts, wrong(3)])
    assert metrics["acc/maj@4"] == metrics["acc/best@4"] == metrics["acc/mean@4"] == 0.0


def test_lists_vote_by_their_value() -> None:
    sessions = [right(0, prediction=["1", "2"]), right(1, prediction=["1", "2"]), wrong(2, prediction=["1", "3"])]
    assert evaluate({("s", "p"): 3}, sessions)["acc/maj@3"] == 1.0


def test_equal_votes_go_to_the_prediction_that_voted_first() -> None:
    assert evaluate({("s", "p"): 2}, [wrong(1), right(0)])["acc/maj@2"] == 1.0
    assert evaluate({("s", "p"): 2}, [right(1), wrong(0)])["acc/maj@2"] == 0.0


def test_without_any_prediction_no_majority_is_reported() -> None:
    metrics = evaluate({("s", "p"): 2}, [right(0, prediction=None), wrong(1, prediction=None)])
    assert not [key for key in metrics if "maj@" in key]


def test_the_majority_over_all_sources_needs_every_judged_source_to_vote() -> None:
    sessions = [right(0, "p", "votes"), right(0, "p", "mute", prediction=None)]
    metrics = evaluate({("votes", "p"): 1, ("mute", "p"): 1}, sessions)
    assert "votes/acc/maj@1" in metrics
    assert "mute/acc/maj@1" not in metrics
    assert "acc/maj@1" not in metrics


def test_mixed_group_sizes_are_judged_over_their_own_size_and_labelled_with_the_largest() -> None:
    metrics = evaluate({("s", "p"): 4, ("s", "q"): 2}, [right(0, "p"), right(1, "p"), right(0, "q"), right(1, "q")])
    assert metrics["acc/mean@4"] == 0.75
    assert metrics["acc_success_only/mean@2"] == 1.0
    assert "acc/mean@2" not in metrics


def test_what_nobody_expected_is_counted_and_not_judged() -> None:
    strangers = [right(0, "other"), right(1), right(-1), right(0), wrong(0, source="t")]
    metrics = evaluate({("s", "p"): 1}, [wrong(0), *strangers])
    assert metrics["acc/mean@1"] == 0.0
    assert metrics["num_unexpected"] == 5


def test_an_acc_that_is_no_number_counts_as_wrong() -> None:
    sessions = [Session("s", "p", 0, float("nan"), {"acc": float("nan")}, "1"), right(1)]
    metrics = evaluate({("s", "p"): 2}, sessions)
    assert metrics["acc/mean@2"] == 0.5
    assert metrics["reward/mean"] == 1.0


def test_an_expected_count_below_one_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        evaluate({("s", "p"): 0}, [])


def test_nothing_expected_says_nothing() -> None:
    assert evaluate({}, []) == {}


# ------------------------------------------------------------------------------------------------ properties

_Case = tuple[dict[tuple[str, str], int], list[Session]]


@st.composite
def _cases(draw: st.DrawFn) -> _Case:
    keys = draw(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("123")), min_size=1, max_size=6, unique=True))
    expected: dict[tuple[str, str], int] = {key: draw(st.integers(1, 4)) for key in keys}
    sessions: list[Session] = []
    for (source, uid), size in expected.items():
        for index in range(size):
            end = draw(st.sampled_from(["missing", "failed", "ended", "ended", "ended"]))
            if end != "missing":
                acc = draw(st.sampled_from([0.0, 0.5, 1.0]))
                prediction = draw(st.sampled_from([None, "1", "2"]))
                sessions.append(Session(source, uid, index, acc, {"acc": acc}, prediction, end == "failed", draw(st.integers(1, 9))))
    return expected, sessions


def _of(metrics: dict[str, float], start: str) -> float:
    return next(value for key, value in metrics.items() if key.startswith(start))


@given(_cases())
def test_the_mean_is_the_sum_over_what_was_submitted(case: _Case) -> None:
    expected, sessions = case
    total = Fraction(0)
    for (source, uid), size in expected.items():
        total += (
            sum(
                (Fraction(s.extras["acc"]) for s in sessions if (s.data_source, s.prompt_uid) == (source, uid) and not s.failed),
                Fraction(0),
            )
            / size
        )
    assert _of(evaluate(expected, sessions), "acc/mean@") == pytest.approx(float(total / len(expected)))


@given(_cases(), st.randoms(use_true_random=False))
def test_neither_order_nor_the_way_a_session_is_missing_matters(case: _Case, rng: random.Random) -> None:
    expected, sessions = case
    metrics = evaluate(expected, sessions)
    shuffled = rng.sample(sessions, len(sessions))
    assert evaluate(expected, shuffled) == metrics
    assert evaluate(expected, [s for s in sessions if not s.failed]) == metrics


@given(_cases())
def test_no_vote_and_no_mean_beats_the_best(case: _Case) -> None:
    metrics = evaluate(*case)
    best = _of(metrics, "acc/best@")
    assert 0 <= _of(metrics, "acc/mean@") <= best <= 1
    assert all(value <= best for key, value in metrics.items() if key.startswith("acc/maj@"))


@given(_cases(), st.randoms(use_true_random=False))
def test_losing_a_session_never_raises_an_accuracy(case: _Case, rng: random.Random) -> None:
    expected, sessions = case
    if not sessions:
        return
    lost = rng.randrange(len(sessions))
    before, after = evaluate(expected, sessions), evaluate(expected, sessions[:lost] + sessions[lost + 1 :])
    for key in ("acc/mean@", "acc/best@"):
        assert _of(after, key) <= _of(before, key)


@given(_cases())
def test_success_only_is_the_mean_of_an_evaluation_that_had_asked_the_survivors_alone(case: _Case) -> None:
    expected, sessions = case
    survivors = [s for s in sessions if not s.failed]
    asked = {key: count for key in expected if (count := sum((s.data_source, s.prompt_uid) == key for s in survivors))}
    metrics = evaluate(expected, survivors)
    if not asked:
        assert not [key for key in metrics if "success_only" in key]
        return
    alone = evaluate(asked, [Session(s.data_source, s.prompt_uid, i, s.reward, s.extras) for i, s in _renumbered(survivors)])
    assert _of(metrics, "acc_success_only/mean@") == pytest.approx(_of(alone, "acc/mean@"))


def _renumbered(survivors: list[Session]) -> list[tuple[int, Session]]:
    seen: dict[tuple[str, str], int] = {}
    numbered: list[tuple[int, Session]] = []
    for session in survivors:
        key = (session.data_source, session.prompt_uid)
        numbered.append((seen.setdefault(key, 0), session))
        seen[key] += 1
    return numbered


@given(_cases())
def test_a_source_alone_says_what_it_says_among_others(case: _Case) -> None:
    expected, sessions = case
    metrics = evaluate(expected, sessions)
    for source in {source for source, _ in expected}:
        if not any(s.data_source == source and not s.failed for s in sessions):
            continue
        alone = evaluate({k: n for k, n in expected.items() if k[0] == source}, [s for s in sessions if s.data_source == source])
        assert {k: v for k, v in alone.items() if k.startswith(f"{source}/")} == {
            k: v for k, v in metrics.items() if k.startswith(f"{source}/")
        }
