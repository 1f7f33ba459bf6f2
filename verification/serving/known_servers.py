"""Finds a user's server by `package.module:attribute`."""

from __future__ import annotations

from functools import lru_cache

from verification.failures import Refused
from verification.peers.known_peers import import_attribute, prepare
from verification.serving.server import Server


@lru_cache(maxsize=64)
def load_server(name: str) -> Server:
    """Import `package.module:attribute`. Raises Refused."""
    if ":" not in name:  # so a file that is replayed, which names no module, cannot import one
        raise Refused(f"{name!r} is no server; it must be package.module:server")
    return import_attribute(name, Server, "verification.serving.Server")


def ready_server(name: str) -> Server:
    """Return the Server, with its imports done. Raises Refused."""
    server = load_server(name)
    prepare(server, name)
    return server
