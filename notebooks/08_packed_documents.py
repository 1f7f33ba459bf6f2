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
from matplotlib.colors import Normalize

from notebooks.figures import legend_below, record, recorded_rows, style
from reference import Pattern, cost
from ring import Layout
from ring.estimate import Rates, estimate

style()

# %% tags=["parameters"]
TOKENS = 65_536  # of the batch
RANKS = 8  # over which the batch, or a window, is shared
HEADS = 32  # of queries
KV_HEADS = 8  # of keys and values
DIM = 128  # of a head
SEGMENTS = (2048, 8192, None)  # tokens, of the branches of LongNet's pattern; None: the whole document
DILATIONS = (1, 4, 16)  # of these branches
SEED = 7  # of the lengths of documents
EVEN = 1.05  # work of the busiest rank / mean, at most, of a balanced layout; also its bytes / the least of even ones
FULL = 1.2  # tokens of its fullest rank / mean, at most
WINDOW = 131_072  # tokens of a window, for predicted gains
BATCHES_DRAWN = 8  # windows of each kind of data
MESSAGE = 1e-5  # seconds a message takes beyond its bytes
BETWEEN = 50e9 / 8  # bytes/s of a GPU between hosts
KERNEL_RECORD = "h200x2_dense"  # rates of kernels
LINK_RECORD = "h200x4_links"  # rates of links


# %%
def packed(mean, spread, first=()):
    """Lengths of documents that fill the batch: log-normal, after the `first` ones."""
    drawn, left = list(first), TOKENS - sum(first)
    generator = np.random.default_rng(SEED)
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
    "LongNet, causal": lambda lengths: Pattern.longnet(SEGMENTS, DILATIONS, HEADS, True, documents=lengths),
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
        assert work <= EVEN and tokens <= FULL, (kind, name, work, tokens)
        even = [row[2] for (k, b, other), row in found.items() if (k, b) == (kind, name) and row[0] <= EVEN]
        assert sends <= EVEN * min(even), (kind, name, sends, even)
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
# ## Gains on published lengths
#
# The claim: placing tokens by the mask makes attention 1.19 to 2.45 times as fast under causal masks and 2.15 to 3.77
# times under sparse ones (DCP, arXiv 2510.10620); balancing documents makes a training step 1.23 (WLB-LLM, arXiv
# 2503.17924) or up to 1.48 times as fast (Megatron's dynamic context parallelism). Those are whole systems on their own
# data. Here the time of a call, forward and backward, is predicted by `ring.estimate`, for windows of 128 Ki tokens on
# 8 GPUs, packed from lengths as published for three kinds of data:
#
# - **long instructions**: 8 to 64 Ki tokens (LongAlign-10k, arXiv 2401.18058, which DCP uses), log-uniform here.
# - **pages on repositories**: median 12,518 tokens, mean 22,227 (statistics of the data set archit11/deepwiki10),
#   log-normal here. Data of code, as ByteScale uses (arXiv 2502.21231), have such a tail.
# - **Wikipedia**: 82 % of the articles up to 1 Ki tokens, 0.02 % beyond 32 Ki (histogram of the data set
#   seonglae/wikipedia_token), log-uniform within a bin. Short texts with a few long ones are what WLB-LLM balances.
#
# Rates are those of the records of H200s: kernels of FlashAttention-4 (`h200x2_dense`), links (`h200x4_links`). A
# message takes 10 microseconds beyond its bytes, which is assumed. Between hosts 8 GPUs share 50 GB/s, as DCP's do.

# %%
BINS, SHARES = (32, 1024, 2048, 4096, 8192, 16384, 32768, 65536), (82.38, 10.74, 4.66, 1.64, 0.47, 0.07, 0.02)


def log_uniform(generator, low, high):
    return np.exp(generator.uniform(np.log(low), np.log(high)))


def wikipedia(generator):
    at = generator.choice(len(SHARES), p=np.array(SHARES) / sum(SHARES))
    return log_uniform(generator, BINS[at], BINS[at + 1])


DATA_SETS = {
    "long instructions": lambda g: log_uniform(g, 8192, 65536),
    "pages on repositories": lambda g: g.lognormal(np.log(12_518), (2 * np.log(22_227 / 12_518)) ** 0.5),
    "Wikipedia": wikipedia,
}
MASKS = {"causal": None, "window of 4095": 4095}
alone = {
    row["pass"]: row for row in recorded_rows(record=KERNEL_RECORD, method="kernels alone", tokens=32768, graph=True)
    if row["kernel"] == "fa4"
}  # fmt: skip
seconds = {name: row["ms"] / 1e3 for name, row in alone.items()}
flops = alone["forward"]["tflops"] * 1e12 * seconds["forward"]
forward, backward = flops / seconds["forward"], 2.5 * flops / (seconds["forward+backward"] - seconds["forward"])
link = max(entry["rate"] for entry in record(LINK_RECORD, ["links"])["links"] if entry["ways"] != 2) * 1e9
LINKS = {
    "one host": Rates(forward, backward, link, MESSAGE),
    "8 hosts": Rates(forward, backward, BETWEEN, MESSAGE),
}
print(f"kernels {forward / 1e12:.0f} and {backward / 1e12:.0f} TFLOP/s, link {link / 1e9:.0f} GB/s")


def filled(draw, generator):
    lengths, left = [], WINDOW
    while left:
        lengths.append(min(left, max(1, int(draw(generator)))))
        left -= lengths[-1]
    return tuple(lengths)


def call_seconds(pattern, layout, rates):
    (row,) = estimate(pattern, layout, heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, exchange="direct", rates=rates)
    return row.forward.seconds + row.backward.seconds, row.pairs * row.imbalance, row.forward.sent


times = {}
for kind, draw in DATA_SETS.items():
    generator = np.random.default_rng(SEED)
    for _ in range(BATCHES_DRAWN):
        documents = filled(draw, generator)
        for mask, window in MASKS.items():
            pattern = Pattern.dense(True, documents=documents, window=window)
            by_name = {
                "contiguous": Layout.contiguous(WINDOW, RANKS),
                "zigzag": Layout.zigzag(WINDOW, RANKS),
                "striped": Layout.striped(WINDOW, RANKS),
                "zigzag by document": Layout.zigzag(WINDOW, RANKS, documents=documents),
                "balanced": Layout.balanced(pattern, WINDOW, RANKS, HEADS),
            }
            for name, layout in by_name.items():
                for where, rates in LINKS.items():
                    row = call_seconds(pattern, layout, rates)
                    times.setdefault((where, mask, kind, name), []).append(row)
gains = {}
for where in LINKS:
    print(f"\n{where}: time / time of balanced, mean and range of {BATCHES_DRAWN} windows")
    for mask in MASKS:
        for kind in DATA_SETS:
            base = np.array(times[where, mask, kind, "balanced"])[:, 0]
            for name in names[:4]:
                gains[where, mask, kind, name] = np.array(times[where, mask, kind, name])[:, 0] / base
            row = (gains[where, mask, kind, name] for name in names[:4])
            text = "  ".join(
                f"{name} {x.mean():.2f} ({x.min():.2f}-{x.max():.2f})" for name, x in zip(names, row, strict=False)
            )
            print(f"  {mask:14} {kind:21} {text}")

# %%
figure, panels = plt.subplots(1, 2, figsize=(11, 3.9), sharey=True)
labels = [f"{kind}, {mask}" for mask in MASKS for kind in DATA_SETS]
at = np.arange(len(labels))
for panel, where in zip(panels, LINKS, strict=True):
    for shift, name in enumerate(names[:4]):
        several = [gains[where, mask, kind, name] for mask in MASKS for kind in DATA_SETS]
        panel.errorbar(
            [x.mean() for x in several], at + 0.15 * (shift - 1.5),
            xerr=[[x.mean() - x.min() for x in several], [x.max() - x.mean() for x in several]],
            fmt="o", label=name,
        )  # fmt: skip
    panel.axvline(1, color="k", linewidth=0.8)
    panel.set_xscale("log")
    panel.set_xlabel("time / time of the balanced layout (dots: mean; bars: range)")
panels[0].set_yticks(at, labels)
panels[0].invert_yaxis()
panels[0].set_title("One host: held for causal contiguous and zigzag shards")
panels[1].set_title("8 hosts: not held, since bytes decide")
legend_below(figure, panels[0])
plt.show()

ignoring = ("contiguous", "zigzag")
for kind in DATA_SETS:
    for name in ignoring:
        assert 1.19 < gains["one host", "causal", kind, name].mean() < 2.45
        assert gains["8 hosts", "causal", kind, name].mean() < 1, "even work that sends more is slower between hosts"
        assert gains["one host", "window of 4095", kind, name].mean() < 1.19
    by_document = gains["one host", "causal", kind, "zigzag by document"].mean()
    assert (by_document > 1.19) == (kind == "Wikipedia"), (kind, by_document)
    assert 1.19 < gains["one host", "window of 4095", kind, "zigzag by document"].mean() < 2.15

# %% [markdown]
# - **Causal masks, one host: held.** Against layouts that ignore documents the balanced one gains 1.56 to 2.24 on
#   average. Against heads and tails of each document it gains only where many documents are short: long ones have to be
#   divided in any case.
# - **Windows: not held.** A window makes work nearly even by itself, so that contiguous shards lose 6 to 10 %.
#   Dividing each document loses 1.2 to 1.5, for bytes that nobody would need.
# - **Between hosts: not held here.** `Layout.balanced` makes the work even first. On a link of a fortieth of the rate
#   the bytes decide, and contiguous shards take half the time. DCP weighs both; a layout that knows the link does not
#   exist here yet.
# - A single window may be slower balanced, as the ranges show: the gain is one of averages.
