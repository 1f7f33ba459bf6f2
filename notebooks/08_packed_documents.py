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
# # Packed documents and the balance of work
#
# A batch is packed from documents of many lengths, and dense work grows with the square of a length. Which rank should
# hold which tokens? For several distributions of lengths and two patterns, this notebook compares five layouts by
#
# 1. the work of the busiest rank, as a multiple of the mean: the others wait for it,
# 2. the tokens of the fullest rank, likewise: memory goes by tokens,
# 3. the bytes that the busiest sender sends in a forward with `direct`.
#
# All numbers are exact counts by `reference.cost`, which shares no code with the ring or its layouts.

# %%
from textwrap import fill

import matplotlib.pyplot as plt
import numpy as np
from figures import style
from matplotlib.colors import Normalize

from reference import Pattern, cost
from ring import Layout

style()
TOKENS, RANKS, HEADS, KV_HEADS, DIM = 65_536, 8, 32, 8, 128


def packed(mean, spread, first=()):
    """Lengths of documents that fill the batch: log-normal, after the `first` ones."""
    drawn, left = list(first), TOKENS - sum(first)
    generator = np.random.default_rng(7)
    while left:
        length = max(1, int(generator.lognormal(np.log(mean) - spread**2 / 2, spread)))
        drawn.append(min(length, left))
        left -= drawn[-1]
    return tuple(drawn)


BATCHES = {
    "one document": (TOKENS,),
    "8 equal ones": (TOKENS // 8,) * 8,
    "mean 4 Ki, spread 1": packed(4096, 1.0),
    "mean 512, spread 1.5": packed(512, 1.5),
    "half in one, others of mean 512": packed(512, 1.0, (TOKENS // 2,)),
}
for name, lengths in BATCHES.items():
    print(f"{name:32} {len(lengths):4} documents, the longest of {max(lengths):6} tokens")


# %%
def layouts(pattern, lengths):
    return {
        "contiguous": Layout.contiguous(TOKENS, RANKS),
        "zigzag": Layout.zigzag(TOKENS, RANKS),
        "striped": Layout.striped(TOKENS, RANKS),
        "zigzag by document": Layout.zigzag(TOKENS, RANKS, documents=lengths),
        "balanced": Layout.balanced(pattern, TOKENS, RANKS, HEADS),
    }


def measured(pattern, layout):
    """(busiest rank / mean work, fullest rank / mean tokens, MiB of the busiest sender)."""
    held = [layout.positions(rank).numpy() for rank in range(RANKS)]
    setting = cost.Setting(pattern, held, 1, HEADS, KV_HEADS, DIM, itemsize=2)
    sends = cost.sent(setting, "direct").forward.sum(axis=1).max() / 2**20
    return cost.flops(setting).imbalance, max(layout.counts) * RANKS / TOKENS, float(sends)


PATTERNS = {
    "dense, causal": lambda lengths: Pattern.dense(True, documents=lengths),
    "LongNet, causal": lambda lengths: Pattern.longnet((2048, 8192, None), (1, 4, 16), HEADS, True, documents=lengths),
}
found = {}
for kind, made in PATTERNS.items():
    print(f"\n{kind}: work of the busiest rank / mean | tokens of the fullest / mean | MiB sent by the busiest")
    for name, lengths in BATCHES.items():
        pattern = made(lengths)
        for layout_name, layout in layouts(pattern, lengths).items():
            row = found[kind, name, layout_name] = measured(pattern, layout)
            print(f"  {name:32} {layout_name:19} {row[0]:6.2f} {row[1]:6.2f} {row[2]:8.1f}")

# %% [markdown]
# ## What the table says
#
# - Contiguous shards leave most ranks waiting for the one with the long document. Zigzag over the whole row balances
#   one document, and not several. Striped shards are even, but each rank needs nearly all keys.
# - Each document head and tail (as WLB-LLM shards per document, arXiv 2503.17924) is even for dense work, and divides
#   documents that would fit into one rank: every rank needs keys of every document.
# - `Layout.balanced` is within 5 % of even work in every row. Of the layouts that are, it sends the least, or at most
#   5 % more; for that it may give a rank up to a fifth more tokens than the mean.

# %%
for (kind, name, layout_name), (work, tokens, sends) in found.items():
    if layout_name == "balanced":
        assert work <= 1.05 and tokens <= 1.2, (kind, name, work, tokens)
        even = [row[2] for (k, b, other), row in found.items() if (k, b) == (kind, name) and row[0] <= 1.05]
        assert sends <= 1.05 * min(even), (kind, name, sends, even)
assert found["dense, causal", "mean 4 Ki, spread 1", "contiguous"][0] > 1.5

# %%
names = list(layouts(Pattern.dense(True), (TOKENS,)))
figure, panels = plt.subplots(2, 2, figsize=(11, 6.4), sharex=True, sharey=True)
for column, (what, form) in enumerate(
    (("work of the busiest rank / mean", ".2f"), ("MiB sent by the busiest rank", ".0f"))
):
    numbers = {k: np.array([[found[k, b, name][2 * column] for b in BATCHES] for name in names]) for k in PATTERNS}
    shade = Normalize(min(x.min() for x in numbers.values()), max(x.max() for x in numbers.values()))
    for panel, (kind, values) in zip(panels[:, column], numbers.items(), strict=True):
        panel.imshow(values, cmap="Blues", norm=shade, aspect="auto")
        for (y, x), value in np.ndenumerate(values):
            panel.text(x, y, f"{value:{form}}", ha="center", va="center", color="w" if shade(value) > 0.6 else "k")
        panel.set_title(f"{kind}: {what}")
        panel.set_yticks(range(len(names)), names)
        panel.set_xticks(range(len(BATCHES)), [fill(name, 12) for name in BATCHES])
        panel.grid(False)
plt.show()

# %% [markdown]
# ## Beside what has been published
#
# These are speed-ups of whole systems on their own data, not ratios of counts, so they set the scale only: WLB-LLM
# reports training 1.23 times as fast on average, from balanced packing and sharding by document; DCP (arXiv 2510.10620)
# attention 1.19 to 2.45 times as fast under causal masks, from placing blocks of data and computation anew for each
# batch. A rank that has 1.5 to 4 times the mean work, as in the rows above, explains gains of that size.
