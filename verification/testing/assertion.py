"""An assertion on the results of an attention, in the manner of `torch.testing.assert_close`, with derived bounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from reference import roundoff, validators
from reference.fast_oracle import Expectation, Inputs, evaluate
from reference.pattern import Pattern
from reference.roundoff import LARGEST, Arithmetic, Counts

NARROW = ("float16", "bfloat16")
AXES = dict.fromkeys(("out", "dq", "dk", "dv"), "(batch, tokens, heads, head_dim)") | {
    "lse": "(batch, heads, tokens)",
    "dsinks": "(heads,)",
}


def assert_attention(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, *, lse: Tensor | None = None,
    grads: Sequence[Tensor] | None = None, dout: Tensor | None = None, dlse: Tensor | None = None,
    scale: float | None = None, rows: Tensor | None = None, partials: int = 1, arithmetic: str = "math",
    sinks: Tensor | None = None, softcap: float | None = None,
) -> None:  # fmt: skip
    """Assert that results are those of exact attention within the bounds of a correct implementation.

    Nothing is sampled, and no tolerance is chosen: `reference.roundoff` derives the bound of each entry.

    Args:
        out: (B, Nq, Hq, Dv), of the dtype of q.
        q, k, v: (B, Nq, Hq, D), (B, N, Hk, D), (B, N, Hk, Dv), tokens before heads; fp64, fp32, bf16 or fp16.
        pattern: the mask, over the positions 0 .. N - 1 of the keys.
        lse: (B, Hq, Nq), natural logarithm; -inf for a row that sees nothing. None: not compared.
        grads: dq, dk, dv, like q, k, v, and with sinks dsinks; None: not compared.
        dout: gradient of out, for grads.
        dlse: gradient of lse, (B, Hq, Nq); None: zero.
        scale: factor on q . k; None: D ** -0.5.
        rows: (Nq,) ascending positions of the queries; None: Nq = N.
        partials: how many partial results at most are merged into a row, as one for each rank of a ring.
        arithmetic: "math" computes in fp32 (fp64 for fp64) and rounds once at the end; "flash" does so with a coarser
            exponential; "half" and "gpu", for 16-bit inputs, round probabilities and partial results to 16 bits, as
            fused kernels on CPUs and GPUs do.
        sinks: (Hq,), fp64, fp32, bf16 or fp16: scores of one more key of value 0, for each head; -inf: none. None: none
            at all.
        softcap: t, for scores t tanh(score / t); None: none.

    Raises:
        ValueError: an argument of a wrong kind, named.
        AssertionError: the first result that is wrong, with the worst entry, its error and its bound.
    """
    dtype = str(q.dtype).removeprefix("torch.")
    validators.choice("dtype of q", dtype, tuple(LARGEST))
    validators.choice("arithmetic", arithmetic, roundoff.KERNELS if dtype in NARROW else ("math", "flash"))
    inputs_of_grads = {"dq": q, "dk": k, "dv": v} | ({} if sinks is None else {"dsinks": sinks})
    if grads is not None and (dout is None or len(grads) != len(inputs_of_grads)):
        given = "dout is None" if dout is None else f"grads has {len(grads)} entries"
        names = ", ".join(inputs_of_grads)
        raise ValueError(f"{given}; grads must be {names}, and dout the gradient of out, like out")
    validators.integer("partials", partials, 1)
    _check_inputs(q, k, v, rows, dout, dlse, sinks)
    heads, kv_heads, dim, tokens = q.shape[2], k.shape[2], q.shape[3], k.shape[1]
    validators.grouped_heads(heads, kv_heads)
    pattern.validate(heads)
    scale = dim**-0.5 if scale is None else scale
    keys, pairs = roundoff.max_pairs(pattern, tokens, heads, kv_heads)
    merges = min(keys, partials), min(pairs, partials * (heads // kv_heads))
    blocks = (1, 2) if arithmetic == "gpu" else roundoff.max_call_blocks(tokens)
    sinks_dtype = None if sinks is None else str(sinks.dtype).removeprefix("torch.")
    counts = Counts(keys, pairs, *merges, *blocks)
    bounds = Arithmetic.of(dtype, arithmetic, dim, scale, counts, sinks=sinks_dtype)
    zeros = q.new_zeros(*q.shape[:3], v.shape[3])
    inputs = Inputs(
        _fp64(q), _fp64(k), _fp64(v), _fp64(zeros if dout is None else dout),
        None if dlse is None else _fp64(dlse), pattern, scale, None if rows is None else rows.cpu().numpy(),
        sinks=None if sinks is None else _fp64(sinks), softcap=softcap,
    )  # fmt: skip
    expectation = evaluate(inputs, bounds)
    results: dict[str, tuple[Tensor | None, torch.dtype]] = {
        "out": (out, q.dtype),
        "lse": (lse, torch.float64 if dtype == "float64" else torch.float32),
    }
    for (name, like), grad in zip(inputs_of_grads.items(), grads or (), strict=False):  # none, or all of them
        results[name] = grad, like.dtype
    for name, (result, of_dtype) in results.items():
        if result is not None:
            _assert_result(name, result, of_dtype, expectation)


def _check_inputs(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None, dout: Tensor | None, dlse: Tensor | None, sinks: Tensor | None
) -> None:
    """Raise ValueError for inputs that do not fit each other, or are not finite."""
    if q.dim() != 4:
        raise ValueError(f"q has shape {tuple(q.shape)}; it must be (batch, tokens, heads, head_dim)")
    (batch, queries, heads, dim), tokens = q.shape, k.shape[1] if k.dim() == 4 else 0
    if k.dim() != 4 or (k.shape[0], k.shape[3]) != (batch, dim):
        raise ValueError(f"k has shape {tuple(k.shape)}; it must be ({batch}, tokens, key/value heads, {dim}), like q")
    value_dim = v.shape[-1]
    shapes: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "v": (v, (*k.shape[:3], value_dim)), "dout": (dout, (*q.shape[:3], value_dim)),
        "dlse": (dlse, (batch, heads, queries)), "sinks": (sinks, (heads,)),
    }  # fmt: skip
    for name, (x, shape) in shapes.items():
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {tuple(shape)}")
    if rows is None and queries != tokens:
        raise ValueError(
            f"rows is None, q has {queries} tokens and k has {tokens}; rows must be the positions of the queries, or "
            "both have as many tokens, before the heads"
        )
    if rows is not None:
        positions = rows.tolist()
        ascending = rows.dim() == 1 and positions == sorted(set(positions)) and len(positions) == queries
        if not ascending or not all(validators.is_integer(x) and 0 <= x < tokens for x in positions):
            raise ValueError(f"rows is {positions}; it must be {queries} ascending positions from 0 to {tokens - 1}")
    for name, x in {"q": q, "k": k, "v": v, "dout": dout, "dlse": dlse}.items():
        if name in "kv" and x is not None and x.dtype != q.dtype:
            raise ValueError(f"{name} is {x.dtype}; it must be {q.dtype}, like q")
        if x is not None and not bool(x.isfinite().all()):
            raise ValueError(f"{name} is not finite; exact attention is defined for finite numbers only")
    if sinks is not None and (
        str(sinks.dtype).removeprefix("torch.") not in LARGEST or not bool((sinks < torch.inf).all())
    ):
        raise ValueError(f"sinks are {sinks}; they must be floating-point numbers, finite or -inf")


def _assert_result(name: str, result: Tensor, dtype: torch.dtype, expectation: Expectation) -> None:
    exact, bound = expectation.exact[name], expectation.bound[name]
    if tuple(result.shape) != exact.shape:
        raise AssertionError(f"{name} has shape {tuple(result.shape)}; it must be {exact.shape}, {AXES[name]}")
    if result.dtype != dtype:
        raise AssertionError(f"{name} is {result.dtype}; it must be {dtype}")
    actual = _fp64(result)
    with np.errstate(invalid="ignore"):
        error = np.where(actual == exact, 0.0, np.abs(actual - exact))
    largest = LARGEST[str(dtype).removeprefix("torch.")]
    with np.errstate(invalid="ignore"):
        overflows = np.isinf(actual) & np.isfinite(exact) & (np.abs(exact) + bound > largest)
    wrong = ~((error <= bound) | overflows | np.isinf(bound))  # an infinite bound guarantees nothing
    if wrong.any():
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(wrong, np.nan_to_num(error / bound, nan=np.inf, posinf=np.inf), -1.0)
        where = tuple(int(i) for i in np.unravel_index(int(ratio.argmax()), ratio.shape))
        axes = {1: ("head",), 3: ("batch", "head", "token"), 4: ("batch", "token", "head", "dim")}[len(where)]
        place = ", ".join(f"{axis} {index}" for axis, index in zip(axes, where, strict=True))
        raise AssertionError(
            f"{name} is {actual[where]} at {place}, expected {exact[where]}: error {error[where]:.3g} is "
            f"{ratio[where]:.3g} times its bound {bound[where]:.3g}; {int(wrong.sum())} of {wrong.size} entries "
            "exceed theirs"
        )


def _fp64(x: Tensor) -> np.ndarray:
    return x.detach().double().cpu().numpy()
