"""What `stretto why` says, blocker by blocker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.scheduler.explain import Facts, ReplicaFacts, explain, is_moving
from services.scheduler.groups import NOT_BEGUN, Entry, Kind, RunState, State, View, Weights

RUN = RunState(window=12, total_steps=100, committed=40, checkpoint=30, trainer_epoch=3, trainer_address="t:1")
NEWEST = Weights(3, 40)
R3 = ReplicaFacts("r3", 41.0, is_gone=False, held=NEWEST)
FACTS = Facts(
    batch_groups=4,
    max_lag=2,
    lease_s=60,
    group_deadline_s=600,
    now_s=1000,
    store_outage="",
    trainer_silent_s=1.0,
    sample_reason="",
    blockers=(),
    replicas=(R3,),
    evaluation="",
    quiet_s=0.0,
)


def group(n: int, state: State, **more: Any) -> Entry:
    begin = NOT_BEGUN if state is State.PENDING else 39
    made = Entry(f"d{n}", state, Kind.TRAIN, n, n, 2, "00", version_begin=begin, attempt=1, replica="r3", granted_ms=900_000)
    return replace(made, **more)


def view_of(*entries: Entry, **run: Any) -> View:
    occupancy = {state.value: sum(e.state is state and e.kind is not Kind.VALIDATION for e in entries) for state in State}
    return View(1, replace(RUN, **run), {e.uid: e for e in entries}, occupancy)


def running(*numbers: int, **more: Any) -> list[Entry]:
    return [group(n, State.RUNNING, **more) for n in numbers]


def finished(*numbers: int) -> list[Entry]:
    return [group(n, State.FINISHED, marks="11") for n in numbers]


def pending(*numbers: int) -> list[Entry]:
    return [group(n, State.PENDING) for n in numbers]


WAITS_41 = "step 41 waits for 3 of 4 groups"


@pytest.mark.parametrize(
    ("view", "facts", "says"),
    [
        pytest.param(
            view_of(*finished(0), *running(1, 2), *pending(3)),
            {"sample_reason": WAITS_41, "blockers": ("d1", "d2")},
            f"{WAITS_41}; 2 are on replica r3 (oldest d1, attempt 1, 2 of 2 answers owed), last heard 41 s ago; lease ends in 19 s, "
            "group deadline in 500 s; 1 wait for a replica (oldest d3, attempt 1, 2 of 2 answers owed)",
            id="groups on a silent replica",
        ),
        pytest.param(
            view_of(*finished(0)),
            {"sample_reason": WAITS_41},
            f"{WAITS_41}; 3 have not entered the window",
            id="groups that have not entered",
        ),
        pytest.param(
            view_of(*pending(0)),
            {"replicas": (replace(R3, replica_id="r1", held=Weights(2, 35)),)},
            "replica r1 is waiting for weights v40, holds v35 of an earlier trainer",
            id="weights of an earlier trainer",
        ),
        pytest.param(
            view_of(*pending(0)),
            {"replicas": tuple(replace(R3, replica_id=name, held=Weights()) for name in ("r1", "r2"))},
            "replicas r1, r2 are waiting for weights v40, hold none",
            id="no weights yet",
        ),
        pytest.param(
            view_of(*running(*range(8), version_begin=38), *pending(9), committed=40),
            {"replicas": (replace(R3, replica_id="r1", held=Weights(3, 37)),)},
            "replica r1 is waiting for weights v40, holds v37",
            id="weights too old for every prompt that waits",
        ),
        pytest.param(view_of(*pending(0)), {"replicas": ()}, "no replica is there", id="no replica"),
        pytest.param(
            view_of(*pending(0)), {"replicas": (replace(R3, is_gone=True),)}, "no replica is there; gone: r3", id="all replicas gone"
        ),
        pytest.param(view_of(trainer_epoch=0), {}, "no trainer has opened the run yet: nothing enters the window", id="no trainer"),
        pytest.param(
            view_of(*finished(0)),
            {"trainer_silent_s": None},
            "trainer 3 at t:1 has not been heard since the scheduler started",
            id="trainer away since the scheduler's start",
        ),
        pytest.param(
            view_of(*finished(0, 1, 2, 3)),
            {"trainer_silent_s": 75.0},
            "trainer 3 at t:1 has asked for nothing for 75 s",
            id="trainer silent",
        ),
        pytest.param(
            view_of(*(group(n, State.CONSUMED, step=41, place=n) for n in range(4))),
            {"trainer_silent_s": 75.0},
            "the trainer has had the 4 groups of step 41 for 75 s",
            id="trainer at work, or stuck",
        ),
        pytest.param(
            view_of(*running(0), pause_reason="lunch"),
            {},
            "paused: lunch; no lease is granted until resume; 1 groups given out before go on",
            id="paused with work under way",
        ),
        pytest.param(view_of(*pending(0), pause_reason="lunch"), {}, "paused: lunch; no lease is granted until resume", id="paused"),
        pytest.param(
            view_of(*pending(0)),
            {"store_outage": "Redis at h:1 does not answer; waited for 7 s"},
            "Redis at h:1 does not answer; waited for 7 s: nothing can move until then",
            id="store away",
        ),
        pytest.param(
            view_of(*pending(0)),
            {"evaluation": "evaluation s40 of v40: 17 of 256 prompts open"},
            "evaluation s40 of v40: 17 of 256 prompts open",
            id="evaluation running",
        ),
        pytest.param(
            view_of(*running(*range(12))),
            {},
            "window full: 12/12 and none is finished; 12 are on replica r3 (oldest d0, attempt 1, 2 of 2 answers owed), "
            "last heard 41 s ago; lease ends in 19 s, group deadline in 500 s",
            id="window full with nothing finished",
        ),
        pytest.param(view_of(*finished(*range(12))), {}, "window full: 12/12", id="window full"),
        pytest.param(view_of(*pending(*range(13))), {}, "window overfull: 13/12; nothing enters until 1 are trained", id="window overfull"),
        pytest.param(
            view_of(*pending(0, 1, 2, 3), committed=99),
            {},
            "nothing more enters: the last 1 steps need only the 4 prompts that are open",
            id="data exhausted",
        ),
        pytest.param(
            view_of(*pending(0), group(1, State.PENDING, reason="it broke"), num_failed=3),
            {},
            "1 prompts are tried again, 3 have failed for good: d1: it broke",
            id="answers that fail",
        ),
        pytest.param(
            view_of(committed=100, checkpoint=90), {}, "all 100 steps are trained; waiting for the last checkpoint", id="last checkpoint"
        ),
        pytest.param(view_of(committed=100, checkpoint=100), {}, "the run is done: 100 steps", id="done"),
    ],
)
def test_each_blocker_is_named(view: View, facts: dict[str, Any], says: str) -> None:
    assert says in explain(view, replace(FACTS, **facts))


def test_the_store_comes_first_then_the_pause_then_the_trainer() -> None:
    reasons = explain(view_of(*pending(0), pause_reason="lunch"), replace(FACTS, store_outage="away", trainer_silent_s=None, replicas=()))
    assert [reason.split()[0].rstrip(":") for reason in reasons] == ["away", "paused", "trainer", "no"]


def test_a_run_that_flows_has_nothing_to_explain() -> None:
    assert explain(view_of(*running(0), *finished(1)), FACTS) == []


@pytest.mark.parametrize(
    ("view", "facts", "moves"),
    [
        (view_of(*running(0)), {"quiet_s": 9.0}, True),
        (view_of(*running(0)), {"quiet_s": 11.0}, False),
        (view_of(*pending(0), pause_reason="lunch"), {}, False),
        (view_of(*running(0), pause_reason="lunch"), {}, True),
        (view_of(*running(0)), {"store_outage": "away"}, False),
        (view_of(committed=100), {}, False),
    ],
)
def test_a_run_moves_while_work_is_under_way_and_was_heard_of(view: View, facts: dict[str, Any], moves: bool) -> None:
    assert is_moving(view, replace(FACTS, **facts)) is moves
