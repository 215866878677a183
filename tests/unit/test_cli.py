from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from stretto import cli, results
from stretto.errors import CorruptError, FencedError, NotFoundError, RecipeError, StrettoError, UnavailableError
from stretto.v1 import scheduler_pb2 as pb

RECIPE = "recipes/word-problems.toml"
HEAVY = ("torch", "transformers", "grpc", "rich", "pydantic", "matplotlib", "numpy")


def stretto(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from stretto.cli import main; main()", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def test_help_names_every_command_and_imports_nothing_heavy() -> None:
    code = f"import sys; from stretto import cli; print([m for m in {HEAVY} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    text = stretto("--help").stdout
    for command in [
        "run",
        "validate",
        "status",
        "watch",
        "why",
        "ledger",
        "generate",
        "make-model",
        "make-data",
        "pause",
        "resume",
        "evaluate",
        "save",
        "version",
    ]:
        assert re.search(rf"^  {command}\b", text, re.MULTILINE), command


def test_no_command_imports_torch() -> None:
    source = "import sys\nfrom stretto import client, launch, preflight, prepare, plot, screen\nprint('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_a_bad_recipe_is_one_message_without_a_traceback_and_exit_code_2() -> None:
    done = stretto("validate", RECIPE, "trainer.stepps=3")
    assert done.returncode == 2
    assert done.stderr == "error: trainer.stepps = 3: there is no such key; did you mean 'trainer.steps'?\n"


def test_no_live_run_is_said_with_the_ways_to_name_one(tmp_path: Path) -> None:
    done = stretto("status", cwd=tmp_path)
    assert (done.returncode, "--address HOST:PORT" in done.stderr) == (4, True)


def test_a_run_that_does_not_answer_is_named() -> None:
    done = stretto("why", "--address", "127.0.0.1:1")
    assert done.returncode == 4
    assert done.stderr.startswith("error: 127.0.0.1:1 cannot be reached: ")


@pytest.mark.parametrize(
    ("err", "code"), [(RecipeError(), 2), (FencedError(), 3), (UnavailableError(), 4), (NotFoundError(), 4), (CorruptError(), 1)]
)
def test_exit_codes(err: StrettoError, code: int) -> None:
    assert cli.exit_code(err) == code


def test_status_lines_say_phase_window_lag_and_each_replica() -> None:
    message = pb.GetStatusResponse(
        run="r", phase=pb.RUN_PHASE_PAUSED, pause_reason="lunch", committed_step=3, total_steps=9, max_lag=2, lag_trained_max=1
    )
    message.replicas.add(replica_id="r-1", state=pb.REPLICA_STATE_WAITING_FOR_WEIGHTS, slots=8)
    text = "\n".join(cli.status_lines(results.status(message)))
    for part in ("r: paused (lunch), step 3/9", "1 most trained, 2 allowed", "r-1 waiting_for_weights, version -, 0/8 sequences"):
        assert part in text
