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
# # The attention in a model
#
# What does a training step of a whole model take with each way to share a sequence over GPUs? Recorded runs of
# `scripts/bench model`: a Llama-shaped and a LongNet-shaped model in eager mode, and the first with `torch.compile`;
# only the attention differs. A step is forward and backward, and gradients are not reduced. In each section (model,
# mode, tokens) the ways were measured by turns, so their times can be compared; those of different sections cannot.
#
# 1. Do all ways compute the same?
# 2. How does ours compare with the fastest of the others, and with one GPU's time divided by the number of GPUs?
# 3. What does a step cost the host, and how much memory does it take?
# 4. What does the GPU do in a step?

# %%
import sys

import matplotlib.pyplot as plt

from notebooks.figures import BLACK, COLOURS, DATA, binary, binary_ticks, record, style

sys.path.append(str(DATA.parents[1] / "scripts"))
from bench.model import STEP_COLUMNS, TITLE, table_line
from bench.step_run import MOST
from bench.step_timeline import IDLE, KINDS, MESSAGES
from bench.step_ways import EXCHANGES, MEANING, OURS, PEERS, UNCHECKED

style()

# %% tags=["parameters"]
EAGER = "model_steps_2xh200"  # record of steps in eager mode
COMPILED = "model_steps_compiled_2xh200"  # record of steps with torch.compile
TRACED = "fa4/model_timeline_2xh200"  # record of steps with `--timeline`
KERNELS_SHARE = 1.06  # of the kernels of one GPU / the number of GPUs, at most, those of ours at the longest
HOST_SHARE = 1.001  # of the time of a step on the wall, at most, in which the host has launched all of it

# %%
MADE_BY = "torchrun --nproc-per-node=2 scripts/bench model --only {} --json notebooks/data/{}.json"
FILES = {"eager": EAGER, "compiled": COMPILED}
FIELDS = ("device", "world", "commit", "command", "shape", "rows")
runs = [record(name, FIELDS, MADE_BY.format(mode, name)) for mode, name in FILES.items()]
for run in runs:
    print(run["world"], "x", run["device"], "| torch", run["torch"], "|", run["command"])
assert runs[0]["shape"] == runs[1]["shape"]
print(runs[0]["shape"])
rows = [row for run in runs for row in run["rows"]]
for way, meaning in MEANING.items():
    print(f"{way:17} {meaning}")

# %%
print(TITLE)
for row in rows:
    print(table_line(row))
timed = [row for row in rows if "ms" in row]
sections = {(row["model"], row["mode"]): {} for row in timed}
for row in timed:
    sections[row["model"], row["mode"]].setdefault(row["tokens"], {})[row["way"]] = row
assert {column for row in rows for column in row} <= set(STEP_COLUMNS)
assert all(OURS in ways for sizes in sections.values() for ways in sizes.values())

# %% [markdown]
# ## All ways compute the same
#
# At the smallest size each way's losses, token by token, and its gradients, summed over the GPUs, are compared with
# those of an fp32 model with the oracle's attention. How far bf16 alone is from that is what one GPU shows. LongNet's
# published method takes the weights of its branches for constants in backward, so its gradients are others.

# %%
checked = [row for row in timed if "losses_off" in row]
print("distance from the exact ones / that of one GPU, eagerly:")
for row in checked:
    by_rounding = row["losses_off"] / row["rounding_losses"], row["gradients_off"] / row["rounding_gradients"]
    print(f"{row['model']:8} {row['mode']:9} {row['way']:17}", "losses {:5.2f}, gradients {:5.2f}".format(*by_rounding))
    assert by_rounding[0] <= MOST and (by_rounding[1] <= MOST or row["way"].startswith("published"))
assert not [row for row in rows if "wrong" in row]
assert {(row["model"], row["mode"]) for row in checked} == set(sections)

# %% [markdown]
# ## Ours beside the fastest of the others
#
# Below 1 ours is faster. Lines are medians of the rounds; the bars show the lowest and highest ratio of a round.
# Dashed: the ceiling, one GPU's time with the whole sequence, divided by the number of GPUs.

# %%
SHOWN = [*((way, "eager") for way in EXCHANGES if way != UNCHECKED), (OURS, "compiled")]
figure, both = plt.subplots(1, 2, figsize=(9.5, 3.6), sharey=True)
for axes, kind in zip(both, PEERS, strict=True):
    for number, (way, mode) in enumerate(SHOWN):
        sizes = sections.get((kind, mode), {})
        x = [tokens for tokens in sorted(sizes) if "best_peer" in sizes[tokens].get(way, {})]
        if not x:
            continue
        middle, low, high, ceiling = [], [], [], []
        for tokens in x:
            mine = sizes[tokens][way]
            best = sizes[tokens][mine["best_peer"]]
            ratios = [a["ms"] / b["ms"] for a, b in zip(mine["rounds"], best["rounds"], strict=True)]
            assert abs(mine["of_best_peer"] - mine["ms"] / best["ms"]) < 1e-9
            assert best["ms"] == min(sizes[tokens][peer]["ms"] for peer in PEERS[kind] if peer in sizes[tokens])
            middle.append(mine["of_best_peer"])
            low.append(max(0.0, middle[-1] - min(ratios)))
            high.append(max(0.0, max(ratios) - middle[-1]))
            ceiling.append(mine["efficiency"] * mine["ms"] / best["ms"] if "efficiency" in mine else float("nan"))
        axes.errorbar(x, middle, (low, high), fmt="o-", color=COLOURS[number], capsize=2, label=f"{way}, {mode}")
        if way == OURS:
            axes.plot(x, ceiling, "--", color=COLOURS[number], linewidth=0.8)
    axes.axhline(1, color=BLACK, linewidth=0.8)
    binary_ticks(axes.xaxis)
    axes.set(xlabel="tokens a GPU", title={"llama": "Llama-shaped", "longnet": "LongNet-shaped"}[kind])
both[0].set_ylabel("time of a step / best peer's")
both[0].legend()
plt.show()
for (kind, mode), sizes in sections.items():
    longest = {way: row for way, row in sizes[max(sizes)].items() if "best_peer" in row}
    print(f"{kind}, {mode}, {binary(max(sizes))} tokens a GPU, time of a step / best peer's:",
          ", ".join(f"{way} {row['of_best_peer']:.3f}" for way, row in longest.items()))  # fmt: skip

# %% [markdown]
# ## The host
#
# The time until the host has launched all of forward and backward. Where it is as long as the step, the host decides
# how long the step takes, and the GPU waits.

# %%
shown = sorted(sections)
figure, grid = plt.subplots(1, len(shown), figsize=(3.4 * len(shown), 3.4), sharey=True, squeeze=False)
for axes, (kind, mode) in zip(grid[0], shown, strict=True):
    sizes = sections[kind, mode]
    for number, way in enumerate((OURS, UNCHECKED, *PEERS[kind])):
        x = [tokens for tokens in sorted(sizes) if way in sizes[tokens]]
        if x:
            axes.plot(x, [sizes[t][way]["host_ms"] for t in x], "o-", color=COLOURS[number], label=way)
            axes.plot(x, [sizes[t][way]["ms"] for t in x], ":", color=COLOURS[number])
            assert all(sizes[t][way]["host_ms"] <= HOST_SHARE * sizes[t][way]["wall_ms"] for t in x)
    binary_ticks(axes.xaxis)
    axes.set(yscale="log", xlabel="tokens a GPU", title=f"{kind}, {mode}")
    axes.legend(fontsize=7)
grid[0][0].set_ylabel("host (solid), step (dotted) / ms")
plt.show()

# %% [markdown]
# ## Memory
#
# The peak of a step on the fullest GPU, with the parameters and gradients of the whole model. One GPU with the whole
# sequence has as many times the activations as there are GPUs.

# %%
for (kind, mode), sizes in sections.items():
    ways = sizes[max(sizes)]
    peaks = {way: row["peak_bytes"] for way, row in ways.items() if row["peak_bytes"] is not None}
    print(
        f"{kind}, {mode}, {binary(max(sizes))} tokens a GPU:",
        ", ".join(f"{w} {binary(b, 'B')}" for w, b in peaks.items()),
    )
    if "one-gpu" in peaks:
        assert peaks[OURS] < peaks["one-gpu"]

# %% [markdown]
# ## What the GPU does
#
# A traced step of the Llama-shaped model, every way on FlashAttention-4, in milliseconds by kind of work, on the GPU
# that computes longest; for one GPU with the whole sequence, divided by the number of GPUs. Messages run meanwhile and
# have no bar. "Idle" is the time in which the GPU computes nothing: it waits for messages, another GPU, or the host.

# %%
traced = record(TRACED, FIELDS, MADE_BY.format("eager --models llama --timeline", TRACED))
print(traced["world"], "x", traced["device"], "| torch", traced["torch"], "|", traced["command"])


def busy(ms):
    return sum(one for kind, one in ms.items() if kind not in (MESSAGES, IDLE))


spent = {}
for row in traced["rows"]:
    ms, share = max(row["timeline"], key=busy), traced["world"] if row["way"].startswith("one-gpu") else 1
    spent.setdefault(row["tokens"], {})[row["way"]] = {kind: one / share for kind, one in ms.items()}
figure, grid = plt.subplots(len(spent), 1, figsize=(7.2, 1.6 * len(spent)), squeeze=False)
for axes, (tokens, ways) in zip(grid[:, 0], sorted(spent.items()), strict=True):
    left = [0.0] * len(ways)
    for number, kind in enumerate(kind for kind in KINDS if kind != MESSAGES):
        widths = [ms[kind] for ms in ways.values()]
        axes.barh(list(ways), widths, left=left, color=COLOURS[number], label=kind)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set(title=f"{binary(tokens)} tokens a GPU", xlabel="ms")
grid[0][0].legend(ncol=3, fontsize=7)
plt.show()
for tokens, ways in sorted(spent.items()):
    alone = next(busy(ms) for way, ms in ways.items() if way.startswith("one-gpu"))
    for way, ms in ways.items():
        print(
            f"{binary(tokens):>6} {way:18} kernels {busy(ms):7.2f} ms, {busy(ms) / alone:5.3f} of one GPU's / GPUs;",
            f"idle {ms[IDLE]:6.2f}, messages {ms[MESSAGES]:6.2f}",
        )
longest = spent[max(spent)]
share = busy(longest[OURS]) / next(busy(ms) for way, ms in longest.items() if way.startswith("one-gpu"))
assert share <= KERNELS_SHARE
