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
# # Does perturbation tell defects from rounding? A published claim
#
# The claim (TTrace, arXiv 2506.09280): change the numbers of a trusted run by their last bit, scale the change of the
# results, and what deviates more is a bug, in bf16 too. `verification.models.tolerance` estimates rounding likewise in
# fp32 and bf16: a training step in one process, with every rounded number changed by up to its last bit, six times. In
# fp64 it has a threshold instead. For a factor on the effect of that change this notebook asks:
#
# 1. **False alarms**: which share of the recorded deviations of sound training steps (`training`) is larger?
# 2. **Misses**: which share of the seeded defects of the training step is smaller? The deviations are those of the
#    recorded search in fp64 (`seeded_defects`), each relative to the largest number of its quantity. The tolerances are
#    those of drawn training steps. So this is an estimate: a defect need not deviate by as much in each step.

# %%
import os
from dataclasses import replace
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings

from notebooks.figures import BLUE, VERMILLION, record, seeded_defects, style
from verification.models.noise import UNIT_ROUNDOFF
from verification.models.results import largest
from verification.models.tolerance import FACTOR, THRESHOLD, rounding_scale
from verification.mutants.catalogue import DEFECTS
from verification.training.dense.dense_step import train_densely
from verification.training.strategies import training_cases

style()

# %% tags=["parameters"]
LONG = os.environ.get("NOTEBOOKS_LONG") == "1"  # STEPS_LONG in place of STEPS
STEPS = 30  # training steps that are drawn
STEPS_LONG = 200
SEED = 15  # with which they are drawn
RANKS = 2  # of the drawn steps, of which one process computes the whole
RECORD = "training"  # sound training steps, for false alarms
FACTORS = [2.0**k for k in range(-3, 8)]  # on the effect of the last bit

# %%
DTYPES = {"float32": BLUE, "bfloat16": VERMILLION}
QUANTITIES = {  # by property
    "logits": "logits", "loss of step one": "losses", "gradients after step one": "gradients",
    "norm of the gradients": "norms", "parameters after the last": "parameters",
    "losses, norms of later steps": "losses",
}  # fmt: skip
drawn = []


@seed(SEED)
@settings(
    max_examples=STEPS_LONG if LONG else STEPS, database=None, deadline=None, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(training_cases(RANKS))
def draw(case):
    if not case.model.has_steps:
        drawn.append(case)


draw()
effects = {dtype: {name: [] for name in set(QUANTITIES.values())} for dtype in DTYPES}  # relative, of one last bit
for case in drawn:
    exact = train_densely(case).quantities()
    for dtype, by_quantity in effects.items():
        typed = replace(case, dtype=dtype)
        scale = rounding_scale(typed, exact, partial(train_densely, typed))
        for name, named in exact.items():
            if named and (size := largest(named)) > 0:
                by_quantity[name].append(max(scale[name].values()) / size + UNIT_ROUNDOFF[dtype])
for dtype, by_quantity in effects.items():
    medians = ", ".join(f"{name} {np.median(x):.1e}" for name, x in sorted(by_quantity.items()))
    print(f"{dtype}, {len(drawn)} steps, median effect of the last bit: {medians}")

# %%
sound = {
    dtype: FACTOR * np.concatenate([x["ratios"] for x in record(RECORD)["deviations"] if x["dtype"] == dtype])
    for dtype in DTYPES
}
seeded = {defect.name for defect in DEFECTS if defect.subject == "training"}
defects = [
    (QUANTITIES[x["check"]], THRESHOLD * x["ratio"]) for x in seeded_defects()
    if x["name"] in seeded and x["check"] in QUANTITIES and x["dtype"] == "float64" and x["ratio"]
]  # fmt: skip
factors = np.array(FACTORS)
alarms = {dtype: np.array([(x > f).mean() for f in factors]) for dtype, x in sound.items()}
misses = {
    dtype: np.array([np.mean([np.mean(f * np.array(effect[name]) > size) for name, size in defects]) for f in factors])
    for dtype, effect in effects.items()
}
print(f"{len(defects)} defects, {', '.join(f'{len(x)} sound numbers in {dtype}' for dtype, x in sound.items())}")
print("factor          " + " ".join(f"{f:7g}" for f in factors))
for name, shares in (("false alarms", alarms), ("misses", misses)):
    for dtype in DTYPES:
        print(f"{name:12} {dtype:8}" + " ".join(f"{x:7.1%}" for x in shares[dtype]))

# %%
figure, axes = plt.subplots(figsize=(6.6, 3.6))
for dtype, colour in DTYPES.items():
    axes.semilogx(factors, 100 * alarms[dtype], "o--", color=colour, label=f"{dtype}, false alarms")
    axes.semilogx(factors, 100 * misses[dtype], "s-", color=colour, label=f"{dtype}, misses")
axes.axvline(FACTOR, color="black", linestyle=":", label="factor used here")
axes.set(xlabel="factor on the effect of the last bit", ylabel="%", title="Held in fp32; in bf16 only with misses")
axes.legend(fontsize=8)
plt.show()
quiet = {dtype: factors[alarms[dtype] == 0].min() for dtype in DTYPES}
at_once = {dtype: misses[dtype][factors == quiet[dtype]].item() for dtype in DTYPES}
for dtype in DTYPES:
    print(f"{dtype}: no false alarm from factor {quiet[dtype]:g} on, where {at_once[dtype]:.1%} are missed")
used = factors == FACTOR
assert alarms["float32"][used] == alarms["bfloat16"][used] == 0
assert at_once["float32"] == 0 and misses["float32"].max() == 0
assert at_once["bfloat16"] > 0.05 and misses["bfloat16"][used] > 0.2
assert min(size for _, size in defects) > THRESHOLD, "in fp64 the threshold misses none of them"

# %% [markdown]
# **Held in fp32**: factors from 4 to 128 separate all. **In bf16 only with misses**: the smallest factor without a
# false alarm misses a tenth of the defects, and 16, which is used here to be safe with steps that are not drawn, a
# third. The effect of the last bit of bf16 is some percent of a gradient, and some defects change it by less. In fp64
# every one of these defects is beyond the threshold, and recorded rounding is four decades below it (notebook 06): so
# most training steps are drawn in fp64. Attention itself has derived bounds for each entry in every type (`04a`). Other
# draws of 20 steps gave 10 and 12 % of misses at factor 2, and 32 and 45 % at 16.
