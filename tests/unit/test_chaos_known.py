"""The chaos suite's trainer would notice: a group is checked to the byte against what its answers must be."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from stretto.v1.types_pb2 import FINISH_REASON_ABORTED, FINISH_REASON_STOP, Group, Prompt, Trajectory, VersionSpan
from tests.chaos_known import Tokenizer, faults_of, known_answer, known_reward, oldest_version
from tests.fakes import fake_logprob


def answer(uid: str, index: int, versions: tuple[int, int]) -> Trajectory:
    """Begun by the first version, continued by the second after five tokens."""
    tokens = known_answer(uid, index)
    drawn_by = [versions[0]] * 5 + [versions[1]] * (len(tokens) - 5)
    return Trajectory(
        prompt_uid=uid,
        index=index,
        token_ids=np.array(tokens, "<i4").tobytes(),
        logprobs=np.array([fake_logprob(v, i) for i, v in enumerate(drawn_by)], "<f4").tobytes(),
        spans=[VersionSpan(version=versions[0], num_tokens=5), VersionSpan(version=versions[1], num_tokens=len(tokens) - 5)],
        finish_reason=FINISH_REASON_STOP,
        reward=known_reward(response=Tokenizer().decode(tokens))["reward"],
    )


def group() -> Group:
    return Group(
        prompt=Prompt(uid="d7", ordinal=7, group_size=3),
        trajectories=[answer("d7", index, (4, 5)) for index in range(3)],
        version_begin=4,
    )


def test_a_group_that_is_what_it_must_be_has_no_fault() -> None:
    assert list(faults_of(group())) == []
    assert oldest_version(group()) == 4


def swap_answers(g: Group) -> None:
    g.trajectories[0].token_ids, g.trajectories[1].token_ids = g.trajectories[1].token_ids, g.trajectories[0].token_ids


def lose_an_answer(g: Group) -> None:
    del g.trajectories[1]


def repeat_a_token(g: Group) -> None:
    """As a continuation that began one token too early would."""
    t = g.trajectories[2]
    t.token_ids, t.logprobs = t.token_ids[:20] + t.token_ids[16:], t.logprobs[:20] + t.logprobs[16:]
    t.spans[1].num_tokens += 1


def mistake_a_version(g: Group) -> None:
    g.trajectories[0].spans[1].version = 6


def take_anothers_answer(g: Group) -> None:
    g.trajectories[0].CopyFrom(answer("d8", 0, (4, 5)))


def train_half_an_answer(g: Group) -> None:
    g.trajectories[1].finish_reason = FINISH_REASON_ABORTED


def mix_up_rewards(g: Group) -> None:
    g.trajectories[0].reward += 1


def make_it_look_younger(g: Group) -> None:
    g.version_begin = 5


@pytest.mark.parametrize(
    ("tamper", "named"),
    [
        (swap_answers, "d7/0: "),
        (lose_an_answer, "d7: answers [0, 2] of 3"),
        (repeat_a_token, "d7/2: "),
        (mistake_a_version, "d7/0: log-probs do not belong to spans"),
        (take_anothers_answer, "d7/0: "),
        (train_half_an_answer, "d7/1: finish reason"),
        (mix_up_rewards, "d7/0: reward"),
        (make_it_look_younger, "d7: is said to begin on version 5, but has tokens of 4"),
    ],
)
def test_whatever_is_wrong_with_a_group_is_named(tamper: Callable[[Group], None], named: str) -> None:
    tampered = group()
    tamper(tampered)
    assert any(fault.startswith(named) for fault in faults_of(tampered)), list(faults_of(tampered))
