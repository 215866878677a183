"""Stretto: asynchronous RL post-training as four services. The SDK lives here; `from stretto import Client`."""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "UserPrompt", "__version__"]

if TYPE_CHECKING:
    from stretto.client import AsyncClient, Client, UserPrompt


def __getattr__(name: str) -> object:
    """Import the SDK on first use, so that a service pays for nothing it does not need."""
    if name in ("Client", "AsyncClient", "UserPrompt"):
        from stretto import client

        return getattr(client, name)
    raise AttributeError(f"module 'stretto' has no attribute {name!r}")
