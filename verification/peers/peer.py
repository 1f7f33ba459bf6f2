"""Peer: an implementation of attention, as its adapter declares it."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reference import validators
from reference.fast_oracle import QUANTITIES
from verification.case import Case
from verification.failures import Malformed

Result = Tensor | tuple[Tensor, Tensor]  # out (B, L, H, D); lse (B, H, L), natural logarithm
# (q, k, v, case, group) -> Result, also with sinks=; with other arrays than tensors, the same in these
Attend = Callable[..., Any]
Results = tuple[Tensor | None, ...]  # out, lse, dq, dk, dv, dsinks
MAX_RANKS = 8
AXES = {"out": "(batch, tokens, heads, head dim of v)", "lse": "(batch, heads, tokens)"}
ARRAYS = ("torch", "numpy", "jax")


@dataclass(frozen=True)
class Peer:
    """An implementation of attention, and the Cases that it claims to support.

    Args:
        name, supported: title and claim, as reports print them.
        claims: any drawn Case -> the nearest Case of the same world that the implementation supports, or None. It must
            return its own results unchanged.
        attend: (q, k, v, case, group) -> out, or (out, lse): one rank's part, differentiable by autograd. q, out
            (B, L, H, D), k, v (B, L, Hk, D) are the rank's shard, `case.shards().positions[index in the group]`; of a
            claim that `claims.takes("keys")`, k and v that of `case.key_shards()`.
            group is the process group of the Case's ranks, None if the world is 1. Of a claim that
            `claims.takes("sinks")`, it has the argument `sinks`, (H,), where the Case has some.
        worlds: world sizes to run it on.
        package: name of its distribution, for its version; None for a function of your own.
        arithmetic: precision for 16-bit inputs, see `reference.roundoff`. "math" computes in fp32 and rounds once at
            the end; "flash" does so with a coarser exponential; "half" rounds probabilities and partial results to 16
            bits, as fused kernels on CPUs do, and "gpu" likewise as those on GPUs do. For fp32 and fp64 these two mean
            "math".
        merge: "weighted", or "interpolated", which loses more: see `interpolated_merge`.
        prepare: imports what `attend` needs, in every process that runs it. Raises ImportError or Refused.
        arrays: what `attend` takes and returns. "torch": tensors. "numpy": NumPy arrays, forward only. "jax": JAX
            arrays, of a pure function, with gradients by `jax.vjp`.
        timeout: seconds for an example, after which it counts as a hang; more than 10 for one that compiles, fewer
            count as 10.
        heads_first: whether q, k, v and out are (B, H, L, D) rather than (B, L, H, D).
        same_bits: those of out, lse, dq, dk and dv that have the same bits on any of `worlds`, in any layout that it
            claims, alone and in a batch.

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
    arrays: str = "torch"
    timeout: float = 10.0
    heads_first: bool = False
    same_bits: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        sinks = ("sinks",) if "sinks" in getattr(self.claims, "takes", ()) else ()
        check_declaration(self, "attend", ("q", "k", "v", "case", "group"), sinks)
        validators.choice("merge", self.merge, ("weighted", "interpolated"))
        validators.choice("arrays", self.arrays, ARRAYS)
        validators.flag("heads_first", self.heads_first)
        if not isinstance(self.same_bits, tuple) or not set(self.same_bits) <= set(QUANTITIES):
            raise ValueError(f"same_bits is {self.same_bits!r}; it must be a tuple of some of {', '.join(QUANTITIES)}")

    @property
    def version(self) -> str | None:
        """Version of the installed distribution; None if there is none."""
        return version_of(self.package)


def check_declaration(declared: Any, function: str, arguments: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    """Check the fields that a Peer and a Server have. function: field of the one under test, which takes `arguments`
    and `optional` ones. Raises ValueError for a wrong value."""
    for field in ("name", "supported"):
        value = getattr(declared, field)
        if not isinstance(value, str) or not value:
            raise ValueError(f"{field} is {value!r}; it must be a string that is not empty")
    for field, names in {"claims": ("case",), function: arguments, "prepare": ()}.items():
        value, others = getattr(declared, field), optional if field == function else ()
        if not callable(value):
            raise ValueError(f"{field} of {declared.name!r} is {value!r}; it must be a function")
        try:
            inspect.signature(value).bind(*names, **dict.fromkeys(others))
        except TypeError as error:
            call = f"{field}({', '.join((*names, *(f'{name}=None' for name in others)))})"
            raise ValueError(
                f"{field} of {declared.name!r} is {value!r}; it must be called as {call}: {error}"
            ) from None
        except ValueError:  # a function in C, whose signature is not known
            continue
    sizes = declared.worlds
    if not isinstance(sizes, tuple) or not sizes or not all(type(w) is int and 0 < w <= MAX_RANKS for w in sizes):
        raise ValueError(f"worlds is {sizes!r}; it must be a tuple of integers from 1 to {MAX_RANKS}")
    validators.choice("arithmetic", declared.arithmetic, ("math", "flash", "half", "gpu"))
    if not isinstance(declared.timeout, (int, float)) or not 0 < declared.timeout < 86_400:
        raise ValueError(f"timeout is {declared.timeout!r}; it must be seconds, more than 0 and less than a day")


def outputs_of(
    result: Any, case: Case, shape: Sequence[int], lse_shape: Sequence[int], array: Any = Tensor
) -> tuple[Any, Any]:
    """Return out, and lse if the Case uses it, of what `attend` returned.

    Args:
        result: what it returned.
        case: the Case.
        shape, lse_shape: that out and lse must have.
        array: their type.

    Raises: Malformed, which is a counter-example, since the result may depend on the Case.
    """
    out, lse = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    for name, value, required in (("out", out, tuple(shape)), ("lse", lse, tuple(lse_shape))):
        if name == "lse" and value is None:
            continue
        if not isinstance(value, array):
            returned = "None" if value is None else type(value).__name__
            kind = "a tensor" if array is Tensor else f"a {array.__module__.partition('.')[0]} array"
            must = f"it must be {kind} of shape {required}: return out, or (out, lse)"
            raise Malformed(f"attend returned {returned} as {name}; {must}")
        shape = tuple(value.shape)
        if shape != required:
            first = name == "out" and shape == tuple(required[i] for i in (0, 2, 1, 3))
            hint = ": with heads first, return out.transpose(1, 2), or set heads_first=True" if first else ""
            raise Malformed(f"attend returned {name} of shape {shape}; it must be {required}, {AXES[name]}{hint}")
        if isinstance(value, Tensor) and not (
            value.layout is torch.strided and value.is_floating_point() and value.device.type == case.device
        ):
            kind = f"{value.dtype} with layout {value.layout} on {value.device}".replace("torch.", "")
            raise Malformed(
                f"attend returned {name} in {kind}; it must be dense floating-point numbers on {case.device}"
            )
    if case.lse == "unused":
        return out, None
    if lse is None:
        raise Malformed(f'attend returned no lse, and the claim has lse {case.lse!r}; it must be "unused" then')
    return out, lse


def version_of(package: str | None) -> str | None:
    """Version of an installed distribution; None for no package, or one that is not installed."""
    try:
        return None if package is None else importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
