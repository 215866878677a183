"""By which host a process says that it is reached."""

from __future__ import annotations

import socket

import pytest

from stretto import endpoints
from stretto.errors import InvalidArgumentError


def test_a_host_is_advertised_as_it_is() -> None:
    assert endpoints.reachable_host("10.0.0.7", "scheduler:50051") == "10.0.0.7"


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "[::]", ""])
def test_all_addresses_are_advertised_as_the_one_that_talks_to_the_peer(everywhere: str) -> None:
    assert endpoints.reachable_host(everywhere, "127.0.0.1:50051") == "127.0.0.1"


def test_a_peer_without_an_address_leaves_the_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert endpoints.reachable_host("0.0.0.0", "scheduler:50051") == socket.gethostname()


@pytest.mark.parametrize("address", ["nohost", "host:", ":1", "h:99999", "h:x"])
def test_a_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(InvalidArgumentError, match="must be host:port"):
        endpoints.split(address)
