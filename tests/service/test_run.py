"""`stretto run` as a real command; the services are scripts that stand in the working directory before the real ones."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stretto import process, runs
from tests.waits import until

SCHEDULER = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
import grpc
from pathlib import Path
from stretto.v1 import scheduler_pb2 as pb, scheduler_pb2_grpc

listen = next(a for a in sys.argv if a.startswith("scheduler.listen=")).partition("=")[2]
done = Path("done")

class Scheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    def GetStatus(self, request, context):
        phase = pb.RUN_PHASE_DONE if done.exists() else pb.RUN_PHASE_RUNNING
        return pb.GetStatusResponse(run="t", phase=phase, total_steps=3, committed_step=3, num_trajectories=9)
    def WatchEvents(self, request, context):
        if request.after_id in ("", "0"):
            for step in (1, 2, 3):
                yield pb.WatchEventsResponse(event_id=str(step), kind="step", unix_s=4e9, values={"step": step, "reward_mean": step / 4})
            judged = pb.Evaluation(step=3, accuracy=0.5)
            yield pb.WatchEventsResponse(event_id="4", kind="evaluation", unix_s=4e9, text="accuracy 0.5", evaluation=judged)
        while not done.exists():
            time.sleep(0.02)
        yield pb.WatchEventsResponse(event_id="5", kind="phase", unix_s=4e9, text="DONE")
    def VerifyLedger(self, request, context):
        return pb.VerifyLedgerResponse(ok=True, ordinals_entered=6, ordinals_trained=6)

server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(Scheduler(), server)
server.add_insecure_port(listen)
server.start()
server.wait_for_termination()
"""
IDLE = "import time\nprint('up', flush=True)\ntime.sleep(60)\n"
TRAINER = {
    "done": """
import time, pathlib
record = '{"kind": "train", "step": 1, "time": 1, "metrics": {"reward_mean": 0.25}}'
pathlib.Path("runs/t/metrics.jsonl").write_text(record + "\\n")
time.sleep(1.5)
pathlib.Path("done").touch()
""",
    "idle": IDLE,
    "fenced": "import sys\nsys.stderr.write('trainer epoch 3 is older than 4\\n')\nsys.exit(3)\n",
}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts `stretto run` in an own working directory with that trainer."""
    started: list[subprocess.Popen[str]] = []
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / name).write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1", "ground_truth": "1"}\n')
    recipe = '[run]\nname = "t"\nfolder = "runs/t"\n[model]\npath = "model"\n[data]\ntrain = "train.jsonl"\nvalidation = "train.jsonl"\n'
    (tmp_path / "r.toml").write_text(recipe)

    def begin(trainer: str) -> subprocess.Popen[str]:
        for name, script in {"scheduler": SCHEDULER, "weightsync": IDLE, "rollout": IDLE, "trainer": TRAINER[trainer]}.items():
            (tmp_path / "services" / name).mkdir(parents=True, exist_ok=True)
            (tmp_path / "services" / "__init__.py").touch()
            (tmp_path / "services" / name / "__init__.py").touch()
            (tmp_path / "services" / name / "__main__.py").write_text(script)
        command = [sys.executable, "-c", "from stretto.cli import main; main()", "run", "r.toml", "--headless"]
        started.append(subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return started[-1]

    yield begin
    for one in started:
        one.kill()
        one.communicate()


def until_started(folder: Path) -> runs.RunFile:
    files = [folder / "run.json", *(folder / "logs" / f"{name}.log" for name in ("rollout-0", "weightsync"))]
    until(lambda: all(file.exists() for file in files), deadline_s=30.0)
    return runs.read(folder)


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def test_a_run_shows_its_steps_and_ends_with_a_summary_and_everything_gone(
    start: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    run = start("done")
    text, _ = run.communicate(timeout=60)
    assert run.returncode == 0, text
    for part in (
        "step 1/3  reward 0.250",
        "accuracy 0.5",
        "phase done",
        "0.250 -> 0.750",
        "6 prompts entered, 6 trained once",
        "reward.png",
    ):
        assert part in text, text
    summary = json.loads((tmp_path / "runs" / "t" / "summary.json").read_text())
    assert (summary["steps"], summary["is_ledger_ok"], summary["restarts"]) == (3, True, 0)
    assert not runs.is_live(tmp_path / "runs" / "t")


def test_run_json_tells_the_addresses_to_its_owner_only_and_no_password(
    start: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    run = start("idle")
    file = until_started(tmp_path / "runs" / "t")
    assert file.pid == run.pid
    assert {"scheduler", "weightsync", "trainer", "rollout-0", "redis", "scheduler metrics"} <= set(file.addresses)
    path = tmp_path / "runs" / "t" / "run.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert "redis://" not in path.read_text()


def test_ctrl_c_stops_in_order_and_names_the_way_back(start: Callable[[str], subprocess.Popen[str]], tmp_path: Path) -> None:
    run = start("idle")
    until_started(tmp_path / "runs" / "t")
    children = children_of(run.pid)
    run.send_signal(signal.SIGINT)
    text, _ = run.communicate(timeout=30)
    assert (run.returncode, "stopped; stretto run" in text) == (130, True), text
    assert not any(map(process.is_alive, children))


def test_a_killed_run_leaves_no_process(start: Callable[[str], subprocess.Popen[str]], tmp_path: Path) -> None:
    run = start("idle")
    until_started(tmp_path / "runs" / "t")
    children = children_of(run.pid)
    assert len(children) >= 6  # guard, redis, four services
    run.kill()
    run.wait()
    until(lambda: not any(map(process.is_alive, children)), deadline_s=2.0)


def test_a_second_run_in_the_folder_is_refused(start: Callable[[str], subprocess.Popen[str]], tmp_path: Path) -> None:
    first = start("idle")
    until_started(tmp_path / "runs" / "t")
    second = start("idle")
    text, _ = second.communicate(timeout=30)
    assert (second.returncode, f"process {first.pid} runs in it" in text) == (2, True), text
    assert first.poll() is None


def test_a_fenced_trainer_ends_the_run_with_its_own_words(start: Callable[[str], subprocess.Popen[str]]) -> None:
    run = start("fenced")
    text, _ = run.communicate(timeout=30)
    assert run.returncode == 3, text
    assert "trainer epoch 3 is older than 4" in text
    assert "trainer.log" in text
