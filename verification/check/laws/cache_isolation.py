"""Laws about what a process keeps of a call: nothing that a later call could take for its own, as by a cache whose key
lacks a field, no tensor of the caller, and the process as it was.
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
from ring.comm.transport import RecordingTransport, Transport
from verification.case import EXCHANGES, ORDERS, Case
from verification.check import properties
from verification.check.expectation import expect
from verification.check.laws.law import MOST_INTEGER, How, Law, Rule, anything, bounded, changed, flag
from verification.check.supported import check_supported
from verification.failures import WrongResult
from verification.run.backends import Backend
from verification.run.rank import attend, observe, shards, whole_tensors
from verification.strategies.cases import cases, fused

# --- calls that differ in one thing -----------------------------------------------------------------------------------


def draw_changes(draw: st.DrawFn, case: Case) -> How:
    """Some changes of what a plan depends on, by name, as JSON has them."""
    branches = case.pattern.branches
    shifted = [i for i, one in enumerate(branches) if can_shift(one)]
    divisors = [n for n in range(1, case.heads + 1) if case.heads % n == 0 and n != case.kv_heads]
    found: How = {
        "causal": not case.pattern.causal,
        "twice": draw(st.integers(0, len(branches) - 1)),
        "bucket": draw(st.sampled_from([n for n in (1, 2, 7, case.tokens, None) if n != case.bucket])),
        "exchange": draw(st.sampled_from([name for name in EXCHANGES if name != case.exchange])),
        "order": draw(st.sampled_from([name for name in ORDERS if name != case.order])),
        "batch": draw(st.sampled_from([n for n in (1, 2, 3) if n != case.batch])),
        "scale": draw(st.sampled_from([scale for scale in (None, 0.25, 2.0) if scale != case.scale])),
        "strided": not case.strided,
        "documents": draw(st.sampled_from(other_documents(case))),
        "window": draw(st.sampled_from(other_windows(case))),
    }
    if case.kernel != "flash":  # which has no gradient through lse
        found["kernel"] = "math" if case.kernel == "auto" else "auto"
        found["lse"] = draw(st.sampled_from([loss for loss in ("unused", "differentiated") if loss != case.lse]))
    if len(case.ranks) > 1:
        found["cuts"] = list(draw(st.sampled_from(_other_cuts(draw, case))))
    if divisors:
        found["kv_heads"] = draw(st.sampled_from(divisors))
    if shifted:
        found["shifted"] = draw(st.sampled_from(shifted))
    chosen = draw(st.lists(st.sampled_from(sorted(found)), min_size=1, max_size=5, unique=True))
    return {name: found[name] for name in chosen}


def with_change(case: Case, name: str, value: Any) -> Case:
    """The Case with that one change."""
    pattern, branches = case.pattern, case.pattern.branches
    if name in ("causal", "documents"):
        return replace(case, pattern=replace(pattern, **{name: value}))
    if name == "window":
        return replace(case, pattern=with_window(pattern, value))
    if name == "twice":
        return replace(case, pattern=replace(pattern, branches=(*branches, branches[value])))
    if name == "shifted":
        one, others = branches[value], list(branches)
        assert isinstance(one.offset, int)
        others[value] = replace(one, offset=(one.offset + 1) % one.dilation_rate)
        return replace(case, pattern=replace(pattern, branches=tuple(others)))
    return changed(case, {name: value})


def other_documents(case: Case) -> list[list[int] | None]:
    """Such as a key takes for the Case's if it has but their number, their sum, or their lengths in any order."""
    half = case.tokens // 2
    found: list[list[int] | None] = [None, [case.tokens], [half, case.tokens - half]]
    own = list(case.pattern.documents or ())
    found += [own[1:] + own[:1], own[::-1]] if own else []
    giver = next((i for i, length in enumerate(own[:-1]) if length), None)
    if giver is not None:
        found.append([length - (i == giver) + (i == giver + 1) for i, length in enumerate(own)])
    return [other for other in found if (other and tuple(other)) != case.pattern.documents]


def _other_cuts(draw: st.DrawFn, case: Case) -> list[tuple[int, ...]]:
    """Cuts anywhere; and such as leave all but two ranks the tokens that they have, or as many."""
    inner = draw(st.lists(st.integers(0, case.tokens), min_size=len(case.ranks) - 1, max_size=len(case.ranks) - 1))
    found, counts = [(0, *sorted(inner), case.tokens)], case.shards().counts
    giver = draw(st.integers(0, len(counts) - 1))
    for taker in (giver - 1, (giver + 1) % len(counts)):
        if counts[giver] and taker % len(counts) != giver:
            moved = list(counts)
            moved[giver], moved[taker] = moved[giver] - 1, moved[taker] + 1
            found.append(tuple(accumulate(moved, initial=0)))
    return found


def with_window(pattern: Pattern, window: int | None) -> Pattern:
    """With that window in every branch."""
    return replace(pattern, branches=tuple(replace(branch, window=window) for branch in pattern.branches))


def other_windows(case: Case) -> list[int | None]:
    """A key that has no windows, or only whether there are any, takes all for the Case's."""
    of_first = case.pattern.branches[0].window
    nearest = [] if of_first is None else [of_first + 1]
    found = [*nearest, 0, 1, case.tokens // 3, case.tokens // 2, None]
    return [window for window in found if with_window(case.pattern, window) != case.pattern]


def can_shift(branch: Branch) -> bool:
    return isinstance(branch.offset, int) and branch.dilation_rate > 1


@st.composite
def _draw_neighbours(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    case = draw(cases(world))
    way = draw(st.integers(0, 9))
    if way < 3:
        return case, draw_changes(draw, case)
    if way < 5 and case.tokens > 2:  # by `direct` messages are cut by the bucket
        case = replace(case, exchange="direct", bucket=None if draw(st.booleans()) else case.tokens)
        return case, draw_changes(draw, case) | {"bucket": draw(st.integers(1, 1 + case.tokens // 4))}
    if way < 7:  # what is kept of other documents fits best where there are as many
        packed = case.pattern.documents or (case.tokens // 3, case.tokens - case.tokens // 3)
        case = replace(case, pattern=replace(case.pattern, documents=packed))
        return case, draw_changes(draw, case) | {"documents": draw(st.sampled_from(other_documents(case)[::-1]))}
    # Which kernel takes a tile depends on what a plan does not know: whether there is a gradient through lse.
    case = replace(fused(draw, case), kernel="auto", lse="returned")
    return case, draw_changes(draw, case) | {"lse": "differentiated"}


def _may_shift(case: Case, name: str, value: Any) -> None:
    branches = case.pattern.branches
    if not can_shift(branches[validators.integer(name, value, 0, len(branches) - 1)]):
        raise ValueError(f"{name} is {value}; that branch must have one offset, and a rate of more than 1")


CHANGES: dict[str, Rule] = dict.fromkeys(
    ("exchange", "order", "cuts", "batch", "scale", "kernel", "lse", "strided"), anything
) | {
    "causal": flag,
    "twice": lambda case, name, value: validators.integer(name, value, 0, len(case.pattern.branches) - 1),
    "shifted": _may_shift,
    "bucket": bounded,
    "kv_heads": bounded,
    "documents": lambda case, name, value: value is None or validators.integers(name, value),
    "window": lambda case, name, value: value is None or validators.integer(name, value, 0, MOST_INTEGER),
}


def _premise(case: Case, how: How) -> None:
    for name, value in how.items():
        check_supported(with_change(case, name, value))


def check_neighbours(backend: Backend, case: Case, how: How) -> float:
    """A Case, then Cases that differ from it in one thing, then the first again, in the same processes: the results
    of each are right, as if it had been the only one."""
    worst = 0.0
    for one in (case, *(with_change(case, name, value) for name, value in how.items()), case):
        backend.submit(observe, one, None, False)
        worst = max(worst, *properties.check(one, expect(one), backend.collect()).values())
    return worst


NO_CALL_TAKES_ANOTHER = Law(
    "no call takes another for its like", _draw_neighbours, check_neighbours, _premise, how=CHANGES, some=True,
    share=0.12,
)  # fmt: skip


# --- a call leaves nothing behind -------------------------------------------------------------------------------------


@st.composite
def _draw_any(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    return draw(cases(world)), {}


def check_left(backend: Backend, case: Case, how: How) -> float:
    """When the results of a call are dropped, none of its tensors is alive, and the process is as it was before."""
    backend.submit(left, case)
    for index, (altered, alive) in enumerate(backend.collect()):
        for what, said in ((altered, "changed by the call"), (alive, "in memory when all results are dropped")):
            if what:
                raise WrongResult(f"on index {index} of the group, {said}: {', '.join(what)}")
    return 0.0


class _Lender(RecordingTransport):
    """Another transport, with weak references to its buffers."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.lent: list[tuple[str, StorageWeakRef]] = []

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        buffer = super().empty(name, shape, dtype, device)
        self.lent.append((f"the buffer {name!r}", StorageWeakRef(buffer.untyped_storage())))
        return buffer


def left(transport: Transport, case: Case) -> tuple[list[str], list[str]]:
    """Task: (which state of the process the call has changed, which tensors are still in memory)."""
    shared = transport.rank != 0  # simulated ranks are threads: rank 0 looks at what they share
    if not shared:
        # Moves each generator on, so that a call that seeds it cannot leave it as it was found.
        torch.rand(1), random.random(), np.random.random()  # noqa: NPY002 - the global generator is meant
    before = {name: look() for name, look in _STATE.items()}
    lender = _Lender(transport)
    with measure(RecordingTransport(transport)) as other_sharding, measure(lender) as here:
        held, peak = _held(lender, case)
    altered = [name for name, look in _STATE.items() if look() != before[name] and not (shared and name in _SHARED)]
    altered += ["the measure of another transport, over which nobody calls"] * (other_sharding.bytes > 0)
    if (here.held, here.bytes) != (0, peak):
        altered.append(f"a measure: after calls of at most {peak} bytes it has {here.held}, at most {here.bytes}")
    # On GPUs a sent buffer may be kept until its messages are known to be over.
    alive = [] if case.device == "cuda" else [name for name, storage in held if not storage.expired()]
    return altered, list(dict.fromkeys(alive))


def _held(lender: _Lender, case: Case) -> tuple[list[tuple[str, StorageWeakRef]], int]:
    """What forward and backward had in memory, and the most bytes of buffers that either of them held by itself."""
    inputs = tuple(x.clone() for x in shards(case, lender.rank, whole_tensors(case)))
    run = attend(lender, case, inputs, record=lambda given: given if isinstance(given, _Lender) else _Lender(given))
    named = zip(("q", "k", "v", "dout", "dlse", "out", "lse", "dq", "dk", "dv"), (*inputs, *run.results), strict=True)
    lent = [(name, StorageWeakRef(x.untyped_storage())) for name, x in named if x is not None] + lender.lent
    return lent, max(run.buffer_forward or 0, run.buffer_backward or 0)


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

NOTHING_LEFT_BEHIND = Law("a call leaves nothing behind", _draw_any, check_left, how={}, share=0.04)
