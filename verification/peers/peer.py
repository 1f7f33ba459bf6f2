"""Peer: what an adapter is made of; and finding one by its name or by `package.module:attribute`."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor
from torch.distributed import ProcessGroup

from verification.case import Case

Result = Tensor | tuple[Tensor, Tensor]  # out (B, L, H, D); lse (B, H, L), natural logarithm
ARITHMETICS = ("math", "flash", "half")
MERGES = ("weighted", "interpolated")
MOST_RANKS = 8


class Refused(Exception):
    """A peer that cannot be run: not installed, not importable, no adapter. Never counted as held or failed."""


def nothing() -> None:
    """What a peer without a package of its own has to prepare."""


@dataclass(frozen=True)
class Peer:
    """An implementation of attention, and what it claims to support.

    name        as the report prints it
    supported   the claim in words
    claims      any drawn Case -> the nearest one that the implementation says it supports, with the same world; None
                if there is none. A Case it returns it must return unchanged when it is given that.
    attend      (q, k, v, case, group) -> out, or (out, lse): one rank's part, differentiable by autograd. q, out
                (B, L, H, D), k, v (B, L, Hk, D) are the rank's shard in the order of `case.layout()`; group is the
                process group of the Case's ranks, None where the world is 1.
    worlds      the world sizes it is run on
    package     name of its distribution, which has its version; None for a function of one's own
    arithmetic  how 16-bit inputs are computed with, as `bounds.Arithmetic.make` has it: "math" in fp32, rounded once
                at the end; "flash" the same with a coarser exponential; "half" probabilities and partial results are
                rounded to 16 bits, as fused kernels do. fp32 and fp64 have no "half": there it means "math".
    merge       how partial results are merged: "weighted", or "interpolated", which loses more: see `interpolation`
    prepare     imports what `attend` needs, in every process that is to run it. Raises ImportError or Refused.

    Raises ValueError, at construction, for a field that cannot be.
    """

    name: str
    supported: str
    claims: Callable[[Case], Case | None]
    attend: Callable[[Tensor, Tensor, Tensor, Case, ProcessGroup | None], Result]
    worlds: tuple[int, ...] = (2, 3, 4)
    package: str | None = None
    arithmetic: str = "math"
    merge: str = "weighted"
    prepare: Callable[[], None] = nothing

    def __post_init__(self) -> None:
        for field in ("name", "supported"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value:
                raise ValueError(f"{field} is {value!r}; it must be a string that says something")
        for field in ("claims", "attend", "prepare"):
            if not callable(getattr(self, field)):
                raise ValueError(f"{field} is {getattr(self, field)!r}; it must be a function")
        sizes = self.worlds
        if not isinstance(sizes, tuple) or not sizes or not all(type(w) is int and 0 < w <= MOST_RANKS for w in sizes):
            raise ValueError(f"worlds is {sizes!r}; it must be a tuple of integers from 1 to {MOST_RANKS}")
        for field, allowed in (("arithmetic", ARITHMETICS), ("merge", MERGES)):
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field} is {getattr(self, field)!r}; it must be one of {', '.join(allowed)}")

    @property
    def version(self) -> str | None:
        """Of the installed distribution; None where it has none, or is not installed."""
        try:
            return None if self.package is None else importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None


_ADAPTERS = "verification.peers.adapters"
# Name -> specification. A name before the first "/" stands for all that begin with it.
KNOWN = {
    "ring-attention-pytorch": f"{_ADAPTERS}.ring_attention_pytorch:plain",
    "ring-attention-pytorch/striped": f"{_ADAPTERS}.ring_attention_pytorch:striped",
    "ring-flash-attn/ring": f"{_ADAPTERS}.ring_flash_attn:ring",
    "ring-flash-attn/zigzag": f"{_ADAPTERS}.ring_flash_attn:zigzag",
    "ring-flash-attn/stripe": f"{_ADAPTERS}.ring_flash_attn:stripe",
    "yunchang/basic": f"{_ADAPTERS}.yunchang:basic",
    "yunchang/zigzag": f"{_ADAPTERS}.yunchang:zigzag",
    "yunchang/strip": f"{_ADAPTERS}.yunchang:strip",
    "torchscale": f"{_ADAPTERS}.torchscale:adapter",
    "dilated-attention-pytorch": f"{_ADAPTERS}.dilated_attention_pytorch:adapter",
    "torch-context-parallel": f"{_ADAPTERS}.context_parallel:adapter",
}


def selected(name: str) -> dict[str, str]:
    """Name -> specification of the peers that a name stands for. Raises Refused for one that is neither known nor of
    the form `package.module:attribute`."""
    found = {known: spec for known, spec in KNOWN.items() if name in (known, known.partition("/")[0])}
    if found:
        return found
    if ":" in name and all(part.isidentifier() for part in name.replace(":", ".", 1).split(".")):
        return {name: name}
    raise Refused(
        f"argument NAME: {name!r} is no peer; it must be one of {', '.join(KNOWN)}, or package.module:adapter"
    )


@lru_cache(maxsize=64)
def load(spec: str) -> Peer:
    """The Peer that `package.module:attribute` names. The working directory is searched after all else: scripts run
    Python with -P, which leaves it out. Raises Refused for a module that cannot be imported or has no such Peer."""
    module, _, attribute = spec.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever a user's module raises when it is imported
        raise Refused(f"{spec} cannot be imported: {type(error).__name__}: {error}") from error
    if not isinstance(found, Peer):
        raise Refused(f"{spec} is {found!r}; it must be a verification.peers.Peer")
    return found


def ready(spec: str) -> Peer:
    """The Peer, with all that it needs imported. Raises Refused."""
    peer = load(spec)
    try:
        peer.prepare()
    except Refused:
        raise
    except Exception as error:
        if peer.package is not None and peer.version is None:
            raise Refused(f"the package {peer.package} is not installed ({type(error).__name__}: {error})") from error
        raise Refused(f"{peer.package or spec} cannot be imported: {type(error).__name__}: {error}") from error
    return peer
