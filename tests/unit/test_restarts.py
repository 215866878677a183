from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stretto import restarts
from stretto.restarts import CRASHES_MAX, Ended, GiveUp, History, Restart


def crash(history: History, committed_step: int = 0, ran_s: float = 1.0, code: int = 1) -> tuple[Restart | GiveUp | Ended, History]:
    return restarts.after(history, code, ran_s, committed_step, False)


def test_a_service_that_did_its_work_is_not_started_again() -> None:
    assert isinstance(restarts.after(History(), 0, 1.0, 9, True)[0], Ended)


def test_a_drained_service_is_started_again_while_the_run_is_not_done() -> None:
    assert restarts.after(History(), 0, 1.0, 3, False)[0] == Restart(0.0, "ended before the run was done")


def test_a_bad_recipe_and_a_fenced_service_are_not_started_again() -> None:
    decisions = [restarts.after(History(), code, 1.0, 0, False)[0] for code in (2, 3)]
    assert [d.exit_code for d in decisions if isinstance(d, GiveUp)] == [2, 3]


def test_the_back_off_doubles_to_ten_seconds_and_begins_anew_after_a_healthy_minute() -> None:
    history, delays = History(), list[float]()
    for step in range(7):  # progress between the crashes: never given up
        decision, history = crash(history, step)
        assert isinstance(decision, Restart)
        delays.append(decision.delay_s)
    assert delays == [0.5, 1, 2, 4, 8, 10, 10]
    assert crash(history, 7, ran_s=60.0)[0] == Restart(0.5, "ended by exit code 1")


def test_a_service_that_crashes_while_nothing_moves_is_given_up_and_its_signal_is_named() -> None:
    history, decision = History(), None
    for _ in range(CRASHES_MAX):
        assert not isinstance(decision, GiveUp)
        decision, history = crash(history, code=-11)
    assert decision == GiveUp(1, f"crashed {CRASHES_MAX} times in a row, last by signal 11")


@given(st.lists(st.tuples(st.integers(-15, 20).filter(lambda c: c not in (0, 2, 3)), st.floats(0, 59)), max_size=40))
def test_a_run_that_makes_progress_is_never_given_up(crashes: list[tuple[int, float]]) -> None:
    history = History()
    for step, (code, ran_s) in enumerate(crashes):
        decision, history = crash(history, step, ran_s, code)
        assert isinstance(decision, Restart)
        assert 0.5 <= decision.delay_s <= 10
