"""Logs and metrics of a service.

    setup("rollout", "INFO")                            one handler on stderr: JSON lines, or human ones on a terminal
    log.info("weights_updated", extra={"fields": {…}})  an event is a name and fields
    serve_metrics("127.0.0.1:0") -> port                Prometheus text on /metrics

Transitions are logged once, where they are made; a state that lasts is a metric.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from datetime import UTC, datetime
from typing import Any

from stretto.errors import UnavailableError

_LEVEL_COLOURS = {"WARNING": "\033[33m", "ERROR": "\033[31m", "CRITICAL": "\033[31m"}


def setup(service: str, level: str = "INFO") -> logging.Logger:
    """Give the process its one log handler, on stderr; the logger "stretto.<service>". Idempotent.

    Our own loggers ("stretto.…") log from `level` on, libraries from WARNING on.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(HumanFormatter(service) if sys.stderr.isatty() else JsonFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("stretto").setLevel(level)
    logging.captureWarnings(True)
    return logging.getLogger(f"stretto.{service}")


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """What the caller passed as extra={"fields": …}."""
    return dict(getattr(record, "fields", {}))


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ts, level, service, event, then the event's fields, then `exception`."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "service": self._service,
            "event": record.getMessage(),
        }
        if not record.name.startswith("stretto"):
            line["logger"] = record.name
        line |= {key: _plain(value) for key, value in fields_of(record).items()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class HumanFormatter(logging.Formatter):
    """`12:00:01 rollout weights_updated version=3 stall_ms=4.1`"""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        colour = _LEVEL_COLOURS.get(record.levelname, "")
        level = f"{colour}{record.levelname}\033[0m " if colour else ""
        clock = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        text = f"{clock} {self._service} {level}{record.getMessage()}"
        fields = " ".join(f"{key}={_short(value)}" for key, value in fields_of(record).items())
        exception = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        return f"{text} {fields}".rstrip() + exception


def readable(line: str) -> str:
    """A line of a service's log file for people: JSON lines become human ones, anything else stays as it is."""
    try:
        entry: dict[str, Any] = json.loads(line)
        clock, level, event = str(entry.pop("ts"))[11:19], str(entry.pop("level")), str(entry.pop("event"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return line.rstrip("\n")
    entry.pop("service", None)
    exception = entry.pop("exception", "")
    fields = " ".join(f"{key}={_short(value)}" for key, value in entry.items())
    text = f"{clock} {'' if level == 'INFO' else level + ' '}{event} {fields}".rstrip()
    return f"{text}\n{exception}" if exception else text


def serve_metrics(listen: str) -> int:
    """Serve this process's metrics on http://<listen>/metrics from a thread of their own; the port. Raises UnavailableError."""
    from prometheus_client import start_http_server

    from stretto.endpoints import split

    host, port = split(listen, "metrics_listen")
    try:
        server, _ = start_http_server(port, host)
    except OSError as err:
        raise UnavailableError(f"metrics_listen {listen}: {err.strerror or err}") from err
    return int(server.server_port)


def _plain(value: Any) -> Any:
    """NaN and infinities as text: they are no JSON."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return f'"{text}"' if " " in text else text
