"""Which groups train next, without a store."""

from __future__ import annotations

from itertools import combinations
from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler import admission, sampling
from services.scheduler.groups import Entry, Kind, State
from services.scheduler.sampling import Batch, Drop, Wait


def group(n: int, begin: int, state: State = State.FINISHED, rewards: tuple[float, float] = (0.0, 1.0)) -> Entry:
    return Entry(
        uid=f"d{n}",
        state=state,
        kind=Kind.TRAIN,
        seq=n,
        ordinal=n,
        group_size=2,
        marks="11",
        version_begin=begin,
        reward_low=rewards[0],
        reward_high=rewards[1],
    )


def plan(
    *entries: Entry, step: int, batch: int = 2, max_lag: int = 1, stragglers: Literal["wait", "drop"] = "wait", filtered: bool = False
) -> Batch | Wait | Drop:
    name: Literal["none", "zero_variance"] = "zero_variance" if filtered else "none"
    return sampling.plan(entries, step=step, batch_groups=batch, max_lag=max_lag, stragglers=stragglers, filter_name=name)


def uids(outcome: Batch | Wait | Drop) -> list[str]:
    return [e.uid for e in (outcome.blockers if isinstance(outcome, Wait) else outcome.entries)]


def test_c10_of_ten_finished_groups_the_eight_oldest_are_taken_in_order() -> None:
    outcome = plan(*(group(n, 0) for n in reversed(range(10))), step=1, batch=8, max_lag=2)
    assert isinstance(outcome, Batch)
    assert uids(outcome) == [f"d{n}" for n in range(8)]


def test_the_earlier_due_goes_before_the_earlier_admitted() -> None:
    assert uids(plan(group(1, 1), group(2, 0), group(3, 1), step=2)) == ["d2", "d1"]


def test_too_few_finished_groups_are_waited_for_by_number_and_name() -> None:
    outcome = plan(group(1, 0), group(2, 0, State.RUNNING), step=1)
    assert outcome == Wait("step 1 waits for 1 of 2 groups", (group(2, 0, State.RUNNING),))


def test_a_straggler_at_its_last_step_is_waited_for_or_dropped_by_policy() -> None:
    straggler = group(0, 0, State.RUNNING)
    entries = (straggler, group(1, 1), group(2, 1), group(3, 1))
    waits = plan(*entries, step=2)
    assert isinstance(waits, Wait)
    assert uids(waits) == ["d0"]
    assert plan(*entries, step=2, stragglers="drop") == Drop((straggler,))


def test_a_straggler_with_steps_left_holds_nobody() -> None:
    assert uids(plan(group(0, 0, State.RUNNING), group(1, 0), group(2, 0), step=1)) == ["d1", "d2"]


def test_what_no_step_can_train_in_time_goes_whatever_the_policy() -> None:
    outcome = plan(group(0, 0), group(1, 0), group(2, 0), step=2)
    assert isinstance(outcome, Drop)
    assert len(outcome.entries) == 1


def test_filtered_groups_are_no_candidates() -> None:
    flat = group(0, 0, rewards=(1.0, 1.0))
    assert uids(plan(flat, group(1, 0), group(2, 0), step=1, filtered=True)) == ["d1", "d2"]
    assert uids(plan(flat, group(1, 0), group(2, 0), step=1)) == ["d0", "d1"]


GROUPS = st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=7)


@given(GROUPS, st.integers(1, 3), st.integers(1, 3))
def test_a_batch_leaves_a_feasible_rest_and_a_wait_means_that_no_batch_does(
    shape: list[tuple[int, bool]], batch: int, max_lag: int
) -> None:
    entries = [group(n, begin, State.FINISHED if is_done else State.RUNNING) for n, (begin, is_done) in enumerate(shape)]
    step = 4
    outcome = plan(*entries, step=step, batch=batch, max_lag=max_lag)
    finished = [e for e in entries if e.state is State.FINISHED]

    def works(chosen: tuple[Entry, ...]) -> bool:
        rest = [e.due(max_lag) for e in entries if e not in chosen]
        return all(e.due(max_lag) >= step for e in chosen) and admission.is_feasible(rest, step, batch)

    if isinstance(outcome, Batch):
        assert works(outcome.entries)
    else:
        assert not any(works(chosen) for chosen in combinations(finished, batch))


@given(GROUPS, st.integers(1, 3), st.integers(1, 3))
def test_a_drop_is_minimal_and_after_it_the_step_proceeds(shape: list[tuple[int, bool]], batch: int, max_lag: int) -> None:
    entries = [group(n, begin, State.FINISHED if is_done else State.RUNNING) for n, (begin, is_done) in enumerate(shape)]
    outcome = plan(*entries, step=4, batch=batch, max_lag=max_lag, stragglers="drop")
    if not isinstance(outcome, Drop):
        return
    number = len(outcome.entries)
    again = plan(*(e for e in entries if e not in outcome.entries), step=4, batch=batch, max_lag=max_lag, stragglers="drop")
    if isinstance(again, Drop):  # first what cannot be trained at all, then the stragglers
        assert plan(*entries, step=4, batch=batch, max_lag=max_lag) == outcome
        return
    for fewer in combinations(entries, number - 1):
        kept = [e for e in entries if e not in fewer]
        assert not isinstance(plan(*kept, step=4, batch=batch, max_lag=max_lag, stragglers="drop"), Batch)
