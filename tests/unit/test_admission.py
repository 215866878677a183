"""The window rule and the lag bound, without a store."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler import admission, sampling
from services.scheduler.admission import Grant, Refused
from services.scheduler.groups import OPEN_STATES, Entry, Kind, RunState, State, View, Weights


def entry(n: int, state: State = State.PENDING, begin: int = -1, kind: Kind = Kind.TRAIN) -> Entry:
    return Entry(
        uid=f"{'v' if kind is Kind.VALIDATION else 'd'}{n}",
        state=state,
        kind=kind,
        seq=n,
        ordinal=n,
        group_size=2,
        marks="00",
        version_begin=begin,
    )


def view(*entries: Entry, committed: int = 0, total: int = 100, window: int = 12, pause: str = "") -> View:
    counts = {state.value: sum(e.state is state for e in entries if e.kind is not Kind.VALIDATION) for state in State}
    run = RunState(window=window, committed=committed, total_steps=total, trainer_epoch=1, pause_reason=pause)
    return View(rev=1, run=run, entries={e.uid: e for e in entries}, occupancy=counts)


def granted(v: View, held: Weights, wanted: int = 99, **kwargs: int) -> list[str]:
    choice = admission.grant(v, held, wanted=wanted, batch_groups=4, max_lag=2, **kwargs)
    assert isinstance(choice, Grant), choice
    return [e.uid for e in choice.entries]


def refusal(v: View, held: Weights) -> str:
    choice = admission.grant(v, held, wanted=9, batch_groups=4, max_lag=2)
    assert isinstance(choice, Refused), choice
    return choice.reason


@pytest.mark.parametrize(("occupied", "enter"), [(0, 12), (6, 6), (12, 0), (13, 0)])
def test_i4_admission_is_the_window_less_what_occupies_it(occupied: int, enter: int) -> None:
    assert admission.admit(12, occupied) == enter


@pytest.mark.parametrize(("committed", "window"), [(0, 12), (7, 12), (8, 8), (9, 4), (10, 0), (11, 0)])
def test_the_window_shrinks_to_what_the_last_steps_still_train(committed: int, window: int) -> None:
    assert admission.effective_window(12, 10, committed, 4) == window


def test_begun_groups_go_first_and_the_oldest_of_them_before_the_others() -> None:
    v = view(entry(1), entry(2, begin=1), entry(3, begin=0), entry(4, begin=0), committed=1)
    assert granted(v, Weights(1, 1)) == ["d3", "d4", "d2", "d1"]


def test_validation_goes_before_training_but_only_on_new_enough_weights() -> None:
    v = view(entry(1), entry(7, kind=Kind.VALIDATION), committed=3)
    assert granted(v, Weights(1, 3), evaluation_version=3) == ["v7", "d1"]
    assert granted(v, Weights(1, 2), evaluation_version=3) == ["d1"]


def test_waiting_replicas_share_what_there_is() -> None:
    v = view(*(entry(n) for n in range(9)))
    assert len(granted(v, Weights(1, 0), waiting=2)) == 5
    assert len(granted(v, Weights(1, 0), waiting=20)) == 1


def test_a_refusal_names_its_reason() -> None:
    assert refusal(view(entry(1), pause="lunch"), Weights(1, 0)) == "paused: lunch"
    assert refusal(view(entry(1), committed=37), Weights(0, 0)) == "waiting for weights v37: this replica holds none"
    assert refusal(view(entry(1), committed=37), Weights(1, 0)) == "waiting for weights v37: this replica holds v0"
    assert refusal(view(entry(1), committed=3), Weights(7, 4)) == "waiting for weights v3: this replica holds v4 of an earlier trainer"
    assert refusal(view(*(entry(n, State.RUNNING, 0) for n in range(12))), Weights(1, 0)) == "window full: 12/12"
    assert refusal(view(committed=100), Weights(1, 100)) == "run finished"


def test_a_replica_that_is_behind_may_begin_only_what_can_still_be_trained_in_time() -> None:
    old = [entry(n, State.RUNNING, begin=0) for n in range(3)]
    v = view(*old, *(entry(n) for n in range(10, 19)), committed=2)
    # Begun by v0 = due at step 3, which trains 4 groups: 3 are out, so 1 more may begin.
    assert granted(v, Weights(1, 0)) == ["d10"]
    assert len(granted(v, Weights(1, 1))) == 5
    assert len(granted(v, Weights(1, 2))) == 9


def test_i8_older_weights_may_go_on_with_a_begun_group_only_where_its_older_label_can_be_trained_in_time() -> None:
    old = [entry(n, State.RUNNING, begin=0) for n in range(3)]
    v = view(*old, entry(5, begin=4), entry(6, begin=4), committed=0)
    assert granted(v, Weights(1, 0)) == ["d5", "d6"]
    v = view(*old, entry(3, State.RUNNING, begin=0), entry(4, begin=4), entry(5, begin=5), committed=2)
    assert refusal(v, Weights(1, 0)) == "2 groups wait for weights v4, which began them: this replica holds v0"
    assert granted(v, Weights(1, 4)) == ["d4", "d5"]


@given(st.lists(st.integers(1, 8), max_size=20), st.integers(0, 6), st.integers(1, 5), st.integers(0, 3), st.integers(0, 4))
def test_begin_room_is_the_greatest_number_that_stays_feasible(
    dues: list[int], version: int, batch: int, max_lag: int, committed: int
) -> None:
    room = admission.begin_room(version, dues, committed=committed, batch_groups=batch, max_lag=max_lag)
    due = version + max_lag + 1
    feasible = admission.is_feasible(dues, committed, batch)
    if feasible:
        assert admission.is_feasible([*dues, *[due] * room], committed, batch)
        assert not admission.is_feasible([*dues, *[due] * (room + 1)], committed, batch)


@dataclass
class History:
    """A run in memory, driven by random choices and the real decisions."""

    batch: int
    max_lag: int
    stragglers: str
    window: int
    committed: int = 0
    seq: int = 0
    entries: dict[str, Entry] = field(default_factory=dict[str, Entry])
    taken: dict[int, list[Entry]] = field(default_factory=dict[int, list[Entry]])
    checkpoint: int = 0
    lag_max: int = 0
    drawn: dict[str, int] = field(default_factory=dict[str, int])
    """uid -> least version that has drawn a token of it."""

    def view(self) -> View:
        counts = {s.value: sum(e.state is s for e in self.entries.values()) for s in State}
        return View(1, RunState(window=self.window, committed=self.committed, total_steps=10**6, trainer_epoch=1), self.entries, counts)

    def put(self, *entries: Entry) -> None:
        self.entries |= {e.uid: e for e in entries}

    def admit(self) -> None:
        for _ in range(admission.admit(self.window, len(self.entries))):
            self.seq += 1
            self.put(entry(self.seq))

    def lease(self, behind: int, wanted: int) -> None:
        choice = admission.grant(
            self.view(), Weights(1, max(0, self.committed - behind)), wanted=wanted, batch_groups=self.batch, max_lag=self.max_lag
        )
        if isinstance(choice, Grant):
            for e in choice.entries:
                label = min(e.version_begin, choice.version) if e.is_begun else choice.version
                self.put(replace(e, state=State.RUNNING, version_begin=label))
                self.drawn[e.uid] = min(self.drawn.get(e.uid, label), choice.version)

    def end(self, pick: int, state: State) -> None:
        running = [e for e in self.entries.values() if e.state is State.RUNNING]
        if running:
            self.put(replace(running[pick % len(running)], state=state))

    def train(self) -> None:
        step = self.committed + 1
        stragglers = "drop" if self.stragglers == "drop" else "wait"
        outcome = sampling.plan(self.entries.values(), step=step, batch_groups=self.batch, max_lag=self.max_lag, stragglers=stragglers)
        if isinstance(outcome, sampling.Drop):
            assert self.stragglers == "drop", "nothing is ever lost under policy wait"
            for gone in outcome.entries:
                assert gone.state is not State.FINISHED, "only stragglers are dropped"
                del self.entries[gone.uid]
        elif isinstance(outcome, sampling.Batch):
            assert len(outcome.entries) == self.batch
            assert all(e.version_begin <= self.drawn[e.uid] for e in outcome.entries), "I8: the label is never younger than a token"
            self.lag_max = max(self.lag_max, *(step - 1 - self.drawn[e.uid] for e in outcome.entries))
            self.taken[step] = [self.entries.pop(e.uid) for e in outcome.entries]
            self.committed = step

    def resume(self, back: int, hands_back: bool) -> None:
        to = max(self.checkpoint, self.committed - back)
        for step in range(to + 1, self.committed + 1):
            self.put(*self.taken.pop(step))
        self.committed = to
        if hands_back:  # replicas that have taken the older weights; the others finish what they have
            self.put(*(replace(e, state=State.PENDING) for e in self.entries.values() if e.state is State.RUNNING))


ACTS = st.one_of(
    st.tuples(st.just("lease"), st.integers(0, 3), st.integers(1, 6)),
    st.tuples(st.just("finish"), st.integers(0, 50)),
    st.tuples(st.just("lose"), st.integers(0, 50)),
    st.tuples(st.just("train")),
    st.tuples(st.just("resume"), st.integers(0, 6), st.booleans()),
    st.tuples(st.just("save")),
)


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 3), st.integers(0, 3), st.sampled_from(["wait", "drop"]), st.lists(ACTS, max_size=80))
def test_no_group_is_ever_trained_beyond_max_lag_and_no_history_wedges(
    batch: int, max_lag: int, stragglers: str, acts: list[tuple[object, ...]]
) -> None:
    h = History(batch, max_lag, stragglers, window=(max_lag + 1) * batch)
    for act in acts:
        h.admit()
        match act:
            case ("lease", int(behind), int(wanted)):
                h.lease(behind, wanted)
            case ("finish", int(pick)):
                h.end(pick, State.FINISHED)
            case ("lose", int(pick)):
                h.end(pick, State.PENDING)
            case ("resume", int(back), bool(hands_back)):
                h.resume(back, hands_back)
            case ("save",):
                h.checkpoint = h.committed
            case _:
                h.train()
        dues = [e.due(max_lag) for e in h.entries.values() if e.is_begun]
        assert admission.is_feasible(dues, h.committed, batch)
    goal = h.committed + 2
    for _ in range(200):  # with workers that work, two more steps get trained
        if h.committed >= goal:
            break
        h.admit()
        h.lease(0, 99)
        for n in range(len(h.entries)):
            h.end(n, State.FINISHED)
        h.train()
    assert h.committed >= goal
    assert h.lag_max <= max_lag
    assert all(state in State for state in OPEN_STATES)
