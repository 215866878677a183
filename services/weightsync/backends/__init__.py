"""How bytes get between a slot and another process: one small class per way, and the function that picks one.

The relay owns versions, slots, leases and digests. A backend only gives others access to a slot's bytes:

    admit(slot) ... grant(slot, owner) -> endpoint + token, for one publish or one lease ... retain(owners) ... withdraw(slot)

To add one: write its class, add it to `available`, and take its line out of NOT_BUILT.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from services.weightsync.memory import Memory
from stretto.errors import RecipeError, RefusedError

NOT_BUILT: Mapping[str, str] = {
    "gloo": "not in this build: it needs torch in the relay and a process group of trainer, relay and replicas",
    "nccl": "not in this build: it needs CUDA devices at the trainer and every replica",
    "hccl": "not in this build: it needs Ascend devices and torch_npu at the trainer and every replica",
    "mooncake": "not in this build: it needs mooncake-transfer-engine here, at the trainer and at every replica",
}
"""Names that recipes may come with, and why they cannot be had."""


class Grant(NamedTuple):
    """What a client needs to reach a slot's bytes."""

    endpoint: str = ""
    """shm: path of the unix socket."""
    token: bytes = b""


class Backend(Protocol):
    """One way to a slot's bytes."""

    name: str
    is_shared: bool
    """Whoever is granted a slot looks into it by himself, so only he can say when he is done (W2)."""

    @property
    def endpoint(self) -> str:
        """What Join answers with, so that a client can try whether it can be reached."""
        ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def admit(self, slot_id: str, memory: Memory) -> None:
        """A slot came to be."""
        ...

    def withdraw(self, slot_id: str) -> None:
        """A slot is gone: its grants end."""
        ...

    def grant(self, slot_id: str, owner: str, *, writable: bool) -> Grant:
        """Access to a slot for the publish or lease `owner`; an earlier grant to the same owner ends."""
        ...

    def retain(self, owners: Collection[str]) -> None:
        """Grants to anybody else end."""
        ...


def resolve(name: str, device_type: str) -> str:
    """The implementation behind a name.

    "nccl" on an Ascend device is HCCL, as trainers have it in their recipes; "hccl" is its explicit name, for such a device
    only. "nccl" between CPUs is gloo. Other names stand for themselves.
    """
    return {("nccl", "npu"): "hccl", ("nccl", "cpu"): "gloo"}.get((name, device_type), name)


def choose(offered: Sequence[str], device_type: str, available: Mapping[str, Backend], missing: Mapping[str, str]) -> Backend:
    """The first backend that is offered and available. Raises RefusedError: what is available, why the rest is not."""
    for name in offered:
        if (backend := available.get(resolve(name, device_type))) is not None:
            return backend
    here = ", ".join(sorted(available)) or "nothing"
    reasons = "; ".join(f"{name}: {_why_not(name, device_type, missing)}" for name in offered) or "nothing was offered"
    raise RefusedError(f"no weight transport for a {device_type} device: available here: {here}; {reasons}")


def _why_not(name: str, device_type: str, missing: Mapping[str, str]) -> str:
    resolved = resolve(name, device_type)
    reason = missing.get(resolved, "there is no such backend")
    if resolved == "hccl" and device_type != "npu":
        reason = f"needs an Ascend device (npu), not {device_type}"
    return reason if resolved == name else f"is {resolved} on a {device_type} device: {reason}"


def available(wanted: str, socket: Path) -> tuple[dict[str, Backend], dict[str, str]]:
    """(what this relay offers, why it does not offer the rest) for the recipe's `weightsync.backend`.

    Raises RecipeError when what the recipe asks for cannot be had here.
    """
    from services.weightsync.backends import grpc_stream, shm

    missing = dict(NOT_BUILT)
    found: dict[str, Backend] = {}
    if (reason := shm.unavailable()) is not None:
        missing["shm"] = reason
    elif wanted in ("auto", "shm"):
        found["shm"] = shm.Shm(socket)
    else:
        missing["shm"] = f"weightsync.backend = {wanted!r}"
    if wanted in ("auto", "grpc"):
        found["grpc"] = grpc_stream.GrpcStream()
    else:
        missing["grpc"] = f"weightsync.backend = {wanted!r}"
    if not found:
        raise RecipeError(f"weightsync.backend = {wanted!r}: {missing.get(wanted, 'there is no such backend')}")
    return found, missing
