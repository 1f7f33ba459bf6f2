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
# # The same bits on any number of ranks
#
# Sums of floating-point numbers depend on their order, and the order of a ring's sums on its ranks. With `same_bits=C`
# attention is cut into chunks of C tokens, which fix that order: see `ring/SAME_BITS.md`. Ranks are simulated here;
# their arithmetic is that of real ranks on a CPU.
#
# ## 1. One call
#
# A dense causal call, forward and backward. The kernel is the same in all calls, so the order of sums is the only
# difference. Each is compared with one rank: numbers with other bits, and the largest difference as a share of the
# largest number.

# %%
from functools import partial
from itertools import product
from time import process_time
from timeit import timeit
from unittest.mock import patch

import matplotlib.pyplot as plt
import torch
from torch import nn

from notebooks.figures import BLUE, DATA, VERMILLION, legend_below, style
from reference import Pattern
from reference.cost import Setting, sent
from reference.same_bits import attention_in_chunks, blocks_in_chunks
from ring import Layout, ring_attention
from ring.compute.part_sums import PartOutputs, PartSum
from verification.run.rank import same_bits
from verification.run.simulation.simulation import Simulation

torch.set_num_threads(1)
style()

# %% tags=["parameters"]
SEED = 0  # of tensors, parameters and batches
TOKENS = 256  # of the call of part 1, and of a step of part 2
CHUNK = 32  # tokens, of parts 1 and 2
WORLDS = (2, 4, 8)  # simulated ranks of part 1, beside 1
EXCHANGES = ("ring", "direct", "all-to-all")  # of part 1
HEADS = 8  # of part 1: all-to-all with same_bits takes at most as many ranks
HEAD_DIM = 16  # of all parts
RANKS = 4  # of parts 2 and 3, beside 1
STEPS = 30  # of each training
LAYERS = 4  # of the model
DIM = 32  # of the model
RATE = 1e-2  # of AdamW, and a tenth of that of SGD with momentum
LONGER = 1024  # tokens of part 3
FEW = 2  # heads of part 3
CHUNKS = (16, 32, 64, 128, 256)  # of part 3

# %%
CAUSAL = Pattern.dense(causal=True)


def attention(q, k, v, incoming, layout, **options):
    """Whole out and lse of simulated ranks and, with incoming gradients of these, dq, dk and dv."""

    def step(transport):
        leaves = [layout.shard(x.detach(), transport.rank).requires_grad_() for x in (q, k, v)]
        results = ring_attention(*leaves, CAUSAL, layout, group=transport, kernel="math", return_lse=True, **options)
        if incoming is not None:
            gradients = [layout.shard(x, transport.rank, dim) for x, dim in zip(incoming, (1, 2), strict=True)]
            results = *results, *torch.autograd.grad(results, leaves, gradients)
        return [x.detach() for x in results]

    ranks = Simulation(layout.world_size, seed=SEED).run(step)
    return [layout.unshard(shards, 2 if place == 1 else 1) for place, shards in enumerate(zip(*ranks, strict=True))]


def random_tensors(tokens, dtype, heads):
    """q, k, v, and the gradients of out and lse."""
    drawn = torch.Generator().manual_seed(SEED)
    q, k, v, dout = torch.randn(4, 1, tokens, heads, HEAD_DIM, generator=drawn).to(dtype)
    return q, k, v, (dout, torch.randn(1, heads, tokens, generator=drawn))


def difference(x, y):
    """Numbers with other bits, and the largest difference as a share of the largest number."""
    bits = {2: torch.int16, 4: torch.int32}[x.itemsize]
    return int((x.view(bits) != y.view(bits)).sum()), float((x.double() - y.double()).abs().max() / y.abs().max())


QUANTITIES = ("out", "lse", "dq", "dk", "dv")
for dtype in (torch.float32, torch.bfloat16):
    *x, incoming = random_tensors(TOKENS, dtype, HEADS)
    one, fixed_one = (attention(*x, incoming, Layout.contiguous(TOKENS, 1), same_bits=c) for c in (None, CHUNK))
    reference = attention_in_chunks(*x, CAUSAL, CHUNK, dout=incoming[0], dlse=incoming[1])
    assert all(map(same_bits, fixed_one, reference)), "the bits of the reference, which has no ranks"
    print(f"{dtype}: differ, of", ", ".join(f"{y.numel()} {name}" for name, y in zip(QUANTITIES, one, strict=True)))
    for exchange, world in product(EXCHANGES, WORLDS):
        layout = Layout.whole_chunks(TOKENS, world, CHUNK)
        usual, fixed = (attention(*x, incoming, layout, exchange=exchange, same_bits=c) for c in (None, CHUNK))
        rows = list(map(difference, usual, one))
        text = "  ".join(f"{name} {count:5} {most:.0e}" for name, (count, most) in zip(QUANTITIES, rows, strict=True))
        differ = sum(count for count, _ in map(difference, fixed, fixed_one))
        print(f"  {exchange:10} {world}: {text}; with same_bits {differ}")
        assert all(map(same_bits, fixed, fixed_one)) and not differ, "with same_bits no bit differs"
        if exchange != "all-to-all":
            share = [count / y.numel() for (count, _), y in zip(rows, one, strict=True) if y.ndim == 4]
            assert min(share) > 0.5 if dtype == torch.float32 else 0 < max(share) < 0.01
            assert max(most for _, most in rows) < 8 * torch.finfo(dtype).eps, "they differ by their last digits"

# %% [markdown]
# **Without `same_bits` most fp32 outputs and gradients of a ring have other last digits.** In bf16 few have, since fp32
# sums are rounded once, at the end. All-to-all computes a head on all rows, so its order of sums is one rank's; that
# its bits are is not promised.
#
# ## 2. A training
#
# A small transformer learns the bytes of this repository's licence. Attention runs on 1 or on several ranks. All else
# is computed on the whole sequence, by the same operations in both runs, so attention is the only difference. bf16 is
# autocast's, with parameters in fp32.

# %%
OPTIMIZERS = {"AdamW": partial(torch.optim.AdamW, lr=RATE), "SGD": partial(torch.optim.SGD, lr=10 * RATE, momentum=0.9)}
TEXT = torch.tensor(list((DATA.parents[1] / "LICENSE").read_bytes()))


class Sharded(torch.autograd.Function):
    """Attention of simulated ranks. Backward runs the forward again."""

    @staticmethod
    def forward(ctx, q, k, v, layout, chunk):
        ctx.save_for_backward(q, k, v)
        ctx.call = layout, chunk
        return attention(q, k, v, None, layout, same_bits=chunk)[0]

    @staticmethod
    def backward(ctx, dout):
        (layout, chunk), nothing = ctx.call, dout.new_zeros(dout.shape[0], dout.shape[2], dout.shape[1]).float()
        return *attention(*ctx.saved_tensors, (dout, nothing), layout, same_bits=chunk)[2:], None, None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.byte, self.place = nn.Embedding(256, DIM), nn.Embedding(TOKENS, DIM)
        nn.init.normal_(self.byte.weight, std=DIM**-0.5)
        sizes = (DIM, 3 * DIM, False), (DIM, DIM), (DIM, 4 * DIM), (4 * DIM, DIM)
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(*size) for size in sizes) for _ in range(LAYERS))

    def forward(self, window, layout, chunk):
        """Loss, and the activations after each layer."""
        x, after = self.byte(window[:, :-1]) + self.place.weight, []
        for qkv, project, up, down in self.layers:
            q, k, v = qkv(nn.functional.layer_norm(x, (DIM,))).unflatten(2, (3, -1, HEAD_DIM)).unbind(2)
            x = x + project(Sharded.apply(q, k, v, layout, chunk).flatten(2))
            x = x + down(nn.functional.gelu(up(nn.functional.layer_norm(x, (DIM,)))))
            after.append(x.detach())
        logits = nn.functional.layer_norm(x, (DIM,)) @ self.byte.weight.mT
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), window[0, 1:]), after


def train(optimizer, dtype, chunk, worlds):
    """Losses and parameters by step, and the activations of the first one. worlds: ranks of each step."""
    torch.manual_seed(SEED)
    model, losses, parameters, activations = Model(), [], [], []
    stepper = OPTIMIZERS[optimizer](model.parameters())
    for world in worlds:
        begin, layout = int(torch.randint(len(TEXT) - TOKENS, ())), Layout.whole_chunks(TOKENS, world, CHUNK)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            loss, after = model(TEXT[None, begin : begin + TOKENS + 1], layout, chunk)
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        losses.append(loss.detach().view(1))
        parameters.append(nn.utils.parameters_to_vector(model.parameters()).detach())
        activations = activations or after
    return torch.stack(losses), torch.stack(parameters), torch.stack(activations)


figure, panels = plt.subplots(1, 3, figsize=(11, 3.4))
apart = {}
for dtype, optimizer in product(("fp32", "bf16"), OPTIMIZERS):
    one, several = (train(optimizer, dtype, None, [world] * STEPS) for world in (1, RANKS))
    loss, weights, layers = apart[dtype, optimizer] = [
        ((x - y).flatten(1).norm(dim=1) / y.flatten(1).norm(dim=1)).numpy() for x, y in zip(several, one, strict=True)
    ]
    look = {"color": VERMILLION if dtype == "bf16" else BLUE, "linestyle": "-" if optimizer == "AdamW" else "--"}
    for axes, y in zip(panels, (layers, weights, loss), strict=True):
        axes.semilogy(range(1, len(y) + 1), y.clip(1e-9), label=f"{dtype}, {optimizer}", **look)
    print(f"{dtype}, {optimizer:5}: layer 1 differs by {layers[0]:.0e}, {LAYERS} by {layers[-1]:.0e}; weights after "
          f"step 1 by {weights[0]:.0e}, {STEPS} by {weights[-1]:.0e}; loss by {loss.max():.0e} at most")  # fmt: skip
    assert 0 < layers[0] < layers[-1] and (0 < weights[0] < weights[-1] or dtype == "fp32"), "they grow"
    assert one[0][-1] < one[0][0] - 1, "the model learns"
for axes, title in zip(panels, ("Activations of step 1", "Weights", "Loss (0 as 1e-9)"), strict=True):
    axes.set(xlabel="step" if axes is not panels[0] else "layer", ylabel="relative distance", title=title)
legend_below(figure, panels[0])
plt.show()
assert all(y.max() > 100 * x.max() for o in OPTIMIZERS for x, y in zip(apart["fp32", o], apart["bf16", o], strict=True))
assert apart["bf16", "AdamW"][1][0] > 10 * apart["bf16", "SGD"][1][0], "AdamW's first step"

# %% [markdown]
# **Differences grow over layers and steps.** Rounding to bf16 makes a last digit of fp32 a unit of bf16, or nothing.
# AdamW divides gradients by their size: its first step moves a weight whose gradient is near 0 by the full rate, in
# either direction. With `same_bits` two runs are one, and so is a run that goes on with another number of ranks.

# %%
HALF = STEPS // 2
alone = train("AdamW", "bf16", CHUNK, [1] * STEPS)
for way, worlds in (f"{RANKS}", [RANKS] * STEPS), (f"{RANKS}, then 1", [RANKS] * HALF + [1] * (STEPS - HALF)):
    assert all(map(same_bits, train("AdamW", "bf16", CHUNK, worlds), alone)), way
    print(f"same_bits, bf16, ranks {way}: losses and weights of {STEPS} steps have the bits of 1 rank")
x, gradient = torch.randn(2, TOKENS, DIM, generator=torch.Generator().manual_seed(SEED))
by_rank = sum(y.mT @ z for y, z in zip(x.chunk(RANKS), gradient.chunk(RANKS), strict=True))
count, most = difference(by_rank, x.mT @ gradient)
print(f"gradient of a matrix, summed over the rows of {RANKS} ranks: {count} of {DIM**2} numbers differ, by {most:.0e}")
assert count

# %% [markdown]
# **Weight gradients of a sharded model are not part of the promise.** Here all rows are gathered before a projection,
# so its gradient is one product of whole matrices. In a sharded model it is a sum over each rank's rows, then over
# ranks, and its bits depend on them: see the last line. `SameWeights` fixes its order, too: see notebook 11.
#
# ## 3. The cost
#
# A dense causal call in bf16 by the length of a chunk. Ranks return gradients of keys by `direct`; the usual mode has
# the same layout, and returns fp32 on CPUs. (Between GPUs `direct` then returns half of that, bf16.) Held are the most
# rows in nodes that wait for their siblings, as a multiple of a rank's rows. Work is the busiest rank's, beside the
# mean. Time is a CPU's on one rank, beside the usual mode's; nothing is claimed of it.


# %%
def counting(kind, name, counts):
    """Patch of a method that appends the rows of nodes that wait after each call."""
    usual = getattr(kind, name)

    def method(self, *arguments):
        usual(self, *arguments)
        held = ((tree.rows.length * tree.heads.per_group * tree.heads.groups, x) for tree, x in self._trees.items())
        counts.append(sum(rows * len(nodes.waiting) for rows, nodes in held))

    return patch.object(kind, name, method)


def seconds(chunk):
    """CPU time of a call on one rank."""
    return timeit(lambda: attention(*x, incoming, alone, same_bits=chunk), timer=process_time, number=1)


*x, incoming = random_tensors(LONGER, torch.bfloat16, FEW)
alone = Layout.contiguous(LONGER, 1)
usual_seconds = min(seconds(None) for _ in range(5))
print(f"{LONGER} tokens; held by outputs and by gradients, on 1 rank, then on {RANKS}")
for chunk in CHUNKS:
    count, layout = LONGER // chunk, Layout.whole_chunks(LONGER, RANKS, chunk)
    ((_, parts),) = blocks_in_chunks(CAUSAL, (FEW, FEW), (LONGER, LONGER), chunk)
    positions = [layout.positions(rank) for rank in range(RANKS)]
    usual, fixed = (Setting(CAUSAL, positions, 1, FEW, FEW, HEAD_DIM, 2, chunk=c) for c in (None, chunk))
    of_usual, returned = (sent(setting, "direct").backward_gradients.sum() for setting in (usual, fixed))
    held = []
    for on in (alone, layout):
        with counting(PartOutputs, "merge", outputs := []), counting(PartSum, "insert", gradients := []):
            attention(*x, incoming, on, exchange="direct", same_bits=chunk)
        held += [max(rows) / FEW / max(on.counts) for rows in (outputs, gradients)]
    work, time = fixed.pairs.max() / fixed.pairs.mean(), seconds(chunk) / usual_seconds
    print(f"C={chunk:3}: {len(parts):4} parts; returned {returned // 1024:4} KiB, {returned / of_usual:.2f} of usual; "
          f"held {' '.join(f'{x:.2f}' for x in held)}; work {work:.2f}; time {time:.1f}")  # fmt: skip
    assert len(parts) == count * (count + 1) // 2, "each chunk of queries with each of keys up to its own"
    assert 2 ** max(held[:2]) <= count, "in order of keys a tree of n parts holds at most log2(n) nodes"
    assert returned >= of_usual and (work < 1.01) == (count >= 2 * RANKS)

# %% [markdown]
# **Half the chunk makes nearly four times the parts, and more bytes.** A rank returns several sums for a range of keys.
# With fewer than 2 `ranks` chunks work is uneven. Several ranks get parts in another order than one, and hold more.
