"""The engine's thread: everything that touches the engine happens here, between two steps.

    event loop                                engine thread
    submit / abort / load / proceed --inbox--> commands, then feed(), then engine.step()
    on_ended([Completion ...])     <-outbox--  once per step, however many ended
    on_died(error)                 <---------- the engine raised: nothing runs until rebuild()

The thread sleeps on a condition while there is nothing to do. The engine is given little more than its slots can take;
the rest waits here, so that a person's Generate goes first and a draining update starts nothing new.

A weight update is quiesce() - load() - proceed(). quiesce() waits, by the drain policy, until the running answers are done;
load() leaves the engine halted until proceed(): the caller decides whether the bytes were whole before a token is drawn.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from services.rollout.engine import NO_VERSION, Completion, Engine, Finish, Request
from stretto.errors import InvalidArgumentError, NotFoundError, StrettoError, UnavailableError

log = logging.getLogger("stretto.rollout")
T = TypeVar("T")

UpdatePolicy = Literal["in_flight", "abort", "drain"]
STREAM_PERIOD_S = 0.05
"""How often the tokens so far of a streamed request are handed over."""
LOOKAHEAD_SHARE = 4
"""The engine is given a quarter more than its slots, so that it can admit several sequences in one prefill."""
JOIN_S = 2.0
"""Longest wait for the thread at the end; it is a daemon."""


class Vitals(NamedTuple):
    """The engine after its last step."""

    slots: int = 0
    num_running: int = 0
    num_waiting: int = 0
    """Waiting for a slot, here or in the engine."""
    generated_tokens: int = 0
    """Since the process began, over rebuilds."""
    busy_s: float = 0.0
    """Seconds spent stepping since the process began."""
    is_alive: bool = False


def untouched(request: Request, finish: Finish, error: str = "") -> Completion:
    """The completion of a request that never reached the engine: its prefix."""
    tokens, logprobs = np.array(request.prefix_tokens, np.int32), np.array(request.prefix_logprobs, np.float32)
    return Completion(request.id, tokens, logprobs, list(request.prefix_spans), finish, error)


def continued(request: Request, so_far: Completion) -> Request:
    """The same request, to go on after `so_far`."""
    return replace(request, prefix_tokens=so_far.tokens.tolist(), prefix_logprobs=so_far.logprobs.tolist(), prefix_spans=list(so_far.spans))


class Driver:
    """Owns the engine and its thread. Public methods belong to the event loop; `_on_…` and `_engine_…` to the thread."""

    def __init__(
        self,
        build: Callable[[], Engine],
        *,
        policy: UpdatePolicy,
        keep_partials: bool,
        on_ended: Callable[[list[Completion]], None],
        on_died: Callable[[Exception], None],
    ) -> None:
        """`build` is called on the thread. keep_partials off: the abort policy begins running answers anew."""
        self._build, self._policy, self._keep_partials = build, policy, keep_partials
        self._on_ended, self._on_died = on_ended, on_died
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._sinks: dict[str, asyncio.Queue[tuple[Completion, bool]]] = {}
        """By id of a streamed request: (answer so far, is it the last)."""
        # shared, under _wake
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], object]] = deque()
        self._is_stopping = False
        # shared, under _outbox_lock
        self._outbox_lock = threading.Lock()
        self._outbox: list[Completion] = []
        self._progress: list[Completion] = []
        # written by the thread, read by anyone
        self.vitals = Vitals()
        # the thread's own
        self._engine: Engine | None = None
        self._todo: deque[Callable[[], object]] = deque()
        self._queue: deque[list[Request]] = deque()
        self._num_queued = 0
        self._inside: dict[str, Request] = {}
        self._streamed: set[str] = set()
        self._next_progress_s = 0.0
        self._quiescing: asyncio.Future[None] | None = None
        """Answered when nothing runs any more; nothing is fed from quiesce() to proceed()."""
        self._is_feeding = True
        self._is_halted = False
        self._halted_since_s = 0.0
        self._busy_s = 0.0
        self._tokens_before = 0

    # ---- for the event loop

    async def start(self) -> None:
        """Start the thread and build the engine; raises what `build` raises."""
        self._thread.start()
        await self.rebuild()

    async def rebuild(self) -> None:
        """A new engine, without weights, in place of one that died. What was queued is dropped."""
        await self._ask(self._engine_build)

    async def stop(self) -> None:
        """End the thread; requests under way are dropped."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, JOIN_S)

    def submit(self, batches: Iterable[list[Request]]) -> None:
        """Queue groups of requests; each ends in one completion handed to `on_ended`, unless aborted."""
        wanted = [batch for batch in batches if batch]
        if wanted:
            self._tell(lambda: self._on_submit(wanted))

    def abort(self, ids: Iterable[str]) -> None:
        """Drop these; no completion follows."""
        gone = set(ids)
        if gone:
            self._tell(lambda: self._on_abort(gone))

    async def take_back(self, ids: Iterable[str] | None = None) -> list[Completion]:
        """Drop these, None = all; the answers so far, except those of streams (they end as aborted)."""
        gone = None if ids is None else set(ids)
        return self._route(await self._ask(lambda: self._on_abort(gone)))

    async def quiesce(self) -> bool:
        """Before an update: by the drain policy start nothing more and wait until the running answers are done.

        Whether the engine now stands still. Raises UnavailableError when it dies meanwhile.
        """
        if self._policy != "drain":
            return False
        answer: asyncio.Future[None] = self._loop.create_future()
        self._tell(lambda: self._on_quiesce(answer))
        await answer
        return True

    async def load(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Load weights by the update policy and halt the engine until `proceed`.

        Raises InvalidArgumentError (names or shapes: the old weights stay, nothing is halted), UnavailableError (no engine).
        """
        await self._ask(lambda: self._on_load(version, tensors))

    async def proceed(self) -> float:
        """Draw tokens again, after `load` or `quiesce`; milliseconds the engine stood still."""
        return await self._ask(self._on_proceed)

    async def stream(self, request: Request) -> AsyncIterator[tuple[Completion, bool]]:
        """(the answer so far, ever longer; is it the last). Goes before all queued work. Closing it aborts."""
        sink = self._sinks[request.id] = asyncio.Queue()
        self._tell(lambda: self._on_stream(request))
        is_over = False
        try:
            while not is_over:
                part, is_over = await sink.get()
                yield part, is_over
        finally:
            if self._sinks.pop(request.id, None) is not None:
                self.abort([request.id])

    # ---- between the two

    def _tell(self, command: Callable[[], object]) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    async def _ask(self, command: Callable[[], T]) -> T:
        answer: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                result = command()
            except Exception as err:  # noqa: BLE001 - belongs to the asker
                self._settle(answer, err)
            else:
                self._settle(answer, result)

        self._tell(run)
        return await answer

    def _settle(self, answer: asyncio.Future[T], result: T | Exception) -> None:
        """Answer a future of the loop from the thread."""

        def settle() -> None:
            if answer.done():
                return
            if isinstance(result, Exception):
                answer.set_exception(result)
            else:
                answer.set_result(result)

        self._call_loop(settle)

    def _call_loop(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            self._loop.call_soon_threadsafe(callback)

    def _hand_over(self, ended: list[Completion], progress: Sequence[Completion] = ()) -> None:
        """Thread: one wake-up of the loop for everything it has not yet taken."""
        if not ended and not progress:
            return
        with self._outbox_lock:
            is_first = not self._outbox and not self._progress
            self._outbox += ended
            self._progress += progress
        if is_first:
            self._call_loop(self._take_over)

    def _take_over(self) -> None:
        """Loop: the other end of `_hand_over`."""
        with self._outbox_lock:
            ended, self._outbox = self._outbox, []
            progress, self._progress = self._progress, []
        for part in progress:
            if (sink := self._sinks.get(part.id)) is not None:
                sink.put_nowait((part, False))
        ended = self._route(ended)
        if ended:
            self._on_ended(ended)

    def _route(self, ended: list[Completion]) -> list[Completion]:
        """Loop: give streams their ends; the rest."""
        if not self._sinks:
            return ended
        others: list[Completion] = []
        for completion in ended:
            sink = self._sinks.pop(completion.id, None)
            if sink is None:
                others.append(completion)
            else:
                sink.put_nowait((completion, True))
        return others

    # ---- the thread

    def _run(self) -> None:
        while self._is_awake():
            try:
                while self._todo:
                    self._todo.popleft()()
                self._advance()
            except Exception as err:  # noqa: BLE001 - the engine died; its owner decides what follows
                self._engine_lost(err)

    def _is_awake(self) -> bool:
        """Block while there is nothing to do, take the new commands; False = stop."""
        with self._wake:
            # A command appended before this wait begins is seen by the predicate: no wake-up is lost.
            self._wake.wait_for(lambda: self._inbox or self._todo or self._is_stopping or self._can_advance())
            self._todo.extend(self._inbox)
            self._inbox.clear()
            return not self._is_stopping

    def _can_advance(self) -> bool:
        if self._engine is None or self._is_halted or self._engine.version == NO_VERSION:
            return False
        return (self._is_feeding and bool(self._queue)) or self._engine.has_work()

    def _advance(self) -> None:
        engine = self._engine
        if engine is None or not self._can_advance():
            return
        ended = self._engine_feed(engine)
        if engine.has_work():
            began_s = time.perf_counter()
            ended += engine.step()
            self._busy_s += time.perf_counter() - began_s
        for completion in ended:
            self._inside.pop(completion.id, None)
            self._streamed.discard(completion.id)
        self._note_vitals(engine)
        self._hand_over(ended, self._engine_progress(engine))
        self._note_quiet(engine)

    def _note_quiet(self, engine: Engine) -> None:
        """Answer quiesce() when nothing runs."""
        if self._quiescing is not None and not engine.has_work():
            self._halted_since_s = time.perf_counter()
            self._settle(self._quiescing, None)
            self._quiescing = None

    def _note_vitals(self, engine: Engine) -> None:
        tokens = self._tokens_before + engine.generated_tokens
        waiting = engine.num_waiting + self._num_queued
        self.vitals = Vitals(engine.slots, engine.num_running, waiting, tokens, self._busy_s, True)

    def _engine_build(self) -> None:
        self._queue.clear()
        self._num_queued = 0
        self._engine = self._build()
        self._note_vitals(self._engine)

    def _engine_feed(self, engine: Engine) -> list[Completion]:
        """Hand over whole groups (their prompt is prefilled once) as the engine has room; completions of refused ones."""
        room = engine.slots + engine.slots // LOOKAHEAD_SHARE - engine.num_running - engine.num_waiting
        batch: list[Request] = []
        while self._queue and len(batch) < room and self._is_feeding:
            batch += self._queue.popleft()
        if not batch:
            return []
        self._num_queued -= len(batch)
        try:
            engine.add(batch)
        except InvalidArgumentError:
            return self._engine_add_singly(engine, batch)
        self._inside.update((r.id, r) for r in batch)
        return []

    def _engine_add_singly(self, engine: Engine, batch: list[Request]) -> list[Completion]:
        refused: list[Completion] = []
        for request in batch:
            try:
                engine.add([request])
            except InvalidArgumentError as err:
                refused.append(untouched(request, "failed", err.message))
            else:
                self._inside[request.id] = request
        return refused

    def _engine_progress(self, engine: Engine) -> list[Completion]:
        now_s = time.monotonic()
        if not self._streamed or now_s < self._next_progress_s:
            return []
        self._next_progress_s = now_s + STREAM_PERIOD_S
        return [p for id in self._streamed if id in self._inside and (p := _progress(engine, id)) is not None]

    def _engine_recall(self, engine: Engine) -> None:
        """Take back what has not begun, so that draining does not wait for it."""
        waiting = [r for r in self._inside.values() if not _has_begun(engine, r)]
        engine.abort([r.id for r in waiting])
        for request in waiting:
            del self._inside[request.id]
        if waiting:
            self._queue.appendleft(waiting)
            self._num_queued += len(waiting)

    def _engine_load_anew(self, engine: Engine, version: int, tensors: Mapping[str, Any]) -> None:
        """No token of the old version may stay: running answers begin again, except those a person has already read."""
        dropped = {c.id: c for c in engine.abort(None)}
        try:
            engine.load_weights(version, tensors, "abort")
        finally:
            engine.add([continued(r, dropped[id]) if id in self._streamed else r for id, r in self._inside.items() if id in dropped])

    def _engine_lost(self, err: Exception) -> None:
        log.error("engine_died", exc_info=err)
        if self._engine is not None:
            self._tokens_before = self.vitals.generated_tokens
        self._engine, self._is_halted, self._is_feeding = None, False, True
        self.vitals = self.vitals._replace(num_running=0, num_waiting=0, is_alive=False)
        known = [*self._inside.values(), *(r for batch in self._queue for r in batch)]
        lost = [untouched(r, "failed", f"the engine died: {err}") for r in known if r.id in self._streamed]
        self._inside.clear()
        self._streamed.clear()
        self._queue.clear()
        self._num_queued = 0
        if self._quiescing is not None:
            self._settle(self._quiescing, UnavailableError(f"the engine died: {err}"))
            self._quiescing = None
        self._hand_over(lost)
        self._call_loop(lambda: self._on_died(err))

    # ---- commands, on the thread

    def _on_submit(self, batches: list[list[Request]]) -> None:
        self._queue.extend(batches)
        self._num_queued += sum(len(batch) for batch in batches)

    def _on_stream(self, request: Request) -> None:
        if self._engine is None:
            self._hand_over([untouched(request, "failed", "the engine is being built anew")])
            return
        self._streamed.add(request.id)
        self._queue.appendleft([request])
        self._num_queued += 1

    def _on_abort(self, ids: set[str] | None) -> list[Completion]:
        """Drop these, None = all, here and in the engine; their answers so far."""
        dropped: list[Completion] = []
        kept: deque[list[Request]] = deque()
        for batch in self._queue:
            dropped += [untouched(r, "aborted") for r in batch if ids is None or r.id in ids]
            if ids is not None and (rest := [r for r in batch if r.id not in ids]):
                kept.append(rest)
        self._queue, self._num_queued = kept, sum(len(batch) for batch in kept)
        if self._engine is not None:
            dropped += self._engine.abort(ids)
            self._note_vitals(self._engine)
        for completion in dropped:
            self._inside.pop(completion.id, None)
            self._streamed.discard(completion.id)
        return dropped

    def _on_quiesce(self, answer: asyncio.Future[None]) -> None:
        if self._engine is None:
            self._settle(answer, UnavailableError("the engine is being built anew"))
            return
        self._is_feeding, self._quiescing = False, answer
        self._engine_recall(self._engine)
        self._note_quiet(self._engine)

    def _on_load(self, version: int, tensors: Mapping[str, Any]) -> None:
        engine = self._engine
        if engine is None:
            raise UnavailableError(f"no engine to load v{version} into")
        if self._is_feeding:  # else it stands still since quiesce()
            self._halted_since_s = time.perf_counter()
        try:
            if self._policy == "abort" and not self._keep_partials:
                self._engine_load_anew(engine, version, tensors)
            else:
                engine.load_weights(version, tensors, "abort" if self._policy == "abort" else "in_flight")
        except StrettoError:
            raise
        except Exception as err:
            self._engine_lost(err)
            raise UnavailableError(f"the engine died while it loaded v{version}: {err}") from err
        self._is_halted = True

    def _on_proceed(self) -> float:
        self._is_halted, self._is_feeding = False, True
        return (time.perf_counter() - self._halted_since_s) * 1e3


def _progress(engine: Engine, id: str) -> Completion | None:
    """The answer so far; None when it has ended and comes with the next step."""
    try:
        return engine.progress(id)
    except NotFoundError:
        return None


def _has_begun(engine: Engine, request: Request) -> bool:
    so_far = _progress(engine, request.id)
    return so_far is None or len(so_far.tokens) > len(request.prefix_tokens)
