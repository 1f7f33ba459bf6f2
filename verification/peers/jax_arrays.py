"""Peers that take JAX arrays: conversion from and to tensors, and gradients by `jax.vjp`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verification.case import Case
from verification.peers.peer import Attend, Results, outputs_of


def run_jax(attend: Attend, group: Any, case: Case, inputs: tuple[Tensor, ...]) -> Results:
    """Return out, lse, dq, dk, dv, dsinks of a function of JAX arrays, which must be pure, as `jax.vjp` asks."""
    import jax

    q, k, v, dout, dlse, *sinks = map(_array, inputs)

    def forward(q: Any, k: Any, v: Any, *sinks: Any) -> tuple[Any, Any]:
        result = attend(q, k, v, case, group, **({"sinks": sinks[0]} if sinks else {}))
        return outputs_of(result, case, dout.shape, dlse.shape, jax.Array)

    if not case.backward:
        return *map(_tensor, forward(q, k, v, *sinks)), None, None, None, None
    (out, lse), backward = jax.vjp(forward, q, k, v, *sinks)
    grads = backward((dout.astype(out.dtype), None if lse is None else dlse.astype(lse.dtype)))
    return tuple(map(_tensor, (out, lse, *grads, *((None,) if not sinks else ()))))


def _array(x: Tensor) -> Any:
    """Convert to an array that is bound to no device, so that a function may shard it."""
    import jax.numpy as jnp

    x = x.detach()
    if x.dtype == torch.bfloat16:  # NumPy itself has no such type
        return jnp.asarray(x.contiguous().view(torch.int16).numpy().view(jnp.bfloat16))
    return jnp.asarray(x.numpy())


def _tensor(x: Any) -> Tensor | None:
    import numpy as np

    if x is None:
        return None
    array = np.array(x)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
