"""The book of leases: what is asked of the engine, what is owed, what is reported and what is given back."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.engine import Completion, Finish
from services.rollout.groups import LeaseBook, mark_failed, prompts_wanted, session_id, trajectory_of
from stretto.v1.scheduler_pb2 import Lease
from stretto.v1.types_pb2 import FINISH_REASON_FAILED, FINISH_REASON_STOP, Prompt, SamplingParams, Trajectory, VersionSpan


def lease(uid: str = "d0", n: int = 4, attempt: int = 1, missing: list[int] | None = None, **fields: object) -> Lease:
    prompt = Prompt(
        uid=uid,
        group_size=n,
        token_ids=np.array([5, 6, 7], "<i4").tobytes(),
        extra_json='{"level": 3}',
        sampling=SamplingParams(temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=12, stop_token_ids=[9], seed=100),
    )
    return Lease(prompt=prompt, attempt=attempt, missing=range(n) if missing is None else missing, **fields)  # pyright: ignore


def completion(
    uid: str = "d0", index: int = 0, tokens: int = 3, finish: Finish = "stop", spans: list[tuple[int, int]] | None = None
) -> Completion:
    ids, logprobs = np.arange(tokens, dtype=np.int32), -np.arange(tokens, dtype=np.float32)
    return Completion(session_id(uid, index), ids, logprobs, spans or [(1, tokens)], finish, "no room" if finish == "failed" else "")


def partial(index: int, tokens: int, version: int) -> Trajectory:
    so_far = completion(index=index, tokens=tokens, finish="aborted", spans=[(version, tokens)])
    return trajectory_of(so_far, "r-other", 1.0)


def end(book: LeaseBook, c: Completion) -> Trajectory:
    ended = book.end(c, now_s=2.0)
    assert ended is not None
    return ended.trajectory


def test_a_lease_becomes_one_request_per_missing_session_with_the_sampling_of_its_prompt() -> None:
    begun = LeaseBook("r1").begin(lease(missing=[1, 3]), now_s=1.0)
    assert [r.id for r in begun.requests] == ["d0/1", "d0/3"]
    r = begun.requests[0]
    assert (list(r.prompt), r.max_new_tokens, r.temperature, r.top_p, r.top_k) == ([5, 6, 7], 12, 0.7, 0.9, 5)
    assert r.stop_token_ids == {9}


def test_attempts_of_a_group_draw_from_different_streams() -> None:
    first, second = (LeaseBook("r1").begin(lease(attempt=a), 1.0).requests[0].seed for a in (1, 2))
    assert first != second
    assert 0 <= second < 2**63


def test_c11_c12_a_partial_answer_is_continued_with_its_own_tokens_logprobs_and_versions() -> None:
    """C11, C12: the old tokens count towards the budget, which stays the whole answer's."""
    begun = LeaseBook("r1").begin(lease(missing=[2, 3], partials=[partial(2, tokens=5, version=7)]), now_s=1.0)
    continued, fresh = begun.requests
    assert continued.prefix_tokens == [0, 1, 2, 3, 4]
    assert continued.prefix_logprobs == [0.0, -1.0, -2.0, -3.0, -4.0]
    assert continued.prefix_spans == [(7, 5)]
    assert continued.max_new_tokens == 12
    assert fresh.prefix_tokens == []


def test_a_completion_travels_with_its_tokens_logprobs_spans_and_reason() -> None:
    book = LeaseBook("r1")
    book.begin(lease(), now_s=1.5)
    t = end(book, completion(index=2, tokens=5, spans=[(3, 2), (4, 3)]))
    assert np.frombuffer(t.token_ids, "<i4").tolist() == [0, 1, 2, 3, 4]
    assert np.frombuffer(t.logprobs, "<f4").tolist() == [0, -1, -2, -3, -4]
    assert list(t.spans) == [VersionSpan(version=3, num_tokens=2), VersionSpan(version=4, num_tokens=3)]
    assert (t.prompt_uid, t.index, t.finish_reason, t.replica_id, t.generation_s) == ("d0", 2, FINISH_REASON_STOP, "r1", 0.5)


def test_a_lease_is_forgotten_when_its_last_session_is_acknowledged() -> None:
    book = LeaseBook("r1")
    book.begin(lease(n=2), now_s=0)
    for index in (1, 0):
        book.queue(end(book, completion(index=index)))
        assert book.attempts() == {"d0": 1}
        assert book.acknowledge(book.reports(10, 1 << 20), []) == []
    assert book.attempts() == {}
    assert (book.num_generating, book.num_ended, book.num_queued) == (0, 0, 0)


def test_a_report_stays_queued_until_it_is_acknowledged() -> None:
    book = LeaseBook("r1")
    book.begin(lease(), now_s=0)
    book.queue(end(book, completion()))
    assert book.reports(10, 1 << 20) == book.reports(10, 1 << 20) != []


def test_reports_are_cut_by_number_and_by_bytes_but_never_empty() -> None:
    book = LeaseBook("r1")
    book.begin(lease(n=4), now_s=0)
    for index in range(4):
        book.queue(end(book, completion(index=index, tokens=100)))
    assert [r.trajectory.index for r in book.reports(3, 1 << 20)] == [0, 1, 2]
    assert len(book.reports(10, 1700)) == 2
    assert len(book.reports(10, 1)) == 1


def test_c15_a_failed_generation_fails_one_session_and_needs_no_score() -> None:
    """C15."""
    book = LeaseBook("r1")
    book.begin(lease(), now_s=0)
    assert book.end(completion(index=1, finish="failed"), now_s=1) is None
    report = book.reports(10, 1 << 20)[0].trajectory
    assert (report.finish_reason, report.error, report.token_ids) == (FINISH_REASON_FAILED, "no room", b"")
    assert book.num_generating == 3


def test_c14_a_session_of_a_lost_lease_is_aborted_and_its_late_score_is_thrown_away() -> None:
    """C14: nothing waits for a judge whose answer nobody wants."""
    book = LeaseBook("r1")
    book.begin(lease(), now_s=0)
    scoring = end(book, completion(index=0))
    assert book.wants(scoring)
    assert book.lose(["d0"], book.attempts()) == ["d0/1", "d0/2", "d0/3"]
    assert not book.wants(scoring)
    book.queue(scoring)
    assert book.reports(10, 1 << 20) == []
    assert book.end(completion(index=1), now_s=1) is None
    assert (book.num_generating, book.num_ended) == (0, 0)


def test_a_lease_granted_while_the_scheduler_still_answered_about_the_old_one_is_kept() -> None:
    book = LeaseBook("r1")
    book.begin(lease(attempt=1), now_s=0)
    known = book.attempts()
    book.begin(lease(attempt=2), now_s=1)
    assert book.lose(["d0"], known) == []
    assert book.attempts() == {"d0": 2}


def test_a_prompt_leased_again_adopts_what_is_being_worked_on() -> None:
    book = LeaseBook("r1")
    book.begin(lease(n=4, missing=[0, 1, 2]), now_s=0)
    book.queue(end(book, completion(index=0)))
    begun = book.begin(lease(n=4, attempt=2, missing=[0, 2, 3]), now_s=5)
    assert [r.id for r in begun.requests] == ["d0/3"]
    assert begun.aborts == ["d0/1"]
    assert [(r.attempt, r.trajectory.index) for r in book.reports(10, 1 << 20)] == [(2, 0)]
    assert book.num_generating == 2


def test_a_report_refused_under_an_old_attempt_is_sent_again_under_the_new_one() -> None:
    book = LeaseBook("r1")
    book.begin(lease(n=2), now_s=0)
    book.queue(end(book, completion(index=0)))
    sent = book.reports(10, 1 << 20)
    book.begin(lease(n=2, attempt=2), now_s=1)
    assert book.acknowledge(sent, ["d0"]) == []
    assert [(r.attempt, r.trajectory.index) for r in book.reports(10, 1 << 20)] == [(2, 0)]


def test_giving_back_returns_every_lease_with_its_partial_answers() -> None:
    book = LeaseBook("r1")
    book.begin(lease("d0", n=2), now_s=0)
    book.begin(lease("d1", n=2, attempt=3), now_s=0)
    for uid, index, tokens in (("d0", 0, 4), ("d0", 1, 0), ("d1", 0, 0)):
        assert book.end(completion(uid, index, tokens, "aborted"), now_s=1) is None
    returned = {r.prompt_uid: r for r in book.give_back()}
    assert [(t.index, len(t.token_ids) // 4) for t in returned["d0"].partials] == [(0, 4)]
    assert (returned["d1"].attempt, list(returned["d1"].partials)) == (3, [])
    assert book.attempts() == {}
    assert book.num_generating == 0


def test_work_is_pinned_only_while_a_pinned_session_is_being_generated() -> None:
    book = LeaseBook("r1")
    book.begin(lease("d0"), now_s=0)
    assert not book.is_pinned
    book.begin(lease("v1-0", n=1, pin_version=True), now_s=0)
    assert book.is_pinned
    end(book, completion("v1-0"))
    assert not book.is_pinned


def test_a_failed_session_carries_no_tokens_and_no_reward() -> None:
    t = Trajectory(prompt_uid="d0", index=1, token_ids=b"1234", reward=1.0, prediction="4", reward_extras={"acc": 1.0})
    assert mark_failed(t, "late") == Trajectory(prompt_uid="d0", index=1, finish_reason=FINISH_REASON_FAILED, error="late")


def test_capacity_is_slots_and_prefetch_and_is_asked_for_in_bites() -> None:
    ask = {"slots": 64, "prefetch_groups": 8, "group_size": 8, "num_ended": 0}
    assert prompts_wanted(**ask, num_generating=0) == 16
    assert prompts_wanted(**ask, num_generating=96) == 4
    assert prompts_wanted(**ask, num_generating=104) == 0  # 3 groups free, less than a bite, and the slots are full
    assert prompts_wanted(**ask, num_generating=128) == 0
    assert prompts_wanted(slots=8, prefetch_groups=0, group_size=8, num_generating=1, num_ended=0) == 0
    assert prompts_wanted(slots=8, prefetch_groups=0, group_size=8, num_generating=0, num_ended=0) == 1


def test_nothing_more_is_leased_while_ends_pile_up_unscored() -> None:
    assert prompts_wanted(slots=64, prefetch_groups=8, group_size=8, num_generating=0, num_ended=512) == 0


MOVES = ("lease", "end", "fail", "abort", "score", "acknowledge", "refuse", "lose", "give back")


class _Replica:
    """Moves a book as the worker does, in any order."""

    def __init__(self) -> None:
        self.book = LeaseBook("r1")
        self.attempts = {"d0": 0, "d1": 0}
        self.scoring: list[Trajectory] = []

    def move(self, what: str, k: int) -> None:
        uid = f"d{k % 2}"
        if what in ("end", "fail", "abort"):
            self._end(what, uid, k)
        elif what in ("lease", "score"):
            self._work(what, uid, k)
        else:
            self._hear(what, uid)

    def _end(self, what: str, uid: str, k: int) -> None:
        finish: dict[str, Finish] = {"end": "stop", "fail": "failed", "abort": "aborted"}
        if (ended := self.book.end(completion(uid, k, finish=finish[what]), now_s=0)) is not None:
            self.scoring.append(ended.trajectory)

    def _work(self, what: str, uid: str, k: int) -> None:
        if what == "lease":
            self.attempts[uid] += 1
            self.book.begin(lease(uid, n=4, attempt=self.attempts[uid], missing=[k, (k + 1) % 4]), now_s=0)
        elif self.scoring:
            self.book.queue(self.scoring.pop())

    def _hear(self, what: str, uid: str) -> None:
        if what == "lose":
            self.book.lose([uid], self.book.attempts())
        elif what == "give back":
            self.book.give_back()
        else:
            self.book.acknowledge(self.book.reports(2, 1 << 20), [uid] if what == "refuse" else [])


@given(st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 3))))
def test_the_counters_equal_the_sessions_whatever_happens(moves: list[tuple[str, int]]) -> None:
    replica = _Replica()
    book = replica.book
    for what, k in moves:
        replica.move(what, k)
        owed = [t for held in book._held.values() for t in held.owed.values()]
        assert book.num_generating == sum(t is None for t in owed)
        assert book.num_ended == sum(t is not None for t in owed)
        assert book.num_queued <= book.num_ended
        for report in book.reports(100, 1 << 20):
            t = report.trajectory
            assert book._held[t.prompt_uid].owed[t.index] == t
