"""The trainer's driver. The order of a step is the recovery story:

    SampleBatch(k) --> train --> publish v_k --> CommitStep(k) --> metrics line k --> [snapshots --> STABLE --> CommitCheckpoint(k)]
                  a         b              c               d                 e                 f         g

    killed at   what is there                          what the next incarnation does (it resumes at j, the newest stable checkpoint)
    a, b        groups of k consumed, not committed    OpenTrainer(j) makes them finished again; an update not published never was
    c           replicas may hold (old epoch, v_k)     publishes v_j under a newer epoch, which wins over any older one; trains k again
    d, e        k is committed in the store            OpenTrainer(j) reopens all groups of steps > j: they train once more, from v_j,
                                                       and only that counts; metrics lines > j are cut off
    f           a folder without STABLE                ignores and names it; as d
    -           a store without the run, or past j     RestoreLedger: the snapshot in checkpoint j takes its place; then as a
    g           STABLE, the store was not told         resumes at k and says CommitCheckpoint(k) again

    The snapshots are the learner's state and, from SnapshotLedger(k), the ledger between k and k + 1: one cut, one id.
    I5: nothing leaves the store before the checkpoint that contains it is durable. CommitCheckpoint follows STABLE, STABLE
    follows the metrics lines up to k. So each group is in exactly one step of the history that is continued (C4).

Threads: this one trains, publishes and is the only one that writes to the ledger. One writer thread takes metrics lines and
checkpoints in order, from copies; at most one checkpoint is in flight. The next batch is never asked for before CommitStep:
the ledger hands out step k + 1 only then, which is what bounds the lag.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError

from services.trainer import checkpoint, metrics
from services.trainer.checkpoint import Cut
from services.trainer.control import Saved, SaveRequests, Status, Stop, Stopping
from services.trainer.feed import Feed, is_ours
from services.trainer.ledger import Ledger
from services.trainer.metrics import BusyShare, MetricsFiles
from services.trainer.publish import Relay
from stretto.errors import CorruptError, DeadlineError, FencedError, InvalidArgumentError, RefusedError, StrettoError, UnavailableError
from stretto.recipe import Recipe
from stretto.v1 import scheduler_pb2 as pb
from stretto.v1.types_pb2 import Group

log = logging.getLogger("stretto.trainer")

ROUND_S = 1.5
"""One wait for a batch; between two the relay, checkpoints and requests are looked after."""
AWAY_S = 0.3
"""Between two attempts to reach a scheduler that is away."""
POLL_S = 0.2
"""Between two looks at the run's phase, once all steps are done."""
CATCH_UP_S = 2.0
"""How long the feed may be behind the phase before the last evaluation is taken from the status."""


RETRY_SAVE_S = 3.0
"""Between two attempts to write the last checkpoint."""
DONE_GRACE_S = 10.0
"""Over validation.deadline_s, at which the scheduler itself cuts the last evaluation."""


class CannotResumeError(StrettoError):
    """The checkpoint, the recipe or the store forbids to go on; a restart will not help."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a checkpoint is written from, while training goes on."""

    learner: dict[str, Any]
    """Learner.state(), in host memory."""
    ledger: bytes
    """A serialised LedgerSnapshot."""


class StepReport(Protocol):
    """What a train step says."""

    @property
    def metrics(self) -> dict[str, float]:
        """Scalars by name; "updates" = optimizer steps made."""
        ...


class Learner(Protocol):
    """The model and its optimizer; see step.py."""

    def train(self, groups: Sequence[Group], step: int) -> StepReport: ...
    def tensors(self) -> Mapping[str, torch.Tensor]: ...
    def state(self) -> dict[str, Any]: ...
    def load_state(self, state: dict[str, Any]) -> None: ...
    def save_pretrained(self, folder: Path, state: Mapping[str, Any]) -> None: ...


class Loop:
    """One incarnation of the trainer, from resume to the end of the run. `run` on the thread that owns the learner."""

    def __init__(self, recipe: Recipe, ledger: Ledger, relay: Relay, stop: Stop, saves: SaveRequests, status: Status, address: str) -> None:
        self._recipe, self._ledger, self._relay = recipe, ledger, relay
        self._stop, self._saves, self._status, self._address = stop, saves, status, address
        self._total = recipe.trainer.steps
        self._folder = recipe.run.folder / "checkpoints"
        self._claim = ""
        """What names this incarnation in the checkpoint folder."""
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer")
        self._lines: deque[Future[Any]] = deque()
        """Metrics lines on their way, oldest first."""
        self._saving: tuple[int, Future[Saved]] | None = None
        """The checkpoint in flight and its step."""
        self._save_error = ""
        """Why the newest attempt failed."""
        self._saved: Saved | None = None
        """The newest durable checkpoint that the ledger knows of."""
        self._whole_step: int | None = None
        """Step that the learner's state is exactly after, and that is committed; None in between."""
        self._busy = BusyShare(time.monotonic())
        self._learner: Learner
        self._files: MetricsFiles | None = None
        self._feed: Feed | None = None

    # ---------------------------------------------------------------------------------------------------- the run

    def run(self, make_learner: Callable[[], Learner]) -> None:
        """Returns when the run is done. Raises Stopping, FencedError, or what made it impossible to go on."""
        try:
            self._resume(make_learner)
            for step in range(self._status.step + 1, self._total + 1):
                self._step(step)
            self._finish()
        except Stopping:
            self._save_on_stop()
            raise
        except FencedError:
            if self._feed:
                self._feed.stop()
            self._writer.shutdown(wait=False, cancel_futures=True)  # the files are our successor's now
            raise
        finally:
            self._close()

    def _resume(self, make_learner: Callable[[], Learner]) -> None:
        """Take over at the newest stable checkpoint. Raises CannotResumeError where a restart would not help."""
        try:
            cut = self._load(make_learner)
            k = self._saved_step
            is_over = k == self._total and self._ledger.wait_status().phase == pb.RUN_PHASE_DONE
            opened = pb.OpenTrainerResponse() if is_over else self._open(k, cut)
        except FencedError:
            raise
        except (RefusedError, InvalidArgumentError, CorruptError) as err:
            raise CannotResumeError(err.message) from err
        self._take_files(cut, opened)
        metrics.STEP.set(k)
        metrics.CHECKPOINT_STEP.set(k)
        if not is_over:
            self._publish(k)
            if self._saved:  # the last incarnation may have been killed before it said so
                self._ledger.commit_checkpoint(k, self._saved.path, self._saved.cut_id)
        self._whole_step = k

    def _load(self, make_learner: Callable[[], Learner]) -> Cut | None:
        """The learner as the newest stable checkpoint has it, or with base weights. Returns the checkpoint's cut."""
        self._saved = self._choose()
        self._learner = make_learner()
        self._stop.check()
        if self._saved is None:
            return None
        cut, state = checkpoint.load(Path(self._saved.path))
        if cut.run != self._recipe.run.name:
            raise RefusedError(
                f"checkpoint {self._saved.path} is of run {cut.run!r}, not {self._recipe.run.name!r}; use another run.folder"
            )
        self._learner.load_state(state)
        self._saved = replace(self._saved, cut_id=cut.cut_id)
        return cut

    def _take_files(self, cut: Cut | None, opened: pb.OpenTrainerResponse) -> None:
        """Claim the checkpoint folder, cut the metrics files, begin to watch.

        Danger: only after OpenTrainer, as the one trainer of the run; a fenced one must not touch the files of its successor.
        """
        k = self._saved_step
        self._claim = checkpoint.claim(self._folder)
        self._files = MetricsFiles(self._recipe.run.folder, k)
        if cut and self._files.num_bytes < cut.metrics_bytes:
            log.warning("metrics_lost", extra={"fields": {"bytes": self._files.num_bytes, "checkpoint_had": cut.metrics_bytes}})
        self._status.trainer_epoch, self._status.step, self._status.checkpoint_step = self._ledger.epoch, k, k
        self._status.cut_id = cut.cut_id if cut else ""
        self._status.optimizer_steps = cut.optimizer_steps if cut else 0
        self._feed = Feed(self._ledger.stub, self._files.last_event_id or "0", self._keeper(opened.event_id, k))
        fields = {
            "step": k,
            "epoch": self._ledger.epoch,
            "cut": self._status.cut_id,
            "reopened": opened.num_reopened,
            "lines_cut": self._files.num_cut,
        }
        log.info("resumed" if k else "started", extra={"fields": fields})

    def _choose(self) -> Saved | None:
        """The newest stable checkpoint. Names what is not used, removes what dead writers left."""
        for folder in (self._folder, self._recipe.run.folder):
            for name in checkpoint.sweep(folder):
                log.warning("leftover_removed", extra={"fields": {"name": name}})
        found = checkpoint.survey(self._folder)
        for ignored in found.ignored:
            log.warning("checkpoint_ignored", extra={"fields": {"name": ignored.name, "reason": ignored.reason}})
        if not found.stable:
            return None
        step, path = found.stable[0]
        if step > self._total:
            raise RefusedError(f"checkpoint {path} is past trainer.steps = {self._total}; raise it, or give the run another folder")
        return Saved(step, str(path))

    def _open(self, k: int, cut: Cut | None) -> pb.OpenTrainerResponse:
        """Open the run after step k, with the cut's own ledger if the store has lost it or is past it."""
        floor = max(self._relay.newest_epoch(), cut.trainer_epoch if cut else 0)

        def attempt() -> pb.OpenTrainerResponse:
            cut_id = cut.cut_id if cut else ""
            return self._ledger.open(
                k,
                self._address,
                self._total,
                self._recipe.scheduler.batch_groups,
                cut_id=cut_id,
                cut_epoch=cut.trainer_epoch if cut else 0,
                epoch_floor=floor,
            )

        opened = attempt()
        if not opened.snapshot_needed:
            return opened
        assert cut is not None
        assert self._saved is not None
        restored = self._ledger.restore(k, cut.cut_id, checkpoint.ledger_of(Path(self._saved.path), cut))
        fields = {"cut": cut.cut_id, "why": opened.snapshot_needed, "groups": restored.num_groups}
        log.warning("ledger_restored", extra={"fields": fields})
        opened = attempt()
        if opened.snapshot_needed:
            raise RefusedError(f"the ledger was restored to {cut.cut_id} and still: {opened.snapshot_needed}")
        return opened

    def _step(self, step: int) -> None:
        """One step, in the order drawn above."""
        begin = time.monotonic()
        self._status.enter("sampling")
        groups = self._sample(step)
        sampled = time.monotonic()
        self._whole_step = None
        self._status.enter("training")
        report = self._learner.train(groups, step)
        trained = time.monotonic()
        self._status.enter("publishing")
        publish_ms = self._publish(step)
        published = time.monotonic()
        self._busy.add(sampled, published)
        scalars = report.metrics | {
            "sample_wait_s": sampled - begin,
            "train_s": trained - sampled,
            "publish_s": published - trained,
            "publish_ms": publish_ms,
            "busy_share": self._busy.share(published),
        }
        self._status.enter("committing")
        self._ledger.commit_step(step, scalars)
        committed = time.monotonic()
        self._note_commit(step, report)
        try:
            snapshot = self._snapshot(step) if self._is_checkpoint_due(step) else None
        finally:  # the step is committed: it gets its line, also when a stop ends the wait for the checkpoint in flight
            end = time.monotonic()
            scalars |= {"commit_s": committed - published, "checkpoint_s": end - committed, "step_s": end - begin}
            self._record(step, scalars)
        if snapshot is not None:
            self._save(step, snapshot)  # behind the line: a stable checkpoint has all lines up to its step

    def _finish(self) -> None:
        """All steps are committed: last checkpoint, the model for others, the last evaluation."""
        if self._saved_step < self._total and self._saving is None:
            self._save(self._total, self._snapshot(self._total))
        saved = self._await_last()
        final = self._recipe.run.folder / "final"
        if not checkpoint.is_exported(Path(saved.path), final):
            checkpoint.export(Path(saved.path), final)
            log.info("final_model", extra={"fields": {"path": str(final)}})
        self._status.enter("done")
        self._wait_done()
        for line in list(self._lines):  # a copy: the feed may still bring the line of an evaluation
            line.result()

    def _await_last(self) -> Saved:
        """The last checkpoint, written again while it fails: a full disk must not cost the steps since the one before."""
        limit_s = self._recipe.trainer.checkpoint_deadline_s
        deadline_s = time.monotonic() + limit_s
        while True:
            self._await_saving()
            if self._saved is not None and self._saved.step == self._total:
                return self._saved
            if time.monotonic() > deadline_s:
                raise StrettoError(
                    f"the checkpoint of step {self._total}, the last, could not be written in "
                    f"trainer.checkpoint_deadline_s = {limit_s:g} s: {self._save_error}"
                )
            self._status.wait_reason = f"the last checkpoint cannot be written: {self._save_error}"
            self._stop.sleep(RETRY_SAVE_S)
            self._save(self._total, self._snapshot(self._total))

    # ---------------------------------------------------------------------------------------------------- parts of a step

    def _sample(self, step: int) -> Sequence[Group]:
        """The batch of `step`. Raises DeadlineError with the blocker's name after trainer.sample_deadline_s."""
        limit_s = self._recipe.trainer.sample_deadline_s
        deadline_s = time.monotonic() + limit_s
        is_away = False
        while True:
            self._look_after()
            try:
                groups, reason = self._ledger.sample(step, ROUND_S)
                now_away = False
            except (UnavailableError, DeadlineError) as err:
                groups, reason = [], f"the scheduler is away: {err.message}"
                now_away = True
            if now_away != is_away:
                log.warning("scheduler_away" if now_away else "scheduler_back", extra={"fields": {"step": step, "reason": reason}})
                is_away = now_away
            self._status.wait_reason = reason
            if groups:
                return groups
            if is_away:
                self._stop.sleep(AWAY_S)
            self._relay.ensure(self._ledger.epoch, step - 1, self._learner.tensors)
            if time.monotonic() > deadline_s:
                if not self._is_paused():
                    blocker = self._ledger.explain()
                    raise DeadlineError(f"step {step} got no batch in trainer.sample_deadline_s = {limit_s:g} s: {reason}; {blocker}")
                deadline_s = time.monotonic() + limit_s

    def _is_paused(self) -> bool:
        try:
            return self._ledger.status().phase == pb.RUN_PHASE_PAUSED
        except StrettoError:
            return False

    def _publish(self, version: int) -> float:
        """Make the learner's weights version `version`. Returns the milliseconds of the attempt that succeeded."""
        return self._relay.publish(self._ledger.epoch, version, self._learner.tensors()).total_ms

    def _note_commit(self, step: int, report: StepReport) -> None:
        self._whole_step = self._status.step = step
        self._status.optimizer_steps += int(report.metrics["updates"])
        metrics.STEP.set(step)
        metrics.STEPS.inc()

    def _record(self, step: int, scalars: Mapping[str, float]) -> None:
        """Hand the line of `step` to the writer. Raises what an earlier line ran into."""
        assert self._files
        self._status.metrics = scalars
        metrics.observe(scalars)
        while self._lines and self._lines[0].done():
            self._lines.popleft().result()
        self._lines.append(self._writer.submit(self._files.train, step, time.time(), scalars))

    def _keeper(self, opened_event_id: str, resume_step: int) -> Callable[[pb.Evaluation, str, float], bool]:
        """What the feed calls with each evaluation that ended: gives it its line if it belongs to this history."""
        files = self._files
        assert files

        def keep(evaluation: pb.Evaluation, event_id: str, unix_s: float) -> bool:
            current = self._status.step + 1  # its answer may be overtaken by an evaluation that its commit began
            counts = is_ours(evaluation.step, event_id, opened_event_id=opened_event_id, resume_step=resume_step, current_step=current)
            if counts:
                self._lines.append(self._writer.submit(files.validation, evaluation, event_id, unix_s))
            return counts

        return keep

    # ---------------------------------------------------------------------------------------------------- checkpoints

    @property
    def _saved_step(self) -> int:
        return self._saved.step if self._saved else 0

    def _is_checkpoint_due(self, step: int) -> bool:
        return step % self._recipe.trainer.checkpoint_every_steps == 0 or step == self._total or self._saves.any_waiting

    def _snapshot(self, step: int) -> Snapshot:
        """Learner and ledger as they are after `step`. Waits for the checkpoint in flight: at most one at a time."""
        with self._status.during("saving"):
            self._await_saving()
            return Snapshot(checkpoint.copied(self._learner.state()), self._ledger.snapshot(step))

    def _save(self, step: int, snapshot: Snapshot) -> None:
        """Have `snapshot` written; whoever asked for a checkpoint is answered when it is durable."""
        files, learner, asked = self._files, self._learner, self._saves.take()
        assert files
        cut = Cut(
            step=step,
            optimizer_steps=self._status.optimizer_steps,
            version=step,
            trainer_epoch=self._ledger.epoch,
            metrics_bytes=0,
            run=self._recipe.run.name,
            seed=self._recipe.run.seed,
            cut_id=checkpoint.name_cut(step, self._ledger.epoch, snapshot.ledger),
        )

        def write() -> Saved:
            tmp = checkpoint.begin(self._folder, step)
            learner.save_pretrained(tmp, snapshot.learner)
            whole = replace(cut, metrics_bytes=files.make_durable())
            return Saved(step, str(checkpoint.finish(tmp, whole, snapshot.learner, snapshot.ledger, self._claim)), cut.cut_id)

        future = self._writer.submit(write)
        future.add_done_callback(lambda done: _answer(asked, step, done))
        self._saving = (step, future)

    def _settle(self, wait_s: float = 0.0) -> None:
        """Tell the ledger about a checkpoint that became durable, waiting up to `wait_s` for it."""
        if self._saving is None:
            return
        step, future = self._saving
        wait_futures([future], timeout=wait_s)
        if not future.done():
            return
        self._saving = None
        try:
            saved = future.result()
        except (OSError, RuntimeError, SafetensorError) as err:  # a full disk: ends the run only if this is the last checkpoint
            metrics.CHECKPOINTS_FAILED.inc()
            self._save_error = str(err)
            log.error("checkpoint_failed", extra={"fields": {"step": step, "error": str(err)}})
            return
        removed = self._ledger.commit_checkpoint(step, saved.path, saved.cut_id)
        self._saved = saved
        self._status.checkpoint_step, self._status.cut_id = step, saved.cut_id
        metrics.CHECKPOINT_STEP.set(step)
        fields = {"step": step, "cut": saved.cut_id, "path": saved.path, "groups_released": removed}
        log.info("checkpoint", extra={"fields": fields})
        self._writer.submit(self._prune)

    def _prune(self) -> None:
        try:
            removed = checkpoint.prune(self._folder, self._recipe.trainer.keep_checkpoints)
        except OSError as err:
            log.warning("prune_failed", extra={"fields": {"error": str(err)}})
        else:
            log.debug("checkpoints_pruned", extra={"fields": {"names": removed}})

    def _await_saving(self) -> None:
        while self._saving:
            self._stop.check()
            self._settle(POLL_S)

    def _look_after(self) -> None:
        """What must not wait for a batch: a stop, durable checkpoints, requested ones. Only between steps."""
        self._stop.check()
        self._settle()
        step = self._status.step
        if step == 0 or self._saving or not self._saves.any_waiting:
            return
        if self._saved and self._saved.step == step:
            for asked in self._saves.take():
                asked.set_result(self._saved)
        else:
            self._save(step, self._snapshot(step))

    # ---------------------------------------------------------------------------------------------------- the end

    def _wait_done(self) -> None:
        """Until the last evaluation has ended and has its line, or validation.deadline_s is over."""
        assert self._files
        assert self._feed
        deadline_s = time.monotonic() + self._recipe.validation.deadline_s + DONE_GRACE_S
        while True:
            self._look_after()
            try:
                status = self._ledger.status()
            except (UnavailableError, DeadlineError) as err:
                self._status.wait_reason = f"the scheduler is away: {err.message}"
            else:
                if status.phase == pb.RUN_PHASE_DONE:
                    break
                self._status.wait_reason = "the last evaluation is running"
                self._relay.ensure(self._ledger.epoch, self._total, self._learner.tensors)
            if time.monotonic() > deadline_s:
                log.warning("last_evaluation_cut", extra={"fields": {"reason": self._status.wait_reason}})
                return
            self._stop.sleep(POLL_S)
        last = status.last_evaluation
        has_line = not last.outcome or last.evaluation_id in self._files.evaluation_ids
        if not has_line and not self._feed.wait_seen(last.evaluation_id, CATCH_UP_S):
            self._lines.append(self._writer.submit(self._files.validation, last, "", time.time()))

    def _save_on_stop(self) -> None:
        """A checkpoint of the last whole step, if the time left allows one."""
        step = self._whole_step
        if not step:
            return
        try:
            self._settle(self._stop.left_s)
            if self._saving is None and self._saved_step < step:
                self._save(step, self._snapshot(step))
                self._settle(self._stop.left_s)
        except (Stopping, UnavailableError, DeadlineError):
            return  # the scheduler stops as well: the next incarnation tells it

    def _close(self) -> None:
        self._saves.close()
        if self._feed:
            self._feed.stop()
        self._writer.shutdown(wait=True)
        if self._files:
            self._files.close()
        self._relay.close()
        self._ledger.close()


def _answer(asked: Sequence[Future[Saved]], step: int, done: Future[Saved]) -> None:
    """Pass on how a checkpoint ended to those who asked for one."""
    for one in asked:
        try:
            one.set_result(done.result())
        except CancelledError:
            one.set_exception(UnavailableError("the trainer is stopping; ask again when it is back"))
        except (OSError, RuntimeError, SafetensorError, StrettoError) as err:
            one.set_exception(StrettoError(f"the checkpoint of step {step} could not be written: {err}"))
