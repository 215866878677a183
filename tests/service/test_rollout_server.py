"""RolloutService over real gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from services.rollout.server import SERVICE, RolloutServicer
from stretto import recipe as recipes
from stretto import rpc
from stretto.errors import InvalidArgumentError, RefusedError, UnavailableError
from stretto.v1 import rollout_pb2 as pb
from stretto.v1 import rollout_pb2_grpc, scheduler_pb2
from stretto.v1.types_pb2 import FINISH_REASON_STOP, SamplingParams
from tests.rollout_world import GROUP, World, lease, replica
from tests.waits import eventually


class LetterTokenizer:
    """Token 10 is "a", 11 is "b", …; 2 is special."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) - ord("a") + 10 for c in text]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(id - 10 + ord("a")) for id in ids if id != 2)

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "x".join(m["content"] for m in messages)


@asynccontextmanager
async def served(w: World) -> AsyncIterator[Any]:
    """A stub of the replica's own server."""
    recipe = recipes.build({"model": {"make": "word-problems"}, "data": {"make": "word-problems"}, "rollout": {"update_policy": "abort"}})
    servicer = RolloutServicer(recipe, w.worker, w.driver, LetterTokenizer(), engine="fake 1", num_reward_workers=1)
    server = await rpc.serve("127.0.0.1:0", lambda s: rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, s), [SERVICE])
    channel = rpc.connect(server.address)
    try:
        yield rollout_pb2_grpc.RolloutServiceStub(channel)
    finally:
        await channel.close()
        await server.drain(0)


async def _generate(stub: Any, **fields: Any) -> list[pb.GenerateResponse]:
    try:
        return [message async for message in stub.Generate(pb.GenerateRequest(**fields), timeout=10)]
    except grpc.RpcError as err:
        raise rpc.from_rpc_error(err) from None


async def test_generate_streams_tokens_logprobs_versions_and_text_that_add_up() -> None:
    async with replica() as w, served(w) as stub:
        w.engine.answer = lambda _: [10, 11, 12, 13, 2]
        w.engine.hold(2)
        call = stub.Generate(pb.GenerateRequest(text="hi"), timeout=10)
        first = await call.read()
        assert (first.text[:1], first.finish_reason) == ("a", 0)
        await eventually(w.engine.reached.is_set)
        w.source.publish(1, 1)
        await eventually(lambda: w.worker.follower.held == (1, 1))
        w.engine.release()
        parts = [first]
        while isinstance(message := await call.read(), pb.GenerateResponse):
            parts.append(message)
        assert "".join(m.text for m in parts) == "abcd"
        assert np.frombuffer(b"".join(m.token_ids for m in parts), "<i4").tolist() == [10, 11, 12, 13, 2]
        assert len(b"".join(m.logprobs for m in parts)) == 5 * 4
        assert [s.version for m in parts for s in m.spans for _ in range(s.num_tokens)] == [0, 0, 1, 1, 1]
        assert parts[-1].finish_reason == FINISH_REASON_STOP


async def test_text_messages_and_token_ids_reach_the_engine_as_token_ids() -> None:
    async with replica() as w, served(w) as stub:
        await _generate(stub, text="ab")
        await _generate(stub, messages_json='[{"role": "user", "content": "a"}, {"role": "user", "content": "c"}]')
        await _generate(stub, token_ids=np.array([7, 8], "<i4").tobytes())
        assert [list(r.prompt) for r in w.requests] == [[10, 11], [10, 33, 12], [7, 8]]


async def test_unset_sampling_fields_take_the_recipes_values_and_temperature_0_is_a_value() -> None:
    async with replica() as w, served(w) as stub:
        await _generate(stub, text="a")
        await _generate(stub, text="a", sampling=SamplingParams(max_new_tokens=3))
        await _generate(stub, text="a", sampling=SamplingParams(temperature=0, top_k=4))
        assert [(r.max_new_tokens, r.temperature, r.top_p, r.top_k) for r in w.requests] == [(256, 1, 1, 0), (3, 1, 1, 0), (256, 0, 1, 4)]


@pytest.mark.parametrize("fields", [{}, {"text": "a", "token_ids": b"1234"}, {"token_ids": b"123"}, {"messages_json": "["}])
async def test_a_request_without_exactly_one_valid_prompt_is_refused(fields: dict[str, Any]) -> None:
    async with replica() as w, served(w) as stub:
        with pytest.raises(InvalidArgumentError):
            await _generate(stub, **fields)


async def test_generate_is_refused_by_name_before_the_first_weights() -> None:
    async with replica(publish=False) as w, served(w) as stub:
        await eventually(lambda: w.worker.link.epoch)
        with pytest.raises(RefusedError, match="waiting for weights"):
            await _generate(stub, text="a")


async def test_generate_goes_before_queued_training_work() -> None:
    async with replica(slots=4, prefetch_groups=4) as w, served(w) as stub:
        w.engine.hold(1)
        w.scheduler.offer(*(lease(f"d{k}") for k in range(5)))
        await eventually(lambda: w.worker.book.num_generating == 5 * GROUP)
        call = stub.Generate(pb.GenerateRequest(text="a"), timeout=10)
        await eventually(lambda: w.driver.vitals.num_waiting + w.driver.vitals.num_running == 5 * GROUP + 1)
        w.engine.release()
        assert [message async for message in call][-1].finish_reason == FINISH_REASON_STOP
        ids = [r.id for r in w.requests]
        position = next(i for i, id in enumerate(ids) if id.startswith("generate-"))
        assert position < len(ids) - 2 * GROUP
        await eventually(lambda: all(w.scheduler.finished(f"d{k}") for k in range(5)))


async def test_a_request_that_can_never_run_is_refused_with_the_engines_reason() -> None:
    async with replica() as w, served(w) as stub:
        with pytest.raises(RefusedError, match="at most 4096 fit"):
            await _generate(stub, text="a", sampling=SamplingParams(max_new_tokens=5000))


async def test_a_caller_who_leaves_frees_the_slot() -> None:
    async with replica() as w, served(w) as stub:
        w.engine.hold(1)
        call = stub.Generate(pb.GenerateRequest(text="a"), timeout=10)
        await call.read()
        assert w.driver.vitals.num_running == 1
        call.cancel()
        await eventually(lambda: w.driver.vitals.num_running == 0)


async def test_a_caller_hears_that_the_engine_died() -> None:
    async with replica() as w, served(w) as stub:
        w.engine.hold(1)
        call = stub.Generate(pb.GenerateRequest(text="a"), timeout=10)
        await call.read()
        w.engine.dies.set()
        with pytest.raises(grpc.RpcError) as failed:
            await call.read()
        assert isinstance(err := rpc.from_rpc_error(failed.value), UnavailableError)
        assert "the device is gone" in err.message


async def test_status_says_what_the_replica_holds_and_does() -> None:
    async with replica() as w, served(w) as stub:
        w.engine.hold(1)
        w.scheduler.offer(lease("d0"))
        await eventually(lambda: w.driver.vitals.num_running == GROUP)
        status = await stub.GetStatus(pb.RolloutServiceGetStatusRequest(), timeout=5)
        assert (status.replica_id, status.state, status.engine) == ("r-test", scheduler_pb2.REPLICA_STATE_RUNNING, "fake 1")
        assert (status.held.trainer_epoch, status.held.version, status.update_policy) == (1, 0, "abort")
        assert (status.slots, status.running_sequences, status.waiting_sequences, status.wait_reason) == (64, GROUP, 0, "")
