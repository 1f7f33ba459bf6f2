"""Bounds of peers that merge by interpolation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from reference import Expectation, Pattern
from tests.support.plain_case import PLAIN
from verification.case import Case
from verification.check.expectation import inputs_of
from verification.peers import Peer
from verification.peers.known_peers import load
from verification.peers.peer_experiment import evaluate_for, peer_arithmetic


def expect(peer: Peer, case: Case) -> Expectation:
    return evaluate_for(peer, inputs_of(case, case.tensors()), peer_arithmetic(peer, case))


def interpolated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of float32 (B, N, H, D), one key after another merged as ring codes do it."""
    scores = torch.einsum("bihd,bjhd->bihj", q, k) * q.shape[-1] ** -0.5
    out, lse = v[:, None, 0].expand_as(q), scores[..., :1]
    for j in range(1, k.shape[1]):
        weight = torch.sigmoid(scores[..., j : j + 1] - lse)
        out = out - weight * (out - v[:, None, j])
        lse = lse - torch.nn.functional.logsigmoid(lse - scores[..., j : j + 1])
    return out


@pytest.mark.parametrize("seed", range(4))
def test_interpolating_merges_have_wider_bounds(seed: int) -> None:
    case = replace(PLAIN, pattern=Pattern.dense(), tokens=8, bucket=1, values="ties", score_scale=32.0, seed=seed)
    q, k, v, _, _ = case.tensors()
    peer = load("torch-context-parallel")
    allowed, strict = expect(peer, case), expect(replace(peer, merge="weighted"), case)
    error = np.abs(interpolated(q, k, v).double().numpy() - allowed.exact["out"])
    assert (error <= allowed.bound["out"]).all()
    assert (error > strict.bound["out"]).any(), "it does lose something"
    for name in ("out", "dq", "dk"):
        assert (strict.bound[name] <= allowed.bound[name]).all()
        assert (allowed.bound[name] - strict.bound[name]).max() < 1e-2
    assert np.array_equal(strict.bound["dv"], allowed.bound["dv"])


def test_unseen_rows_are_allowed_no_error() -> None:
    pattern = Pattern.longnet([2], [2], heads=2)  # odd heads see odd positions only, and their rows others nothing
    allowed = expect(load("torch-context-parallel"), replace(PLAIN, pattern=pattern))
    assert allowed.dead_rows.any() and allowed.dead_keys.any()
    for name, dead in (("out", allowed.dead_rows), ("dq", allowed.dead_rows), ("dk", allowed.dead_keys)):
        assert (allowed.bound[name][:, dead.T] == 0).all() and (allowed.bound[name][:, ~dead.T] > 0).all()
