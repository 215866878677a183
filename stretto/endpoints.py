"""Addresses: which port is free, and by which host do others reach this process?"""

from __future__ import annotations

import random
import socket
import sys

from stretto.errors import InvalidArgumentError, UnavailableError

PORTS = range(20000, 32768)
"""Where ports are chosen: below the range that kernels draw outgoing ports from, so that no client of anybody takes one
between our restarts."""
_EVERYWHERE = ("", "0.0.0.0", "::")
"""Listening there is listening on all addresses of the machine."""


def split(address: str, key: str = "address") -> tuple[str, int]:
    """("host", port) of "host:port". Raises InvalidArgumentError naming `key`."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise InvalidArgumentError(f"{key} = {address!r}: must be host:port")
    return host.strip("[]"), int(port)


def reachable_host(listens_on: str, peer: str) -> str:
    """The host by which others reach a server that listens on `listens_on`.

    Where that is all addresses: the one that our packets to `peer` ("host:port") come from; our host name when `peer` has no
    address yet. May take as long as the resolver does.
    """
    if listens_on.strip("[]") not in _EVERYWHERE:
        return listens_on
    host, port = split(peer)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as s:
            s.connect(address)  # sends nothing: it only chooses the route
            ours = s.getsockname()[0]
    except OSError:
        return socket.gethostname()
    return f"[{ours}]" if family == socket.AF_INET6 else ours


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a port in TIME_WAIT is free
        try:
            s.bind((host, port))
            s.listen(1)
        except OSError:
            return False
    return True


def free_port(host: str = "127.0.0.1", claims: Claims | None = None) -> int:
    """A port that is free now. Only one taken into `claims` stays so: else the caller's server may still lose a race."""
    candidates = random.Random()  # the run's seed must not make two runs choose alike
    for _ in range(200):
        port = candidates.choice(PORTS)
        if is_free(host, port) and (claims is None or claims.take(port)):
            return port
    raise UnavailableError(f"no free port on {host} in {PORTS.start}-{PORTS.stop - 1} after 200 tries")


class Claims:
    """Ports that a run has given to its processes, which listen only seconds later, or again after a crash.

    Until they are closed, or this process ends, no other run on this machine (on Linux) chooses them.
    """

    def __init__(self) -> None:
        self._held: dict[int, socket.socket] = {}

    def take(self, port: int) -> bool:
        """False when this or another run has it."""
        if port in self._held:
            return False
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        if sys.platform == "linux":  # an abstract address: in the same namespace as ports, gone with its holder
            try:
                claim.bind(f"\0stretto-port-{port}")
            except OSError:
                claim.close()
                return False
        self._held[port] = claim
        return True

    def close(self) -> None:
        for claim in self._held.values():
            claim.close()
        self._held.clear()
