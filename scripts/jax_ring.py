"""A ring in JAX, as a peer: causal dense attention over four CPU devices of one process, compared with the oracle.

    python -m verification peers scripts.jax_ring:adapter

`jax.shard_map` gives each device its shard, `ppermute` passes keys and values round, the softmax is online, and
gradients come from JAX's own differentiation. It is compiled for each new size, so the claim keeps to a few.
"""

from __future__ import annotations

import os
from functools import cache, partial
from typing import Any

from verification.case import Case
from verification.peers import Peer, claims

DEVICES = 4


def prepare() -> None:
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    import jax

    jax.config.update("jax_platforms", "cpu")


def nearest_supported(case: Case) -> Case:
    case = claims.dense(claims.one_process(claims.without_own_settings(case)), causal=True)
    case = claims.in_dtypes(claims.default_scale(case), "float32", "bfloat16")
    return claims.of_sizes(case, tokens=(8, 32), heads=((2, 2), (4, 2)), head_dims=(4, 16), batches=(1, 2))


def attend(q: Any, k: Any, v: Any, case: Case, group: object) -> Any:
    """q (B, N, H, D), k, v (B, N, Hk, D) -> out (B, N, H, D), lse (B, H, N)."""
    return compiled(case.softmax_scale)(q, k, v)


@cache
def compiled(scale: float) -> Any:
    """Return the compiled ring: one function object, so that a size is compiled once."""
    import jax
    from jax.sharding import AxisType, PartitionSpec

    mesh = jax.make_mesh((DEVICES,), ("ring",), axis_types=(AxisType.Auto,))
    tokens, rows = PartitionSpec(None, "ring"), PartitionSpec(None, None, "ring")
    return jax.jit(jax.shard_map(partial(on_device, scale), mesh=mesh, in_specs=tokens, out_specs=(tokens, rows)))


def on_device(scale: float, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """q (B, L, H, D), k, v (B, L, Hk, D) of one device -> out (B, L, H, D), lse (B, H, L)."""
    import jax
    import jax.numpy as jnp

    dtype, length, share = q.dtype, q.shape[1], q.shape[2] // k.shape[2]
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))  # before heads are repeated: gradients add up in fp32
    k, v = jnp.repeat(k, share, 2), jnp.repeat(v, share, 2)
    rank = jax.lax.axis_index("ring")
    rows = rank * length + jnp.arange(length)
    out, total = jnp.zeros_like(q), jnp.zeros_like(q[..., 0].swapaxes(1, 2))
    top = jnp.full_like(total, -jnp.inf)
    for hop in range(DEVICES):
        keys = (rank - hop) % DEVICES * length + jnp.arange(length)
        scores = jnp.einsum("bihd,bjhd->bhij", q, k) * scale
        scores = jnp.where(rows[:, None] >= keys, scores, -jnp.inf)
        out, total, top = merge(out, total, top, scores, v)
        k, v = (jax.lax.ppermute(x, "ring", [(i, (i + 1) % DEVICES) for i in range(DEVICES)]) for x in (k, v))
    return (out / rows_last(total)).astype(dtype), top + jnp.log(total)


def merge(out: Any, total: Any, top: Any, scores: Any, v: Any) -> tuple[Any, Any, Any]:
    """Add the weights of these scores (B, H, L, L), and their values, to total (B, H, L) and to out (B, L, H, D), which
    are relative to exp(top), top (B, H, L) being the row's maximum so far.

    The first hop holds the diagonal, so no row is empty after it, and each maximum is finite. No result depends on
    `top`: its gradient would be rounding errors alone. Nor is out divided before the last hop: gradients of a partial
    result, and of its lse, would cancel, and their rounding errors stay.
    """
    import jax
    import jax.numpy as jnp

    before, top = top, jax.lax.stop_gradient(jnp.maximum(top, scores.max(-1)))
    kept, weights = jnp.exp(before - top), jnp.exp(scores - top[..., None])
    added = jnp.einsum("bhij,bjhd->bihd", weights, v)
    return out * rows_last(kept) + added, total * kept + weights.sum(-1), top


def rows_last(x: Any) -> Any:
    return x.swapaxes(1, 2)[..., None]  # (B, H, L) -> (B, L, H, 1)


adapter = Peer(
    "ring in JAX", "dense causal, fp32 and bf16, a few sizes, four devices of one process",
    nearest_supported, attend, worlds=(1,), package="jax", prepare=prepare, arrays="jax",
    timeout=60.0,  # it compiles
)  # fmt: skip
