# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     notebook_metadata_filter: kernelspec,jupytext,-all
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Gradients with the mixture's weights attached and detached
#
# LongNet mixes branches by their shares of the softmax denominator. torchscale treats these shares as constants in
# backward (detached); this project differentiates them (attached), so that the result is the gradient of the function
# that is computed. $dV$ is the same: only $dS$ differs, since it uses the $D_b$ of each branch instead of the $D$ of
# the whole. Finite differences of the oracle show which one is the gradient.

# %%
import matplotlib.pyplot as plt
import torch

from notebooks.figures import BLACK, BLUE, GREEN, PURPLE, VERMILLION, style
from reference import Pattern, attention, gradients

torch.set_num_threads(1)
style()

# %% tags=["parameters"]
TOKENS = 64  # of the sequence
HEADS = 2  # of queries, keys and values
HEAD_DIM = 16  # of these
COUNTS = (1, 2, 3, 4, 5)  # branches of a pattern
SIZES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # factors on the queries
STEP = 1e-5  # of the finite difference
SEED = 3  # of the tensors
DIRECTION_SEED = 4  # of the direction of the finite difference


# %%
def branches(count: int) -> Pattern:
    return Pattern.longnet([TOKENS // 2**k for k in range(count)], [1] * count, HEADS, causal=True)


def tensors(factor: float) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(SEED)
    q, k, v, dout = (torch.randn(1, TOKENS, HEADS, HEAD_DIM, generator=draw, dtype=torch.float64) for _ in range(4))
    return q * factor, k, v, dout


def difference(pattern: Pattern, factor: float) -> tuple[float, float]:
    """Detaching the weights: the relative change of dq, and the cosine between the two dq."""
    q, k, v, dout = tensors(factor)
    attached, detached = (gradients(q, k, v, pattern, dout, weights=w) for w in ("attached", "detached"))
    assert torch.allclose(attached[2], detached[2], rtol=1e-12, atol=1e-14), "dv"
    a, d = attached[0].flatten(), detached[0].flatten()
    return float((a - d).norm() / a.norm()), float(a @ d / (a.norm() * d.norm()))


# Finite differences, along one random direction of q.
q, k, v, dout = tensors(1.0)
pattern = branches(3)
direction = torch.randn(q.shape, generator=torch.Generator().manual_seed(DIRECTION_SEED), dtype=torch.float64)
up, down = ((attention(q + sign * STEP * direction, k, v, pattern)[0] * dout).sum() for sign in (1, -1))
slope = float((up - down) / (2 * STEP))
along = {
    w: float((gradients(q, k, v, pattern, dout, weights=w)[0] * direction).sum()) for w in ("attached", "detached")
}
print(
    f"derivative along a direction: finite difference {slope:.8f}, "
    + ", ".join(f"{w} {x:.8f}" for w, x in along.items())
)
assert abs(along["attached"] - slope) < 1e-7 * abs(slope) < abs(along["detached"] - slope)

by_count = {(c, f): difference(branches(c), f) for c in COUNTS for f in SIZES}
figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.5))
for c, colour in zip(COUNTS, (BLACK, BLUE, VERMILLION, GREEN, PURPLE), strict=True):
    left.semilogx(
        SIZES, [by_count[c, f][0] * 100 for f in SIZES], "o-", color=colour, label=f"{c} branch{'es' if c > 1 else ''}"
    )
    right.semilogx(SIZES, [by_count[c, f][1] for f in SIZES], "o-", color=colour)
sizes = [by_count[c, f][0] for c in COUNTS[1:] for f in SIZES]
left.set(
    title=f"Detaching changes dq by {min(sizes):.0%} to {max(sizes):.0%}",
    xlabel="factor on the queries",
    ylabel="|attached - detached| / |attached| (%)",
)
right.set(title="and changes its direction", xlabel="factor on the queries", ylabel="cosine between the two")
for axes in (left, right):
    axes.set_xticks(SIZES, [f"{f:g}" for f in SIZES])
    axes.minorticks_off()
left.legend(fontsize=7)
plt.show()
assert all(by_count[1, f][0] < 1e-12 for f in SIZES), "with one branch there is nothing to detach"
assert min(sizes) > 0.03 and all(by_count[c, f][1] < 0.9995 for c in COUNTS[1:] for f in SIZES)
assert all(by_count[c, 1.0][0] < by_count[c + 1, 1.0][0] for c in COUNTS[:-1]), "more with every branch"
print("three branches, factor 1: dq differs by {:.0%}, cosine {:.3f}".format(*by_count[3, 1.0]))

# %% [markdown]
# The output and the gradient of the values are the same either way. A model trained with detached weights follows a
# direction that differs from the gradient of what it computes. With a single branch there is no difference.
