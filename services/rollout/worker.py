"""The replica at work: five loops around one book of leases.

    leases      LeasePrompts (long poll, under way while the engine works) --> driver.submit
    driver      ended --> failed: queued for report; else --> scorer --> queued
    reports     ReportTrajectories, everything that ended since the last call, repeated until acknowledged
    heartbeats  renews the session and its leases; brings directives and lost leases
    weights     the newest version into the engine (weights.Follower)
    revivals    a dead engine: hand the leases back, build it anew

While the scheduler is away, what is leased is generated and kept. A session that the scheduler has forgotten is replaced; one that
is fenced has lost its name to another process, and this one ends with FencedError.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from services.rollout import metrics
from services.rollout.driver import Driver, Vitals
from services.rollout.engine import Completion
from services.rollout.groups import LeaseBook, prompts_wanted
from services.rollout.link import SchedulerLink
from services.rollout.scoring import Scorer
from services.rollout.weights import Follower
from stretto.errors import FencedError, NotFoundError, StrettoError
from stretto.v1 import scheduler_pb2 as pb
from stretto.v1.types_pb2 import FinishReason, Trajectory, WeightsId

log = logging.getLogger("stretto.rollout")

RPC_TIMEOUT_S = 10.0
"""Of one try of a call that does not wait at the scheduler."""
LEASE_POLL_S = 10.0
"""Long-poll budget of LeasePrompts; shorter if the recipe says so."""
EMPTY_PAUSE_S = 0.1
"""Least time between two lease calls that bring nothing."""
REPORT_TICK_S = 0.01
"""Ends are gathered this long while others are under way: dozens per call under load, and too short to matter without."""
REPORTS_MAX, REPORT_BYTES_MAX = 512, 8 << 20
"""Per ReportTrajectories call."""
BUSY_WINDOW_S = 10.0
"""busy_share looks back this far."""
ENGINE_REBUILDS_MAX, ENGINE_REBUILDS_WINDOW_S = 3, 600.0
"""An engine that dies more often than this is not built anew: the process ends and its supervisor decides."""
SETTLE_S = 1.5
"""When leases are handed back: longest wait for answers that are whole but not yet scored and reported."""
RETURN_S, RETURN_TIMEOUT_S = 4.0, 1.0
"""How long the return of leases is tried while the scheduler is away; of one try, and of the goodbye. What does not arrive is
re-issued when the lease expires."""


class EngineLostError(StrettoError):
    """The engine died too often."""


@dataclass(frozen=True)
class Settings:
    """What the loops need of the recipe."""

    group_size: int
    """Trajectories per training group: the unit in which capacity is asked for."""
    prefetch_groups: int
    poll_s: float
    heartbeat_s: float
    """Until the scheduler says otherwise."""


class BusyMeter:
    """Share of time spent stepping, over the last seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque()

    def share(self, now_s: float, busy_s: float) -> float:
        self._samples.append((now_s, busy_s))
        while len(self._samples) > 2 and self._samples[1][0] < now_s - BUSY_WINDOW_S:
            self._samples.popleft()
        since_s, before_s = self._samples[0]
        return min(1.0, (busy_s - before_s) / (now_s - since_s)) if now_s > since_s else 0.0


class Worker:
    """Everything a replica does of its own accord."""

    def __init__(self, settings: Settings, link: SchedulerLink) -> None:
        self.settings, self.link = settings, link
        self.address = ""
        """Where our RolloutService can be reached, "host:port"."""
        self.book = LeaseBook(link.replica_id)
        self._lease_reason = ""
        """Why the last lease call brought nothing."""
        self._driver: Driver | None = None
        self._follower: Follower | None = None
        self._scorer: Scorer | None = None
        self._changed = asyncio.Event()
        self._beat = asyncio.Event()
        self._drain_asked = asyncio.Event()
        self._is_paused = False
        self._renewing = asyncio.Lock()
        self._incarnation = uuid.uuid4().hex
        self._poll: asyncio.Task[Any] | None = None
        self._poll_id = ""
        self._poll_held = self._told_held = WeightsId()
        """What the open lease call asks for, and what the newest heartbeat told."""
        self._deaths: deque[float] = deque()
        self._death: Exception | None = None
        self._busy = BusyMeter()
        self._tokens_counted = 0

    def attach(self, driver: Driver, follower: Follower, scorer: Scorer) -> None:
        """The parts that call back into the worker."""
        self._driver, self._follower, self._scorer = driver, follower, scorer

    @property
    def driver(self) -> Driver:
        assert self._driver is not None
        return self._driver

    @property
    def follower(self) -> Follower:
        assert self._follower is not None
        return self._follower

    @property
    def state(self) -> pb.ReplicaState.ValueType:
        if self._drain_asked.is_set():
            return pb.REPLICA_STATE_DRAINING
        if self._death is not None:
            return pb.REPLICA_STATE_DEAD
        if self.follower.held is None:
            return pb.REPLICA_STATE_WAITING_FOR_WEIGHTS
        return pb.REPLICA_STATE_UPDATING if self.follower.is_updating else pb.REPLICA_STATE_RUNNING

    @property
    def wait_reason(self) -> str:
        """What it waits for; empty when it works."""
        return self._blocker() or ("" if self.book.num_generating else self._lease_reason)

    @property
    def held(self) -> WeightsId:
        """As it travels; trainer_epoch 0 = none."""
        held = self.follower.held
        return WeightsId() if held is None else WeightsId(trainer_epoch=held.epoch, version=held.version)

    # ---- called by its parts

    def drain(self) -> None:
        """Hand everything back; then `run` returns."""
        self._drain_asked.set()
        self._changed.set()

    def on_ended(self, completions: Iterable[Completion]) -> None:
        """Sessions left the engine."""
        assert self._scorer is not None
        now_s = time.monotonic()
        self._scorer.put([ended for c in completions if (ended := self.book.end(c, now_s)) is not None])
        self._progressed()

    def on_scored(self, trajectories: Iterable[Trajectory]) -> None:
        for trajectory in trajectories:
            self.book.queue(trajectory)
        self._changed.set()

    def on_died(self, err: Exception) -> None:
        """The engine raised: nothing runs until it is built anew."""
        metrics.ENGINE_DEATHS.inc()
        self._death = err
        self.follower.forget()
        self._stop_poll()
        self._news()

    def on_weights(self) -> None:
        """The follower knows or holds something new. Which version is held, heartbeats tell in their own time: leases carry it."""
        if self._poll_held != self.held or self._blocker():
            self._stop_poll()
        self._changed.set()
        if self._told_held.trainer_epoch != self.held.trainer_epoch:
            self._beat.set()

    def _news(self) -> None:
        self._changed.set()
        self._beat.set()

    def _progressed(self) -> None:
        self._changed.set()
        self.follower.poke()

    def _abort(self, ids: list[str]) -> None:
        self.driver.abort(ids)
        self._progressed()

    # ---- the whole

    async def run(self) -> None:
        """Work until `drain` was called and everything is handed back. Raises FencedError, EngineLostError."""
        assert self._scorer is not None
        loops = (self._heartbeats(), self._leases(), self._reports(), self._revivals(), self.follower.run(), self._scorer.run())
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(loop) for loop in loops]
                await self._drain_asked.wait()
                log.info("draining", extra={"fields": {"leases": len(self.book.attempts())}})
                self._stop_poll()
                await self._hand_back("drain", await self._take_back())
                for task in tasks:
                    task.cancel()
        except BaseExceptionGroup as failed:
            raise _root_cause(failed) from failed
        await self._say_goodbye()

    async def give_back(self, reason: str) -> None:
        """Return every lease with what was produced; people's streams go on. What an open poll is granted follows (`_take`)."""
        self._stop_poll()
        await self._hand_back(reason, await self._take_back(self.book.generating()))

    async def _take_back(self, ids: Iterable[str] | None = None) -> list[Completion]:
        """Sessions out of the engine, None = all: their answers so far."""
        if self._death is not None:
            return []
        try:
            async with asyncio.timeout(SETTLE_S):
                return await self.driver.take_back(ids)
        except TimeoutError:
            log.error("engine_hangs", extra={"fields": {"waited_s": SETTLE_S}})
            return []

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def _hand_back(self, reason: str, dropped: list[Completion]) -> None:
        """Let whole answers be scored and reported, then return the leases with what was produced."""
        self.on_ended(dropped)
        try:
            async with asyncio.timeout(SETTLE_S):
                await self._until(lambda: self.book.num_ended == 0)
        except TimeoutError:
            log.warning("unscored_answers_dropped", extra={"fields": {"answers": self.book.num_ended}})
        await self._return(self.book.give_back(), reason)

    async def _return(self, leases: Sequence[pb.ReturnedLease], reason: str) -> None:
        if not leases or not self.link.epoch:
            return
        request = pb.ReturnLeasesRequest(operation_id=uuid.uuid4().hex, leases=leases, reason=reason, **self._session())
        fields = {"leases": len(leases), "partials": sum(len(r.partials) for r in leases), "reason": reason}
        try:
            async with asyncio.timeout(RETURN_S):
                await self.link.call_until_answered("ReturnLeases", lambda: request, RETURN_TIMEOUT_S)
        except (StrettoError, TimeoutError) as err:
            log.warning("leases_not_returned", extra={"fields": fields | {"error": str(err) or f"no answer in {RETURN_S:g} s"}})
        else:
            log.info("leases_returned", extra={"fields": fields})

    async def _say_goodbye(self) -> None:
        """A last heartbeat without leases: one granted a moment ago is re-issued at once."""
        if self.link.epoch:
            try:
                await self.link.call("Heartbeat", self._heartbeat(), RETURN_TIMEOUT_S)
            except StrettoError as err:
                log.info("left_without_goodbye", extra={"fields": {"error": err.message}})

    # ---- session

    def _session(self) -> dict[str, Any]:
        return {"replica_id": self.link.replica_id, "replica_epoch": self.link.epoch}

    async def _session_call(self, method: str, make_request: Callable[[], Any], timeout_s: float) -> Any:
        """As link.call_until_answered; None when the session had to be replaced and the request belonged to the old one."""
        epoch = self.link.epoch
        try:
            return await self.link.call_until_answered(method, make_request, timeout_s)
        except NotFoundError as err:
            await self._renew_session(epoch, err)
            return None
        except FencedError:
            if self.link.epoch != epoch:
                return None  # by ourselves: the call was on its way when the session was replaced
            raise

    async def _renew_session(self, epoch: int, err: NotFoundError) -> None:
        """The scheduler forgot us (its store was emptied, or we were away for long): begin again under a new epoch, without leases."""
        async with self._renewing:
            if self.link.epoch != epoch:
                return  # another loop was faster
            log.warning("session_lost", extra={"fields": {"epoch": epoch, "error": err.message}})
            self.link.epoch = 0
            self.book.give_back()
            await self._take_back()
            self._news()

    # ---- heartbeats

    async def _heartbeats(self) -> None:
        while True:
            self._beat.clear()
            attempts = self.book.attempts()
            answer: pb.HeartbeatResponse | None = await self._session_call("Heartbeat", self._heartbeat, RPC_TIMEOUT_S)
            if answer is None:
                continue
            if self.link.epoch != answer.replica_epoch:
                self.link.epoch = answer.replica_epoch
                log.info("session_began", extra={"fields": {"epoch": answer.replica_epoch, "replica_id": self.link.replica_id}})
                self._changed.set()
            self._abort(self.book.lose(answer.lost_uids, attempts))
            self._obey(answer.directives)
            try:
                async with asyncio.timeout(answer.interval_s or self.settings.heartbeat_s):
                    await self._beat.wait()
            except TimeoutError:
                continue

    def _heartbeat(self) -> pb.HeartbeatRequest:
        v, attempts = self.driver.vitals, self.book.attempts()
        busy = self._busy.share(time.monotonic(), v.busy_s)
        self._told_held = self.held
        self._measure(v, busy, len(attempts))
        return pb.HeartbeatRequest(
            state=self.state,
            held=self._told_held,
            address=self.address,
            slots=v.slots,
            running_sequences=v.num_running,
            lease_uids=attempts,
            generated_tokens=v.generated_tokens,
            busy_share=busy,
            num_weight_updates=self.follower.num_updates,
            update_stall_ms=self.follower.stall_ms,
            incarnation=self._incarnation,
            **self._session(),
        )

    def _measure(self, v: Vitals, busy: float, num_leases: int) -> None:
        metrics.TOKENS.inc(v.generated_tokens - self._tokens_counted)
        self._tokens_counted = v.generated_tokens
        metrics.SLOTS.set(v.slots)
        metrics.RUNNING.set(v.num_running)
        metrics.WAITING.set(v.num_waiting)
        metrics.ENDED.set(self.book.num_ended)
        metrics.LEASES.set(num_leases)
        metrics.BUSY_SHARE.set(busy)

    def _obey(self, directives: Iterable[pb.Directive]) -> None:
        for directive in directives:
            if directive.kind == pb.Directive.KIND_DRAIN:
                self.drain()
            elif directive.kind in (pb.Directive.KIND_PAUSE, pb.Directive.KIND_RESUME):
                is_paused = directive.kind == pb.Directive.KIND_PAUSE
                if is_paused != self._is_paused:
                    self._is_paused = is_paused
                    log.info("paused" if is_paused else "resumed")
                    self._changed.set()
            else:
                log.debug("directive_ignored", extra={"fields": {"kind": directive.kind}})

    # ---- leases

    def _blocker(self) -> str:
        """Why nothing may be leased now; empty = it may."""
        f = self.follower
        if self._drain_asked.is_set():
            return "draining"
        if self._death is not None:
            return "the engine is being built anew"
        if not self.link.epoch:
            return "waiting for the scheduler"
        if f.held is None:
            return "waiting for weights"
        if self._is_paused:
            return "paused"
        if f.is_stepping_back:
            return "the trainer fell back: older weights are being loaded"
        return "new weights wait for pinned work to end" if f.has_newer and self.book.is_pinned else ""

    def _wanted(self) -> int:
        if self._blocker():
            return 0
        return prompts_wanted(
            slots=self.driver.vitals.slots,
            prefetch_groups=self.settings.prefetch_groups,
            group_size=self.settings.group_size,
            num_generating=self.book.num_generating,
            num_ended=self.book.num_ended,
        )

    async def _leases(self) -> None:
        while True:
            await self._until(lambda: self._wanted() > 0)
            began_s = time.monotonic()
            answer = await self._poll_leases()
            if answer is None:
                continue
            if answer.leases:
                await self._take(answer.leases)
            elif time.monotonic() - began_s < EMPTY_PAUSE_S:
                await asyncio.sleep(EMPTY_PAUSE_S)

    async def _poll_leases(self) -> pb.LeasePromptsResponse | None:
        """One long poll; None when it was stopped, answered nothing or the session was replaced.

        A stopped or failed poll may have been granted leases all the same: the next one asks under the same operation id.
        """
        self._poll_id = self._poll_id or uuid.uuid4().hex
        self._poll = asyncio.create_task(self._lease_call())
        try:
            answer = await self._poll
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                self._poll.cancel()
                raise
            return None
        finally:
            self._poll = None
        if answer is not None:
            self._poll_id, self._lease_reason = "", answer.wait_reason
        return answer

    def _lease_call(self) -> Coroutine[Any, Any, pb.LeasePromptsResponse | None]:
        poll_s = min(LEASE_POLL_S, self.settings.poll_s)

        def request() -> pb.LeasePromptsRequest:
            wanted, self._poll_held = max(1, self._wanted()), self.held
            return pb.LeasePromptsRequest(
                operation_id=self._poll_id, max_prompts=wanted, held=self._poll_held, wait_s=poll_s, **self._session()
            )

        return self._session_call("LeasePrompts", request, poll_s + RPC_TIMEOUT_S)

    def _stop_poll(self) -> None:
        if self._poll is not None:
            self._poll.cancel()

    async def _take(self, leases: Sequence[pb.Lease]) -> None:
        """Begin them, but for those that newer weights began: the trainer fell back since they were granted (I8)."""
        await self._until(lambda: not self.follower.is_stepping_back)
        newer = [lease for lease in leases if not lease.pin_version and lease.version_begin > self.held.version]
        if newer and self.follower.held is not None:
            back = [pb.ReturnedLease(prompt_uid=lease.prompt.uid, attempt=lease.attempt) for lease in newer]
            await self._return(back, f"begun by newer weights than v{self.held.version}")
            leases = [lease for lease in leases if lease not in newer]
        self._begin(leases)

    def _begin(self, leases: Iterable[pb.Lease]) -> None:
        now_s = time.monotonic()
        begun = [self.book.begin(lease, now_s) for lease in leases]
        self.driver.abort([id for b in begun for id in b.aborts])
        self.driver.submit([b.requests for b in begun])

    # ---- reports

    async def _reports(self) -> None:
        while True:
            await self._until(lambda: self.book.num_queued > 0 and self.link.epoch > 0)
            if self.book.num_generating or self.book.num_ended > self.book.num_queued:
                await asyncio.sleep(REPORT_TICK_S)
            reports = self.book.reports(REPORTS_MAX, REPORT_BYTES_MAX)
            if not reports:
                continue
            answer = await self._session_call("ReportTrajectories", lambda r=reports: self._report(r), RPC_TIMEOUT_S)
            if answer is None:
                continue
            for finish, count in Counter(r.trajectory.finish_reason for r in reports).items():
                metrics.TRAJECTORIES.labels(_FINISHES[finish]).inc(count)
            self._abort(self.book.acknowledge(reports, answer.lost_uids))

    def _report(self, reports: list[pb.TrajectoryReport]) -> pb.ReportTrajectoriesRequest:
        return pb.ReportTrajectoriesRequest(reports=reports, **self._session())

    # ---- revivals

    async def _revivals(self) -> None:
        while True:
            await self._until(lambda: self._death is not None)
            now_s = time.monotonic()
            self._deaths.append(now_s)
            while self._deaths[0] < now_s - ENGINE_REBUILDS_WINDOW_S:
                self._deaths.popleft()
            await self._hand_back("engine failed", [])
            if len(self._deaths) > ENGINE_REBUILDS_MAX:
                raise EngineLostError(f"the engine died {len(self._deaths)} times in {ENGINE_REBUILDS_WINDOW_S:.0f} s: {self._death}")
            await self.driver.rebuild()
            self._death = None
            log.warning("engine_rebuilt", extra={"fields": {"deaths": len(self._deaths)}})
            self.follower.poke()
            self._news()


_FINISHES = {reason: name.removeprefix("FINISH_REASON_").lower() for name, reason in FinishReason.items()}


def _root_cause(failed: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first leaf of a group of failures."""
    err: BaseException = failed
    while isinstance(err, BaseExceptionGroup):
        err = err.exceptions[0]
    return err
