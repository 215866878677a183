"""The scheduler's driver: every change of the run passes through here.

    LeasePrompts --.                      .--> admission.grant --> lease.lua
    Report, Return -+--> turn (one lock) --+--> report.lua, return.lua
    SampleBatch ----+    decide on a view, +--> sampling.plan  --> consume.lua / evict.lua
    CommitStep -----+    commit it         +--> commit_step.lua
    OpenTrainer ---'                      '--> recovery.reopen --> open_trainer.lua
                              |
                           Changes --> pump: settle until nothing moves        --> long polls look again
                                        1 admit (I4: the only place that lets prompts in)
                                        2 evict what failed or is filtered: each is refilled by 1
                                        3 end and start evaluations
                                        4 tell a new phase
    ticker (every TICK_S): expire leases (I9), see replicas leave
    leader: says that this scheduler lives, hears when another took over (I6)

Decisions are pure and live in admission, sampling, recovery and explain; this module owns time, tasks and waiting. All that
a restart needs is in the ledger; what is kept here (rates, who waits) is rebuilt by listening.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from google.protobuf.message import DecodeError

from services.scheduler import admission, explain, lines, metrics, recovery, sampling
from services.scheduler.changes import Changes
from services.scheduler.evaluations import Evaluations, Exam
from services.scheduler.groups import OPEN_STATES, Entry, RunState, State, View, Weights
from services.scheduler.ledger import SNAPSHOT_FORMAT, LeaseGrant, Ledger, Opened, Reported, TrajectoryEnd, grants_of, opened_of
from services.scheduler.sessions import Rate, Replica, sessions_of
from stretto.errors import (
    CorruptError,
    DeposedError,
    FencedError,
    FullError,
    InvalidArgumentError,
    NotFoundError,
    RefusedError,
    StaleError,
    StrettoError,
)
from stretto.recipe import Recipe
from stretto.store import ChangedError
from stretto.v1 import scheduler_pb2 as spb
from stretto.v1 import types_pb2 as pb
from stretto.v1.ledger_pb2 import LedgerGroup, LedgerSnapshot

log = logging.getLogger("stretto.scheduler")
T = TypeVar("T")

PUSH_MAX = 64
"""Prompts admitted by one script: bounds how long it holds the server."""
DECIDE_MAX = 4
"""The mirror is old only after a repeated or cancelled operation: reading it anew once is enough."""
TICK_MAX_S = 1.0
"""Expiry is looked for at least this often."""
RENEWALS = 5
"""Of the leadership within leader_s: a few may be late."""
STANDBY_S, STANDBY_LEAST_S = 0.5, 0.01
"""How often a standby asks whether the leader has resigned."""
GOODBYE_S = 3.0
"""A draining replica that holds nothing and is silent this long has left."""
FORGET_LEASES = 10
"""A replica unheard for this many times lease_s is forgotten, so that names which never come back do not pile up."""


class Prompts(Protocol):
    """Where training prompts come from; `data.Dataset` is the real one."""

    def __len__(self) -> int: ...
    def prompt(self, ordinal: int) -> pb.Prompt: ...
    def user_prompt(self, user: spb.UserPrompt) -> pb.Prompt: ...
    def named(self, prompt: pb.Prompt, uid: str) -> pb.Prompt: ...
    def fingerprint(self) -> str: ...


@dataclass(frozen=True, slots=True)
class WaitingTrainer:
    """What the trainer waits for now."""

    step: int
    reason: str
    blockers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lease:
    grant: LeaseGrant
    payload: bytes
    partials: tuple[bytes, ...]
    is_validation: bool


class Controller:
    """One run. `start`, then `run` until cancelled."""

    def __init__(
        self,
        recipe: Recipe,
        ledger: Ledger,
        prompts: Prompts,
        exam: Exam | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.recipe, self.ledger, self._prompts, self._clock = recipe, ledger, prompts, clock
        self._rules = recipe.scheduler
        self._turn = asyncio.Lock()
        """Held around decide-and-commit: one decision at a time."""
        self.changes = Changes()
        """The ledger changed in a way that somebody may wait for."""
        self.events = Changes()
        self.evaluations = Evaluations(recipe, ledger, exam, clock)
        self.replicas: dict[str, Replica] = {}
        self.completions = Rate()
        self._num_polls = 0
        self._trainer_heard_s: float | None = None
        self._moved_s = 0.0
        self._ticked_s = clock()
        self._waiting: WaitingTrainer | None = None
        self._is_overfull = False
        self._events_seen = 0

    # ---------------------------------------------------------------------------------------------------- life

    async def start(self, place: str = "") -> None:
        """Stand by while another place leads, then take over the run as it stands in the store.

        `place`: host:port of this scheduler. Raises RefusedError when the store belongs to other data.
        """
        stood_by = ""
        while (leader := await self.ledger.claim(place, self._rules.leader_s)) is not None:
            if leader.place != stood_by:
                stood_by = leader.place
                log.info("standing_by", extra={"fields": {"leader": leader.place}})
            await asyncio.sleep(min(leader.left_s, STANDBY_S) + STANDBY_LEAST_S)
        metrics.EPOCH.set(self.ledger.epoch)
        view = await self.ledger.view()
        now_s = self._clock()
        self._ticked_s = now_s
        self.replicas = {name: Replica.of(name, rec, now_s) for name, rec in (await self.ledger.sessions()).items()}
        await self.ledger.configure(self._settings(view.run))
        await self.evaluations.load(view)
        run = view.run
        fields = {"epoch": self.ledger.epoch, "committed": run.committed, "occupied": view.occupied, "cursor": run.cursor}
        log.info("ledger_opened", extra={"fields": fields})

    def _settings(self, run: RunState) -> dict[str, int | str]:
        """The recipe's numbers, as far as the store does not know them yet."""
        recipe = self.recipe
        data_key = f"{len(self._prompts)} prompts ({self._prompts.fingerprint()}), run.seed = {recipe.run.seed}"
        if run.data_key and run.data_key != data_key and run.cursor:
            raise RefusedError(
                f"run {recipe.run.name!r} was begun with {run.data_key}, now it is {data_key}: its cursor {run.cursor} would mean other "
                "prompts; restore the data or give the new run another run.name"
            )
        values: dict[str, int | str] = {"data_key": data_key, "window_recipe": recipe.window}
        most = (recipe.scheduler.max_lag + 1) * recipe.scheduler.batch_groups
        if run.window_recipe != recipe.window or run.window > most:  # SetWindow's answer stays, as far as max_lag still allows it
            values["window"] = recipe.window
        if not run.total_steps:
            values["total_steps"] = recipe.trainer.steps
        return values

    async def run(self) -> None:
        """Settle and tick until cancelled. Raises FencedError when another scheduler took over."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump())
                group.create_task(self._tick())
                group.create_task(self._lead())
        except BaseExceptionGroup as failed:
            err = failed.exceptions[0]
            if isinstance(err, DeposedError):
                raise FencedError(err.message) from None
            if isinstance(err, RefusedError | InvalidArgumentError) and not isinstance(err, FencedError):
                raise StrettoError(f"the scheduler was refused by its own store: {err.message}") from None  # nobody's recipe is wrong
            raise err from None  # the group holds it: a cause that holds its effect is a loop

    async def resign(self) -> None:
        """Let a standby take over at once. Raises what the store raises."""
        if self.ledger.epoch:
            await self.ledger.lead(0)

    async def _lead(self) -> None:
        while True:
            await self.ledger.lead(self._rules.leader_s)
            await asyncio.sleep(self._rules.leader_s / RENEWALS)

    async def _pump(self) -> None:
        while True:
            seen = self.changes.count
            await self.settle()
            await self.changes.after(seen, TICK_MAX_S)

    async def _tick(self) -> None:
        interval_s = min(TICK_MAX_S, self._rules.lease_s / 4, self._rules.group_deadline_s / 4, self.recipe.validation.deadline_s / 4)
        while True:
            await asyncio.sleep(interval_s)
            await self.tick()

    async def tick(self) -> None:
        """I9: end what its deadline has ended."""
        async with self._turn:
            if self.ledger.outage:
                await self.ledger.configure({})  # writes nothing but its answer: ends with the outage, or the process after outage_s
            self._forgive_if_deaf()
            view = await self.ledger.view()
            rules = self._rules
            sessions = sessions_of(self.replicas.values())
            lost = recovery.lost_leases(view, sessions, now_s=self._clock(), lease_s=rules.lease_s, group_deadline_s=rules.group_deadline_s)
            await self._expire(lost)
            await self._see_off()
            await self._forget()
            metrics.observe(await self.ledger.view())
        metrics.REPLICAS.set(len(self.here()))
        metrics.COMPLETIONS_PER_S.set(self.completions.per_s(self._clock()))

    def _forgive_if_deaf(self) -> None:
        """We stood still (stopped, the store away, the machine asleep), so nobody could be heard: a full lease for everyone."""
        now_s = self._clock()
        before_s, self._ticked_s = self._ticked_s, now_s
        if now_s - before_s > self._rules.lease_s / 2:
            log.warning("stood_still", extra={"fields": {"for_s": round(now_s - before_s, 1), "replicas": len(self.here())}})
            for replica in self.here():
                replica.heard_s = now_s

    async def _expire(self, lost: Sequence[recovery.Expiry]) -> None:
        if not lost:
            return
        await self.ledger.expire(lost, attempts_max=self._rules.attempts_max)
        for expiry in lost:
            metrics.REISSUED.labels("group deadline" if expiry.reason.startswith("group") else "replica").inc()
        log.warning("leases_lost", extra={"fields": {"groups": len(lost), "uids": [e.uid for e in lost[:5]], "reason": lost[0].reason}})
        self._note()

    async def _decide(self, decide: Callable[[View], Awaitable[T]]) -> T:
        """Take the turn, decide on a snapshot and commit; once more when the snapshot was older than the store."""
        async with self._turn:
            for _ in range(DECIDE_MAX - 1):
                try:
                    return await decide(await self.ledger.view())
                except ChangedError as err:
                    log.info("decided_again", extra={"fields": {"why": err.message}})
                    await self.evaluations.load(await self.ledger.view())  # a call that was cut off may have left old plans
            return await decide(await self.ledger.view())

    def _note(self) -> None:
        """Something moved: wake the pump, the long polls and the watchers."""
        self.changes.note()
        if self._events_seen != self.ledger.num_events:
            self._events_seen = self.ledger.num_events
            self.events.note()

    # ---------------------------------------------------------------------------------------------------- settling

    async def settle(self) -> None:
        """Do what follows from the present state until nothing follows any more."""
        while True:
            view = await self.ledger.view()
            if (plan := self.evaluations.next_plan(view.run.committed)) is not None:
                await self.evaluations.prepare(plan)
            if not await self._decide(self._settle_once):
                return
            self._note()

    async def _settle_once(self, view: View) -> bool:
        """The first thing that follows from the snapshot; False when nothing does."""
        return (
            (self._is_trainer_heard(view) and (await self._admit(view) or await self._evict_ended(view)))
            or await self.evaluations.end(view)
            or await self.evaluations.cancel_hopeless(view)
            or await self.evaluations.start(view)
            or await self._tell_phase(view)
        )

    def _is_trainer_heard(self, view: View) -> bool:
        """Nothing enters or leaves before: a trainer may re-open groups, and those come first."""
        self._tell_overfull(view)
        return view.run.trainer_epoch > 0 and self._trainer_heard_s is not None

    async def _evict_ended(self, view: View) -> bool:
        """Failed groups and filtered ones leave; each frees one place for `_admit`."""
        reasons = {e.uid: f"attempts exhausted: {e.reason}" for e in view.training() if e.state is State.FAILED}
        reasons |= {
            e.uid: "zero_variance" for e in view.training() if e.state is State.FINISHED and sampling.is_filtered(e, self._rules.filter)
        }
        return await self._evict(view, reasons)

    async def _evict(self, view: View, reasons: Mapping[str, str]) -> bool:
        if not reasons:
            return False
        await self.ledger.evict(reasons, rev=view.rev)
        for uid, reason in reasons.items():
            metrics.EVICTED.labels(reason.partition(":")[0]).inc()
            log.info("evicted", extra={"fields": {"uid": uid, "reason": reason}})
        return True

    async def _admit(self, view: View) -> bool:
        """I4: as many as the window has room for, whatever has happened before."""
        run = view.run
        window = admission.effective_window(run.window, run.total_steps, run.committed, self._rules.batch_groups)
        room = min(PUSH_MAX, admission.admit(window, view.occupied))
        if room == 0:
            return False
        users = min(room, run.user_queued)
        prompts = [self._prompts.prompt(run.cursor + i) for i in range(room - users)]
        await self.ledger.push(prompts, cursor=run.cursor, users=users, window=window, rev=view.rev)
        return True

    def _tell_overfull(self, view: View) -> None:
        was, self._is_overfull = self._is_overfull, view.occupied > view.run.window > 0
        if self._is_overfull and not was:
            note = "more was restored than the window holds: all of it is kept, nothing enters until it is trained"
            log.warning("window_overfull", extra={"fields": {"occupied": view.occupied, "window": view.run.window, "note": note}})

    async def _tell_phase(self, view: View) -> bool:
        phase = self.phase(view)
        if phase == view.run.phase:
            return False
        await self.ledger.configure({"phase": phase}, ("phase", phase))
        log.info("phase", extra={"fields": {"phase": phase, "step": view.run.committed}})
        return True

    def phase(self, view: View) -> explain.Phase:
        return explain.phase_of(view, len(self.evaluations.plans))

    # ---------------------------------------------------------------------------------------------------- replicas

    def here(self) -> list[Replica]:
        return [r for r in self.replicas.values() if not r.is_gone]

    async def _check_replica(self, replica_id: str, epoch: int) -> Replica:
        """I6. Raises FencedError for an incarnation that is not the newest, NotFoundError for one that nobody remembers."""
        replica = self.replicas.get(replica_id)
        if replica is None or epoch > replica.epoch:
            await self.ledger.lead(self._rules.leader_s)  # raises where the scheduler that leads may know it
            raise NotFoundError(f"replica {replica_id} epoch {epoch} is unknown here; begin with a heartbeat of epoch 0")
        if epoch < replica.epoch:
            raise FencedError(f"replica {replica_id} epoch {epoch} is older than {replica.epoch}; another process runs under its name")
        return replica

    async def heartbeat(self, request: spb.HeartbeatRequest) -> spb.HeartbeatResponse:
        """Renew the session and all leases; the first one of a process begins a session."""
        if not request.replica_id:
            raise InvalidArgumentError("replica_id is empty")
        async with self._turn:
            replica = await self._beat(request)
            view = await self.ledger.view()
            grace_s = 0.0 if request.state == spb.REPLICA_STATE_DRAINING else self._rules.lease_s
            gone = recovery.forgotten(view, replica.replica_id, request.lease_uids, now_s=self._clock(), lease_s=grace_s)
            await self._expire(gone)
            held = {e.uid for e in view.leases_of(replica.replica_id) if e.replica_epoch == replica.epoch}
        return spb.HeartbeatResponse(
            replica_epoch=replica.epoch,
            directives=[spb.Directive(kind=spb.Directive.KIND_PAUSE if view.run.pause_reason else spb.Directive.KIND_RESUME)],
            interval_s=self._rules.heartbeat_s,
            lost_uids=[uid for uid in request.lease_uids if uid not in held],
        )

    async def _beat(self, request: spb.HeartbeatRequest) -> Replica:
        name, now_s = request.replica_id, self._clock()
        replica = self.replicas.get(name)
        if request.replica_epoch:
            replica = await self._check_replica(name, request.replica_epoch)
        elif replica is None or not (request.incarnation and replica.incarnation == request.incarnation):
            return await self._join(request)
        is_new = replica.beat(request, now_s)
        if replica.is_gone and request.state != spb.REPLICA_STATE_DRAINING:  # silent for long, but the same process
            replica.is_gone, is_new = False, True
            log.info("replica_back", extra={"fields": {"replica": name, "epoch": replica.epoch}})
        if is_new:
            await self.ledger.session(name, "beat", replica.record(), epoch=replica.epoch)
            self._note()
        return replica

    async def _join(self, request: spb.HeartbeatRequest) -> Replica:
        name = request.replica_id
        replica = Replica(name)
        replica.beat(request, self._clock())
        replica.epoch = await self.ledger.session(name, "join", replica.record(), text=f"replica {name} joined ({request.slots} slots)")
        self.replicas[name] = replica
        log.info("replica_joined", extra={"fields": {"replica": name, "epoch": replica.epoch, "address": replica.address}})
        view = await self.ledger.view()
        orphans = [e for e in view.leases_of(name) if e.replica_epoch != replica.epoch]
        await self._expire([recovery.Expiry(e.uid, e.attempt, f"replica {name} restarted") for e in orphans])
        self._note()
        return replica

    async def _see_off(self) -> None:
        """Replicas that are silent too long, or said goodbye, have left."""
        view = await self.ledger.view()
        for replica in self.here():
            silent_s = self._clock() - replica.heard_s
            is_draining = replica.state == spb.REPLICA_STATE_DRAINING
            if is_draining and silent_s > GOODBYE_S and not view.leases_of(replica.replica_id):
                why = "drained"
            elif silent_s > self._rules.lease_s:
                why = f"silent for {silent_s:.0f} s"
            else:
                continue
            replica.is_gone = True
            text = f"replica {replica.replica_id} left: {why}"
            await self.ledger.session(replica.replica_id, "leave", replica.record(), epoch=replica.epoch, text=text)
            log.warning("replica_left", extra={"fields": {"replica": replica.replica_id, "why": why}})
            self._note()

    async def _forget(self) -> None:
        """Sessions that ended long ago; who comes back joins anew."""
        now_s = self._clock()
        for name, replica in list(self.replicas.items()):
            if replica.is_gone and now_s - replica.heard_s > FORGET_LEASES * self._rules.lease_s:
                await self.ledger.session(name, "forget", {}, epoch=replica.epoch)
                del self.replicas[name]
                self._note()

    # ---------------------------------------------------------------------------------------------------- leases

    async def lease(
        self, replica_id: str, epoch: int, held: Weights, *, wanted: int, wait_s: float, operation_id: str
    ) -> tuple[list[Lease], str]:
        """Leases, or none and why. Waits up to `wait_s`. A repeated operation returns what it was granted the first time."""
        await self._check_replica(replica_id, epoch)
        began_s, until_s = time.monotonic(), time.monotonic() + min(wait_s, self._rules.wait_max_s)
        op = f"{replica_id}:{epoch}:{operation_id or uuid.uuid4().hex}"
        is_repeat_possible = True
        self._num_polls += 1
        try:
            while True:
                seen = self.changes.count
                await self._check_replica(replica_id, epoch)
                grants, reason = await self._decide(lambda view: self._grant(view, replica_id, epoch, held, wanted, op))
                if grants:
                    metrics.LEASE_WAIT_S.observe(time.monotonic() - began_s)
                    return await self._leases(grants), ""
                if is_repeat_possible:  # a grant repeats itself by its operation id; having nothing to grant does not
                    if (answer := await self.ledger.recall(op)) is not None:
                        return await self._leases(grants_of(answer)), ""
                    is_repeat_possible = False
                if not await self.changes.after(seen, until_s - time.monotonic()):
                    return [], reason
        finally:
            self._num_polls -= 1

    async def _grant(self, view: View, replica_id: str, epoch: int, held: Weights, wanted: int, op: str) -> tuple[list[LeaseGrant], str]:
        exam = self.evaluations.running
        choice = admission.grant(
            view,
            held,
            wanted=wanted,
            batch_groups=self._rules.batch_groups,
            max_lag=self._rules.max_lag,
            evaluation_version=exam["version"] if exam else 0,
            waiting=self._num_polls,
        )
        if isinstance(choice, admission.Refused):
            return [], choice.reason
        uids = [e.uid for e in choice.entries]
        return await self.ledger.lease(replica_id, epoch, uids, version=choice.version, rev=view.rev, op=op), ""

    async def _leases(self, grants: Sequence[LeaseGrant]) -> list[Lease]:
        """Grants with their payloads; one that has ended meanwhile (a repeated operation) is left out."""
        payloads = await self.ledger.prompts([g.uid for g in grants])
        again = [g.uid for g in grants if g.attempt > 1]
        kept = dict(zip(again, await self.ledger.trajectories(again), strict=True)) if self._rules.partial_rollout else {}
        return [
            Lease(
                grant,
                payload,
                tuple(blob for index, blob in kept.get(grant.uid, {}).items() if index.startswith("p")),
                grant.uid.startswith("v"),
            )
            for grant, payload in zip(grants, payloads, strict=True)
            if payload is not None
        ]

    async def report(self, replica_id: str, epoch: int, groups: Mapping[tuple[str, int], Sequence[TrajectoryEnd]]) -> Reported:
        await self._check_replica(replica_id, epoch)
        async with self._turn:
            done = await self.ledger.report(replica_id, epoch, groups, attempts_max=self._rules.attempts_max)
        self._moved_s = self._clock()
        self.completions.add(done.accepted, self._moved_s)
        metrics.TRAJECTORIES.labels("ended").inc(done.accepted)
        metrics.TRAJECTORIES.labels("failed").inc(done.failed)
        metrics.LOST_REPORTS.inc(len(done.lost))
        if done.finished or done.failed:
            self._note()
        return done

    async def return_leases(self, request: spb.ReturnLeasesRequest) -> None:
        await self._check_replica(request.replica_id, request.replica_epoch)
        keeps = self._rules.partial_rollout
        leases = [(r.prompt_uid, r.attempt, {t.index: t.SerializeToString() for t in r.partials} if keeps else {}) for r in request.leases]
        async with self._turn:
            await self.ledger.return_leases(
                request.replica_id,
                request.replica_epoch,
                leases,
                reason=request.reason or "returned",
                failed=request.reason.startswith("engine failed"),
                attempts_max=self._rules.attempts_max,
                op=f"{request.replica_id}:{request.replica_epoch}:{request.operation_id or uuid.uuid4().hex}",
            )
        self._note()

    # ---------------------------------------------------------------------------------------------------- trainer

    async def _hear_trainer(self, view: View, epoch: int) -> None:
        """I6. Raises FencedError for a trainer that is not the newest."""
        if epoch > view.run.trainer_epoch:
            await self.ledger.lead(self._rules.leader_s)  # raises where the scheduler that leads may know it
            raise NotFoundError(
                f"the store does not know trainer epoch {epoch}: it was lost; open the run again from the newest checkpoint"
            )
        if epoch < view.run.trainer_epoch:
            raise FencedError(
                f"trainer epoch {epoch} is older than {view.run.trainer_epoch}; another trainer took over this run; stop this one"
            )
        is_first, self._trainer_heard_s = self._trainer_heard_s is None, self._clock()
        if is_first:
            self._note()  # admission opens

    async def open_trainer(self, request: spb.OpenTrainerRequest) -> Opened:
        """I5: groups of steps after the resumed one are finished again; older trainers are fenced."""
        op = f"open:{request.operation_id or uuid.uuid4().hex}"
        if request.batch_groups != self._rules.batch_groups:
            raise InvalidArgumentError(
                f"the trainer's batch_groups = {request.batch_groups} is not the scheduler's {self._rules.batch_groups}: one recipe for all"
            )
        if request.total_steps < 1 or request.resume_step < 0:
            raise InvalidArgumentError(f"total_steps = {request.total_steps} must be > 0, resume_step = {request.resume_step} >= 0")
        if (answer := await self.ledger.recall(op)) is not None:
            async with self._turn:  # the first call may have been cut off before it read the plans
                await self.evaluations.load(await self.ledger.view())
            self._note()
            return opened_of(answer)
        opened = await self._decide(lambda view: self._reopen(view, request, op))
        if opened.snapshot_needed:
            log.warning("snapshot_needed", extra={"fields": {"resume_step": request.resume_step, "why": opened.snapshot_needed}})
            return opened
        fields = {"epoch": opened.epoch, "resume_step": request.resume_step, "reopened": opened.reopened}
        log.info("trainer_opened", extra={"fields": fields})
        self._note()
        return opened

    async def _reopen(self, view: View, request: spb.OpenTrainerRequest, op: str) -> Opened:
        resume, is_empty = request.resume_step, _is_empty(view)
        found = recovery.gap(resume, cut_id=request.cut_id, cut_epoch=request.cut_trainer_epoch, run=view.run, is_empty=is_empty)
        if isinstance(found, recovery.Refused):
            raise RefusedError(found.reason)
        if found:
            return Opened(view.run.trainer_epoch, "", 0, found.reason)
        taken = [*await self.ledger.committed(), *(e for e in view.entries.values() if e.state is State.CONSUMED)]
        plan = recovery.reopen(resume, checkpoint=view.run.checkpoint, taken=taken)
        if isinstance(plan, recovery.Refused):
            raise RefusedError(plan.reason)
        await self.evaluations.cancel_after(resume, view)
        results = {key: spb.Evaluation.FromString(blob) for key, blob in (await self.ledger.results()).items()}
        redone = [key for key, result in results.items() if key.startswith("s") and result.step > resume]
        view = await self.ledger.view()
        opened = await self.ledger.open_trainer(
            resume,
            finished=plan.finished,
            trained=plan.committed,
            steps=[step for step in await self.ledger.step_numbers() if step > resume],
            total_steps=request.total_steps,
            address=request.address,
            evaluations=redone,
            evaluation=self.evaluations.at_open(resume, request.total_steps, [key for key in results if key not in redone]),
            ordinal_first=self._lost_store(resume) if is_empty and resume else None,
            cut_id=request.cut_id,
            epoch_floor=max([request.epoch_floor, *(r.held.epoch for r in self.here())]),
            rev=view.rev,
            op=op,
        )
        self._trainer_heard_s, self._waiting = self._clock(), None
        await self.evaluations.load(await self.ledger.view())
        return opened

    def _lost_store(self, resume: int) -> int:
        """A trainer resumes but the store is empty: go on behind what its steps must have used."""
        ordinal = resume * self._rules.batch_groups
        note = "the store knows nothing of the steps before; prompts evicted then are not known"
        log.warning("store_was_lost", extra={"fields": {"resume_step": resume, "next_ordinal": ordinal, "note": note}})
        return ordinal

    async def sample(self, trainer_epoch: int, step: int, wait_s: float) -> tuple[list[pb.Group], str]:
        """The batch of `step`, or none and what it waits for. The same step returns the same batch until its commit."""
        began_s, until_s = time.monotonic(), time.monotonic() + min(wait_s, self._rules.wait_max_s)
        while True:
            seen = self.changes.count
            outcome = await self._decide(lambda view: self._try_sample(view, trainer_epoch, step))
            if isinstance(outcome, list):
                self._waiting = None
                metrics.BATCH_WAIT_S.observe(time.monotonic() - began_s)
                self._note()
                return outcome, ""
            if isinstance(outcome, sampling.Drop):
                self._note()
                continue
            self._waiting = WaitingTrainer(step, outcome.reason, tuple(e.uid for e in outcome.blockers))
            if not await self.changes.after(seen, until_s - time.monotonic()):
                return [], "; ".join(await self.explain())

    async def _try_sample(self, view: View, trainer_epoch: int, step: int) -> list[pb.Group] | sampling.Wait | sampling.Drop:
        """The batch, read; what it waits for; or what was evicted, after which another may be tried."""
        await self._hear_trainer(view, trainer_epoch)
        if step != view.run.committed + 1:
            raise StaleError(f"step {step} cannot be sampled: step {view.run.committed} is the newest committed")
        if batch := view.batch(step):
            groups, corrupt = await self._read(batch)
            if corrupt:  # the trainer may have it whole already: only its resume gives the groups back, and then they can go
                raise CorruptError("; ".join(f"{uid}: {why}" for uid, why in corrupt.items()))
            return groups
        outcome = sampling.plan(
            view.training(),
            step=step,
            batch_groups=self._rules.batch_groups,
            max_lag=self._rules.max_lag,
            stragglers=self._rules.stragglers,
            filter_name=self._rules.filter,
        )
        if isinstance(outcome, sampling.Drop):
            await self._evict(view, {e.uid: outcome.reason for e in outcome.entries})
        elif isinstance(outcome, sampling.Batch):
            groups, corrupt = await self._read(outcome.entries)
            if corrupt:
                await self._evict(view, {uid: f"corrupt: {why}" for uid, why in corrupt.items()})
                return sampling.Drop(tuple(e for e in outcome.entries if e.uid in corrupt), "corrupt")
            await self.ledger.consume(trainer_epoch, step, [e.uid for e in outcome.entries], rev=view.rev)
            return groups
        return outcome

    async def _read(self, entries: Sequence[Entry]) -> tuple[list[pb.Group], dict[str, str]]:
        """The groups that can be read, and why the others cannot, by uid."""
        read = await self.ledger.groups(entries)
        corrupt = {entry.uid: one for entry, one in zip(entries, read, strict=True) if isinstance(one, str)}
        return [one for one in read if not isinstance(one, str)], corrupt

    async def commit_step(self, trainer_epoch: int, step: int, values: Mapping[str, float]) -> None:
        async def commit(view: View) -> tuple[list[Entry], bool]:
            await self._hear_trainer(view, trainer_epoch)
            batch = view.batch(step)
            evaluation = self.evaluations.after_step(step, view.run.total_steps)
            fresh = await self.ledger.commit_step(trainer_epoch, step, [e.uid for e in batch], values, evaluation=evaluation)
            if evaluation:
                await self.evaluations.load(await self.ledger.view())
            return batch, fresh

        batch, fresh = await self._decide(commit)
        if fresh:
            self._moved_s = self._clock()
            lags = [max(0, step - 1 - entry.version_begin) for entry in batch]
            for lag in lags:
                metrics.LAG.observe(lag)
            log.info("step_committed", extra={"fields": {"step": step, "lag_max": max(lags)}})
        self._note()

    async def commit_checkpoint(self, trainer_epoch: int, step: int, path: str, cut_id: str = "") -> int:
        async with self._turn:
            await self._hear_trainer(await self.ledger.view(), trainer_epoch)
            removed = await self.ledger.commit_checkpoint(trainer_epoch, step, path, cut_id=cut_id)
        log.info("checkpoint_committed", extra={"fields": {"step": step, "cut": cut_id, "groups_removed": removed}})
        self._note()
        return removed

    # ---------------------------------------------------------------------------------------------------- cuts

    async def snapshot(self, trainer_epoch: int, step: int) -> bytes:
        """The ledger between `step` and the next, serialised. Raises StaleError when another step is the newest."""
        async with self._turn:
            view = await self.ledger.view()
            await self._hear_trainer(view, trainer_epoch)
            if view.run.committed != step:
                raise StaleError(f"a snapshot of step {step} cannot be taken: step {view.run.committed} is the newest committed")
            snapshot = await self.ledger.dump(self.recipe.run.name, step)
        return snapshot.SerializeToString()

    async def restore(self, request: spb.RestoreLedgerRequest, data: bytes) -> spb.RestoreLedgerResponse:
        """Put the ledger back to a cut. Raises RefusedError unless OpenTrainer would ask for it now."""
        op = f"restore:{request.operation_id or uuid.uuid4().hex}"
        try:
            snapshot = LedgerSnapshot.FromString(data)
        except DecodeError as err:
            raise CorruptError(f"the ledger snapshot of {request.cut_id} does not parse: {err}") from None
        if snapshot.format_version != SNAPSHOT_FORMAT or (snapshot.run, snapshot.step) != (self.recipe.run.name, request.step):
            raise RefusedError(
                f"the ledger snapshot is of run {snapshot.run!r}, step {snapshot.step}, format {snapshot.format_version}; "
                f"wanted {self.recipe.run.name!r}, step {request.step}, format {SNAPSHOT_FORMAT}"
            )
        async with self._turn:
            view = await self.ledger.view()
            if (answer := await self.ledger.recall(op)) is not None:
                return spb.RestoreLedgerResponse(num_groups=answer["groups"])
            if request.trainer_epoch != view.run.trainer_epoch:
                raise FencedError(
                    f"a restore asked for under trainer epoch {request.trainer_epoch}: {view.run.trainer_epoch} has opened the run since; "
                    "stop this trainer"
                )
            kept = self.ledger.run_of(snapshot)
            found = recovery.gap(request.step, cut_id=request.cut_id, cut_epoch=kept.trainer_epoch, run=view.run, is_empty=_is_empty(view))
            if not isinstance(found, recovery.SnapshotNeeded):
                raise RefusedError(found.reason if found else f"the store can be continued at step {request.step}: nothing to restore")
            cursor = view.run.cursor
            settings = self._settings(kept)  # raises before anything is replaced
            num = await self.ledger.restore(snapshot, request.cut_id, rev=view.rev, op=op)
            after = await self.ledger.view()
            await self.ledger.configure(settings)
            await self.evaluations.load(after)
        again = max(0, cursor - after.run.cursor)
        users_gone = max(0, view.run.user_next - kept.user_next)  # submitted after the cut: whoever did must do it again
        fields = {"cut": request.cut_id, "why": found.reason, "groups": num, "ordinals_again": again, "user_prompts_gone": users_gone}
        log.warning("ledger_restored", extra={"fields": fields})
        self._note()
        return spb.RestoreLedgerResponse(num_groups=num, num_ordinals_again=again)

    # ---------------------------------------------------------------------------------------------------- users

    async def submit(self, prompts: Sequence[spb.UserPrompt], operation_id: str) -> list[str]:
        """Queue users' prompts; their uids. Raises FullError when scheduler.user_queue_max wait."""
        op = f"submit:{operation_id or uuid.uuid4().hex}"
        limit = self._rules.user_queue_max
        made = await asyncio.to_thread(lambda: [self._prompts.user_prompt(prompt) for prompt in prompts])  # milliseconds a prompt

        async def queue(view: View) -> list[str]:
            if (answer := await self.ledger.recall(op)) is not None:
                return list(answer["uids"])
            first = view.run.user_next
            if (waiting := view.run.user_queued) + len(made) > limit:
                raise FullError(
                    f"{waiting} users' prompts wait already and {len(made)} more would pass scheduler.user_queue_max = {limit}; "
                    "submit them as training goes on"
                )
            named = [self._prompts.named(prompt, f"u{first + i}") for i, prompt in enumerate(made)]
            return await self.ledger.submit(named, first=first, op=op)

        uids = await self._decide(queue)
        self._note()
        return uids

    async def pause(self, reason: str) -> None:
        async with self._turn:
            await self.ledger.configure({"pause_reason": reason or "by request"}, ("paused", f"paused: {reason or 'by request'}"))
        self._note()

    async def resume(self) -> None:
        async with self._turn:
            if (await self.ledger.view()).run.pause_reason:
                await self.ledger.configure({"pause_reason": ""}, ("resumed", "resumed"))
        self._note()

    async def set_window(self, window: int) -> spb.Occupancy:
        """Shrinking drops nothing."""
        least, most = self._rules.batch_groups, (self._rules.max_lag + 1) * self._rules.batch_groups
        if not least <= window <= most:
            raise InvalidArgumentError(
                f"window = {window} must lie between scheduler.batch_groups = {least} and "
                f"(scheduler.max_lag + 1) x scheduler.batch_groups = {most}: below, no batch fills; above, max_lag cannot hold"
            )
        async with self._turn:
            await self.ledger.configure({"window": window})
            view = await self.ledger.view()
        self._note()
        return occupancy_of(view)

    async def evaluate(self, version: int | None, max_prompts: int, operation_id: str) -> str:
        """Queue an evaluation; its id."""
        if not self.evaluations.is_possible:
            raise RefusedError("this run has no validation set: set data.validation")
        async with self._turn:
            run = (await self.ledger.view()).run
            wanted = run.committed if version is None else version
            holders = {r.held.version for r in self.here() if r.held.epoch == run.trainer_epoch}
            if wanted < run.committed and wanted not in holders:
                raise StaleError(f"version {wanted} is older than the newest committed {run.committed} and no replica holds it")
            if wanted > run.total_steps:
                raise RefusedError(f"version {wanted} will not exist: the run ends at {run.total_steps}")
            plan = self.evaluations.plan(version=wanted, step=run.committed, max_prompts=max_prompts, auto=False)
            evaluation_id = await self.ledger.ask_evaluation(plan, op=f"evaluate:{operation_id or uuid.uuid4().hex}")
            await self.evaluations.load(await self.ledger.view())
        self._note()
        return evaluation_id

    async def get_evaluation(self, evaluation_id: str, wait_s: float) -> spb.Evaluation | None:
        """Its result; None while it is open after `wait_s`. Raises NotFoundError."""
        until_s = time.monotonic() + min(wait_s, self._rules.wait_max_s)
        while True:
            seen = self.changes.count
            # Plans before the result: one that ends between the two reads must not look as if it had never been.
            is_planned = any(plan["id"] == evaluation_id for plan in await self.ledger.evaluations())
            if (blob := await self.ledger.result(evaluation_id)) is not None:
                return spb.Evaluation.FromString(blob)
            if not is_planned:
                raise NotFoundError(f"there is no evaluation {evaluation_id!r}")
            if not await self.changes.after(seen, until_s - time.monotonic()):
                return None

    # ---------------------------------------------------------------------------------------------------- looking

    async def explain(self) -> list[str]:
        """Why nothing is moving, most important first."""
        return explain.explain(*await self._facts())

    async def is_moving(self) -> bool:
        return explain.is_moving(*await self._facts())

    async def _facts(self) -> tuple[View, explain.Facts]:
        view, now_s, outage = await self.ledger.look(), self._clock(), self.ledger.outage
        waiting = self._waiting
        num_open, num_all = self.evaluations.open_prompts(view)
        exam = self.evaluations.running
        facts = explain.Facts(
            batch_groups=self._rules.batch_groups,
            max_lag=self._rules.max_lag,
            lease_s=self._rules.lease_s,
            group_deadline_s=self._rules.group_deadline_s,
            now_s=now_s,
            store_outage=f"{outage.why}; waited for {outage.for_s:.0f} s" if outage else "",
            trainer_silent_s=None if self._trainer_heard_s is None else now_s - self._trainer_heard_s,
            sample_reason=waiting.reason if waiting and waiting.step == view.run.committed + 1 else "",
            blockers=waiting.blockers if waiting else (),
            replicas=[explain.ReplicaFacts(r.replica_id, now_s - r.heard_s, r.is_gone, r.held) for r in self.replicas.values()],
            evaluation=f"evaluation {exam['id']} of v{exam['version']}: {num_open} of {num_all} prompts open" if exam else "",
            quiet_s=now_s - self._moved_s,
        )
        return view, facts

    async def status(self, begun_since: int | None = None) -> spb.GetStatusResponse:
        """`begun_since` = count only groups begun by that version or a newer one."""
        view, now_s = await self.ledger.look(), self._clock()
        run = view.run
        leases: dict[str, int] = {}
        for entry in view.entries.values():
            if entry.state is State.RUNNING:
                leases[entry.replica] = leases.get(entry.replica, 0) + 1
        return spb.GetStatusResponse(
            run=self.recipe.run.name,
            phase=spb.RunPhase.Value(f"RUN_PHASE_{self.phase(view)}"),
            total_steps=run.total_steps,
            committed_step=run.committed,
            checkpoint_step=run.checkpoint,
            occupancy=occupancy_of(view, begun_since),
            max_lag=self._rules.max_lag,
            batch_groups=self._rules.batch_groups,
            lag_trained_max=run.lag_trained_max,
            replicas=[r.status(now_s, leases.get(r.replica_id, 0)) for r in self.replicas.values()],
            trainer=spb.TrainerStatus(
                trainer_epoch=run.trainer_epoch,
                address=run.trainer_address,
                last_heard_s=-1 if self._trainer_heard_s is None else now_s - self._trainer_heard_s,
                metrics=json.loads(run.metrics_json),
            ),
            last_evaluation=self.evaluations.last,
            cursor=run.cursor,
            dataset_size=len(self._prompts),
            num_evicted=run.num_evicted,
            num_failed=run.num_failed,
            num_reissued=run.num_reissued,
            pause_reason=run.pause_reason,
            num_trajectories=run.num_trajectories,
            num_tokens=run.num_tokens,
            cut_id=run.cut_id,
            completions_per_s=self.completions.per_s(now_s),
        )

    async def verify(self) -> spb.VerifyLedgerResponse:
        async with self._turn:
            snapshot = await self.ledger.snapshot(with_payloads=True)
        return await asyncio.to_thread(lines.report, snapshot, self._rules.max_lag)  # seconds, after a million prompts

    async def read_ledger(self, uid: str, *, open_only: bool) -> Iterator[LedgerGroup]:
        """Where every prompt stands; with `uid` (or an ordinal) that one, payload included. Raises NotFoundError."""
        async with self._turn:
            snapshot = await self.ledger.snapshot()
            if not uid:
                return lines.lines(snapshot, open_only=open_only)
            return iter([await self.ledger.life(snapshot, uid)])


def _is_empty(view: View) -> bool:
    """Whether the store knows nothing of the run yet."""
    return view.run.cursor == 0 and view.run.committed == 0 and not view.entries


def occupancy_of(view: View, begun_since: int | None = None) -> spb.Occupancy:
    """The store's own counters, for people; with `begun_since` counted anew."""
    found = view.counts(begun_since)
    counts = {state.value: max(0, found.get(state, 0)) for state in State}
    return spb.Occupancy(window=view.run.window, occupied=sum(counts[state] for state in OPEN_STATES), **counts)
