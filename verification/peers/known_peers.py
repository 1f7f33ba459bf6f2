"""Finds a peer: an adapter of this package by its name, or a user's own by `package.module:attribute`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, TypeVar

import torch

from ring.extras import how_to_install
from verification.failures import Refused
from verification.peers.adapters import (
    context_parallel,
    deepspeed_ulysses,
    diffusers,
    dilated_attention_pytorch,
    formulas,
    ring_attention_pytorch,
    ring_flash_attn,
    ring_flash_attn_varlen,
    ringmaster,
    torchscale,
    yunchang,
)
from verification.peers.peer import Peer

Declared = TypeVar("Declared")
# The part of a name before the first "/" selects all peers that begin with it.
ADAPTERS = (
    ring_attention_pytorch, ring_flash_attn, ring_flash_attn_varlen, yunchang, torchscale, dilated_attention_pytorch,
    context_parallel, ringmaster, diffusers, deepspeed_ulysses, formulas,
)  # fmt: skip
KNOWN = {peer.name: peer for module in ADAPTERS for peer in vars(module).values() if isinstance(peer, Peer)}
FORM = f"package.module:adapter, or one of {', '.join(KNOWN)}"


def selected(name: str, among: Mapping[str, Any] = KNOWN, kind: str = "Peer", called: str = "adapter") -> list[str]:
    """Return the known peers that a name selects, or the name of a user's own. Raises Refused for a name that is
    neither known nor of the form `package.module:attribute`. kind: of `among`; called: such an attribute."""
    names = [known for known in among if name in (known, known.partition("/")[0])]
    if names:
        return names
    module, colon, attribute = name.partition(":")
    if colon and not module.endswith(".py") and all(part.isidentifier() for part in (*module.split("."), attribute)):
        return [name]
    module = module.removesuffix(".py").removeprefix("./").replace("/", ".")
    parent, _, last = module.rpartition(".")
    dotted = f"{parent}:{last} or " if parent and not colon and name == module else ""
    is_module = all(part.isidentifier() for part in (*module.split("."), attribute or called))
    close = get_close_matches(name, among, n=3)
    hint = f"; for a {kind} of your own write {dotted}{module}:{attribute or called}" if is_module else ""
    hint = f", close to it: {' or '.join(close)}" if close else hint
    raise Refused(
        f"argument NAME: {name!r} is no {kind.lower()}{hint}; it must be package.module:{called}"
        f"{', or one of ' * bool(among)}{', '.join(among)}"
    )


@lru_cache(maxsize=64)
def load(name: str) -> Peer:
    """Return the known Peer of that name, or import `package.module:attribute`. Raises Refused for a module that cannot
    be imported or has no such Peer."""
    if name in KNOWN:
        return KNOWN[name]
    if ":" not in name:  # so a file that is replayed, which names no module, cannot import one
        raise Refused(f"{name!r} is no peer; it must be {FORM}")
    return import_attribute(name, Peer, "verification.peers.Peer")


def import_attribute(name: str, kind: type[Declared], title: str) -> Declared:
    """Import `package.module:attribute`, of that kind. Raises Refused for a module that cannot be imported or has no
    such attribute. title: of the kind, in errors."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:  # scripts run Python with -P, which omits it
        sys.path.append(os.getcwd())
    device = torch.get_default_device()
    try:
        names = vars(importlib.import_module(module))
    except (Exception, SystemExit) as error:  # importing a user's module may raise anything
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        here = f"; run this in the folder that has {absent}, or install it" if absent == module.split(".")[0] else ""
        hint = how_to_install(absent) or here
        raise Refused(f"{name} cannot be imported: {type(error).__name__}: {error}{hint}") from error
    if torch.get_default_device() != device:
        raise Refused(
            f"importing {module} set torch's default device to {torch.get_default_device()}; "
            "set it within attend alone, as `with torch.device(q.device):`"
        )
    peer = names.get(attribute)
    if not isinstance(peer, kind):
        got = f"is {peer!r}" if attribute in names else "does not exist"
        peers = ", ".join(other for other, value in names.items() if isinstance(value, kind)) or "none"
        raise Refused(f"{name} {got}; it must be a {title}; {module} has {peers}")
    return peer


def ready(name: str) -> Peer:
    """Return the Peer, with its imports done. Raises Refused."""
    peer = load(name)
    prepare(peer, name)
    return peer


def prepare(peer: Any, name: str) -> None:
    """Do the imports of the Peer, StepPeer or Server of that name. Raises Refused."""
    try:
        peer.prepare()
    except Refused:
        raise
    except (Exception, SystemExit) as error:
        if peer.package is not None and peer.version is None:
            install = how_to_install(error.name) if isinstance(error, ModuleNotFoundError) else ""
            cause = f"{type(error).__name__}: {error}"
            raise Refused(f"the package {peer.package} is not installed ({cause}){install}") from error
        raise Refused(f"{peer.package or name} cannot be imported: {type(error).__name__}: {error}") from error
