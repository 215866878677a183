"""What other threads ask of the loop is answered once, also when it stops."""

from __future__ import annotations

import threading

import pytest

from services.trainer.control import Saved, SaveRequests, Status, Stop, Stopping
from stretto.errors import UnavailableError


def test_the_same_operation_gets_the_same_answer_and_is_taken_once() -> None:
    saves = SaveRequests()
    first, second, other = saves.ask("a"), saves.ask("a"), saves.ask("b")
    assert first is second
    assert saves.take() == [first, other]
    assert not saves.any_waiting
    first.set_result(Saved(3, "p"))
    assert saves.ask("a").result(0) == Saved(3, "p")
    assert not saves.any_waiting


def test_requests_without_an_operation_id_are_all_different() -> None:
    saves = SaveRequests()
    assert saves.ask("") is not saves.ask("")


def test_who_waits_or_asks_when_the_trainer_stops_is_told() -> None:
    saves = SaveRequests()
    waiting = saves.ask("a")
    saves.close()
    for asked in (waiting, saves.ask("b")):
        with pytest.raises(UnavailableError, match="stopping"):
            asked.result(0)


def test_a_sleep_ends_when_a_stop_is_requested() -> None:
    stop = Stop()
    stop.check()
    stop.sleep(0.0)
    threading.Timer(0.02, stop.request).start()
    with pytest.raises(Stopping):
        stop.sleep(60.0)
    with pytest.raises(Stopping):
        stop.check()
    assert 0 < stop.left_s < 5


def test_an_activity_within_another_gives_way_to_it_again() -> None:
    status = Status(total_steps=5)
    status.enter("committing")
    with status.during("saving"):
        assert status.activity[0] == "saving"
    assert status.activity[0] == "committing"
