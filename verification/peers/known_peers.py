"""Finds a peer: an adapter of this package by its name, or a user's own by `package.module:attribute`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from verification.peers.adapters import (
    context_parallel,
    deepspeed_ulysses,
    diffusers,
    dilated_attention_pytorch,
    ring_attention_pytorch,
    ring_flash_attn,
    ring_flash_attn_varlen,
    ringmaster,
    torchscale,
    yunchang,
)
from verification.peers.peer import Peer, Refused

# The part of a name before the first "/" selects all peers that begin with it.
ADAPTERS = (
    ring_attention_pytorch, ring_flash_attn, ring_flash_attn_varlen, yunchang, torchscale, dilated_attention_pytorch,
    context_parallel, ringmaster, diffusers, deepspeed_ulysses,
)  # fmt: skip
KNOWN = {peer.name: peer for module in ADAPTERS for peer in vars(module).values() if isinstance(peer, Peer)}


def selected(name: str, among: Mapping[str, Any] = KNOWN) -> list[str]:
    """Return the known peers that a name selects, or the name of a user's own. Raises Refused for a name that is
    neither known nor of the form `package.module:attribute`."""
    names = [known for known in among if name in (known, known.partition("/")[0])]
    if names:
        return names
    if ":" in name and all(part.isidentifier() for part in name.replace(":", ".", 1).split(".")):
        return [name]
    raise Refused(
        f"argument NAME: {name!r} is no peer; it must be one of {', '.join(among)}, or package.module:adapter"
    )


@lru_cache(maxsize=64)
def load(name: str) -> Peer:
    """Return the known Peer of that name, or import `package.module:attribute`. Raises Refused for a module that cannot
    be imported or has no such Peer."""
    if name in KNOWN:
        return KNOWN[name]
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:  # scripts run Python with -P, which omits it
        sys.path.append(os.getcwd())
    try:
        peer = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # importing a user's module may raise anything
        raise Refused(f"{name} cannot be imported: {type(error).__name__}: {error}") from error
    if not isinstance(peer, Peer):
        raise Refused(f"{name} is {peer!r}; it must be a verification.peers.Peer")
    return peer


def ready(name: str) -> Peer:
    """Return the Peer, with its imports done. Raises Refused."""
    peer = load(name)
    prepare(peer, name)
    return peer


def prepare(peer: Any, name: str) -> None:
    """Do the imports of the Peer or StepPeer of that name. Raises Refused."""
    try:
        peer.prepare()
    except Refused:
        raise
    except Exception as error:
        if peer.package is not None and peer.version is None:
            raise Refused(f"the package {peer.package} is not installed ({type(error).__name__}: {error})") from error
        raise Refused(f"{peer.package or name} cannot be imported: {type(error).__name__}: {error}") from error
