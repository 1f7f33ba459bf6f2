"""Tiles of several sequences, by the math kernel: each as if it were alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ring.compute import kernels
from ring.compute.math_kernel import SavedRows
from ring.plan.tile import Mask, Sequences
from tests.ring.compute.test_kernels import Size, normal, tile_of


@pytest.mark.parametrize("mask", (Mask.FULL, Mask.CAUSAL))
def test_sequences_of_a_tile_see_nothing_of_each_other(mask: Mask) -> None:
    """The tile is that of the sequences by themselves."""
    queries, keys = (3, 1, 20), (3, 1, 20) if mask is Mask.CAUSAL else (2, 17, 5)
    size = Size(folds=1, share=2, queries=sum(queries), keys=sum(keys))
    tile = replace(tile_of(mask, size), sequences=Sequences.of(np.array(queries), np.array(keys)))
    q, k, v, dout, out = (normal(x, i) for i, x in enumerate((size.q, size.k, size.k, size.q, size.q)))
    lse, delta = normal(size.q[:-1], 7), normal(size.q[:-1], 8)
    found = kernels.forward("math", q, k, v, tile, 0.3)
    gradients = kernels.backward("math", q, k, v, SavedRows(dout, out, lse, delta), tile, 0.3)
    assert tile.sequences is not None and tile.sequences.longest == (20, max(keys))
    for rows, of_keys in tile.sequences.slices():
        one, two, three = q[..., rows, :], k[..., of_keys, :], v[..., of_keys, :]
        alone = tile_of(mask, replace(size, queries=one.shape[4], keys=two.shape[4]))
        whole = kernels.forward("math", one, two, three, alone, 0.3)
        assert torch.equal(found[0][..., rows, :], whole[0]) and torch.equal(found[1][..., rows], whole[1])
        saved = SavedRows(dout[..., rows, :], out[..., rows, :], lse[..., rows], delta[..., rows])
        dq, dk, dv = kernels.backward("math", one, two, three, saved, alone, 0.3)
        assert torch.equal(gradients[0][..., rows, :], dq)
        assert torch.equal(gradients[1][..., of_keys, :], dk) and torch.equal(gradients[2][..., of_keys, :], dv)
