"""The prompt ledger in Redis: one script per transition, one mirror for decisions.

Keys, all `stretto:{run}:<name>` (the braces put a run into one slot of a cluster). The scheduler owns every one of them.

    name             type    what                                                              lives
    op:<id>          string  the first answer of an operation (I1)                             OP_TTL_S
    epoch:scheduler  string  incarnation of the scheduler (I6)                                 for ever
    leader           string  place (host:port) of the scheduler that leads; others stand by    scheduler.leader_s, renewed
    epoch:trainer    string  incarnation of the trainer (I6)                                   for ever
    replica_epochs   hash    replica -> its newest incarnation (I6)                            for ever
    meta             hash    the numbers of groups.RunState; rev, seq                          for ever
    occupancy        hash    state -> number of groups; "validation:<state>" apart (I2)        for ever
    groups           hash    uid -> status record (JSON) of every open group                   until committed or evicted
    committed        hash    uid -> status record of trained groups                            until a checkpoint contains them
    steps            hash    step -> [{u uid, b version_begin}] of every committed step        for ever
    evicted          hash    uid -> reason                                                     for ever
    prompts          hash    uid -> Prompt (protobuf); written once, never changed (I7)        with its group
    traj:<uid>       hash    index -> Trajectory (protobuf); p<index> -> partial answer        with its group
    queue            list    users' prompts that have not entered, oldest first                until they enter
    replicas         hash    replica -> session (JSON, sessions.py)                            until long unheard
    evaluations      hash    id -> plan (JSON, evaluations.py) of open evaluations             until they end
    results          hash    id -> Evaluation (protobuf)                                       for ever
    events           stream  what WatchEvents shows; about the newest EVENTS_MAX               -

A status record has short names because it is written often: k kind, s state, q seq, o ordinal, n group size, x marks,
b version_begin, a attempt, f failures, r replica, e its epoch, g granted ms, t step, p place, lo / hi rewards, w why, v evaluation.

Status and payload are apart, so a status change cannot touch a payload (I7). The mirror is a copy of `groups`, `meta` and
`occupancy` kept up to date from the scripts' answers; each answer names the revisions before and after, and a mirror that
does not fit is read anew. A decision is committed only if the revision it was taken on still holds.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from services.scheduler import lines, payloads
from services.scheduler.audit import Epochs, Snapshot
from services.scheduler.groups import Entry, Kind, RunState, State, View
from services.scheduler.recovery import Expiry
from stretto.errors import DeposedError, NotFoundError, RefusedError
from stretto.store import Outage, Script, Store, StoreLostError
from stretto.v1 import types_pb2 as pb
from stretto.v1.ledger_pb2 import LedgerGroup, LedgerSnapshot

OP_TTL_S = 900
"""How long an operation's answer is remembered: longer than any outage a caller repeats through."""
SNAPSHOT_FORMAT = 1
"""Of LedgerSnapshot. Raise it when an older reader would misunderstand one."""
RESTORED_ATTEMPTS = 1000
"""Added to the attempts of a restored group: the lost store may have given out later ones than its snapshot knows, and a
report under such a number must not count for a new lease."""
READ_GROUPS = 64
"""Groups whose payloads a proof reads at once: bounds what it holds in memory."""
_LUA = Path(__file__).parent / "lua"
_INTEGERS = {f.name for f in fields(RunState) if f.type == "int"}
_NAMES = {f.name for f in fields(RunState)}
_KEPT = _NAMES | {"seq", "evaluation_next"}
"""Fields of `meta` that come back with a snapshot; `rev` goes on."""


def load_scripts() -> dict[str, Script]:
    """Every transition by name: its file behind the common head, unless it says that it stands alone."""
    head = (_LUA / "_head.lua").read_text()
    scripts: dict[str, Script] = {}
    for path in sorted(_LUA.glob("[a-z]*.lua")):
        text = path.read_text()
        scripts[path.stem] = Script.of(path.stem, text if text.startswith("-- standalone") else head + text)
    return scripts


def entry_of(uid: str, rec: Mapping[str, Any]) -> Entry:
    return Entry(
        uid=uid,
        state=State(rec["s"]),
        kind=Kind(rec["k"]),
        seq=rec["q"],
        ordinal=rec["o"],
        group_size=rec["n"],
        marks=rec["x"],
        version_begin=rec["b"],
        attempt=rec["a"],
        failures=rec["f"],
        replica=rec["r"],
        replica_epoch=rec["e"],
        granted_ms=rec["g"],
        step=rec.get("t", 0),
        place=rec.get("p", 0),
        reward_low=rec.get("lo"),
        reward_high=rec.get("hi"),
        reason=rec.get("w", ""),
        evaluation=rec.get("v", ""),
    )


def _at_rest(rec: dict[str, Any]) -> dict[str, Any]:
    """A group's record as nobody works on it: leased ones are pending, consumed ones finished; marks of failed trajectories go."""
    if rec["s"] in (State.PENDING, State.RUNNING):
        return rec | {"s": "pending", "x": rec["x"].replace("x", "0"), "r": "", "e": 0, "g": 0}
    if rec["s"] == State.CONSUMED:
        return rec | {"s": "finished", "t": 0, "p": 0}
    return rec


def _run_fields(meta: Mapping[str, Any]) -> dict[str, Any]:
    return {k: int(v) if k in _INTEGERS else str(v) for k, v in meta.items() if k in _NAMES}


def _pairs(flat: Any) -> dict[str, bytes]:
    """A hash that a script returned flat, or redis-py returned as a dict."""
    pairs = flat.items() if isinstance(flat, Mapping) else zip(flat[::2], flat[1::2], strict=True)
    return {key.decode(): value for key, value in pairs}


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    uid: str
    attempt: int
    version_begin: int
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TrajectoryEnd:
    """One trajectory of a report; `error` set = its session failed."""

    index: int
    reward: float
    error: str
    blob: bytes
    tokens: int = 0
    version: int | None = None
    """Least version that drew one of its tokens; None without tokens."""


@dataclass(frozen=True, slots=True)
class Reported:
    lost: tuple[str, ...]
    accepted: int
    finished: tuple[str, ...]
    failed: int


@dataclass(frozen=True, slots=True)
class Opened:
    epoch: int
    event_id: str
    reopened: int
    snapshot_needed: str = ""
    """Why nothing was opened; "" = it was."""


@dataclass(frozen=True, slots=True)
class Event:
    id: str
    kind: str
    unix_s: float
    text: str
    values: Mapping[str, float]
    labels: Mapping[str, str]
    blob: bytes


@dataclass(frozen=True, slots=True)
class Leader:
    """The scheduler that leads."""

    place: str
    left_s: float
    """How long it leads unless it renews."""


class Ledger:
    """All transitions of one run. Not for concurrent use: the controller takes its turn lock around decide-and-commit."""

    def __init__(self, store: Store, run: str, *, clock: Callable[[], float] = time.time) -> None:
        self._store, self._prefix, self._clock = store, f"stretto:{{{run}}}:", clock
        self._scripts = load_scripts()
        self._view: View | None = None
        self._is_current = False
        self._num_in_flight = 0
        self._num_started = 0
        """Transitions begun so far."""
        self.epoch = 0
        """I6: incarnation of this scheduler."""
        self._place = ""
        self.num_events = 0
        """Events added since the start; a watcher looks again when it grows."""

    def key(self, name: str) -> str:
        return self._prefix + name

    def traj(self, uids: Iterable[str]) -> list[str]:
        return [self.key(f"traj:{uid}") for uid in uids]

    # ---------------------------------------------------------------------------------------------------- machinery

    async def claim(self, place: str = "", lead_s: float = 5.0) -> Leader | None:
        """Become the run's scheduler for `lead_s`, unless another place leads: that one is the answer.

        Older incarnations are deposed. Who starts again in the same place (host:port) waits for nobody.
        """
        keys = [self.key(f"op:{uuid.uuid4().hex}"), self.key("epoch:scheduler"), self.key("leader")]
        epoch, leader, left_ms = await self._store.run(self._scripts["claim"], keys, [OP_TTL_S, place, int(lead_s * 1000)])
        if not epoch:
            return Leader(leader.decode(), max(0, left_ms) / 1000)
        self.epoch, self._place = int(epoch), place
        self._is_current = False
        return None

    async def lead(self, lead_s: float) -> None:
        """Stay the leader for `lead_s` from now; 0 = resign. Raises DeposedError when a newer scheduler has claimed the run (I6)."""
        keys = [self.key("epoch:scheduler"), self.key("leader")]
        await self._store.run(self._scripts["lead"], keys, [self.epoch, self._place, int(lead_s * 1000)], writes=False)

    async def _read_as_leader(self, *commands: Sequence[str | int | bytes]) -> list[Any]:
        """The answers of reads, taken at one moment at which this is the run's scheduler. Raises DeposedError, StoreLostError.

        The mirror may be of a store that is gone: what is read beside it must be of the same one.
        """
        *found, newest = await self._store.read(*commands, ("GET", self.key("epoch:scheduler")))
        if newest is None:
            raise StoreLostError("the store was emptied under the running scheduler: starting over from the newest checkpoint")
        if int(newest) != self.epoch:
            raise DeposedError(f"scheduler epoch {self.epoch} is not {int(newest)}; another scheduler took over this run; stop this one")
        return found

    async def _transition(
        self,
        name: str,
        args: Mapping[str, Any],
        *,
        keys: Sequence[str] = (),
        blobs: Sequence[bytes] = (),
        op: str | None = None,
        rev: int | None = None,
    ) -> Any:
        """Run one script and bring the mirror up to date. `op` makes a repeat return the first answer."""
        common = [self.key(k) for k in (f"op:{op or uuid.uuid4().hex}", "epoch:scheduler", "meta", "groups", "occupancy", "events")]
        argv: list[str | int | bytes] = [
            self.epoch,
            int(self._clock() * 1000),
            OP_TTL_S,
            "" if rev is None else rev,
            json.dumps(args),
            *blobs,
        ]
        self._num_started += 1
        self._is_current, self._num_in_flight = False, self._num_in_flight + 1  # refused or cancelled halfway: the mirror is read anew
        try:
            answer = json.loads(await self._store.run(self._scripts[name], [*common, *keys], argv))
        finally:
            self._num_in_flight -= 1
        self._view = _applied(self._view, answer)
        self._is_current = self._view is not None
        self.num_events += answer.get("events", 0)
        return answer["ans"]

    async def recall(self, op: str) -> Any | None:
        """The first answer of an operation, or None if it has not run."""
        (answer,) = await self._store.read(("GET", self.key(f"op:{op}")))
        return None if answer is None else json.loads(answer)["ans"]

    @property
    def outage(self) -> Outage | None:
        """What every transition waits for; None = nothing."""
        return self._store.outage

    async def look(self) -> View:
        """The snapshot for people: an old one rather than none while the store is away."""
        return self._view if self._view is not None and self.outage else await self.view()

    async def view(self) -> View:
        """The snapshot to decide on; who does not hold the turn may get one that is a transition old."""
        if self._view is None or not (self._is_current or self._num_in_flight):
            started = self._num_started if self._num_in_flight == 0 else -1
            meta, groups, occupancy = await self._store.run(
                self._scripts["view"], [self.key("meta"), self.key("groups"), self.key("occupancy")], [], writes=False
            )
            fields_ = {k: v.decode() for k, v in _pairs(meta).items()}
            read = View(
                rev=int(fields_.get("rev", 0)),
                run=RunState(**_run_fields(fields_)),
                entries={uid: entry_of(uid, json.loads(text)) for uid, text in _pairs(groups).items()},
                occupancy={k: int(v) for k, v in _pairs(occupancy).items()},
            )
            # A transition may have ended while this was on its way. If none did, the store itself went back (it lost its newest second).
            if self._view is None or self._view.rev <= read.rev or started == self._num_started:
                self._view, self._is_current = read, self._num_in_flight == 0
        return self._view

    async def reread(self) -> View:
        """As `view`, from the store in any case: for who only reads, beside others who write."""
        self._view, self._is_current = None, False
        return await self.view()

    # ---------------------------------------------------------------------------------------------------- admission

    async def configure(self, values: Mapping[str, int | str], event: tuple[str, str] | None = None) -> None:
        """Set fields of RunState; `event` is (kind, text)."""
        args: dict[str, Any] = {"fields": dict(values)}
        if event:
            args["event"] = {"kind": event[0], "text": event[1], "values": {}, "labels": {}}
        await self._transition("configure", args)

    async def push(
        self, prompts: Sequence[pb.Prompt], *, cursor: int, users: int, window: int, rev: int, op: str | None = None
    ) -> list[str]:
        """Admit `users` queued prompts and then `prompts`, whose first ordinal is `cursor`. Answers the users' uids."""
        args = {"users": users, "cursor": cursor, "window": window, "prompts": [{"u": p.uid, "n": p.group_size} for p in prompts]}
        blobs = [p.SerializeToString() for p in prompts]
        answer = await self._transition("push", args, keys=[self.key("prompts"), self.key("queue")], blobs=blobs, op=op, rev=rev)
        return list(answer["users"])

    async def submit(self, prompts: Sequence[pb.Prompt], *, first: int, op: str) -> list[str]:
        """Queue users' prompts, which carry the uids u<first>, u<first + 1>, …  Raises ChangedError when `first` is taken."""
        args = {"first": first, "prompts": [{"u": p.uid, "n": p.group_size} for p in prompts]}
        blobs = [p.SerializeToString() for p in prompts]
        answer = await self._transition("submit", args, keys=[self.key("prompts"), self.key("queue")], blobs=blobs, op=op)
        return list(answer["uids"])

    # ---------------------------------------------------------------------------------------------------- leases

    async def lease(self, replica: str, epoch: int, uids: Sequence[str], *, version: int, rev: int, op: str) -> list[LeaseGrant]:
        args = {"replica": replica, "epoch": epoch, "version": version, "uids": list(uids)}
        return grants_of(await self._transition("lease", args, keys=[self.key("replica_epochs")], op=op, rev=rev))

    async def report(
        self,
        replica: str,
        epoch: int,
        groups: Mapping[tuple[str, int], Sequence[TrajectoryEnd]],
        *,
        attempts_max: int,
        op: str | None = None,
    ) -> Reported:
        """`groups` maps (uid, attempt) to its trajectories that ended."""
        listed: list[dict[str, Any]] = []
        for (uid, attempt), ends in groups.items():
            listed.append({"u": uid, "a": attempt, "t": [_end_of(t) for t in ends]})
        args = {"replica": replica, "epoch": epoch, "attempts_max": attempts_max, "groups": listed}
        keys = [self.key("replica_epochs"), *self.traj(uid for uid, _ in groups)]
        blobs = [t.blob for ends in groups.values() for t in ends]
        answer = await self._transition("report", args, keys=keys, blobs=blobs, op=op)
        return Reported(tuple(answer["lost"]), answer["accepted"], tuple(answer["finished"]), answer["failed"])

    async def return_leases(
        self,
        replica: str,
        epoch: int,
        leases: Sequence[tuple[str, int, Mapping[int, bytes]]],
        *,
        reason: str,
        failed: bool,
        attempts_max: int,
        op: str,
    ) -> int:
        """Hand back (uid, attempt, partial answers by index); `failed` counts the attempt."""
        listed = [{"u": uid, "a": attempt, "p": list(partials)} for uid, attempt, partials in leases]
        args = {"replica": replica, "epoch": epoch, "reason": reason, "failed": failed, "attempts_max": attempts_max, "leases": listed}
        keys = [self.key("replica_epochs"), *self.traj(uid for uid, _, _ in leases)]
        blobs = [blob for _, _, partials in leases for blob in partials.values()]
        answer = await self._transition("return", args, keys=keys, blobs=blobs, op=op)
        return int(answer["returned"])

    async def expire(self, lost: Sequence[Expiry], *, attempts_max: int, op: str | None = None) -> int:
        leases = [{"u": e.uid, "a": e.attempt, "w": e.reason, "f": e.is_failure} for e in lost]
        answer = await self._transition("expire", {"attempts_max": attempts_max, "leases": leases}, op=op)
        return int(answer["expired"])

    async def evict(self, reasons: Mapping[str, str], *, rev: int, op: str | None = None) -> int:
        """Remove the groups, uid -> reason."""
        args = {"groups": [{"u": uid, "w": reason} for uid, reason in reasons.items()]}
        keys = [self.key("prompts"), self.key("evicted"), *self.traj(reasons)]
        return int((await self._transition("evict", args, keys=keys, op=op, rev=rev))["evicted"])

    # ---------------------------------------------------------------------------------------------------- training

    async def consume(self, trainer_epoch: int, step: int, uids: Sequence[str], *, rev: int, op: str | None = None) -> None:
        args = {"trainer_epoch": trainer_epoch, "step": step, "uids": list(uids)}
        await self._transition("consume", args, keys=[self.key("epoch:trainer")], op=op, rev=rev)

    async def commit_step(
        self,
        trainer_epoch: int,
        step: int,
        uids: Sequence[str],
        metrics: Mapping[str, float],
        *,
        evaluation: Mapping[str, Any] | None = None,
        op: str | None = None,
    ) -> bool:
        """False when the step had been committed before."""
        args: dict[str, Any] = {
            "trainer_epoch": trainer_epoch,
            "step": step,
            "uids": list(uids),
            "metrics": json.dumps({**metrics, "step": step}),
        }
        if evaluation:
            args["evaluation"] = dict(evaluation)
        keys = [self.key(k) for k in ("epoch:trainer", "committed", "steps", "evaluations")]
        answer = await self._transition("commit_step", args, keys=keys, op=op)
        return bool(answer["fresh"])

    async def commit_checkpoint(self, trainer_epoch: int, step: int, path: str, *, cut_id: str = "", op: str | None = None) -> int:
        """Groups of steps <= step leave the store; answers how many."""
        uids = [e.uid for e in await self.committed() if e.step <= step]
        args = {"trainer_epoch": trainer_epoch, "step": step, "path": path, "cut_id": cut_id, "uids": uids}
        keys = [self.key("epoch:trainer"), self.key("committed"), self.key("prompts"), *self.traj(uids)]
        return int((await self._transition("commit_checkpoint", args, keys=keys, op=op))["removed"])

    async def open_trainer(
        self,
        resume: int,
        *,
        finished: Sequence[str],
        trained: Sequence[str],
        steps: Sequence[int],
        total_steps: int,
        address: str,
        evaluations: Sequence[str] = (),
        evaluation: Mapping[str, Any] | None = None,
        ordinal_first: int | None = None,
        cut_id: str = "",
        epoch_floor: int = 0,
        rev: int,
        op: str,
    ) -> Opened:
        args: dict[str, Any] = {
            "resume": resume,
            "cut_id": cut_id,
            "epoch_floor": epoch_floor,
            "finished": list(finished),
            "trained": list(trained),
            "steps": list(steps),
            "total_steps": total_steps,
            "address": address,
            "evaluations": list(evaluations),
        }
        if evaluation:
            args["evaluation"] = dict(evaluation)
        if ordinal_first is not None:
            args["ordinal_first"] = ordinal_first
        keys = [self.key(k) for k in ("epoch:trainer", "committed", "steps", "evaluations", "results")]
        return opened_of(await self._transition("open_trainer", args, keys=keys, op=op, rev=rev))

    # ---------------------------------------------------------------------------------------------------- cuts

    async def dump(self, run: str, step: int) -> LedgerSnapshot:
        """The ledger at rest: nothing is leased or consumed, and what a checkpoint of `step` contains is left out.

        The caller holds its turn, so the rounds see the same state: unless the store was emptied, of which nothing must remain.
        """
        names = ("meta", "groups", "prompts", "steps", "evicted", "results")
        *hashes, queue = await self._read_as_leader(*(("HGETALL", self.key(n)) for n in names), ("LRANGE", self.key("queue"), 0, -1))
        found = {name: _pairs(flat) for name, flat in zip(names, hashes, strict=True)}
        records = {uid: json.loads(text) for uid, text in found["groups"].items()}
        records = {uid: _at_rest(rec) for uid, rec in records.items() if rec["k"] != Kind.VALIDATION}
        kept = set(records) | {json.loads(item)["u"] for item in queue}
        found["groups"] = {uid: json.dumps(rec).encode() for uid, rec in records.items()}
        found["prompts"] = {uid: payload for uid, payload in found["prompts"].items() if uid in kept}
        for uid, trajectories in zip(records, await self.trajectories(list(records)), strict=True):
            found[f"traj:{uid}"] = trajectories
        await self._read_as_leader()
        snapshot = LedgerSnapshot(format_version=SNAPSHOT_FORMAT, run=run, step=step, queue=queue)
        for name, fields_ in found.items():
            if fields_:
                snapshot.hashes[name].fields.update(fields_)
        return snapshot

    @staticmethod
    def run_of(snapshot: LedgerSnapshot) -> RunState:
        return RunState(**_run_fields({name: value.decode() for name, value in snapshot.hashes["meta"].fields.items()}))

    async def restore(self, snapshot: LedgerSnapshot, cut_id: str, *, rev: int, op: str) -> int:
        """Replace the run's ledger by `snapshot`; answers how many open groups came back."""
        hashes = {name: dict(h.fields) for name, h in snapshot.hashes.items()}
        records = {uid: json.loads(text) for uid, text in hashes.pop("groups", {}).items()}
        for rec in records.values():
            rec["a"] += RESTORED_ATTEMPTS
        meta = {name: value.decode() for name, value in hashes.pop("meta", {}).items() if name in _KEPT}
        meta["pause_reason"] = (await self.view()).run.pause_reason  # what people say now counts
        here = [e.uid for e in (*(await self.view()).entries.values(), *await self.committed())]
        names = ["prompts", "committed", "steps", "evicted", "evaluations", "results", "queue"]
        names += sorted({f"traj:{uid}" for uid in here} | {name for name in hashes if name.startswith("traj:")})
        place = {name: 7 + i for i, name in enumerate(names)}
        args = {
            "step": snapshot.step,
            "cut_id": cut_id,
            "meta": meta,
            "groups": records,
            "hashes": [{"k": place[name], "f": list(fields_)} for name, fields_ in hashes.items()],
            "queued": len(snapshot.queue),
        }
        blobs = [value for fields_ in hashes.values() for value in fields_.values()] + list(snapshot.queue)
        try:
            answer = await self._transition("restore", args, keys=[self.key(n) for n in names], blobs=blobs, op=op, rev=rev)
        finally:
            self._view, self._is_current = None, False
        return int(answer["groups"])

    # ---------------------------------------------------------------------------------------------------- replicas

    async def session(
        self, replica: str, verb: str, session: Mapping[str, Any], *, epoch: int = 0, text: str = "", op: str | None = None
    ) -> int:
        """verb: join (answers the new epoch), beat, leave or forget."""
        args = {"replica": replica, "verb": verb, "epoch": epoch, "session": dict(session), "text": text}
        answer = await self._transition("session", args, keys=[self.key("replicas"), self.key("replica_epochs")], op=op)
        return int(answer["epoch"])

    async def sessions(self) -> dict[str, dict[str, Any]]:
        (found,) = await self._store.read(("HGETALL", self.key("replicas")))
        return {name: json.loads(text) for name, text in _pairs(found).items()}

    # ---------------------------------------------------------------------------------------------------- evaluations

    async def ask_evaluation(self, plan: Mapping[str, Any], *, op: str) -> str:
        answer = await self._transition("ask_evaluation", {"plan": dict(plan)}, keys=[self.key("evaluations")], op=op)
        return str(answer["id"])

    async def start_evaluation(self, plan: Mapping[str, Any], prompts: Sequence[pb.Prompt], *, op: str | None = None) -> None:
        args = {"plan": dict(plan), "prompts": [{"u": p.uid, "n": p.group_size} for p in prompts]}
        blobs = [p.SerializeToString() for p in prompts]
        await self._transition("start_evaluation", args, keys=[self.key("prompts"), self.key("evaluations")], blobs=blobs, op=op)

    async def end_evaluation(
        self,
        evaluation_id: str,
        uids: Sequence[str],
        *,
        result: bytes | None = None,
        text: str = "",
        values: Mapping[str, float] | None = None,
        op: str | None = None,
    ) -> None:
        args = {"id": evaluation_id, "uids": list(uids), "text": text, "values": json.dumps(dict(values or {}))}
        keys = [self.key("prompts"), self.key("evaluations"), self.key("results"), *self.traj(uids)]
        await self._transition("end_evaluation", args, keys=keys, blobs=[] if result is None else [result], op=op)

    async def evaluations(self) -> list[dict[str, Any]]:
        """Plans of open evaluations, oldest first."""
        (found,) = await self._store.read(("HGETALL", self.key("evaluations")))
        return sorted((json.loads(text) for text in _pairs(found).values()), key=lambda p: (p["asked_ms"], p["id"]))

    async def result(self, evaluation_id: str) -> bytes | None:
        (found,) = await self._store.read(("HGET", self.key("results"), evaluation_id))
        return found

    async def results(self) -> dict[str, bytes]:
        (found,) = await self._store.read(("HGETALL", self.key("results")))
        return _pairs(found)

    # ---------------------------------------------------------------------------------------------------- reading

    async def prompts(self, uids: Sequence[str]) -> list[bytes | None]:
        """Payloads, in the order of `uids`."""
        if not uids:
            return []
        (found,) = await self._store.read(("HMGET", self.key("prompts"), *uids))
        return list(found)

    async def trajectories(self, uids: Sequence[str]) -> list[dict[str, bytes]]:
        """Per uid: index -> trajectory, "p<index>" -> partial answer."""
        found = await self._store.read(*(("HGETALL", key) for key in self.traj(uids)))
        return [_pairs(one) for one in found]

    async def groups(self, entries: Sequence[Entry]) -> list[pb.Group | str]:
        """Whole groups with their payloads, in this order; in place of one that cannot be read, why."""
        commands = [
            ("HMGET", self.key("prompts"), *(e.uid for e in entries)),
            *(("HGETALL", key) for key in self.traj(e.uid for e in entries)),
        ]
        prompts, *answers = await self._read_as_leader(*commands)
        read = zip(entries, prompts, answers, strict=True)
        return [payloads.group_of(entry, prompt, _pairs(answer)) for entry, prompt, answer in read]

    async def committed(self) -> list[Entry]:
        """Trained groups that no checkpoint contains yet."""
        (found,) = await self._store.read(("HGETALL", self.key("committed")))
        return [entry_of(uid, json.loads(text)) for uid, text in _pairs(found).items()]

    async def steps(self) -> dict[int, tuple[str, ...]]:
        (found,) = await self._store.read(("HGETALL", self.key("steps")))
        return {int(step): tuple(item["u"] for item in json.loads(text)) for step, text in _pairs(found).items()}

    async def step_numbers(self) -> list[int]:
        """Committed steps, without their batches."""
        (found,) = await self._store.read(("HKEYS", self.key("steps")))
        return [int(step) for step in found]

    async def events_after(self, after_id: str, count: int = 200) -> list[Event]:
        """The next events after `after_id` ("0-0" = from the oldest kept)."""
        (found,) = await self._store.read(("XRANGE", self.key("events"), f"({after_id}", "+", "COUNT", count))
        return [_event(event_id.decode(), _pairs(body)) for event_id, body in found]

    async def newest_event(self) -> str:
        (found,) = await self._store.read(("XREVRANGE", self.key("events"), "+", "-", "COUNT", 1))
        return found[0][0].decode() if found else "0-0"

    async def snapshot(self, *, with_payloads: bool = False) -> Snapshot:
        """Everything for `audit.verify`; `with_payloads` = also read and judge what the groups contain.

        The caller holds its turn, or nobody writes, so that all rounds see the same state.
        """
        names = ("meta", "groups", "committed", "steps", "evicted", "occupancy", "replicas", "replica_epochs")
        commands: list[Sequence[str | int | bytes]] = [("HGETALL", self.key(name)) for name in names]
        commands += [("LRANGE", self.key("queue"), 0, -1), ("HKEYS", self.key("prompts"))]
        commands += [("GET", self.key("epoch:scheduler")), ("GET", self.key("epoch:trainer"))]
        *hashes, queue, prompts, scheduler, trainer = await self._store.read(*commands)
        found = {name: _pairs(flat) for name, flat in zip(names, hashes, strict=True)}
        seen = snapshot_of(found, queue, frozenset(uid.decode() for uid in prompts))
        sessions = {name: int(json.loads(text)["epoch"]) for name, text in found["replicas"].items()}
        epochs = Epochs(int(scheduler or 0), int(trainer or 0), {name: int(n) for name, n in found["replica_epochs"].items()}, sessions)
        stored = [*seen.entries, *seen.committed]
        trajectories: dict[str, frozenset[int]] = {}
        flaws: list[tuple[str, str]] = []
        for begin in range(0, len(stored), READ_GROUPS):
            part = stored[begin : begin + READ_GROUPS]
            if with_payloads:
                answers = await self.trajectories([e.uid for e in part])
                for entry, prompt, answer in zip(part, await self.prompts([e.uid for e in part]), answers, strict=True):
                    flaws += flaws_of(entry, prompt, answer)
                indices = [list(answer) for answer in answers]
            else:
                read = await self._store.read(*(("HKEYS", key) for key in self.traj(e.uid for e in part)))
                indices = [[name.decode() for name in one] for one in read]
            trajectories |= {e.uid: _whole(names) for e, names in zip(part, indices, strict=True)}
        return replace(seen, trajectories=trajectories, epochs=epochs, flaws=tuple(flaws) if with_payloads else None)

    async def life(self, seen: Snapshot, uid: str) -> LedgerGroup:
        """All that is known of one prompt, by its uid or ordinal. Raises NotFoundError when it never entered."""
        if (group := lines.find(seen, uid)) is None:
            raise NotFoundError(
                f"prompt {uid} never entered the ledger: {seen.run.cursor} of the dataset have, and {seen.run.user_next} of users"
            )
        (prompt,), (answers,) = await self.prompts([group.uid]), await self.trajectories([group.uid])
        return lines.fill(group, prompt, answers)


def _whole(names: Iterable[str]) -> frozenset[int]:
    """Indices of the answers that are not partial."""
    return frozenset(int(name) for name in names if not name.startswith("p"))


def flaws_of(entry: Entry, prompt: bytes | None, answers: Mapping[str, bytes]) -> Iterator[tuple[str, str]]:
    """(invariant, what is wrong) with what a group contains; a missing payload is `audit`'s to name."""
    if prompt is not None and (flaw := payloads.prompt_flaw(entry.uid, prompt)):
        yield "I7", f"{entry.uid}: {flaw}"
    yield from ((name, f"{entry.uid}: {text}") for name, text in payloads.answer_flaws(entry, answers))


def snapshot_of(hashes: Mapping[str, Mapping[str, bytes]], queue: Sequence[bytes], prompts: frozenset[str]) -> Snapshot:
    """What the hashes say, without trajectories, epochs and payloads."""
    found = {name: hashes.get(name, {}) for name in ("meta", "groups", "committed", "steps", "evicted", "occupancy")}
    batches = {int(step): json.loads(text) for step, text in found["steps"].items()}
    return Snapshot(
        run=RunState(**_run_fields({k: v.decode() for k, v in found["meta"].items()})),
        entries=tuple(entry_of(uid, json.loads(text)) for uid, text in found["groups"].items()),
        committed=tuple(entry_of(uid, json.loads(text)) for uid, text in found["committed"].items()),
        steps={step: tuple(item["u"] for item in batch) for step, batch in batches.items()},
        begins={item["u"]: item["b"] for batch in batches.values() for item in batch},
        evicted={uid: reason.decode() for uid, reason in found["evicted"].items()},
        prompts=prompts,
        queue=tuple(json.loads(item)["u"] for item in queue),
        occupancy={k: int(v) for k, v in found["occupancy"].items()},
        trajectories={},
    )


def snapshot_of_cut(cut: LedgerSnapshot) -> Snapshot:
    """Everything for `audit.verify` from a checkpoint's ledger.bin. Raises RefusedError for a format that we do not know."""
    if cut.format_version != SNAPSHOT_FORMAT:
        raise RefusedError(f"the ledger snapshot is of format {cut.format_version}; this version reads {SNAPSHOT_FORMAT}")
    hashes = {name: dict(h.fields) for name, h in cut.hashes.items()}
    prompts = hashes.get("prompts", {})
    seen = snapshot_of(hashes, cut.queue, frozenset(prompts))
    answers = {e.uid: hashes.get(f"traj:{e.uid}", {}) for e in seen.entries}
    return replace(
        seen,
        run=replace(seen.run, checkpoint=cut.step),
        trajectories={uid: _whole(names) for uid, names in answers.items()},
        flaws=tuple(flaw for e in seen.entries for flaw in flaws_of(e, prompts.get(e.uid), answers[e.uid])),
        is_cut=True,
    )


def _applied(view: View | None, answer: Mapping[str, Any]) -> View | None:
    """The mirror after a transition; None when it does not fit and must be read anew."""
    if view is None or answer["rev0"] != view.rev:
        return None
    if answer["rev"] == view.rev:
        return view
    entries = dict(view.entries)
    for uid in answer["del"]:
        entries.pop(uid, None)
    for uid, rec in answer["set"].items():
        entries[uid] = entry_of(uid, rec)
    return View(
        rev=answer["rev"],
        run=replace(view.run, **_run_fields(answer["meta"])),
        entries=entries,
        occupancy={**view.occupancy, **answer["occ"]},
    )


def _end_of(end: TrajectoryEnd) -> dict[str, Any]:
    optional = {"e": end.error or None, "v": end.version}
    return {"i": end.index, "n": end.tokens, "w": end.reward} | {name: value for name, value in optional.items() if value is not None}


def grants_of(answer: Any) -> list[LeaseGrant]:
    """The leases in an answer of `lease`, also a recalled one."""
    return [
        LeaseGrant(one["u"], one["a"], one["b"], tuple(i for i, mark in enumerate(one["x"]) if mark != "1")) for one in answer["leases"]
    ]


def opened_of(answer: Any) -> Opened:
    """The answer of `open_trainer`, also a recalled one."""
    return Opened(answer["epoch"], answer["event_id"], answer["reopened"])


def _event(event_id: str, body: Mapping[str, bytes]) -> Event:
    return Event(
        id=event_id,
        kind=body["kind"].decode(),
        unix_s=int(body["ms"]) / 1000,
        text=body["text"].decode(),
        values=json.loads(body["values"]),
        labels=json.loads(body["labels"]),
        blob=body["blob"],
    )
