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
# # Dilated attention: who sees whom, and what it costs
#
# A *branch* cuts the $n$ positions into segments of length $w$. In each segment, a query head with offset $o$ selects
# every $r$-th position, beginning at $o$; the selected positions of a segment see each other:
#
# $$\mathrm{selected}(p) \iff p \bmod w \ge o \ \wedge\ (p \bmod w - o) \bmod r = 0$$
#
# $$M(i, j) = [\lfloor i/w \rfloor = \lfloor j/w \rfloor] \cdot \mathrm{selected}(i) \cdot \mathrm{selected}(j)
#   \cdot [j \le i \text{ if causal}]$$
#
# A pattern is one or more branches: a pair that $c$ branches see counts $c$ times under one softmax
# ([LongNet](https://arxiv.org/abs/2307.02486)). `reference/pattern.py` is that definition; `reference/oracle.py`
# computes attention by it, densely, in fp64. All numbers below come from these two.

# %%
import itertools
import math

import matplotlib.pyplot as plt
import numpy as np
import torch
from IPython.display import display

from notebooks.figures import BLUE, COLOURS, ORANGE, VERMILLION, binary, binary_ticks, power_law, style
from reference import Branch, Pattern, attention, gradients
from reference.closed_forms import segment_pairs
from reference.cost import Setting, flops
from reference.pattern import multiplicity
from reference.svg import Field, fields
from verification.case import Case
from verification.peers.adapters import dilated_attention_pytorch as fkodom

style()

# %% tags=["parameters"]
SEED = 1  # of the random tensors
N = 16  # tokens in the pictures of one branch
HEADS = 12  # of LongNet's published setting
SEGMENTS = (2048, 4096, 8192, 16384, 32768)  # tokens, of its branches
RATES = (1, 2, 4, 6, 12)  # dilation of these branches
TOKENS = 2**15  # of the sequence whose pairs are counted, a multiple of the segments
LENGTHS = [2**e for e in range(15, 21)]  # tokens, for the fit of the cost


# %%
def seen(pattern: Pattern, n: int, heads: int = 1) -> np.ndarray:
    """How many branches see each pair: (heads, n, n)."""
    positions = torch.arange(n)
    return multiplicity(pattern, positions, positions, heads).numpy()


# %% [markdown]
# ## 1. One branch

# %%
BRANCHES = [Branch(4), Branch(8, 2), Branch(8, 2, 1), Branch(16, 4), Branch(None, 3, 2), Branch(None)]
panels = []
for branch in BRANCHES:
    w, r, o = branch.segment_length, branch.dilation_rate, branch.offset
    mask = seen(Pattern((branch,), causal=True), N)[0]
    panels.append(Field(f"w = {w or 'n'}, r = {r}, offset = {o}: {mask.sum()} pairs", mask))
    w = w or N
    for i, j in itertools.product(range(N), repeat=2):  # the formula above
        selected = [p % w >= o and (p % w - o) % r == 0 for p in (i, j)]
        assert mask[i, j] == (i // w == j // w and all(selected) and j <= i)
for row in (panels[:3], panels[3:]):
    display(fields(row, (230, 230), ("query", "key"), str(N), ["causal; branches that see a pair:"]))

# %% [markdown]
# w makes blocks, r keeps every r-th row and column, the offset shifts.
#
# Selected rows and selected keys are the same positions. So a row sees at least itself, or nothing at all, and a single
# branch leaves $1 - 1/r$ of the rows without an output. If $r$ divides $w$ and $w$ divides $n$, the pairs of a branch
# form $n/w$ triangles of $g = w/r$ rows: $\frac{n}{w} \cdot \frac{g (g+1)}{2}$, about $n w / 2 r^2$.

# %%
for w, r in ((16, 1), (16, 2), (16, 4), (64, 4), (64, 16)):
    mask = seen(Pattern((Branch(w, r),), causal=True), 64)[0]
    print(f"w = {w:2}, r = {r:2}: {mask.sum():4} pairs, {mask.any(1).mean():6.1%} of the rows see something")
    assert mask.sum() == segment_pairs(64, w, r, 1, True) == 64 // w * (w // r) * (w // r + 1) // 2
    assert mask.any(1).mean() == 1 / r and (mask.any(1) == mask.diagonal()).all()

# %% [markdown]
# ## 2. A mixture of branches
#
# LongNet combines several branches whose $w$ and $r$ grow together, so that a query sees near keys densely and far keys
# sparsely. Its mixture weights each branch's output by its share of the softmax denominators, $O = \sum_b \alpha_b O_b$
# with $\alpha_b = e^{\mathrm{lse}_b} / \sum_{b'} e^{\mathrm{lse}_{b'}}$ (equations 9 and 10). This equals one softmax
# over the multiset of all keys that the branches see.

# %%
mixture = Pattern.longnet([8, 16, 32], [1, 2, 4], heads=1, causal=True)
count = seen(mixture, 32)[0]
display(mixture.picture(32))
apart = np.subtract.outer(np.arange(32), np.arange(32))
near, far = ((count > 0)[range_].mean() for range_ in ((apart >= 0) & (apart < 8), apart >= 8))
print(f"of the pairs less than 8 apart {near:.0%} are seen, of those farther apart {far:.0%}")
assert near > 2 * far > 0
assert count.max() == 3

generator = torch.Generator().manual_seed(SEED)
q, k, v = torch.randn(3, 1, 32, 1, 8, dtype=torch.float64, generator=generator)
out, lse = attention(q, k, v, mixture)
alone = [attention(q, k, v, Pattern((branch,), mixture.causal)) for branch in mixture.branches]
alpha = (
    torch.softmax(torch.stack([lse_b for _, lse_b in alone]), 0).transpose(2, 3).unsqueeze(-1)
)  # (branches, B, N, H, 1)
mixed = sum(a * out_b for a, (out_b, _) in zip(alpha, alone, strict=True))
print(f"one softmax over the multiset and the mixture of branches differ by {(out - mixed).abs().max():.1e}")
assert (out - mixed).abs().max() < 1e-13
assert (torch.logsumexp(torch.stack([lse_b for _, lse_b in alone]), 0) - lse).abs().max() < 1e-13

# %% [markdown]
# ## 3. LongNet's published setting
#
# The paper uses 12 heads and segments of 2048 to 32768 tokens with rates 1, 2, 4, 6, 12; here causal. How much of the
# sequence does each branch see, and what does it cost? `reference/cost.py` counts (query head, query, key) pairs
# exactly; the forward pass takes $4 d$ floating-point operations a pair.

# %%
longnet = Pattern.longnet(SEGMENTS, RATES, HEADS, causal=True)


def pairs(pattern: Pattern, n: int) -> int:
    """(query head, query, key) pairs, counted exactly."""
    return sum(flops(Setting(pattern, [np.arange(n)], 1, HEADS, HEADS, 64)).pairs)


n = TOKENS
dense = HEADS * n * (n + 1) // 2
rows = []
print("   w   r         pairs  of dense  rows selected, per head  keys of a row, at most")
for branch in longnet.branches:
    w, r = branch.segment_length, branch.dilation_rate
    cost = pairs(Pattern((branch,), causal=True), n)
    grids = [np.arange(o, w, r) for o in branch.offsets(HEADS)]  # of one segment
    selected = sum(map(len, grids)) / HEADS / w
    rows.append(cost)
    print(f"{w:5}  {r:2}  {cost:12,}  {cost / dense:8.3%}  {selected:23.2%}  {len(grids[0]):22}")
    assert cost == n // w * sum(len(grid) * (len(grid) + 1) // 2 for grid in grids)  # triangles, by hand
    assert math.isclose(selected, 1 / r, rel_tol=1e-3)
total = sum(rows)
print(f"  all      {total:12,}  {total / dense:8.3%}")
assert total == pairs(longnet, n)

# %% [markdown]
# The local branch, dense over 2048 tokens, costs nearly as much as all the others together. In a head, one row in $r$
# sees up to $w / r$ keys, which makes about $w / 2 r^2$ pairs a token. The rates grow so fast that this falls from
# branch to branch.

# %%
assert 0.45 < rows[0] / total < 0.5 and all(a > b for a, b in itertools.pairwise(rows))
names = [f"w = {binary(w)}, r = {r}" for w, r in zip(SEGMENTS, RATES, strict=True)]


def by_distance(branch: Branch, n: int) -> np.ndarray:
    """Causal pairs that lie 0, 1, ... n - 1 apart, per query and head on average.

    g selected rows of a segment have g - m pairs that are m r apart."""
    found = np.zeros(n)
    w, r = branch.segment_length, branch.dilation_rate
    for o in branch.offsets(HEADS):
        g = len(range(o, w, r))
        found[: g * r : r] += n // w * np.arange(g, 0, -1)
    return found / n / HEADS


distance = [by_distance(branch, n) for branch in longnet.branches]
for cost, found in zip(rows, distance, strict=True):
    assert math.isclose(found.sum() * n * HEADS, cost, rel_tol=1e-12)  # the same pairs, counted in another way

octaves = 2 ** np.arange(n.bit_length() - 1)
keys = np.array([np.add.reduceat(found, octaves) for found in distance])  # (branches, octaves)
in_dense = np.add.reduceat((n - np.arange(n)) / n, octaves)
figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.8), width_ratios=(3, 2))
left.plot(octaves, in_dense, "k:", label="dense attention")
left.plot(octaves, keys.sum(0), "k.-", label="all branches")
for name, colour, part in zip(names, COLOURS, keys, strict=False):
    left.plot(octaves[part > 0], part[part > 0], "o-", color=colour, linewidth=1, label=name)
left.set(
    yscale="log", xlabel="distance from query to key (tokens, up to twice as many)", ylabel="keys per query and head"
)
binary_ticks(left.xaxis)
left.set_title("Beyond 2 Ki tokens, each octave has fewer keys")
left.legend(fontsize=7)
right.barh(names, [100 * cost / total for cost in rows], color=COLOURS[: len(rows)])
right.invert_yaxis()
right.set(xlabel="share of all pairs (%)")
right.set_title("The local branch costs nearly half")
plt.show()
every = keys.sum(0)
peak = int(every.argmax())
print(f"most keys of a query lie {octaves[peak]} to {2 * octaves[peak]} tokens away")
print(f"of the farthest octave dense attention sees {in_dense[-1]:.0f}, LongNet {every[-1]:.1f}")
assert 2 * octaves[peak] <= 2048 and (np.diff(every[peak:]) < 0).all() and every[-1] < in_dense[-1] / 100

# %% [markdown]
# (At short distances the branches together count more keys than dense attention has: a key that several branches see
# counts several times.)
#
# **Cost against $n$.** Segments do not grow with the sequence, so the cost is linear in $n$; that of dense attention is
# quadratic. The fit is by least squares in logarithms, with the 95 % confidence interval of the exponent.

# %%
sparse = [pairs(longnet, n) for n in LENGTHS]
full = [HEADS * n * (n + 1) // 2 for n in LENGTHS]
laws = {"LongNet": power_law(LENGTHS, sparse), "dense": power_law(LENGTHS, full)}
figure, axes = plt.subplots()
for (name, law), points, colour in zip(laws.items(), (sparse, full), (BLUE, VERMILLION), strict=True):
    axes.loglog(LENGTHS, law(LENGTHS), color=colour, linewidth=1)
    axes.loglog(LENGTHS, points, "o", color=colour, label=f"{name}: {law}")
binary_ticks(axes.xaxis)
axes.set(xlabel="sequence length n (tokens)", ylabel="(head, query, key) pairs")
axes.set_title(
    f"Linear and quadratic cost: at {binary(LENGTHS[-1])} tokens, {full[-1] / sparse[-1]:.0f} times fewer pairs"
)
axes.legend()
plt.show()
print(*(f"{name}: {law}" for name, law in laws.items()), sep="\n")
assert all(2 * a == b for a, b in itertools.pairwise(sparse))  # exactly linear: the lengths are multiples of 32768
assert abs(laws["LongNet"].exponent - 1) < 1e-9 and abs(laws["dense"].exponent - 2) < 1e-3

# %% [markdown]
# ## 4. Offsets by head
#
# With one offset for all heads, every head leaves out the same positions. LongNet gives head $h$ the offset $h \bmod
# r$: with at least $r$ heads, some head selects every position.

# %%
by_head = seen(Pattern.longnet([16], [4], heads=4), 16, heads=4)
one = seen(Pattern.longnet([16], [4], heads=4, offsets="fkodom"), 16, heads=4)
few = seen(Pattern.longnet([16], [8], heads=4), 16, heads=4)
rules = {"One offset for all 4 heads": one, "Offset h mod 4": by_head, "Offset h mod 8, 4 heads": few}
panels = [Field(title, mask.mean(0)) for title, mask in rules.items()]
display(fields(panels, (230, 230), ("query", "key"), "16", ["share of the heads that see a pair:"]))
display(Pattern.longnet([16], [4], heads=4).picture(16))
assert by_head.sum(0).max() == 1  # no pair is seen by two heads
rows_seen = [mask.any(0).any(1).mean() for mask in (one, by_head, few)]
print("rows that some head of this branch selects:", *(f"{share:.0%}" for share in rows_seen))
assert rows_seen == [1 / 4, 1, 1 / 2]

# %% [markdown]
# With fewer heads than the rate, some positions are on no head's grid. In the published setting all rates divide the
# number of heads, so every branch selects every position, each in equally many heads.

# %%
for branch in longnet.branches:
    offsets = branch.offsets(HEADS)
    assert {offsets.count(o) for o in range(branch.dilation_rate)} == {HEADS // branch.dilation_rate}

# %% [markdown]
# ## 5. Edges: short tails, $r > w$, offsets past the end
#
# No length has to divide another. The last segment may be short; an offset past its end selects nothing there; with $r
# > w$ a segment has at most one selected position. A row that no branch selects has output 0, lse $-\infty$ and zero
# gradients, never NaN.

# %%
EDGES = {
    "w = 6, r = 2: a short tail": (14, Branch(6, 2)),
    "w = 6, r = 4, offset 3: past the tail": (14, Branch(6, 4, 3)),
    "w = 3, r = 5: r > w": (14, Branch(3, 5)),
    "w = 3, r = 5, offset 4: nothing at all": (14, Branch(3, 5, 4)),
}
panels = []
for title, (n, branch) in EDGES.items():
    pattern = Pattern((branch,), causal=True)
    mask = seen(pattern, n)[0]
    cuts = range(branch.segment_length, n, branch.segment_length)
    panels.append(Field(title, mask, cuts, cuts))
    q, k, v, dout = torch.randn(4, 1, n, 1, 4, dtype=torch.float64, generator=generator)
    out, lse = attention(q, k, v, pattern)
    dead = torch.from_numpy(~mask.any(1))
    assert (
        (out[0, dead] == 0).all() and (lse[0, 0, dead] == -torch.inf).all() and torch.isfinite(lse[0, 0, ~dead]).all()
    )
    for gradient in gradients(q, k, v, pattern, dout):
        assert (gradient[0, dead] == 0).all() and torch.isfinite(gradient).all()
display(fields(panels, (230, 230), ("query", "key"), "14", ["causal, n = 14; lines: where segments begin"]))
dead_rows = [int((~seen(Pattern((b,)), n)[0].any(1)).sum()) for n, b in EDGES.values()]
print("rows that see nothing:", dead_rows)
assert dead_rows == [7, 12, 9, 14]

# %% [markdown]
# ## 6. Other definitions
#
# Two public implementations differ from the paper's text, and from each other. The cells below compare them with the
# oracle in fp64.
#
# **microsoft/torchscale** gives neighbouring heads the same offset, $\lfloor h / \lceil H / r \rceil \rfloor$ instead
# of $h \bmod r$. It also pads segments with zeros up to a multiple of the rate; these take part in its softmax as keys
# with score 0, unless the causal mask hides them. No release of it has the dilated attention, so its method is written
# out here: it pads each segment, takes each head's rows, computes attention, and mixes the branches by lse.


# %%
def torchscale(q, k, v, segments, rates, causal):
    """(1, N, H, D) -> out, as torchscale gathers, pads and mixes; a row that a branch does not select has lse -1e8."""
    n, heads = q.shape[1:3]
    outs, lses = [], []
    for w, r in zip(segments, rates, strict=True):
        w = min(w, n)
        out, lse = torch.zeros_like(q), torch.full((1, n, heads, 1), -1e8, dtype=q.dtype)
        padded = -(-w // r) * r  # rows of a segment: a multiple of the rate
        for start, h in itertools.product(range(0, n, w), range(heads)):
            length = min(w, n - start)
            x = [
                torch.nn.functional.pad(t[0, start : start + length, h], (0, 0, 0, padded - length)) for t in (q, k, v)
            ]
            mine = range(h // -(-heads // r), padded, r)
            qs, ks, vs = (t[mine] for t in x)
            scores = qs @ ks.T * q.shape[-1] ** -0.5
            if causal:
                scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
            real = [index for index, row in enumerate(mine) if row < length]
            at = [start + mine[index] for index in real]
            out[0, at, h] = (scores.softmax(-1) @ vs)[real]
            lse[0, at, h] = scores.logsumexp(-1, keepdim=True)[real]
        outs.append(out)
        lses.append(lse)
    alpha = torch.stack(lses).softmax(0)
    return (alpha * torch.stack(outs)).sum(0)


def furthest(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


H, segments, rates = 6, (8, 16, 32), (1, 2, 3)
for n in (32, 27):
    q, k, v = torch.randn(3, 1, n, H, 8, dtype=torch.float64, generator=generator)
    for causal in (True, False):
        theirs = torchscale(q, k, v, segments, rates, causal)
        patterns = [Pattern.longnet(segments, rates, H, causal, offsets=rule) for rule in ("paper", "torchscale")]
        paper, own = (furthest(theirs, attention(q, k, v, pattern)[0]) for pattern in patterns)
        print(f"n = {n}, causal {causal!s:5}: difference for offsets h mod r {paper:.2f}, for its own {own:.1e}")
        assert paper > 0.1  # other pairs
        assert own < 1e-12 if causal else own > 1e-3  # padded keys come last: the causal mask hides them

# %% [markdown]
# With its own offsets and a causal mask, it equals the oracle up to rounding at any length. Without the mask the
# padding counts, even for $n = 32$, since 3 does not divide 32. (In backward it treats the mixture weights as
# constants; `04d_attached_and_detached` shows the effect.)
#
# **fkodom/dilated-attention-pytorch** gives each head one branch only, with offset $i \bmod r$ for branch $i$
# (`Pattern.head_groups`). Here the package itself runs, with plain attention in place of its GPU kernel. It finally
# divides each group's output by its sum over the positions, and by the number of groups.

# %%
fkodom.prepare()
GROUPS = Pattern.head_groups([8, 16, 32], [1, 2, 4], 6, causal=True)


def package(q, k, v, pattern):
    case = Case(
        world=1, group=None, tokens=q.shape[1], order="contiguous", cuts=None, pattern=pattern, batch=1,
        heads=q.shape[2], kv_heads=q.shape[2], head_dim=q.shape[3], dtype="float64", scale=None, score_scale=1.0,
        values="normal", seed=0, exchange="ring", bucket=None, kernel="math", lse="unused", strided=False,
    )  # fmt: skip
    return fkodom.attend(q, k, v, case, None)


q, k, v = torch.randn(3, 1, 32, 6, 8, dtype=torch.float64, generator=generator)
theirs, defined = package(q, k, v, GROUPS), attention(q, k, v, GROUPS)[0]
normalised = defined / defined.sum(1, keepdim=True) / len(GROUPS.branches)
print(f"difference between the package and attention over its groups: {furthest(theirs, defined):.2f}")
print(f"after that is divided by its sum over the positions and by the groups: {furthest(theirs, normalised):.1e}")
assert furthest(theirs, defined) > 0.1
assert torch.allclose(theirs, normalised, rtol=1e-9, atol=0)

# %% [markdown]
# Dividing by a sum over the positions makes causal rows depend on later tokens. If only the last value changes, the
# first outputs change too:

# %%
later = v.clone()
later[:, -1] += 1.0
leak = furthest(package(q, k, later, GROUPS)[:, :16], theirs[:, :16])
clean = furthest(attention(q, k, later, GROUPS)[0][:, :16], defined[:, :16])
print(f"change of the first 16 rows when the last token changes: package {leak:.2f}, oracle {clean:.0f}")
assert clean == 0 and leak > 1e-3

# %% [markdown]
# If the groups do not divide the heads, it lets group $i$ of size $g_i$ start at head $i \cdot g_i$: of 5 heads in
# groups of 3 and 2, it computes heads 0 to 2 and heads 2 to 3. Head 4 has no output at all.

# %%
uneven = Pattern.head_groups([8, 16], [1, 2], 5, causal=True)
q, k, v = torch.randn(3, 1, 16, 5, 8, dtype=torch.float64, generator=generator)
theirs, defined = package(q, k, v, uneven), attention(q, k, v, uneven)[0]
figure, axes = plt.subplots(figsize=(7.2, 2.8))
for shift, name, out, colour in ((-0.2, "oracle", defined, BLUE), (0.2, "package", theirs, ORANGE)):
    answered = (out[0] != 0).any(-1).double().mean(0).numpy()  # (heads,)
    axes.bar(np.arange(5) + shift, 100 * answered, 0.4, color=colour, label=name)
axes.set(xlabel="head", ylabel="rows with an output (%)", xticks=range(5))
axes.set_title("5 heads in 2 groups: the package leaves head 4 without output")
axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()
assert (theirs[:, :, 4] == 0).all() and (defined[:, ::2, 4] == 0).all() and (defined[:, 1::2, 4] != 0).all()
