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
# # Many hosts: a projection
#
# One sequence over hosts of 8 GPUs, ranks in order, with 32 Ki tokens a GPU for dense attention and 128 Ki for LongNet,
# at the recorded kernel rates. The links between hosts were not measured: the figure shows the rate that they *must*
# have, which is all bytes that leave a host in forward, over the time that the kernels take.
#
# With `NOTEBOOKS_LONG=1` in the environment, counts are made for longer sequences.

# %%
import os
from functools import cache

import matplotlib.pyplot as plt
import numpy as np
from figures import BLUE, VERMILLION, recorded_rows, style

from reference import Pattern, cost
from reference import shards as definitions

LONG = os.environ.get("NOTEBOOKS_LONG") == "1"
style()

# %%
HOST = 8
SCALE = 16 if LONG else 64  # counts are made for so many times fewer tokens and shorter segments


def leaving(matrix: np.ndarray) -> int:
    """Bytes that leave the busiest host."""
    hosts = np.arange(len(matrix)) // HOST
    return max(int(matrix[np.ix_(hosts == h, hosts != h)].sum()) for h in range(hosts[-1] + 1))


@cache
def many(kind: str, p: int) -> cost.Setting:
    if kind == "dense":
        held = definitions.shards("zigzag", 32 * 2**10 // SCALE * p, p, None).positions
        return cost.Setting(Pattern.dense(causal=True), held, 1, 32, 8, 128, 2)
    local = 128 * 2**10 // SCALE
    lengths = [2**11 // SCALE * 4**k for k in range(12) if 2**11 // SCALE * 4**k <= local * p]
    pattern = Pattern.longnet(lengths, [4**k for k in range(len(lengths))], 32, causal=True)
    return cost.Setting(pattern, definitions.shards("contiguous", local * p, p, None).positions, 1, 32, 32, 128, 2)


alone = [row for row in recorded_rows(method="kernels alone") if row["pass"] == "forward"]
dense_alone = max((row for row in alone if row["section"] == "dense"), key=lambda row: row["tokens"])
sparse_alone = next(row for row in alone if row["section"] == "longnet")
rates_of = {"dense": dense_alone["tflops"] * 1e12, "LongNet": sparse_alone["tflops"] * 1e12}
HOSTS = (2, 4, 8)
need = {}
for kind in rates_of:
    for hosts in HOSTS:
        one = many(kind, HOST * hosts)
        work = max(cost.flops(one).forward) * SCALE**2  # pairs grow with the square
        for exchange in ("ring", "direct"):
            need[kind, exchange, hosts] = leaving(cost.sent(one, exchange).forward) * SCALE / (work / rates_of[kind])

figure, axes = plt.subplots(figsize=(6.5, 3.6))
for (kind, line), colour in zip((("dense", "-"), ("LongNet", "--")), (BLUE, VERMILLION), strict=True):
    for exchange, mark in (("ring", "o"), ("direct", "s")):
        axes.loglog(
            [HOST * h for h in HOSTS],
            [need[kind, exchange, h] / 1e9 for h in HOSTS],
            mark + line,
            color=colour,
            label=f"{kind}, {exchange}",
        )
ratio = {h: need["dense", "direct", h] / need["dense", "ring", h] for h in HOSTS}
axes.set(
    title=f"Between hosts, dense, 64 GPUs: direct needs {ratio[8]:.1f} times the rate of ring",
    xlabel="GPUs",
    ylabel="needed out of a host (GB/s)",
)
axes.set_xticks([HOST * h for h in HOSTS], [str(HOST * h) for h in HOSTS])
axes.set_ylim(1, 200)
axes.minorticks_off()
axes.legend()
plt.show()
for key, value in need.items():
    print(f"{key[0]:8} {key[1]:7} {HOST * key[2]:3} GPUs: {value / 1e9:7.2f} GB/s out of each host")
assert ratio[8] > ratio[4] > ratio[2] > 4
assert need["dense", "ring", 8] < 1.1 * need["dense", "ring", 2], (
    "with ring, the rate does not grow with the number of hosts"
)
assert need["LongNet", "ring", 8] < need["LongNet", "direct", 8]
# Scaling the counts is legitimate: half the scale gives the same rates.
if not LONG:
    p, kept = HOST * 2, SCALE
    for kind in rates_of:
        before = (
            leaving(cost.sent(many(kind, p), "ring").forward)
            * kept
            / (max(cost.flops(many(kind, p)).forward) * kept**2)
        )
        many.cache_clear()
        SCALE = kept // 2
        after = (
            leaving(cost.sent(many(kind, p), "ring").forward)
            * SCALE
            / (max(cost.flops(many(kind, p)).forward) * SCALE**2)
        )
        many.cache_clear()
        SCALE = kept
        print(f"{kind}: at half the scale {after / before - 1:+.1%}")
        assert abs(after / before - 1) < 0.05

# %% [markdown]
# Within a host `direct` sends least. Between hosts it is the other way round: with `ring` only the last GPU of a host
# sends to another host, each slot once, whereas with `direct` every GPU of every other host fetches its own copy. For
# dense attention with `ring`, the rate that is needed out of a host does not grow with the number of hosts.
#
# There is no record yet of links between hosts, or of runs on more than one host.
