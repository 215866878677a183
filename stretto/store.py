"""Redis, with its traps handled: scripts that run once, repeats through an outage, clear errors at start.

    run(script, keys, args)    one atomic transition. Repeated through an outage with the SAME arguments until outage_s:
                               the script itself must remember its answer under an operation id (redis-py's own retries are
                               off, because they would run a command twice unnoticed)
    read(commands)             one round trip of reads in a transaction; safe to repeat

    outage                     what everybody waits for                                  ends with
    stopped, stalled, loading  the server to answer                                      the next answer
    memory full (OOM)          its maxmemory to be raised; reads still work              the next write
    disk failing (MISCONF)     its disk to take the append-only file; reads still work   the next write

A script that is refused for memory or disk has written nothing: the server checks before a script's first write, and not
after it. Answers are bytes. Nothing blocks on the server, so one client with a small pool is enough.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ConnectionError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    TimeoutError,
)

from stretto.errors import DeposedError, FencedError, InvalidArgumentError, RefusedError, StrettoError, UnavailableError

log = logging.getLogger("stretto.store")
T = TypeVar("T")

CONNECTIONS_MAX = 64
"""Commands on their way at once."""
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.02, 1.0
"""Delays between repeats: doubling, with jitter in [0.5, 1]."""
_AWAY = (ConnectionError, TimeoutError, BusyLoadingError, ReadOnlyError, OSError)
_AWAY_WORDS = ("MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "LOADING", "READONLY", "MISCONF")


class ChangedError(RefusedError):
    """The state changed after it was read: read it again and decide again."""


class StoreLostError(UnavailableError):
    """The store was emptied: it does not know the run it served."""


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script and the name the server knows it by."""

    name: str
    text: str
    sha: str

    @classmethod
    def of(cls, name: str, text: str) -> Script:
        return cls(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


@dataclass(frozen=True, slots=True)
class Outage:
    """Why commands wait."""

    why: str
    """ "Redis at host:port is out of memory (…); raise its maxmemory"."""
    since_s: float
    """time.monotonic()."""
    spares_reads: bool
    """Only writes wait."""

    @property
    def for_s(self) -> float:
        return time.monotonic() - self.since_s


def _refusal(err: Exception) -> StrettoError | None:
    """The error that a script's reply "WORD message" stands for."""
    word, _, message = str(err).partition(" ")
    cls = {
        "FENCED": FencedError,
        "REFUSED": RefusedError,
        "CHANGED": ChangedError,
        "LOST": StoreLostError,
        "DEPOSED": DeposedError,
        "INVALID": InvalidArgumentError,
    }.get(word)
    return cls(message) if cls else None


def _reason(err: Exception) -> str:
    return str(err) or type(err).__name__


class Store:
    """A client of one Redis-compatible server."""

    def __init__(self, client: redis.asyncio.Redis, where: str, timeout_s: float, outage_s: float) -> None:
        self._client, self._where, self._timeout_s, self._outage_s = client, where, timeout_s, outage_s
        self._room = asyncio.Semaphore(CONNECTIONS_MAX)
        """redis-py calls it an outage when all connections are busy; here the command waits for one."""
        self.outage: Outage | None = None
        """None while commands are answered."""

    @classmethod
    async def open(cls, url: str, *, timeout_s: float = 5.0, outage_s: float = 120.0, strict: bool = False) -> Store:
        """Connect and check. Raises RefusedError on a wrong password or, when `strict`, without append-only persistence."""
        try:
            client = redis.asyncio.Redis.from_url(
                url,
                retry=Retry(NoBackoff(), 0),
                socket_timeout=None,  # `_repeat` times the whole command instead: redis-py's own would make a task of every send
                socket_connect_timeout=timeout_s,
                decode_responses=False,
                max_connections=CONNECTIONS_MAX,
            )
        except ValueError as err:
            raise InvalidArgumentError(f"redis.url: {err}") from None
        kwargs = client.connection_pool.connection_kwargs
        store = cls(client, f"{kwargs.get('host', 'localhost')}:{kwargs.get('port', 6379)}", timeout_s, outage_s)
        try:
            await store._repeat(lambda: client.ping(), "PING")
            await store._check_persistence(strict)
        except BaseException:
            await client.aclose()
            raise
        return store

    async def _check_persistence(self, strict: bool) -> None:
        try:
            info = await self._repeat(lambda: self._client.info("persistence"), "INFO")
        except StrettoError as err:
            message = f"whether Redis at {self._where} has append-only persistence cannot be told: {err.message}"
        else:
            if info.get("aof_enabled"):
                return
            message = (
                f"Redis at {self._where} runs without append-only persistence: if it stops, the run is lost; start it with --appendonly yes"
            )
        if strict:
            raise RefusedError(f'{message} (run.durability = "strict" demands it)')
        log.warning("store_not_persistent", extra={"fields": {"where": self._where, "note": message}})

    async def close(self) -> None:
        await self._client.aclose()

    # -------------------------------------------------------------------------------------------------- commands

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[str | int | bytes], *, writes: bool = True) -> Any:
        """The script's answer. Raises what the script says, UnavailableError after outage_s."""

        async def once() -> Any:
            try:
                return await self._client.execute_command("EVALSHA", script.sha, len(keys), *keys, *args)
            except NoScriptError:  # a restarted server has forgotten it; EVAL teaches it again
                return await self._client.execute_command("EVAL", script.text, len(keys), *keys, *args)

        return await self._repeat(once, script.name, writes=writes)

    async def read(self, *commands: Sequence[str | int | bytes]) -> list[Any]:
        """The answers of read-only commands, taken at one moment."""

        async def once() -> list[Any]:
            if len(commands) == 1:
                return [await self._client.execute_command(*commands[0])]
            async with self._client.pipeline(transaction=True) as pipe:
                for command in commands:
                    pipe.execute_command(*command)
                return await pipe.execute()

        return await self._repeat(once, "read") if commands else []

    # -------------------------------------------------------------------------------------------------- outages

    async def _repeat(self, once: Callable[[], Awaitable[T]], what: str, *, writes: bool = False) -> T:
        delay_s, began_s = BACKOFF_FIRST_S, time.monotonic()
        while True:
            try:
                async with self._room, asyncio.timeout(self._timeout_s):  # redis-py closes a connection whose command is cancelled
                    answer = await once()
            except (RedisError, OSError) as err:
                if (failure := self._failure(err, what)) is not None:
                    raise failure from None
                outage = self._note_outage(err)
                if time.monotonic() - began_s > self._outage_s:
                    raise UnavailableError(f"gave up {what} after {self._outage_s:g} s: {outage.why}") from err
            else:
                self._note_answer(writes)
                return answer
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(delay_s * 2, BACKOFF_MAX_S)

    def _failure(self, err: Exception, what: str) -> StrettoError | None:
        """What to raise; None when the server is away and the command is to be repeated."""
        if isinstance(err, AuthenticationError | AuthorizationError | NoPermissionError):
            return RefusedError(f"Redis at {self._where} refuses the user or password in redis.url: {err}")
        if isinstance(err, (*_AWAY, OutOfMemoryError)) or str(err).startswith(_AWAY_WORDS):
            return None
        return _refusal(err) or StrettoError(f"Redis at {self._where}: {what}: {err}")

    def _note_outage(self, err: Exception) -> Outage:
        why, spares_reads = self._why(err)
        before, since_s = self.outage, self.outage.since_s if self.outage else time.monotonic()
        self.outage = Outage(why, since_s, spares_reads)
        if before is None or before.why != why:
            log.warning("store_away", extra={"fields": {"where": self._where, "why": why}})
        return self.outage

    def _why(self, err: Exception) -> tuple[str, bool]:
        """What to say of an outage, and whether reads go on."""
        where, reason = f"Redis at {self._where}", _reason(err)
        if isinstance(err, OutOfMemoryError):
            return f"{where} is out of memory; raise its maxmemory", True
        if reason.startswith("MISCONF"):
            return f"{where} cannot write its append-only file; see to its disk ({reason})", True
        if isinstance(err, BusyLoadingError):
            return f"{where} is loading its data", False
        return f"{where} does not answer ({reason})", False

    def _note_answer(self, wrote: bool) -> None:
        if self.outage is not None and (wrote or not self.outage.spares_reads):
            log.warning("store_back", extra={"fields": {"where": self._where, "away_s": round(self.outage.for_s, 2)}})
            self.outage = None


def forget_run(url: str, run_name: str) -> int:
    """`--fresh` on a server that is not ours: removes the keys of that run, and no others. Returns how many."""
    count = 0
    with redis.Redis.from_url(url) as client:  # pyright: ignore[reportUnknownMemberType]
        for key in client.scan_iter(match=f"stretto:{{{run_name}}}:*", count=1000):
            count += int(client.unlink(key))  # pyright: ignore[reportArgumentType]
    return count
