# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     notebook_metadata_filter: kernelspec,jupytext,-all
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # How a defect is found
#
# The verification does not know the defects. It draws a *Case* (sizes, pattern, layout, exchange, dtype, numbers), runs
# it on ranks, and compares all results with a dense oracle in fp64, within derived bounds. If the Case fails, it is
# shrunk to the smallest Case that fails in the same way, and that one is saved.
#
# 1. One defect is planted, found, shrunk, saved and replayed, step by step.
# 2. Which features the drawn Cases cover.
# 3. How many examples it takes to find each seeded defect.
#
# `NOTEBOOKS_LONG=1` looks for more defects with more seeds.

# %%
import dataclasses
import difflib
import io
import json
import os
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from IPython.display import display

from notebooks.figures import BLUE, GREEN, ORANGE, SKY, VERMILLION, legend_below, seeded_defects, style
from reference import Pattern, attention
from reference.pattern import multiplicity
from reference.svg import Field, fields
from verification.case import Case
from verification.check.laws import LAWS
from verification.console import Console
from verification.experiments import EXAMPLES, law_experiment
from verification.failures import VerificationFailure
from verification.mutants.catalogue import DEFECTS, by_name
from verification.mutants.plant import preparation
from verification.mutants.search import SOON, try_all
from verification.replay.replay import replay
from verification.report.coverage import FEATURES, Coverage
from verification.report.report import Report
from verification.run.backends import GlooBackend, SimBackend, observe_on
from verification.runner import PROFILES, WORLDS, RunPlan, save
from verification.search.search import TIMEOUT, Search

style()

# %% tags=["parameters"]
LONG = os.environ.get("NOTEBOOKS_LONG") == "1"  # SEEDS_LONG in place of SEEDS
DEFECT = "phase-from-local-rows"  # planted in part 1, whose pictures are of this one
PROFILE = "quick"  # of `scripts/verify`: how many examples are drawn in parts 1 and 2
SEED = "2"  # of these examples
CURVE_SEEDS = ("1", "2", "3")  # of the curves of covered features
CURVE_CASES = 300  # drawn for each curve, at least 200
CURVE_RANKS = 4  # on which they are drawn
SEEDS = 1  # with which each of the six defects is looked for in part 3
SEEDS_LONG = 20


# %%
def silent() -> Report:
    return Report(Console(io.StringIO()))


# %% [markdown]
# ## 1. One defect, from planting to replay
#
# A seeded defect replaces text in the source. This one counts the dilated grid in rows of the shard instead of
# positions of the sequence. Each rank by itself looks right, since it takes every $r$-th row.

# %%
defect = by_name(DEFECT)
(edit,) = defect.edits
print(defect.about, edit.file, "", sep="\n")
print(*difflib.ndiff(edit.was.splitlines(), edit.becomes.splitlines()), sep="\n")

# %% [markdown]
# **Plant.** The defect is planted in the processes of the ranks, never in this one. The ranks are simulated.
#
# **Find and shrink.** `Search` lets Hypothesis draw Cases and checks each. After the first failure, it draws smaller
# Cases similar to it and keeps the smallest one that breaks the same property in the same way. The cell records every
# Case that is checked.

# %%
planted = preparation(defect)
looked: list[tuple[Case, VerificationFailure | None]] = []


def look(backend, case):
    """The check of an ordinary example; the outcome is recorded."""
    try:
        ratios = EXAMPLES.check(backend, case)
    except VerificationFailure as failure:
        looked.append((case, failure))
        raise
    looked.append((case, None))
    return ratios


ranks = SimBackend(TIMEOUT, planted)
ranks.start(2)
search = Search(dataclasses.replace(EXAMPLES, check=look), ranks, silent(), world=2)
found = search.find(PROFILES[PROFILE].examples, SEED)
assert found is not None, "the defect was not found"
first = next(number for number, (_, failure) in enumerate(looked) if failure is not None)
case, smallest = looked[first][0], found.subject
print(f"failed: example {first + 1}; then {len(looked) - first - 1} smaller Cases were tried")


# %% [markdown]
# As the size of a Case we take the numbers in its queries, times its branches.


# %%
def size(case: Case) -> int:
    return case.batch * case.tokens * case.heads * case.head_dim * len(case.pattern.branches)


held = [(number, size(c)) for number, (c, failure) in enumerate(looked, 1) if failure is None]
failed = [(number, size(c)) for number, (c, failure) in enumerate(looked, 1) if failure is not None]
figure, axes = plt.subplots()
axes.step(*zip(*failed, strict=True), where="post", color=VERMILLION, linewidth=0.8, alpha=0.5)
axes.scatter(*zip(*held, strict=True), color=BLUE, marker="o", s=18, label="held")
axes.scatter(*zip(*failed, strict=True), color=VERMILLION, marker="x", s=24, label="failed")
axes.axvline(first + 1, color=VERMILLION, linestyle=":", linewidth=1)
axes.set(yscale="log", xlabel="Case checked (number)", ylabel="numbers in q, times branches")
axes.set_title(f"Found at example {first + 1}; shrinking takes its size from {size(case)} to {size(smallest)}")
axes.legend()
plt.show()
alike = [size(c) for c, failure in looked if failure is not None and failure.check == found.failure.check]
assert size(smallest) < size(case) and size(smallest) == min(alike)  # others fail in another way

# %% [markdown]
# **The smallest Case.** Every field that does not matter for the failure has its simplest value: one batch, one head of
# dimension one, one branch over the whole sequence, contiguous order, exchange `ring`, fp32. What remains is needed for
# the defect: two ranks with a token each, and a dilation. (Shrinking ends when no step makes the Case simpler.)

# %%
before, after = (json.loads(c.to_json()) for c in (case, smallest))
print(f"{'field':14} {'as drawn':44} smallest")
for name in before:
    as_drawn = str(before[name] if name != "pattern" else f"{len(before[name]['branches'])} branches")
    print(f"{name:14} {as_drawn[:43]:44} {after[name]}")
print(f"\n{type(found.failure).__name__}: {found.failure}")

(branch,) = smallest.pattern.branches
assert (smallest.tokens, smallest.world, smallest.batch, smallest.heads, smallest.head_dim) == (2, 2, 1, 1, 1)
assert (branch.segment_length, branch.dilation_rate, branch.offset) == (None, 2, 0)

# %% [markdown]
# Which token is wrong, and what did it see? Token 1 is not on the grid $0, 2, 4, \dots$ and must see nothing: its
# output must be exactly 0 and its lse $-\infty$. On its rank it is row 0, so the defect treats it as a token on the
# grid. Both tokens then see both, and the result is dense attention.

# %%
q, k, v, _, _ = smallest.tensors()
out = np.concatenate([seen.out for seen in observe_on(ranks, smallest)], axis=1)[0, :, 0, 0]
ranks.close()
exact, lse = (x.numpy().reshape(2) for x in attention(q, k, v, smallest.pattern))
dense = attention(q, k, v, Pattern.dense())[0].numpy().reshape(2)
for token in range(2):
    print(f"token {token}: with the defect {out[token]:+.5f}, oracle {exact[token]:+.5f}, dense {dense[token]:+.5f}")
assert exact[1] == 0 and lse[1] == -np.inf
assert np.abs(out - dense).max() < 1e-6 and np.abs(out - exact).min() > 0.1

# %%
positions = torch.arange(12)
right = multiplicity(smallest.pattern, positions, positions, 1)[0].numpy()
row = positions.numpy() % 3  # of four ranks with three tokens each
wrong = (row[:, None] % 2 == 0) & (row[None, :] % 2 == 0)
masks = {"Defined: every 2nd position": right, "Defect: every 2nd row of each shard": wrong}
panels = [Field(title, mask, (3, 6, 9), (3, 6, 9)) for title, mask in masks.items()]
display(fields(panels, (240, 240), ("query", "key"), "12", ["lines: the cuts between four ranks"]))
assert (right[:3, :3] == wrong[:3, :3]).all() and (right[3:6, 3:6] != wrong[3:6, 3:6]).any()

# %% [markdown]
# Blue: the key is seen. Among the tokens of rank 0 both patterns agree; among those of rank 1 they do not.
#
# **Save and replay.** The Case is all that is needed: a JSON file, from which any process makes the same tensors. With
# the defect it fails again, both on simulated ranks and on real processes that gloo connects; without the defect it
# holds.

# %%
with tempfile.TemporaryDirectory() as folder:
    saved = save(found, search, Path(folder))
    assert Case.from_json(saved.file.read_text()) == smallest
    replays = {}
    for where, prepare in (("with the defect", planted), ("without", None)):
        for backend in (SimBackend(TIMEOUT, prepare), GlooBackend(TIMEOUT, prepare)):
            replays[where, backend.name] = replay(saved.file, silent(), backend).failures
print(saved.file.name)
for (where, backend), failures in replays.items():
    print(f"{where:16} {backend:5} {failures[0].broken if failures else 'holds'}")
assert {key: len(failures) for key, failures in replays.items()} == {
    ("with the defect", "sim"): 1, ("with the defect", "gloo"): 1, ("without", "sim"): 0, ("without", "gloo"): 0,
}  # fmt: skip
assert {failures[0].broken for failures in replays.values() if failures} == {saved.broken}

# %% [markdown]
# ## 2. What the drawn Cases cover
#
# `verification/report/coverage.py` names features of a Case and decides from the Case alone whether it has them. The
# cell draws as many plain Cases as `scripts/verify` does in its quick profile, with the same strategies, and the Cases
# of the law about longer shards, without running them. Plain Cases cover all features.

# %%
plan = RunPlan(WORLDS, PROFILES[PROFILE], None, 0, "sim", Path())


def drawn(experiment, world: int, examples: int, seed: str) -> list[Case]:
    """The Cases that a run draws on that world size."""
    cases: list[Case] = []

    def only_note(_, subject):
        cases.append(experiment.case_of(subject))
        return {}

    noted = Search(dataclasses.replace(experiment, check=only_note), SimBackend(), silent(), world)
    assert noted.find(examples, seed) is None
    return cases


long_shards = next(law for law in LAWS if law.name == "memory of longer shards")
by_world = {}
for world in WORLDS:
    examples = plan.examples_for(world)
    by_world[world] = drawn(EXAMPLES, world, examples, SEED)
    share = max(1, round(examples * long_shards.share))
    by_world[world] += drawn(law_experiment(long_shards), world, share, SEED)
every = [c for cases in by_world.values() for c in cases]


def covered(cases) -> dict[str, int]:
    counted = Coverage()
    for c in cases:
        counted.add(c)
    return counted.to_dict()


coverage = {world: covered(cases) for world, cases in by_world.items()}
total = {name: sum(counts[name] for counts in coverage.values()) for name in FEATURES}
print(f"{len(every)} Cases; they cover {sum(count > 0 for count in total.values())} of {len(FEATURES)} features")
rarest = sorted(total, key=total.__getitem__)[:5]
print("rarest:", ", ".join(f"{name} ({total[name]})" for name in rarest))
assert all(total.values()), "no Case has this feature"
plain = covered(c for world in WORLDS for c in by_world[world][: plan.examples_for(world)])
assert all(plain.values()), "no plain Case has this feature"
assert all(coverage[1][name] == 0 for name in ("subgroup", "empty shard", "uneven cuts", "segment on several ranks"))

# %%
names = sorted(total, key=total.__getitem__)[:60]
half = len(names) // 2
figure, sides = plt.subplots(1, 2, figsize=(9.5, 5), sharex=True)
for axes, part in zip(sides, (names[half:], names[:half]), strict=True):
    shares = [100 * total[name] / len(every) for name in part]
    axes.hlines(range(len(part)), 0.1, shares, color=SKY, linewidth=1)
    axes.plot(shares, range(len(part)), "o", color=BLUE, label="all world sizes")
    for world, colour, marker in ((1, ORANGE, "v"), (8, GREEN, "^")):
        counts = [100 * coverage[world][name] / len(by_world[world]) or np.nan for name in part]
        axes.plot(
            counts, range(len(part)), marker, color=colour, label=f"{world} rank{'s' * (world > 1)}", markersize=3
        )
    axes.set(xscale="log", xlabel="share of Cases (%)", xlim=(0.1, 100), ylim=(-0.6, len(part) - 0.4))
    axes.set_yticks(range(len(part)), part, fontsize=7)
legend_below(figure, sides[0])
figure.suptitle("The 60 rarest features: some need several ranks", fontsize=10)
plt.show()

# %% [markdown]
# If a share $s$ of Cases has a feature, $n$ Cases miss it with probability $(1-s)^n$. The curve shows how many features
# the first plain Cases cover, in the order in which they were drawn on 4 ranks.

# %%
figure, axes = plt.subplots()
after_200 = []
for colour, seed in zip((BLUE, VERMILLION, GREEN), CURVE_SEEDS, strict=True):
    cases = drawn(EXAMPLES, CURVE_RANKS, CURVE_CASES, seed)
    has = np.array([[bool(test(c)) for test in FEATURES.values()] for c in cases])  # (Cases, features)
    met = np.logical_or.accumulate(has).sum(1)
    after_200.append(met[199])
    axes.step(range(1, len(met) + 1), met, where="post", color=colour, label=f"seed {seed}")
axes.axhline(len(FEATURES), color="black", linewidth=1, linestyle=":", label="all features")
axes.set(xscale="log", xlabel="Cases drawn", ylabel="features covered", ylim=(0, None))
axes.set_title(f"200 Cases cover {min(after_200)} to {max(after_200)} of {len(FEATURES)} features")
axes.legend()
plt.show()
assert min(after_200) > 0.9 * len(FEATURES)

# %% [markdown]
# ## 3. How many examples it takes to find a defect
#
# Six defects are planted here, one after another. Before that, the ranks without a defect must hold.

# %%
CHOSEN = [
    "merge-by-plain-average", "phase-from-local-rows", "accumulator-in-bfloat16",
    "outbox-packed-before-its-send-ended", "hidden-keys-sent", "sends-before-receives",
]  # fmt: skip
live = {name: [] for name in CHOSEN}
for seed in range(1, 1 + (SEEDS_LONG if LONG else SEEDS)):
    for outcome in try_all(CHOSEN, seed):
        live[outcome.name].append(outcome)
for name, outcomes in live.items():
    taken = [outcome.examples for outcome in outcomes]
    print(f"{name:38} {outcomes[0].kind:20} {outcomes[0].check:38} {taken if len(taken) < 6 else np.median(taken)}")
assert all(outcome.killed for outcomes in live.values() for outcome in outcomes)

# %% [markdown]
# Of the bugs seen in public ring-attention code and in training programs around it, how many are found within so many
# examples? The recorded search drew at most 300 examples for each. The project's own defects stand for classes that no
# public one covers; they show that each check can fail.

# %%
provenance = {defect.name: defect.provenance for defect in DEFECTS}
outcomes = [outcome for outcome in seeded_defects() if outcome["name"] in provenance]
public, own = ([o for o in outcomes if (provenance[o["name"]] == "own") == mine] for mine in (False, True))


def rate(group: list[dict], most: int) -> float:
    """The part of these defects that is found within so many examples."""
    return sum(o["check"] is not None and o["examples"] <= most for o in group) / len(group)


for name, group in (("seen in public code", public), ("the project's own", own)):
    print(
        f"{name:20} {len(group):4} defects;",
        ", ".join(f"{rate(group, n):.1%} within {n}" for n in (30, 100, SOON, 300)),
    )
taken = np.sort([o["examples"] for o in public if o["check"] is not None])
half, most = np.percentile(taken, (50, 90))
print(f"of public ones found, half within {half:.0f} examples, 90 % within {most:.0f}, all within {taken[-1]}")
print("not found:", ", ".join(o["name"] for o in outcomes if o["check"] is None) or "none")
assert rate(public, 300) > 0.95 and rate(own, 300) > 0.8
assert rate(public, SOON) >= 0.9

# %%
figure, (left, right_) = plt.subplots(1, 2, figsize=(9.5, 3.4), width_ratios=(3, 2))
for group, colour, name in ((public, BLUE, "seen in public code"), (own, ORANGE, "the project's own")):
    when = np.sort([o["examples"] for o in group if o["check"] is not None])
    left.step(when, 100 * np.arange(1, len(when) + 1) / len(group), where="post", color=colour, label=name)
left.axvline(SOON, color="black", linestyle=":", linewidth=1, label=f"{SOON} examples")
left.set(xscale="log", xlabel="examples until found", ylabel="defects found (%)", ylim=(0, 102))
left.set_title(f"Half of the public bugs are found within {np.median(taken):.0f} examples")
left.legend(loc="lower right")
in_record = {o["name"]: o["examples"] for o in outcomes}
for number, (name, now) in enumerate(live.items()):
    right_.plot([o.examples for o in now], [number] * len(now), "o", color=VERMILLION,
                label="planted above" if not number else None)  # fmt: skip
    right_.plot(in_record[name], number, "D", color=BLUE, fillstyle="none", markersize=7,
                label="recorded search" if not number else None)  # fmt: skip
right_.set_yticks(range(len(live)), live, fontsize=7)
right_.set(xscale="log", xlabel="examples until found", xlim=(0.8, 300))
right_.set_title("Six of them, with other seeds")
right_.legend(loc="lower right")
plt.show()

# %% [markdown]
# The defects that took most examples each need a rare combination. They show what a short run may miss.

# %%
for outcome in sorted(outcomes, key=lambda o: -o["examples"])[:8]:
    print(f"{outcome['examples']:5}  {outcome['name']:42} {outcome['check'] or 'not found'}")
    print(f"       {by_name(outcome['name']).about}")
