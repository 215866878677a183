"""`python -m services.scheduler` as a process: start, kill -9, restart, drain, fence, refuse."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from stretto import embedded, endpoints, health, rpc
from stretto.v1 import scheduler_pb2 as spb
from stretto.v1.scheduler_pb2_grpc import SchedulerServiceStub
from tests import procs
from tests.waits import until

START_S = 60.0
STOP_S = 10.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten questions and a tokenizer of bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={**{c: i for i, c in enumerate(letters)}, "<eos>": 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}))
    rows = [{"prompt": f"{n}+1=", "ground_truth": str(n + 1)} for n in range(10)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


class Process:
    """One scheduler process on a free port."""

    def __init__(self, folder: Path, url: str, *overrides: str) -> None:
        recipe = folder / "recipe.toml"
        recipe.write_text(
            f'[model]\npath = "{folder}"\n[data]\ntrain = "{folder}/train.jsonl"\n[sampling]\ngroup_size = 2\n'
            f'[scheduler]\nlisten = "127.0.0.1:0"\nbatch_groups = 4\n[redis]\nurl = "{url}"\noutage_s = 5\n'
        )
        command = [sys.executable, "-m", "services.scheduler", "--config", str(recipe)]
        self.log = folder / f"log-{time.monotonic_ns()}"
        with self.log.open("wb") as output:
            self.child = subprocess.Popen([*command, *(["--set", *overrides] if overrides else [])], stdout=output, stderr=output)

    def stub(self) -> SchedulerServiceStub:
        """Connected, once it says where it listens."""
        return SchedulerServiceStub(rpc.connect_blocking(procs.address_of(self.child, self.log, START_S)))

    def exit_code(self, number: int | None = None) -> int:
        if number is not None:
            self.child.send_signal(number)
        return self.child.wait(STOP_S if number is not None else START_S)


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        process.child.kill()
        process.child.wait()


def test_it_serves_goes_on_after_kill_nine_and_drains_on_sigterm(
    folder: Path, valkey: embedded.EmbeddedServer, processes: list[Process]
) -> None:
    first = Process(folder, valkey.url)
    processes.append(first)
    stub = first.stub()
    request = spb.OpenTrainerRequest(operation_id="o", total_steps=100, batch_groups=4)
    assert stub.OpenTrainer(request, timeout=5).trainer_epoch == 1
    until(lambda: stub.GetStatus(spb.GetStatusRequest(), timeout=5).occupancy.occupied >= 12, "a full window", START_S)
    status = stub.GetStatus(spb.GetStatusRequest(), timeout=5)
    assert (status.cursor, status.dataset_size) == (12, 10)
    first.exit_code(signal.SIGKILL)
    second = Process(folder, valkey.url)
    processes.append(second)
    stub = second.stub()
    again = stub.GetStatus(spb.GetStatusRequest(), timeout=5)
    assert (again.occupancy, again.trainer.trainer_epoch) == (status.occupancy, 1)
    assert stub.OpenTrainer(request, timeout=5).trainer_epoch == 1
    assert stub.VerifyLedger(spb.VerifyLedgerRequest(), timeout=5).ok
    watch = stub.WatchEvents(spb.WatchEventsRequest(after_id="0"), timeout=30)
    assert next(watch).text == "STARTING"
    assert second.exit_code(signal.SIGTERM) == 0
    with pytest.raises(grpc.RpcError):
        for _ in watch:
            pass


def test_a_former_scheduler_ends_with_exit_code_three(folder: Path, valkey: embedded.EmbeddedServer, processes: list[Process]) -> None:
    first = Process(folder, valkey.url)
    processes.append(first)
    first.stub()
    processes.append(Process(folder, valkey.url))
    assert first.exit_code() == 3
    assert "another scheduler took over" in first.log.read_text()


class Pair:
    """Two schedulers on one store behind one name; the first leads."""

    def __init__(self, folder: Path, url: str, processes: list[Process], lead_s: float) -> None:
        self._folder, self._url, self._processes, self._lead_s = folder, url, processes, lead_s
        self.places = [f"127.0.0.1:{endpoints.free_port()}" for _ in range(2)]
        self.first = self.start(0)
        self.first.stub()
        self.second = self.start(1)
        until(lambda: "standing_by" in self.second.log.read_text(), "a standby", START_S)
        channel = rpc.connect_blocking("ipv4:" + ",".join(self.places), service=rpc.SCHEDULER)
        self.stub = SchedulerServiceStub(channel)
        request = spb.OpenTrainerRequest(operation_id="o", total_steps=100, batch_groups=4)
        assert self.stub.OpenTrainer(request, timeout=5).trainer_epoch == 1
        until(lambda: self.status().occupancy.occupied == 12, "a full window")

    def start(self, place: int) -> Process:
        process = Process(self._folder, self._url, f"scheduler.listen={self.places[place]}", f"scheduler.leader_s={self._lead_s}")
        self._processes.append(process)
        return process

    def status(self) -> spb.GetStatusResponse:
        return self.stub.GetStatus(spb.GetStatusRequest(), timeout=5)

    def answers(self) -> bool:
        """Whether the name is served now."""
        try:
            self.stub.GetStatus(spb.GetStatusRequest(), timeout=0.5)
        except grpc.RpcError:
            return False
        return True

    def check(self) -> None:
        """C17: whoever leads, the window was filled once."""
        status = self.status()
        assert (status.cursor, status.occupancy.occupied, status.trainer.trainer_epoch) == (12, 12, 1)
        assert self.stub.VerifyLedger(spb.VerifyLedgerRequest(), timeout=5).ok


def test_c17_a_standby_is_asked_nothing_and_takes_over_when_the_leader_is_killed(
    folder: Path, valkey: embedded.EmbeddedServer, processes: list[Process]
) -> None:
    lead_s = 2.0
    pair = Pair(folder, valkey.url, processes, lead_s)
    assert health.is_serving(pair.places[1]), "its container is healthy"
    assert not health.is_serving(pair.places[1], rpc.SCHEDULER)
    with pytest.raises(grpc.RpcError, match="does not lead the run"):
        SchedulerServiceStub(rpc.connect_blocking(pair.places[1])).GetStatus(spb.GetStatusRequest(), timeout=5)
    for _ in range(20):
        pair.status()
    pair.first.exit_code(signal.SIGKILL)
    assert until(pair.answers, "a new leader", START_S) < lead_s + 3
    pair.check()
    again = pair.start(0)
    until(lambda: "standing_by" in again.log.read_text(), "a standby", START_S)
    pair.check()


def test_a_leader_that_drains_hands_over_at_once_and_one_that_restarts_in_its_place_waits_for_nobody(
    folder: Path, valkey: embedded.EmbeddedServer, processes: list[Process]
) -> None:
    pair = Pair(folder, valkey.url, processes, lead_s=300.0)
    pair.first.exit_code(signal.SIGKILL)
    pair.start(0).stub()
    until(pair.answers, "the leader", START_S)
    pair.check()
    assert pair.second.log.read_text().count("ledger_opened") == 0
    assert processes[-1].exit_code(signal.SIGTERM) == 0
    until(pair.answers, "a new leader", START_S)
    pair.check()


def test_c17_a_leader_that_stood_still_too_long_changes_nothing_more_and_ends(
    folder: Path, valkey: embedded.EmbeddedServer, processes: list[Process]
) -> None:
    pair = Pair(folder, valkey.url, processes, lead_s=1.0)
    pair.first.child.send_signal(signal.SIGSTOP)
    pair.second.stub()
    pair.first.child.send_signal(signal.SIGCONT)
    assert pair.first.exit_code() == 3
    assert "another scheduler took over" in pair.first.log.read_text()
    until(pair.answers, "one leader", START_S)
    pair.check()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.train=/nowhere.jsonl", "/nowhere.jsonl"),
        ("scheduler.batch_group=3", "did you mean 'scheduler.batch_groups'"),
        ("redis.url=''", "redis.url is empty"),
        ("redis.url=redis://:wrong@{}/0", "refuses the user or password"),
    ],
)
def test_a_bad_recipe_ends_with_exit_code_two_and_one_message(
    folder: Path, valkey: embedded.EmbeddedServer, processes: list[Process], override: str, says: str
) -> None:
    process = Process(folder, valkey.url, override.format(valkey.address))
    processes.append(process)
    assert process.exit_code() == 2
    assert says in process.log.read_text()
    assert "Traceback" not in process.log.read_text()
