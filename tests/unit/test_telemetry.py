from __future__ import annotations

import json
import logging
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from stretto import telemetry
from stretto.errors import UnavailableError


@pytest.fixture
def logged(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    """What the process logged since the last call; the handlers of the test runner are put back."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield lambda: capsys.readouterr().err
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def test_a_log_line_is_one_json_object_with_its_fields(logged: Callable[[], str]) -> None:
    log = telemetry.setup("rollout", "INFO")
    log.info("weights_updated", extra={"fields": {"version": 3, "stall_ms": float("nan")}})
    log.debug("not_shown")
    logging.getLogger("somebody").info("not shown either")
    (line,) = logged().splitlines()
    entry = json.loads(line)
    assert entry.pop("ts").endswith("Z")
    assert entry == {"level": "INFO", "service": "rollout", "event": "weights_updated", "version": 3, "stall_ms": "nan"}


def test_a_traceback_travels_in_the_line_and_is_readable_again(logged: Callable[[], str]) -> None:
    log = telemetry.setup("trainer", "INFO")
    try:
        raise ValueError("boom")
    except ValueError:
        log.exception("step_failed", extra={"fields": {"step": 4}})
    text = telemetry.readable(logged())
    assert text.splitlines()[0].endswith("ERROR step_failed step=4")
    assert text.endswith("ValueError: boom")


@pytest.mark.parametrize("line", ["plain text", "[1]", "{}", '{"ts": 1}'])
def test_what_is_no_log_line_stays_as_it_is(line: str) -> None:
    assert telemetry.readable(line + "\n") == line


def test_setting_up_twice_logs_once(logged: Callable[[], str]) -> None:
    telemetry.setup("rollout", "INFO")
    telemetry.setup("rollout", "INFO").info("once")
    assert len(logged().splitlines()) == 1


def test_metrics_are_served_and_a_taken_port_is_an_error_by_name() -> None:
    port = telemetry.serve_metrics("127.0.0.1:0")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        assert b"python_info" in answer.read()
    with pytest.raises(UnavailableError, match=f"metrics_listen 127.0.0.1:{port}"):
        telemetry.serve_metrics(f"127.0.0.1:{port}")
