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
# # Memory on GPUs: recorded peaks beside the closed form
#
# The peak that PyTorch's allocator reported beyond inputs and outputs, on the fullest GPU, beside the closed form for
# the same call (accumulators and buffers). All numbers come from the records in `notebooks/data/`.

# %%
from itertools import product

import matplotlib.pyplot as plt

from notebooks.figures import BLACK, COLOURS, binary, binary_ticks, recorded_rows, style

style()

# %% tags=["parameters"]
SECTIONS = ("dense", "longnet")  # of the records
SHORTEST = 2**13  # tokens a GPU: shorter calls repeat as CUDA graphs, with memory allocated before the peak is measured
EXCHANGES = ("ring", "direct", "gather")  # for which records are looked for
WORLDS = (2, 4, 8)  # GPUs for which they are
GROWTH = 1.02  # at most, of the bytes per token from a shard to a longer one, where the closed form has less
SPREAD = 1.05  # at most, of the bytes per token of the longest shards over numbers of GPUs

# %%
MIB = 2**20
gpu = [row for row in recorded_rows(method="ring_attention")
       if row.get("peak_bytes") and row["section"] in SECTIONS and row["tokens"] >= SHORTEST]  # fmt: skip
assert gpu, (
    "no record in notebooks/data has peaks; scripts/bench attention --json makes one, without --graph or beside it"
)
for row in gpu:
    print(
        f"{row['section']:8} {row['world']} GPUs, {binary(row['tokens']):>6} tokens each, {row['exchange']}, "
        f"{row['pass']:16}: "
        f"{row['peak_bytes'] / MIB:7.0f} MiB, closed form {row['closed_form_bytes'] / MIB:7.0f}, "
        f"ratio {row['peak_bytes'] / row['closed_form_bytes']:.2f}"
    )

# %%
PASSES = sorted({row["pass"] for row in gpu})
figure, panels = plt.subplots(len(SECTIONS), len(PASSES), figsize=(9.5, 6), sharex="row", sharey="row", squeeze=False)
series = sorted({(row["exchange"], row["world"]) for row in gpu})
for (section, name), axes in zip(product(SECTIONS, PASSES), panels.flat, strict=True):
    for (exchange, world), colour in zip(series, COLOURS, strict=False):
        chosen = [row for row in gpu if (row["section"], row["pass"]) == (section, name)]
        rows = [row for row in chosen if (row["exchange"], row["world"]) == (exchange, world)]
        rows.sort(key=lambda row: row["tokens"])
        x = [row["tokens"] for row in rows]
        axes.loglog(x, [row["peak_bytes"] / MIB for row in rows], "o", color=colour)
        axes.loglog(x, [row["closed_form_bytes"] / MIB for row in rows], "--", marker="_", color=colour, alpha=0.7)
        each = [(row["peak_bytes"] / row["tokens"], row["closed_form_bytes"] / row["tokens"]) for row in rows]
        assert all(
            late < max(GROWTH * early, form) for (early, _), (late, form) in zip(each, each[1:], strict=False)
        ), "a longer shard takes no more per token, or less than the closed form"
    axes.set(title=f"{section}, {name}", xlabel="tokens per GPU", ylabel="peak beyond in- and outputs (MiB)")
    binary_ticks(axes.xaxis)
for (exchange, world), colour in zip(series, COLOURS, strict=False):
    panels[0, 0].plot([], [], "o", color=colour, label=f"{exchange}, {world} GPU{'s' if world > 1 else ''}")
panels[0, 0].plot([], [], "--", marker="_", color=BLACK, label="closed form")
figure.legend(loc="outside lower center", ncols=len(series) + 1)
plt.show()
ratios = [row["peak_bytes"] / row["closed_form_bytes"] for row in gpu]
print(
    f"peak / closed form: {min(ratios):.2f} to {max(ratios):.2f}; above 1 in {sum(r > 1 for r in ratios)} of {len(gpu)}"
)

there = {(row["section"], row["exchange"], row["world"]) for row in gpu}
wanted = {(s, e, w) for s in SECTIONS for e in EXCHANGES for w in WORLDS}
lacking = sorted(wanted - there)
print(
    f"\nnot recorded yet ({len(lacking)} of {len(wanted)}):", "; ".join(f"{s} {e} on {w} GPUs" for s, e, w in lacking)
)

# %% [markdown]
# The closed form counts what the algorithm needs; the allocator's peak differs from it on GPUs. Forward takes less,
# since partial results stay in 16 bits until one pass combines them, and there is no fp32 accumulator. It takes least
# if one call covers the shard and its result becomes the output, as for LongNet at 128 Ki tokens, but not at 512 Ki.
# Backward may take more: a fused kernel allocates memory of its own, fp32 for dq and 16 bits for dk and dv of every
# query head. If that would exceed 1 GiB, the kernel is called for groups of heads, so long shards stay below the closed
# form. They also take least per token, since the buffers do not grow beyond the bucket of 64 Ki tokens.

# %% [markdown]
# The longest shards for which forward and backward succeeded, doubled from 128 Ki tokens on; these peaks are all that
# the allocator held, inputs and outputs included. The record says what ended each series: for dense attention the time
# limit, for LongNet the GPU's 140 GiB. A shard of a given length takes the same memory on any number of ranks: at a
# fixed length of the sequence, the memory of a rank falls as $1/p$.

# %%
longest: dict[str, list[dict]] = {}
for row in recorded_rows(section="reach"):
    longest.setdefault(row["pattern"], []).append(row)
    print(
        f"{row['pattern']:8} {row['world']} GPUs: {binary(row['tokens']):>6} tokens each, {binary(row['total']):>6} in "
        f"all, {row['seconds']:5.1f} s, {row['peak_bytes'] / 2**30:5.1f} GiB; {row['stopped'][7:30]}..."
    )
assert longest, "no record in notebooks/data has the section reach: scripts/bench attention --section reach makes one"
for name, rows in longest.items():
    peaks = {row["world"]: row["peak_bytes"] / row["tokens"] for row in rows}
    print(f"{name}: bytes per token, the most over the least: {max(peaks.values()) / min(peaks.values()):.3f}")
    assert len(peaks) < 2 or max(peaks.values()) < SPREAD * min(peaks.values())
