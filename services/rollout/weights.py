"""Follows the relay: the newest weights into the engine, whole or not at all.

    watch --newest--> wait for pinned work --> quiesce --> fetch --> load --> release: intact? --> proceed   held = newest
                                                          older? give back
                                                   failure: the old version goes on, try again ------^

Pinned work (validation) ends on the version it began with: no update is loaded meanwhile, and the worker leases nothing new
while one waits. The relay decides what is newest: a resumed trainer's weights are followed even to a lower version, but no token
of theirs joins what newer ones began (I8): that is given back before.
"""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from services.rollout import metrics
from stretto.errors import CorruptError, StrettoError, UnavailableError
from stretto.weights.layout import ArrayView, VersionId

if TYPE_CHECKING:
    import torch

log = logging.getLogger("stretto.rollout")

RETRY_FIRST_S, RETRY_MAX_S = 0.2, 5.0
"""Delays after a failed update: doubling."""
_DTYPES = {"BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "F16": "float16", "BF16": "bfloat16", "I32": "int32"}
_DTYPES |= {"F32": "float32", "I64": "int64", "F64": "float64"}
"""safetensors' name -> torch's."""


class Fetched(Protocol):
    """One verified version, readable until it is released."""

    @property
    def id(self) -> tuple[int, int]: ...
    @property
    def tensors(self) -> Mapping[str, ArrayView]: ...


class Source(Protocol):
    """The relay's client."""

    def watch(self) -> AsyncIterator[tuple[int, int]]: ...
    async def fetch(self, held: Any) -> Any: ...
    async def release(self, fetched: Any, error: str = "") -> bool: ...


class Loader(Protocol):
    """The driver's part in an update."""

    async def quiesce(self) -> bool: ...
    async def load(self, version: int, tensors: Mapping[str, Any]) -> None: ...
    async def proceed(self) -> float: ...


def as_torch(views: Mapping[str, ArrayView]) -> dict[str, torch.Tensor]:
    """Tensors over the same bytes; nothing is copied."""
    import torch

    tensors: dict[str, torch.Tensor] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given (buffer|NumPy array) is not writable")  # nobody writes
        for name, (dtype, shape, data) in views.items():
            kind = getattr(torch, _DTYPES[dtype])
            empty = not memoryview(data).nbytes
            tensors[name] = torch.empty(shape, dtype=kind) if empty else torch.frombuffer(data, dtype=kind).view(shape)
    return tensors


class Follower:
    """Keeps the engine on the newest weights."""

    def __init__(
        self,
        source: Source,
        loader: Loader,
        *,
        is_pinned: Callable[[], bool],
        give_back: Callable[[str], Awaitable[None]],
        on_change: Callable[[], None],
        lease_s: float,
        convert: Callable[[Mapping[str, ArrayView]], Mapping[str, Any]] = as_torch,
    ) -> None:
        """`give_back` returns every lease, with the reason given, before older weights are loaded.

        `on_change` is called whenever a property below changes; `lease_s`: how long the relay guards fetched bytes.
        """
        self._source, self._loader, self._convert = source, loader, convert
        self._is_pinned, self._give_back, self._on_change, self._lease_s = is_pinned, give_back, on_change, lease_s
        self._newest: VersionId | None = None
        self._changed = asyncio.Event()
        self._last_error = ""
        self._stall_total_ms = 0.0
        self._num_engines = 1
        self.held: VersionId | None = None
        """The weights in the engine; None before the first, and while what is in it cannot be trusted."""
        self.is_updating = False
        self.is_stepping_back = False
        """Older weights are about to be loaded: nothing may begin until they are."""
        self.num_updates = 0

    @property
    def has_newer(self) -> bool:
        """Whether the relay has weights that are not held yet."""
        return self._newest is not None and self._newest != self.held

    @property
    def stall_ms(self) -> float:
        """Mean standstill of the engine per update."""
        return self._stall_total_ms / max(1, self.num_updates)

    def forget(self) -> None:
        """The engine died: what it held is gone."""
        self.held = None
        self._num_engines += 1
        self.poke()

    def poke(self) -> None:
        """Pinned work may have ended."""
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch())
            tasks.create_task(self._keep_up())

    async def _watch(self) -> None:
        async for epoch, version in self._source.watch():
            self._newest = VersionId(epoch, version)
            self._changed.set()
            self._on_change()

    async def _keep_up(self) -> None:
        delay_s = RETRY_FIRST_S
        while True:
            await self._until(lambda: self.has_newer and not self._is_pinned())
            try:
                await self._update()
            except StrettoError as err:
                self._note_failure(err)
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, RETRY_MAX_S)
            else:
                self._last_error, delay_s = "", RETRY_FIRST_S

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def _update(self) -> None:
        """One round; raises StrettoError with the old version going on, or with `held` None and the engine halted."""
        self.is_updating = True
        self._on_change()
        began_s = time.monotonic()
        try:
            is_quiet = await self._loader.quiesce()
            stall_ms = await self._fetch_and_load(is_quiet)
            if stall_ms is None:
                await self._loader.proceed()
            else:
                self._note_update(stall_ms, time.monotonic() - began_s)
        except StrettoError:
            if self.held is not None:
                await self._loader.proceed()
            raise
        finally:
            self.is_updating = self.is_stepping_back = False
            self._on_change()

    async def _fetch_and_load(self, is_quiet: bool) -> float | None:
        """Milliseconds the engine stood still; `held` is what it goes on with. None when there was nothing to load."""
        aim, engine, began_s = self._newest, self._num_engines, time.monotonic()
        fetched: Fetched | None = await self._source.fetch(self.held)
        if fetched is None:  # nothing else is there any more
            if self._newest == aim:
                self._newest = self.held
            return None
        id = VersionId(*fetched.id)
        try:
            if not is_quiet:  # leases that arrived during the fetch may have begun
                await self._until(lambda: not self._is_pinned())
            if self.held is not None and id.version < self.held.version:
                await self._step_back(id)
            await self._loader.load(id.version, self._convert(fetched.tensors))
        except StrettoError as err:
            await self._release(fetched, began_s, err.message)
            raise
        if engine == self._num_engines and time.monotonic() - began_s < self._lease_s:
            # The lease cannot have run out: the bytes were ours while they were copied, so the engine need not wait for the relay.
            self._adopt(id, aim)
            stall_ms = await self._loader.proceed()
            await self._release(fetched, began_s, "")
            return stall_ms
        is_intact = await self._release(fetched, began_s, "")
        if engine != self._num_engines:
            raise UnavailableError(f"the engine died after {id} was loaded")
        if not is_intact:
            self.held = None
            raise CorruptError(f"{id} may have been overwritten while it was loaded, {time.monotonic() - began_s:.1f} s after its fetch")
        self._adopt(id, aim)
        return await self._loader.proceed()

    async def _step_back(self, id: VersionId) -> None:
        log.info("stepping_back", extra={"fields": {"from": str(self.held), "to": str(id)}})
        self.is_stepping_back = True
        self._on_change()
        await self._give_back(f"the trainer fell back to v{id.version}")

    def _adopt(self, id: VersionId, aim: VersionId | None) -> None:
        """The engine holds `id`."""
        self.held = id
        if self._newest == aim:
            self._newest = id

    def _note_update(self, stall_ms: float, took_s: float) -> None:
        assert self.held is not None
        self.num_updates += 1
        self._stall_total_ms += stall_ms
        metrics.UPDATES.inc()
        metrics.UPDATE_STALL_MS.observe(stall_ms)
        metrics.VERSION.set(self.held.version)
        metrics.TRAINER_EPOCH.set(self.held.epoch)
        fields = {"version": self.held.version, "trainer_epoch": self.held.epoch, "stall_ms": stall_ms, "took_ms": took_s * 1e3}
        log.info("weights_updated", extra={"fields": fields})

    def _note_failure(self, err: StrettoError) -> None:
        metrics.UPDATE_FAILURES.inc()
        if err.message != self._last_error:
            self._last_error = err.message
            fields = {"error": err.message, "wanted": str(self._newest), "held": str(self.held)}
            log.warning("weights_update_failed", extra={"fields": fields})

    async def _release(self, fetched: Fetched, began_s: float, error: str) -> bool:
        """End the read lease; whether the bytes were ours until now: it was valid, or cannot have run out yet."""
        try:
            was_valid = await self._source.release(fetched, error)
        except StrettoError as err:
            log.info("release_refused", extra={"fields": {"error": err.message}})
            was_valid = False
        return was_valid or time.monotonic() - began_s < self._lease_s
