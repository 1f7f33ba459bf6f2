"""Laws about the state that a call leaves in a process: no cache entry that a later call could mistake for its own (as
with a key that lacks a field), no tensor of the caller, and no changed global setting.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from reference import validators
from reference.pattern import Branch, Pattern
from ring.comm.buffer_meter import measure
from ring.comm.transport import Transport
from verification.case import EXCHANGES, ORDERS, Case, Keys
from verification.check import properties
from verification.check.attention_on_ranks import AttentionOnRanks
from verification.check.laws.law import MAX_INTEGER, How, Law, Rule, anything, bounded, changed, flag
from verification.check.supported import check_supported
from verification.failures import WrongResult
from verification.run.observation import RESULTS
from verification.run.rank import run_attention, shards, whole_tensors
from verification.run.recording_transport import RecordingTransport
from verification.strategies.cases import cases, fused

# --- calls that differ in one thing -----------------------------------------------------------------------------------


def draw_changes(draw: st.DrawFn, case: Case) -> How:
    """Draw changes of fields that a plan depends on, by name, as JSON values."""
    branches = case.pattern.branches
    shifted = [i for i, branch in enumerate(branches) if can_shift(branch)]
    divisors = [n for n in range(1, case.heads + 1) if case.heads % n == 0 and n != case.kv_heads]
    changes: How = {
        "causal": not case.pattern.causal,
        "twice": draw(st.integers(0, len(branches) - 1)),
        "bucket": draw(st.sampled_from([n for n in (1, 2, 7, case.tokens, None) if n != case.bucket])),
        "exchange": draw(st.sampled_from([name for name in EXCHANGES if name != case.exchange])),
        "order": draw(st.sampled_from([name for name in ORDERS if name != case.order])),
        "batch": draw(st.sampled_from([n for n in (1, 2, 3) if n != case.batch])),
        "scale": draw(st.sampled_from([scale for scale in (None, 0.25, 2.0) if scale != case.scale])),
        "strided": not case.strided,
        "keys": draw(st.sampled_from(other_keys(case))),
        "window": draw(st.sampled_from(other_windows(case))),
        "sinks": draw(st.sampled_from([sinks for sinks in (None, "normal", "some") if sinks != case.sinks])),
    }
    if case.key_tokens == case.tokens:
        changes["documents"] = draw(st.sampled_from(other_documents(case)))
    changes["lse"] = draw(st.sampled_from([loss for loss in ("unused", "differentiated") if loss != case.lse]))
    if case.kernel != "flash":  # which takes neither softcaps nor other head dims of values
        changes["kernel"] = "math" if case.kernel == "auto" else "auto"
        changes["softcap"] = draw(st.sampled_from([cap for cap in (None, 1.0, 2.0) if cap != case.softcap]))
        dims = [dim for dim in (case.head_dim, 1, 2, 2 * case.head_dim) if dim != case.dims[1]]
        changes["value_dim"] = draw(st.sampled_from(dims))
    if len(case.ranks) > 1:
        changes["cuts"] = list(draw(st.sampled_from(_other_cuts(draw, case))))
    if divisors:
        changes["kv_heads"] = draw(st.sampled_from(divisors))
    if shifted:
        changes["shifted"] = draw(st.sampled_from(shifted))
    names = draw(st.lists(st.sampled_from(sorted(changes)), min_size=1, max_size=5, unique=True))
    return {name: changes[name] for name in names}


def with_change(case: Case, name: str, value: Any) -> Case:
    """Return the Case with that one change."""
    pattern, branches = case.pattern, case.pattern.branches
    if name in ("causal", "documents"):
        return replace(case, pattern=replace(pattern, **{name: value}))
    if name == "window":
        return replace(case, pattern=with_window(pattern, value))
    if name == "twice":
        return replace(case, pattern=replace(pattern, branches=(*branches, branches[value])))
    if name == "shifted":
        branch, shifted = branches[value], list(branches)
        assert isinstance(branch.offset, int)
        shifted[value] = replace(branch, offset=(branch.offset + 1) % branch.dilation_rate)
        return replace(case, pattern=replace(pattern, branches=tuple(shifted)))
    return changed(case, {name: value})


def other_documents(case: Case) -> list[list[int] | None]:
    """Return documents that a cache key of only their number, sum or sorted lengths confuses with the Case's."""
    half = case.tokens // 2
    documents: list[list[int] | None] = [None, [case.tokens], [half, case.tokens - half]]
    own = list(case.pattern.documents or ())
    documents += [own[1:] + own[:1], own[::-1]] if own else []
    giver = next((i for i, length in enumerate(own[:-1]) if length), None)
    if giver is not None:
        documents.append([length - (i == giver) + (i == giver + 1) for i, length in enumerate(own)])
    return [other for other in documents if (other and tuple(other)) != case.pattern.documents]


def other_keys(case: Case) -> list[list[Any] | None]:
    """Return keys that a cache key without them, or with their number or order alone, confuses with the Case's."""
    tokens, order, _ = case.keys or Keys(case.tokens, case.order)
    others = {other: Keys(tokens, other) for other in ("contiguous", "zigzag", "striped") if other != order}
    lengths = [Keys(tokens + 3, order)] if case.pattern.documents is None and order in ORDERS else []
    without = case.keys is not None and not (case.pattern.has_slices and tokens > case.tokens)  # slices may end beyond
    return [None if without else [tokens, "hilbert", None], *map(list, (*others.values(), *lengths))]


def _other_cuts(draw: st.DrawFn, case: Case) -> list[tuple[int, ...]]:
    """Return random cuts, and cuts that move one token between a rank and its neighbour."""
    inner = draw(st.lists(st.integers(0, case.tokens), min_size=len(case.ranks) - 1, max_size=len(case.ranks) - 1))
    cuts, counts = [(0, *sorted(inner), case.tokens)], case.shards().counts
    giver = draw(st.integers(0, len(counts) - 1))
    for taker in (giver - 1, (giver + 1) % len(counts)):
        if counts[giver] and taker % len(counts) != giver:
            moved = list(counts)
            moved[giver], moved[taker] = moved[giver] - 1, moved[taker] + 1
            cuts.append(tuple(accumulate(moved, initial=0)))
    return cuts


def with_window(pattern: Pattern, window: int | None) -> Pattern:
    """Return the pattern with that window in every branch."""
    return replace(pattern, branches=tuple(replace(branch, window=window) for branch in pattern.branches))


def other_windows(case: Case) -> list[int | None]:
    """Return windows that a cache key confuses with the Case's if it has no windows, or only a flag for them."""
    first = case.pattern.branches[0].window
    nearest = [] if first is None else [first + 1]
    windows = [*nearest, 0, 1, case.tokens // 3, case.tokens // 2, None]
    return [window for window in windows if with_window(case.pattern, window) != case.pattern]


def can_shift(branch: Branch) -> bool:
    return isinstance(branch.offset, int) and branch.dilation_rate > 1


@st.composite
def _draw_neighbours(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    case = draw(cases(world))
    kind = draw(st.integers(0, 9))
    if kind < 3:
        return case, draw_changes(draw, case)
    if kind < 5 and case.tokens > 2:  # `direct` cuts its messages by the bucket
        case = replace(case, exchange="direct", bucket=None if draw(st.booleans()) else case.tokens)
        return case, draw_changes(draw, case) | {"bucket": draw(st.integers(1, 1 + case.tokens // 4))}
    if kind < 7:  # cached entries of other documents fit best if their number is the same
        case = replace(case, keys=None)
        packed = case.pattern.documents or (case.tokens // 3, case.tokens - case.tokens // 3)
        case = replace(case, pattern=replace(case.pattern, documents=packed))
        return case, draw_changes(draw, case) | {"documents": draw(st.sampled_from(other_documents(case)[::-1]))}
    # The kernel of a tile depends on the gradient through lse, of which a plan knows nothing.
    case = replace(fused(draw, case), kernel="auto", lse="returned")
    return case, draw_changes(draw, case) | {"lse": "differentiated"}


def _may_shift(case: Case, name: str, value: Any) -> None:
    branches = case.pattern.branches
    if not can_shift(branches[validators.integer(name, value, 0, len(branches) - 1)]):
        raise ValueError(f"{name} is {value}; that branch must have one offset, and a rate of more than 1")


CHANGES: dict[str, Rule] = dict.fromkeys(
    ("exchange", "order", "cuts", "batch", "scale", "kernel", "lse", "strided", "sinks", "softcap", "keys"), anything
) | {
    "causal": flag,
    "twice": lambda case, name, value: validators.integer(name, value, 0, len(case.pattern.branches) - 1),
    "shifted": _may_shift,
    "bucket": bounded,
    "value_dim": bounded,
    "kv_heads": bounded,
    "documents": lambda case, name, value: value is None or validators.integers(name, value),
    "window": lambda case, name, value: value is None or validators.integer(name, value, 0, MAX_INTEGER),
}


def _precondition(case: Case, how: How) -> None:
    for name, value in how.items():
        check_supported(with_change(case, name, value))


def check_neighbours(ranks: AttentionOnRanks, case: Case, how: How) -> float:
    """A Case, Cases that differ from it in one field, and the first again give right results in the same processes."""
    worst = 0.0
    for call in (case, *(with_change(case, name, value) for name, value in how.items()), case):
        observations, expectation = ranks.observe_and_expect(call)
        worst = max(worst, *properties.check(call, expectation, observations).values())
    return worst


NO_CALL_TAKES_ANOTHER = Law(
    "no call takes another for its like", _draw_neighbours, check_neighbours, _precondition, how=CHANGES, some=True,
    share=0.12,
)  # fmt: skip


# --- a call leaves nothing behind -------------------------------------------------------------------------------------


@st.composite
def _draw_any(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    return draw(cases(world)), {}


def check_leaks(ranks: AttentionOnRanks, case: Case, how: How) -> float:
    """When the results of a call are dropped, none of its tensors is alive, and the process is as it was before."""
    ranks.backend.submit(find_leaks, case)
    for index, (altered, alive) in enumerate(ranks.backend.collect()):
        for names, state in ((altered, "changed by the call"), (alive, "in memory when all results are dropped")):
            if names:
                raise WrongResult(f"on index {index} of the group, {state}: {', '.join(names)}")
    return 0.0


class _BufferTracker(RecordingTransport):
    """A transport that keeps weak references to its buffers."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.buffers: list[tuple[str, StorageWeakRef]] = []

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        buffer = super().empty(name, shape, dtype, device)
        self.buffers.append((f"the buffer {name!r}", StorageWeakRef(buffer.untyped_storage())))
        return buffer


def find_leaks(transport: Transport, case: Case) -> tuple[list[str], list[str]]:
    """Task: return the names of the state that the call changed, and of the tensors that are still in memory."""
    shared = transport.rank != 0  # simulated ranks are threads: only rank 0 compares the state that they share
    if not shared:
        # Advance each generator, so that a call that seeds it cannot restore its state.
        torch.rand(1), random.random(), np.random.random()  # noqa: NPY002 - the global generator is meant
    before = {name: read() for name, read in _STATE.items()}
    tracker = _BufferTracker(transport)
    with measure(RecordingTransport(transport)) as idle, measure(tracker) as meter:
        storages, peak = _run(tracker, case)
    altered = [name for name, read in _STATE.items() if read() != before[name] and not (shared and name in _SHARED)]
    altered += ["the buffer meter of an idle transport"] * (idle.bytes > 0)
    if (meter.held, meter.bytes) != (0, peak):
        altered.append(f"the buffer meter: {meter.held} bytes, peak {meter.bytes}; must be 0, peak {peak}")
    # On GPUs a sent buffer may stay in memory until its messages are known to be complete.
    alive = [] if case.device == "cuda" else [name for name, storage in storages if not storage.expired()]
    return altered, list(dict.fromkeys(alive))


def _run(tracker: _BufferTracker, case: Case) -> tuple[list[tuple[str, StorageWeakRef]], int]:
    """Return the storages of forward and backward, and the larger of their peak bytes of buffers."""

    def record(inner: Transport) -> _BufferTracker:
        return inner if isinstance(inner, _BufferTracker) else _BufferTracker(inner)

    inputs = tuple(x.clone() for x in shards(case, tracker.rank, whole_tensors(case)))
    run = run_attention(tracker, case, inputs, record=record)
    names = ("q", "k", "v", "dout", "dlse", "sinks")[: len(inputs)]
    named = zip((*names, *RESULTS), (*inputs, *run.results), strict=True)
    storages = [(name, StorageWeakRef(x.untyped_storage())) for name, x in named if x is not None]
    return storages + tracker.buffers, max(run.buffer_forward or 0, run.buffer_backward or 0)


_SHARED = ("torch's random numbers", "Python's random numbers", "NumPy's random numbers")
_STATE: dict[str, Callable[[], object]] = {
    "torch's random numbers": lambda: torch.get_rng_state().numpy().tobytes(),
    "Python's random numbers": random.getstate,
    "NumPy's random numbers": lambda: repr(np.random.get_state()),  # noqa: NPY002 - the global generator is meant
    "the default dtype": torch.get_default_dtype,
    "the default device": torch.get_default_device,
    "the number of threads": torch.get_num_threads,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "gradients enabled": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "autocast": lambda: torch.is_autocast_enabled("cpu"),
    "the precision of matrix products": torch.get_float32_matmul_precision,
}

NOTHING_LEFT_BEHIND = Law("a call leaves nothing behind", _draw_any, check_leaks, how={}, share=0.04)
