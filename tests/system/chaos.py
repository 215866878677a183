"""`python -m tests.system.chaos --seed N (--minutes M | --faults N)`: a small real run under a thousand faults, and the proof that it held.

    quiet steps --> a killed trainer --> faults, the ledger verified every 20 --> calm, the run ends by itself --> proofs

The first two are left out with --no-measure. Proofs: the ledger's own; the trainer's list of what it trained (engine "known"); the
steps in metrics.jsonl; the greatest lag. A hang is a committed step that does not grow for 60 s. Exit code 0: nothing lost, nothing
trained twice, no hang, no process that ended as it must not. The logs of every process stay in the run folder.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stretto.client import AsyncClient, LedgerReport, Status
from stretto.errors import DeadlineError, StrettoError, UnavailableError
from tests.chaos_plan import MESSAGE_KINDS, PROCESS_FAULTS, faults
from tests.chaos_world import JUDGE_EVERY, LEASE_S, Engine, World, resident_mb
from tests.waits import eventually

HANG_S = 60.0
"""Without a newly committed step; then the run is taken for wedged."""
TEND_S, LOOK_S, MEMORY_S = 0.1, 0.5, 1.0
HOLD_S = 20.0
"""Standing still this long, the run is spared further process faults until its next step: what goes on longer is a hang of its own,
not a pile of faults."""
VERIFY_EVERY = 20
"""Faults."""
ANSWER_S = 60.0
"""For a question to a scheduler that may be down or stopped."""
START_S = 180.0
"""Until the first step; model and data of the torch engine may have to be made."""
QUIET_WARMUP, QUIET_STEPS = 50, 200
"""Without a fault: for memory and for tokens per step."""
KILL_STEPS = 120
"""With one kill of the trainer in the middle."""
LAST_STEPS = 12
"""After the faults, to the end of the run."""
SERVICES = ("scheduler", "weightsync", "trainer", "rollout")


class Hung(Exception):  # noqa: N818 - what it is, not what went wrong inside us
    """No step for HANG_S."""


@dataclass
class Findings:
    """What is written to the JSON file, and what it rests on."""

    seed: int
    engine: str
    faults: int = 0
    by_kind: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    """target -> kind -> number."""
    minutes: float = 0.0
    """Under faults."""
    lost: int = 0
    doubled: int = 0
    hangs: int = 0
    max_lag_trained: int = 0
    max_lag_bound: int = 0
    longest_stall_s: float = 0.0
    """Between two newly committed steps, under faults."""
    steps: int = 0
    prompts_trained: int = 0
    evicted: dict[str, int] = field(default_factory=dict[str, int])
    evaluations: dict[str, int] = field(default_factory=dict[str, int])
    """outcome -> number."""
    verified: int = 0
    """Times that the ledger was verified."""
    unasked_ends: dict[str, int] = field(default_factory=dict[str, int])
    """Processes that ended by themselves and were started again."""
    failures: list[str] = field(default_factory=list[str])
    tokens_ratio_after_trainer_kill: float | None = None
    resume_to_step_s: float | None = None
    resume_parts_s: dict[str, float] = field(default_factory=dict[str, float])
    memory_slope_mb_per_100_steps: float | None = None
    memory_slopes: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def is_good(self) -> bool:
        clean = not (self.lost or self.doubled or self.hangs or self.failures)
        return clean and self.max_lag_trained <= self.max_lag_bound


class Watcher:
    """Looks at the run twice a second: how far it is, how long it stands still."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.client = AsyncClient(world.scheduler_address)
        self.status: Status | None = None
        self.moved_s = time.monotonic()
        self.longest_stall_s = 0.0
        self._committed = 0

    async def look(self) -> None:
        """Raises Hung."""
        try:
            self.status = await self.client.status()
        except (UnavailableError, DeadlineError):
            pass
        else:
            if self.status.committed_step > self._committed or self.status.is_done:
                self.moved_s = time.monotonic()
            self._committed = max(self._committed, self.status.committed_step)  # a step that is trained again is no progress
        stall_s = self.stall_s
        self.longest_stall_s = max(self.longest_stall_s, stall_s)
        if stall_s > HANG_S:
            raise Hung(f"no step after {self._committed} for {stall_s:.0f} s; why: {await self.why()}")

    @property
    def stall_s(self) -> float:
        """Since the newest step was committed."""
        return time.monotonic() - self.moved_s

    async def why(self) -> str:
        try:
            return "; ".join((await self.client.why()).reasons)
        except StrettoError as err:
            return f"the scheduler does not answer: {err.message}"

    @property
    def committed(self) -> int:
        """The newest step that was ever seen committed."""
        return self._committed

    async def ask(self, question: Callable[[], Awaitable[Any]]) -> Any:
        """The scheduler's answer, as soon as it is there to give one."""
        end_s = time.monotonic() + ANSWER_S
        while True:
            try:
                return await question()
            except (UnavailableError, DeadlineError):
                if time.monotonic() > end_s:
                    raise
                await asyncio.sleep(0.3)

    async def tokens(self) -> int:
        status: Status = await self.ask(self.client.status)
        return sum(r.generated_tokens for r in status.replicas)


class Chaos:
    """One run from its start to its proofs."""

    def __init__(self, world: World, findings: Findings, say: Callable[[str], None]) -> None:
        self._world, self._found, self._say = world, findings, say
        self._watch = Watcher(world)

    async def run(self, *, num_faults: int | None, minutes: float | None, gap_s: float, measures: bool) -> None:
        """Fills the findings. Never raises for what the run did wrong."""
        await self._world.open()
        tending = asyncio.create_task(self._tend())
        try:
            self._watch.moved_s = time.monotonic() + START_S - HANG_S
            await self._until_step(3)
            self._watch.longest_stall_s = 0.0
            if measures:
                await self._measure()
            await self._suffer(num_faults, minutes, gap_s)
            await self._finish()
        except Hung as err:
            self._found.hangs += 1
            self._found.failures.append(str(err))
        finally:
            self._found.failures += self._world.failures
            self._found.unasked_ends = dict(self._world.ends)
            self._found.longest_stall_s = round(self._watch.longest_stall_s, 1)
            tending.cancel()
            await asyncio.gather(tending, return_exceptions=True)
            await self._watch.client.close()
            await self._world.close()

    async def _tend(self) -> None:
        while True:
            self._world.tend()
            await asyncio.sleep(TEND_S)

    async def _until_step(self, step: int, also: Callable[[], None] = lambda: None) -> None:
        while self._watch.committed < step:
            await asyncio.sleep(LOOK_S)
            await self._watch.look()
            also()

    # ---- without faults

    async def _measure(self) -> None:
        self._say(f"{QUIET_WARMUP + QUIET_STEPS} quiet steps")
        sizes: dict[str, list[tuple[int, float]]] = {}
        next_s = time.monotonic()

        def weigh() -> None:
            nonlocal next_s
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + MEMORY_S
                for name, pid in self._world.pids().items():
                    sizes.setdefault(name, []).append((self._watch.committed, resident_mb(pid)))

        await self._until_step(QUIET_WARMUP)
        begin, tokens = self._watch.committed, await self._watch.tokens()
        await self._until_step(begin + QUIET_STEPS, weigh)
        per_step = (await self._watch.tokens() - tokens) / (self._watch.committed - begin)
        slopes = {name: float(np.polyfit([n for n, _ in rows], [mb for _, mb in rows], 1)[0]) * 100 for name, rows in sizes.items()}
        self._found.memory_slopes = {name: round(slope, 3) for name, slope in slopes.items()}
        of_services = [slope for name, slope in self._found.memory_slopes.items() if name.partition("-")[0] in SERVICES]
        self._found.memory_slope_mb_per_100_steps = max(of_services)

        self._say(f"{KILL_STEPS} steps with a kill of the trainer in the middle")
        begin, tokens = self._watch.committed, await self._watch.tokens()
        await self._until_step(begin + KILL_STEPS // 2)
        await self._kill_trainer()
        await self._until_step(begin + KILL_STEPS)
        with_kill = (await self._watch.tokens() - tokens) / (self._watch.committed - begin)
        self._found.tokens_ratio_after_trainer_kill = round(with_kill / per_step, 3)

    async def _kill_trainer(self) -> None:
        """SIGKILL, and what the way to its successor's first step is spent on."""
        place = self._world.places["trainer"]
        old = place.newest
        assert old is not None
        killed_unix_s = time.time()
        old.asked_at_s = time.monotonic()
        old.child.kill()
        await eventually(lambda: place.newest not in (None, old), "a new trainer")
        born = place.newest
        assert born is not None
        lines = self._world.folder / "metrics.jsonl"
        while not (resumed := _said(born.log, "resumed", "started")) or not (first := _first_line(lines, resumed)):
            await asyncio.sleep(0.1)
            await self._watch.look()
        listening = _said(born.log, "listening")
        assert listening
        scalars = first["metrics"]
        self._found.resume_to_step_s = round(first["time"] - killed_unix_s, 2)
        parts = {
            "noticed": born.started_unix_s - killed_unix_s,
            "process and imports": listening - born.started_unix_s,
            "load and open": resumed - listening,
            "publish, wait for the batch": first["time"] - resumed - scalars["train_s"] - scalars["publish_s"] - scalars["commit_s"],
            "train": scalars["train_s"],
            "publish and commit": scalars["publish_s"] + scalars["commit_s"],
        }
        self._found.resume_parts_s = {name: round(s, 2) for name, s in parts.items()}

    # ---- with faults

    async def _suffer(self, num_faults: int | None, minutes: float | None, gap_s: float) -> None:
        world, begin_s = self._world, time.monotonic()
        end_s = begin_s + minutes * 60 if minutes is not None else float("inf")
        most, next_verify = num_faults if num_faults is not None else sys.maxsize, VERIFY_EVERY
        planned = faults(self._found.seed, gap_s=gap_s, lease_s=LEASE_S)
        at_s = begin_s
        while world.num_struck < most and time.monotonic() < end_s and not world.failures:
            fault = next(planned)
            at_s = max(at_s + fault.after_s, time.monotonic() - gap_s)
            while (left_s := at_s - time.monotonic()) > 0:
                await asyncio.sleep(min(left_s, LOOK_S))
                await self._watch.look()
            while not fault.is_message and self._watch.stall_s > HOLD_S:
                await asyncio.sleep(LOOK_S)
                await self._watch.look()
            await world.strike(fault)
            await self._watch.look()
            if world.num_struck >= next_verify:
                next_verify = world.num_struck + VERIFY_EVERY
                await self._verify()
                minute = (time.monotonic() - begin_s) / 60
                self._say(f"{world.num_struck} faults in {minute:.1f} min, step {self._watch.committed}, longest stall {self._stall()}")
        self._found.minutes = round((time.monotonic() - begin_s) / 60, 1)
        self._found.faults = world.num_struck
        for (target, kind), number in sorted(world.struck.items()):
            self._found.by_kind.setdefault(target, {})[kind] = number
        await world.calm()

    def _stall(self) -> str:
        return f"{self._watch.longest_stall_s:.1f} s"

    async def _verify(self) -> LedgerReport:
        report: LedgerReport = await self._watch.ask(self._watch.client.verify_ledger)
        self._found.verified += 1
        self._found.max_lag_trained = max(self._found.max_lag_trained, report.lag_trained_max)
        if not report.ok:
            self._world.failures.append(f"the ledger at step {report.committed_step}: {'; '.join(report.violations)}")
        return report

    # ---- the end

    async def _finish(self) -> None:
        """The run ends by itself; then everything is counted."""
        self._say(f"calm: {LAST_STEPS} more steps")
        await self._until_step(self._watch.committed + 1)
        steps = self._watch.committed + LAST_STEPS
        self._world.finish_after(steps)
        while not (self._watch.status and self._watch.status.is_done and self._world.places["trainer"].is_over):
            await asyncio.sleep(LOOK_S)
            await self._watch.look()
        report = await self._verify()
        status = self._watch.status
        found = self._found
        found.steps, found.prompts_trained = report.committed_step, report.ordinals_trained
        found.max_lag_bound, found.evicted = status.max_lag, dict(report.evicted_by_reason)
        found.doubled += report.duplicates
        found.lost += report.gaps
        self._check(report.committed_step == steps, f"{report.committed_step} steps are committed, not {steps}")
        self._check(report.ordinals_open == 0, f"{report.ordinals_open} prompts are still open")
        self._check_lines(steps)
        if found.engine == "known":
            self._check_seen(steps, report)
            self._check_evaluations(steps)

    def _check(self, is_so: bool, what: str) -> None:
        if not is_so:
            self._found.failures.append(what)

    def _check_lines(self, steps: int) -> None:
        """C3: each step has one line, in order."""
        lines = [r for r in _records(self._world.folder / "metrics.jsonl") if r["kind"] == "train"]
        self._check([r["step"] for r in lines] == list(range(1, steps + 1)), f"metrics.jsonl does not hold steps 1 to {steps} once each")
        self._found.max_lag_trained = max(self._found.max_lag_trained, *(int(r["metrics"]["lag_max"]) for r in lines))

    def _check_evaluations(self, steps: int) -> None:
        """C3: every one that was due has one line, whoever was killed while it ran."""
        lines = [r for r in _records(self._world.folder / "metrics.jsonl") if r["kind"] == "validation"]
        judged = Counter(r["step"] for r in lines)
        due = {0, *range(JUDGE_EVERY, steps, JUDGE_EVERY), steps}
        self._check(due <= set(judged), f"evaluations without a line: of steps {sorted(due - set(judged))}")
        self._check(max(judged.values()) == 1, f"evaluations with two lines: {[step for step, n in judged.items() if n > 1]}")
        self._found.evaluations = dict(Counter(r["outcome"] for r in lines))

    def _check_seen(self, steps: int, report: LedgerReport) -> None:
        """What the trainer itself remembers, beside what the ledger says."""
        import torch

        state = torch.load(self._world.folder / "checkpoints" / f"step-{steps}" / "state.pt", weights_only=True)
        seen = Counter(state["seen"].tolist())
        num_evicted = sum(report.evicted_by_reason.values())
        missing = sorted(set(range(report.ordinals_entered)) - set(seen))
        twice = sorted(n for n, times in seen.items() if times > 1)
        self._found.lost += max(0, len(missing) - num_evicted)
        self._found.doubled += len(twice)
        self._check(not twice, f"trained more than once: {twice[:10]}")
        self._check(len(missing) == num_evicted, f"{num_evicted} were evicted, but these were never trained: {missing[:10]}")
        self._check(state["lag_max"] <= self._found.max_lag_bound, f"the trainer saw a lag of {state['lag_max']}")


# ------------------------------------------------------------------------------------------------------------ reading


def _records(path: Path) -> list[dict[str, Any]]:
    """Of a file of JSON lines; one that is being written is left out."""
    found: list[dict[str, Any]] = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _said(log: Path, *events: str) -> float | None:
    """Unix time of the first of these events in a service's log."""
    from datetime import datetime

    return next((datetime.fromisoformat(r["ts"]).timestamp() for r in _records(log) if r.get("event") in events), None)


def _first_line(path: Path, after_unix_s: float) -> dict[str, Any] | None:
    return next((r for r in _records(path) if r["kind"] == "train" and r["time"] > after_unix_s), None)


# ------------------------------------------------------------------------------------------------------------ command


def table(found: Findings) -> Any:
    """Faults by target and kind."""
    from rich.table import Table

    kinds = [*dict.fromkeys(kind for kind, _, _ in PROCESS_FAULTS), *MESSAGE_KINDS]
    made = Table("target", *(kind.replace("_", "\n") for kind in kinds), "all", title=f"{found.faults} faults, seed {found.seed}")
    for target, numbers in found.by_kind.items():
        made.add_row(target, *(str(numbers.get(kind, "")) for kind in kinds), str(sum(numbers.values())))
    return made


def report(found: Findings) -> None:
    from rich.console import Console

    console = Console(width=140)
    console.print(table(found))
    for name, value in asdict(found).items():
        if name not in ("by_kind", "failures"):
            console.print(f"{name:34} {value}")
    for failure in found.failures:
        console.print(f"[red]{failure}[/red]", soft_wrap=True)
    console.print("[green]nothing lost, nothing twice, nothing hung[/green]" if found.is_good else "[red]the run did not hold[/red]")


async def run(
    folder: Path,
    *,
    seed: int,
    engine: Engine = "known",
    num_faults: int | None = None,
    minutes: float | None = None,
    gap_s: float = 1.5,
    measures: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Findings:
    """A whole chaos run in `folder`, until one of the two limits."""
    found = Findings(seed, engine)
    await Chaos(World(folder, engine, seed), found, say).run(num_faults=num_faults, minutes=minutes, gap_s=gap_s, measures=measures)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.system.chaos", description=(__doc__ or "").partition(":")[2].partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    limit = parser.add_mutually_exclusive_group(required=True)
    limit.add_argument("--minutes", type=float)
    limit.add_argument("--faults", type=int)
    parser.add_argument("--engine", choices=("torch", "known"), default="known")
    parser.add_argument("--gap", type=float, default=1.5, help="mean seconds between two faults")
    parser.add_argument("--no-measure", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("build/bench/chaos"))
    parser.add_argument("--json", type=Path, default=Path("build/bench/chaos.json"))
    arguments = parser.parse_args(argv)
    shutil.rmtree(arguments.folder, ignore_errors=True)
    begin_s = time.monotonic()

    def say(text: str) -> None:
        sys.stderr.write(f"{time.monotonic() - begin_s:7.1f} s  {text}\n")

    found = asyncio.run(
        run(
            arguments.folder.resolve(),
            seed=arguments.seed,
            engine=arguments.engine,
            num_faults=arguments.faults,
            minutes=arguments.minutes,
            gap_s=arguments.gap,
            measures=not arguments.no_measure,
            say=say,
        )
    )
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(asdict(found), indent=1) + "\n")
    report(found)
    return 0 if found.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
