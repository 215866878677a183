"""Redis in every kind of trouble, on a server of its own: the run waits, says for what, goes on by itself and loses nothing."""

from __future__ import annotations

import asyncio
import os
import resource
import shlex
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from stretto import embedded
from stretto.errors import RefusedError, UnavailableError
from stretto.store import Script, Store
from stretto.v1 import scheduler_pb2 as spb
from tests.scheduler_world import Replica, Trainer, World, recipe_of, ring, running
from tests.waits import eventually

STEPS = 12
"""Trained while the trouble lasts: some seconds of transitions of every kind."""


class Server:
    """A server that is treated badly."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shell = folder / "server.sh"  # a write over the limit of `break_disk` is an error for it, not its end
        shell.write_text(f'#!/bin/sh\ntrap "" XFSZ\nexec {shlex.quote(embedded.binary(os.environ.get("STRETTO_REDIS_SERVER")))} "$@"\n')
        shell.chmod(0o755)
        self._program = str(shell)
        self.running = embedded.start(folder / "data", program=self._program)
        self.url = self.running.url
        self._set_up()

    def _set_up(self) -> None:
        self.client = redis.Redis.from_url(self.url)
        self.client.config_set("appendfsync", "always")  # else a killed server may lose what it acknowledged while it synced

    def kill(self) -> None:
        os.kill(self.running.pid, signal.SIGKILL)

    def start_again(self) -> None:
        self.running.stop()
        self.running = embedded.start(self.folder / "data", self.running.port, self.running.password, program=self._program)
        self._set_up()

    def fill(self) -> None:
        """No byte more."""
        self.client.config_set("maxmemory", 1)

    def empty(self) -> None:
        self.client.config_set("maxmemory", 0)

    def break_disk(self) -> None:
        """Its append-only file cannot grow."""
        self.client.config_set("appendfsync", "everysec")  # as it is by default; with "always" a server ends by itself here
        resource.prlimit(self.running.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))

    def mend_disk(self) -> None:
        resource.prlimit(self.running.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.running.stop()


async def train(trainer: Trainer, replica: Replica, steps: range) -> None:
    """These steps, with everything that a run does; a checkpoint after every third."""
    for step in steps:
        await replica.hold(trainer.epoch, step - 1)
        if (await replica.poll(12)).leases:
            await replica.finish()
        groups, reason = await trainer.sample(step, wait_s=5)
        assert groups, reason
        await trainer.commit(step)
        if step % 3 == 0:
            await trainer.save(step)


async def proof(world: World, step: int) -> None:
    """Nothing was lost or doubled, nothing counted wrong (I1 to I3), and the run is where it should be."""
    verdict = await world.verify()
    assert (verdict.committed_step, verdict.ordinals_trained) == (step, 4 * step)
    assert (verdict.duplicates, verdict.gaps, verdict.ordinals_evicted) == (0, 0, 0)


async def test_a_server_that_is_killed_in_the_middle_of_transitions_and_again_loses_and_doubles_nothing(server: Server) -> None:
    async with ring(server.url, recipe_of()) as (world, trainer, replica):
        work = asyncio.create_task(train(trainer, replica, range(1, STEPS + 1)))
        for kill in range(1, 5):
            await world.until(lambda status, at=2 * kill: status.committed_step >= at)
            server.kill()
            await asyncio.to_thread(server.start_again)
        await work
        await proof(world, STEPS)


async def test_a_stall_is_waited_for_and_named(server: Server) -> None:
    async with running(server.url, recipe_of(), store_timeout_s=0.3) as world:
        trainer, replica = Trainer(world), Replica(world)
        await trainer.open()
        work = asyncio.create_task(train(trainer, replica, range(1, STEPS + 1)))
        os.kill(server.running.pid, signal.SIGSTOP)
        try:
            await eventually(lambda: world.store.outage is not None)
            (reason, *_) = await world.controller.explain()
            assert reason.startswith(f"Redis at {server.running.address} does not answer (TimeoutError); waited for")
            assert not work.done()
        finally:
            os.kill(server.running.pid, signal.SIGCONT)
        await work
        await proof(world, STEPS)
        assert world.store.outage is None


@pytest.mark.parametrize(
    ("begins", "ends", "says"),
    [
        (Server.fill, Server.empty, "is out of memory; raise its maxmemory; waited for"),
        (Server.break_disk, Server.mend_disk, "cannot write its append-only file; see to its disk (MISCONF"),
    ],
)
async def test_a_server_that_refuses_writes_is_waited_for_and_named_and_the_run_goes_on_by_itself(
    server: Server, caplog: pytest.LogCaptureFixture, begins: Callable[[Server], None], ends: Callable[[Server], None], says: str
) -> None:
    async with ring(server.url, recipe_of()) as (world, trainer, replica):
        await train(trainer, replica, range(1, 3))
        begins(server)
        work = asyncio.create_task(train(trainer, replica, range(3, STEPS + 1)))
        await eventually(lambda: world.store.outage is not None)
        for _ in range(3):  # reads succeed, and must not look like the end of the trouble
            await world.store.read(("GET", "x"))
        (reason, *_) = await world.controller.explain()
        assert f"Redis at {server.running.address} {says}" in reason
        assert (await world.status()).committed_step >= 2
        assert not work.done()
        assert caplog.messages.count("store_away") == 1
        ends(server)
        await work
        await proof(world, STEPS)
        assert caplog.messages.count("store_back") == 1


async def test_a_server_that_stays_full_ends_the_scheduler_by_name_after_the_outage(server: Server) -> None:
    async with running(server.url, recipe_of(), store_outage_s=0.5) as world:
        server.fill()
        with pytest.raises(UnavailableError, match=r"after 0\.5 s: Redis at .* is out of memory; raise its maxmemory"):
            await world.call("Pause", spb.PauseRequest())
        with pytest.raises(UnavailableError, match="out of memory"):
            await asyncio.wait_for(world.work, 10)
        server.empty()


async def test_scripts_that_the_server_forgets_in_the_middle_are_taught_again(server: Server) -> None:
    async with ring(server.url, recipe_of()) as (world, trainer, replica):
        work = asyncio.create_task(train(trainer, replica, range(1, STEPS + 1)))
        num_flushes = 0
        while not work.done():
            await asyncio.to_thread(server.client.script_flush)
            num_flushes += 1
        await work
        assert num_flushes > STEPS
        await proof(world, STEPS)


async def test_a_script_that_crosses_the_memory_limit_is_done_wholly_and_the_next_one_not_at_all(server: Server) -> None:
    """The server checks before the first write of a script only: none can fail half-way."""
    store = await Store.open(server.url, outage_s=0.0)
    many = Script.of("many", "for i = 1, 2000 do redis.call('HSET', KEYS[1], i, ARGV[1]) end return redis.call('HLEN', KEYS[1])")
    server.client.config_set("maxmemory", server.client.info("memory")["used_memory"] + 100_000)
    assert await store.run(many, ["a"], [b"x" * 1000]) == 2000
    with pytest.raises(UnavailableError, match="out of memory"):
        await store.run(many, ["b"], [b"x"])
    assert server.client.exists("b") == 0
    server.empty()
    await store.close()


async def refused_to_open(url: str, *, strict: bool) -> str:
    try:
        store = await Store.open(url, outage_s=5, strict=strict)
    except RefusedError as err:
        return err.message
    await store.close()
    return ""


async def test_without_an_append_only_file_a_run_is_warned_and_a_strict_one_refused(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    assert await refused_to_open(server.url, strict=True) == ""
    server.client.config_set("appendonly", "no")
    assert await refused_to_open(server.url, strict=False) == ""
    assert "store_not_persistent" in caplog.messages
    message = await refused_to_open(server.url, strict=True)
    assert "runs without append-only persistence" in message
    assert 'run.durability = "strict" demands it' in message


async def test_where_persistence_cannot_be_told_a_strict_run_is_refused(server: Server) -> None:
    server.client.execute_command("ACL", "SETUSER", "default", "-info")
    assert await refused_to_open(server.url, strict=False) == ""
    assert "cannot be told" in await refused_to_open(server.url, strict=True)
