"""A trainer killed between any two of its acts goes on so that every group is trained exactly once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stretto.endpoints import free_port
from stretto.errors import UnavailableError
from stretto.health import is_serving
from stretto.v1 import scheduler_pb2 as pb
from stretto.weights.publisher import Publisher
from tests.trainer_world import WAIT_S, World, ended, world
from tests.waits import until

KILLED = -9


def kill_at(w: World, method: str, step: int, when: str) -> None:
    """SIGKILL the trainer once, when it makes this call: before it takes effect, or after and before it is answered."""

    def strike(called: str, at: int, moment: str) -> None:
        if (called, at, moment) == (method, step, when):
            w.scheduler.on_call = lambda *_: None
            w.relay.on_publish = lambda *_: None
            w.kill()
            if when == "before":
                raise UnavailableError("the caller is dead")

    w.scheduler.on_call = strike
    w.relay.on_publish = lambda id, moment: strike("Publish", id[1], moment)


KILLS = [
    ("OpenTrainer", 0, "after"),
    ("SampleBatch", 1, "after"),
    ("Publish", 2, "before"),
    ("Publish", 2, "after"),
    ("CommitStep", 3, "before"),
    ("CommitStep", 3, "after"),
    ("CommitCheckpoint", 3, "before"),
    ("CommitCheckpoint", 3, "after"),
    ("CommitStep", 5, "after"),
    ("CommitCheckpoint", 9, "before"),
]
"""In the order of a run of 9 steps with a checkpoint every 3."""


def test_c4_kill_9_between_any_two_acts_trains_every_group_exactly_once(tmp_path: Path) -> None:
    with world(tmp_path, total=9) as w:
        for method, step, when in KILLS:
            kill_at(w, method, step, when)
            assert ended(w.start()) == KILLED, (method, step, when)
            assert w.scheduler.checkpointed <= w.scheduler.committed  # I5
        last = w.start()
        until(lambda: w.scheduler.phase == pb.RUN_PHASE_FINISHING, "last checkpoint committed")
        w.scheduler.phase = pb.RUN_PHASE_DONE
        assert ended(last) == 0
        assert w.trained_once()
        assert w.state(9)["weight"].tolist() == [float(sum(range(18)))] * 4
        assert [line["step"] for line in w.lines("train")] == list(range(1, 10))
        assert w.relay.published == sorted(w.relay.published)  # a version of an older epoch never follows a newer one's


def test_c3_the_first_step_after_a_checkpoint_at_100_with_4_minibatches_is_101_and_its_optimizer_step_401(tmp_path: Path) -> None:
    with world(tmp_path, total=102, batch=4) as w:
        w.scheduler.available = 400
        first = w.start(checkpoint_every_steps=100, minibatches=4)
        until(lambda: w.scheduler.checkpointed == 100, "checkpoint 100")
        kill_at(w, "CommitStep", 102, "before")
        w.scheduler.available = 408
        assert ended(first) == KILLED
        assert w.state(100)["optimizer_steps"] == 400
        w.scheduler.calls.clear()
        last = w.start(checkpoint_every_steps=100, minibatches=4)
        until(lambda: w.scheduler.phase == pb.RUN_PHASE_FINISHING, "last checkpoint committed")
        w.scheduler.phase = pb.RUN_PHASE_DONE
        assert ended(last) == 0
        steps = [step for method, step in w.scheduler.calls if method == "SampleBatch"]
        assert steps == [101, 102]
        assert w.scheduler.metrics[101]["optimizer_steps"] == 404  # 401 is the first of its four updates
        assert [line["step"] for line in w.lines("train")] == list(range(1, 103))


def test_c7_torn_checkpoints_are_not_resumed_from(tmp_path: Path) -> None:
    with world(tmp_path, total=4) as w:
        kill_at(w, "CommitCheckpoint", 3, "before")
        assert ended(w.start(checkpoint_every_steps=1, keep_checkpoints=5)) == KILLED
        newest = tmp_path / "checkpoints" / "step-3"
        (newest / "STABLE").unlink()  # as if the kill had come a moment earlier
        last = w.start(checkpoint_every_steps=1, keep_checkpoints=5)
        until(lambda: w.scheduler.phase == pb.RUN_PHASE_FINISHING, "last checkpoint committed")
        assert w.scheduler.first_versions[2] == 2
        assert (newest / "STABLE").exists()
        w.scheduler.phase = pb.RUN_PHASE_DONE
        assert ended(last) == 0
        assert w.trained_once()


@pytest.mark.parametrize("act", ["SampleBatch", "CommitStep"])
def test_a_trainer_that_was_replaced_exits_with_3(tmp_path: Path, act: str) -> None:
    with world(tmp_path, total=4) as w:

        def replace(method: str, step: int, when: str) -> None:
            if (method, step, when) == (act, 2, "before"):
                w.scheduler.epoch += 1

        w.scheduler.on_call = replace
        assert ended(w.start()) == 3
        assert [line["step"] for line in w.lines("train")] == [1]


def test_a_checkpoint_the_store_can_no_longer_follow_is_refused_once_with_exit_code_2(tmp_path: Path) -> None:
    with world(tmp_path, total=4) as w:
        w.scheduler.checkpointed = 3
        assert ended(w.start()) == 2


def test_a_checkpoint_that_cannot_be_written_is_counted_as_none_and_the_run_goes_on(tmp_path: Path) -> None:
    with world(tmp_path, total=6) as w:
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints" / "step-3").write_text("in the way")
        trainer = w.start()
        until(lambda: w.scheduler.phase == pb.RUN_PHASE_FINISHING, "last checkpoint committed")
        w.scheduler.phase = pb.RUN_PHASE_DONE
        assert ended(trainer) == 0
        assert [step for method, step in w.scheduler.calls if method == "CommitCheckpoint"] == [6]
        assert "checkpoint_failed" in w.log()


def test_the_relay_killed_while_steps_go_on_costs_no_step_and_gets_the_newest_version_again(tmp_path: Path) -> None:
    port = free_port()
    with world(tmp_path, total=60) as w, real_relay(w, port) as relay:
        trainer = w.start()
        until(lambda: w.scheduler.committed >= 20, "20 steps")
        relay.kill()
        relay.wait()
        w.scheduler.available = 2 * (w.scheduler.committed + 5)
        with real_relay(w, port):
            until(lambda: w.scheduler.committed * 2 == w.scheduler.available, "the steps there are groups for")
            with Publisher(f"127.0.0.1:{port}", "auto", deadline_s=WAIT_S) as reader:
                assert reader.newest() == (1, w.scheduler.committed)
            w.scheduler.available = 120
            until(lambda: w.scheduler.phase == pb.RUN_PHASE_FINISHING, "last checkpoint committed")
            w.scheduler.phase = pb.RUN_PHASE_DONE
            assert ended(trainer) == 0
            assert w.trained_once()


@contextmanager
def real_relay(w: World, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """The weightsync service itself, where the trainers of `w` dial."""
    w.peers["weightsync"] = f"127.0.0.1:{port}"
    recipe = w.folder / "relay.toml"
    recipe.write_text(
        f'[run]\nfolder = "{w.folder}"\n[model]\npath = "m"\n[data]\ntrain = "x"\n[weightsync]\nlisten = "127.0.0.1:{port}"\n'
    )
    process = subprocess.Popen([sys.executable, "-m", "services.weightsync", "--config", str(recipe)], stderr=subprocess.DEVNULL)
    try:
        until(lambda: is_serving(f"127.0.0.1:{port}"), "relay serves")
        yield process
    finally:
        process.kill()
        process.wait()
