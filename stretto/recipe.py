"""The recipe: one TOML file describes a run for all four services.

All sections live here, not beside the services, because an image holds one service's code and must still be able to
check the whole recipe before it starts.

    load(path, overrides, environ)   TOML  <  STRETTO_<SECTION>__<KEY>  <  section.key=value
    Recipe                           frozen; rules across sections in Recipe._across
    RecipeError                      key, value, rule, nearest valid key

What needs the disk or the network (does the file exist, is the port free, can the reward be imported) is checked by
`stretto/preflight.py`; here everything is decided from the values alone.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from stretto.errors import RecipeError

ENV_PREFIX = "STRETTO_"
TASKS = ("word-problems",)
"""Tasks that `make = …` can generate, with their data and their warm-started model."""

Made = Annotated[str | None, BeforeValidator(lambda given: given or None)]
"""Name of a task. "" is none: so an override can take back what a recipe asks for."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Run(_Section):
    """Who this run is and where it keeps its files."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    """Name of the run; the prefix of its keys in Redis."""
    folder: Path = Path("runs/run")
    """Checkpoints, logs, metrics, generated data and the embedded server's files."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seeds shuffling, sampling and initialisation."""
    durability: Literal["normal", "strict"] = "normal"
    """strict: refuse to start on a Redis without append-only persistence."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least level that is logged."""


class Model(_Section):
    """The policy."""

    path: Path | None = None
    """Folder of a Hugging Face causal LM with tokenizer; default <run.folder>/model when `make` is set."""
    make: Made = None
    """Task whose tiny warm-started model is made on the spot (cached in the run folder)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of rollout weights; the trainer keeps float32 masters."""


class Data(_Section):
    """The prompts."""

    train: Path | None = None
    """JSONL or Parquet file; default <run.folder>/data/train.jsonl when `make` is set."""
    validation: Path | None = None
    """Held-out file; without one there is no validation."""
    make: Made = None
    """Task whose data is generated on the spot."""
    prompt_column: str = "prompt"
    """Text, or a list of {"role", "content"} messages."""
    answer_column: str = "ground_truth"
    """What the reward compares with; dotted names reach into objects ("reward_model.ground_truth")."""
    source_column: str = "data_source"
    """Name of the data set a row belongs to; metrics are grouped by it."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """auto: messages go through the tokenizer's template, text does not."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longer prompts are skipped, counted and reported at start."""
    shuffle: bool = True
    """Each epoch is a permutation of (run.seed, epoch)."""


class Sampling(_Section):
    """How training answers are drawn."""

    group_size: int = Field(default=8, ge=1, le=1024)
    """Trajectories per prompt (n)."""
    temperature: float = Field(default=1.0, ge=0, le=100)
    """The trainer divides logits by it too."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass; 1 = off. Below 1 log-probs are of the truncated distribution and training on them is biased."""
    top_k: int = Field(default=0, ge=0)
    """0 = off."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Response budget."""


class Validation(_Section):
    """How the policy is judged on held-out prompts."""

    every_steps: int = Field(default=10, ge=0)
    """0 = only at start and end."""
    at_start: bool = True
    """Judge the version the run starts from."""
    at_end: bool = True
    """Judge the last version before the run is done."""
    max_prompts: int = Field(default=256, ge=0)
    """First k rows of the validation file; 0 = all."""
    group_size: int = Field(default=1, ge=1, le=1024)
    """Sessions per prompt (n of mean@n)."""
    temperature: float = Field(default=1.0, ge=0, le=100)
    """0 = greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass; 1 = off."""
    top_k: int = Field(default=0, ge=0)
    """0 = off."""
    deadline_s: float = Field(default=600.0, gt=0)
    """After it, what is missing counts as failed."""


class Reward(_Section):
    """How an answer is scored."""

    function: str = "stretto.rewards:exact_match"
    """Dotted name module:function or module.function; see stretto/rewards.py for its signature."""
    workers: int = Field(default=1, ge=1, le=256)
    """Processes per replica that run it."""
    deadline_s: float = Field(default=10.0, gt=0)
    """Per answer; after it the session fails and the worker is replaced."""


class Scheduler(_Section):
    """The ledger and its one admission rule."""

    listen: str = "127.0.0.1:50051"
    """host:port of its gRPC server."""
    metrics_listen: str = "127.0.0.1:0"
    """host:port of /metrics; port 0 = any free one, logged at start."""
    batch_groups: int = Field(default=32, ge=1)
    """Groups per train step."""
    max_lag: int = Field(default=2, ge=0, le=1024)
    """Greatest trainer version minus the version that began a group; 0 = synchronous."""
    window: int | None = Field(default=None, ge=1)
    """Prompts that may be un-trained at once; default and most (max_lag + 1) x batch_groups."""
    stragglers: Literal["wait", "drop"] = "wait"
    """A group about to exceed max_lag: wait for it, or evict it and admit one other."""
    filter: Literal["none", "zero_variance"] = "none"
    """zero_variance: evict groups whose rewards are all equal, refilled one for one (DAPO's dynamic sampling)."""
    partial_rollout: bool = True
    """Partial answers of lost or returned leases are continued instead of regenerated."""
    lease_s: float = Field(default=60.0, gt=0)
    """A lease not renewed by a heartbeat for this long is issued again."""
    heartbeat_s: float = Field(default=1.0, gt=0)
    """How often replicas report."""
    group_deadline_s: float = Field(default=600.0, gt=0)
    """From a lease to its end, renewed or not; after it the attempt failed."""
    attempts_max: int = Field(default=3, ge=1)
    """Attempts of a prompt before it fails for good and is replaced."""
    user_queue_max: int = Field(default=10_000, ge=1)
    """Users' own prompts that may wait to enter; more are refused."""
    leader_s: float = Field(default=5.0, gt=0)
    """A standby scheduler on the same Redis takes over when the leader was not heard for this long."""
    wait_max_s: float = Field(default=20.0, gt=0, le=30)
    """Longest a long poll is held open."""


class Rollout(_Section):
    """The replicas."""

    listen: str = "127.0.0.1:0"
    """host:port of each replica's gRPC server."""
    metrics_listen: str = "127.0.0.1:0"
    """host:port of /metrics."""
    advertise: str | None = None
    """Host name others reach it by; default the host it listens on, or this machine's address if it listens on all."""
    replicas: int = Field(default=1, ge=0, le=64)
    """Replica processes `stretto run` starts; compose uses --scale."""
    engine: Literal["torch"] = "torch"
    """torch: built in, any full-attention Hugging Face causal LM on CPU or GPU."""
    device: str = "auto"
    """auto, cpu, cuda, npu."""
    slots: int = Field(default=256, ge=1)
    """Sequences generated at once."""
    prefetch_groups: int = Field(default=8, ge=0)
    """Leased groups that wait in the replica so that the engine never idles."""
    update_policy: Literal["in_flight", "abort", "drain"] = "in_flight"
    """New weights arrive: go on with the old KV cache, recompute it, or finish the running answers first."""
    threads: int = Field(default=1, ge=1)
    """OMP_NUM_THREADS of the process."""


class Trainer(_Section):
    """The learner."""

    listen: str = "127.0.0.1:0"
    """host:port of its gRPC server."""
    metrics_listen: str = "127.0.0.1:0"
    """host:port of /metrics."""
    advertise: str | None = None
    """Host name others reach it by; default the host it listens on, or this machine's address if it listens on all."""
    steps: int = Field(default=100, ge=1)
    """Train steps of the run."""
    device: str = "auto"
    """auto, cpu, cuda, npu."""
    threads: int = Field(default=1, ge=1)
    """OMP_NUM_THREADS of the process."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: hold, or decay to min_learning_rate at the last step."""
    warmup_steps: int = Field(default=0, ge=0)
    """Linear from 0."""
    min_learning_rate: float = Field(default=0.0, ge=0)
    """Where a decay ends."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's first-moment decay."""
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW's second-moment decay."""
    adam_eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled; not on norms and biases."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Global gradient norm."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """Ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(default=0.28, ge=0)
    """Ratio is clipped above 1 + clip_high (DAPO's clip-higher)."""
    correction: Literal["none", "truncated"] = "truncated"
    """Importance weights for tokens of older policies: none, or truncated at correction_cap."""
    correction_cap: float = Field(default=2.0, ge=1)
    """Upper limit of exp(proximal - behaviour) per token."""
    advantage: Literal["grpo", "grpo_no_std"] = "grpo"
    """(r - mean) / (std + 1e-4), or r - mean (Dr.GRPO)."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the k3 KL estimate to the base weights; 0 = no reference model."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per train step."""
    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Padded tokens per forward pass."""
    layout: Literal["auto", "shared_prompt", "padded"] = "auto"
    """Rows of the forward pass: a group's prompt once, or each answer with its own; auto shares where the model can."""
    checkpoint_every_steps: int = Field(default=10, ge=1)
    """The last step is always saved."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest stable ones kept."""
    checkpoint_deadline_s: float = Field(default=600.0, gt=0)
    """How long the last checkpoint is tried again when it cannot be written (a full disk) before the trainer gives up."""
    sample_deadline_s: float = Field(default=1800.0, gt=0)
    """A batch not ready after this long ends the trainer with the blocker's name."""


class WeightSync(_Section):
    """The relay."""

    listen: str = "127.0.0.1:50052"
    """host:port of its gRPC server."""
    metrics_listen: str = "127.0.0.1:0"
    """host:port of /metrics."""
    backend: Literal["auto", "shm", "grpc"] = "auto"
    """auto: shm between processes that share a host (its socket can be reached), else grpc."""
    socket: Path | None = None
    """Unix socket of the shm backend; default in the run folder, or under the temporary folder if that is too long."""
    bucket_mb: int = Field(default=2048, ge=1)
    """Bytes per digest and per transfer, MiB."""
    lease_s: float = Field(default=30.0, gt=0)
    """A reader that takes longer loses its slot."""
    phase_deadline_s: float = Field(default=60.0, gt=0)
    """Limit of each phase of a publish or fetch."""


class Redis(_Section):
    """The store."""

    url: str = ""
    """redis://[:password@]host:port/db; empty = `stretto run` starts an embedded server."""
    timeout_s: float = Field(default=5.0, gt=0)
    """Per command; transitions are repeated with the same operation id until outage_s."""
    outage_s: float = Field(default=120.0, gt=0)
    """How long a service waits for a Redis that went away before it gives up."""


class Peers(_Section):
    """Where the workers dial in; `stretto run` fills these."""

    scheduler: str = "127.0.0.1:50051"
    """host:port."""
    weightsync: str = "127.0.0.1:50052"
    """host:port."""


class Recipe(_Section):
    """A whole run."""

    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    sampling: Sampling = Sampling()
    validation: Validation = Validation()
    reward: Reward = Reward()
    scheduler: Scheduler = Scheduler()
    rollout: Rollout = Rollout()
    trainer: Trainer = Trainer()
    weightsync: WeightSync = WeightSync()
    redis: Redis = Redis()
    peers: Peers = Peers()

    # ---- derived: never written in a recipe
    @property
    def model_path(self) -> Path:
        return self.model.path or self.run.folder / "model"

    @property
    def train_path(self) -> Path:
        return self.data.train or self.run.folder / "data" / "train.jsonl"

    @property
    def validation_path(self) -> Path | None:
        """None = no validation."""
        return self.data.validation or (self.run.folder / "data" / "validation.jsonl" if self.data.make else None)

    @property
    def window(self) -> int:
        """Prompts that may be un-trained at once."""
        return self.scheduler.window or (self.scheduler.max_lag + 1) * self.scheduler.batch_groups

    @model_validator(mode="after")
    def _across(self) -> Recipe:
        """Rules between settings; each message names both values."""
        for broken in (*_sources(self), *_window(self), *_learning(self), *_times(self)):
            raise ValueError(broken)
        return self


def _sources(r: Recipe) -> Iterator[str]:
    for section, made, given, what in (("model", r.model.make, r.model.path, "path"), ("data", r.data.make, r.data.train, "train")):
        if made is None and given is None:
            yield f"{section}.{what} or {section}.make must be set"
        if made is not None and given is not None:
            yield f"{section}.make = {made!r} and {section}.{what} = '{given}': set one ({section}.make= on the command line takes it back)"
        if made is not None and made not in TASKS:
            yield f"{section}.make = {made!r} is not one of {list(TASKS)}{_nearest(made, TASKS)}"


def _window(r: Recipe) -> Iterator[str]:
    s, most = r.scheduler, (r.scheduler.max_lag + 1) * r.scheduler.batch_groups
    if s.window is not None and not s.batch_groups <= s.window <= most:
        yield (
            f"scheduler.window = {s.window} must lie between scheduler.batch_groups = {s.batch_groups} and "
            f"(scheduler.max_lag + 1) x scheduler.batch_groups = {most}: below, no batch fills; above, max_lag cannot hold"
        )
    if s.batch_groups % r.trainer.minibatches:
        yield f"scheduler.batch_groups = {s.batch_groups} must be a multiple of trainer.minibatches = {r.trainer.minibatches}"
    if r.sampling.group_size > r.rollout.slots:
        yield f"rollout.slots = {r.rollout.slots} must be at least sampling.group_size = {r.sampling.group_size}"


def _learning(r: Recipe) -> Iterator[str]:
    t, n = r.trainer, r.sampling.group_size
    if t.advantage == "grpo" and n < 2:
        yield f"trainer.advantage = 'grpo' compares the answers of one prompt: sampling.group_size = {n} must be at least 2"
    if r.sampling.temperature == 0 and n > 1:
        yield f"sampling.temperature = 0 makes all sampling.group_size = {n} answers equal: nothing to learn"
    if t.warmup_steps > t.steps:
        yield f"trainer.warmup_steps = {t.warmup_steps} is more than trainer.steps = {t.steps}"
    if t.min_learning_rate > t.learning_rate:
        yield f"trainer.min_learning_rate = {t.min_learning_rate} is more than trainer.learning_rate = {t.learning_rate}"


def _times(r: Recipe) -> Iterator[str]:
    s = r.scheduler
    if s.heartbeat_s * 3 > s.lease_s:
        yield f"scheduler.lease_s = {s.lease_s} must be at least 3 x scheduler.heartbeat_s = {s.heartbeat_s}"
    if s.lease_s > s.group_deadline_s:
        yield f"scheduler.lease_s = {s.lease_s} is more than scheduler.group_deadline_s = {s.group_deadline_s}"


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def _all_keys() -> list[str]:
    return [f"{s}.{k}" for s, f in Recipe.model_fields.items() for k in f.annotation.model_fields]  # pyright: ignore


def _explain(err: ValidationError) -> str:
    lines: list[str] = []
    for e in err.errors():
        key, value = ".".join(str(p) for p in e["loc"]), e["input"]
        if e["type"] == "extra_forbidden":
            known = _all_keys() if "." in key else list(Recipe.model_fields)
            lines.append(f"{key} = {value!r}: there is no such {'key' if '.' in key else 'section'}{_nearest(key, known)}")
        elif key:
            lines.append(f"{key} = {value!r}: {e['msg'].removeprefix('Value error, ')}")
        else:
            lines.append(e["msg"].removeprefix("Value error, "))
    return "\n".join(lines)


def _set(tree: dict[str, Any], dotted: str, text: str, where: str) -> None:
    parts = dotted.split(".")
    if len(parts) != 2 or not all(parts):
        raise RecipeError(f"{where} {dotted}={text}: the key must be section.key{_nearest(dotted, _all_keys())}")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string: trainer.schedule=cosine
    section = tree.setdefault(parts[0], {})
    if isinstance(section, dict):  # else the recipe itself is wrong there, and is told so when it is built
        section[parts[1]] = value


def build(tree: Mapping[str, Any]) -> Recipe:
    """Check a parsed recipe. Raises RecipeError with every fault found, one a line."""
    try:
        return Recipe.model_validate(dict(tree))
    except ValidationError as err:
        raise RecipeError(_explain(err)) from None


def load(path: Path | str | None, overrides: Iterable[str] = (), environ: Mapping[str, str] | None = None) -> Recipe:
    """Read TOML < environment < `section.key=value` overrides, and check everything that values alone decide.

    Relative paths in a recipe are relative to the working directory. `environ` is given by the caller (a service's
    __main__ or the CLI); nothing else reads it. Raises RecipeError.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = tomllib.loads(Path(path).read_text())
        except FileNotFoundError:
            raise RecipeError(f"recipe {path}: there is no such file") from None
        except (OSError, UnicodeDecodeError) as err:
            raise RecipeError(f"recipe {path}: cannot be read: {err}") from None
        except tomllib.TOMLDecodeError as err:
            raise RecipeError(f"recipe {path}: not TOML: {err}") from None
    for name, text in (environ or {}).items():
        if name.startswith(ENV_PREFIX) and "__" in name:
            _set(tree, name.removeprefix(ENV_PREFIX).lower().replace("__", ".", 1), text, "environment")
    for item in overrides:
        key, eq, text = item.partition("=")
        if not eq:
            raise RecipeError(f"{item!r}: an override is section.key=value")
        _set(tree, key.strip(), text.strip(), "override")
    return build(tree)
