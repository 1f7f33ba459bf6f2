"""`assert_attention` holds for right results, and names what is wrong, and where."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from reference.fast_oracle import multiplicity
from reference.pattern import Branch, Pattern
from tests.support.plain_case import plain
from verification.case import SINKS, Case
from verification.peers import claims
from verification.testing import assert_attention, cases

Arguments = dict[str, Any]
CAUSAL = Pattern.dense(True)
GAPS = Pattern((Branch(segment_length=4, dilation_rate=2, offset=1),), causal=True)  # even positions see nothing
WINDOW, DOCUMENTS = Pattern.dense(True, window=2), Pattern.dense(True, (5, 0, 7))
PATTERNS = {"dense": Pattern.dense(), "causal": CAUSAL, "gaps": GAPS, "window": WINDOW, "documents": DOCUMENTS}
NARROW = ("bfloat16", "float16")


def attention(case: Case, rows: Tensor | None = None, parts: int = 1) -> Arguments:
    """Return the arguments of a right attention in torch, which merges as many partial results of keys as `parts`."""
    q, k, v, dout, dlse, *sinks = case.tensors()
    if rows is not None:
        q, dout, dlse = q[:, rows], dout[:, rows], dlse[:, :, rows]
    wide = torch.float64 if case.dtype == "float64" else torch.float32
    leaves = [x.detach().requires_grad_() for x in (q, k, v, *sinks)]
    share = case.heads // case.kv_heads
    wq, wk, wv = (x.to(wide).transpose(1, 2) for x in leaves[:3])
    wk, wv = (x.repeat_interleave(share, 1) for x in (wk, wv))
    visible = torch.from_numpy(multiplicity(case.pattern, case.heads, case.tokens) > 0)
    visible = visible if rows is None else visible[:, rows]
    scores = wq @ wk.transpose(2, 3) * case.softmax_scale
    scores = scores if case.softcap is None else case.softcap * (scores / case.softcap).tanh()
    scores = scores.masked_fill(~visible, -math.inf)
    if sinks:
        scores = torch.cat((scores, leaves[3].to(wide)[:, None, None].expand(*scores.shape[:3], 1)), 3)
        wv = torch.cat((wv, torch.zeros_like(wv[:, :, :1])), 2)
    outs, lses = [], []
    for part, values in zip(scores.chunk(parts, 3), wv.chunk(parts, 2), strict=True):
        lse = part.logsumexp(3)
        weights = (part - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(3)).exp()
        outs.append(weights @ values)
        lses.append(lse)
    lse = torch.stack(lses).logsumexp(0)
    shift = lse.masked_fill(lse == -math.inf, 0.0)
    out = sum((o * (x - shift).exp().unsqueeze(3) for o, x in zip(outs, lses, strict=True)), torch.zeros(()))
    out = out.transpose(1, 2).to(q.dtype)
    through = torch.where(lse == -math.inf, 0.0, lse)
    loss = (out.to(wide) * dout.to(wide)).sum() + (through * dlse.to(wide)).sum()
    grads = tuple(map(torch.nan_to_num, torch.autograd.grad(loss, leaves)))  # NaN comes from rows that see nothing
    return {
        "out": out.detach(), "q": q, "k": k, "v": v, "pattern": case.pattern, "lse": lse.detach(), "grads": grads,
        "dout": dout, "dlse": dlse, "scale": case.scale, "rows": rows, "partials": parts, "softcap": case.softcap,
        "sinks": sinks[0] if sinks else None,
    }  # fmt: skip


def case_of(**changes: Any) -> Case:
    return plain(1, **({"heads": 4, "batch": 2, "lse": "differentiated"} | changes))


@pytest.mark.parametrize("dtype", ("float64", "float32", *NARROW))
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_right_results_hold(pattern: Pattern, dtype: str) -> None:
    assert_attention(**attention(case_of(pattern=pattern, dtype=dtype)))


@claims.takes("sinks", "softcap", "value_dim")
def packed(case: Case) -> Case:
    return claims.equal_heads(claims.one_process(claims.packed(case)))


@settings(max_examples=40)
@given(case=cases(world=1, claims=packed))
def test_right_results_of_drawn_cases_hold(case: Case) -> None:
    if case.values != "huge":  # sums of these overflow in a plain product
        arguments = attention(case)
        assert_attention(**arguments | ({"grads": None} if case.values == "extreme" else {}))


@pytest.mark.parametrize("parts", (2, 3, 4))
def test_partial_results_are_allowed_their_merges(parts: int) -> None:
    assert_attention(**attention(case_of(), parts=parts))


def test_rows() -> None:
    rows = torch.tensor([1, 4, 9])
    right = attention(case_of(pattern=CAUSAL), rows)
    assert_attention(**right)
    with pytest.raises(AssertionError, match="out is .* expected"):
        assert_attention(**right | {"rows": rows - 1})


@pytest.mark.parametrize("dtype", ("float64", "float32", *NARROW))
@pytest.mark.parametrize("sinks", SINKS)
def test_sinks_softcaps_and_values_of_another_head_dim(sinks: str, dtype: str) -> None:
    for seed in (1, 2):  # sinks in the type of lse, and of q
        given = case_of(pattern=CAUSAL, dtype=dtype, sinks=sinks, softcap=2.0, value_dim=3, seed=seed)
        right = attention(given)
        assert_attention(**right)
        *grads, dsinks = right["grads"]
        with pytest.raises(AssertionError, match=r"^dsinks is .* at head \d, expected .*; [1-4] of 4 entries"):
            assert_attention(**right | {"grads": (*grads, dsinks + 1)})
        with pytest.raises(AssertionError, match="^(out|lse) is"):
            assert_attention(**right | {"softcap": None})
        with pytest.raises(AssertionError, match="^(out|lse) is"):
            assert_attention(**right | {"sinks": None, "grads": tuple(grads)})


def test_rows_that_see_nothing() -> None:
    right = attention(case_of(pattern=GAPS))
    dead = right["lse"] == -math.inf
    assert dead.any() and not dead.all()
    out = right["out"].clone()
    out[dead.transpose(1, 2)] = 1e-30
    with pytest.raises(AssertionError, match=r"out is 1\.0+\d*e-30 at batch 0, token 0, head 0, dim 0, expected 0"):
        assert_attention(**right | {"out": out})
    with pytest.raises(AssertionError, match=r"lse is -1\.0\d*e\+30 at batch 0, head 0, token 0, expected -inf"):
        assert_attention(**right | {"lse": right["lse"].masked_fill(dead, -1e30)})


WRONG = [("out", 0), ("lse", None), ("dq", 0), ("dk", 1), ("dv", 2)]


@pytest.mark.parametrize("value", (1.0, math.nan, math.inf), ids=str)
@pytest.mark.parametrize("name, index", WRONG, ids=[name for name, _ in WRONG])
def test_the_wrong_quantity_is_named_with_its_place(name: str, index: int | None, value: float) -> None:
    right = attention(case_of(pattern=CAUSAL))
    result = (right[name] if name in right else right["grads"][index]).clone()
    place = (1, 2, 7) if name == "lse" else (1, 7, 1, 3)
    result[place] += value
    grads = list(right["grads"])
    if name not in right:
        grads[index or 0] = result
    axes = "batch 1, head 2, token 7" if name == "lse" else "batch 1, token 7, head 1, dim 3"
    with pytest.raises(AssertionError, match=rf"^{name} is .* at {axes}, expected .* times its bound .*; 1 of \d+"):
        assert_attention(**right | {"grads": grads} | ({name: result} if name in right else {}))


def test_fused_kernels_alone_round_probabilities_to_16_bits() -> None:
    case = case_of(dtype="bfloat16", pattern=Pattern.dense(), tokens=64, head_dim=16)
    q, k, v, *_ = case.tensors()
    scores = torch.einsum("bihd,bjhd->bhij", q.float(), k.float().repeat_interleave(2, 2)) * case.softmax_scale
    weights = scores.softmax(3).bfloat16().float()
    out = torch.einsum("bhij,bjhd->bihd", weights, v.float().repeat_interleave(2, 2)).bfloat16()
    coarse = out + out.abs().max() * 2.0**-8
    for arithmetic in ("half", "gpu"):
        assert_attention(out, q, k, v, case.pattern, arithmetic=arithmetic)
    with pytest.raises(AssertionError):
        assert_attention(coarse, q, k, v, case.pattern)


BASE = attention(case_of(pattern=CAUSAL))
OTHER_SHAPE = torch.zeros(2, 11, 2, 4)
MALFORMED: list[tuple[str, Arguments, str]] = [
    ("out heads first", {"out": BASE["out"].transpose(1, 2)}, "out has shape (2, 4, 12, 4); it must be (2, 12, 4, 4)"),
    ("out in another dtype", {"out": BASE["out"].bfloat16()}, "out is torch.bfloat16; it must be torch.float32"),
    ("lse tokens first", {"lse": BASE["lse"].transpose(1, 2)}, "lse has shape (2, 12, 4); it must be (2, 4, 12)"),
    (
        "dk of the query heads",
        {"grads": (BASE["grads"][0],) * 3},
        "dk has shape (2, 12, 4, 4); it must be (2, 12, 2, 4",
    ),
]
SHORT = {"k": BASE["k"][:, :8], "v": BASE["v"][:, :8]}
REFUSED: list[tuple[str, Arguments, str]] = [
    ("q heads first", {"q": BASE["q"].transpose(1, 2)}, "dout has shape (2, 12, 4, 4); it must be (2, 4, 12, 4)"),
    ("flat q", {"q": BASE["q"].flatten(2)}, "q has shape (2, 12, 16); it must be (batch, tokens, heads, head_dim)"),
    ("k of another dim", {"k": BASE["k"][..., :3]}, "k has shape (2, 12, 2, 3); it must be (2, tokens, key/value"),
    ("NaN", {"v": BASE["v"] * math.nan}, "v is not finite"),
    ("gradients without dout", {"dout": None}, "dout is None; grads must be dq, dk, dv"),
    ("a dlse that is like out", {"dlse": BASE["dout"]}, "dlse has shape (2, 12, 4, 4); it must be (2, 4, 12)"),
    ("no partial result", {"partials": 0}, "partials is 0; it must be an integer of at least 1"),
    ("infinite sinks", {"sinks": torch.full((4,), math.inf), "grads": None}, "they must be floating-point"),
    ("no softcap at all", {"softcap": 0.0}, "softcap is 0.0; it must be a finite number above 0"),
    ("more queries than keys", SHORT, "rows is None, q has 12 tokens and k has 8; rows must be the positions of the"),
    ("rows beyond the keys", SHORT | {"rows": torch.arange(12)}, "it must be 12 ascending positions from 0 to 7"),
    ("descending rows", {"rows": torch.arange(12).flip(0)}, "it must be 12 ascending positions from 0 to 11"),
    ("heads that do not divide", {"k": BASE["k"].repeat(1, 1, 2, 1)[:, :, :3], "v": OTHER_SHAPE.new_zeros(2, 12, 3, 4)},
     "heads is 4; it must be a multiple of kv_heads, 3"),
    ("16-bit kernels on fp32", {"arithmetic": "half"}, "arithmetic is 'half'; it must be one of math, flash"),
]  # fmt: skip


@pytest.mark.parametrize("change, said", [row[1:] for row in MALFORMED], ids=[row[0] for row in MALFORMED])
def test_malformed_results_are_wrong(change: Arguments, said: str) -> None:
    with pytest.raises(AssertionError, match="^" + re.escape(said)):
        assert_attention(**BASE | change)


@pytest.mark.parametrize("change, said", [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_arguments_of_a_wrong_kind_are_refused(change: Arguments, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        assert_attention(**BASE | change)
