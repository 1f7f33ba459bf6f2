"""Which kernel a call on a CPU takes, by what is documented of `kernel`, and how `picked_kernels` counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch

from ring import Branch, Layout, Pattern, picked_kernels, ring_attention
from ring.comm.transport import SoloTransport
from verification.case import Case

VECTOR = 16  # keys: of fewer the fused kernel of CPUs takes none
CALLS = 12
SCALES = (None, None, 0.5, 1e-3, 0, 0.0, -0.0, -1.0)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def looked_at(case: Case) -> tuple[Iterator[str], ...]:
    """What is wrong, by what was looked at."""
    rng = np.random.default_rng(case.seed)
    return _counters(), _counters_of_a_failure(), (word for _ in range(CALLS) for word in _choice(rng))


def _choice(rng: np.random.Generator) -> Iterator[str]:
    """Of a call of one tile: the fused kernel takes it where it can; but no gradient through lse. The segments of a
    tile, folds of it, have their keys each for themselves.
    """
    scale = SCALES[rng.integers(len(SCALES))]
    kernel = ("auto", "flash", "math")[rng.integers(3)]
    dtype = DTYPES[rng.integers(len(DTYPES))]
    keys, folds = int(rng.integers(1, (VECTOR, 3 * VECTOR)[rng.integers(2)])), int(rng.integers(1, 4))
    heads, kv_heads = ((1, 1), (4, 2), (3, 1))[rng.integers(3)]
    through_lse = kernel != "flash" and not rng.integers(4)  # which is refused with a fused kernel by name
    q, k, v = (
        torch.from_numpy(rng.standard_normal((1, keys * folds, n, 8))).to(dtype).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    )
    pattern = Pattern((Branch(keys),), causal=bool(rng.integers(2)))
    with picked_kernels() as picked:
        found = ring_attention(
            q, k, v, pattern, Layout.contiguous(keys * folds, 1), group=SoloTransport(), kernel=kernel, scale=scale,
            return_lse=through_lse,
        )  # fmt: skip
        results = found if isinstance(found, tuple) else (found,)
        gradients = torch.autograd.grad([x.sum() for x in results], (q, k, v))
    fused = kernel != "math" and (scale is None or scale > 0) and keys >= VECTOR
    wanted = Counter(("flash" if fused else "math", "flash" if fused and not through_lse else "math"))
    about = (
        f"kernel {kernel!r}, scale {scale}, {folds} times {keys} keys of {heads} and {kv_heads} heads, {dtype}"
        + ", through lse" * through_lse
    )
    if picked != wanted:
        yield f"forward and backward take {dict(picked)}, must take {dict(wanted)}: {about}"
    if not all(bool(x.isfinite().all()) for x in (*results, *gradients)):
        yield f"of finite inputs something comes that is not finite: {about}"


def _counters() -> Iterator[str]:
    """Blocks within each other count alike."""
    x = torch.ones(1, 2, 1, 1)
    with picked_kernels() as outer:
        with picked_kernels():
            pass
        ring_attention(x, x, x, Pattern.dense(), Layout.contiguous(2, 1), group=SoloTransport())
    if not outer:
        yield "picked_kernels counts nothing any more after an inner block has ended"
    x.requires_grad_()
    with picked_kernels() as both:
        with picked_kernels() as there:
            out = ring_attention(x, x, x, Pattern.dense(), Layout.contiguous(2, 1), group=SoloTransport())
        with picked_kernels() as back:
            torch.autograd.grad(out, x, torch.ones_like(out))  # type: ignore[arg-type]
    if there != back or both != there + back:
        yield f"a forward takes {dict(there)}, its backward {dict(back)}, and both take {dict(both)}"


def _counters_of_a_failure() -> Iterator[str]:
    """A block that an error ends counts no more, and by name are only those kernels that took a tile."""
    x, counts = torch.ones(1, 64, 1, 8), []
    try:
        with picked_kernels() as ended:
            counts.append(ended)
            raise KeyError
    except KeyError:
        pass
    for kernel in ("math", "flash"):
        with picked_kernels() as count:
            ring_attention(x, x, x, Pattern.dense(), Layout.contiguous(64, 1), group=SoloTransport(), kernel=kernel)
        if dict(count) != {kernel: 1}:
            yield f"a call by kernel {kernel!r} of one tile takes {dict(count)}"
        counts.append(count)
    if [sum(count.values()) for count in counts] != [0, 1, 1]:
        yield f"picked_kernels goes on when its block has ended: {counts}, of 0, 1 and 1 calls"
