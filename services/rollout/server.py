"""RolloutService: one replica, for people and tools. Check, call, answer."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import numpy as np

from services.rollout.driver import Driver
from services.rollout.engine import Completion, Request
from services.rollout.groups import FINISH_REASONS
from services.rollout.worker import Worker
from stretto.errors import InvalidArgumentError, RefusedError, StrettoError, UnavailableError
from stretto.recipe import Recipe
from stretto.v1 import rollout_pb2 as pb
from stretto.v1 import rollout_pb2_grpc, scheduler_pb2, types_pb2

SERVICE = "stretto.v1.RolloutService"


class Cut:
    """What of a growing answer has been sent already."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._num_tokens = 0
        self._num_chars = 0

    def news(self, so_far: Completion, is_last: bool) -> pb.GenerateResponse:
        """What is new since the last call. A character of which only some bytes are there waits for the others."""
        text: str = self._tokenizer.decode(so_far.tokens.tolist(), skip_special_tokens=True)
        if not is_last:
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")
        message = pb.GenerateResponse(
            token_ids=so_far.tokens[self._num_tokens :].astype("<i4").tobytes(),
            logprobs=so_far.logprobs[self._num_tokens :].astype("<f4").tobytes(),
            spans=_spans_after(so_far.spans, self._num_tokens),
            text=text[self._num_chars :],
        )
        self._num_tokens, self._num_chars = len(so_far.tokens), max(len(text), self._num_chars)
        if is_last:
            message.finish_reason = FINISH_REASONS[so_far.finish]
        return message


def _spans_after(spans: list[tuple[int, int]], num_tokens: int) -> list[types_pb2.VersionSpan]:
    """The spans of the tokens from `num_tokens` on."""
    rest: list[types_pb2.VersionSpan] = []
    end = 0
    for version, length in spans:
        end += length
        if end > num_tokens:
            rest.append(types_pb2.VersionSpan(version=version, num_tokens=min(length, end - num_tokens)))
    return rest


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """See protos/stretto/v1/rollout.proto for the contract of each method."""

    def __init__(self, recipe: Recipe, worker: Worker, driver: Driver, tokenizer: Any, *, engine: str, num_reward_workers: int) -> None:
        self._recipe, self._worker, self._driver, self._tokenizer = recipe, worker, driver, tokenizer
        self._engine, self._num_reward_workers = engine, num_reward_workers

    async def Generate(  # noqa: N802 - the proto's name
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
    ) -> AsyncIterator[pb.GenerateResponse]:
        prompt = self._prompt(request)
        if self._worker.state not in (scheduler_pb2.REPLICA_STATE_RUNNING, scheduler_pb2.REPLICA_STATE_UPDATING):
            raise RefusedError(f"replica {self._worker.link.replica_id} cannot generate now: {self._worker.wait_reason}")
        cut = Cut(self._tokenizer)
        async for part, is_last in self._driver.stream(self._request(prompt, request)):
            if is_last and part.finish in ("failed", "aborted"):
                raise self._failure(part)
            yield cut.news(part, is_last)

    async def GetStatus(  # noqa: N802 - the proto's name
        self,
        request: pb.RolloutServiceGetStatusRequest,
        context: grpc.aio.ServicerContext[pb.RolloutServiceGetStatusRequest, pb.RolloutServiceGetStatusResponse],
    ) -> pb.RolloutServiceGetStatusResponse:
        v, worker = self._driver.vitals, self._worker
        return pb.RolloutServiceGetStatusResponse(
            replica_id=worker.link.replica_id,
            state=worker.state,
            held=worker.held,
            engine=self._engine,
            slots=v.slots,
            running_sequences=v.num_running,
            waiting_sequences=v.num_waiting,
            generated_tokens=v.generated_tokens,
            update_policy=self._recipe.rollout.update_policy,
            wait_reason=worker.wait_reason,
            reward_workers=self._num_reward_workers,
        )

    def _failure(self, ended: Completion) -> StrettoError:
        """Refused by an engine that lives on, or lost with it."""
        if ended.finish == "failed" and self._driver.vitals.is_alive:
            return RefusedError(ended.error)
        return UnavailableError(ended.error or "the replica is going away")

    def _prompt(self, request: pb.GenerateRequest) -> list[int]:
        given = [name for name in ("text", "messages_json", "token_ids") if getattr(request, name)]
        if len(given) != 1:
            raise InvalidArgumentError(f"exactly one of text, messages_json, token_ids must be given; got {given or 'none'}")
        if request.token_ids:
            if len(request.token_ids) % 4:
                raise InvalidArgumentError(f"token_ids: {len(request.token_ids)} bytes are no int32 array")
            return np.frombuffer(request.token_ids, "<i4").tolist()
        if request.text:
            return self._tokenizer.encode(request.text)
        return self._templated(request.messages_json)

    def _templated(self, messages_json: str) -> list[int]:
        try:
            messages = json.loads(messages_json)
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as err:  # noqa: BLE001 - templates raise what they like
            raise InvalidArgumentError(f"messages_json: {type(err).__name__}: {err}") from None
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _request(self, prompt: list[int], request: pb.GenerateRequest) -> Request:
        """Fields that cannot be 0 take the recipe's values; temperature too, unless it was set."""
        s, ours = request.sampling, self._recipe.sampling
        id = uuid.uuid4()
        return Request(
            id=f"generate-{id.hex}/0",
            prompt=prompt,
            max_new_tokens=s.max_new_tokens or ours.max_new_tokens,
            temperature=s.temperature if s.HasField("temperature") else ours.temperature,
            top_p=s.top_p or ours.top_p,
            top_k=s.top_k or ours.top_k,
            stop_token_ids=frozenset(s.stop_token_ids),
            seed=s.seed or id.int % 2**63,
        )
