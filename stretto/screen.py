"""Where a run is shown: a live picture on a terminal, or one line per event."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from rich import live
from rich.console import Console

from stretto.display import View, line, render
from stretto.history import NOTABLE
from stretto.monitor import Monitor
from stretto.supervisor import Row

REDRAW_S = 0.4
"""Between two pictures; each costs some milliseconds that the run could use."""


class Screen(Protocol):
    def show(self, monitor: Monitor, rows: Sequence[Row], notices: Sequence[str], elapsed_s: float) -> None:
        """Called often; draws when it is due."""
        ...

    def notice(self, text: str) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None) -> None: ...


class Live:
    """The picture of display.py, redrawn in place."""

    def __init__(self, console: Console, title: str) -> None:
        self._console, self._title = console, title
        self._live = live.Live(console=console, auto_refresh=False)
        self._drawn_s = 0.0

    def show(self, monitor: Monitor, rows: Sequence[Row], notices: Sequence[str], elapsed_s: float) -> None:
        now_s, heard = time.monotonic(), monitor.heard
        is_last = heard.status is not None and heard.status.is_done
        if now_s - self._drawn_s < REDRAW_S and not is_last:
            return
        self._drawn_s = now_s
        monitor.take_events()
        view = View(self._title, elapsed_s, heard.status, monitor.history, tuple(rows), tuple(notices), heard.reasons, heard.error)
        self._live.update(render(view, min(self._console.width, 130)), refresh=True)

    def notice(self, text: str) -> None:
        """Shown in the picture."""

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None) -> None:
        self._live.stop()


class Headless:
    """One line per step and notable event."""

    def __init__(self, console: Console, since_unix_s: float) -> None:
        """Events from before `since_unix_s` (an earlier run in the folder) are not printed again."""
        self._console, self._since_unix_s = console, since_unix_s
        self._told: set[str] = set()
        """Reasons of the present wait that were printed, without their numbers."""

    def show(self, monitor: Monitor, rows: Sequence[Row], notices: Sequence[str], elapsed_s: float) -> None:
        heard = monitor.heard
        if heard.status is None:  # a line says "step 3/60"; events wait for the 60
            return
        total = heard.status.total_steps
        for event in monitor.take_events():
            if event.unix_s >= self._since_unix_s and (event.kind == "step" or event.kind in NOTABLE):
                self._print(line(event, total), event.unix_s)
        if not heard.reasons:
            self._told.clear()
        for reason in heard.reasons[:2]:
            shape = re.sub(r"\d+", "#", reason)
            if shape not in self._told:
                self._told.add(shape)
                self._print(f"waiting: {reason}", time.time())

    def notice(self, text: str) -> None:
        self._print(f"! {text}", time.time())

    def _print(self, text: str, unix_s: float) -> None:
        clock = time.strftime("%H:%M:%S", time.localtime(unix_s))
        self._console.print(f"{clock} {text}", markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None) -> None:
        return None
