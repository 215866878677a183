"""Replicas as the scheduler knows them: who is there, what each holds, when it was last heard. In memory; the ledger keeps a copy."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.scheduler.groups import Weights
from services.scheduler.recovery import Session
from stretto.v1 import scheduler_pb2 as pb
from stretto.v1 import types_pb2

RATE_S = 10.0
"""Rates are means over about this long."""
SAVE_S = 10.0
"""Vital signs are saved this often; a change of state, weights or address at once."""


class Rate:
    """Events per second over the last RATE_S."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()
        self._sum = 0.0

    def add(self, amount: float, now_s: float) -> None:
        self._seen.append((now_s, amount))
        self._sum += amount
        self._forget(now_s)

    def per_s(self, now_s: float) -> float:
        self._forget(now_s)
        if not self._seen:
            return 0.0
        return self._sum / max(1.0, min(RATE_S, now_s - self._seen[0][0]))

    def _forget(self, now_s: float) -> None:
        while self._seen and now_s - self._seen[0][0] > RATE_S:
            self._sum -= self._seen.popleft()[1]


@dataclass(slots=True)
class Replica:
    """One session of one rollout process."""

    replica_id: str
    epoch: int = 0
    incarnation: str = ""
    """Of the process; empty when it did not say."""
    state: int = pb.REPLICA_STATE_STARTING
    held: Weights = field(default_factory=Weights)
    address: str = ""
    slots: int = 0
    running_sequences: int = 0
    generated_tokens: int = 0
    busy_share: float = 0.0
    num_weight_updates: int = 0
    update_stall_ms: float = 0.0
    heard_s: float = 0.0
    is_gone: bool = False
    saved_s: float = 0.0
    tokens: Rate = field(default_factory=Rate)

    def beat(self, request: pb.HeartbeatRequest, now_s: float) -> bool:
        """Take the vital signs; True when they should be saved."""
        held = Weights(request.held.trainer_epoch, request.held.version)
        changed = (self.state, self.held, self.address) != (request.state, held, request.address)
        if request.generated_tokens >= self.generated_tokens > 0:
            self.tokens.add(request.generated_tokens - self.generated_tokens, now_s)
        self.state, self.held, self.address = request.state, held, request.address
        self.incarnation = request.incarnation
        self.slots, self.running_sequences = request.slots, request.running_sequences
        self.generated_tokens, self.busy_share = request.generated_tokens, request.busy_share
        self.num_weight_updates = request.num_weight_updates
        self.update_stall_ms = request.update_stall_ms if math.isfinite(request.update_stall_ms) else 0.0  # Lua's JSON has no NaN
        self.heard_s = now_s
        if not changed and now_s - self.saved_s < SAVE_S:
            return False
        self.saved_s = now_s
        return True

    def record(self) -> dict[str, Any]:
        """What the ledger keeps."""
        return {
            "epoch": self.epoch,
            "incarnation": self.incarnation,
            "state": self.state,
            "held": [self.held.epoch, self.held.version],
            "address": self.address,
            "slots": self.slots,
            "tokens": self.generated_tokens,
            "updates": self.num_weight_updates,
            "stall_ms": self.update_stall_ms,
            "gone": self.is_gone,
            "heard_s": round(self.heard_s, 3),
        }

    @classmethod
    def of(cls, replica_id: str, record: Mapping[str, Any], now_s: float) -> Replica:
        """From the ledger, after a restart of the scheduler: a full lease to be heard again."""
        return cls(
            replica_id,
            epoch=record["epoch"],
            incarnation=record.get("incarnation", ""),
            state=record["state"],
            held=Weights(*record["held"]),
            address=record["address"],
            slots=record["slots"],
            generated_tokens=record["tokens"],
            num_weight_updates=record["updates"],
            update_stall_ms=record["stall_ms"],
            is_gone=record["gone"],
            heard_s=record["heard_s"] if record["gone"] else now_s,
        )

    def status(self, now_s: float, num_leases: int) -> pb.ReplicaStatus:
        return pb.ReplicaStatus(
            replica_id=self.replica_id,
            state=pb.REPLICA_STATE_DEAD if self.is_gone else pb.ReplicaState.ValueType(self.state),
            held=types_pb2.WeightsId(trainer_epoch=self.held.epoch, version=self.held.version),
            address=self.address,
            slots=self.slots,
            running_sequences=0 if self.is_gone else self.running_sequences,
            num_leases=num_leases,
            generated_tokens=self.generated_tokens,
            tokens_per_s=0.0 if self.is_gone else self.tokens.per_s(now_s),
            busy_share=0.0 if self.is_gone else self.busy_share,
            last_heard_s=max(0.0, now_s - self.heard_s),
            num_weight_updates=self.num_weight_updates,
            update_stall_ms=self.update_stall_ms,
        )


def sessions_of(replicas: Iterable[Replica]) -> dict[str, Session]:
    """What expiry needs of the replicas that are there."""
    return {r.replica_id: Session(r.epoch, r.heard_s) for r in replicas if not r.is_gone}
