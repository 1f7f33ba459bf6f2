"""`reference.same_bits`: parts on paper, results within the oracle's bounds, and bits that neighbours leave alone."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference import Branch, Inputs, Pattern, evaluate, fast_oracle
from reference.roundoff import UNIT, Arithmetic, Counts, max_pairs
from reference.same_bits import attention_in_chunks, blocks_in_chunks, tree
from tests.support import drawn_patterns
from tests.support.attention_cases import normal

CAUSAL = Pattern.dense(causal=True)
DILATED = Pattern((Branch(24, 3, (0, 2, 1, 0), window=7), Branch(None, 2, 1, range(1, 3))), causal=True)


def example(n: int, m: int, batch: int = 1, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v, dout, dlse of 4 query and 2 key/value heads."""
    shapes = (n, 4, 5), (m, 2, 5), (m, 2, 3), (n, 4, 3)
    tensors = [normal(batch, *shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]
    return [*tensors, normal(batch, 4, n, seed=9, dtype=torch.promote_types(dtype, torch.float32))]


def bits(x: list[Tensor], pattern: Pattern, chunk: int = 16, b: slice = slice(None), at: slice = slice(None)) -> Tensor:
    """Return the integers behind out, lse, dq, dk, dv, one row a token, of some batch entries and tokens of fp32."""
    q, k, v, dout, dlse = (y[b, at] if y.ndim == 4 else y[b, :, at] for y in x)
    found = attention_in_chunks(q, k, v, pattern, chunk, dout=dout, dlse=dlse)
    by_token = [y.flatten(2) if y.ndim == 4 else y.transpose(1, 2) for y in found]
    return torch.cat(by_token, 2).view(torch.int32)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_results_lie_within_bounds(data: st.DataObject) -> None:
    sliced = drawn_patterns.patterns(4, packed=True, sliced=6)  # within 6 tokens, or to the end of more
    some = sliced.filter(lambda x: x.documents is None or sum(x.documents) >= 6)
    pattern, chunk = data.draw(some), data.draw(st.sampled_from((1, 3, 8, 16, 64)))
    n, m = (data.draw(st.integers(6, 40)) if pattern.documents is None else sum(pattern.documents) for _ in range(2))
    dtype, softcap = data.draw(st.sampled_from(sorted(UNIT))), data.draw(st.sampled_from((None, 0.5)))
    q, k, v, dout, dlse = example(n, m, 2, getattr(torch, dtype))
    sinks, of_lse = (data.draw(st.sampled_from((None, x))) for x in (normal(4, seed=8), dlse))
    found = attention_in_chunks(
        q, k, v, pattern, chunk, scale=-0.7, softcap=softcap, sinks=sinks, dout=dout, dlse=of_lse
    )
    most = max_pairs(pattern, max(n, m), 4, 2)  # of merges, too: a part in which a row sees nothing changes nothing
    r = Arithmetic.of(dtype, "math", 5, -0.7, Counts(*most, *most), sinks="float64")
    given: list[Any] = [None if x is None else x.double().numpy() for x in (q, k, v, dout, of_lse, sinks)]
    given[5:] = pattern, -0.7, np.arange(n), None, given[5], softcap
    wanted = evaluate(Inputs(*given), r)
    for name, x in zip(fast_oracle.QUANTITIES, found, strict=True):
        exact, bound = (torch.from_numpy(y[name]) for y in (wanted.exact, wanted.bound))
        assert ((x == exact) | ((x.double() - exact).abs() <= bound)).all(), name
        assert x.dtype == (torch.promote_types(q.dtype, torch.float32) if name == "lse" else q.dtype)


@pytest.mark.parametrize("pattern", [CAUSAL, DILATED, Pattern.dense(window=20)], ids=["causal", "dilated", "window"])
def test_batch_and_documents_keep_the_bits_of_one(pattern: Pattern) -> None:
    x, packed = example(100, 100, batch=3), Pattern(pattern.branches, pattern.causal, (50, 0, 7, 43))
    whole = bits(x, packed)
    for b in range(3):
        assert torch.equal(whole[b : b + 1], bits(x, packed, b=slice(b, b + 1)))
    for at in (slice(50), slice(50, 57), slice(57, 100)):
        assert torch.equal(whole[:, at], bits(x, pattern, at=at))


@pytest.mark.parametrize("pattern", [CAUSAL, DILATED], ids=["causal", "dilated"])
def test_later_chunks_keep_the_bits_of_causal_rows(pattern: Pattern) -> None:
    x, own = example(112, 112), 4 * 3 + 4 + 4 * 5  # out, lse, dq
    assert torch.equal(bits(x, pattern)[:, :48, :own], bits(x, pattern, at=slice(48))[..., :own])
    assert torch.equal(bits(x, pattern, 112), bits(x, pattern, 1000))
    assert not torch.equal(bits(x, pattern, 112), bits(x, pattern))


def test_parts_are_cut_at_chunks_and_where_a_window_ends() -> None:
    """Cuts are 6 long in segments of 12 from 0 and 12, chunks 8 long; a query sees keys up to 4 before it."""
    pattern = Pattern((Branch(12, 2, 1, window=5),), causal=True)
    ((readers, parts),) = blocks_in_chunks(pattern, (4, 2), (20, 20), 8)
    assert readers == {0: [0, 1], 1: [2, 3]}
    assert [[x[at].tolist() for x, at in zip(part.ranges, part.places, strict=True)] for part in parts] == [
        [[1, 3, 5], [1, 3, 5]], [[7], [3, 5]], [[7], [7]], [[9], [5]], [[9, 11], [7]], [[9, 11], [9, 11]],
        [[13, 15], [13, 15]], [[17], [13, 15]], [[17], [17]], [[19], [15]], [[19], [17]], [[19], [19]],
    ]  # fmt: skip
    assert tree([*"abcdefg"], lambda left, right: f"({left}{right})") == "(((ab)(cd))((ef)g))"


def test_bands_that_hide_on_both_sides_are_cut_in_triangles() -> None:
    """One at the queries 3 and 6, the other at 2 and 4. Of two ranges, parts that hide nothing come first, then those
    that hide later keys, then those that hide earlier ones."""
    pattern = Pattern.slices([((0, 8), (0, 8), (-1, 1)), ((4, 6), (0, 3), "full"), ((1, 5), (0, 8), (2, 3))])
    ((_, parts),) = blocks_in_chunks(pattern, (1, 1), (8, 8), 8)
    assert [[x[at].tolist() for x, at in zip(part.ranges, part.places, strict=True)] for part in parts] == [
        [[4, 5], [0, 1, 2]], [[1, 2], [2, 3]], [[4, 5], [5, 6]], [[3], [6]],
        [[0, 1, 2], [0, 1]], [[3, 4, 5], [2, 3, 4]], [[6, 7], [5, 6, 7]],
        [[1], [3, 4]], [[2, 3], [4, 5]], [[4], [6, 7]],
    ]  # fmt: skip


def test_refusals() -> None:
    q, k, v, _, dlse = example(8, 8)
    taken: dict[str, Any] = {"q": q, "k": k, "v": v, "pattern": CAUSAL, "chunk": 4}
    for name, wrong in {"chunk": 0, "softcap": -1.0, "dlse": dlse, "v": v.double(), "k": k[0]}.items():
        with pytest.raises(ValueError, match=name):
            attention_in_chunks(**taken | {name: wrong})
