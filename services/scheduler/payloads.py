"""What a stored prompt or answer must be for the trainer to read its group. Pure.

I7  payload bytes survive every status change: what cannot be read, or is another's, was changed
I8  no token is older than its group's label
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from google.protobuf.message import DecodeError

from services.scheduler.groups import Entry
from stretto.v1 import types_pb2 as pb

TOKEN_BYTES = 4
"""Of a token id, and of its log-prob."""


def flaw(trajectory: pb.Trajectory) -> str:
    """Why an answer must not be kept: the trainer could not read its group, not now and not after a restart. Empty: it may."""
    if not math.isfinite(trajectory.reward):
        return f"reward is {trajectory.reward}"
    num_spanned = sum(span.num_tokens for span in trajectory.spans)
    if not len(trajectory.token_ids) == len(trajectory.logprobs) == TOKEN_BYTES * num_spanned:
        sizes = f"{len(trajectory.token_ids)} bytes of tokens, {len(trajectory.logprobs)} of log-probs, spans of {num_spanned} tokens"
        return f"{sizes}: the three must agree at {TOKEN_BYTES} bytes a token"
    return ""


def group_of(entry: Entry, prompt: bytes | None, answers: Mapping[str, bytes]) -> pb.Group | str:
    """The whole group, or why the trainer could not read it."""
    group = pb.Group(version_begin=entry.version_begin, attempts=entry.attempt)
    if prompt is None:
        return "its prompt is gone"
    try:
        group.prompt.ParseFromString(prompt)
        for index in range(entry.group_size):
            group.trajectories.add().ParseFromString(answers[str(index)])
    except DecodeError:
        return prompt_flaw(entry.uid, prompt) or next((text for _, text in answer_flaws(entry, answers)), "it does not parse")
    except KeyError as err:
        return f"answer {err.args[0]} is gone"
    found = ((t.index, flaw(t)) for t in group.trajectories if t.finish_reason != pb.FINISH_REASON_FAILED)
    return next((f"answer {index}: {text}" for index, text in found if text), group)


def prompt_flaw(uid: str, payload: bytes) -> str:
    """Why `payload` is not the prompt of `uid`; empty: it is."""
    try:
        prompt = pb.Prompt.FromString(payload)
    except DecodeError:
        return f"its prompt does not parse ({len(payload)} bytes)"
    return "" if prompt.uid == uid else f"its payload is the prompt of {prompt.uid!r}"


def answer_flaws(entry: Entry, answers: Mapping[str, bytes]) -> Iterator[tuple[str, str]]:
    """(invariant, what is wrong) for each stored answer of a group; `answers` as in traj:<uid>."""
    for name, payload in sorted(answers.items()):
        try:
            answer = pb.Trajectory.FromString(payload)
        except DecodeError:
            yield "I7", f"answer {name} does not parse ({len(payload)} bytes)"
            continue
        if (answer.prompt_uid, answer.index) != (entry.uid, int(name.removeprefix("p"))):
            yield "I7", f"answer {name} is that of {answer.prompt_uid}/{answer.index}"
        elif answer.finish_reason != pb.FINISH_REASON_FAILED and (found := flaw(answer)):
            yield "I7", f"answer {name}: {found}"
        oldest = min((span.version for span in answer.spans), default=entry.version_begin)
        if not name.startswith("p") and oldest < entry.version_begin:
            yield "I8", f"answer {name} has tokens of v{oldest}, its label is v{entry.version_begin}"
