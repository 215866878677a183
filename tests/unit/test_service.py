"""How the processes of all services begin and end; with real processes in tests/service/test_*_process.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stretto import service
from stretto.errors import FencedError, InvalidArgumentError, RefusedError, StrettoError


@pytest.mark.parametrize(
    ("error", "code"),
    [(FencedError("a newer one"), 3), (InvalidArgumentError("no"), 2), (RefusedError("no"), 1), (StrettoError("broken"), 1)],
)
def test_each_end_has_its_exit_code(error: StrettoError, code: int) -> None:
    def work() -> None:
        raise error

    assert service.exit_code("t", work) == code
    assert service.exit_code("t", lambda: None) == 0


def test_being_fenced_is_told_from_other_refusals_that_a_restart_cannot_cure(capsys: pytest.CaptureFixture[str]) -> None:
    def work(error: StrettoError) -> None:
        raise error

    assert service.exit_code("t", lambda: work(FencedError("newer")), (RefusedError,)) == 3
    assert service.exit_code("t", lambda: work(RefusedError("other data")), (RefusedError,)) == 2
    assert capsys.readouterr().err == "other data\n"


def test_an_invalid_recipe_ends_with_exit_code_two_and_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = service.parser("t", "A test.").parse_args(["--config", str(tmp_path / "none.toml")])
    with pytest.raises(SystemExit, match="2"):
        service.begin("t", arguments)
    assert capsys.readouterr().err == f"recipe {tmp_path / 'none.toml'}: there is no such file\n"


def test_a_command_line_is_read_before_anything_heavy_is_imported() -> None:
    source = (
        "import sys\n"
        "from services.rollout import __main__\nfrom services.scheduler import __main__\n"
        "from services.trainer import __main__\nfrom services.weightsync import __main__\n"
        "print(*{'torch', 'transformers', 'numpy', 'grpc', 'redis'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout == "\n"
