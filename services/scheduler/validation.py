"""What an evaluation says. Pure: expected counts and sessions in, numbers out.

A session that failed writes nothing, so a mean over what was written forgets it: of four sessions one fails, three are
right, and the survivors say 1.0. Here the base of every accuracy is what was *submitted*:

    per prompt (4 expected)         acc/mean@4   acc_success_only/mean@3   acc/best@4   acc/maj@4   failure_rate
    right right right  failed             0.75                       1.0          1.0         1.0           0.25
    failed failed failed failed           0.0                  (no value)         0.0         0.0           1.0

    metric                       over                                               missing or failed sessions
    acc/mean@n best@n maj@n      every expected prompt of sources that report acc   acc = 0, abstained
    acc_success_only/mean@k      prompts with a survivor that has an acc            left out (what used to be reported)
    acc_failure_gap              acc_success_only/mean@k - acc/mean@n
    failure_rate num_sessions num_failed   every expected session                   counted
    reward/mean response_tokens/mean <extra>/mean     surviving sessions            left out: nothing is invented

Each appears once per data source as "<data_source>/<metric>" and once over all sources without prefix. Prompts weigh
equally. n is the largest group size, k the largest number of survivors of one prompt; where group sizes are mixed, each
prompt is judged over its own size and only the label is the largest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from stretto.rewards import as_prediction

ACCURACY = "acc"
"""The extra that says how right an answer is, 0..1."""
_MEAN_PREFIX = f"{ACCURACY}/mean@"


@dataclass(frozen=True, slots=True)
class Session:
    """The end of one validation session."""

    data_source: str
    prompt_uid: str
    index: int
    """0 .. expected - 1."""
    reward: float = 0.0
    extras: Mapping[str, float] = field(default_factory=dict[str, float])
    """What else the reward function reported, "acc" among it."""
    prediction: object = None
    """The parsed answer; None, or a list with a None in it, abstains."""
    failed: bool = False
    """No answer or no score; its other fields mean nothing."""
    num_tokens: int = 0
    """Length of the response."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One expected prompt and what came back, ordered by index."""

    size: int
    survivors: tuple[Session, ...]

    def acc_known(self) -> list[float]:
        return [acc for s in self.survivors if (acc := _acc(s)) is not None]

    def acc_mean(self) -> float:
        return math.fsum(self.acc_known()) / self.size

    def acc_best(self) -> float:
        return max(self.acc_known(), default=0.0)

    def acc_majority(self) -> float:
        """acc of the prediction with most votes; equal votes: of the one that voted first. Nobody voted: 0."""
        votes: dict[str, list[float]] = {}
        for session in self.survivors:
            prediction = as_prediction(session.prediction)
            if prediction is not None:  # an abstention is no candidate, so it can never win
                votes.setdefault(prediction, []).append(_acc(session) or 0.0)
        winner = max(votes.values(), key=len, default=[0.0])
        return _mean(winner)


@dataclass(frozen=True, slots=True)
class _Source:
    """The prompts of one data source."""

    prompts: Sequence[_Prompt]

    @property
    def survivors(self) -> Iterable[Session]:
        return chain.from_iterable(p.survivors for p in self.prompts)

    @property
    def is_silent(self) -> bool:
        """Nothing came back: what it would have reported is unknown."""
        return not any(p.survivors for p in self.prompts)

    @property
    def reports_acc(self) -> bool:
        return any(_acc(s) is not None for s in self.survivors)

    @property
    def reports_votes(self) -> bool:
        return any(as_prediction(s.prediction) is not None for s in self.survivors)


def evaluate(expected: Mapping[tuple[str, str], int], sessions: Iterable[Session]) -> dict[str, float]:
    """All metrics of one evaluation, named as in the module's table.

    `expected`: sessions submitted per (data_source, prompt uid), fixed when the evaluation was submitted. Both ids are
    compared as text, so the same prompt id in two sources never mixes. The first end of an index counts; sessions that
    nobody expected are not judged but counted in "num_unexpected". Raises ValueError for an expected count below 1.

    A source from which nothing came back counts as 0 wherever acc is reported at all, as all sources share one reward.
    """
    sources, num_unexpected = _sort(expected, sessions)
    live = [s for s in sources.values() if not s.is_silent]
    silent_is_wrong = not live or any(s.reports_acc for s in live)
    judged = {name: s for name, s in sources.items() if (silent_is_wrong if s.is_silent else s.reports_acc)}
    voting = {name for name, s in judged.items() if s.is_silent or s.reports_votes}

    metrics: dict[str, float] = {}
    for name, source in sources.items():
        values = _sessions(source.prompts)
        if name in judged:
            values |= _accuracy(source.prompts, with_votes=name in voting)
        metrics |= {f"{name}/{key}": value for key, value in values.items()}
    everything = [p for s in sources.values() for p in s.prompts]
    metrics |= _sessions(everything)
    # One base for mean, best and maj: over all sources maj is only reported where every judged source votes.
    metrics |= _accuracy([p for s in judged.values() for p in s.prompts], with_votes=len(voting) == len(judged))
    if num_unexpected:
        metrics["num_unexpected"] = float(num_unexpected)
    return metrics


def accuracy(metrics: Mapping[str, float]) -> float | None:
    """acc/mean@n over all sources; None when no source reports acc."""
    return next((value for key, value in metrics.items() if key.startswith(_MEAN_PREFIX) and key[len(_MEAN_PREFIX) :].isdigit()), None)


def _sort(expected: Mapping[tuple[str, str], int], sessions: Iterable[Session]) -> tuple[dict[str, _Source], int]:
    """Sources in order of their first prompt, and how many sessions belong to no expected place."""
    sizes = {(str(source), str(uid)): size for (source, uid), size in expected.items()}
    for key, size in sizes.items():
        if size < 1:
            raise ValueError(f"prompt {key} expects {size} sessions; it must be at least 1")
    ends: dict[tuple[str, str], dict[int, Session]] = {key: {} for key in sizes}
    num_unexpected = 0
    for session in sessions:
        key = (str(session.data_source), str(session.prompt_uid))
        if key not in sizes or not 0 <= session.index < sizes[key] or session.index in ends[key]:
            num_unexpected += 1
        else:
            ends[key][session.index] = session
    grouped: dict[str, list[_Prompt]] = {}
    for (source, uid), size in sizes.items():
        came = ends[source, uid]
        survivors = tuple(came[i] for i in sorted(came) if not came[i].failed)
        grouped.setdefault(source, []).append(_Prompt(size, survivors))
    return {name: _Source(prompts) for name, prompts in grouped.items()}, num_unexpected


def _accuracy(prompts: Sequence[_Prompt], *, with_votes: bool) -> dict[str, float]:
    """What is judged over the submitted base."""
    if not prompts:
        return {}
    n = max(p.size for p in prompts)
    mean = _mean([p.acc_mean() for p in prompts])
    values = {f"{_MEAN_PREFIX}{n}": mean, f"{ACCURACY}/best@{n}": _mean([p.acc_best() for p in prompts])}
    if with_votes:
        values[f"{ACCURACY}/maj@{n}"] = _mean([p.acc_majority() for p in prompts])
    survived = [known for p in prompts if (known := p.acc_known())]
    if survived:
        success_only = _mean([_mean(known) for known in survived])
        values[f"{ACCURACY}_success_only/mean@{max(map(len, survived))}"] = success_only
        values[f"{ACCURACY}_failure_gap"] = success_only - mean
    return values


def _sessions(prompts: Sequence[_Prompt]) -> dict[str, float]:
    """What is counted, and the means over survivors that are never filled."""
    if not prompts:
        return {}
    survivors = [s for p in prompts for s in p.survivors]
    num_sessions = sum(p.size for p in prompts)
    num_failed = num_sessions - len(survivors)
    values = {"num_sessions": float(num_sessions), "num_failed": float(num_failed), "failure_rate": num_failed / num_sessions}
    columns: dict[str, list[float]] = {}
    for session in survivors:
        for name, value in session.extras.items():
            columns.setdefault(name, []).append(value)
    columns.pop(ACCURACY, None)
    columns |= {"reward": [s.reward for s in survivors], "response_tokens": [float(s.num_tokens) for s in survivors]}
    for name, column in columns.items():
        finite = [value for value in column if math.isfinite(value)]
        if finite:
            values[f"{name}/mean"] = _mean(finite)
    return values


def _acc(session: Session) -> float | None:
    """None when the session reports none, or one that is no number."""
    acc = session.extras.get(ACCURACY)
    return float(acc) if acc is not None and math.isfinite(acc) else None


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
