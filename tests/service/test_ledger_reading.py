"""`stretto ledger`: a live run, a run that is not running, a checkpoint alone; what each proof names when it is broken."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.scheduler import lines
from stretto import embedded, runs
from stretto.client import AsyncClient
from stretto.errors import NotFoundError
from tests.scheduler_world import Replica, Trainer, recipe_of, ring

KEY = "stretto:{world}:"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[embedded.EmbeddedServer]:
    started = embedded.start(tmp_path / "redis")
    yield started
    started.stop()


async def a_run(trainer: Trainer, replica: Replica) -> bytes:
    """Two trained steps, the first saved: 8 trained, 2 finished, the others open. Answers the snapshot of step 2."""
    await replica.poll()
    await replica.finish(*(f"d{n}" for n in range(10)))
    await trainer.step(1)
    await trainer.save(1, "step-1-abc")
    await trainer.step(2)
    return await trainer.snapshot(2)


@pytest.fixture
async def folder(tmp_path: Path, server: embedded.EmbeddedServer) -> Path:
    """Of a run that was stopped; its checkpoint of step 2 holds a snapshot."""
    async with ring(server.url, recipe_of()) as (world, trainer, replica):
        snapshot = await a_run(trainer, replica)
        await world.until_full()
    (tmp_path / "checkpoints/step-2").mkdir(parents=True)
    (tmp_path / "checkpoints/step-2/ledger.bin").write_bytes(snapshot)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[run]\nname = "world"\n[model]\npath = "m"\n[data]\ntrain = "t"\n[scheduler]\nbatch_groups = 4\nmax_lag = 2\n')
    runs.write(tmp_path, runs.RunFile("world", 1, time.time(), str(recipe), {"scheduler": "127.0.0.1:1"}))
    return tmp_path


def ledger(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "stretto", "ledger", *args], capture_output=True, text=True, check=False, timeout=60)


async def test_a_live_run_tells_where_every_prompt_stands(server: embedded.EmbeddedServer) -> None:
    async with ring(server.url, recipe_of()) as (world, trainer, replica), AsyncClient(world.server.address) as client:
        await a_run(trainer, replica)
        await world.until_full()
        groups = [group async for group in client.ledger()]
        assert [g.uid for g in groups] == [f"d{n}" for n in range(len(groups))]
        assert [g.state for g in groups[:12]] == ["trained"] * 8 + ["finished"] * 2 + ["running"] * 2
        assert (groups[0].step, groups[0].version_begin, groups[0].attempts) == (1, 0, None)  # it has left the store
        assert (groups[7].step, groups[7].version_begin, groups[7].attempts) == (2, 0, 1)
        assert [g.uid async for g in client.ledger(open_only=True)] == [g.uid for g in groups[8:]]
        (one,) = [g async for g in client.ledger("d9")]
        assert [(a.index, a.finish_reason, a.num_tokens, a.spans) for a in one.answers] == [(n, "stop", 3, ((0, 3),)) for n in (0, 1)]
        assert [g.uid async for g in client.ledger("10")] == ["d10"]
        with pytest.raises(NotFoundError, match="d99 never entered"):
            _ = [g async for g in client.ledger("d99")]


async def test_a_run_that_is_not_running_is_proven_from_its_store_without_becoming_its_scheduler(
    folder: Path, server: embedded.EmbeddedServer
) -> None:
    before = await raw(server, lambda r: r.get("stretto:{world}:epoch:scheduler"))
    server.stop()
    done = ledger("verify", "--run", str(folder), "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["ordinals_trained"], report["ordinals_open"], report["duplicates"], report["gaps"]) == (8, 12, 0, 0)
    assert report["checked"] == [f"I{n}" for n in range(1, 9)]
    assert (report["lag_trained_max"], report["max_lag"]) == (1, 2)
    again = embedded.start(folder / "redis")
    try:
        assert await raw(again, lambda r: r.get("stretto:{world}:epoch:scheduler")) == before
    finally:
        again.stop()
    assert "duplicates" in ledger("verify", "--run", str(folder)).stdout
    lines = [json.loads(line) for line in ledger("export", "--run", str(folder)).stdout.splitlines()]
    assert [line["ordinal"] for line in lines] == list(range(20))
    assert set(lines[0]) == {"uid", "ordinal", "state", "step", "version_begin", "attempts", "reason"}
    assert "d9" in ledger("show", "--run", str(folder)).stdout
    assert "v0x3" in ledger("show", "d9", "--run", str(folder)).stdout
    assert not runs.is_live(folder)


async def test_a_checkpoint_is_proven_from_its_snapshot_alone(folder: Path, server: embedded.EmbeddedServer) -> None:
    done = ledger("verify", "--run", str(folder), "--checkpoint", "step-2", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["ordinals_trained"], report["committed_step"], report["checkpoint_step"]) == (8, 2, 2)
    assert {"I2", "I6"}.isdisjoint(report["checked"])  # counters and epochs are the store's
    assert "v0x3" in ledger("show", "d9", "--run", str(folder), "--checkpoint", "step-2").stdout
    missing = ledger("verify", "--run", str(folder), "--checkpoint", "step-9")
    assert (missing.returncode, "checkpoints with a ledger: step-2" in missing.stderr) == (2, True)


async def raw(server: embedded.EmbeddedServer, do: Callable[[Any], Awaitable[Any]]) -> Any:
    """Something done to the store behind the ledger's back."""
    import redis.asyncio

    async with redis.asyncio.Redis.from_url(server.url) as client:
        return await do(client)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda r: r.hset(KEY + "evicted", "d9", "stale"), "I1: d9 is in 2 places"),
        (lambda r: r.hincrby(KEY + "occupancy", "pending", 3), "I2: counter pending"),
        (lambda r: r.hdel(KEY + "groups", "d9"), "I3: ordinal 9 entered and is nowhere"),
        (lambda r: r.hdel(KEY + "committed", "d7"), "I5: step 2 is after checkpoint 1, but 1 of its groups are gone: d7"),
        (lambda r: r.set(KEY + "epoch:trainer", 7), "I6: the run was opened by trainer epoch 1, but 7 is the newest given out"),
        (lambda r: r.hset(KEY + "traj:d9", "0", b"\xff\xff\xff"), "I7: d9: answer 0 does not parse (3 bytes)"),
        (lambda r: r.hset(KEY + "prompts", "d9", b"\x0a\x02d8"), "I7: d9: its payload is the prompt of 'd8'"),
        (
            lambda r: r.hset(KEY + "steps", "2", '[{"u":"d4","b":-5}]'),
            "I8: step 2 trained d4, begun by v-5: lag 6 is more than",
        ),
    ],
)
async def test_what_was_broken_in_the_store_is_named(
    server: embedded.EmbeddedServer, harm: Callable[[Any], Awaitable[Any]], says: str
) -> None:
    async with ring(server.url, recipe_of()) as (world, trainer, replica):
        await a_run(trainer, replica)
        await world.until_full()
        await world.controller.ledger.reread()
        await raw(server, harm)
        report = lines.report(await world.controller.ledger.snapshot(with_payloads=True), max_lag=2)
    assert [text for text in report.violations if says in text]
    assert not report.ok


async def test_a_broken_store_is_exit_code_one_and_more_than_the_window_is_only_said(folder: Path, server: embedded.EmbeddedServer) -> None:
    await raw(server, lambda r: r.hset(KEY + "meta", "window", 10))
    server.stop()
    done = ledger("verify", "--run", str(folder))
    assert done.returncode == 0, done.stdout
    assert "I4: 12/10 prompts are open: more was restored, or the window was shrunk" in done.stdout
    again = embedded.start(folder / "redis")
    await raw(again, lambda r: r.hdel(KEY + "groups", "d9"))
    again.stop()
    done = ledger("verify", "--run", str(folder))
    assert done.returncode == 1, done.stdout
    assert "VIOLATED  I3: ordinal 9 entered and is nowhere" in done.stdout


def test_where_nothing_can_be_read_it_says_so_with_exit_code_two(tmp_path: Path) -> None:
    nothing = ledger("verify", "--run", str(tmp_path))
    assert (nothing.returncode, "nothing was run in that folder" in nothing.stderr) == (2, True)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[model]\npath = "m"\n[data]\ntrain = "t"\n')
    runs.write(tmp_path, runs.RunFile("world", 1, time.time(), str(recipe), {"scheduler": "127.0.0.1:1"}))
    no_store = ledger("verify", "--run", str(tmp_path))
    assert (no_store.returncode, "there is no store in it" in no_store.stderr) == (2, True)
    deaf = ledger("verify", "--address", "127.0.0.1:1")
    assert (deaf.returncode, "127.0.0.1:1 cannot be reached" in deaf.stderr) == (2, True)


async def test_the_inspection_of_another_runs_store_names_the_run_it_does_not_find(folder: Path, server: embedded.EmbeddedServer) -> None:
    (folder / "recipe.toml").write_text((folder / "recipe.toml").read_text().replace('"world"', '"other"'))
    server.stop()
    done = ledger("verify", "--run", str(folder))
    assert (done.returncode, "the store knows no run 'other'" in done.stderr) == (2, True)
