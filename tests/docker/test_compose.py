"""`docker compose up` on a real engine: ten trained steps with two replicas, a proven ledger, a clean end.

Needs an engine with compose v2 and network for pip. STRETTO_WHEELS=<folder> lays its wheels into the build (a CPU-only torch keeps the
images small); BASE and CA_BUNDLE are passed on to the build.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stretto.endpoints import free_port

ROOT = Path(__file__).parents[2]
COMPOSE = ["docker", "compose", "-f", str(ROOT / "deploy/compose.yaml")]
STEPS, PORT = 10, free_port()
BUILD_S, RUN_S = 1500, 420
"""Limits of the image build and of ten steps, seconds."""

pytestmark = [pytest.mark.docker, pytest.mark.timeout(BUILD_S + RUN_S + 300)]

ASK = """
import json, stretto
with stretto.Client("127.0.0.1:50051") as c:
    s, v = c.status(), c.verify_ledger()
    tokens = [r.generated_tokens for r in s.replicas]
    print(json.dumps({"step": s.committed_step, "tokens": tokens, "ok": v.ok, "violations": list(v.violations),
                      "trained": v.ordinals_trained, "duplicates": v.duplicates, "gaps": v.gaps}))
"""


def compose(*args: str, timeout_s: float = 120, check: bool = True) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "STEPS": str(STEPS), "PORT": str(PORT)}
    done = subprocess.run([*COMPOSE, *args], capture_output=True, text=True, timeout=timeout_s, env=env)
    assert not check or done.returncode == 0, f"docker compose {' '.join(args)}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


def ask() -> dict[str, Any]:
    return json.loads(compose("exec", "-T", "scheduler", "python", "-c", ASK, timeout_s=30).stdout)


def keep_logs() -> None:
    """In build/compose.log, while there are containers that have any."""
    if logs := compose("logs", "--no-color", check=False).stdout:
        (ROOT / "build").mkdir(exist_ok=True)
        (ROOT / "build/compose.log").write_text(logs)


@pytest.fixture(scope="module")
def stack() -> Iterator[None]:
    if shutil.which("docker") is None or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        pytest.skip("no docker with compose v2")
    if subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("no docker engine answers")
    laid = [shutil.copy2(w, ROOT / "deploy/wheels") for w in Path(os.environ.get("STRETTO_WHEELS", "/nonexistent")).glob("torch-*.whl")]
    try:
        compose("build", timeout_s=BUILD_S)
        compose("up", "--wait", "--scale", "rollout=2", timeout_s=RUN_S)
        yield
    finally:
        keep_logs()
        compose("down", "--volumes", "--timeout", "20", check=False)
        for wheel in laid:
            Path(wheel).unlink()


def test_ten_steps_are_trained_by_two_replicas_and_the_ledger_proves_it(stack: None) -> None:
    end_s = time.monotonic() + RUN_S
    while (said := ask())["step"] < STEPS:
        assert time.monotonic() < end_s, f"no {STEPS} steps in {RUN_S} s: {said}"
        time.sleep(1)
    assert said["ok"], said["violations"]
    assert said["duplicates"] == said["gaps"] == 0
    assert said["trained"] == STEPS * 32
    assert len(said["tokens"]) == 2
    assert all(said["tokens"]), "a replica did not work"


def test_the_published_port_leads_to_the_scheduler(stack: None) -> None:
    for command in (["status"], ["ledger", "verify"], ["watch", "--headless"]):
        told = [sys.executable, "-m", "stretto", *command, "--address", f"127.0.0.1:{PORT}"]
        done = subprocess.run(told, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"


def test_an_image_holds_one_service_and_runs_as_a_user(stack: None) -> None:
    look = "ls services; id -u; python -c 'import importlib.util; print(importlib.util.find_spec(\"torch\") is not None)'"
    for service, has_torch in (("scheduler", False), ("weightsync", False), ("rollout", True)):
        seen = compose("exec", "-T", service, "sh", "-c", look).stdout.split()
        assert seen == ["__init__.py", service, "10001", str(has_torch)]


def test_down_leaves_nothing_behind(stack: None) -> None:
    keep_logs()
    compose("down", "--volumes", "--timeout", "20")
    assert compose("ps", "--all", "--quiet").stdout.strip() == ""
    ours = ["--filter", "label=com.docker.compose.project=stretto"]
    volumes = subprocess.run(["docker", "volume", "ls", "-q", *ours], capture_output=True, text=True)
    assert volumes.stdout.strip() == ""
