"""`stretto run`: check, prepare, start, show, stop, sum up.

recipe -> lock -> preflight -> make data and model -> Supervisor.start
                                                         |  ten times a second: poll, show
SIGINT, SIGTERM, SIGHUP: stop in order; again: at once   |
summary <- ledger verified <- done  <--------------------+
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from stretto import cuts, endpoints, plot, preflight, prepare, process, recipe, runs
from stretto.client import Client
from stretto.errors import StrettoError
from stretto.monitor import Monitor
from stretto.recipe import Recipe
from stretto.screen import Headless, Live, Screen
from stretto.summary import Summary, summarise
from stretto.supervisor import Notice, Outcome, Plan, Progress, Supervisor, plan

POLL_S = 0.1
INTERRUPTED_CODE = 130
"""128 + SIGINT, as shells have it."""


class Interrupts:
    """Counts the signals that ask for the end, from construction on: 1 = stop in order, more = at once."""

    def __init__(self) -> None:
        self.count = 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._take)

    def _take(self, *_: object) -> None:
        self.count += 1


class StoppedError(StrettoError):
    """Stopped by the user."""


def run(
    config: Path,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    *,
    is_headless: bool,
    is_fresh: bool,
    console: Console,
    resume_step: int | None = None,
) -> int:
    """Run the recipe to its end; the exit code. Raises StrettoError for what is wrong before the start.

    `resume_step` = go back to the checkpoint of that step; None = the newest.
    """
    loaded = recipe.load(config, overrides, environ)
    interrupts = Interrupts()
    folder = loaded.run.folder
    for problem in _checked(loaded, environ):
        console.print(f"[yellow]warning[/] {problem}", highlight=False, soft_wrap=True)
    claims = endpoints.Claims()
    made = plan(loaded, config, overrides, claims)
    lock = runs.Lock(folder)
    try:
        if is_fresh:
            _start_over(loaded)
        if resume_step is not None:
            for path in cuts.go_back(folder / "checkpoints", resume_step):
                console.print(f"set aside: {path}", highlight=False, soft_wrap=True)
        _prepare(loaded, interrupts, console)
        return _Launch(loaded, config, overrides, made, lock, interrupts, console, is_headless).run(environ)
    except StoppedError:
        console.print("stopped before the start")
        return INTERRUPTED_CODE
    finally:
        claims.close()
        lock.release()


def _checked(loaded: Recipe, environ: Mapping[str, str]) -> list[preflight.Problem]:
    problems = preflight.check(loaded, preflight.Machine.here(), environ.get("STRETTO_REDIS_SERVER"))
    preflight.refuse(problems)
    return problems


def _start_over(loaded: Recipe) -> None:
    prepare.forget(loaded.run.folder)
    if loaded.redis.url:
        from stretto import store  # redis is installed only where it is needed

        store.forget_run(loaded.redis.url, loaded.run.name)


def _prepare(loaded: Recipe, interrupts: Interrupts, console: Console) -> None:
    def execute(command: tuple[str, ...], log: Path) -> int:
        guard = process.Guard()
        try:
            with log.open("wb") as output:
                child = process.spawn(command, guard, output=output)
            while (code := process.reap(child, guard)) is None:
                if interrupts.count:
                    raise StoppedError
                time.sleep(0.05)
        finally:
            guard.close()
        return code

    for task in prepare.tasks(loaded):
        if task.is_made:
            continue
        start_s = time.monotonic()
        with _spinner(console, f"making the {task.what} ({task.stamp['task']}, seed {task.stamp['seed']}) …"):
            prepare.make(task, loaded.run.folder, execute)
        console.print(f"made the {task.what} in {time.monotonic() - start_s:.1f} s: {task.folder}", highlight=False)


def _spinner(console: Console, text: str) -> AbstractContextManager[object]:
    if console.is_terminal:
        return console.status(text)
    console.print(text, highlight=False)
    return nullcontext()


class _Launch:
    """One run from start to summary."""

    def __init__(
        self,
        loaded: Recipe,
        config: Path,
        overrides: Sequence[str],
        made: Plan,
        lock: runs.Lock,
        interrupts: Interrupts,
        console: Console,
        is_headless: bool,
    ) -> None:
        self._recipe, self._config, self._overrides, self._plan, self._lock = loaded, config, overrides, made, lock
        self._interrupts, self._console = interrupts, console
        self._notices: list[str] = []
        self._start_s = time.monotonic()
        self._monitor = Monitor(made.addresses["scheduler"])
        is_live = console.is_terminal and not is_headless
        self._screen: Screen = Live(console, loaded.run.name) if is_live else Headless(console, time.time())

    def run(self, environ: Mapping[str, str]) -> int:
        folder = self._recipe.run.folder
        supervisor = Supervisor(folder, self._plan, self._lock, environ=environ, probe=self._progress, notify=self._notice)
        outcome: Outcome | None = None
        summary: Summary | None = None
        try:
            supervisor.start()
            given = [item for item in self._overrides if not item.startswith("redis.url")]
            recipe_path = str(self._config.resolve())
            run_file = runs.RunFile(self._recipe.run.name, os.getpid(), time.time(), recipe_path, self._plan.addresses, given)
            runs.write(folder, run_file)
            with self._screen:
                outcome = self._watch(supervisor)
                summary = self._summarise(outcome, supervisor)
        finally:
            self._monitor.close()  # first: a scheduler that drains waits for its watchers
            self._stop(supervisor, outcome)
        return self._report(outcome, summary)

    def _progress(self) -> Progress:
        status = self._monitor.heard.status
        return Progress() if status is None else Progress(status.committed_step, status.is_done)

    def _notice(self, notice: Notice) -> None:
        self._notices.append(notice.text)
        self._screen.notice(notice.text)

    def _watch(self, supervisor: Supervisor) -> Outcome | None:
        """None when interrupted."""
        while not self._interrupts.count:
            if (outcome := supervisor.poll()) is not None:
                return outcome
            self._show(supervisor)
            time.sleep(POLL_S)
        return None

    def _show(self, supervisor: Supervisor) -> None:
        self._screen.show(self._monitor, supervisor.rows(), self._notices, time.monotonic() - self._start_s)

    def _summarise(self, outcome: Outcome | None, supervisor: Supervisor) -> Summary | None:
        """What the run achieved, asked while the scheduler still lives."""
        if outcome is None or outcome.exit_code != 0:
            return None
        elapsed_s, report = time.monotonic() - self._start_s, None
        self._monitor.wait_for_end()
        self._show(supervisor)
        try:
            with Client(self._plan.addresses["scheduler"]) as client:
                report = client.verify_ledger()
        except StrettoError as err:
            self._notice(Notice(f"the ledger could not be verified: {err.message}"))
        return summarise(self._monitor.heard.status, self._monitor.history, report, elapsed_s, supervisor.num_restarts)

    def _stop(self, supervisor: Supervisor, outcome: Outcome | None) -> None:
        if outcome is None:
            self._console.print("stopping: the trainer first, then the others; again to kill at once")
        asked = min(self._interrupts.count, 1)  # a second one that came while we left the screen counts
        supervisor.stop(lambda: self._interrupts.count > asked)

    def _report(self, outcome: Outcome | None, summary: Summary | None) -> int:
        folder, console = self._recipe.run.folder, self._console
        try:
            picture: Path | None = plot.draw(folder, f"{self._recipe.run.name}: reward and validation accuracy")
        except StrettoError:
            picture = None
        if outcome is None:
            console.print(
                f"stopped; stretto run {self._config} goes on from the newest checkpoint in {folder / 'checkpoints'}", highlight=False
            )
            return INTERRUPTED_CODE
        if outcome.exit_code != 0:
            _blame(console, outcome)
            return outcome.exit_code
        if summary is not None:
            (folder / "summary.json").write_text(json.dumps(asdict(summary), indent=2))
            console.print(summary.table(folder, picture))
        return 0 if summary is None or summary.is_ledger_ok is not False else 1


def _blame(console: Console, outcome: Outcome) -> None:
    console.print(f"[red]the run ended: {outcome.reason}[/]", highlight=False)
    for text in outcome.tail:
        console.print(f"  {text}", style="dim", highlight=False, markup=False)
    if outcome.log is not None:
        console.print(f"whole log: {outcome.log}", highlight=False)
