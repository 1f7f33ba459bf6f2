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
# # The longest sequence for a given memory, and the term that limits it
#
# `02a_memory_scaling` shows that the closed form of `reference/cost.py` gives the bytes that a rank holds. Here it says
# what limits the length of a sequence: first the bucket, which bounds the communication buffers, then all terms.

# %%
from functools import cache

import matplotlib.pyplot as plt
import numpy as np
import torch

from notebooks.figures import BLACK, BLUE, GREEN, SKY, VERMILLION, binary, binary_ticks, style
from reference import Pattern, cost
from reference import shards as definitions
from verification.case import Case
from verification.run.rank import run_attention, shards
from verification.run.simulation.simulation import Simulation

torch.set_num_threads(1)
style()

# %% tags=["parameters"]
BUCKETS = (4, 8, 16, 32, 64, 128)  # tokens of a message
SHARD = 32  # tokens of a simulated rank
SIMULATED = 4  # ranks
HEADS = 32  # of queries, of the layer whose sequence is to be long
KV_HEADS = 8  # of its keys and values
DIM = 128  # of a head
MEMORY = 64 * 2**30  # bytes of a rank for these terms
RANKS = (1, 2, 4, 8, 16, 32, 64)  # over which the sequence is shared

# %%
COLOUR = {"ring": BLUE, "direct": VERMILLION, "gather": GREEN}
MARK = {"ring": "o", "direct": "s", "gather": "^"}
MIB = 2**20

# %% [markdown]
# ## The bucket
#
# The bucket bounds the receive buffers, at the price of more messages. In dense attention on 4 simulated ranks whole
# shards travel: buffers grow with the bucket until it holds a shard, and no further. `gather` ignores it.

# %%
by_bucket = {}
for exchange in COLOUR:
    for bucket in BUCKETS:
        case = Case(
            world=SIMULATED, group=None, tokens=SIMULATED * SHARD, order="contiguous", cuts=None,
            pattern=Pattern.dense(), batch=1, heads=1, kv_heads=1, head_dim=32, dtype="float32", scale=None,
            score_scale=1.0, values="normal", seed=0, exchange=exchange, bucket=bucket, kernel="auto", lse="unused",
            strided=False,
        )  # fmt: skip
        tensors = case.tensors()
        runs = Simulation(SIMULATED, seed=1).run(
            lambda transport, case=case, tensors=tensors: run_attention(
                transport, case, shards(case, transport.rank, tensors)
            )
        )
        one = cost.Setting(case.pattern, case.shards().positions, 1, 1, 1, 32, 4)
        boxes = cost.buffers(one, exchange, case.tokens_per_call)
        assert np.array_equal([run.buffer_forward for run in runs], boxes.forward), "to the byte"
        assert np.array_equal([run.buffer_backward for run in runs], boxes.backward), "to the byte"
        by_bucket[exchange, bucket] = int(boxes.backward.max())
figure, axes = plt.subplots(figsize=(5.5, 3.4))
for exchange, colour in COLOUR.items():
    axes.loglog(
        BUCKETS, [by_bucket[exchange, b] / 1024 for b in BUCKETS], MARK[exchange] + "-", color=colour, label=exchange
    )
axes.axvline(SHARD, color=BLACK, linewidth=0.8, linestyle=":", label="a shard")
axes.set(
    title=f"{SIMULATED} ranks, n = {SIMULATED * SHARD}, dense: the bucket bounds the buffers",
    xlabel="bucket (tokens)",
    ylabel="buffers in backward (KiB)",
)
binary_ticks(axes.xaxis)
axes.legend()
plt.show()
assert by_bucket["ring", 4] * 8 == by_bucket["ring", SHARD], "proportional to the bucket below a shard"
assert by_bucket["ring", SHARD] == by_bucket["ring", 4 * SHARD], "and constant beyond a shard"
assert len({by_bucket["gather", b] for b in BUCKETS}) == 1

# %% [markdown]
# `direct` combines the messages of several steps if the bucket has room for them: with a bucket larger than the shard
# its buffers grow, up to all rows that a rank needs. Fewer, larger messages make it faster; this is their price in
# memory.

# %%
assert by_bucket["direct", 4 * SHARD] > by_bucket["direct", SHARD]
assert by_bucket["direct", SHARD] <= by_bucket["ring", SHARD]

# %% [markdown]
# ## The longest sequence
#
# One layer, forward and backward, bf16, 32 query and 8 key/value heads of 128, dense causal in zigzag order, and 64 GiB
# of memory for these terms. Up to a constant every term is linear in the length of a shard, also the buffers: for a
# long shard `ring.default_bucket` returns a sixteenth of it. Two lengths determine the line, and a third one checks it.

# %%
TERMS = {
    "q, k, v, out, lse and their incoming gradients": BLUE, "sums of dq, dk, dv": SKY,
    "communication buffers": VERMILLION,
}  # fmt: skip


@cache
def dense(local: int, world: int) -> cost.Setting:
    held = definitions.shards("zigzag", local * world, world, None)
    return cost.Setting(Pattern.dense(causal=True), held.positions, 1, HEADS, KV_HEADS, DIM, 2)


def terms_of(local: int, world: int, exchange: str) -> np.ndarray:
    """Bytes of the fullest rank, by term."""
    one, bucket = dense(local, world), local // 16
    resident, boxes = cost.resident(one), cost.buffers(one, exchange, bucket)
    incoming = one.counts * HEADS * (DIM * 2 + 4)
    return np.array([(resident.shards + incoming).max(), resident.gradients.max(), boxes.backward.max()], float)


assert all(definitions.default_bucket(long, HEADS, KV_HEADS, 2) == long // 16 for long in (2**15, 2**20))
per_token = {}  # bytes per local token
for exchange in COLOUR:
    for world in RANKS:
        short, middle, long = (terms_of(local, world, exchange) for local in (512, 1024, 1536))
        assert np.array_equal(long - middle, middle - short), "linear in the shard"
        assert (short - (middle - short) < 1e-4 * MEMORY).all(), "and the constant is negligible"
        per_token[exchange, world] = (middle - short) / 512
longest = {key: MEMORY / value.sum() * key[1] for key, value in per_token.items()}
limiting = {key: list(TERMS)[int(value.argmax())] for key, value in per_token.items()}

figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.8))
for exchange, colour in COLOUR.items():
    left.loglog(RANKS, [longest[exchange, w] for w in RANKS], MARK[exchange] + "-", color=colour, label=exchange)
left.set(
    title=f"{binary(MEMORY, 'B')} a rank: gather stops growing", xlabel="ranks p", ylabel="longest sequence (tokens)"
)
left.set_xticks(RANKS, [str(w) for w in RANKS])
left.minorticks_off()
binary_ticks(left.yaxis)
left.legend()
shown = [(exchange, w) for exchange in COLOUR for w in (2, 8, 64)]
bottom = np.zeros(len(shown))
for index, (name, colour) in enumerate(TERMS.items()):
    share = np.array([per_token[key][index] / per_token[key].sum() for key in shown])
    right.bar(range(len(shown)), share, bottom=bottom, color=colour, label=name)
    bottom += share
right.set_xticks(range(len(shown)), [f"{e}\n{w}" for e, w in shown], fontsize=7)
right.set(title="Share of each term, by exchange and ranks", ylabel="share of the total")
right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), fontsize=7)
plt.show()
for exchange in COLOUR:
    print(f"{exchange:6} on 64 ranks: {binary(longest[exchange, 64])} tokens; largest term: {limiting[exchange, 64]}")

for exchange in ("ring", "direct"):
    assert longest[exchange, 64] > 0.9 * 32 * longest[exchange, 2], "more ranks, longer sequences, in proportion"
    assert all("buffers" not in limiting[exchange, w] for w in RANKS)
    assert all(per_token[exchange, w][2] < 0.1 * per_token[exchange, w].sum() for w in RANKS)
assert longest["gather", 64] < 2 * longest["gather", 8], "8 times the ranks, less than twice the length"
assert all("buffers" in limiting["gather", w] for w in RANKS if w >= 8)

# %% [markdown]
# With `ring` and `direct` the rank's own data is the largest term: the inputs, their gradients, and the sums in fp32.
# The budget of the bucket keeps the buffers below a tenth of the total. With `gather` the buffers are the largest term
# from a few ranks on.
#
# On GPUs the default bucket is at least 64 Ki tokens, so that a shorter shard is received whole, and with `direct`
# several shards at once. This memory is bounded by a constant, which per rank is:

# %%
bucket = definitions.default_bucket(1024, HEADS, KV_HEADS, 2, "cuda")
assert bucket == 2**16 > definitions.default_bucket(1024, HEADS, KV_HEADS, 2)
item, gradient = dense(512, 2).slot_bytes(narrow=True)
most = (
    (bucket + 1) * KV_HEADS * 3 * (item + gradient)
)  # two receive buffers and a send buffer; the same for gradients, in bf16
for world in (8, 64):
    seen = int(cost.buffers(dense(1536, world), "direct", bucket, narrow=True).backward.max())
    print(f"{world:2} ranks, shards of 1.5 Ki tokens: {seen / MIB:.0f} MiB of at most {most / MIB:.0f}")
    assert seen <= most
