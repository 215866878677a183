"""Who must live without torch does: SDK, command line and scheduler, in processes in which importing it raises."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stretto import embedded
from stretto.client import Client
from tests import procs
from tests.run_world import RECIPE

START_S, STOP_S = 60.0, 15.0
ROOT = RECIPE.parents[1]
BLOCK_TORCH = """
import sys


class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torchvision", "functorch"):
            raise ImportError(f"{name} is blocked")


sys.meta_path.insert(0, Blocked())
"""
ONLY_SDK = """
import sys

allowed = {"stretto", "grpc", "google", "typing_extensions"} | set(sys.stdlib_module_names)  # grpcio itself needs the last


class Allowed:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in allowed and not top.startswith("_"):
            raise ImportError(f"{name} is blocked")


sys.meta_path.insert(0, Allowed())
from stretto import AsyncClient, Client, UserPrompt

with Client("127.0.0.1:1") as client:
    print(client.address)
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """In which every Python process refuses to import torch."""
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "sitecustomize.py").write_text(BLOCK_TORCH)
    return {**os.environ, "PYTHONPATH": f"{tmp_path / 'blocked'}:{ROOT}", "OMP_NUM_THREADS": "1"}


def output_of(env: dict[str, str], *arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=START_S, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_torch_is_really_blocked(env: dict[str, str]) -> None:
    assert subprocess.run([sys.executable, "-c", "import torch"], env=env, capture_output=True).returncode == 1


def test_the_sdk_and_the_command_line_work_without_torch(env: dict[str, str]) -> None:
    assert output_of(env, "-c", "from stretto import Client; print(Client.__name__)") == "Client\n"
    assert "train" in output_of(env, "-m", "stretto", "--help")
    assert "60 steps of 32 prompts x 8 answers" in output_of(env, "-m", "stretto", "validate", str(RECIPE))


def test_the_sdk_needs_only_grpc_and_protobuf() -> None:
    assert output_of({**os.environ}, "-c", ONLY_SDK) == "127.0.0.1:1\n"


def test_the_scheduler_serves_and_drains_without_torch(
    env: dict[str, str], made: Path, valkey: embedded.EmbeddedServer, tmp_path: Path
) -> None:
    overrides = [f"run.folder={made}", f"redis.url={valkey.url}", "scheduler.listen=127.0.0.1:0", "scheduler.metrics_listen=127.0.0.1:0"]
    command = [sys.executable, "-m", "services.scheduler", "--config", str(RECIPE), "--set", *overrides]
    log = tmp_path / "log"
    with log.open("wb") as output:
        scheduler = subprocess.Popen(command, stdout=output, stderr=output, env=env, cwd=ROOT)
    try:
        with Client(procs.address_of(scheduler, log, START_S)) as client:
            status = client.status()
        assert (status.run, status.phase, status.dataset_size > 0) == ("word-problems", "starting", True)
        scheduler.send_signal(signal.SIGTERM)
        assert scheduler.wait(STOP_S) == 0, log.read_text()
    finally:
        scheduler.kill()
        scheduler.wait()
