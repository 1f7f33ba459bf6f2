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
# # Published claims on kernels and on chunks of heads
#
# 1. Attention kernels keep their rate on fused shards of any length (arXiv 2510.18121).
# 2. A backward with sums in a fixed order is up to 37.9 % slower (arXiv 2601.21824, on FlashAttention-3).
# 3. Attention on some heads at a time needs less memory at equal speed (UPipe, arXiv 2602.21196).
#
# The records are of `scripts/bench rates` and `scripts/bench attention`; the README of this folder has their commands.

# %%
import matplotlib.pyplot as plt

from notebooks.figures import BLACK, BLUE, GREEN, ORANGE, VERMILLION, binary, binary_ticks, legend_below, record, style

style()

# %% tags=["parameters"]
DOCUMENTS_RECORD = "claims/kernel_lengths"  # rates by length, of documents
SHARDS_RECORD = "claims/kernel_shards"  # the same of shards
OFF = 0.02  # relative difference of the results of two kernels, at most
ORDER_RECORD = "claims/kernel_order"  # backward in a fixed order of sums
ORDERED = (512, 2048, 8192, 32768)  # tokens of a sequence in its picture
CLAIMED = 0.379  # loss of rate in a fixed order, at most
HEADS_RECORD = "claims/heads_a_call"  # calls on some heads at a time
ALL_TO_ALL_RECORD = "claims/bucket_all_to_all"  # calls by bucket
DIRECT_RECORD = "claims/bucket_direct"  # the same with another exchange
ALL = 8  # key/value heads of these
SLOWER = 1.05  # time of calls on some heads / time of one on all, at most, to count as equally fast

# %%
NAMES = {"cudnn": "cuDNN", "flash": "FlashAttention-2", "fa4": "FlashAttention-4"}
PAINT = {"cudnn": GREEN, "flash": ORANGE, "fa4": BLUE}

# %% [markdown]
# ## 1. Rate by the length of sequences
#
# A call has many sequences of one length. Documents are causal; shards are queries that all see 4 Ki keys of their own,
# as a task of core attention does. A rate counts the pattern's operations alone. Mixed lengths are log-uniform from 64
# to 4096, in one call. Calls are timed in CUDA graphs. cuDNN's call for variable lengths, as torch has it, cannot be
# captured in one, so it is not timed.

# %%
rates = {}
for kind, name in (("documents", DOCUMENTS_RECORD), ("shards", SHARDS_RECORD)):
    run = record(name, ("device", "commit", "command", "rows"))
    print(f"{kind}: {run['device']} | {run['command']}")
    failed = {(NAMES[row["kernel"]], row["error"]) for row in run["rows"] if "error" in row}
    print("".join(f"  {name}, all lengths: {error}\n" for name, error in failed), end="")
    for row in run["rows"]:
        if "error" in row:
            assert row["kernel"] == "cudnn"
            continue
        assert row["off"] < OFF, ("16-bit results of two kernels differ by more than roundings", row)
        rates[kind, row["kernel"], row["pass"], row["length"]] = row["tflops"]
LENGTHS = sorted({key[3] for key in rates if key[3]})
print(f"\nTFLOP/s by length {LENGTHS}, then of mixed lengths")
for kind in ("documents", "shards"):
    for kernel in NAMES:
        for passed in ("forward", "backward"):
            several = [rates.get((kind, kernel, passed, length)) for length in (*LENGTHS, None)]
            text = " ".join(f"{rate:4.0f}" if rate else "   -" for rate in several)
            print(f"  {kind:9} {NAMES[kernel]:16} {passed:8} {text}")

# %%
TITLES = {
    ("documents", "forward"): "Documents, forward: not held",
    ("documents", "backward"): "Documents, backward: not held",
    ("shards", "forward"): "Shards, forward: held from 128 queries on",
    ("shards", "backward"): "Shards, backward: not held below 1 Ki",
}
figure, panels = plt.subplots(2, 2, figsize=(10, 6), sharex=True, sharey=True)
for line, kind in zip(panels, ("documents", "shards"), strict=True):
    for axes, passed in zip(line, ("forward", "backward"), strict=True):
        for kernel, name in NAMES.items():
            at = [length for length in LENGTHS if (kind, kernel, passed, length) in rates]
            if at:
                axes.plot(at, [rates[kind, kernel, passed, x] for x in at], "o-", color=PAINT[kernel], label=name)
        axes.set_title(TITLES[kind, passed])
        binary_ticks(axes.xaxis)
for axes in panels[:, 0]:
    axes.set_ylabel("TFLOP/s")
for axes in panels[1]:
    axes.set_xlabel("tokens of a document, or queries of a shard")
legend_below(figure, panels[0, 1])
plt.show()

kept = {key: rate / rates[*key[:3], LENGTHS[-1]] for key, rate in rates.items()}
for kernel in ("flash", "fa4"):
    assert all(kept["shards", kernel, "forward", x] > 0.95 for x in LENGTHS if x % 128 == 0 and x >= 128)
    assert all(kept["shards", kernel, "backward", x] > 0.85 for x in LENGTHS if x >= 1000)
    assert kept["shards", kernel, "backward", 128] < 0.55
    assert all(kept["documents", kernel, passed, 512] < 0.55 for passed in ("forward", "backward"))
print(
    "share of the rate at 4 Ki: "
    + ", ".join(
        f"{NAMES[kernel]} {kind} of 128 {passed} {kept[kind, kernel, passed, 128]:.2f}"
        for kernel in ("flash", "fa4") for kind in ("documents", "shards") for passed in ("forward", "backward")
    )
)  # fmt: skip

# %% [markdown]
# **Holds only of a forward on shards with a long context.** There both kernels keep 95 % of their rate from 128 queries
# on, in multiples of a tile; FlashAttention-2 falls to 75 % at 192, between two tiles. A backward keeps a third to a
# half at 128 queries. One reading: it writes gradients of as many keys for few queries as for many. Short documents
# lose more, since tiles of 128 rows and columns are partly empty: at 512 tokens the rate is below 55 %. Mixed lengths
# run at the rate of the longer ones, which have most of the work.

# %% [markdown]
# ## 2. The cost of a fixed order
#
# Under `torch.use_deterministic_algorithms`. Repetitions show whether the bits of the gradients are those of the first
# call.

# %%
run = record(ORDER_RECORD, ("device", "commit", "command", "rows"))
print(run["device"], "|", run["command"])
order = {}
for row in run["rows"]:
    what = row["kind"], row["causal"], row["length"]
    if "error" in row:
        print(f"  {NAMES[row['kernel']]} {what} refused: {row['error']}")
    else:
        order[row["kernel"], *what, row["fixed_order"]] = row
slower = {}
for (kernel, *what, fixed), row in order.items():
    if fixed and (kernel, *what, False) in order:
        free = order[kernel, *what, False]
        slower[kernel, *what] = 1 - free["ms"] / row["ms"]
        mask = "causal" if what[1] else "full"
        times = f"{free['ms']:7.3f} ms, fixed {row['ms']:7.3f} ms"
        print(
            f"  {NAMES[kernel]:16} {what[0]:9} {mask:6} {what[2]!s:>5}: {times}, "
            f"rate {-slower[kernel, *what]:+.1%}; same bits {free['repeats']} and {row['repeats']} of 4"
        )


# %%
figure, panels = plt.subplots(1, 2, figsize=(9.5, 3.4), sharey=True)
for axes, causal in zip(panels, (True, False), strict=True):
    for kernel in ("flash", "fa4"):
        several = [100 * slower[kernel, "batch", causal, length] for length in ORDERED]
        axes.plot(ORDERED, several, "o-", color=PAINT[kernel], label=NAMES[kernel])
    axes.axhline(100 * CLAIMED, color=BLACK, linestyle=":", label="claimed, at most")
    axes.set_title(f"{'Causal' if causal else 'Full'}: held of FlashAttention-2 at 32 Ki")
    axes.set_xlabel("tokens of a sequence; 32 Ki in all")
    binary_ticks(axes.xaxis)
panels[0].set_ylabel("loss of rate (%)")
legend_below(figure, panels[0])
plt.show()
for (kernel, *what, fixed), row in order.items():
    if kernel != "cudnn":
        assert row["repeats"] == (4 if fixed else 0), (kernel, what, "fixed: the same bits; else never")
worst = {kernel: max(x for (name, *_), x in slower.items() if name == kernel) for kernel in ("flash", "fa4")}
print(f"largest loss of rate: FlashAttention-2 {worst['flash']:.1%}, FlashAttention-4 {worst['fa4']:.1%}")
assert CLAIMED < worst["flash"] < 0.5 and worst["fa4"] < 0.2
assert any(row["repeats"] < 4 for (kernel, *_, fixed), row in order.items() if kernel == "cudnn" and fixed)
assert all(abs(x) < 0.02 for (kernel, *_), x in slower.items() if kernel == "cudnn"), "the switch has no effect on it"

# %% [markdown]
# **Held, by kernel.** FlashAttention-2 loses up to 42 %, on one sequence of 32 Ki tokens; on many short ones a few
# percent. FlashAttention-4 loses 2 to 18 %, most on short sequences, and is faster in a fixed order than
# FlashAttention-2 in any. On cuDNN the switch has no effect when its operation is called directly: times and bits
# vary as before, so it has no fixed order through torch. (torch's own attention does not choose it then.)

# %% [markdown]
# ## 3. Some heads at a time
#
# Dense causal attention of 32 query and 8 key/value heads of 128, on 2 GPUs of 64 Ki tokens each, forward and backward.
# Peaks are those of torch's allocator in a call, without inputs and results. Heads are taken in two ways: a call of
# `ring_attention` on some heads, whose inputs are tensors of their own, as UPipe's projections make them; and
# `bucket`, which cuts the heads of one call into stages, and the keys of a kernel call too.

# %%
TRAINED = "forward+backward"
chunks = {}
run = record(HEADS_RECORD, ("device", "command", "rows"))
print(run["device"], "|", run["command"])
for row in run["rows"]:
    if row.get("pass") == TRAINED and row["method"].startswith("ring_attention") and "peak_bytes" in row:
        chunks[row.get("heads_a_call", ALL)] = row["ms"], row["peak_bytes"]
for heads, (ms, peak) in sorted(chunks.items()):
    print(f"  {heads} key/value heads a call: {ms:7.1f} ms, peak {binary(peak, 'B')}")
buckets = {}
for exchange, name in (("all-to-all", ALL_TO_ALL_RECORD), ("direct", DIRECT_RECORD)):
    run = record(name, ("device", "command", "rows"))
    print(run["device"], "|", run["command"])
    for row in run["rows"]:
        if row.get("pass") == TRAINED and row["method"] == "ring_attention":
            buckets[exchange, row["bucket"]] = row["ms"], row["peak_bytes"], row["closed_form_bytes"]
for (exchange, bucket), (ms, peak, counted) in sorted(buckets.items()):
    print(
        f"  {exchange:10} bucket {binary(bucket):>6}: {ms:7.1f} ms, peak {binary(peak, 'B')}, "
        f"closed form {binary(counted, 'B')}"
    )

# %%
figure, axes = plt.subplots(figsize=(6.6, 4))
whole_ms, whole_peak = chunks[ALL]
for name, points, colour, above in (
    ("heads a call", chunks, BLUE, 4),
    ("all-to-all by bucket", {b: x for (e, b), x in buckets.items() if e == "all-to-all"}, ORANGE, 4),
    ("direct by bucket", {b: x for (e, b), x in buckets.items() if e == "direct"}, VERMILLION, -9),
):
    at = sorted(points)
    axes.plot([points[x][1] / 2**30 for x in at], [points[x][0] for x in at], "o-", color=colour, label=name)
    for x in at:
        axes.annotate(
            binary(x), (points[x][1] / 2**30, points[x][0]), fontsize=7, xytext=(3, above), textcoords="offset points"
        )
axes.set(
    xlabel="peak of a call (GiB)",
    ylabel="forward + backward (ms)",
    title=f"Held: an eighth of the heads, {chunks[1][1] / whole_peak:.2f} of the memory, "
    f"{chunks[1][0] / whole_ms - 1:.0%} slower",
)
axes.legend()
plt.show()
for heads in (1, 2, 4):
    assert chunks[heads][0] < SLOWER * whole_ms, "equal speed"
print(f"1 of 8 heads: peak {chunks[1][1] / whole_peak:.3f} of that of all, time {chunks[1][0] / whole_ms:.3f}")
assert chunks[4][1] / whole_peak < 0.51 and chunks[2][1] / whole_peak < 0.26 and chunks[1][1] / whole_peak < 0.2
smallest = buckets["all-to-all", 16 * 2**10]
assert chunks[1][1] < smallest[1] and chunks[1][0] < smallest[0], "a bucket cuts kernel calls too"

# %% [markdown]
# **Held.** Calls on 4 and on 2 of 8 key/value heads need a half and a quarter of the memory, at 1 % more time. One head
# needs 0.18, not an eighth: its query heads lie on both ranks, so its gradients travel in fp32. `bucket` saves less at
# the same time: it also cuts the keys of a kernel call, whose partial results on GPUs are kept until they are merged.
# That is why small buckets of `direct` need more memory, not less.
