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
# # Traffic, and balance of work
#
# 1. How many bytes does each rank send, by pattern, layout and exchange, and at which hop?
# 2. Is the work of causal attention balanced between ranks?
#
# `reference/cost.py` makes all counts, independently of the implementation. `scripts/verify` compares the messages of
# every example with them to the byte; the first cell does so once more.
#
# A *slot* is one key and one value vector of one row and head. A row that two branches need is sent twice.

# %%
from functools import cache

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.colors import LogNorm

from notebooks.figures import BLACK, BLUE, COLOURS, GREEN, VERMILLION, binary, legend_below, style
from reference import Pattern, closed_forms, cost
from reference import shards as definitions
from verification.case import Case
from verification.run.rank import run_attention, shards
from verification.run.simulation.simulation import Simulation

torch.set_num_threads(1)
style()

# %% tags=["parameters"]
CHECKED_RANKS = 4  # simulated, whose messages are compared with the counts
CHECKED_TOKENS = 256  # of their sequence
SEED = 0  # of their tensors
RANKS = 8  # of the pictures of bytes
TOKENS = 8192  # of the sequence in these, and of that whose work is balanced
HEADS = 32  # of queries
KV_HEADS = 8  # of keys and values
HEAD_DIM = 128  # of all heads
LOCAL = 1024  # tokens a rank, where the sequence grows with the ranks
GROWING_HEADS = 8  # of queries, keys and values there
WORLDS = (4, 16, 64)  # ranks there
MANY = (2, 4, 8, 16, 32, 64)  # ranks among which work is balanced

# %%
EXCHANGES = {"ring": BLUE, "direct": VERMILLION, "gather": GREEN}
ORDERS = {"contiguous": BLUE, "zigzag": VERMILLION, "striped": GREEN}
MIB = 2**20


def longnet(n: int, heads: int) -> Pattern:
    """LongNet's proportions: every branch sees n / 32 keys of its segment."""
    return Pattern.longnet([n // 32, n // 8, n // 2, n], [1, 4, 16, 32], heads, causal=True)


@cache
def setting(kind: str, n: int, p: int, order: str, heads: int = HEADS, kv_heads: int = KV_HEADS) -> cost.Setting:
    """bf16."""
    pattern = Pattern.dense(causal=True) if kind == "dense" else longnet(n, heads)
    return cost.Setting(pattern, definitions.shards(order, n, p, None).positions, 1, heads, kv_heads, HEAD_DIM, 2)


# %% [markdown]
# ## The counts equal what is sent
#
# Simulated ranks run forward and backward, and every message is recorded.

# %%
checked = 0
for order in ORDERS:
    for kind, pattern in (("dense", Pattern.dense(causal=True)), ("LongNet", longnet(CHECKED_TOKENS, 4))):
        for exchange in EXCHANGES:
            case = Case(
                world=CHECKED_RANKS, group=None, tokens=CHECKED_TOKENS, order=order, cuts=None, pattern=pattern,
                batch=1, heads=4, kv_heads=2, head_dim=8, dtype="bfloat16", scale=None, score_scale=1.0,
                values="normal", seed=SEED, exchange=exchange, bucket=None, kernel="auto", lse="unused", strided=False,
            )  # fmt: skip
            tensors = case.tensors()
            runs = Simulation(CHECKED_RANKS, seed=1).run(
                lambda transport, case=case, tensors=tensors: run_attention(
                    transport, case, shards(case, transport.rank, tensors)
                )
            )
            one = cost.Setting(pattern, case.shards().positions, 1, 4, 2, 8, 2)
            counted = cost.sent(one, exchange)
            for phase, expected in (("forward", counted.forward), ("backward", counted.backward)):
                seen = np.zeros((CHECKED_RANKS, CHECKED_RANKS), np.int64)
                for rank, run in enumerate(runs):
                    for peer, size, _ in getattr(run, f"sent_{phase}"):
                        seen[rank, peer] += size
                assert np.array_equal(seen, expected), (order, kind, exchange, phase)
                checked += 1
print(f"{checked} matrices of bytes from rank to rank equal the counts")

# %% [markdown]
# ## Bytes by exchange and layout
#
# 8 ranks, 8 Ki tokens, 32 query and 8 key/value heads of 128, bf16, causal, forward. Backward sends the keys and values
# once more and returns their gradients.

# %%
total = {
    (kind, order, exchange): cost.sent(setting(kind, TOKENS, RANKS, order), exchange).forward
    for kind in ("dense", "LongNet") for order in ORDERS for exchange in EXCHANGES
}  # fmt: skip
figure, both = plt.subplots(1, 2, figsize=(9.5, 3.6))
for axes, kind in zip(both, ("dense", "LongNet"), strict=True):
    for index, (exchange, colour) in enumerate(EXCHANGES.items()):
        sent = [total[kind, order, exchange].sum(1) / MIB for order in ORDERS]
        at = np.arange(len(ORDERS)) + (index - 1) * 0.27
        axes.bar(at, [x.mean() for x in sent], 0.25, color=colour, label=f"{exchange}, mean")
        axes.plot(at, [x.max() for x in sent], "_", color=BLACK, markersize=12)
    axes.set_xticks(range(len(ORDERS)), list(ORDERS))
    axes.set(ylabel="sent by a rank in forward (MiB)")
both[0].plot([], [], "_", color=BLACK, label="the busiest rank")
both[0].set_title("Dense: the layout matters, and direct sends least")
both[1].set_title("LongNet: contiguous shards send little")
legend_below(figure, both[0])
plt.show()

# By closed form, for the whole group.
item = setting("dense", TOKENS, RANKS, "zigzag").slot_bytes()[0]
for order in ORDERS:
    for exchange in EXCHANGES:
        slots = closed_forms.dense_slots(TOKENS, RANKS, KV_HEADS, True, order, exchange)
        assert total["dense", order, exchange].sum() == slots * item
        for kind in ("dense", "LongNet"):
            assert total[kind, order, "direct"].sum() <= total[kind, order, "ring"].sum()

less = total["LongNet", "contiguous", "gather"].sum() / total["LongNet", "contiguous", "direct"].sum()
more = total["LongNet", "striped", "ring"].sum() / total["LongNet", "striped", "gather"].sum()
print(
    f"LongNet, against gather: contiguous, direct sends {less:.1f} times less; striped, ring {more:.2f} times as much"
)
assert less > 5 and more > 1

# %% [markdown]
# Two results matter most. With dilated patterns and contiguous shards, a short segment lies within one rank, and only
# rows of the long branches are sent. And `ring` can send *more* than all keys and values: a row that several branches
# select is sent once for each of them, and in striped order every rank needs it.
#
# ### From rank to rank
#
# The same bytes as matrices. With `direct`, the owner of a row sends it to each rank that needs it; with `ring`, a rank
# sends to the next rank only, so rows for a distant rank pass through all ranks in between. White: nothing is sent.

# %%
shown = [
    ("dense", "contiguous", "direct"),
    ("dense", "zigzag", "direct"),
    ("dense", "zigzag", "ring"),
    ("LongNet", "contiguous", "direct"),
]
figure, row = plt.subplots(1, 4, figsize=(11, 3.0))
norm = LogNorm(
    min(total[key][total[key] > 0].min() for key in shown) / MIB, max(total[key].max() for key in shown) / MIB
)
for axes, key in zip(row, shown, strict=True):
    image = axes.imshow(np.ma.masked_equal(total[key] / MIB, 0), cmap="cividis", norm=norm)  # nothing sent: white
    axes.set(title=f"{key[0]}, {key[1]},\n{key[2]}", xlabel="to rank", ylabel="from rank" if axes is row[0] else None)
    axes.grid(False)
figure.colorbar(image, ax=row, shrink=0.7, label="MiB", format="%g", ticks=[0.5, 1, 2, 4, 8, 16, 32])
plt.show()
for kind, order, exchange in shown:
    matrix = total[kind, order, exchange]
    if exchange == "ring":
        assert all(matrix[s, d] == 0 for s in range(RANKS) for d in range(RANKS) if d != (s + 1) % RANKS)
    elif order == "contiguous":  # causal: only later ranks need rows
        assert (np.tril(matrix) == 0).all() and (matrix[np.triu_indices(RANKS, 1)] > 0).all()

# %% [markdown]
# ### Hop by hop
#
# At hop $t$ of the ring, a rank receives rows of the rank $t$ places before it. The slowest rank sets the pace, so the
# figure shows the largest message of each hop. Dense causal attention over contiguous shards has full messages at every
# hop, although half the ranks need nothing; LongNet's messages in contiguous order are small, and smaller at later
# hops.

# %%
figure, both = plt.subplots(1, 2, figsize=(9.5, 3.3))
# Orders may coincide: the first is the widest line.
WIDE = {
    "contiguous": dict(linewidth=6, alpha=0.35),
    "zigzag": dict(linewidth=3, alpha=0.7),
    "striped": dict(linewidth=1),
}
for axes, kind in zip(both, ("dense", "LongNet"), strict=True):
    for order, colour in ORDERS.items():
        one = setting(kind, TOKENS, RANKS, order)
        ending = one.ending(RANKS)[:, 0, 1:]  # slots by the hops that they take round the ring of all ranks
        in_flight = np.cumsum(ending[:, ::-1], axis=1)[:, ::-1]
        fullest = in_flight.max(0) * item / MIB
        axes.plot(range(1, RANKS), fullest, "o-", color=colour, label=order, **WIDE[order])
        assert in_flight.sum() * item == total[kind, order, "ring"].sum()
        if kind == "dense":
            assert (in_flight.max(0) == TOKENS // RANKS * KV_HEADS).all(), "a whole shard at every hop"
        if (kind, order) == ("LongNet", "contiguous"):
            assert (np.diff(fullest) <= 0).all() and fullest[0] < 0.7 * TOKENS // RANKS * KV_HEADS * item / MIB
    axes.set(
        title="Dense: a whole shard at every hop" if kind == "dense" else "LongNet: small messages in contiguous order",
        xlabel="hop",
        ylabel="MiB",
    )
    axes.set_ylim(0)
legend_below(figure, both[0])
plt.show()

# %% [markdown]
# ### Returned gradients
#
# With `ring`, the sums of a key's gradients travel with it, in fp32, and each rank adds its part. With `direct`, each
# rank returns its complete sum to the owner, and between GPUs it does so in the working type, which is half the bytes.

# %%
one = setting("dense", TOKENS, RANKS, "zigzag")
back = {
    "ring": cost.sent(one, "ring").backward_gradients.sum(),
    "direct": cost.sent(one, "direct").backward_gradients.sum(),
    "direct between GPUs": cost.sent(one, "direct", narrow=True).backward_gradients.sum(),
}  # fmt: skip
for name, size in back.items():
    print(f"{name:20} {size / MIB:7.1f} MiB of gradients in all")
assert back["direct"] == 2 * back["direct between GPUs"] and back["ring"] > back["direct"]

# %% [markdown]
# ## More ranks, as many tokens on each
#
# Every rank has 1 Ki tokens, so the sequence grows with $p$. In dense attention, the bytes per rank grow in proportion
# to $p$, and so does the work, so their ratio stays. LongNet's segments grow with the sequence, each branch sees the
# same number of keys, and every factor of 4 adds one branch: bytes per rank grow with the logarithm of $p$.


# %%
def growing(p: int) -> cost.Setting:
    lengths = [LOCAL * 4**k for k in range(8) if 4**k <= p]
    pattern = Pattern.longnet(lengths, [4**k for k in range(len(lengths))], GROWING_HEADS, causal=True)
    held = definitions.shards("contiguous", LOCAL * p, p, None).positions
    return cost.Setting(pattern, held, 1, GROWING_HEADS, GROWING_HEADS, HEAD_DIM, 2)


weak = {
    "dense, zigzag": [
        cost.sent(setting("dense", LOCAL * p, p, "zigzag", GROWING_HEADS, GROWING_HEADS), "direct").forward.sum() / p
        for p in WORLDS
    ],
    "LongNet, contiguous": [cost.sent(growing(p), "direct").forward.sum() / p for p in WORLDS],
}
figure, axes = plt.subplots(figsize=(5.5, 3.3))
for (name, sent), colour in zip(weak.items(), COLOURS, strict=False):
    axes.loglog(WORLDS, np.array(sent) / MIB, "o-", color=colour, label=name)
axes.set(
    title=f"{binary(LOCAL)} tokens a rank, direct: dense grows with p, LongNet slowly",
    xlabel="ranks p",
    ylabel="sent by a rank, mean (MiB)",
)
axes.set_xticks(WORLDS, [str(p) for p in WORLDS])
axes.minorticks_off()
axes.legend()
plt.show()
dense, sparse = (np.array(x) for x in weak.values())
assert abs(dense[2] / dense[0] - 63 / 3) < 1e-9, "(p - 1) times 3/4 of a shard"
steps = np.diff(sparse)
print("LongNet, MiB more for every factor of 4:", steps / MIB)
assert (sparse[1:] - sparse[:-1] < 1.5 * sparse[0]).all() and steps[1] < 1.5 * steps[0], (
    "a constant more for each branch"
)

# %% [markdown]
# ## Balance of work
#
# The figure shows the (query, key) pairs of the busiest rank over the mean. In contiguous order the last rank sees all
# keys, and the ratio is $2 - 1/p$ for long sequences. Zigzag order gives each rank an early and a late chunk, and the
# ratio is exactly 1. In striped order it is nearly 1.

# %%
figure, both = plt.subplots(1, 2, figsize=(9.5, 3.3))
imbalance = {}
for axes, kind in zip(both, ("dense", "LongNet"), strict=True):
    for order, colour in ORDERS.items():
        for p in MANY:
            imbalance[kind, order, p] = cost.flops(setting(kind, TOKENS, p, order)).imbalance
        axes.plot(MANY, [imbalance[kind, order, p] for p in MANY], "o-", color=colour, label=order, **WIDE[order])
    axes.set(
        xscale="log",
        xlabel="ranks p",
        ylabel="busiest rank over the mean",
        title="Dense: contiguous order is unbalanced" if kind == "dense" else "LongNet: balanced while shards are long",
    )
    axes.set_xticks(MANY, [str(p) for p in MANY])
    axes.minorticks_off()
    axes.set_ylim(0.95, 2.05)
legend_below(figure, both[0])
plt.show()
for p in MANY:
    local = TOKENS // p
    last = local * (TOKENS - local) + local * (local + 1) // 2
    mean = TOKENS * (TOKENS + 1) // 2 / p
    assert abs(imbalance["dense", "contiguous", p] - last / mean) < 1e-12 and abs(last / mean - (2 - 1 / p)) < 1e-3
    assert imbalance["dense", "zigzag", p] == 1.0
    assert imbalance["dense", "striped", p] < 1.01
    if local >= TOKENS // 32:  # the shortest segment
        assert imbalance["LongNet", "contiguous", p] - 1 < (imbalance["dense", "contiguous", p] - 1) / 2
    assert p > RANKS or imbalance["LongNet", "contiguous", p] < 1.06
print("LongNet, contiguous:", ", ".join(f"{p} ranks {imbalance['LongNet', 'contiguous', p]:.3f}" for p in MANY))

# %% [markdown]
# For LongNet it is the other way round than for dense attention: contiguous shards are nearly balanced as long as they
# are longer than most segments, and they send least, so there is little reason for another order.
