"""Validation runs: asked for, queued, one at a time, ended with a result.

    plan {id, version, step, max_prompts, asked_ms, auto, started_ms}      in the ledger until the evaluation ends
    asked at: a trainer opens ("s<k>"), a step commits ("s<step>"), a user calls Evaluate ("e<n>")
    queued --(nothing else runs, version committed)--> running --(all prompts ended | deadline)--> result + event

Automatic evaluations are asked for in the script that opens or commits, so none is forgotten in a crash. When a trainer
resumes before the step of one, it is cancelled: that step will come again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.scheduler import validation
from services.scheduler.groups import Entry, State, View
from services.scheduler.ledger import Ledger
from stretto.recipe import Recipe
from stretto.v1 import scheduler_pb2 as spb
from stretto.v1 import types_pb2 as pb

log = logging.getLogger("stretto.scheduler")

Exam = Callable[[str, int], list[pb.Prompt]]
"""(evaluation id, most prompts; 0 = all) -> the validation prompts. May be slow: it runs in a thread."""


class Evaluations:
    """The evaluations of a run. Methods that change the ledger are called with the controller's turn held."""

    def __init__(self, recipe: Recipe, ledger: Ledger, exam: Exam | None, clock: Callable[[], float]) -> None:
        self._recipe, self._ledger, self._exam, self._clock = recipe, ledger, exam, clock
        self.plans: list[dict[str, Any]] = []
        """Open ones, oldest first; at most one has started."""
        self.last: spb.Evaluation | None = None
        self._ready: tuple[str, list[pb.Prompt]] = ("", [])

    @property
    def is_possible(self) -> bool:
        return self._exam is not None

    @property
    def running(self) -> dict[str, Any] | None:
        return next((p for p in self.plans if p["started_ms"]), None)

    async def load(self, view: View) -> None:
        """After a start or any change of the plans: read them back."""
        plans, last = await self._ledger.evaluations(), self.last
        if view.run.last_evaluation and (last is None or last.evaluation_id != view.run.last_evaluation):
            blob = await self._ledger.result(view.run.last_evaluation)
            last = spb.Evaluation.FromString(blob) if blob else None
        self.plans, self.last = plans, last  # together: whoever sees the run done sees its last result

    # ---------------------------------------------------------------------------------------------------- asking

    def plan(self, *, version: int, step: int, max_prompts: int, auto: bool) -> dict[str, Any]:
        return {
            "id": f"s{step}" if auto else "",
            "version": version,
            "step": step,
            "max_prompts": max_prompts,
            "asked_ms": int(self._clock() * 1000),
            "auto": auto,
            "started_ms": 0,
        }

    def after_step(self, step: int, total_steps: int) -> dict[str, Any] | None:
        """The plan that the commit of `step` asks for, if any."""
        v = self._recipe.validation
        due = (v.every_steps > 0 and step % v.every_steps == 0) or (v.at_end and step == total_steps)
        if self._exam is None or not due:
            return None
        return self.plan(version=step, step=step, max_prompts=v.max_prompts, auto=True)

    def at_open(self, resume_step: int, total_steps: int, done: Sequence[str]) -> dict[str, Any] | None:
        """The plan that a trainer's opening asks for, unless that version has been judged."""
        v = self._recipe.validation
        wanted = v.at_start or (v.at_end and resume_step >= total_steps)
        if self._exam is None or not wanted or f"s{resume_step}" in done:
            return None
        return self.plan(version=resume_step, step=resume_step, max_prompts=v.max_prompts, auto=True)

    # ---------------------------------------------------------------------------------------------------- settling

    def next_plan(self, committed: int) -> dict[str, Any] | None:
        """The one to start now."""
        if self.running or self._exam is None:
            return None
        return next((p for p in self.plans if p["version"] <= committed), None)

    async def prepare(self, plan: Mapping[str, Any]) -> None:
        """Make the prompts of `plan`, off the event loop; called without the turn."""
        if self._exam is not None and self._ready[0] != plan["id"]:
            self._ready = (plan["id"], await asyncio.to_thread(self._exam, plan["id"], plan["max_prompts"]))

    async def start(self, view: View) -> bool:
        """Let the prepared evaluation begin."""
        plan = self.next_plan(view.run.committed)
        if plan is None or self._ready[0] != plan["id"]:
            return False
        prompts = self._ready[1]
        await self._ledger.start_evaluation({**plan, "started_ms": int(self._clock() * 1000)}, prompts)
        self._ready = ("", [])
        log.info("evaluation_started", extra={"fields": {"evaluation": plan["id"], "version": plan["version"], "prompts": len(prompts)}})
        await self.load(view)
        return True

    async def end(self, view: View) -> bool:
        """Finish the running evaluation when all of its prompts have ended, or its time is up."""
        plan = self.running
        if plan is None:
            return False
        entries = self._entries(view, plan)
        is_open = any(e.state in (State.PENDING, State.RUNNING) for e in entries)
        is_late = self._clock() - plan["started_ms"] / 1000 > self._recipe.validation.deadline_s
        if is_open and not is_late:
            return False
        result = await self._judge(plan, entries, "cut: deadline" if is_open else "complete")
        values = {**result.metrics, "step": result.step, "version": result.version_max, "failed": result.num_failed}
        text = f"evaluation {plan['id']} of v{result.version_max}: accuracy {result.accuracy:.3f} ({result.outcome})"
        uids = [e.uid for e in entries]
        await self._ledger.end_evaluation(plan["id"], uids, result=result.SerializeToString(), text=text, values=values)
        log.info(
            "evaluation_ended",
            extra={"fields": {"evaluation": plan["id"], "accuracy": round(result.accuracy, 4), "outcome": result.outcome}},
        )
        await self.load(await self._ledger.view())
        return True

    async def cancel_hopeless(self, view: View) -> bool:
        """Drop plans that nothing will begin, as the recipe changed: without a validation set, or of a version past the last."""
        is_over = view.run.committed >= view.run.total_steps > 0
        for plan in self.plans:
            if not plan["started_ms"] and (self._exam is None or (is_over and plan["version"] > view.run.committed)):
                why = "no validation set" if self._exam is None else f"the run ends at {view.run.total_steps}"
                log.warning("evaluation_dropped", extra={"fields": {"evaluation": plan["id"], "version": plan["version"], "why": why}})
                await self._ledger.end_evaluation(plan["id"], [])
                await self.load(await self._ledger.view())
                return True
        return False

    async def cancel_after(self, step: int, view: View) -> None:
        """A trainer resumes at `step`: drop the automatic evaluations of later steps."""
        for plan in self.plans:
            if plan["auto"] and plan["step"] > step:
                await self._ledger.end_evaluation(plan["id"], [e.uid for e in self._entries(view, plan)])

    def open_prompts(self, view: View) -> tuple[int, int]:
        """(open, all) prompts of the running evaluation."""
        entries = list(view.validation())
        return sum(e.state in (State.PENDING, State.RUNNING) for e in entries), len(entries)

    # ---------------------------------------------------------------------------------------------------- judging

    def _entries(self, view: View, plan: Mapping[str, Any]) -> list[Entry]:
        return sorted((e for e in view.validation() if e.evaluation == plan["id"]), key=lambda e: e.seq)

    async def _judge(self, plan: Mapping[str, Any], entries: Sequence[Entry], outcome: str) -> spb.Evaluation:
        payloads = await self._ledger.prompts([e.uid for e in entries])
        blobs = await self._ledger.trajectories([e.uid for e in entries])
        expected: dict[tuple[str, str], int] = {}
        sessions: list[validation.Session] = []
        versions: set[int] = set()
        for entry, payload, found in zip(entries, payloads, blobs, strict=True):
            prompt = pb.Prompt.FromString(payload or b"")
            expected[prompt.data_source, entry.uid] = entry.group_size
            ends = [pb.Trajectory.FromString(blob) for index, blob in found.items() if not index.startswith("p")]
            versions.update(span.version for t in ends for span in t.spans)
            sessions += [_session(prompt, t) for t in ends]
        metrics = validation.evaluate(expected, sessions)
        num_sessions = sum(expected.values())
        return spb.Evaluation(
            evaluation_id=plan["id"],
            version_min=min(versions, default=plan["version"]),
            version_max=max(versions, default=plan["version"]),
            step=plan["step"],
            metrics=metrics,
            num_sessions=num_sessions,
            num_failed=num_sessions - sum(not s.failed for s in sessions),
            accuracy=validation.accuracy(metrics) or 0.0,
            wall_s=self._clock() - plan["started_ms"] / 1000,
            outcome=outcome,
        )


def _session(prompt: pb.Prompt, t: pb.Trajectory) -> validation.Session:
    return validation.Session(
        data_source=prompt.data_source,
        prompt_uid=prompt.uid,
        index=t.index,
        reward=t.reward,
        extras=dict(t.reward_extras),
        prediction=t.prediction if t.HasField("prediction") else None,
        failed=t.finish_reason == pb.FINISH_REASON_FAILED,
        num_tokens=len(t.token_ids) // 4,
    )
