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
# # When does computing hide a message?
#
# A prediction from recorded kernel times, beside what GPUs took; `03a_traffic_and_balance` has the counts of bytes.
#
# A rank computes on the rows that it has received while the next message is in flight. With the kernel's rate $F$
# (FLOP/s) and the link's rate $B$ (byte/s), computing hides a hop if the message takes no longer than the computation:
# $\text{bytes}/B \le \text{FLOPs}/F$. Dense causal attention in zigzag order does $2 D H L^2$ FLOPs at each hop and
# receives about $2 \cdot \tfrac34 L H_k D\, b$ bytes, so that
#
# $$ L \ge \frac34\, b\, \frac{H_k}{H} \cdot \frac{F}{B} . $$
#
# So the number of tokens *per rank* decides, for any number of ranks. First a check of the records: the bytes that a
# recorded call sent must equal today's counts, with gradients in fp32 or, as `direct` returns them between GPUs, in the
# working type.

# %%
import sys
import time

import matplotlib.pyplot as plt
import numpy as np
import torch

from notebooks.figures import (
    BLACK,
    BLUE,
    DATA,
    ORANGE,
    VERMILLION,
    binary,
    binary_ticks,
    power_law,
    record,
    recorded_rows,
    style,
)  # fmt: skip
from reference import cost
from verification.problems import links
from verification.run.processes.pool import Pool

sys.path.append(str(DATA.parents[1] / "scripts"))
from bench.workload import AttentionShape, Workload

torch.set_num_threads(1)
style()

# %% tags=["parameters"]
EXCHANGES = ("ring", "direct", "gather")  # of the recorded calls
WORLDS = (2, 4, 8)  # GPUs for which their records are looked for
LINK_RECORD = "h200x4_links"  # rates of the links
DENSE_RECORD = "h200x4_dense"  # whose forward passes are compared with the formula
PICTURED = "h200x4"  # beginning of the names of the records in the right picture
SPARSE_RATE = 20e9  # bytes/s: LongNet's shards need less
SPARSE_ADDED = 0.05  # of the time of a call: messages add less to LongNet's
HERE_BYTES = 2**22  # of a message between two processes of this machine
HERE_TOKENS = 1024  # of its kernel call

# %%
timed = [r for r in recorded_rows(method="ring_attention")
         if r.get("sent_bytes") is not None and "ms" in r and r["exchange"] in EXCHANGES]  # fmt: skip
assert timed, "no record in notebooks/data has times of ring_attention: scripts/bench attention --json makes one"
forms = set()
for row in timed:
    one = AttentionShape(kv=row["kv_heads"])
    make, rest = {
        "dense": (Workload.dense, ()), "longnet": (Workload.longnet, ()),
        "packed": (Workload.packed, (row.get("mean_length"), row.get("multiple", 1))),
        "window": (Workload.windowed, (row.get("window"),)),
    }[row["section"]]  # fmt: skip
    problem = make(row["tokens"], row["world"], one, *rest)
    counted = {}
    for narrow in (True, False):
        traffic = cost.sent(problem.setting, row["exchange"], narrow)
        counted[narrow] = int((traffic.forward + (0 if row["pass"] == "forward" else traffic.backward)).sum(1).max())
    assert row["sent_bytes"] in counted.values(), (row["record"], row["tokens"], row["sent_bytes"], counted)
    if row["pass"] != "forward" and counted[True] != counted[False]:
        forms.add((row["record"], "bf16" if row["sent_bytes"] == counted[True] else "fp32"))
print(f"{len(timed)} rows: the bytes of the busiest rank equal the counts")
for name, form in sorted(forms):
    print(f"  {name} (commit {record(name, ['commit'])['commit'][:7]}): gradients travelled in {form}")

# %% [markdown]
# Kernels are timed by themselves ("kernels alone": the calls of one rank, without exchange and merge). The rate of the
# links is that of a record of `scripts/validate_nccl.py --json` (its field `links`). Without such a record the calls
# give a lower bound, since all their bytes arrived within their time: $B \ge \text{bytes} / \text{time}$.

# %%
MADE_BY = "torchrun --nproc-per-node=4 scripts/validate_nccl.py --json FILE"
if (DATA / f"{LINK_RECORD}.json").exists():
    measured_links = record(LINK_RECORD, ["links"], MADE_BY)["links"]
    rate = max(entry["rate"] for entry in measured_links if entry["ways"] != 2) * 1e9
    print(f"link, measured: {rate / 1e9:.0f} GB/s one way")
else:
    measured_links, rate = None, max(row["sent_bytes"] / row["ms"] * 1e3 for row in timed)
    print(f"not recorded yet: notebooks/data/{LINK_RECORD}.json, made by: {MADE_BY}")
    print(f"link: at least {rate / 1e9:.0f} GB/s, from the calls themselves")

print(f"\n{'problem':>42}  {'kernels':>8} {'ours':>8} {'exposed':>8}  needs     predicted")
hidden = []
for row in timed:
    p = row["world"]
    if p == 1 or not row.get("kernels_alone_ms") or row.get("exposed_ms") is None:
        continue
    # Bytes of one of p - 1 messages, sent during one of p parts of the computation.
    needs = row["sent_bytes"] / (p - 1) / (row["kernels_alone_ms"] / p) * 1e3
    which = row["pass"].replace("forward+backward", "both") + (", graph" if row["graph"] else "")
    name = f"{p} GPUs, {row['section']} {binary(row['tokens'])}, {which}"
    verdict = "hidden" if needs <= rate else "unknown" if measured_links is None else "exposed"
    hidden.append((row, needs, verdict))
    print(
        f"{name:>42}  {row['kernels_alone_ms']:8.2f} {row['ms']:8.2f} {row['exposed_ms']:8.2f}  "
        f"{needs / 1e9:5.1f} GB/s {verdict}"
    )

# %% [markdown]
# The rate that a problem needs falls with its length, as in the formula: FLOPs grow as $L^2$, bytes as $L$.

# %%
dense_rows = sorted(
    (row["tokens"], needs) for row, needs, _ in hidden
    if (row["record"], row["section"], row["pass"], row["graph"]) == (DENSE_RECORD, "dense", "forward", True)
)  # fmt: skip
assert len(dense_rows) >= 3, f"the record {DENSE_RECORD} has forward passes of three lengths, captured"
fit = power_law(*zip(*dense_rows, strict=True))
print("needed rate by tokens per GPU:", fit)
assert fit.low < -1 < fit.high

alone = max(
    (r for r in recorded_rows(method="kernels alone", section="dense") if r["pass"] == "forward"),
    key=lambda r: r["tokens"],
)
speed = alone["tflops"] * 1e12
bytes_per_token = 2 * 0.75 * 8 * 128 * 2
predicted = bytes_per_token / (2 * 128 * 32) * speed  # L B, tokens byte/s
for tokens, needs in dense_rows:
    print(
        f"  {binary(tokens):>6} tokens: needs {needs / 1e9:6.1f} GB/s, by the formula {predicted / tokens / 1e9:6.1f}"
    )
    assert 0.5 < needs / (predicted / tokens) < 2, (
        "the formula takes one kernel rate for all lengths, and the mean of all ranks"
    )

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2))
rates = np.geomspace(1, 1000, 50)
left.loglog(rates, predicted / (rates * 1e9), color=BLUE, label="forward, kernel rate of the record")
for tokens, needs in dense_rows:
    left.plot(
        needs / 1e9, tokens, "o", color=VERMILLION, label="recorded lengths" if tokens == dense_rows[0][0] else None
    )
left.axvline(
    rate / 1e9,
    color=BLACK,
    linestyle=":" if measured_links is None else "-",
    label="link, measured" if measured_links else "link, at least",
)
left.set(
    title="Dense: above the line, computing hides the hops", xlabel="link rate per GPU (GB/s)", ylabel="tokens per GPU"
)
binary_ticks(left.yaxis)
left.legend(fontsize=8)
graphs = [(row, verdict) for row, _, verdict in hidden if row["graph"] and row["record"].startswith(PICTURED)]
labels = [f"{r['section']} {binary(r['tokens'])}, {r['pass'].replace('forward+backward', 'both')}" for r, _ in graphs]
at = np.arange(len(graphs))
added = [r["exposed_ms"] / r["ms"] * 100 for r, _ in graphs]
right.barh(at - 0.2, added, 0.38, color=BLUE, label="recorded: what messages add")
worst = [max(0.0, r["sent_bytes"] / rate * 1e3) / r["ms"] * 100 for r, _ in graphs]
right.barh(
    at + 0.2, worst, 0.38, color=ORANGE, label="if nothing were hidden" + ("" if measured_links else ", at most")
)
right.set_yticks(at, labels)
right.invert_yaxis()
right.set(title="Time that messages add, and could add at most", xlabel="% of the call's time")
right.legend(fontsize=8, loc="lower right")
plt.show()
spread = max(
    1 - silent["ms"] / kernels["ms"]
    for kernels in recorded_rows(method="kernels alone")
    for silent in recorded_rows(method="ring_attention without messages")
    if "ms" in kernels and "ms" in silent
    and all(kernels[x] == silent[x] for x in ("record", "section", "tokens", "pass", "graph"))
)  # fmt: skip
print(f"spread of the timings: a call that does more than the kernels alone was up to {spread:.1%} faster")
assert spread > 0
for row, _, verdict in hidden:
    if (row["section"], row["graph"], row["record"]) == ("dense", True, DENSE_RECORD) and row["tokens"] >= 8192:
        unhidden = row["sent_bytes"] / rate * 1e3
        print(
            f"dense {binary(row['tokens'])}, {row['pass']}, {row['exchange']}: predicted {verdict}; messages add "
            f"{row['exposed_ms']:.2f} ms, unhidden they would take {unhidden:.2f} ms"
        )
        assert verdict == "hidden", "predicted of every pass"
        if row["pass"] == "forward" and row["tokens"] == 8192:
            assert row["exposed_ms"] < unhidden, "held"
        if row["pass"] != "forward":
            assert row["exposed_ms"] > unhidden, "not held: what messages slow down is more than their own time"

# %% [markdown]
# From 8 Ki tokens a GPU on, the prediction is that computing hides the messages of both passes. The records bear it out
# for the forward at 8 Ki alone. Forward and backward together take longer by more than the messages would take if
# nothing were hidden. The record does not show the cause: copies share the memory with the kernels, the clock depends
# on the power, and the timings vary by some percent, since calls that do more work than the kernels alone sometimes
# took less time.
#
# LongNet's shards send a few MiB during milliseconds of computing, which any link can do. Messages add less than 5 % of
# the time of its captured calls. (Calls that are not captured also wait for the host.)

# %%
sparse_rows = [(row, needs) for row, needs, _ in hidden if row["section"] == "longnet" and row["graph"]]
for row, needs in sparse_rows:
    assert needs < SPARSE_RATE and row["exposed_ms"] < SPARSE_ADDED * row["ms"]
assert sparse_rows, "the record h200x4_longnet has captured calls"
print(
    f"{len(sparse_rows)} recorded LongNet rows, captured: each needs less than {SPARSE_RATE / 1e9:.0f} GB/s, "
    f"and messages add less than {100 * SPARSE_ADDED:.0f} % of its time"
)
lacking = [
    f"{e} on {w} GPUs"
    for e in EXCHANGES
    for w in WORLDS
    if not any(r["exchange"] == e and r["world"] == w for r in timed)
]
print("not recorded yet:", ", ".join(lacking) or "nothing")

# %% [markdown]
# ## The same for this machine
#
# Two processes, connected by gloo; the fused CPU kernel on one thread. The formula is the same, and only the ratio of
# the two rates matters. (Other programs may be using this machine, so nothing is asserted of these times.)

# %%
with Pool(2, timeout=60, preload=("torch", "ring", "verification.run.rank", "verification.problems.links")) as pool:
    here = links.check_transfers(HERE_BYTES, pool.run(links.transfers, HERE_BYTES))
slow_link = max(found.rate for found in here if found.ways == 1) * 1e9
q = torch.randn(1, 4, HERE_TOKENS, 64)
spent = []
for _ in range(4):
    started = time.perf_counter()
    torch.nn.functional.scaled_dot_product_attention(q, q, q)
    spent.append(time.perf_counter() - started)
slow_kernel = 4 * 4 * HERE_TOKENS**2 * 64 / min(spent)
threshold = 0.75 * 4 * slow_kernel / slow_link  # fp32, as many key/value heads as query heads
print(
    f"gloo {slow_link / 1e9:.2f} GB/s, kernel {slow_kernel / 1e9:.0f} GFLOP/s in fp32: "
    f"computing hides hops from {threshold:.0f} tokens a rank on"
)
