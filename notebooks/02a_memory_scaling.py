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
# # Memory of a rank, by sequence length and number of ranks
#
# A rank of a ring should hold $O(n/p)$. Two questions:
#
# 1. Do measurements show this for each exchange? `ring` passes keys and values from neighbour to neighbour, `direct`
#    fetches only the rows that are needed from their owner, `gather` receives everything (a baseline that is $O(n)$).
# 2. Does the closed form of `reference/cost.py` give the number of bytes?
#
# (`02b_longest_sequence` says how long a sequence may then be, `02c_memory_on_gpus` what GPUs took.)
#
# A rank holds most in backward. With $L = n/p$ local tokens, $H$ query and $H_k$ key/value heads of dimension $D$, $b$
# bytes an element in the working type and $a$ in the accumulator's (4; 8 for fp64), it holds:
#
# | term | bytes | in |
# |---|---|---|
# | q, k, v, out, lse | $L\,(2 (H + H_k) D\, b + H a)$ | `cost.resident(...).shards` |
# | incoming gradients of out and lse | $L\,(H D\, b + H a)$ | |
# | sums of dq, dk, dv | $L\,(H + 2 H_k) D\, a$ | `cost.resident(...).gradients` |
# | communication buffers | by exchange, bucket and pattern | `cost.buffers(...).backward` |
# | workspace of a kernel call | at most a few tensors as large as the queries | `verification.check.workspace_limits` |
#
# With `NOTEBOOKS_LONG=1` in the environment, sequences are longer and there are more world sizes.

# %%
import gc
import os
import tempfile

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from notebooks.figures import (
    BLUE,
    GREEN,
    VERMILLION,
    binary,
    binary_ticks,
    legend_below,
    power_law,
    style,
    sum_of,
)  # fmt: skip
from reference import Pattern, cost
from verification.case import Case
from verification.check.workspace_limits import limits
from verification.problems.real_size import measured
from verification.run.backends import GlooBackend
from verification.run.memory_meter import Meter
from verification.run.rank import run_attention, shards
from verification.run.simulation.simulation import Simulation

torch.set_num_threads(1)
style()

# %% tags=["parameters"]
LONG = os.environ.get("NOTEBOOKS_LONG") == "1"  # the values named _LONG in place of the others
LENGTHS = [2**7, 2**9, 2**11, 2**13, 2**15, 2**17]  # tokens of the sequence, on 4 processes; three decades
LENGTHS_LONG = [2**7, 2**9, 2**11, 2**13, 2**15, 2**17, 2**19]
WORLDS = (1, 2, 4, 8)  # processes
AT = 2**15  # tokens of the sequence, on each number of processes
SIMULATED = (1, 2, 8, 32, 64)  # simulated ranks
SIMULATED_LONG = (1, 2, 4, 8, 16, 32, 64)
COUNTED = (1, 2, 8, 32)  # of these, where live tensors are counted too, which is slow
COUNTED_LONG = (1, 2, 4, 8, 16, 32, 64)
TOKENS = 2**14  # of the sequence on simulated ranks
HEAD_DIM = 32  # of the one head
SEED = 0  # of the tensors

# %%
lengths = LENGTHS_LONG if LONG else LENGTHS
many, counted = (SIMULATED_LONG, COUNTED_LONG) if LONG else (SIMULATED, COUNTED)
COLOUR = {"ring": BLUE, "direct": VERMILLION, "gather": GREEN}
# ring and direct nearly coincide: a wide line and hollow marks, with a thin line and small marks on them.
LINE = {
    "ring": dict(linewidth=4, alpha=0.35), "direct": dict(linewidth=1.2, linestyle="--"), "gather": dict(linewidth=1.2),
}  # fmt: skip
MARK = {
    "ring": dict(marker="o", markersize=8, fillstyle="none"), "direct": dict(marker="s", markersize=3),
    "gather": dict(marker="^"),
}  # fmt: skip
MIB = 2**20

# %% [markdown]
# ## The problem, and its closed form
#
# One branch has segments of 128 tokens; the other selects 64 rows of the whole sequence, so that every rank needs rows
# of every earlier rank, however long the sequence is. The bucket is a 25th of a shard, and at least 32 tokens. That is
# the default for shards beyond 25 Ki tokens; for shorter ones the default is 1024 tokens, which cost little memory and
# save much time, and would hide here what becomes of long ones.


# %%
def problem(tokens: int, ranks: int, exchange: str, world: int | None = None, **changes: object) -> Case:
    """fp32, one head, contiguous shards, causal, on `ranks` ranks out of `world` (by default all)."""
    pattern = Pattern.longnet([128, tokens], [1, max(1, tokens // 64)], 1, causal=True)
    settings = dict(
        world=world or ranks, group=tuple(range(ranks)), tokens=tokens, order="contiguous", cuts=None,
        pattern=pattern, batch=1, heads=1, kv_heads=1, head_dim=HEAD_DIM, dtype="float32", scale=None, score_scale=1.0,
        values="normal", seed=SEED, exchange=exchange, bucket=max(32, tokens // ranks // 25), kernel="auto",
        lse="unused", strided=False,
    )  # fmt: skip
    return Case(**settings | changes)


def setting(case: Case) -> cost.Setting:
    return cost.Setting(
        case.pattern, case.shards().positions, case.batch, case.heads, case.kv_heads, case.head_dim,
        case.torch_dtype.itemsize,
    )  # fmt: skip


def closed_form(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes per rank: (all terms but the workspace, buffers in forward, buffers in backward)."""
    one = setting(case)
    buffers, resident = cost.buffers(one, case.exchange, case.tokens_per_call), cost.resident(one)
    incoming = one.counts * case.batch * case.heads * (case.head_dim * one.itemsize + one.accumulator_itemsize)
    return resident.shards + incoming + resident.gradients + buffers.backward, buffers.forward, buffers.backward


def workspace(case: Case) -> np.ndarray:
    """Bytes per rank that the largest single tensor of a call may take."""
    _, forward, backward = closed_form(case)
    return np.array([
        limits(case, rank, int(there), int(back)).backward
        for rank, (there, back) in enumerate(zip(forward, backward, strict=True))
    ])  # fmt: skip


# %% [markdown]
# ## Real ranks: 1 to 8 processes, lengths over three decades
#
# Each rank is a process, and gloo connects them. It runs forward and backward and counts the bytes of all tensors that
# exist at a time (`verification.run.memory_meter.Meter`, which does not see memory inside one of torch's kernels).

# %%
assert lengths[-1] / lengths[0] >= 1000, "three decades"


def on_processes(cases: list[Case]) -> list[np.ndarray]:
    """Peak bytes of live tensors on each rank that takes part, for each Case."""
    backend, found = GlooBackend(timeout=300), []
    backend.start(max(WORLDS))
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            file = os.path.join(folder, "tensors.pt")
            torch.save(case.tensors(), file)
            backend.submit(measured, case, file)
            found.append(np.array([seen.tensor_bytes for seen in backend.collect()]))
    backend.close()
    return found


peaks: dict[tuple[str, int, int], int] = {}  # (exchange, ranks, tokens) -> bytes of the fullest rank
expected: dict[tuple[str, int, int], int] = {}
sizes = sorted({(4, n) for n in lengths} | {(ranks, AT) for ranks in WORLDS})
cases = [problem(n, ranks, exchange, max(WORLDS)) for ranks, n in sizes for exchange in COLOUR]
for case, seen in zip(cases, on_processes(cases), strict=True):
    terms, most = closed_form(case)[0], workspace(case)
    # A rank holds all of the closed form, and beyond it at most two of the largest tensors of a call.
    assert (terms <= seen).all() and (seen <= terms + 2 * most).all(), case
    key = case.exchange, len(case.ranks), case.tokens
    peaks[key], expected[key] = int(seen.max()), int(terms.max())

beyond = {key: peaks[key] / expected[key] - 1 for key in peaks}
print(f"{len(peaks)} problems; measured bytes beyond the closed form, relative to it:")
for n in sorted({key[2] for key in beyond}):
    print(f"  {binary(n, ' tokens'):>14}: " + ", ".join(f"{e} {beyond[e, 4, n]:.1%}" for e in COLOUR))

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.8))
for exchange, colour in COLOUR.items():
    on_four = sorted(n for e, p, n in peaks if e == exchange and p == 4)
    mark, line = MARK[exchange], LINE[exchange]
    left.loglog([], [], color=colour, **mark | line, label=f"{exchange}: marks measured, line closed form")
    for axes, at, keys in (
        (left, on_four, [(exchange, 4, n) for n in on_four]), (right, WORLDS, [(exchange, p, AT) for p in WORLDS])
    ):  # fmt: skip
        axes.loglog(at, [expected[key] / MIB for key in keys], color=colour, **line)
        axes.loglog(at, [peaks[key] / MIB for key in keys], color=colour, linestyle="", **mark)
left.set(title="4 processes: memory is linear in n", xlabel="sequence length n (tokens)", ylabel="peak per rank (MiB)")
right.set(title=f"n = {binary(AT)}: ring and direct fall as 1/p, gather does not", xlabel="ranks p")
right.set_xticks(WORLDS, [str(p) for p in WORLDS])
right.minorticks_off()
right.set_ylim(1, 100)
binary_ticks(left.xaxis)
legend_below(figure, left)
plt.show()

# %% [markdown]
# ### The fits
#
# There are two: the power law $M \propto p^{\beta}$ at fixed $n$, and the sum $M / n = A / p + B$, in which $A$ is
# divided among the ranks and every rank holds $B$ for each token of the whole sequence. Intervals are at 95 %.

# %%
p = np.array(WORLDS, float)
by_world = {e: power_law(p, [peaks[e, w, AT] for w in WORLDS]) for e in COLOUR}
by_length = {e: power_law(*zip(*[(n, peaks[e, 4, n]) for n in lengths if n >= 2**11], strict=True)) for e in COLOUR}
parts = {e: sum_of({"A": 1 / p, "B": np.ones_like(p)}, [peaks[e, w, AT] / AT for w in WORLDS]) for e in COLOUR}
for e in COLOUR:
    print(f"{e:6}  in p: {by_world[e]};  in n from 2 Ki on: {by_length[e]}")
    print(f"        bytes per token of the sequence: {parts[e]}")

for e in ("ring", "direct"):
    assert by_world[e].low < -1 < by_world[e].high < -0.8, "the interval holds -1, and nothing near 0"
    assert parts[e].low[1] < 0 < parts[e].high[1], "the interval of B holds 0"
    assert abs(parts[e].coefficients[1]) < 0.02 * parts[e].coefficients[0], "and B is less than 2 % of A"
    assert by_length[e].low < 1 < by_length[e].high, "linear in n"
assert by_world["gather"].low > -0.5, "gather falls more slowly than 1/p"
assert parts["gather"].low[1] > 0, "a part of its memory is not divided among the ranks"
assert by_length["gather"].low < 1 < by_length["gather"].high

# %% [markdown]
# `gather` is $O(n)$: in backward a rank holds the keys and values of all others ($2 b$ bytes an element), their
# gradients ($2 a$), and the gradients that $p - 1$ others return for its own keys and values ($2 a$ each). Per token of
# the *whole* sequence that is $H_k D\,(2 b + 2 a + 2 a)$ up to a share of $1/p$, for every $p$. The fit must find it:

# %%
constant = 1 * HEAD_DIM * (2 * 4 + 2 * 4 + 2 * 4)
fit = parts["gather"]
print(
    f"B of gather: {fit.coefficients[1]:.0f} [{fit.low[1]:.0f}, {fit.high[1]:.0f}] bytes per token, "
    f"by the formula {constant}"
)
assert fit.low[1] < constant < fit.high[1]

# %% [markdown]
# ## More ranks than this machine has: simulated, up to 64
#
# All ranks run in one process, one at a time (`verification.run.simulation.simulation`).
# `ring.comm.buffer_meter.measure` counts the communication buffers, which must equal the closed form *to the byte* on
# every rank, forward and backward. For `ring` and `direct` live tensors are counted as well, without the copies that
# the simulated network keeps. (It keeps the messages of `gather` until the last rank has finished, so for `gather` only
# the buffers are counted.)


# %%
class Uncounted:
    """A rank's transport whose own tensors do not count as the rank's."""

    def __init__(self, transport: object) -> None:
        self.rank, self.world_size = transport.rank, transport.world_size
        self._transport, self.calls = transport, transport.calls

    def post(self, sends: object, receives: object) -> object:
        with _disable_current_modes():
            pending = self._transport.post(sends, receives)
        return Waited(pending)

    def all_equal(self, payload: bytes) -> bool:
        with _disable_current_modes():
            return self._transport.all_equal(payload)

    def all_gather(self, payload: bytes) -> list[bytes]:
        with _disable_current_modes():
            return self._transport.all_gather(payload)

    def prepare(self, key: object, outgoing: object) -> None:
        gc.collect()  # messages of the previous call refer to each other, and so keep its buffers
        self._transport.prepare(key, outgoing)

    def empty(self, *arguments: object) -> torch.Tensor:
        return self._transport.empty(*arguments)


class Waited:
    def __init__(self, pending: object) -> None:
        self._pending = pending

    def arrive(self) -> None:
        with _disable_current_modes():
            self._pending.arrive()

    def wait(self) -> None:
        with _disable_current_modes():
            self._pending.wait()


def one_rank(transport: object, case: Case, tensors: tuple, live_too: bool) -> tuple[int | None, int, int]:
    inputs = tuple(x.clone() for x in shards(case, transport.rank, tensors))
    if not live_too:
        run = run_attention(transport, case, inputs)
        return None, run.buffer_forward, run.buffer_backward
    meter = Meter(case.head_dim)
    for x in inputs:
        meter.count(x)
    run = run_attention(Uncounted(transport), case, inputs, meter=meter)
    return meter.peak, run.buffer_forward, run.buffer_backward


def simulated(case: Case, live_too: bool) -> tuple[np.ndarray | None, np.ndarray, np.ndarray]:
    tensors = case.tensors()
    gc.collect()
    gc.freeze()
    answers = Simulation(case.world, seed=1).run(lambda transport: one_rank(transport, case, tensors, live_too))
    gc.unfreeze()
    live, forward, backward = zip(*answers, strict=True)
    return np.array(live) if live_too else None, np.array(forward), np.array(backward)


live, buffers = {}, {}
for world in many:
    for exchange in COLOUR:
        live_too = exchange != "gather" and world in counted
        case = problem(TOKENS if live_too else 2**11, world, exchange)
        terms, forward, backward = closed_form(case)
        seen, seen_forward, seen_backward = simulated(case, live_too)
        assert np.array_equal(seen_forward, forward) and np.array_equal(seen_backward, backward), "to the byte"
        buffers[exchange, world] = int(seen_backward.max()) / case.tokens
        if seen is not None:
            assert (terms <= seen).all() and (seen <= terms + 3 * workspace(case)).all()
            live[exchange, world] = int(seen.max())

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.6))
for exchange, colour in COLOUR.items():
    boxes = [closed_form(problem(TOKENS, w, exchange))[2].max() / 1024 for w in many[1:]]  # as measured, to the byte
    right.loglog(many[1:], boxes, color=colour, label=f"{exchange}: marks measured, line closed form",
                 **MARK[exchange] | LINE[exchange])  # fmt: skip
    if exchange != "gather":
        terms = [closed_form(problem(TOKENS, w, exchange))[0].max() / MIB for w in many]
        left.loglog(many, terms, color=colour, **LINE[exchange])
        left.loglog(counted, [live[exchange, w] / MIB for w in counted], color=colour, linestyle="", **MARK[exchange])
left.set(
    title=f"n = {binary(TOKENS)}, simulated: 1/p up to {counted[-1]} ranks",
    xlabel="ranks p",
    ylabel="peak per rank (MiB)",
)
right.set(title="Buffers are small and bounded, except for gather", xlabel="ranks p", ylabel="buffers per rank (KiB)")
for axes in (left, right):
    axes.set_xticks(many, [str(w) for w in many])
    axes.minorticks_off()
legend_below(figure, right)
plt.show()

for exchange in ("ring", "direct"):
    fit = power_law(counted, [live[exchange, w] for w in counted])
    print(
        f"{exchange}: {fit}; all ranks together hold "
        f"{live[exchange, counted[-1]] * counted[-1] / live[exchange, 1]:.2f} times what one does"
    )
    by_part = sum_of({"A": 1 / np.array(counted), "B": np.ones(len(counted))}, [live[exchange, w] for w in counted])
    print(f"        bytes: {by_part}")
    assert fit.high < -0.8
    assert abs(by_part.coefficients[1]) < 0.02 * by_part.coefficients[0], (
        "the part that does not fall with p is less than 2 %"
    )
assert buffers["gather", 64] > buffers["gather", 2], "gather's buffers do not fall with p"
assert max(buffers["ring", 64], buffers["direct", 64]) < buffers["gather", 64] / 10

# %% [markdown]
# Shards are short here. The slope is not quite $-1$ because of two constants: the smallest bucket (32 tokens),
# of which a rank has up to five buffers, and the workspace of a call. With longer shards it comes closer.
