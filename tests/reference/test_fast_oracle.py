"""`reference.fast_oracle` against `reference.oracle`, within the bounds of two fp64 computations."""

from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import Branch, Expectation, Inputs, Pattern, evaluate, fast_oracle
from reference.oracle import attention_and_gradients
from reference.roundoff import Arithmetic, Counts, max_pairs
from reference.slices import Slice
from tests.support import drawn_patterns

SCALE = -0.7
TINY, HUGE = -1e4, 1e4


def drawn_inputs(pattern: Pattern, n: int, dims: tuple[int, int] = (3, 5), heads: int = 4, **changes: Any) -> Inputs:
    """Seeded normal values of two batches; two query heads to a key/value head."""
    draw, (dim, value_dim) = np.random.default_rng(5), dims
    q, dout, dlse = draw.normal(size=(2, n, heads, dim)), draw.normal(size=(2, n, heads, value_dim)), None
    k, v = draw.normal(size=(2, n, heads // 2, dim)), draw.normal(size=(2, n, heads // 2, value_dim))
    return replace(Inputs(q, k, v, dout, dlse, pattern, SCALE), **changes)


def arithmetic_of(inputs: Inputs) -> Arithmetic:
    counts = Counts(*max_pairs(inputs.pattern, inputs.k.shape[1], inputs.heads, inputs.kv_heads))
    return Arithmetic.of("float64", "math", inputs.q.shape[3], inputs.scale, counts)


def assert_twins_agree(inputs: Inputs) -> Expectation:
    """Assert that the two differ by no more than the bounds, which is nothing where the bound is 0."""
    found = evaluate(inputs, arithmetic_of(inputs))
    q, k, v, dout, dlse, sinks, rows = (
        None if x is None else torch.from_numpy(x)
        for x in (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse, inputs.sinks, inputs.rows)
    )
    assert q is not None and k is not None and v is not None and dout is not None
    options: dict[str, Any] = {"q_positions": rows, "scale": SCALE, "sinks": sinks, "softcap": inputs.softcap}
    wanted = attention_and_gradients(q, k, v, inputs.pattern, dout, dlse, **options)
    names = (*fast_oracle.QUANTITIES, *(["dsinks"] if sinks is not None else []))
    assert set(found.exact) == set(found.bound) == set(names)
    for name, x in zip(names, wanted, strict=True):
        exact, bound = found.exact[name], found.bound[name]
        assert exact.shape == bound.shape == x.shape and np.isfinite(bound).all(), name
        with np.errstate(invalid="ignore"):
            off = np.where(exact == x.numpy(), 0.0, np.abs(exact - x.numpy()))
        assert (off <= bound).all(), name
    return found


def cut_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_oracle, "WHOLE", 0)
    monkeypatch.setitem(fast_oracle.BLOCK, "cpu", 60)


SINKS = {"none": None, "some": (0.5, -inf, 1.5, -2.0), "large": (HUGE, TINY, 0.0, -1e9), "absent": (-inf,) * 4}
MIXED = (Branch(7, 3, (0, 1, 2, 2)), Branch(None, 2, 1, range(1, 3)), Branch(4, 6, (5, 1), range(2, 4)))
PATTERNS = {
    "causal": Pattern.dense(causal=True),
    "window": Pattern.dense(causal=True, window=3),
    "documents": Pattern.dense(documents=(9, 0, 14, 1)),
    "mixed": Pattern(MIXED, causal=True),
    "nothing": Pattern((Branch(2, 3, 2),)),
    "slices": Pattern((Branch(slices=(Slice(0, 9, 4, 24, 1, 8), Slice(3, 24, 0, None, -9, 0))), MIXED[2]), causal=True),
}


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("softcap", [None, 0.5, 20.0, 1e6])
@pytest.mark.parametrize("sinks", SINKS)
def test_the_twins_agree(pattern: Pattern, softcap: float | None, sinks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = None if (numbers := SINKS[sinks]) is None else np.array(numbers)
    inputs = drawn_inputs(pattern, 24, sinks=scores, softcap=softcap)
    inputs = replace(inputs, q=inputs.q * 6, dlse=np.random.default_rng(6).normal(size=(2, 4, 24)))
    whole = assert_twins_agree(inputs)
    rows = np.array([0, 3, 23])
    assert_twins_agree(replace(inputs, q=inputs.q[:, rows], dout=inputs.dout[:, rows], dlse=None, rows=rows))
    cut_in_blocks(monkeypatch)
    blocks = assert_twins_agree(inputs)
    assert np.array_equal(whole.dead_rows, blocks.dead_rows) and np.array_equal(whole.dead_keys, blocks.dead_keys)
    for name in whole.bound:
        np.testing.assert_allclose(blocks.bound[name], whole.bound[name], rtol=2e-3)  # e^x - 1 or x, by the largest
    alone = np.full(4, -inf) if scores is None else scores
    assert np.where(whole.dead_rows, whole.exact["lse"] == alone[:, None], True).all()
    if scores is not None:
        absent = scores == -inf
        assert (whole.exact["dsinks"][absent] == 0).all() and (whole.bound["dsinks"][absent] == 0).all()


@settings(deadline=None, max_examples=80)
@given(st.data(), st.integers(1, 12), st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_the_twins_agree_on_any_pattern(data: st.DataObject, n: int, dims: tuple[int, int]) -> None:
    pattern = data.draw(drawn_patterns.patterns(4, sliced=n))
    sink = st.sampled_from((-inf, TINY, -3.0, 0.0, 2.0, HUGE))
    sinks = data.draw(st.none() | st.lists(sink, min_size=4, max_size=4).map(np.array))
    softcap = data.draw(st.sampled_from((None, 0.5, 3.0, 1e6)))
    assert_twins_agree(drawn_inputs(pattern, n, dims, sinks=sinks, softcap=softcap))


def test_slices_of_queries_may_reach_behind_the_keys() -> None:
    rows = np.array([0, 4, 5, 39])
    for keys in (24, 25):
        pattern = Pattern.slices([((5, 40), (0, keys), (None, -6)), ((0, 5), (3, 9), "causal")])
        inputs = drawn_inputs(pattern, 24)
        inputs = replace(inputs, q=inputs.q[:, :4], dout=inputs.dout[:, :4], rows=rows)
        if keys == 24:
            assert not assert_twins_agree(inputs).dead_rows[:, 3].any()
            continue
        with pytest.raises(ValueError, match="slices must lie within the 24 tokens of the keys"):
            evaluate(inputs, arithmetic_of(inputs))
        with pytest.raises(ValueError, match="slices must lie within the 24 tokens of the keys"):
            q, k, v, dout, at = (torch.from_numpy(x) for x in (inputs.q, inputs.k, inputs.v, inputs.dout, rows))
            attention_and_gradients(q, k, v, pattern, dout, q_positions=at)


@pytest.mark.parametrize("blocks", [False, True])
def test_tensors_and_arrays_give_equal_results(blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if blocks:
        cut_in_blocks(monkeypatch)
    inputs = drawn_inputs(PATTERNS["mixed"], 24, sinks=np.array(SINKS["some"]), softcap=2.0)
    tensors: Any = {name: torch.from_numpy(getattr(inputs, name)) for name in ("q", "k", "v", "dout", "sinks")}
    found, wanted = (evaluate(x, arithmetic_of(x)) for x in (replace(inputs, **tensors), inputs))
    for name in wanted.exact:
        np.testing.assert_allclose(found.exact[name], wanted.exact[name], rtol=1e-11, atol=1e-13)
        np.testing.assert_allclose(found.bound[name], wanted.bound[name], rtol=1e-9)


def test_huge_unseen_scores_shift_nothing() -> None:
    inputs = drawn_inputs(Pattern.dense(causal=True), 8)
    inputs.q[:, :7] *= 100
    inputs.q[:, 7] = 0.0
    inputs.k[:, 7] *= 1e20
    assert_twins_agree(inputs)


def test_nonpositive_softcaps_are_refused() -> None:
    inputs = drawn_inputs(PATTERNS["causal"], 4, softcap=0.0)
    with pytest.raises(ValueError, match="softcap is 0.0; it must be a finite number above 0"):
        evaluate(inputs, arithmetic_of(inputs))
