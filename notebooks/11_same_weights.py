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
# # The same weights on any number of ranks
#
# `ring.nn.SameWeights` takes DDP's place. It calls modules chunk by chunk, and sums the gradients of chunks over the
# binary tree of their numbers, so that a training step has the same bits on any number of ranks, data x context: see
# `ring/nn/SAME_WEIGHTS.md`. Ranks are processes here, joined by gloo: 1, and 4 as 2 data ranks x 2 context ranks.
#
# ## 1. A training on 1 and on 4 ranks
#
# A small LongNet model learns the bytes of this repository's licence, by AdamW, with gradients clipped by their norm.
# "usual" has neither `SameWeights` nor `same_bits`: gradients are averaged over the ranks. Distance is the norm of the
# difference from 1 rank's weights, as a share of their norm. bf16 is autocast's, for fewer steps.

# %%
from collections import defaultdict
from copy import deepcopy
from dataclasses import replace
from itertools import product
from unittest.mock import patch

import matplotlib.pyplot as plt
import numpy as np
import torch

from notebooks.figures import BLUE, VERMILLION, legend_below, style
from notebooks.small_training import TEXT, Model, Training, digest, seconds_by_turns, trained
from ring import Layout
from ring.nn import ContextParallel, SameWeights, next_tokens
from ring.nn.same_weights.chunk_rows import ChunkRows
from ring.nn.same_weights.gradient_sums import GradientSums, Held
from verification.run.processes.pool import Pool
from verification.run.rank import same_bits

torch.set_num_threads(1)
style()

# %% tags=["parameters"]
SEED = 0  # of parameters and batches
RANKS = 4  # of each training, beside 1
DATA_RANKS = 2  # of these
STEPS = 500  # of each training in fp32
STEPS_BFLOAT = 40  # in bf16
HALF = 250  # steps until the number of ranks changes
TOKENS = 64  # of a sequence, in part 1
CHUNK = 16  # tokens, in parts 1 and 4
SEQUENCES = 2  # of a batch, on all ranks
DIM = 16  # of the model, in part 1
LAYERS = 1  # of the model
RATE = 1e-2  # of AdamW
LONGER = 256  # tokens of a sequence, in part 3
WIDER = 64  # dim of the model, in parts 3 and 4
CHUNKS = (16, 32, 64)  # of part 3
ROUNDS = 3  # turns of part 3
LONGEST = 512  # tokens of a sequence, in part 4
SPLITS = (1, 2, 3, 4, 8)  # context ranks whose messages part 4 counts
SCALE = 1e6  # of one token's loss, in part 4
CANCELLED = 0.1  # of the sum of its terms' sizes: entries below it are not compared one by one

# %%
FP32 = Training(1, "usual", TOKENS, CHUNK, SEQUENCES, DIM, LAYERS, RATE, SEED)
PRELOAD = ("torch", "torch.distributed.tensor", "torch._dynamo", "ring.nn", "notebooks.small_training")
LOOKS = sorted({1, 2, 4, 8, 16, 32, 64, 128, HALF, *range(0, STEPS, 50), STEPS} - {0})


def run(way, bf16):
    """Losses and states by step, of 1 rank and of several, which train at the same time."""
    last = STEPS_BFLOAT if bf16 else STEPS
    looks = (*(step for step in LOOKS if step < last), last)
    training = replace(FP32, way=way, bf16=bf16)
    tickets = [pool.submit(trained, replace(training, data=data), looks) for pool, data in POOLS]
    results = [pool.collect(ticket) for (pool, _), ticket in zip(POOLS, tickets, strict=True)]
    for (_, first), *others in results:
        assert all(digest(states[x]) == digest(first[x]) for _, states in others for x in looks), "one model"
    return [ranks[0] for ranks in results]


POOLS = [(Pool(world, timeout=280, preload=PRELOAD), data) for world, data in ((1, 1), (RANKS, DATA_RANKS))]
found = {(bf16, way): run(way, bf16) for bf16, way in product((False, True), ("usual", "SameWeights"))}

# %%
figure, panels = plt.subplots(1, 2, figsize=(9.5, 3.4))
first_step = {}
for (bf16, way), ((loss, alone), (others, states)) in found.items():
    looks = list(states)
    ours, theirs = (torch.stack([x[look]["weights"] for look in looks]) for x in (states, alone))
    apart = ((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).tolist()
    off = ((others - loss).abs() / loss).numpy()
    label = f"{'bf16' if bf16 else 'fp32'}, {way}"
    drawn = {"color": VERMILLION if bf16 else BLUE, "linestyle": "--" if way == "SameWeights" else "-"}
    panels[0].loglog(looks, np.maximum(apart, 1e-9), label=label, **drawn)
    panels[1].loglog(range(1, len(off) + 1), np.maximum(off, 1e-9), ".", markersize=2, color=drawn["color"])
    first_step[bf16, way] = apart[0]
    print(f"{label:17}: weights apart by {apart[0]:.1e} after step 1, by {apart[-1]:.1e} after {looks[-1]}; "
          f"losses by {off.max():.1e} at most; loss {loss[0]:.2f} to {loss[-10:].mean():.2f}")  # fmt: skip
    if way == "SameWeights":
        assert same_bits(others, loss) and all(digest(states[x]) == digest(alone[x]) for x in looks), "all bits"
    else:
        assert 0 < apart[0] < apart[-1] and off[:10].max() < off[-10:].max(), "differences grow"
    assert loss[-10:].mean() < loss[0] - 1, "the model learns"
for axes, title in zip(panels, ("Weights (0 as 1e-9)", "Losses (0 as 1e-9)"), strict=True):
    axes.set(xlabel="step", ylabel="relative distance from 1 rank", title=title)
legend_below(figure, panels[0])
plt.show()
assert first_step[True, "usual"] > 1000 * first_step[False, "usual"]

# %% [markdown]
# **In the usual way the weights go apart; with `SameWeights` no bit differs** of weights, moments and losses. In bf16
# weights are more than a thousand times as far apart, from the first step on.
#
# ## 2. A run that goes on with another number of ranks
#
# The training on 4 ranks is saved after half of its steps: parameters and moments. 1 rank goes on with it.

# %%
(wanted, alone), (_, others) = found[False, "SameWeights"]
((losses, states),) = POOLS[0][0].run(trained, replace(FP32, way="SameWeights"), (STEPS,), others[HALF])
for pool, _ in POOLS:
    pool.close()
for name, state in ("1 rank", alone), (f"{RANKS} ranks", others), (f"{RANKS} ranks, then 1", states):
    print(f"{name:15}: digest of weights and moments after step {STEPS}: {digest(state[STEPS])[:16]}")
    assert digest(state[STEPS]) == digest(alone[STEPS]) != digest(alone[HALF])
assert same_bits(losses, wanted[HALF:]), "the losses of the second half"

# %% [markdown]
# **Both ends have one digest**, and the losses of the second half have the bits of 1 rank's.
#
# ## 3. The cost
#
# CPU seconds of a training step, of the busiest rank, by turns with the usual step, by the length of a chunk; nothing
# is claimed of them. `same_bits` alone is attention by chunks.

# %%
LARGER = replace(FP32, tokens=LONGER, dim=WIDER)
for world in (1, RANKS):
    usual = replace(LARGER, data=1 if world == 1 else DATA_RANKS)
    turns = [usual, *(replace(usual, way=way, chunk=c) for c in CHUNKS for way in ("same_bits", "SameWeights"))]
    with Pool(world, timeout=280, preload=PRELOAD) as pool:
        seconds = np.max(pool.run(seconds_by_turns, tuple(turns), ROUNDS, 1), axis=0)  # (trainings, rounds)
    ratios = np.median(seconds / seconds[0], axis=1)
    print(f"{world} rank(s), usual step {1e3 * np.median(seconds[0]):.0f} ms")
    for c, attention, ratio in zip(CHUNKS, ratios[1::2], ratios[2::2], strict=True):
        print(f"  C={c:2}, {LONGER // c:2} chunks a sequence: same_bits alone {attention:.1f}, SameWeights {ratio:.1f}")

# %% [markdown]
# **Short chunks cost most**: half the chunk makes nearly four times the parts of attention, and twice the calls of each
# module. The model is so small that calls cost more than their arithmetic. On 4 ranks messages are much of the usual
# step, too.
#
# ## 4. Another way to sum
#
# Sums of integers are exact in any order. So gradients of chunks could be rounded to multiples of a quantum and summed
# as 64-bit integers, by a reduce-scatter of any kind. For each parameter the quantum is $2^{e - 62} n$, where $2^e$ is
# above the largest number among its $n$ gradients of chunks, $n$ rounded up to a power of two, so that no sum
# overflows. The gradients of chunks are those that `SameWeights` sums: each kind of sum gets the same ones.
#
# Errors are of the sum of these gradients in fp64 (rounding of the sum alone), and of the gradient of the model in fp64
# (rounding of forward and backward, too). By norm: relative to the norm of all gradients. By entry: the largest
# relative error among entries whose terms do not cancel.


# %%
def gradients(model, weight, fixed, record=None):
    """Gradients of all parameters. weight: (1, tokens), of each token's loss."""
    context = ContextParallel(Layout.contiguous(LONGEST, 1), same_bits=CHUNK if fixed else None)
    called = SameWeights(model, compare=False) if fixed else model
    begins = torch.randint(len(TEXT) - LONGEST, (SEQUENCES,), generator=torch.Generator().manual_seed(SEED)).tolist()
    tokens = torch.stack([TEXT[begin : begin + LONGEST] for begin in begins])
    losses = torch.nn.functional.cross_entropy(called(tokens, context).mT, next_tokens(tokens), reduction="none")
    with patch.object(GradientSums, "insert", record or GradientSums.insert):
        (losses * weight.to(losses)).mean().backward()
    return [x.grad.double() for x in model.parameters()]


def integer_sum(terms):
    """Sum of fp32 terms as 64-bit integers."""
    exponent = int(torch.frexp(max(x.abs().max() for x in terms)).exponent)
    quantum = 2.0 ** (exponent - 62 + (len(terms) - 1).bit_length())
    return sum(torch.round(x.double() / quantum).long() for x in terms).double().mul(quantum).float()


def worst(sums, exact, terms):
    """Errors of sums, by norm and by entry."""
    errors = [(x - y).abs() for x, y in zip(sums, exact, strict=True)]
    norm = sum(x.square().sum() for x in errors) / sum(y.square().sum() for y in exact)
    whole = [y.abs() > CANCELLED * sum(x.double().abs() for x in of) for y, of in zip(exact, terms, strict=True)]
    return float(norm.sqrt()), max(float((x / y.abs())[z].max()) for x, y, z in zip(errors, exact, whole, strict=True))


def example(scale):
    """Sums by kind, gradients of chunks, the gradient in fp64, and the most numbers that the trees held at a time."""
    torch.manual_seed(SEED)
    model, terms, held = Model(LONGEST, WIDER, LAYERS), defaultdict(list), []
    usual_insert, weight = GradientSums.insert, torch.ones(1, LONGEST)
    weight[0, LONGEST // 2] = scale

    def insert(sums, index, entry, chunk, count, gradient):
        terms[index].append(gradient.clone())
        usual_insert(sums, index, entry, chunk, count, gradient)
        nodes = (x for tree in sums._own.values() for x in (*tree.waiting.values(), tree.root))
        held.append(sum(x.numel() for x in nodes if x is not None))

    fp32 = deepcopy(model), deepcopy(model)
    wanted = gradients(model.double(), weight, False)
    tree, usual = gradients(fp32[0], weight, True, insert), gradients(fp32[1], weight, False)
    terms = [terms[index] for index in range(len(wanted))]
    integers = [integer_sum(of) for of in terms]
    assert all(same_bits(x, integer_sum(of[::-1])) for x, of in zip(integers, terms, strict=True)), "in any order"
    return {"tree": tree, "integers": [x.double() for x in integers], "usual": usual}, terms, wanted, max(held)


for data, scale in ("normal", 1.0), (f"one token's loss times {SCALE:.0e}", SCALE):
    kinds, terms, wanted, held = example(scale)
    sums, errors = [sum(x.double() for x in of) for of in terms], {}
    print(data)
    for kind, ours in kinds.items():
        (norm, entry), (norm_fp64, entry_fp64) = errors[kind] = worst(ours, sums, terms), worst(ours, wanted, terms)
        print(f"  {kind:8}: error of the sum {norm:.1e} by norm, {entry:.1e} by entry; "
              f"of the gradient {norm_fp64:.2e} by norm, {entry_fp64:.1e} by entry")  # fmt: skip
    (tree, tree_fp64), (integers, integers_fp64) = errors["tree"], errors["integers"]
    assert integers[1] < 1.01 * 2**-24 < tree[1], "integers are rounded once, to fp32"
    assert tree[0] < errors["usual"][0][0], "a tree has short sums"
    assert np.allclose(tree_fp64, integers_fp64, rtol=0.1, atol=0), (
        "but forward and backward have the most of the error"
    )

numbers, chunks = sum(x.numel() for x in wanted), LONGEST // CHUNK
kept = sum(x.numel() for of in terms for x in of)
print(f"held by 1 rank: tree {held / numbers:.1f} times the model in fp32, integers {kept / numbers:.1f} times: all "
      f"terms of {SEQUENCES} sequences of {chunks} chunks, until the largest is known")  # fmt: skip
assert held < kept / 8
uses = len(terms[0]) // (SEQUENCES * chunks)
assert uses == 2, "the head has the embedding's weights"
for world in SPLITS:
    layout = Layout.whole_chunks(LONGEST, world, CHUNK)
    rows = [ChunkRows.of(layout, None, CHUNK, rank) for rank in range(world)]
    nodes = max(len(Held(0, 1, chunks, x.numbers).nodes) for x in rows)
    print(f"{world} context rank(s), {nodes} node(s) of a sequence on a rank: sent for a number of the model, tree "
          f"{4 * nodes} bytes a sequence, {4 * nodes * uses} of the tied weights; integers 8 for all")  # fmt: skip

# %% [markdown]
# **The tree was kept**, since it holds 3.5 times the model where integers need all gradients of chunks until the
# largest is known, 80 times the model, or a second backward. Its sums have larger errors than integers (by entry 7e-7
# to 1e-6 beside 6e-8), but with both the gradient is as far from fp64, since forward and backward make most of its
# error.
#
# Integers would save bytes where a rank has several sequences, or chunks that make many nodes, and of weights that are
# used twice, as a tied head's.
