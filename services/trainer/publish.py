"""New weights to the relay: tensors of the learner -> bytes in host memory -> READY, however often it takes.

    CPU tensor, contiguous      a view of its own bytes, nothing is copied
    CPU tensor, strided         one copy
    device tensor               one copy into a host buffer kept for the next version (pinned where the device can)

The relay keeps nothing on disk: restarted, it is empty, and `ensure` publishes the same version again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch

from services.trainer import metrics
from stretto import rpc
from stretto.errors import InvalidArgumentError, RefusedError, StrettoError, UnavailableError
from stretto.weights.layout import ArrayView
from stretto.weights.publisher import Publisher, PublishReport

log = logging.getLogger("stretto.trainer")

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""safetensors' names."""


class HostViews:
    """Tensors as host bytes; buffers for device tensors live as long as this object."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, ArrayView]:
        """Views that are valid until a tensor is written to, or until the next call. Raises KeyError for an unknown dtype."""
        hosts = {name: self._host(name, tensor.detach()) for name, tensor in tensors.items()}
        for device in {tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"}:
            torch.get_device_module(device).synchronize(device)  # the copies below were only enqueued
        return {name: _view(host) for name, host in hosts.items()}

    def _host(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu":
            return tensor.contiguous()
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
            self._buffers[name] = buffer
        return buffer.copy_(tensor, non_blocking=buffer.is_pinned())


def _view(host: torch.Tensor) -> ArrayView:
    return ArrayView(DTYPES[host.dtype], tuple(host.shape), host.reshape(-1).view(torch.uint8).numpy())


class Relay:
    """The weightsync service as the loop sees it: what was published last is there, or will be."""

    def __init__(self, publisher: Publisher, deadline_s: float, sleep: Callable[[float], object]) -> None:
        """`deadline_s` bounds every wait for a relay that is away; `sleep` may raise to end one early."""
        self._publisher, self._deadline_s, self._sleep = publisher, deadline_s, sleep
        self._views = HostViews()
        self._is_away = False

    def publish(self, epoch: int, version: int, tensors: Mapping[str, torch.Tensor]) -> PublishReport:
        """Returns when the version is READY. Repeats until it is; raises FencedError when a newer trainer publishes there."""
        views = self._views.of(tensors)

        def once() -> PublishReport:
            try:
                return self._publisher.publish(epoch, version, views)
            except (RefusedError, InvalidArgumentError):
                raise
            except StrettoError as err:  # a restart or a lost slot in the middle: the next attempt begins afresh
                raise UnavailableError(err.message) from err

        report = rpc.retry_blocking(once, deadline_s=self._deadline_s, what=f"publish v{version} to weightsync", sleep=self._sleep)
        metrics.PUBLISHED_BYTES.inc(report.bytes)
        return report

    def newest_epoch(self) -> int:
        """Newest trainer epoch that published there: ours must be greater. Waits for a relay that is away."""
        return rpc.retry_blocking(self._publisher.newest_epoch, deadline_s=self._deadline_s, what="weightsync's status", sleep=self._sleep)

    def ensure(self, epoch: int, version: int, tensors: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """Publish again if the relay has lost the version. A relay that is away is left for the next call."""
        try:
            newest = self._publisher.newest()
        except StrettoError as err:
            if not self._is_away:
                self._is_away = True
                log.warning("weightsync_away", extra={"fields": {"error": err.message}})
            return
        if self._is_away:
            self._is_away = False
            log.info("weightsync_back")
        if newest != (epoch, version):
            log.info("republish", extra={"fields": {"version": version, "relay_holds": str(newest)}})
            metrics.REPUBLISHED.inc()
            self.publish(epoch, version, tensors())

    def close(self) -> None:
        self._publisher.close()
