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
# # Rounding errors beside their bounds: by length, ranks, type and size of the scores
#
# The oracle computes in fp64 throughout (`reference/oracle.py`); bounds are derived, not tuned (`reference/bounds.py`).
# All ranks are simulated (`verification.run.simulation.simulation`); their arithmetic is the same as that of real ranks
# on the CPU. `simulated_ranks.py` has what this notebook shares with the next two.

# %%
import os
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import torch

from notebooks.figures import BLACK, BLUE, GREEN, VERMILLION, binary_ticks, legend_below, power_law, style
from notebooks.simulated_ranks import PLAIN, errors, results

torch.set_num_threads(1)
style()

# %% tags=["parameters"]
LONG = os.environ.get("NOTEBOOKS_LONG") == "1"  # LENGTHS_LONG in place of LENGTHS
LENGTHS = [32, 64, 128, 256, 512]  # tokens of the sequence, by type
LENGTHS_LONG = [32, 64, 128, 256, 512, 1024, 2048, 4096]
RANKS = 4  # simulated, by length and by size of the scores
TOKENS = 256  # of the sequence, by ranks and by size of the scores
WORLDS = (1, 2, 4, 8, 16, 32, 64)  # simulated ranks, by ranks
FACTORS = [0.25, 1, 4, 16, 64, 256]  # on the queries
SEED = 0  # of the tensors

# %%
TYPES = {"float64": BLACK, "float32": BLUE, "bfloat16": VERMILLION, "float16": GREEN}
lengths = LENGTHS_LONG if LONG else LENGTHS
plain = replace(PLAIN, world=RANKS, tokens=TOKENS, seed=SEED)

# %% [markdown]
# ## By length and type
#
# 4 ranks, dense causal, normal inputs. Dots are the largest measured error, lines the largest bound. For every entry of
# every tensor in this notebook, an assertion checks that the error is within its own bound.

# %%
by_length = {(dtype, n): errors(replace(plain, tokens=n, dtype=dtype)) for dtype in TYPES for n in lengths}
figure, both = plt.subplots(1, 2, figsize=(9.5, 3.8))
for axes, name in zip(both, ("out", "dk"), strict=True):
    for dtype, colour in TYPES.items():
        axes.loglog(lengths, [by_length[dtype, n][name][0] for n in lengths], "o", color=colour, label=dtype)
        axes.loglog(lengths, [by_length[dtype, n][name][1] for n in lengths], "-", color=colour, alpha=0.6)
    axes.plot([], [], "-", color=BLACK, alpha=0.6, label="bound")
    axes.set(xlabel="sequence length n (tokens)", ylabel=f"largest error of {name}")
    binary_ticks(axes.xaxis)
both[0].set_title("Errors hardly grow with n; worst-case bounds do")
both[1].set_title("Gradients of keys: sums over n rows")
legend_below(figure, both[0])
plt.show()

for name in ("out", "lse", "dk"):
    seen = power_law(lengths, [by_length["float32", n][name][0] for n in lengths])
    bound = power_law(lengths, [by_length["float32", n][name][1] for n in lengths])
    print(f"float32 {name:3}: error {seen};  bound {bound}")
    assert seen.exponent < bound.exponent, "the worst case grows faster than the measured error"
    assert bound.high < 1.1, "the bound grows no faster than n"

# %% [markdown]
# In 16 bits the errors of out and dv are those of rounding the exact result once, at the end, since everything before
# is computed in fp32. So they do not grow with $n$. Backward computes dq and dk from the rounded output, so these also
# contain some of its rounding. The cell rounds the oracle's results to the type and compares the largest errors.

# %%
for dtype in ("bfloat16", "float16"):
    for n in (lengths[0], lengths[-1]):
        case = replace(plain, tokens=n, dtype=dtype)
        seen, expected = results(case)
        for name in ("out", "dq", "dk", "dv"):
            exact = expected.exact[name]
            rounded = torch.from_numpy(exact).to(case.torch_dtype).double().numpy()
            ratio = np.abs(seen[name] - exact).max() / np.abs(rounded - exact).max()
            # Backward computes dq and dk from the rounded output, so its rounding contributes.
            assert ratio < (1.01 if name in ("out", "dv") else 3), (dtype, n, name, ratio)
            print(f"{dtype:8} n = {n:5} {name:3}: largest error is {ratio:.3f} times that of one rounding")

# %% [markdown]
# ## By number of ranks
#
# With more ranks there are more partial results to merge: $p$ merges one after another. The weights of a merge add up
# to 1, so it does not enlarge earlier errors. The bound grows with $p$; the errors do not.

# %%
by_world = {
    (dtype, p): errors(replace(plain, world=p, dtype=dtype)) for dtype in ("float32", "bfloat16") for p in WORLDS
}
figure, axes = plt.subplots(figsize=(6.2, 3.5))
for dtype, colour in (("float32", BLUE), ("bfloat16", VERMILLION)):
    for name, mark in (("out", "o"), ("dk", "^")):
        axes.loglog(WORLDS, [by_world[dtype, p][name][0] for p in WORLDS], mark, color=colour, label=f"{dtype}, {name}")
        axes.loglog(WORLDS, [by_world[dtype, p][name][1] for p in WORLDS], "-", color=colour, alpha=0.6)
axes.set(
    title=f"n = {TOKENS}: errors do not grow with the number of ranks",
    xlabel="ranks p",
    ylabel="largest error; lines: bound",
)
axes.set_xticks(WORLDS, [str(p) for p in WORLDS])
axes.minorticks_off()
legend_below(figure, axes)
plt.show()
for dtype in ("float32", "bfloat16"):
    for name in ("out", "lse", "dq", "dk", "dv"):
        seen = [by_world[dtype, p][name][0] for p in WORLDS]
        assert max(seen) < 3 * min(seen), "64 times the ranks, less than 3 times the error"
        assert by_world[dtype, WORLDS[-1]][name][1] >= by_world[dtype, WORLDS[0]][name][1]
fit = power_law(WORLDS, [by_world["float32", p]["out"][0] for p in WORLDS])
print("float32, out, error by p:", fit)
assert fit.high < 0.2

# %% [markdown]
# ## By the size of the scores
#
# The queries are multiplied by a factor. The rounding error of a score is relative to the *products* that it sums, so
# it grows with the factor; the exponential turns this absolute error of a score into a relative error of a weight. The
# error of the lse grows likewise. If scores are so large that the softmax is a maximum, most outputs are exact, and
# errors remain in near ties only.

# %%
by_factor = {
    (dtype, f): errors(replace(plain, score_scale=f, dtype=dtype)) for dtype in ("float32", "bfloat16") for f in FACTORS
}
figure, both = plt.subplots(1, 2, figsize=(9.5, 3.5))
for axes, name in zip(both, ("lse", "out"), strict=True):
    for dtype, colour in (("float32", BLUE), ("bfloat16", VERMILLION)):
        axes.loglog(
            FACTORS, [by_factor[dtype, f][name][0] for f in FACTORS], "o", color=colour, label=f"{dtype}, measured"
        )
        axes.loglog(
            FACTORS,
            [by_factor[dtype, f][name][1] for f in FACTORS],
            "-",
            color=colour,
            alpha=0.6,
            label=f"{dtype}, bound",
        )
    axes.set(xlabel="factor on the queries", ylabel=f"largest error of {name}")
both[0].set_title("lse: in proportion to the scores, fp32 for both types")
both[1].set_title("out: in 16 bits the last rounding dominates")
legend_below(figure, both[0])
plt.show()
large = [f for f in FACTORS if f >= 4]
fit = power_law(large, [by_factor["float32", f]["lse"][0] for f in large])
print("float32, lse, error by factor from 4 on:", fit)
assert abs(fit.exponent - 1) < 0.15 and fit.low < 1 < fit.high
assert by_factor["bfloat16", FACTORS[-1]]["lse"][0] < 10 * by_factor["float32", FACTORS[-1]]["lse"][0], (
    "lse is fp32 for all inputs"
)
assert by_factor["bfloat16", FACTORS[-1]]["out"][0] < 3 * by_factor["bfloat16", FACTORS[0]]["out"][0]
