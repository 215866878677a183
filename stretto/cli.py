"""The `stretto` command. Imports what a command needs when it runs, so that `--help` is quick; never torch.

Exit codes: 0 done, 1 failed, 2 the recipe or the arguments are not valid, 3 fenced by a newer run, 4 the run cannot be reached,
130 stopped by the user. `stretto ledger`: 0 as it should be, 1 violated, 2 could not look.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stretto.errors import FencedError, InvalidArgumentError, NotFoundError, StrettoError, UnavailableError

if TYPE_CHECKING:
    from rich.console import Console

    from stretto.client import Client, Status
    from stretto.ledgers import Source

app = typer.Typer(
    help="Asynchronous RL post-training: start a run, watch it, talk to it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
ledger_app = typer.Typer(help="The prompt ledger.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(ledger_app, name="ledger")

Address = Annotated[str, typer.Option("--address", envvar="STRETTO_ADDRESS", help="host:port of the run's scheduler.")]
RunFolder = Annotated[Path | None, typer.Option("--run", help="Folder of the run. Default: the newest live one under ./runs.")]
Checkpoint = Annotated[str, typer.Option("--checkpoint", metavar="step-N", help="Read that checkpoint's snapshot instead of the store.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON for programs.")]
RecipePath = Annotated[Path, typer.Argument(help="TOML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[section.key=value]…", help="Settings that replace the recipe's.")]

EXPORTED = ("uid", "ordinal", "state", "step", "version_begin", "attempts", "reason")
"""Fields of a line of `ledger export`."""
LEDGER_UNREAD_CODE = 2
"""Of `stretto ledger`: could not look."""


def main() -> None:
    """The console script: one clear message for an expected error, a traceback for a bug."""
    try:
        app(prog_name="stretto")
    except StrettoError as err:
        sys.stderr.write(f"error: {err.message}\n")
        sys.exit(exit_code(err))


def exit_code(err: StrettoError) -> int:
    """See the top of this file."""
    for kind, code in ((FencedError, 3), (InvalidArgumentError, 2), (UnavailableError, 4), (NotFoundError, 4)):
        if isinstance(err, kind):
            return code
    return 1


def _client(address: str, run: Path | None) -> Client:
    """The run meant by --address, --run, $STRETTO_ADDRESS, or the newest live one. Raises NotFoundError."""
    from stretto.client import Client

    if run is not None:
        return Client.local(run)
    return Client(address) if address else Client.local()


def _console() -> Console:
    """Where it is no terminal, lines are for files and pipes and may be wide."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 140)


def _say(text: str = "") -> None:
    typer.echo(text)


# ------------------------------------------------------------------------------------------------------------ runs


@app.command("run")
def run_command(
    recipe: RecipePath,
    overrides: Overrides = None,
    headless: Annotated[bool, typer.Option("--headless", help="One line per step instead of the live picture.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget what earlier runs left in the run folder.")] = False,
    resume: Annotated[
        str, typer.Option("--resume", metavar="step=N", help="Go back to the checkpoint of step N; later ones are set aside.")
    ] = "",
) -> None:
    """Run RECIPE on this machine; the same command resumes an interrupted run."""
    from stretto import cuts, launch

    step = cuts.parse(resume) if resume else None
    if fresh and step is not None:
        raise InvalidArgumentError(f"--fresh forgets what --resume {resume} would resume from: leave one out")
    console = _console()
    sys.exit(launch.run(recipe, overrides or [], os.environ, is_headless=headless, is_fresh=fresh, resume_step=step, console=console))


@app.command()
def validate(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Check RECIPE and this machine; start nothing."""
    from stretto import preflight
    from stretto.recipe import load

    loaded, machine = load(recipe, overrides or [], os.environ), preflight.Machine.here()
    problems = preflight.check(loaded, machine, os.environ.get("STRETTO_REDIS_SERVER"), runs_here=False)
    preflight.refuse(problems)
    for problem in problems:
        _say(f"warning: {problem}")
    s, t = loaded.scheduler, loaded.trainer
    answers = s.batch_groups * loaded.sampling.group_size
    _say(f"{recipe}: valid")
    _say(f"  {t.steps} steps of {s.batch_groups} prompts x {loaded.sampling.group_size} answers = {answers} trajectories")
    _say(f"  window {loaded.window} prompts, lag at most {s.max_lag}, {loaded.rollout.replicas} replicas of {loaded.rollout.slots} slots")
    _say(f"  {machine.cores} cores, {machine.memory_bytes / 1e9:.1f} GB free, folder {loaded.run.folder}")


@app.command()
def status(
    address: Address = "",
    run: RunFolder = None,
    as_json: AsJson = False,
    begun_since: Annotated[int | None, typer.Option(min=0, help="Count only groups begun by this version or a newer one.")] = None,
) -> None:
    """Where the run is."""
    with _client(address, run) as client:
        state = client.status(begun_since)
    if as_json:
        _print_json(asdict(state))
        return
    for text in status_lines(state):
        _say(text)


def status_lines(s: Status) -> list[str]:
    """The status for people."""
    o, paused = s.occupancy, f" ({s.pause_reason})" if s.pause_reason else ""
    lines = [
        f"{s.run}: {s.phase}{paused}, step {s.committed_step}/{s.total_steps}, saved {s.cut_id or 'nothing yet'}",
        f"window   {o.occupied}/{o.window}: {o.pending} queued, {o.running} sampled, {o.finished} ready, {o.consumed} trained",
        f"lag      {s.lag_trained_max} most trained, {s.max_lag} allowed",
        f"prompts  {s.cursor} entered, {s.num_evicted} evicted, {s.num_failed} failed, {s.num_reissued} issued again",
        f"answers  {s.num_trajectories} ({s.completions_per_s:,.0f}/s)",
    ]
    if (e := s.last_evaluation) is not None:
        lines.append(f"accuracy {e.accuracy:.3f} at step {e.step} ({e.num_sessions} answers, {e.num_failed} failed, {e.outcome})")
    if s.trainer is not None:
        lines.append(f"trainer  epoch {s.trainer.trainer_epoch} at {s.trainer.address}, heard {s.trainer.last_heard_s:.1f} s ago")
    lines += [
        f"replica  {r.replica_id} {r.state}, version {'-' if r.version is None else r.version}, {r.running_sequences}/{r.slots} sequences, "
        f"{r.tokens_per_s:,.0f} tokens/s, {r.busy_share:.0%} busy, heard {r.last_heard_s:.1f} s ago"
        for r in s.replicas
    ]
    return lines


def _print_json(value: object) -> None:
    import json

    _say(json.dumps(value, indent=2))


@app.command()
def watch(address: Address = "", run: RunFolder = None, headless: Annotated[bool, typer.Option("--headless")] = False) -> None:
    """Show the run live until it is done; Ctrl-C leaves it running."""
    import time

    from stretto.monitor import Monitor
    from stretto.screen import Headless, Live

    with _client(address, run) as client:
        title, target = client.status().run, client.address
    console, start_s = _console(), time.monotonic()
    monitor = Monitor(target)
    try:
        with Live(console, title) if console.is_terminal and not headless else Headless(console, 0.0) as screen:
            while not ((heard := monitor.heard).status is not None and heard.status.is_done):
                screen.show(monitor, (), (), time.monotonic() - start_s)
                time.sleep(0.1)
            monitor.wait_for_end()
            screen.show(monitor, (), (), time.monotonic() - start_s)
    except KeyboardInterrupt:
        _say("left; the run goes on")
    finally:
        monitor.close()


@app.command()
def why(address: Address = "", run: RunFolder = None, as_json: AsJson = False) -> None:
    """What the run waits for, by name."""
    with _client(address, run) as client:
        answer = client.why()
    if as_json:
        _print_json(asdict(answer))
        return
    _say("the run is moving" if answer.is_moving else "nothing moves")
    for reason in answer.reasons:
        _say(f"  {reason}")


@contextmanager
def _ledger(address: str, run: Path | None, checkpoint: str) -> Generator[Source, None, None]:
    """The ledger to read; exit code 2 where it cannot be."""
    from stretto import ledgers

    try:
        with ledgers.opened(address, run, checkpoint) as source:
            yield source
    except StrettoError as err:
        sys.stderr.write(f"error: {err.message}\n")
        sys.exit(LEDGER_UNREAD_CODE)


@ledger_app.command("verify")
def ledger_verify(address: Address = "", run: RunFolder = None, checkpoint: Checkpoint = "", as_json: AsJson = False) -> None:
    """Prove that every prompt entered once and left once. Exit code 0 proven, 1 violated, 2 could not look."""
    from stretto import ledger_tables

    with _ledger(address, run, checkpoint) as source:
        report = source.report()
        if as_json:
            _print_json(asdict(report))
        else:
            _console().print(ledger_tables.proof(report, source.name), soft_wrap=True)
    if not report.ok:
        sys.exit(1)


@ledger_app.command("show")
def ledger_show(
    uid: Annotated[str, typer.Argument(metavar="[UID]", help="One prompt, by uid (d17, u3) or ordinal. Default: all open ones.")] = "",
    address: Address = "",
    run: RunFolder = None,
    checkpoint: Checkpoint = "",
    as_json: AsJson = False,
) -> None:
    """The open groups, or all that is known of one."""
    from stretto import ledger_tables

    with _ledger(address, run, checkpoint) as source:
        groups = list(source.groups(uid, open_only=not uid))
        if as_json:
            _print_json([asdict(group) for group in groups])
        else:
            _console().print(ledger_tables.life(groups[0]) if uid else ledger_tables.open_groups(groups))


@ledger_app.command("export")
def ledger_export(
    address: Address = "",
    run: RunFolder = None,
    checkpoint: Checkpoint = "",
    out: Annotated[Path | None, typer.Option("--out", help="File to write. Default: standard output.")] = None,
) -> None:
    """One JSON line per prompt that ever entered: uid, ordinal, state, step, version_begin, attempts, reason."""
    import json
    from contextlib import nullcontext

    with _ledger(address, run, checkpoint) as source, nullcontext(sys.stdout) if out is None else out.open("w") as file:
        for group in source.groups():
            file.write(json.dumps({name: getattr(group, name) for name in EXPORTED}) + "\n")


@app.command()
def generate(
    text: Annotated[str, typer.Argument(help="The prompt.")],
    address: Address = "",
    run: RunFolder = None,
    replica: Annotated[str | None, typer.Option(help="Replica id; default the least busy one.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0)] = None,
) -> None:
    """Stream an answer from the policy as it is now."""
    given = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    settings = {name: value for name, value in given.items() if value is not None}
    versions: list[int] = []
    with _client(address, run) as client:
        for chunk in client.generate(text, replica_id=replica, **settings):
            typer.echo(chunk.text, nl=False)
            versions += [version for version, _ in chunk.spans]
    _say()
    if versions:
        typer.echo(f"(version {'-'.join(map(str, sorted({versions[0], versions[-1]})))})", err=True)


@app.command()
def pause(address: Address = "", run: RunFolder = None, reason: Annotated[str, typer.Option()] = "asked by a user") -> None:
    """Give out no new work until `resume`; running work goes on."""
    with _client(address, run) as client:
        client.pause(reason)
    _say("paused")


@app.command()
def resume(address: Address = "", run: RunFolder = None) -> None:
    """Undo `pause`."""
    with _client(address, run) as client:
        client.resume()
    _say("resumed")


@app.command()
def evaluate(
    address: Address = "",
    run: RunFolder = None,
    version: Annotated[int | None, typer.Option(help="Default: the newest.")] = None,
    max_prompts: Annotated[int, typer.Option(min=0, help="First k held-out prompts; 0 = all.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Judge the policy on the held-out prompts and wait for the outcome."""
    with _client(address, run) as client:
        outcome = client.evaluate(version, max_prompts)
    if as_json:
        _print_json(asdict(outcome))
        return
    low, high = outcome.version_min, outcome.version_max
    versions = f"{low}" if low == high else f"{low}-{high}"
    _say(f"accuracy {outcome.accuracy:.4f} of version {versions}, {outcome.outcome}")
    _say(f"{outcome.num_sessions} answers, {outcome.num_failed} failed, {outcome.wall_s:.1f} s")
    for name, value in sorted(outcome.metrics.items()):
        _say(f"  {name} {value:.4f}")


@app.command()
def save(address: Address = "", run: RunFolder = None) -> None:
    """Save a checkpoint after the step in progress and wait until it is durable."""
    with _client(address, run) as client:
        saved = client.save_checkpoint()
    _say(f"step {saved.step}: {saved.path}")


# ------------------------------------------------------------------------------------------------------------ files


@app.command("make-model")
def make_model(task: str, out: Annotated[Path, typer.Option()], seed: int = 0) -> None:
    """Make a task's tiny, warm-started model in the folder OUT."""
    import subprocess

    from stretto import prepare

    sys.exit(subprocess.run(prepare.model_command(task, out, seed), check=False, env={"OMP_NUM_THREADS": "1", **os.environ}).returncode)


@app.command("make-data")
def make_data(
    task: str, out: Annotated[Path, typer.Option()], seed: int = 0, train: int | None = None, validation: int | None = None
) -> None:
    """Generate a task's train.jsonl and validation.jsonl in the folder OUT."""
    from stretto import prepare

    prepare.write_data(task, out, seed, train, validation)
    _say(f"{out / 'train.jsonl'}, {out / 'validation.jsonl'}")


@app.command("plot")
def plot_command(folder: Annotated[Path, typer.Argument(help="Folder of a run.")]) -> None:
    """Draw reward and validation accuracy of a run to <folder>/reward.png."""
    from stretto import plot

    _say(str(plot.draw(folder, f"{folder.name}: reward and validation accuracy")))


@app.command()
def version() -> None:
    """The version of Stretto."""
    from stretto import __version__

    _say(__version__)
