"""What a trainer does besides training: checkpoints on request, lost weights, the end of a run, stopping."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import grpc
import pytest

from stretto.v1 import scheduler_pb2 as pb
from stretto.v1 import trainer_pb2 as tp
from tests.trainer_world import WAIT_S, World, ended, world
from tests.waits import until


def finish(w: World) -> None:
    until(lambda: w.scheduler.phase == pb.RUN_PHASE_FINISHING, "last checkpoint committed")
    w.scheduler.phase = pb.RUN_PHASE_DONE


def test_a_run_leaves_a_final_model_its_newest_checkpoints_and_every_metric_once(tmp_path: Path) -> None:
    with world(tmp_path, total=7) as w:
        trainer = w.start(checkpoint_every_steps=2)
        finish(w)
        assert ended(trainer) == 0
        assert w.trained_once()
        assert (tmp_path / "final" / "model.safetensors").exists()
        assert not (tmp_path / "final" / "state.pt").exists()
        assert sorted(p.name for p in (tmp_path / "checkpoints").glob("step-*")) == ["step-6", "step-7"]
        lines = w.lines("train")
        assert [line["step"] for line in lines] == list(range(1, 8))
        timings = {"sample_wait_s", "train_s", "publish_s", "publish_ms", "commit_s", "checkpoint_s", "step_s", "busy_share", "loss"}
        assert timings <= lines[-1]["metrics"].keys()
        assert w.relay.published == [(1, v) for v in range(8)]
        assert [step for method, step in w.scheduler.calls if method == "CommitCheckpoint"] == [2, 4, 6, 7]


def test_an_undisturbed_step_costs_less_than_10_ms_besides_training(tmp_path: Path) -> None:
    with world(tmp_path, total=60) as w:
        trainer = w.start(checkpoint_every_steps=10)
        finish(w)
        assert ended(trainer) == 0
        costs = sorted(m["step_s"] - m["train_s"] for m in (line["metrics"] for line in w.lines("train")))
        assert costs[len(costs) // 4] < 0.010  # the fastest quarter: other processes may share the cores


def test_a_requested_checkpoint_is_durable_when_it_is_answered_and_is_made_once(tmp_path: Path) -> None:
    with world(tmp_path, total=40) as w:
        w.scheduler.available = 10
        trainer = w.start(checkpoint_every_steps=100)
        until(lambda: w.scheduler.committed == 5, "step 5")
        with w.control() as stub:
            saved = stub.SaveCheckpoint(tp.SaveCheckpointRequest(operation_id="a"), timeout=WAIT_S)
            assert saved.step == 5
            assert (Path(saved.path) / "STABLE").exists()
            w.scheduler.available = 80  # now while it steps
            later = stub.SaveCheckpoint(tp.SaveCheckpointRequest(operation_id="b"), timeout=WAIT_S)
            assert later.step > 5
            assert (Path(later.path) / "STABLE").exists()
            assert stub.SaveCheckpoint(tp.SaveCheckpointRequest(operation_id="a"), timeout=WAIT_S) == saved
            status = stub.GetStatus(tp.TrainerServiceGetStatusRequest(), timeout=WAIT_S)
            assert status.total_steps == 40
            assert status.checkpoint_step >= 5
        finish(w)
        assert ended(trainer) == 0


def test_the_status_says_what_the_trainer_waits_for(tmp_path: Path) -> None:
    with world(tmp_path, total=2) as w:
        w.scheduler.available = 2
        w.start()
        until(lambda: w.scheduler.calls.count(("SampleBatch", 2)) > 1, "a second round for step 2")
        with w.control() as stub:
            status = stub.GetStatus(tp.TrainerServiceGetStatusRequest(), timeout=WAIT_S)
        assert (status.activity, status.step, status.wait_reason) == ("sampling", 1, "step 2 waits for groups")


def test_a_relay_that_lost_its_versions_gets_the_newest_again_while_a_batch_is_awaited(tmp_path: Path) -> None:
    with world(tmp_path, total=2) as w:
        w.scheduler.available = 2
        trainer = w.start()
        until(lambda: w.relay.newest == (1, 1), "version 1")
        w.relay.forget()
        until(lambda: w.relay.newest == (1, 1), "version 1 again")
        w.scheduler.available = 4
        finish(w)
        assert ended(trainer) == 0


def test_a_batch_that_never_comes_ends_the_trainer_with_the_blockers_name(tmp_path: Path) -> None:
    with world(tmp_path, total=2) as w:
        w.scheduler.available = 2
        assert ended(w.start(sample_deadline_s=0.1)) == 1
        assert "replica r3 was last heard 41 s ago" in w.log()


def test_the_last_evaluation_gets_its_line_before_the_trainer_ends(tmp_path: Path) -> None:
    with world(tmp_path, total=3) as w:
        trainer = w.start()
        until(lambda: w.scheduler.phase == pb.RUN_PHASE_FINISHING, "last checkpoint committed")
        w.scheduler.evaluate("e0", 0)
        w.scheduler.evaluate("e3", 3)
        w.scheduler.phase = pb.RUN_PHASE_DONE
        assert ended(trainer) == 0
        assert [(line["evaluation_id"], line["step"], line["accuracy"]) for line in w.lines("validation")] == [
            ("e0", 0, 0.5),
            ("e3", 3, 0.5),
        ]


def test_a_restart_after_the_end_completes_what_is_missing_and_exits(tmp_path: Path) -> None:
    with world(tmp_path, total=3) as w:
        first = w.start()
        until(lambda: w.scheduler.phase == pb.RUN_PHASE_FINISHING, "last checkpoint committed")
        w.kill()
        ended(first)
        w.scheduler.evaluate("e3", 3)  # while no trainer was there
        w.scheduler.phase = pb.RUN_PHASE_DONE
        for path in (tmp_path / "final").glob("*"):
            path.unlink()
        epoch = w.scheduler.epoch
        assert ended(w.start()) == 0
        assert ended(w.start()) == 0
        assert w.scheduler.epoch == epoch  # a run that is done is not opened again
        assert json.loads((tmp_path / "final" / "cut.json").read_text())["step"] == 3
        assert [line["evaluation_id"] for line in w.lines("validation")] == ["e3"]
        assert [line["step"] for line in w.lines("train")] == [1, 2, 3]


def test_evaluations_of_lost_steps_leave_the_metrics_with_them(tmp_path: Path) -> None:
    with world(tmp_path, total=4) as w:
        w.scheduler.available = 4
        first = w.start(checkpoint_every_steps=1, keep_checkpoints=4)
        until(lambda: w.scheduler.checkpointed == 2, "checkpoint 2")
        w.scheduler.evaluate("s1", 1)
        w.scheduler.evaluate("s2", 2)
        until(lambda: len(w.lines("validation")) == 2, "two lines")
        w.kill()
        ended(first)
        (tmp_path / "checkpoints" / "step-2" / "STABLE").unlink()
        w.scheduler.checkpointed, w.scheduler.batches[2] = 1, [2, 3]
        w.scheduler.available = 8
        last = w.start(checkpoint_every_steps=1, keep_checkpoints=4)
        until(lambda: w.scheduler.phase == pb.RUN_PHASE_FINISHING, "last checkpoint committed")
        until(lambda: w.scheduler.num_watchers > 1, "the second trainer watches")
        w.scheduler.evaluate("s2", 2)  # the same id: its step was done again
        w.scheduler.phase = pb.RUN_PHASE_DONE
        assert ended(last) == 0
        found = [(line["evaluation_id"], line["event_id"]) for line in w.lines("validation")]
        assert found == [("s1", "2-0"), ("s2", w.scheduler.events[-1].event_id)]


def test_sigterm_saves_what_was_committed_and_exits_with_0(tmp_path: Path) -> None:
    with world(tmp_path, total=5) as w:
        w.scheduler.available = 4
        trainer = w.start(checkpoint_every_steps=100)
        until(lambda: w.scheduler.calls.count(("SampleBatch", 3)) > 0, "waiting for step 3")
        assert trainer.pid
        os.kill(trainer.pid, signal.SIGTERM)
        assert ended(trainer) == 0
        assert w.scheduler.checkpointed == 2
        w.scheduler.available = 10
        again = w.start(checkpoint_every_steps=100)
        finish(w)
        assert ended(again) == 0
        assert w.scheduler.first_versions[2] == 2
        assert w.trained_once()


def test_a_caller_that_waits_for_a_checkpoint_is_told_when_the_trainer_stops(tmp_path: Path) -> None:
    with world(tmp_path, total=5) as w:
        w.scheduler.available = 0
        trainer = w.start()
        until(lambda: ("SampleBatch", 1) in w.scheduler.calls, "waiting for step 1")
        with w.control() as stub:
            asked = stub.SaveCheckpoint.future(tp.SaveCheckpointRequest(operation_id="a"), timeout=WAIT_S)
            stub.GetStatus(tp.TrainerServiceGetStatusRequest(), timeout=WAIT_S)
            assert trainer.pid
            os.kill(trainer.pid, signal.SIGTERM)
            with pytest.raises(grpc.RpcError, match="the trainer is stopping"):
                asked.result()
        assert ended(trainer) == 0
