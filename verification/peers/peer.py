"""Peer: an implementation of attention, as its adapter declares it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from reference import validators
from verification.case import Case

Result = Tensor | tuple[Tensor, Tensor]  # out (B, L, H, D); lse (B, H, L), natural logarithm
Attend = Callable[[Tensor, Tensor, Tensor, Case, ProcessGroup | None], Result]
MAX_RANKS = 8


class Refused(Exception):
    """A peer cannot be run: not installed, not importable, no adapter. It counts as neither held nor failed."""


@dataclass(frozen=True)
class Peer:
    """An implementation of attention, and the Cases that it claims to support.

    Args:
        name, supported: title and claim, as reports print them.
        claims: any drawn Case -> the nearest Case of the same world that the implementation supports, or None. It must
            return its own results unchanged.
        attend: (q, k, v, case, group) -> out, or (out, lse): one rank's part, differentiable by autograd. q, out
            (B, L, H, D), k, v (B, L, Hk, D) are the rank's shard, `case.shards().positions[index in the group]`.
            group is the process group of the Case's ranks, None if the world is 1.
        worlds: world sizes to run it on.
        package: name of its distribution, for its version; None for a function of your own.
        arithmetic: precision for 16-bit inputs, see `reference.roundoff`. "math" computes in fp32 and rounds once at
            the end; "flash" does so with a coarser exponential; "half" rounds probabilities and partial results to 16
            bits, as fused kernels do. For fp32 and fp64 "half" means "math".
        merge: "weighted", or "interpolated", which loses more: see `interpolated_merge`.
        prepare: imports what `attend` needs, in every process that runs it. Raises ImportError or Refused.

    Raises: ValueError for a field with a wrong value.
    """

    name: str
    supported: str
    claims: Callable[[Case], Case | None]
    attend: Attend
    worlds: tuple[int, ...] = (2, 3, 4)
    package: str | None = None
    arithmetic: str = "math"
    merge: str = "weighted"
    prepare: Callable[[], object] = lambda: None

    def __post_init__(self) -> None:
        for field in ("name", "supported"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value:
                raise ValueError(f"{field} is {value!r}; it must be a string that is not empty")
        for field in ("claims", "attend", "prepare"):
            if not callable(getattr(self, field)):
                raise ValueError(f"{field} is {getattr(self, field)!r}; it must be a function")
        sizes = self.worlds
        if not isinstance(sizes, tuple) or not sizes or not all(type(w) is int and 0 < w <= MAX_RANKS for w in sizes):
            raise ValueError(f"worlds is {sizes!r}; it must be a tuple of integers from 1 to {MAX_RANKS}")
        validators.choice("arithmetic", self.arithmetic, ("math", "flash", "half"))
        validators.choice("merge", self.merge, ("weighted", "interpolated"))

    @property
    def version(self) -> str | None:
        """Version of the installed distribution; None if there is none."""
        return version_of(self.package)


def outputs_of(result: Any, shape: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """Return out and lse of what `attend` returned. shape: of out. Raises ValueError, which is a counter-example, since
    it may depend on the Case."""
    out, lse = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    batch, tokens, heads, _ = shape
    for name, value, required in (("out", out, tuple(shape)), ("lse", lse, (batch, heads, tokens))):
        if isinstance(value, Tensor) and value.shape != required:
            raise ValueError(f"attend returned {name} of shape {tuple(value.shape)}; it must be {required}")
        if not isinstance(value, Tensor) and (name == "out" or value is not None):
            got = "None" if value is None else type(value).__name__
            raise ValueError(
                f"attend returned {got} as {name}; it must be a tensor of shape {required}: return out, or (out, lse)"
            )
    return out, lse


def version_of(package: str | None) -> str | None:
    """Version of an installed distribution; None for no package, or one that is not installed."""
    try:
        return None if package is None else importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
