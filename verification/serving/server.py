"""Server: an implementation of attention with a sharded cache, as its adapter declares it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reference import roundoff, validators
from verification.failures import Malformed
from verification.peers.peer import version_of
from verification.serving.serving_case import ServingCase

RESULTS = ("out", "lse", "partial_out", "partial_lse")
AXES = {False: "(tokens, heads, head dim of v)", True: "(tokens, heads)"}
MAX_RANKS = 8
# (cache, q, k, v, call, group) -> (cache, results by name)
Step = Callable[..., tuple[Any, Mapping[str, Tensor]]]


@dataclass(frozen=True)
class Server:
    """An implementation of attention with a sharded cache, and the ServingCases that it claims to support.

    Args:
        name, supported: title and claim, as reports print them.
        claims: any drawn ServingCase -> the nearest one of the same world that the server supports, or None. It must
            return its own results unchanged.
        step: (cache, q, k, v, call, group) -> (cache, results): one rank's part in one call. cache is None in the first
            call, then what the call before returned. q (T, H, D), k (T, Hk, D), v (T, Hk, Dv) are the new tokens of all
            slots, of any strides, the same on every rank; the rank keeps the keys that it owns (`Call.owns`). group is
            the process group, None if the world is 1.
        returns: names of the results. "out" (T, H, Dv) is the merged output, which every rank returns whole; "lse",
            (T, H), its log-sum-exp. "partial_out" and "partial_lse" are those of the rank's own keys, 0 and -inf for a
            query that sees none of them. lse are natural logarithms.
        worlds: world sizes to run it on.
        package: name of its distribution, for its version; None for a function of your own.
        arithmetic: as of a `verification.peers.Peer`, for 16-bit inputs.
        splits: partial results that a rank merges into a row at most, such as those of flash decoding, or context and
            new tokens apart.
        prepare: imports what `step` needs, in every process that runs it. Raises ImportError or Refused.
        timeout: seconds for an example, after which it counts as a hang.

    Raises: ValueError for a field with a wrong value.
    """

    name: str
    supported: str
    claims: Callable[[ServingCase], ServingCase | None]
    step: Step
    returns: tuple[str, ...] = ("out", "partial_out", "partial_lse")
    worlds: tuple[int, ...] = (1, 2, 3)
    package: str | None = None
    arithmetic: str = "math"
    splits: int = 2
    prepare: Callable[[], object] = lambda: None
    timeout: float = 10.0

    def __post_init__(self) -> None:
        for field in ("name", "supported"):
            if not isinstance(getattr(self, field), str) or not getattr(self, field):
                raise ValueError(f"{field} is {getattr(self, field)!r}; it must be a string that is not empty")
        parameters = {"claims": ("case",), "step": ("cache", "q", "k", "v", "call", "group"), "prepare": ()}
        for field, names in parameters.items():
            function = getattr(self, field)
            if not callable(function):
                raise ValueError(f"{field} is {function!r}; it must be a function")
            try:
                inspect.signature(function).bind(*names)
            except TypeError as error:
                call = f"{field}({', '.join(names)})"
                raise ValueError(f"{field} is {function!r}; it must be called as {call}: {error}") from None
            except ValueError:  # a function in C, whose signature is not known
                continue
        returns = self.returns
        if not isinstance(returns, tuple) or "out" not in returns or not set(returns) <= set(RESULTS):
            raise ValueError(f'returns is {returns!r}; it must be a tuple of "out" and others of {", ".join(RESULTS)}')
        if ("partial_out" in returns) != ("partial_lse" in returns):
            raise ValueError(f"returns is {returns!r}; it must have partial_out and partial_lse, or neither")
        sizes = self.worlds
        if not isinstance(sizes, tuple) or not sizes or not all(type(w) is int and 0 < w <= MAX_RANKS for w in sizes):
            raise ValueError(f"worlds is {sizes!r}; it must be a tuple of integers from 1 to {MAX_RANKS}")
        validators.choice("arithmetic", self.arithmetic, roundoff.KERNELS)
        validators.integer("splits", self.splits, 1)
        if not isinstance(self.timeout, (int, float)) or not 0 < self.timeout < 86_400:
            raise ValueError(f"timeout is {self.timeout!r}; it must be seconds, more than 0 and less than a day")

    @property
    def version(self) -> str | None:
        """Version of the installed distribution; None if there is none."""
        return version_of(self.package)

    def results_of(self, returned: Any, case: ServingCase, tokens: int) -> tuple[Any, dict[str, Tensor]]:
        """Return the cache and the results of one call. Raises Malformed for anything else than `returns` promises."""
        if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], Mapping):
            must = 'return cache, {"out": out, ...}'
            raise Malformed(
                f"step returned {type(returned).__name__}; it must be the cache and a dict of results: {must}"
            )
        cache, results = returned
        names, promised = ", ".join(map(str, results)) or "none", ", ".join(self.returns)
        if set(results) != set(self.returns):
            raise Malformed(f"step returned the results {names}; `returns` of {self.name} promises {promised}")
        for name, value in results.items():
            shape = (tokens, case.heads) if name.endswith("lse") else (tokens, case.heads, case.dim_of_values)
            if not isinstance(value, Tensor):
                raise Malformed(f"step returned {type(value).__name__} as {name}; it must be a tensor of shape {shape}")
            if tuple(value.shape) != shape:
                hint = (
                    f"; return {name}.transpose(0, 1)" if tuple(value.shape) == (shape[1], shape[0], *shape[2:]) else ""
                )
                axes = AXES[name.endswith("lse")]
                raise Malformed(f"step returned {name} of shape {tuple(value.shape)}; it must be {shape}, {axes}{hint}")
            if not (value.layout is torch.strided and value.is_floating_point() and value.device.type == case.device):
                kind = f"{value.dtype} with layout {value.layout} on {value.device}".replace("torch.", "")
                raise Malformed(f"step returned {name} in {kind}; it must be dense floats on {case.device}")
        return cache, dict(results)
