"""The live picture of a run: a pure function from a View to something rich can draw.

+-- word-problems  step 23/60 ============----------  1:12 left --+
| reward ▂▃▅▆▇            | validation accuracy ▂▅▇               |
| window, lag, rates      | processes: state, busy, restarts      |
| what happened, what it waits for                                |
+-----------------------------------------------------------------+
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stretto.client import Event, Occupancy, Replica, Status
from stretto.history import Curve, History, short, step_of, told
from stretto.supervisor import Row

WIDE = 104
"""Columns from which on facts and processes stand side by side."""
CHART_ROWS = 6
BLOCKS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class View:
    """Everything the picture shows."""

    title: str
    elapsed_s: float
    status: Status | None
    history: History
    rows: tuple[Row, ...] = ()
    """The supervisor's processes; empty when the run is watched from elsewhere."""
    notices: tuple[str, ...] = ()
    """Last messages of the supervisor."""
    reasons: tuple[str, ...] = ()
    """What the run waits for."""
    error: str = ""
    """Why the scheduler does not answer."""


def render(view: View, width: int) -> RenderableType:
    """The whole picture, `width` columns wide."""
    inner = width - 4
    parts: list[RenderableType] = [_head(view, inner), Text("")]
    half = (inner - 3) // 2
    charts = Table.grid(padding=(0, 3, 0, 0))
    charts.add_row(
        _chart("reward", view.history.reward, half, "mean of the step's answers"),
        _chart("validation accuracy", view.history.accuracy, half, "held out, sampled"),
    )
    parts += [charts, Text("")]
    if view.status is not None:
        facts, processes = _facts(view, view.status, half), _processes(view, view.status)
        if width < WIDE:
            parts += [facts, Text(""), processes, Text("")]
        else:
            lower = Table.grid(padding=(0, 3, 0, 0))
            lower.add_row(facts, processes)
            parts += [lower, Text("")]
    parts += _lines(view)
    return Panel(Group(*parts), title=f"[bold]stretto[/] · {view.title}", border_style="cyan", width=width)


def _head(view: View, width: int) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    status = view.status
    if status is None or not status.total_steps:
        waiting = "starting" if not view.error or view.elapsed_s < 15 else f"waiting for the scheduler: {view.error}"
        return Text(f"{waiting} … {clock(view.elapsed_s)}", overflow="ellipsis", no_wrap=True)
    left_s = view.history.left_s(status)
    colour = {"paused": "yellow", "done": "green", "finishing": "green"}.get(status.phase, "cyan")
    left = f"{clock(left_s)} left" if left_s is not None and status.phase in ("running", "paused") else ""
    texts = [f"step {status.committed_step}/{status.total_steps}", f"{clock(view.elapsed_s)}", left]
    bar_width = max(10, width - sum(map(len, texts)) - len(status.phase) - 12)
    bar = ProgressBar(total=status.total_steps, completed=status.committed_step, width=bar_width)
    grid.add_row(Text(texts[0], "bold"), bar, Text(status.phase, colour), Text(texts[1], "dim"), Text(left, "dim"))
    return grid


def _chart(name: str, curve: Curve, width: int, what: str) -> RenderableType:
    title = Text.assemble(
        (name, "bold"), "  ", (f"{curve.values[-1]:.3f}", "bold green") if curve.values else ("", ""), "  ", (what, "dim")
    )
    title.truncate(width, overflow="ellipsis")
    label = 6
    lines = bars(curve.values, width - label, CHART_ROWS)
    low, high = span(curve.values)
    body = Text()
    for i, line in enumerate(lines):
        mark = f"{high:.2f}" if i == 0 else f"{low:.2f}" if i == CHART_ROWS - 1 else ""
        body.append(f"{mark:>5} ", "dim").append(line, "cyan").append("\n")
    if curve.steps:
        ends = f"{'':>{label}}step {curve.steps[0]}"
        body.append(ends + f"{curve.steps[-1]:>{max(1, width - len(ends))}}", "dim")
    return Group(title, body)


def span(values: Sequence[float]) -> tuple[float, float]:
    """Lower and upper end of a chart's axis: accuracies and 0/1 rewards are drawn from 0, and a flat curve has some height."""
    if not values:
        return 0.0, 1.0
    low, high = min(0.0, *values, 0.0), max(values)
    return low, high if high > low else low + 1.0


def bars(values: Sequence[float], width: int, height: int) -> list[str]:
    """A bar chart, top line first: one column per value, or per mean of neighbours when there are more than `width`."""
    if len(values) > width:
        cuts = [len(values) * i // width for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    low, high = span(values)
    heights = [round((v - low) / (high - low) * height * 8) for v in values]
    repeat = max(1, min(4, width // max(1, len(values))))  # few points get wide bars
    return ["".join(BLOCKS[max(0, min(8, h - 8 * row))] * repeat for h in heights) for row in reversed(range(height))]


def _facts(view: View, status: Status, width: int) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim")
    grid.add_column()
    o, lag = status.occupancy, view.history.lag
    grid.add_row("window", _window(o, max(10, width - 22)))
    grid.add_row("", Text(f"{o.pending} queued · {o.running} sampled · {o.finished} ready · {o.consumed} trained", "dim"))
    last = f"{lag.values[-1]:.0f}" if lag.values else "-"
    grid.add_row("lag", f"{last} now · {status.lag_trained_max} most · {status.max_lag} allowed")
    tokens = sum(r.tokens_per_s for r in status.replicas)
    grid.add_row("rates", f"{status.completions_per_s:,.0f} answers/s · {tokens:,.0f} tokens/s")
    if view.history.step_s is not None:
        grid.add_row("step", f"{view.history.step_s:.2f} s")
    counts = {"evicted": status.num_evicted, "failed": status.num_failed, "issued again": status.num_reissued}
    grid.add_row("prompts", " · ".join(f"{n} {what}" for what, n in counts.items()))
    grid.add_row("saved", f"step {status.checkpoint_step}")
    return grid


def _window(o: Occupancy, width: int) -> Text:
    """occupied/window as a bar of its states."""
    text, room = Text(), max(1, o.window)
    for count, style in ((o.consumed, "green"), (o.finished, "cyan"), (o.running, "blue"), (o.pending, "bright_black")):
        text.append("█" * (count * width // max(room, o.occupied)), style)
    return text.append(f" {o.occupied}/{o.window}")


def _processes(view: View, status: Status) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("process", "state", "busy", "version", "restarts"):
        table.add_column(heading, no_wrap=True)
    for row in view.rows:
        table.add_row(row.name, _state(row.state), *_work(row, status), str(row.restarts or "-"))
    if not view.rows:
        if status.trainer is not None:
            table.add_row("trainer", _state("running"), *_trainer_work(status), "-")
        for r in (r for r in status.replicas if r.state != "dead"):
            table.add_row(r.replica_id, _state(r.state), *_replica_work(r), "-")
    return table


def _state(state: str) -> Text:
    return Text(state.replace("_", " "), {"running": "green", "restarting": "red", "dead": "red", "ended": "dim"}.get(state, "yellow"))


def _work(row: Row, status: Status) -> tuple[str, str]:
    """(busy, version) of a process of ours."""
    if row.name == "trainer":
        return _trainer_work(status)
    replica = next((r for r in status.replicas if r.address == row.address and r.state != "dead"), None)
    return _replica_work(replica) if replica is not None else ("-", "-")


def _trainer_work(status: Status) -> tuple[str, str]:
    if status.trainer is None:
        return "-", "-"
    return short(status.trainer.metrics, "busy_share", ".0%"), str(status.committed_step)


def _replica_work(replica: Replica) -> tuple[str, str]:
    return f"{replica.busy_share:.0%}", "-" if replica.version is None else str(replica.version)


def _lines(view: View) -> list[RenderableType]:
    lines: list[RenderableType] = [_one_line(f"  {text}", "dim") for text in list(view.history.lines)[-4:]]
    lines += [_one_line(f"! {text}", "yellow") for text in view.notices[-3:]]
    lines += [_one_line(f"… {text}", "magenta") for text in view.reasons[:2]]
    if view.error and view.status is not None:
        lines.append(_one_line(f"… the scheduler does not answer: {view.error}", "magenta"))
    return lines


def _one_line(text: str, style: str) -> Text:
    return Text(text, style, overflow="ellipsis", no_wrap=True)


def clock(seconds: float) -> str:
    """0:07, 12:34, 1:02:03."""
    minutes, s = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{s:02}" if hours else f"{minutes}:{s:02}"


def line(event: Event, total_steps: int) -> str:
    """An event as one line, for output that is not a terminal."""
    if event.kind != "step":
        return told(event)
    v = event.values
    of = f"/{total_steps}" if total_steps else ""
    parts = [f"step {step_of(event)}{of}"]
    for name, label, form in (
        ("reward_mean", "reward", ".3f"),
        ("loss", "loss", ".4f"),
        ("lag_max", "lag", ".0f"),
        ("grad_norm", "grad", ".3f"),
        ("train_s", "train", ".2f"),
        ("sample_wait_s", "wait", ".2f"),
    ):
        if name in v:
            parts.append(f"{label} {v[name]:{form}}" + (" s" if name.endswith("_s") else ""))
    return "  ".join(parts)
