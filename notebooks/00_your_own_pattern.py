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
# # Your own pattern: in a picture, a table and a prediction
#
# Change the cell of parameters and run all cells. Or `pip install papermill` beside Jupyter, and in any folder
# `papermill PATH/00_your_own_pattern.ipynb mine.ipynb -y "{TOKENS: 65536, ORDER: zigzag}"`, with the path of this one.
# `papermill --help-notebook 00_your_own_pattern.ipynb` lists the parameters. Nothing here needs a GPU.

# %%
import csv
import math
import sys
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import torch
from IPython.display import HTML

from notebooks.figures import COLOURS, binary, binary_ticks, legend_below, power_law, style, sum_of
from notebooks.own_pattern import first_tokens, several
from notebooks.simulated_ranks import PLAIN, errors
from ring import Pattern
from ring.balance import work
from ring.estimate import Rates, estimate, timeline
from ring.estimate.estimates import layout_of

torch.set_num_threads(1)
style()

# %% tags=["parameters"]
HEADS = 8  # of queries
KV_HEADS = 4  # of keys and values
HEAD_DIM = 64  # of all of these
SEGMENTS = [2048, 16384, None]  # of the branches of LongNet's kind of pattern; None: the whole sequence
DILATIONS = [1, 4, 64]  # of these branches
CAUSAL = True  # a query sees no later key
PATTERN = None  # or any other Pattern, or what its `to_dict()` returns: with windows, documents, branches of some heads
TOKENS = 2**18  # of the sequence; with documents, theirs
RANKS = 8  # in the pictures
ORDER = "contiguous"  # or "zigzag", "striped", "hilbert", "balanced", "zigzag by document"
EXCHANGE = "ring"  # or "direct", "gather", "all-to-all"
FORWARD_RATE = 600e12  # FLOP/s of your kernels, for times
BACKWARD_RATE = 450e12  # the same in the backward
LINK_RATE = 200e9  # bytes/s that a rank sends and receives
LATENCY = 1e-5  # seconds a message takes beyond its bytes
CHECKED_TOKENS = 192  # of the calls whose rounding errors are measured
CHECKED_TYPES = ("float32", "bfloat16")  # of these calls

# %% [markdown]
# This cell checks them: parameters that cannot be end in it, with the error of the library.

# %%
longnet = Pattern.longnet(SEGMENTS, DILATIONS, HEADS, CAUSAL)
pattern = longnet if PATTERN is None else PATTERN if isinstance(PATTERN, Pattern) else Pattern.from_dict(PATTERN)
tokens = TOKENS if pattern.documents is None else sum(pattern.documents)
rates = Rates(FORWARD_RATE, BACKWARD_RATE, LINK_RATE, LATENCY)
sizes = dict(heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, exchange=EXCHANGE)
estimate(pattern, tokens=tokens, ranks=[RANKS], order=ORDER, rates=rates, **sizes)
short = first_tokens(pattern, CHECKED_TOKENS)
checked = CHECKED_TOKENS if short.documents is None else sum(short.documents)
plain = replace(
    PLAIN, tokens=checked, pattern=short, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, exchange=EXCHANGE,
    order="contiguous" if ORDER == "balanced" else ORDER,
)  # fmt: skip
WORLDS = (1, 2, 4, 8)
cases = {(t, ranks): replace(plain, world=ranks, dtype=t) for t in CHECKED_TYPES for ranks in WORLDS}

# %% [markdown]
# ## The picture
#
# Queries go down, keys across. A cell is a mean over its tokens and, in the first field, over all heads.

# %%
pattern.picture(tokens, HEADS)

# %% [markdown]
# Masks of other kinds, to give as `PATTERN`: a prefix, images beside a window, frames of a video, first tokens that all
# see, and a prompt with two answers ([ring/MASKS.md](../ring/MASKS.md)).

# %%
kinds = (
    Pattern.prefix(20), Pattern.spans([(8, 20), (28, 44)], window=7), Pattern.frames([12] * 4),
    Pattern.first_tokens(4, window=9), Pattern.tree([None, 0, 0], [18, 16, 14]),
)  # fmt: skip
HTML(
    "".join(kind.picture(tokens=48).svg.replace("<svg ", '<svg style="width: 19%; height: auto" ', 1) for kind in kinds)
)

# %% [markdown]
# Who holds what: a row for each rank.

# %%
layout = layout_of(pattern, tokens, RANKS, ORDER)
layout.picture(pattern.documents)

# %% [markdown]
# When kernels run and messages are in flight, forward and backward, as predicted with the rates above. A stage ends
# when its kernels and its messages have; where an orange bar is longer than the blue one, the rank waits.

# %%
timeline(pattern, layout, rates=rates, **sizes)

# %%
timeline(pattern, layout, rates=rates, backward=True, **sizes)

# %% [markdown]
# ## The cost
#
# On the rank with most of each. Bytes, messages and operations are exact; times are those of the model of
# `ring.estimate.stages`.

# %%
pairs = int(work(pattern, tokens, HEADS).sum())
dense = HEADS * tokens * (tokens + 1) // 2 if pattern.causal else HEADS * tokens**2
print(f"{pairs:,} (head, query, key) pairs, {pairs / dense:.2%} of dense attention's")
cost = estimate(pattern, tokens=tokens, ranks=WORLDS, order=ORDER, rates=rates, **sizes)
assert all(math.isclose(row.pairs / row.imbalance * row.ranks, pairs, rel_tol=1e-12) for row in cost if pairs)
print(cost.to_table())

# %% [markdown]
# ## Scaling
#
# Sequences 1, 2, 4 and 8 times as long (with documents: so many copies of them), on 1 to 8 ranks. If a rank holds
# $O(n/p)$, all points of the left figure lie on one line, whatever $p$. The fit is $M = A\,n/p + B\,n + C$, by least
# squares: $A$ is divided among the ranks, every rank holds $B$ for each token of the whole sequence. Counts have no
# noise: an interval says how well the formula fits.

# %%
scaled = []
for times in (1, 2, 4, 8):
    scaled += estimate(several(pattern, times), tokens=times * tokens, ranks=WORLDS, order=ORDER, rates=rates, **sizes)
n, p = (np.array([getattr(row, name) for row in scaled], float) for name in ("tokens", "ranks"))
memory, flops, sent = (
    np.array([getattr(row.backward, name) for row in scaled], float) for name in ("memory", "flops", "sent")
)
fit = sum_of({"A": n / p, "B": n, "C": np.ones_like(n)}, memory)
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(10.5, 3.4))
for ranks, colour, mark in zip(WORLDS, COLOURS, "os^D", strict=False):
    at = p == ranks
    style_of = dict(marker=mark, color=colour, label=f"{ranks} rank{'s' * (ranks > 1)}", fillstyle="none")
    left.loglog(n[at] / ranks, memory[at] / 2**20, linestyle="", **style_of)
    middle.loglog(n[at], flops[at] / 1e9, **style_of)
    if ranks > 1:
        right.plot(n[at], sent[at] / 2**20, **style_of)
line = np.geomspace((n / p).min(), (n / p).max())
left.loglog(line, fit.coefficients[0] * line / 2**20, "-", color="0.6", zorder=0, label="A n/p")
left.set(title="Memory of a rank", xlabel="tokens of a rank, n/p", ylabel="MiB, backward")
middle.set(title="Work of the busiest rank", xlabel="sequence length n (tokens)", ylabel="GFLOP, backward")
right.set(title="Sent by the busiest rank", xlabel="sequence length n (tokens)", ylabel="MiB, backward")
for axes in (left, middle, right):
    binary_ticks(axes.xaxis)
right.set_ylim(0)
legend_below(figure, left)
plt.show()
print(f"memory of a rank, bytes = A n/p + B n + C: {fit}")
for ranks in WORLDS:
    print(f"{ranks} ranks: memory as n to the {power_law(n[p == ranks], memory[p == ranks])}")
by_ranks = power_law(p[n == n.max()], memory[n == n.max()])
print(f"{binary(n.max(), ' tokens')}: memory as p to the {by_ranks}")
assert all(row.shards >= scaled[i - 1].shards / 2 for i, row in enumerate(scaled) if row.ranks > 1)

# %% [markdown]
# ## Rounding errors beside their bounds
#
# 1 to 8 simulated ranks compute the first tokens of the sequence, forward and backward, with this pattern, exchange and
# order (contiguous in place of `balanced`). Every entry is compared with the fp64 oracle; an assertion checks each
# against its own derived bound. Dots are the largest error, lines the largest bound.

# %%
found = {setting: errors(case) for setting, case in cases.items()}
names = ("out", "lse", "dq", "dk", "dv")
figure, panels = plt.subplots(1, len(CHECKED_TYPES), figsize=(4.8 * len(CHECKED_TYPES), 3.4), squeeze=False)
for axes, dtype in zip(panels[0], CHECKED_TYPES, strict=True):
    for name, colour in zip(names, COLOURS, strict=False):
        error, bound = (np.array([found[dtype, ranks][name][i] for ranks in WORLDS]) for i in (0, 1))
        axes.plot(WORLDS, np.where(error > 0, error, np.nan), "o", color=colour, label=name)  # 0 has no logarithm
        axes.plot(WORLDS, np.where(bound > 0, bound, np.nan), "-", color=colour, alpha=0.6)
    axes.set(title=f"{dtype}, {checked} tokens", xlabel="ranks p", ylabel="largest error; lines: bound")
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(WORLDS, [str(ranks) for ranks in WORLDS])
    axes.minorticks_off()
legend_below(figure, panels[0, 0])
plt.show()

# %% [markdown]
# ## The table
#
# In CSV, to take away; `cost.to_json()` has every field of the prediction.

# %%
table = csv.writer(sys.stdout, lineterminator="\n")
table.writerow(
    ["tokens", "ranks", "memory MiB", "sent MiB", "messages", "imbalance", "forward ms", "backward ms",
     *(f"{dtype} error/bound" for dtype in CHECKED_TYPES)]
)  # fmt: skip
for row in cost:
    worst = [max(ratio for _, _, ratio in found[dtype, row.ranks].values()) for dtype in CHECKED_TYPES]
    assert max(worst) <= 1
    back = row.backward
    table.writerow(
        [row.tokens, row.ranks, f"{back.memory / 2**20:.4g}", f"{back.sent / 2**20:.4g}", back.messages,
         f"{row.imbalance:.3f}", f"{1e3 * row.forward.seconds:.4g}", f"{1e3 * back.seconds:.4g}",
         *(f"{ratio:.3f}" for ratio in worst)]
    )  # fmt: skip
