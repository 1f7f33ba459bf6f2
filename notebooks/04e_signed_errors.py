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
# # Signed errors at tied maxima: a published claim
#
# The claim (arXiv 2510.04212): if several keys share a row's maximum and most values have one sign, attention in bf16
# is wrong in one direction, and such errors add up over a training. Its mechanism, in units in the last place (ulp):
#
# - The weights of tied keys, exp(score - maximum), are exactly 1. With two of them the sum of products is $v_1 + v_2$,
#   which has one bit more than bf16 keeps. In half of the entries it lies in the middle between two bf16 numbers.
# - The other keys add a little of the same sign. So each of these middles is rounded in the same direction, by half an
#   ulp: a quarter of an ulp on average.
#
# Everything is in bf16 here that is in the paper: weights and the sum of products before it is divided by the sum of
# weights. Beside it stand the paper's remedy, a reference larger than the maximum, and the ring on simulated ranks,
# which divides in fp32 and rounds once.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch

from notebooks.figures import BLACK, BLUE, GREEN, VERMILLION, legend_below, style
from ring import Layout, Pattern, ring_attention
from verification.run.simulation.simulation import Simulation

torch.set_num_threads(1)
style()

# %% tags=["parameters"]
ROWS = 1024  # of queries, each with keys and values of its own
TOKENS = 32  # keys of a row
DIM = 32  # of a head
RANKS = 4  # simulated
TIED = (3, 20)  # keys of two shards
GAPS = (5, 6, 7, 8, 9, 10, 11, 12, 13)  # between the maximum and the other scores
SEED = 0  # of the random signs and values

# %% [markdown]
# Scores are exact: a query is a multiple of a vector $u$ of signs, tied keys are $u$, and the others differ from $u$ in
# half of their signs. Values of tied keys are normal numbers of bf16 between -2 and -1. Those of the others are drawn
# alike, or with half the size.


# %%
def drawn(gap: float, size: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q (ROWS, 1, 1, DIM), k and v (ROWS, TOKENS, 1, DIM) in bf16. size: of the other keys' values."""
    generator = torch.Generator().manual_seed(SEED)
    u = 1.0 - 2 * torch.randint(2, (ROWS, 1, DIM), generator=generator)
    flips = torch.rand(ROWS, TOKENS, DIM, generator=generator).argsort(-1) < DIM // 2
    flips[:, TIED] = False
    k = torch.where(flips, -u, u)
    v = -1 - torch.rand(ROWS, TOKENS, DIM, generator=generator)
    v[:, [i for i in range(TOKENS) if i not in TIED]] *= size
    return tuple(x.unsqueeze(2).bfloat16() for x in (gap / DIM * u, k, v))


def in_bf16(q, k, v, factor=1.0):
    """Attention as in the paper; factor: of the maximum that is subtracted, 1, or more as its remedy."""
    scores = torch.einsum("rqhd,rkhd->rqk", q.float(), k.float())
    weights = (scores - factor * scores.amax(-1, keepdim=True)).exp().bfloat16().float()
    products = torch.einsum("rqk,rkhd->rqhd", weights, v.float()).bfloat16()
    return (products.float() / weights.sum(-1)[..., None, None]).bfloat16()


def by_the_ring(q, k, v):
    """The same rows on RANKS simulated ranks, of which the last has the query, and each a part of the keys."""
    rows, keys = Layout.contiguous(1, RANKS), Layout.contiguous(TOKENS, RANKS)

    def attend(transport):
        own, theirs = rows.positions(transport.rank), keys.positions(transport.rank)
        return ring_attention(
            q[:, own], k[:, theirs], v[:, theirs], Pattern.dense(), rows, key_layout=keys, group=transport, scale=1.0
        )

    return torch.cat(Simulation(RANKS, seed=1).run(attend), 1)


def exact(q, k, v):
    weights = torch.softmax(torch.einsum("rqhd,rkhd->rqk", q.double(), k.double()), -1)
    return torch.einsum("rqk,rkhd->rqhd", weights, v.double())


WAYS = {
    "bf16, as in the paper": in_bf16,
    "its remedy: twice the maximum": lambda *tensors: in_bf16(*tensors, factor=2.0),
    "ring on 4 ranks: fp32, rounded once": by_the_ring,
}
PAINT = dict(zip(WAYS, (VERMILLION, GREEN, BLUE), strict=True))
ULP = 2.0**-7  # of bf16 numbers from 1 to 2


def bias(size: float) -> dict[str, list[tuple[float, float]]]:
    """Return by way and gap the mean signed error of magnitudes in ulp, and its standard error."""
    found = {name: [] for name in WAYS}
    for gap in GAPS:
        q, k, v = drawn(gap, size)
        wanted = exact(q, k, v)
        for name, way in WAYS.items():
            errors = ((wanted - way(q, k, v).double()) / ULP).flatten()  # outputs are negative
            found[name].append((float(errors.mean()), float(errors.std() / len(errors) ** 0.5)))
        once = wanted.bfloat16()
        same = float((by_the_ring(q, k, v) == once).double().mean())
        assert same > 0.99, "the ring rounds the exact result once"
    return found


biases = {"alike": bias(1.0), "half as large": bias(0.5)}
for values, found in biases.items():
    for name, by_gap in found.items():
        print(f"others' values {values:14} {name:36} " + " ".join(f"{mean:+.3f}" for mean, _ in by_gap))
errors_of_mean = max(error for found in biases.values() for by_gap in found.values() for _, error in by_gap)
print(f"mean signed error in ulp by gap {GAPS[0]} to {GAPS[-1]}; standard errors up to {errors_of_mean:.4f}")

# %% [markdown]
# Positive is away from zero. Let the other keys move the exact output by $d$ ulp towards zero: 0 if their values are
# alike, more if they are smaller. By the mechanism the mean error is $1/4 + d$ as long as their part of the sum of
# products is less than half an ulp. Rounding the exact output once also meets middles between two numbers, and there it
# follows $d$: the mean is $-1/4 + d$ if $d$ is small but not 0.

# %%
figure, both = plt.subplots(1, 2, figsize=(9.5, 3.7), sharey=True)
gaps = np.array(GAPS, float)
small = 1.5 * (TOKENS - len(TIED)) * np.exp(-gaps) / (2 * ULP) < 0.5
d = {"alike": 0 * gaps, "half as large": 0.75 * (TOKENS - len(TIED)) * np.exp(-gaps) / 2 / ULP}
for axes, (values, found) in zip(both, biases.items(), strict=True):
    for name, by_gap in found.items():
        means, spread = np.array(by_gap).T
        axes.errorbar(gaps, means, 2 * spread, fmt="o-", color=PAINT[name], label=name)
    axes.plot(gaps[small], 0.25 + d[values][small], "--", color=BLACK, label="1/4 + d")
    axes.axhline(0, color=BLACK, linewidth=0.6)
    axes.set_xlabel("tied scores are larger than the others by")
both[1].plot(gaps[small], -0.25 + d["half as large"][small], ":", color=BLACK)
both[0].set(title="Held: biased in bf16, not with fp32 accumulators", ylabel="mean signed error (ulp)")
both[1].set_title("Holds of fp32, too, if the others' values are smaller")
legend_below(figure, both[0])
plt.show()

bf16, remedy, ring = WAYS
for values, found in biases.items():
    means = {name: np.array(by_gap)[:, 0] for name, by_gap in found.items()}
    assert np.allclose(means[bf16][small], 0.25 + d[values][small], atol=0.01)
    # A common weight of at least two significant bits leaves two bits to drop: at most a quarter are middles.
    assert (np.abs(means[remedy]) < 1 / 8).all()
    if values == "alike":
        assert (np.abs(means[ring]) < 5 * errors_of_mean).all()
    else:
        assert np.allclose(means[ring][small], -0.25 + d[values][small], atol=0.01)
for name in (bf16, ring):
    means = (round(biases[values][name][-1][0], 2) + 0.0 for values in biases)
    print(f"{name}: {' and '.join(f'{mean:+.2f}' for mean in means)} ulp")

# %% [markdown]
# The claim holds: with tied maxima the error in bf16 is a quarter of an ulp in one direction on average, however many
# rows there are. An fp32 accumulator that divides before it rounds has no such error if all values are alike. It does
# not help against the last rounding: where other keys pull all outputs slightly to one side, the exact outputs lie
# beside the middles, and any output in bf16 is biased by as much, in the other direction. The remedy leaves less than
# half.
