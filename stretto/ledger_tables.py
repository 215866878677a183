"""The ledger for people: the proof, the open groups, one group's life."""

from __future__ import annotations

import time
from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stretto.results import LedgerGroup, LedgerReport

STATES = ("pending", "running", "finished", "failed", "consumed")
"""That occupy the window, in the order of a group's life."""


def proof(report: LedgerReport, source: str) -> RenderableType:
    """What was found, and the verdict."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(style="dim")
    o = report.occupancy
    table.add_row("ordinals entered", f"{report.ordinals_entered:,}", "")
    table.add_row("trained", f"{report.ordinals_trained:,}", f"in {report.committed_step} steps, {report.checkpoint_step} saved")
    table.add_row("evicted", f"{report.ordinals_evicted:,}", "")
    for reason, count in sorted(report.evicted_by_reason.items()):
        table.add_row("", f"{count:,}", reason)
    table.add_row("open", f"{o.occupied:,}", f"window {o.window}")
    for state in STATES:
        if count := getattr(o, state):
            table.add_row("", f"{count:,}", state)
    table.add_row("duplicates", _must_be_zero(report.duplicates), "")
    table.add_row("gaps", _must_be_zero(report.gaps), "")
    table.add_row("users' prompts", f"{report.user_entered:,}", f"{report.user_trained} trained, {report.user_evicted} evicted")
    table.add_row("greatest lag trained", str(report.lag_trained_max), f"{report.max_lag} allowed")
    parts: list[RenderableType] = [Text(f"ledger of {source}", "bold"), table]
    parts += [Text(f"note  {note}", "yellow") for note in report.notes]
    parts += [Text(f"VIOLATED  {text}", "red") for text in report.violations]
    broken = {text.partition(":")[0] for text in report.violations}
    marks = [Text(name, "bold red") if name in broken else Text(name, "green") for name in report.checked]
    verdict = Text("NOT OK ", "bold red") if not report.ok else Text("ok ", "bold green")
    return Group(*parts, verdict + Text(" ").join(marks))


def _must_be_zero(count: int) -> Text:
    return Text(f"{count:,}", "green" if count == 0 else "bold red")


def open_groups(groups: Iterable[LedgerGroup], now_s: float | None = None) -> RenderableType:
    """A row per group that has not ended."""
    now_s = time.time() if now_s is None else now_s
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("uid", "state", "ordinal", "attempt", "replica", "leased", "answers", "began at"):
        table.add_column(name, justify="right" if name in ("ordinal", "attempt", "leased", "answers", "began at") else "left")
    table.add_column("note", overflow="fold")
    for g in groups:
        begun = "" if g.version_begin is None else f"v{g.version_begin}"
        note = g.reason or (f"evaluation {g.evaluation}" if g.evaluation else "") or (f"step {g.step}" if g.step else "")
        answers = f"{g.num_in}/{g.group_size}" if g.group_size else ""
        ordinal, attempt = "" if g.ordinal < 0 else str(g.ordinal), "" if g.attempts is None else str(g.attempts)
        table.add_row(g.uid, g.state, ordinal, attempt, g.replica, _age(g, now_s), answers, begun, Text(note))
    return table if table.row_count else Text("no group is open")


def _age(group: LedgerGroup, now_s: float) -> str:
    return "" if group.granted_unix_s is None else f"{max(0.0, now_s - group.granted_unix_s):.1f} s ago"


def life(group: LedgerGroup, now_s: float | None = None) -> RenderableType:
    """All that is known of one group."""
    now_s = time.time() if now_s is None else now_s
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    ended = f" in step {group.step}" if group.state == "trained" else f" by step {group.step}" if group.step else ""
    rows = {
        "state": f"{group.state}{ended}{f' on replica {group.replica}' if group.replica else ''}",
        "ordinal": "" if group.ordinal < 0 else str(group.ordinal),
        "began at": "" if group.version_begin is None else f"version {group.version_begin}",
        "attempts": "" if group.attempts is None else f"{group.attempts}, newest leased {_age(group, now_s) or 'never'}",
        "reason": group.reason,
        "evaluation": group.evaluation,
        "prompt": group.text,
        "ground truth": group.ground_truth,
    }
    for name, value in rows.items():
        if value:
            table.add_row(name, Text(value))
    if not group.answers:
        return Group(Text(group.uid, "bold"), table)
    answers = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("answer", "end", "tokens", "versions", "reward", "took", "replica", "error"):
        answers.add_column(name, justify="right" if name in ("answer", "tokens", "reward", "took") else "left")
    for a in group.answers:
        versions = " ".join(f"v{version}x{count}" for version, count in a.spans)
        reward = "" if a.finish_reason in ("aborted", "failed") else f"{a.reward:g}"
        took = f"{a.generation_s:.2f} s"
        answers.add_row(str(a.index), a.finish_reason, str(a.num_tokens), versions, reward, took, a.replica_id, Text(a.error))
    return Group(Text(group.uid, "bold"), table, answers)
