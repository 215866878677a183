"""`python -m stretto.health HOST:PORT [SERVICE]`: exit 0 when the gRPC server there says SERVING, else 1. For container probes."""

from __future__ import annotations

import sys
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stretto import rpc

TIMEOUT_S = 3.0
"""A probe answers in milliseconds or not at all."""


def is_serving(target: str, service: str = "") -> bool:
    """Whether `service` ("" = the whole server) at `target` says SERVING within TIMEOUT_S."""
    with rpc.connect_blocking(target) as channel:
        stub = cast(Any, health_pb2_grpc.HealthStub(channel))  # its methods are made at run time
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S)
        except grpc.RpcError:
            return False
    return answer.status == health_pb2.HealthCheckResponse.SERVING


if __name__ == "__main__":
    sys.exit(0 if is_serving(*sys.argv[1:3]) else 1)
