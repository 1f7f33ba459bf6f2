"""Server: an implementation of attention with a sharded cache, as its adapter declares it, found by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from reference import validators
from verification.case import DTYPES
from verification.failures import Malformed, Refused
from verification.peers.known_peers import import_attribute, prepare
from verification.peers.peer import check_declaration, version_of
from verification.serving.serving_case import ServingCase


@dataclass(frozen=True)
class Server:
    """An implementation of attention with a sharded cache, and the ServingCases that it claims to support.

    Args:
        name, supported: title and claim, as reports print them.
        claims: any drawn ServingCase -> the nearest one of the same world that the server supports, or None. It must
            return its own results unchanged.
        step: (cache, q, k, v, call, group) -> (cache, results): one rank's part in one call. cache is None in the first
            call, then what the call before returned. q (T, H, D), k (T, Hk, D), v (T, Hk, Dv) are the new tokens of all
            slots, of any strides, the same on every rank, which keeps the keys that it owns (`Call.owns`).
        returns: names of the results. "out" (T, H, Dv) is the merged output, which every rank returns whole; "lse",
            (T, H), its log-sum-exp. "partial_out" and "partial_lse" are those of the rank's own keys, 0 and -inf for a
            query that sees none of them. lse are natural logarithms.
        splits: partial results that a rank merges into a row at most, as in flash decoding, or context and new tokens.
        worlds, package, arithmetic, prepare, timeout: as of a `verification.peers.Peer`.

    Raises: ValueError for a field with a wrong value.
    """

    name: str
    supported: str
    claims: Callable[[ServingCase], ServingCase | None]
    step: Callable[..., tuple[Any, Mapping[str, Tensor]]]
    returns: tuple[str, ...] = ("out", "partial_out", "partial_lse")
    splits: int = 2
    worlds: tuple[int, ...] = (1, 2, 3)
    package: str | None = None
    arithmetic: str = "math"
    prepare: Callable[[], object] = lambda: None
    timeout: float = 10.0

    def __post_init__(self) -> None:
        check_declaration(self, "step", ("cache", "q", "k", "v", "call", "group"))
        returns, pair = self.returns, ("partial_out", "partial_lse")
        if not isinstance(returns, tuple) or "out" not in returns or not set(returns) <= {"out", "lse", *pair}:
            raise ValueError(f'returns is {returns!r}; it must be a tuple of "out", and of lse, {", ".join(pair)}')
        if len({name in returns for name in pair}) > 1:
            raise ValueError(f"returns is {returns!r}; it must have both {' and '.join(pair)}, or neither")
        validators.integer("splits", self.splits, 1)

    @property
    def version(self) -> str | None:
        """Version of the installed distribution; None if there is none."""
        return version_of(self.package)

    def results_of(self, returned: Any, case: ServingCase, tokens: int) -> tuple[Any, dict[str, Tensor]]:
        """Return the cache and the results of one call. Raises Malformed for others than `returns` promises."""
        if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], Mapping):
            raise Malformed(f'step returned {type(returned).__name__}; it must return cache, {{"out": out, ...}}')
        cache, results = returned
        if set(results) != set(self.returns):
            names = ", ".join(map(str, results)) or "none"
            raise Malformed(f"step returned the results {names}; `returns` promises {', '.join(self.returns)}")
        for name, x in results.items():
            shape = (tokens, case.heads, *(() if name.endswith("lse") else (case.value_dim,)))
            if not isinstance(x, Tensor) or tuple(x.shape) != shape:
                kind = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
                axes = "(tokens, heads)" if name.endswith("lse") else "(tokens, heads, head dim of v)"
                raise Malformed(f"step returned {name} of {kind}; it must be a tensor of shape {shape}, {axes}")
            own, wide = DTYPES[case.dtype], torch.promote_types(DTYPES[case.dtype], torch.float32)
            allowed = {wide} if name.endswith("lse") else {own, wide} if name == "partial_out" else {own}
            if x.layout is not torch.strided or x.device.type != case.device or x.dtype not in allowed:
                kind = f"{x.dtype} with layout {x.layout} on {x.device}"
                must = f"dense {' or '.join(sorted(map(str, allowed)))} on {case.device}"
                raise Malformed(f"step returned {name} in {kind}; it must be {must}".replace("torch.", ""))
        return cache, dict(results)


@lru_cache(maxsize=64)
def load_server(name: str) -> Server:
    """Import `package.module:attribute`. Raises Refused."""
    if ":" not in name:  # so a file that is replayed, which names no module, cannot import one
        raise Refused(f"{name!r} is no server; it must be package.module:server")
    return import_attribute(name, Server, "verification.serving.Server")


def ready_server(name: str) -> Server:
    """Return the Server, with its imports done. Raises Refused."""
    prepare(load_server(name), name)
    return load_server(name)
