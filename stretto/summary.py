"""What a finished run achieved: a table for people, summary.json for programs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from stretto.client import LedgerReport, Status
from stretto.display import clock
from stretto.history import History


@dataclass(frozen=True, slots=True)
class Summary:
    """None where nothing was measured. Rates and shares are means over the time the run was seen running."""

    wall_s: float
    """From the start of the command, with everything that is loaded."""
    running_s: float | None
    steps: int
    reward_first: float | None
    reward_last: float | None
    accuracy_first: float | None
    accuracy_last: float | None
    completions: int
    completions_per_s: float | None
    tokens_per_s: float | None
    lag_trained_max: int
    lag_allowed: int
    trainer_busy: float | None
    rollout_busy: float | None
    restarts: int
    is_ledger_ok: bool | None
    """None: could not be asked."""
    ledger: str

    def table(self, folder: Path, picture: Path | None) -> Table:
        """For people."""
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), title="[bold green]done[/]", title_justify="left")
        table.add_column(style="dim")
        table.add_column()
        running = "" if self.running_s is None else f" ({clock(self.running_s)} training, the rest loading)"
        table.add_row("time", f"{clock(self.wall_s)}{running}")
        table.add_row("steps", str(self.steps))
        table.add_row("validation accuracy", _from_to(self.accuracy_first, self.accuracy_last))
        table.add_row("reward", _from_to(self.reward_first, self.reward_last))
        table.add_row("rates", f"{_number(self.completions_per_s, ',.0f')} answers/s · {_number(self.tokens_per_s, ',.0f')} tokens/s")
        table.add_row("lag", f"{self.lag_trained_max} most trained · {self.lag_allowed} allowed")
        table.add_row("busy", f"trainer {_number(self.trainer_busy, '.0%')} · rollout {_number(self.rollout_busy, '.0%')}")
        table.add_row("restarts", str(self.restarts))
        table.add_row("ledger", f"[{'green' if self.is_ledger_ok else 'red'}]{self.ledger}[/]")
        places = {"model": folder / "final", "checkpoints": folder / "checkpoints", "plot": picture, "logs": folder / "logs"}
        for what, path in places.items():
            if path is not None and path.exists():
                table.add_row(what, str(path))
        return table


def summarise(status: Status | None, history: History, report: LedgerReport | None, wall_s: float, restarts: int) -> Summary:
    """Pure: from what the display remembers."""
    reward, accuracy, running_s = history.reward.values, history.accuracy.values, history.running_s
    completions = 0 if status is None else status.num_trajectories - (history.trajectories_begin or 0)
    return Summary(
        wall_s=wall_s,
        running_s=running_s,
        steps=0 if status is None else status.committed_step,
        reward_first=reward[0] if reward else None,
        reward_last=reward[-1] if reward else None,
        accuracy_first=accuracy[0] if accuracy else None,
        accuracy_last=accuracy[-1] if accuracy else None,
        completions=completions,
        completions_per_s=completions / running_s if running_s else None,
        tokens_per_s=history.tokens_per_s.value,
        lag_trained_max=0 if status is None else status.lag_trained_max,
        lag_allowed=0 if status is None else status.max_lag,
        trainer_busy=history.trainer_busy.value,
        rollout_busy=history.rollout_busy.value,
        restarts=restarts,
        is_ledger_ok=None if report is None else report.ok,
        ledger=ledger_line(report),
    )


def ledger_line(report: LedgerReport | None) -> str:
    """One line for people."""
    if report is None:
        return "not verified"
    counts = f"{report.ordinals_entered} prompts entered, {report.ordinals_trained} trained once, {report.ordinals_evicted} evicted, "
    counts += f"{report.ordinals_open} open; {report.duplicates} twice, {report.gaps} lost"
    return counts if report.ok else f"BROKEN: {'; '.join(report.violations)} ({counts})"


def _from_to(first: float | None, last: float | None) -> str:
    return "-" if first is None or last is None else f"{first:.3f} -> [bold]{last:.3f}[/]"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
