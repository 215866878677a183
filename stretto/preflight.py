"""Everything about a recipe that needs this machine to be checked, before anything starts.

Each check yields Problems: key, value, rule, what to do. All are found in one go; a warning does not stop a run.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from stretto import embedded, endpoints, runs
from stretto.errors import NotFoundError, RecipeError
from stretto.recipe import Recipe

ROWS_LOOKED_AT = 20
"""Of each data file; the scheduler reads all of them."""
REWARD_S = 60.0
"""For importing the reward function's module."""
RESOLVE = """
import sys
from stretto import errors, rewards
try:
    rewards.resolve(sys.argv[1])
except errors.RecipeError as err:
    sys.exit(str(err))
"""
PACKAGES = {
    "scheduler": ("redis", "transformers", "pyarrow", "grpc_health", "prometheus_client"),
    "rollout": ("torch", "transformers", "safetensors", "xxhash"),
    "trainer": ("torch", "transformers", "safetensors", "tensorboard"),
    "weightsync": ("numpy", "xxhash"),
}
"""What each service imports, by import name."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
WEIGHT_FILES = ("*.safetensors", "*.bin")
COPIES_TRAINER, COPIES_REPLICA, COPIES_RELAY = 5, 2, 3
"""Of the weights, roughly: master, gradient, two moments, work; model and load; slots. In float32 for the trainer."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that will not work, or may not."""

    key: str
    """ "data.train"."""
    value: str
    rule: str
    """What must hold."""
    advice: str
    """What to do."""
    is_warning: bool = False

    def __str__(self) -> str:
        value = f" = {self.value}" if self.value else ""
        return f"{self.key}{value}: {self.rule}; {self.advice}"


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine has."""

    cores: int
    memory_bytes: int
    """Free now."""
    devices: Mapping[str, int]
    """Accelerators by type: {"cuda": 1}."""

    @classmethod
    def here(cls) -> Machine:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        nodes = {"cuda": "nvidia", "npu": "davinci"}
        devices = {kind: sum(p.name.removeprefix(node).isdigit() for p in Path("/dev").glob(f"{node}*")) for kind, node in nodes.items()}
        return cls(cores, _available_bytes(), devices)


def _available_bytes() -> int:
    """0 where it cannot be told."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def check(recipe: Recipe, machine: Machine, redis_program: str | None = None, *, runs_here: bool = True) -> list[Problem]:
    """All problems of a local run of `recipe`; errors first. `redis_program`: $STRETTO_REDIS_SERVER.

    `runs_here`: False where the recipe may be meant for another machine: a package that is missing on this one is only a warning.
    """
    checks: list[Callable[[Recipe], Iterator[Problem]]] = [
        lambda _: packages(is_warning=not runs_here),
        folder,
        model,
        data,
        reward,
        ports,
        lambda r: cores(r, machine),
        lambda r: devices(r, machine),
        sampling,
        lambda r: memory(r, machine),
        lambda r: redis(r, redis_program),
    ]
    found = [problem for one in checks for problem in one(recipe)]
    return sorted(found, key=lambda p: p.is_warning)


def packages(*, is_warning: bool = False) -> Iterator[Problem]:
    missing = {service: [p for p in names if not is_installed(p)] for service, names in PACKAGES.items()}
    for service, names in missing.items():
        if names:
            rule = f"its packages {', '.join(names)} are not installed"
            yield Problem(f"services.{service}", "", rule, "pip install 'stretto[all]'", is_warning)


def is_installed(package: str) -> bool:
    """Whether `package` can be found; it is not imported. A finder that forbids it counts as absent."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def folder(recipe: Recipe) -> Iterator[Problem]:
    path = recipe.run.folder
    if (pid := runs.holder(path)) is not None:
        yield Problem("run.folder", str(path), f"process {pid} runs in it", "stop that run or choose another folder")
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not existing.is_dir():
        yield Problem("run.folder", str(path), f"{existing} is a file, not a folder", "choose another folder")
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield Problem("run.folder", str(path), f"{existing} is not writable", "choose another folder or change its permissions")


def model(recipe: Recipe) -> Iterator[Problem]:
    path = recipe.model.path
    if path is None:
        return
    name = str(path)
    if not path.is_dir():
        yield Problem("model.path", name, "there is no such folder", _beside(path, "give a Hugging Face model folder"))
        return
    try:
        yield from _positions(recipe, json.loads((path / "config.json").read_text()))
    except OSError:
        yield Problem("model.path", name, "it has no readable config.json", "give a Hugging Face model folder (save_pretrained)")
    except ValueError as err:
        yield Problem("model.path", name, f"its config.json is not JSON: {err}", "download or save the model again")
    if not any((path / file).exists() for file in TOKENIZER_FILES):
        yield Problem("model.path", name, "it has no tokenizer files", "save the tokenizer there too (tokenizer.save_pretrained)")
    if not any(f for pattern in WEIGHT_FILES for f in path.glob(pattern)):
        yield Problem("model.path", name, "it has no weights (*.safetensors)", "download or save the model again")


def _positions(recipe: Recipe, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Where prompt and answer need more positions than the model has, every attempt fails."""
    given: Any = config.get("text_config")
    most: Any = (cast(Mapping[str, Any], given) if isinstance(given, Mapping) else config).get("max_position_embeddings")
    prompt, answer = recipe.data.max_prompt_tokens, recipe.sampling.max_new_tokens
    if not isinstance(most, int) or prompt + answer <= most:
        return
    rule = f"max_prompt_tokens {prompt} + max_new_tokens {answer} = {prompt + answer} positions; {recipe.model.path} has {most}"
    if answer >= most:
        yield Problem("sampling.max_new_tokens", str(answer), f"{rule}, so no prompt fits", f"use at most {most - 1}")
    else:
        advice = f"set it to {most - answer}: longer prompts fail at every attempt instead of being skipped"
        yield Problem("data.max_prompt_tokens", str(prompt), rule, advice, is_warning=True)


def data(recipe: Recipe) -> Iterator[Problem]:
    for key, path in (("data.train", recipe.data.train), ("data.validation", recipe.data.validation)):
        if path is not None:
            yield from _data_file(recipe, key, path)
    if recipe.validation_path is None:
        advice = "set data.validation to a held-out file to know whether the policy really gets better"
        yield Problem("data.validation", "", "there is no validation", advice, is_warning=True)


def _data_file(recipe: Recipe, key: str, path: Path) -> Iterator[Problem]:
    if not path.is_file():
        yield Problem(key, str(path), "there is no such file", _beside(path, "give a JSONL or Parquet file"))
        return
    try:
        rows = first_rows(path)
    except (OSError, ValueError) as err:
        yield Problem(key, str(path), f"cannot be read: {err}", "give a JSONL (one object a line) or Parquet file")
        return
    if not rows:
        yield Problem(key, str(path), "has no rows", "give a file with prompts")
        return
    for setting in ("prompt_column", "answer_column"):
        column = str(getattr(recipe.data, setting))
        bad = next((i for i, row in enumerate(rows) if not has_column(row, column)), None)
        if bad is not None:
            has = ", ".join(sorted(rows[bad]))
            yield Problem(f"data.{setting}", repr(column), f"row {bad + 1} of {path} has no such column", f"it has: {has}")


def first_rows(path: Path) -> list[dict[str, Any]]:
    """The first rows of a JSONL or Parquet file. Raises OSError or ValueError (pyarrow's errors are ValueErrors) naming the line."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq  # pyright: ignore[reportMissingTypeStubs]

        batch: Any = next(iter(cast(Any, pq).ParquetFile(path).iter_batches(ROWS_LOOKED_AT)), None)
        return [] if batch is None else batch.to_pylist()
    rows: list[dict[str, Any]] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if len(rows) == ROWS_LOOKED_AT:
                break
            if not line.strip():
                continue
            try:
                row: Any = json.loads(line)
            except ValueError as err:
                raise ValueError(f"line {number}: {err}") from None
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is not an object")
            rows.append(cast(dict[str, Any], row))
    return rows


def has_column(row: Mapping[str, Any], dotted: str) -> bool:
    """Whether the column, or the place in its objects that a dotted name reaches, is there and not null."""
    if row.get(dotted) is not None:
        return True
    value: Any = row
    for part in dotted.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = cast(Mapping[str, Any], value)[part]
    return value is not None


def reward(recipe: Recipe) -> Iterator[Problem]:
    """In a process of its own: importing it runs a user's module."""
    name = recipe.reward.function
    try:
        done = subprocess.run([sys.executable, "-c", RESOLVE, name], capture_output=True, text=True, timeout=REWARD_S, check=False)
    except subprocess.TimeoutExpired:
        yield Problem(
            "reward.function", name, f"importing it takes more than {REWARD_S:g} s", "move slow work out of the module's top level"
        )
        return
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1].removeprefix(f"reward.function = {name!r}").strip(" :;,")
        rule, meant, near = said.partition("; did you mean ")
        advice = f"did you mean {near}" if meant else "it must be importable from the working directory"
        yield Problem("reward.function", name, rule, advice)


def ports(recipe: Recipe) -> Iterator[Problem]:
    """Ports that the recipe itself names; others are chosen free."""
    for section in ("scheduler", "weightsync", "trainer", "rollout"):
        settings = getattr(recipe, section)
        for key in sorted({"listen", "metrics_listen"} & settings.model_fields_set):
            name, listen = f"{section}.{key}", getattr(settings, key)
            try:
                host, port = endpoints.split(listen, name)
            except ValueError as err:
                yield Problem(name, repr(listen), str(err).rpartition(": ")[2], "such as '127.0.0.1:0'")
                continue
            count = recipe.rollout.replicas if section == "rollout" else 1
            for taken in (p for p in range(port, port + count) if port and not endpoints.is_free(host, p)):
                yield Problem(name, repr(listen), f"port {taken} cannot be listened on", "stop who uses it, or use port 0 for any free one")


def cores(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    replicas, t, r = recipe.rollout.replicas, recipe.trainer.threads, recipe.rollout.threads
    wanted = t + replicas * r
    if wanted > machine.cores:
        sums = f"trainer.threads {t} + rollout.replicas {replicas} x rollout.threads {r} = {wanted} busy threads"
        yield Problem(
            "rollout.replicas",
            str(replicas),
            f"{sums} on {machine.cores} core{'s' if machine.cores > 1 else ''} get in each other's way",
            "lower replicas or threads, or use more cores",
            is_warning=True,
        )


def devices(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    for section in ("trainer", "rollout"):
        device = str(getattr(recipe, section).device)
        kind, _, index = device.partition(":")
        if kind in ("auto", "cpu"):
            continue
        if kind not in machine.devices:
            yield Problem(f"{section}.device", repr(device), "is not auto, cpu, cuda or npu", "use one of them")
        elif int(index or 0) >= machine.devices[kind]:
            have = machine.devices[kind]
            yield Problem(f"{section}.device", repr(device), f"this machine has {have} {kind} devices", "use another device, or auto")
        elif section == "rollout" and recipe.rollout.replicas > machine.devices[kind]:
            sums = f"rollout.replicas {recipe.rollout.replicas} share {machine.devices[kind]} {kind} devices"
            advice = "lower replicas, or give each machine's replicas their own devices"
            yield Problem(f"{section}.device", repr(device), sums, advice, is_warning=True)


def sampling(recipe: Recipe) -> Iterator[Problem]:
    """The loss takes the log-probs for those of the whole distribution."""
    for key, value, off in (("top_p", recipe.sampling.top_p, 1.0), ("top_k", recipe.sampling.top_k, 0)):
        if value != off:
            rule = "training on a cut distribution biases the policy gradient: what was cut off is never unlearned"
            yield Problem(f"sampling.{key}", f"{value:g}", rule, f"use {off:g} (validation has its own)", is_warning=True)


def memory(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """Rough: weights times copies, on a machine without accelerators."""
    if recipe.model.path is None or not machine.memory_bytes or any(machine.devices.values()):
        return
    stored = sum(f.stat().st_size for f in recipe.model.path.glob("*.safetensors"))
    per_value = 2 if _is_half(recipe.model.path) else 4
    values = stored // per_value
    rollout_bytes = values * (4 if recipe.model.dtype == "float32" else 2)
    need = values * 4 * COPIES_TRAINER + rollout_bytes * (COPIES_REPLICA * recipe.rollout.replicas + COPIES_RELAY)
    if need > machine.memory_bytes:
        yield Problem(
            "model.path",
            str(recipe.model.path),
            f"{values / 1e6:,.0f} M parameters need about {need / 1e9:.1f} GB for trainer, {recipe.rollout.replicas} replicas and relay; "
            f"{machine.memory_bytes / 1e9:.1f} GB are free",
            "use a smaller model, fewer replicas, model.dtype = 'bfloat16', or a larger machine",
            is_warning=True,
        )


def _is_half(path: Path) -> bool:
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return str(config.get("dtype", config.get("torch_dtype"))) in ("bfloat16", "float16")


def redis(recipe: Recipe, program: str | None) -> Iterator[Problem]:
    if not recipe.redis.url:
        try:
            embedded.binary(program)
        except NotFoundError as err:
            yield Problem("redis.url", "''", err.message, "see above")
        return
    if not is_installed("redis"):
        return  # `packages` says so
    import redis as client

    shown = recipe.redis.url.rpartition("@")[2]  # never the password
    try:
        with client.Redis.from_url(recipe.redis.url, socket_connect_timeout=3, socket_timeout=3) as connection:  # pyright: ignore[reportUnknownMemberType]
            info: Any = connection.info("persistence")
    except (client.RedisError, ValueError) as err:
        yield Problem("redis.url", shown, f"cannot be used: {err}", "start that server, or leave redis.url empty for an embedded one")
        return
    if not info.get("aof_enabled"):
        is_strict = recipe.run.durability == "strict"
        advice = "set appendonly yes in its configuration; else a crash of that server loses the run's ledger"
        yield Problem("redis.url", shown, "its append-only file is off", advice, is_warning=not is_strict)


def _beside(path: Path, advice: str) -> str:
    """`advice`, or the name of something similar in the same folder."""
    try:
        names = [p.name for p in path.parent.iterdir()]
    except OSError:
        return advice
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean {path.parent / near[0]}?" if near else advice


def refuse(problems: list[Problem]) -> None:
    """Raises RecipeError with every problem that is not a warning, one a line."""
    errors = [str(p) for p in problems if not p.is_warning]
    if errors:
        raise RecipeError("\n".join(errors))
