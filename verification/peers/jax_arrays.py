"""Peers that take JAX arrays: conversion from and to tensors, and gradients by `jax.vjp`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verification.case import Case
from verification.peers.peer import Attend, Results, outputs_of


def run_jax(attend: Attend, group: Any, case: Case, inputs: tuple[Tensor, ...]) -> Results:
    """Return out, lse, dq, dk, dv of a function of JAX arrays, which must be pure, as `jax.vjp` asks."""
    import jax

    q, k, v, dout, dlse = (jax.dlpack.from_dlpack(x.detach().contiguous()) for x in inputs)

    def forward(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        return outputs_of(attend(q, k, v, case, group), case, dout.shape, dlse.shape, jax.Array)

    if not case.backward:
        out, lse = forward(q, k, v)
        return _tensor(out), _tensor(lse), None, None, None
    (out, lse), backward = jax.vjp(forward, q, k, v)
    grads = backward((dout, dlse if lse is not None else None))
    return _tensor(out), _tensor(lse), *map(_tensor, grads)


def _tensor(x: Any) -> Any:
    return None if x is None else torch.from_dlpack(x)
