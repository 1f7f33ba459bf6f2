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
# # The training step
#
# Attention is right when its outputs and gradients are those of the oracle. A training is right when, besides, tokens
# and labels are sharded as the layout says, the loss is the mean over all ranks, gradients are averaged once, and so
# on. `scripts/train.py` does all that in one file: a byte-level LongNet language model on text that every Python brings
# along.
#
# 1. Dense against dilated attention at equal budget.
# 2. The same training on 1, 2 and 4 ranks.
# 3. How far rounding is from the smallest seeded defect.
# 4. A wrapper that trains wrong without a word: found, shrunk, explained.
#
# With `NOTEBOOKS_LONG=1` in the environment, the trainings of part 2 are longer.

# %%
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from scipy import stats

from notebooks.figures import BLUE, DATA, GREEN, ORANGE, SKY, VERMILLION, binary, record, seeded_defects, style
from reference import Pattern
from reference.cost import Setting, flops
from verification.mutants.catalogue import DEFECTS
from verification.training.training_case import TrainingCase

sys.path.append(str(DATA.parents[1] / "scripts"))
from train import BOUND

style()

# %% tags=["parameters"]
LONG = os.environ.get("NOTEBOOKS_LONG") == "1"  # STEPS_LONG in place of STEPS
PATTERNS_RECORD = "patterns"  # of part 1
CONFIDENCE = 0.95  # of the intervals over its seeds
STEPS = 30  # of each training of part 2
STEPS_LONG = 200
SIZES = "--tokens 256 --layers 2 --dim 32 --heads 4"  # of its model
BRANCHES = "--segment-length 64 128 256 --dilated-ratio 1 2 4"  # of its pattern
DTYPE = "float64"  # of its numbers
TRAINING_RECORD = "training"  # of part 3
PEERS_RECORD = "training_peers"  # of part 4

# %% [markdown]
# ## 1. Dense against dilated at equal budget
#
# The claim (LongNet, arXiv 2307.02486): dilated attention reaches the loss of dense attention at a fraction of its
# cost. For each of three seeds one model was trained twice, from the same parameters, on the same windows in the same
# order: once with dense causal attention, once with LongNet's. What was chosen before the run, and kept:
#
# - LongNet's published pattern (segments of 2048 to 32768 tokens, rates 1, 2, 4, 6, 12) and width (12 heads of 64),
#   sequences as long as its longest segment, and 4 of its 12 layers, so that a dense step takes about a tenth of a
#   second.
# - The source of Python's library as text: its manual is so short that it would be seen more than fifty times. Windows
#   at the end of the text are held out: no step sees them.
# - bf16 by autocast; AdamW with a constant rate that was tuned for neither pattern.

# %%
MADE_BY = "torchrun --nproc-per-node=1 scripts/bench patterns --seconds 65 --seeds 0 1 2 --held-out 8 --json FILE ..."
patterns = record(
    PATTERNS_RECORD, ("device", "commit", "command", "trainings", "tokens", "batch", "text_bytes"), MADE_BY
)
print(patterns["device"], "|", patterns["command"])
n, heads = patterns["tokens"], patterns["heads"]
STEP = n * patterns["batch"]  # bytes
by_seed = {}
for training in patterns["trainings"]:
    by_seed.setdefault(training["seed"], {})[training["pattern"]] = training
print(f"{patterns['parameters'] / 1e6:.1f} million parameters, {binary(STEP)} bytes a step, seeds {list(by_seed)}")


def pairs(training: dict) -> int:
    """(query head, query, key) pairs of a layer, counted exactly."""
    pattern = Pattern.longnet(training["segment_length"], training["dilated_ratio"], heads, True, "torchscale")
    return sum(flops(Setting(pattern, [np.arange(n)], 1, heads, heads, 64)).pairs)


first = next(iter(by_seed.values()))
share = pairs(first["dilated"]) / pairs(first["dense"])
step_ms = {
    name: 1e3 * np.median(np.concatenate([np.diff(both[name]["seconds"]) for both in by_seed.values()]))
    for name in ("dense", "dilated")
}
print(f"dilated: {share:.1%} of the pairs; a step takes {step_ms['dilated']:.0f} ms, dense {step_ms['dense']:.0f} ms")
assert pairs(first["dense"]) == heads * n * (n + 1) // 2 and len(by_seed) >= 3
assert share < 0.2 and step_ms["dilated"] < step_ms["dense"]

# %% [markdown]
# Losses are in nats per byte, on the held-out windows. Equal bytes: both saw what the dense training saw in all. Equal
# seconds: the time that the dense training took in all. Same loss: the first seconds and bytes at which the dilated
# training has the dense one's last loss. Intervals are Student's over the seeds, of differences within a seed.


# %%
def held_out_at(training: dict, axis: list[float], wanted: float) -> float:
    """The held-out loss where the axis, which has a value for each step, reaches `wanted`; between looks, on a line."""
    looks = training["held_out"]
    return float(np.interp(wanted, [axis[look["step"] - 1] for look in looks], [look["loss"] for look in looks]))


def reached(training: dict, axis: list[float], loss: float) -> float:
    """The value of the axis at the first look that has the loss, on a line from the look before."""
    looks = [(axis[look["step"] - 1], look["loss"]) for look in training["held_out"]]
    at = next(i for i, look in enumerate(looks) if look[1] <= loss)
    (x0, y0), (x1, y1) = looks[max(0, at - 1)], looks[at]
    return x1 if at == 0 else x0 + (y0 - loss) / (y0 - y1) * (x1 - x0)


def interval(values: list[float]) -> tuple[float, float, float]:
    """Mean, and the ends of its interval."""
    mean, half = np.mean(values), stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * stats.sem(values)
    return float(mean), float(mean - half), float(mean + half)


gained = {"equal bytes": [], "equal seconds": []}
spent = {"seconds": [], "bytes": []}
for seed, both in by_seed.items():
    dense, dilated = both["dense"], both["dilated"]
    last = dense["held_out"][-1]["loss"]
    seen = [STEP * (i + 1) for i in range(dilated["steps"])]
    assert dilated["steps"] >= dense["steps"] and dilated["seconds"][-1] >= dense["seconds"][-1] - 1
    at_bytes = held_out_at(dilated, seen, STEP * dense["steps"])
    at_seconds = held_out_at(dilated, dilated["seconds"], dense["seconds"][-1])
    gained["equal bytes"].append(last - at_bytes)
    gained["equal seconds"].append(last - at_seconds)
    spent["seconds"].append(reached(dilated, dilated["seconds"], last) / dense["seconds"][-1])
    spent["bytes"].append(reached(dilated, seen, last) / (STEP * dense["steps"]))
    print(
        f"seed {seed}: dense {STEP * dense['steps']:,} bytes in {dense['seconds'][-1]:.1f} s, loss {last:.3f}; "
        f"dilated at equal bytes {at_bytes:.3f}, at equal seconds {at_seconds:.3f}"
    )
for what, values in gained.items():
    print("{}: dilated has {:.3f} [{:.3f}, {:.3f}] less loss".format(what, *interval(values)))
for what, values in spent.items():
    print("same loss: dilated takes {:.3f} [{:.3f}, {:.3f}] of the {}".format(*interval(values), what))
assert interval(gained["equal seconds"])[1] > 0 and interval(spent["seconds"])[2] < 1
assert interval(gained["equal bytes"])[1] < 0 < min(gained["equal bytes"]), "three seeds do not settle equal bytes"

# %%
figure, sides = plt.subplots(1, 2, figsize=(9.5, 3.6), sharey=True)
for axes, unit in zip(sides, ("bytes", "seconds"), strict=True):
    for name, colour in (("dense", BLUE), ("dilated", VERMILLION)):
        for number, both in enumerate(by_seed.values()):
            training = both[name]
            looks = [look["step"] - 1 for look in training["held_out"]]
            x = STEP * (np.array(looks) + 1) / 1e6 if unit == "bytes" else np.array(training["seconds"])[looks]
            losses = [look["loss"] for look in training["held_out"]]
            axes.plot(x, losses, "o-", color=colour, linewidth=0.8, label=None if number else f"{name}, by seed")
    axes.set(ylim=(0.9, 2.5), xlabel="bytes seen (millions)" if unit == "bytes" else "seconds")
sides[0].set_ylabel("held-out loss (nats per byte)")
sides[0].set_title("Equal bytes: {:.2f} less loss, not settled".format(np.mean(gained["equal bytes"])))
sides[1].set_title("Equal seconds: held, {:.2f} less loss".format(np.mean(gained["equal seconds"])))
sides[0].legend()
plt.show()

# %% [markdown]
# At equal seconds the claim holds: the dilated training has less loss with every seed, and takes 44 to 75 % of the time
# to reach the dense one's last loss. At equal bytes it is ahead with all three seeds, but the interval contains 0, so
# whether the pattern also learns more from a byte is not settled. It is the start of a training of one size, some
# epochs over a small text: which pattern is ahead after a long one this does not say. A step takes 0.7 of the time with
# 0.13 of the pairs: the rest of the model costs the same, and each branch has kernel calls of its own.

# %% [markdown]
# ## 2. The same training on 1, 2 and 4 ranks
#
# The batch of a step depends on the step alone, so the loss is the same on any number of ranks, up to rounding. Here
# each training runs in fp64; "2 x 2" is two data ranks, each with a sequence over two ranks. Where the right picture
# has no dot, the losses are equal bit by bit.

# %%
ROOT = DATA.parents[1]
SCRIPTS = ROOT / "scripts"
number_of_steps = STEPS_LONG if LONG else STEPS
WAYS = {"1 rank": "--ranks 1", "2 ranks": "--ranks 2", "4 ranks": "--ranks 4", "2 x 2": "--ranks 4 --data 2"}
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{SCRIPTS}", "PYTHONWARNINGS": "ignore"}
curves = {}
for name, ranks in WAYS.items():
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "record.json"
        model = f"{SIZES} {BRANCHES} --dtype {DTYPE} {ranks}"
        steps = f"--steps {number_of_steps} --every {number_of_steps}"
        words = f"{model} {steps} --folder {folder} --json {file}".split()
        done = subprocess.run(
            [sys.executable, SCRIPTS / "train.py", *words], env=ENVIRONMENT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        curves[name] = np.array(json.loads(file.read_text())["losses"])
away = {name: np.abs(curve / curves["1 rank"] - 1) for name, curve in curves.items() if name != "1 rank"}
for name, differences in away.items():
    print(f"{name:8} differs from 1 rank by {differences.max():.1e} of the loss at most; allowed is {BOUND:.0e}")
assert all(differences.max() < BOUND for differences in away.values())
assert curves["1 rank"][-1] < curves["1 rank"][0] - 1

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.4))
for (name, curve), width, colour in zip(curves.items(), (7, 4, 2, 0.8), (SKY, ORANGE, GREEN, "black"), strict=True):
    left.plot(range(1, number_of_steps + 1), curve, color=colour, linewidth=width, label=name)
    if name in away:
        shown = np.where(away[name] > 0, away[name], np.nan)
        right.plot(range(1, number_of_steps + 1), shown, "o", color=colour, label=name)
left.set(xlabel="step", ylabel="loss (nats per byte)", title="Four curves, one upon the other")
right.axhline(BOUND, color=VERMILLION, linestyle=":", label="allowed")
right.set(yscale="log", xlabel="step", ylabel="relative difference from 1 rank", title="Their differences are rounding")
left.legend()
right.legend(ncols=2)
plt.show()

# %% [markdown]
# ## 3. How far rounding is from the smallest defect
#
# `python -m verification training` draws small models, meshes, layouts, wrappers, and so on, and compares each run with
# one process in fp64 that has the whole batch. How much may they differ? In fp64 the answer is one threshold. It is no
# fine judgement if there are only rounding below it and only defects above it, and nothing in between for many decades.
#
# Left, all numbers of drawn runs in fp64, by a recorded run: for each run and property the worst deviation, relative to
# the largest number of its kind. Right, the seeded defects of the training step, by the recorded search: for each the
# worst deviation of the run by which it was found, after shrinking. Defects that are found otherwise have no place
# there: by something exact (a wrong label, ranks that differ in a bit, bytes sent), an error, or in a lower precision.

# %%
RUN = "python -m verification training --seed 15 --json notebooks/data/training.json"
training = record(TRAINING_RECORD, ("deviations", "tolerance", "held", "examples"), RUN)
threshold = training["tolerance"]["float64"]
numbers = {entry["property"] for entry in training["deviations"]}  # all other properties are exact
rounding = {name: [] for name in sorted(numbers)}
for entry in training["deviations"]:
    if entry["dtype"] == "float64":
        rounding[entry["property"]] += [threshold * ratio for ratio in entry["ratios"]]
every = np.concatenate([np.array(found) for found in rounding.values()])
print(f"{training['examples']} runs, {len(every)} worst deviations in fp64; {(every == 0).sum()} of them are exactly 0")
for name, found in rounding.items():
    print(f"  {name:32} at most {max(found):.1e}")
assert training["held"] and every.max() < threshold

# %%
seeded = {defect.name for defect in DEFECTS if defect.subject == "training"}
outcomes = [outcome for outcome in seeded_defects() if outcome["name"] in seeded]
found = [outcome for outcome in outcomes if outcome["check"] is not None]
by_number = [o for o in found if o["check"] in numbers and o["ratio"] and o["dtype"] == "float64"]
defects = np.array([threshold * outcome["ratio"] for outcome in by_number])
print(f"{len(seeded)} seeded defects of the training step; {len(found)} of them were found within 300 examples:")
print(f"  {len(defects)} by numbers in fp64, {len(found) - len(defects)} otherwise")
for outcome in sorted(by_number, key=lambda outcome: outcome["ratio"])[:3]:
    print(f"  {threshold * outcome['ratio']:.1e}  {outcome['name']}")
below, above = np.log10(threshold / every.max()), np.log10(defects.min() / threshold)
print(f"empty decades: {below:.1f} below the threshold, {above:.1f} above it")
assert len(outcomes) == len(seeded) and len(found) > 0.9 * len(seeded)
assert below > 1 and above > 1, "the threshold is within the gap"

# %%
figure, axes = plt.subplots()
bins = np.arange(-18, 4, 0.5)
axes.hist(np.log10(every[every > 0]), bins, color=BLUE, label="rounding, in runs that hold")
axes.hist(np.log10(defects), bins, color=VERMILLION, label=f"{len(defects)} seeded defects")
axes.axvline(np.log10(threshold), color="black", linestyle=":", label="threshold")
axes.set(yscale="log", ylim=0.5, xlabel="worst relative deviation (power of ten)", ylabel="how many")
axes.set_title(f"{below + above:.0f} empty decades between rounding and the smallest defect")
axes.legend(loc="upper right")
plt.show()

# %% [markdown]
# ## 4. A wrapper that trains wrong without a word
#
# FairScale's `OSS` gives each rank a part of the parameters, which it alone steps and then sends to the others;
# `ShardedDataParallel` brings the gradients of all ranks to it. With torch's default `optimizer.zero_grad()`, which
# makes gradients `None`, they train wrong from the second step on (FairScale 0.4.13). FairScale's pages call
# `model.zero_grad()`, which is right; many training loops do not, and nothing tells them.
#
# **Found and shrunk.** `python -m verification training --peer` puts other people's wrappers into the drawn training
# steps. From its record, the smallest run that shows it:

# %%
PEERS = "python -m verification training --peer --json notebooks/data/training_peers.json"
verdicts = {peer["name"]: peer for peer in record(PEERS_RECORD, ("peers",), PEERS)["peers"]}
wrong, guarded = verdicts["fairscale/as-written"], verdicts["fairscale/guarded"]
print(f"{wrong['name']}, FairScale {wrong['version']}: {wrong['verdict']} in example {wrong['examples']}")
shrunk = [(TrainingCase.from_dict(seen["case"]), seen) for seen in (wrong, *wrong["others"])]
for case, seen in shrunk:
    print(f"  {seen['check']}: {case.world} ranks, {case.tokens} tokens, {case.steps} steps, {case.dtype}")
case, seen = min(shrunk, key=lambda pair: (pair[0].steps, pair[0].dtype != "float64"))
print(seen["message"].partition("\n")[0].partition("; ")[0])
for name in ("data", "batch", "order", "accumulation", "checkpointing", "clipping", "optimiser", "labels"):
    print(f"  {name:14} {getattr(case, name)}")
print(f"  {'model':14} layers {case.model.layers}, dim {case.model.dim}, heads {case.model.heads}")
print(f"{guarded['name']}: {guarded['verdict']} in {guarded['examples']} examples")
assert (wrong["verdict"], guarded["verdict"]) == ("counter-example", "held")
assert case.world == 2 and all(case.steps > 1 for case, _ in shrunk)

# %% [markdown]
# Shrinking never comes down to one step: that one is right. So here a small model is trained for longer, on two ranks,
# in three ways: with `optimizer.zero_grad()`; with `model.zero_grad()`; and, guarded, with `optimizer.zero_grad()` as
# `ring.integrations.fairscale` wraps it. Of the first parameter that rank 0 steps, the gradient is compared with the
# right one, and with that of rank 0's own tokens.

# %%
DEMONSTRATION = """
import json
from argparse import Namespace

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim import OSS
from train import Model, join, leave, windows

from ring import Layout
from ring.nn import ContextParallel, cross_entropy, next_tokens, shard_batch
from ring.integrations import fairscale

options = Namespace(tokens=256, batch=2, layers=1, dim=32, heads=2, segment_length=[64, 256], dilated_ratio=[1, 2],
                    seed=0, data=1, text="manual", held_out=0)
mesh, _ = join(options)
context = ContextParallel(Layout.contiguous(options.tokens, 2), mesh["context"])


def apart(found, wanted):
    return ((found - wanted).norm() / wanted.norm()).item()


def training(way):
    torch.manual_seed(0)
    model = Model(options).double()
    settings = dict(lr=0.1, momentum=0.9)
    if way == "guarded":
        sharded, optimizer = fairscale.wrap(model, torch.optim.SGD, mesh, **settings)
    else:
        optimizer = OSS(model.parameters(), optim=torch.optim.SGD, **settings)
        sharded = ShardedDataParallel(model, optimizer)
    parameters = list(model.parameters())
    mine = next(i for i, p in enumerate(parameters) if p is optimizer.partition_parameters()[0][0]["params"][0])
    losses, from_right, from_own, views = [], [], [], []
    for step in range(40):
        tokens = windows(step, options).long()
        batch = shard_batch(context, tokens, next_tokens(tokens))
        # What this rank's tokens alone give, and the average over the ranks.
        loss = cross_entropy(model(batch.tokens, batch.context), batch.labels, mesh)
        own = torch.autograd.grad(loss, parameters)[mine]
        right = own.clone()
        dist.all_reduce(right)
        right /= 2

        loss = cross_entropy(sharded(batch.tokens, batch.context), batch.labels, mesh)
        loss.backward()
        losses.append(loss.item())
        if dist.get_rank() == 0:
            from_right.append(apart(parameters[mine].grad, right))
            from_own.append(apart(parameters[mine].grad, own))
            memory = parameters[mine].grad.untyped_storage().data_ptr()
            views.append(memory in [bucket.buffer.untyped_storage().data_ptr() for bucket in sharded._bucket_list])
        optimizer.step()
        if way == "model.zero_grad()":
            sharded.zero_grad()
        else:
            optimizer.zero_grad()
    return {"losses": losses, "from right": from_right, "from own": from_own, "view": views}


found = {way: training(way) for way in ("optimizer.zero_grad()", "model.zero_grad()", "guarded")}
if dist.get_rank() == 0:
    print(json.dumps(found))
del mesh, context
leave()
"""
with tempfile.TemporaryDirectory() as folder:
    script = Path(folder) / "demonstration.py"
    script.write_text(DEMONSTRATION)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*torchrun, script], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
ways = json.loads(done.stdout.splitlines()[-1])
for way, seen in ways.items():
    for step in (0, 1, 2):
        right, own = seen["from right"][step], seen["from own"][step]
        print(f"{way:21} step {step + 1}: off the right one by {right:7.1e}, off rank 0's own by {own:7.1e};", end=" ")
        print("in the buffer" if seen["view"][step] else "not in a buffer")
usual = ways["optimizer.zero_grad()"]
assert usual["from right"][0] < 1e-12 and min(usual["from right"][1:]) > 0.01
assert usual["from own"][0] > 0.01 and max(usual["from own"][1:]) < 1e-12
for way in ("model.zero_grad()", "guarded"):
    assert max(ways[way]["from right"]) < 1e-12
    assert np.allclose(ways[way]["losses"], ways["guarded"]["losses"], rtol=1e-12, atol=0)
assert usual["view"][0] and not any(usual["view"][1:])
assert all(ways["model.zero_grad()"]["view"]) and not any(ways["guarded"]["view"])

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.4))
steps = range(1, len(usual["losses"]) + 1)
left.plot(steps, ways["guarded"]["losses"], color=BLUE, linewidth=4, alpha=0.4, label="guarded, and model.zero_grad()")
left.plot(steps, usual["losses"], color=VERMILLION, linewidth=1, label="optimizer.zero_grad()")
left.set(xlabel="step", ylabel="loss (nats per byte)", title="The loss falls: nothing looks wrong")
left.legend()
difference = np.abs(np.array(usual["losses"]) / ways["guarded"]["losses"] - 1)
right.plot(steps, np.maximum(difference, 1e-17), "o", color=VERMILLION, label="loss, from the guarded one")
right.plot(steps, np.maximum(usual["from right"], 1e-17), "x", color="black", label="gradient, from the right one")
right.set(yscale="log", xlabel="step", ylabel="relative difference", title="Step one is right, no other is")
right.legend(loc="center right")
plt.show()
assert difference[:2].max() < 1e-12 < difference[2:].min() and usual["losses"][-1] < usual["losses"][0] - 1

# %% [markdown]
# **Why.** At the first forward `ShardedDataParallel` makes each gradient a view of a buffer
# (`GradBucket._add_grad_as_view`). Backward adds into the views, a hook counts them, and when all have come, the
# *buffer* is reduced to the rank that steps them. `zero_grad()` drops the views. The next backward makes gradients of
# its own ("not in a buffer" above); the hook counts them all the same, and reduces the buffer, which holds what step
# one left there. The rank then steps by the gradient of its own tokens, and sends the result to all others: parameters
# are the same on all ranks, the loss falls, no error is raised.
#
# `model.zero_grad()` of `ShardedDataParallel` zeroes the buffer and leaves the views. The guard reduces the gradients
# themselves (`reduce_buffer_size=0`), so that either call is right.
