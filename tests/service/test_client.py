"""The SDK against real gRPC servers in this process, whose answers are scripted."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from stretto import results
from stretto.client import AsyncClient, Client, UserPrompt
from stretto.errors import FencedError, InvalidArgumentError, NotFoundError, UnavailableError
from stretto.v1 import rollout_pb2, rollout_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc, types_pb2

BLOCKED = """
import sys
ALLOWED = {"stretto", "grpc", "google", "cython_runtime", "_cython_3_2_4", "typing_extensions"}
class Block:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in ALLOWED or top in sys.stdlib_module_names or top.startswith("_"):
            return None
        raise ImportError(f"the SDK must not need {name}")
sys.meta_path.insert(0, Block())
from stretto import AsyncClient, Client
with Client("127.0.0.1:1") as client:
    try:
        client.status()
    except Exception as err:
        print(type(err).__name__)
"""


class Scheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Answers of the tests' choosing, and what it was asked."""

    def __init__(self) -> None:
        self.status = scheduler_pb2.GetStatusResponse(run="r", phase=scheduler_pb2.RUN_PHASE_RUNNING, committed_step=3, total_steps=9)
        self.submitted: list[scheduler_pb2.SubmitPromptsRequest] = []
        self.watched_after: list[str] = []
        self.polls = 0
        self.left = threading.Event()
        self.is_silent = False
        """Nothing comes after the third event."""
        self.phases: tuple[int, ...] = ()
        """Which of the first three events are changes of phase."""
        self.num_asked = 0
        self.is_away_at = range(0)
        """Which GetStatus calls find nobody."""

    def GetStatus(self, request: Any, context: Any) -> scheduler_pb2.GetStatusResponse:  # noqa: N802
        self.num_asked += 1
        if self.num_asked - 1 in self.is_away_at:
            context.abort(grpc.StatusCode.UNAVAILABLE, "killed")
        return self.status

    def SubmitPrompts(self, request: Any, context: Any) -> scheduler_pb2.SubmitPromptsResponse:  # noqa: N802
        self.submitted.append(request)
        return scheduler_pb2.SubmitPromptsResponse(uids=[f"u{i}" for i, _ in enumerate(request.prompts)])

    def Pause(self, request: Any, context: Any) -> scheduler_pb2.PauseResponse:  # noqa: N802
        context.set_trailing_metadata((("stretto-error", "FencedError"),))
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, "scheduler epoch 1 is older than 2")
        raise AssertionError("unreachable")

    def Evaluate(self, request: Any, context: Any) -> scheduler_pb2.EvaluateResponse:  # noqa: N802
        return scheduler_pb2.EvaluateResponse(evaluation_id="e1")

    def GetEvaluation(self, request: Any, context: Any) -> scheduler_pb2.GetEvaluationResponse:  # noqa: N802
        self.polls += 1
        judged = scheduler_pb2.Evaluation(evaluation_id="e1", accuracy=0.75, outcome="complete")
        return scheduler_pb2.GetEvaluationResponse(done=self.polls == 2, evaluation=judged)

    def WatchEvents(self, request: Any, context: Any) -> Iterator[scheduler_pb2.WatchEventsResponse]:  # noqa: N802
        """Two events and the end of the connection, then the rest."""
        self.watched_after.append(request.after_id)
        context.add_callback(self.left.set)
        first = int(request.after_id or 0)
        for i in range(first + 1, 3 if first == 0 else 4):
            yield scheduler_pb2.WatchEventsResponse(event_id=str(i), kind="phase" if i in self.phases else "step", values={"step": i})
        if first == 0:
            context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")
        while self.is_silent:
            if self.left.wait(0.05):
                return
        self.status.phase = scheduler_pb2.RUN_PHASE_DONE
        yield scheduler_pb2.WatchEventsResponse(event_id="4", kind="phase", labels={"phase": "done"})


class Rollout(rollout_pb2_grpc.RolloutServiceServicer):
    def Generate(self, request: Any, context: Any) -> Iterator[rollout_pb2.GenerateResponse]:  # noqa: N802
        assert request.sampling.max_new_tokens == 2
        span = types_pb2.VersionSpan(version=3, num_tokens=1)
        yield rollout_pb2.GenerateResponse(
            text=request.text, token_ids=results.pack("i", [7]), logprobs=results.pack("f", [-0.5]), spans=[span]
        )
        yield rollout_pb2.GenerateResponse(finish_reason=types_pb2.FINISH_REASON_STOP)


@contextmanager
def serving(servicer: Any, add: Any) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(8))
    add(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


@pytest.fixture
def address(scheduler: Scheduler) -> Iterator[str]:
    with serving(scheduler, scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server) as target:
        yield target


def test_the_sdk_imports_and_fails_by_name_with_grpcio_and_protobuf_alone() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("UnavailableError", "")


def test_status_is_a_typed_value_with_words_for_enums(address: str) -> None:
    with Client(address) as client:
        status = client.status()
    assert (status.phase, status.committed_step, status.trainer, status.last_evaluation) == ("running", 3, None, None)


def test_every_kind_of_prompt_is_submitted_in_order(address: str, scheduler: Scheduler) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with Client(address) as client:
        uids = client.submit([UserPrompt("t", "1"), UserPrompt([1, 2], "2"), UserPrompt(messages, "3", extra={"k": 1})])
    sent = scheduler.submitted[0].prompts
    assert uids == ("u0", "u1", "u2")
    assert (sent[0].text, sent[1].token_ids, sent[2].messages_json) == ("t", b"\1\0\0\0\2\0\0\0", '[{"role": "user", "content": "hi"}]')
    assert sent[2].extra_json == '{"k": 1}'


def test_a_prompt_of_another_kind_is_refused_before_it_is_sent(address: str, scheduler: Scheduler) -> None:
    with Client(address) as client, pytest.raises(InvalidArgumentError, match="text, token ids or messages"):
        client.submit([UserPrompt([1.5], "1")])  # pyright: ignore[reportArgumentType]
    assert scheduler.submitted == []


def test_an_error_arrives_as_the_class_the_service_raised(address: str) -> None:
    with Client(address) as client, pytest.raises(FencedError, match="epoch 1 is older"):
        client.pause()


def test_a_watch_goes_on_after_a_restart_without_loss_or_repetition_and_ends_when_done(address: str, scheduler: Scheduler) -> None:
    with Client(address) as client:
        ids = [event.event_id for event in client.events()]
    assert (ids, scheduler.watched_after) == (["1", "2", "3", "4"], ["", "2"])


def test_a_watch_of_a_run_that_is_done_brings_the_old_events_and_ends(address: str, scheduler: Scheduler) -> None:
    scheduler.status.phase = scheduler_pb2.RUN_PHASE_DONE
    scheduler.is_silent = True
    with Client(address) as client:
        assert [event.event_id for event in client.events("2")] == ["3"]


def test_an_old_change_of_phase_does_not_end_the_watch_of_a_run_that_is_done(address: str, scheduler: Scheduler) -> None:
    scheduler.status.phase = scheduler_pb2.RUN_PHASE_DONE
    scheduler.phases = (1, 3)
    with Client(address) as client:
        assert [event.event_id for event in client.events()] == ["1", "2", "3", "4"]


def test_a_scheduler_that_dies_behind_a_change_of_phase_does_not_end_the_watch(address: str, scheduler: Scheduler) -> None:
    scheduler.phases, scheduler.is_away_at = (1,), range(1, 6)  # the call behind event 1 and all its repeats
    with Client(address) as client:
        assert [event.event_id for event in client.events()] == ["1", "2", "3", "4"]


def test_leaving_a_watch_ends_it_at_the_server(address: str, scheduler: Scheduler) -> None:
    with Client(address) as client:
        events = client.events()
        next(events)
        events.close()
        assert scheduler.left.wait(5)


def test_evaluate_waits_until_the_outcome_is_there(address: str, scheduler: Scheduler) -> None:
    with Client(address) as client:
        assert client.evaluate().accuracy == 0.75
    assert scheduler.polls == 2


def test_generate_streams_from_a_replica_that_holds_weights(address: str, scheduler: Scheduler) -> None:
    with serving(Rollout(), rollout_pb2_grpc.add_RolloutServiceServicer_to_server) as replica, Client(address) as client:
        running = scheduler_pb2.REPLICA_STATE_RUNNING
        scheduler.status.replicas.add(replica_id="empty", state=running, address="127.0.0.1:1")
        with pytest.raises(NotFoundError, match=r"empty \(running\)"):
            list(client.generate("hello"))
        scheduler.status.replicas.add(replica_id="r", state=running, address=replica, held=types_pb2.WeightsId(trainer_epoch=1, version=3))
        first, last = client.generate("hello", max_new_tokens=2)
    assert (first.text, first.token_ids, first.logprobs, first.spans, last.finish_reason) == ("hello", (7,), (-0.5,), ((3, 1),), "stop")


def test_an_unknown_sampling_setting_is_refused(address: str) -> None:
    with Client(address) as client, pytest.raises(InvalidArgumentError, match="heat"):
        list(client.generate("hello", heat=1))


def test_a_checkpoint_without_a_trainer_is_an_error_by_name(address: str) -> None:
    with Client(address) as client, pytest.raises(NotFoundError, match="no trainer"):
        client.save_checkpoint()


async def test_the_asynchronous_client_does_the_same(address: str, scheduler: Scheduler) -> None:
    async with AsyncClient(address) as client, asyncio.timeout(20):
        assert (await client.status()).phase == "running"
        assert [event.event_id async for event in client.events()] == ["1", "2", "3", "4"]
        assert (await client.evaluate()).accuracy == 0.75
        with pytest.raises(FencedError):
            await client.pause()
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(UnavailableError):
            await client.status()
