"""Laws between Cases: what must stay the same, or change along, when a Case is changed in a known way. On
real ranks.

A law draws a Case and *how* to change it, both JSON-serialisable, so that its counter-examples are saved and
replayed like any other. `check` returns the worst error as a fraction of what is allowed, 0 where the law is
exact, and raises WrongResult.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from reference.exact import QUANTITIES, Expectation, evaluate, multiplicity
from reference.pattern import Branch, Pattern
from ring.comm.transport import Transport
from verification.case import Case
from verification.check import isolation, properties
from verification.check.checks import assemble
from verification.check.expectation import arithmetic_of, expect, inputs_of
from verification.draw.cases import cases, elsewhere, long_cases, permutation_of
from verification.failures import WrongResult
from verification.run import mistakes as misuse
from verification.run.backends import Backend, observe_on
from verification.run.observation import Observation
from verification.run.rank import Edit, observe

How = dict[str, Any]


@dataclass(frozen=True)
class Law:
    """`draw` gives a strategy of (Case, how) for a world size; `check` runs it."""

    name: str
    draw: Callable[[int], st.SearchStrategy[tuple[Case, How]]]
    check: Callable[[Backend, Case, How], float]
    share: float  # of the examples that a world size is given
    most: int = 1000  # examples, however many those are


# --- the result does not depend on who computes it
# -------------------------------------------------------------------


@st.composite
def _anywhere(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    case = _tame(draw(cases(world)))
    return case, elsewhere(draw, case)


def check_anywhere(backend: Backend, case: Case, how: How) -> float:
    """World size, layout, exchange, bucket: two ways to compute the same differ by no more than both their
    bounds.
    """
    other = _changed(case, how)
    backend.submit(observe, case, None, False)
    first = expect(case)
    seen = backend.collect()
    backend.submit(observe, other, None, False)
    second = expect(other)
    also_seen = backend.collect()
    worst = 0.0
    for name in _compared(case):
        a, b = assemble(case, seen, name), assemble(other, also_seen, name)
        worst = max(worst, _ratio(name, a, b, first.bound[name] + second.bound[name], how))
    return worst


# --- nor on the order of batches and heads
# -----------------------------------------------------------------------------


@st.composite
def _permuted(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    case = _tame(draw(cases(world)))
    case = replace(case, batch=max(case.batch, 2))
    kv_order = permutation_of(draw, case.kv_heads)
    if permuted(case.pattern, head_order(case, kv_order)) is None:
        kv_order = tuple(range(case.kv_heads))
    return case, {"batch": list(permutation_of(draw, case.batch)), "kv_heads": list(kv_order)}


def head_order(case: Case, kv_order: tuple[int, ...]) -> tuple[int, ...]:
    """Query heads move with their key/value head: order[new] = old."""
    share = case.heads // case.kv_heads
    return tuple(kv * share + member for kv in kv_order for member in range(share))


def permuted(pattern: Pattern, order: tuple[int, ...]) -> Pattern | None:
    """The pattern whose head j is head order[j] of this one; None if a branch's heads are then no range."""
    branches = []
    for branch in pattern.branches:
        offsets = [branch.offsets(len(order))[old] for old in order]
        served = [new for new, offset in enumerate(offsets) if offset is not None]
        if served != list(range(served[0], served[-1] + 1)):
            return None
        chosen = tuple(offset for offset in offsets if offset is not None)
        heads = None if branch.heads is None else range(served[0], served[-1] + 1)
        offset = chosen if isinstance(branch.offset, tuple) else branch.offset
        branches.append(Branch(branch.segment_length, branch.dilation_rate, offset, heads))
    return Pattern(tuple(branches), pattern.causal)


def check_permuted(backend: Backend, case: Case, how: How) -> float:
    """Batches, and heads with their offsets, in another order: the same results in that order, within their bounds.

    Not to the bit: products of matrices may be rounded otherwise where their operands lie at other addresses.
    """
    batch, kv = list(how["batch"]), list(how["kv_heads"])
    heads = list(head_order(case, tuple(kv)))
    pattern = permuted(case.pattern, tuple(heads))
    assert pattern is not None
    seen, bound, worst = observe_on(backend, case, None, False), expect(case).bound, 0.0
    edit = Edit("permute", order=tuple(batch), head_order=tuple(heads), kv_order=tuple(kv))
    also_seen = observe_on(backend, replace(case, pattern=pattern), edit, False)
    for name in _compared(case):
        a, b = assemble(case, seen, name), assemble(case, also_seen, name)
        order = kv if name in ("dk", "dv") else heads
        a, allowed = (x[batch][:, order] if name == "lse" else x[batch][:, :, order] for x in (a, 2 * bound[name]))
        worst = max(worst, _ratio(name, a, b, allowed, how))
    return worst


# --- bit for bit
# -----------------------------------------------------------------------------------------------------


@st.composite
def _later(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    case = draw(cases(world))
    case = replace(case, pattern=replace(case.pattern, causal=True))
    return case, {"position": draw(st.integers(0, case.tokens - 1))}


def check_later(backend: Backend, case: Case, how: How) -> float:
    """Causal: what comes after a position changes no output up to it, not by a bit."""
    seen = observe_on(backend, case, None, False)
    edited = observe_on(backend, case, Edit("after", how["position"]), False)
    upto = how["position"] + 1
    for name in ("out", "lse") if case.lse != "unused" else ("out",):
        axis = 2 if name == "lse" else 1
        a, b = (assemble(case, x, name).take(range(upto), axis) for x in (seen, edited))
        _same_numbers(name, a, b, f"once the tokens after position {how['position']} are others")
    return 0.0


# --- error and the number of ranks
# -----------------------------------------------------------------------------------


@st.composite
def _growth(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    """Many keys, outputs near 1: there a bfloat16 accumulator adds a rounding of full size at each merge."""
    case = Case(
        world=world, group=None, tokens=draw(st.integers(256, 512)),
        order=draw(st.sampled_from(("contiguous", "striped"))),
        cuts=None, pattern=Pattern.dense(), batch=1, heads=4, kv_heads=4, head_dim=16, dtype="bfloat16", scale=None,
        score_scale=1.0, values="normal", seed=draw(st.integers(0, 255)),
        exchange=draw(st.sampled_from(("ring", "direct", "gather"))), bucket=draw(st.sampled_from((None, 64))),
        kernel="math", lse="unused", strided=False,
    )  # fmt: skip
    return case, {"shift": 1}


def check_growth(backend: Backend, case: Case, how: How) -> float:
    """The RMS error of bfloat16 outputs is that of rounding the exact output once, on 1, 2, 4, ... ranks
    alike.

    Let O be exact, O' what an implementation holds before its last rounding, T >= |O' - O| the a-priori bound
    without that rounding, and r(x) the distance of x to the nearest bfloat16. The result is off by at most
    r(O') + |O' - O|, and r changes no faster than its argument, so by at most r(O) + 2 T; hence, by
    Minkowski, RMS(error) <= RMS(r(O)) + 2 RMS(T). T is of the order of fp32's unit roundoff and r(O) of
    bfloat16's: nearly all of the right-hand side is one rounding, and any further rounding of partial results
    to 16 bits stands out, though entry by entry it hides below its bound.
    """
    edit = Edit("shift", how["shift"])
    sizes = [p for p in (1, 2, 4, 8, 16, 32) if p <= case.world]
    worst, exact = 0.0, _expect_edited(case, edit)
    rounded = torch.from_numpy(exact.exact["out"]).bfloat16().double().numpy()
    once = _rms(rounded - exact.exact["out"])
    for p in sizes:
        smaller = replace(case, group=None if p == case.world else tuple(range(p)))
        inner = _expect_edited(smaller, edit, inner=True).bound["out"]
        out = assemble(smaller, observe_on(backend, smaller, edit, False), "out")
        error, allowed = _rms(out - exact.exact["out"]), once + 2 * _rms(inner)
        if not error <= allowed:
            raise WrongResult(
                f"on {p} ranks the RMS error of out is {error:.3g}; rounding the exact output once makes it {once:.3g}"
                f", and {allowed:.3g} is allowed"
            )
        worst = max(worst, error / allowed)
    return worst


def _expect_edited(case: Case, edit: Edit, inner: bool = False) -> Expectation:
    """`expect` for edited tensors; `inner` leaves the last rounding of the output out of the bound."""
    arithmetic = arithmetic_of(case)
    if inner:
        arithmetic = replace(arithmetic, u_out=0.0)
    return evaluate(inputs_of(case, edit.apply(case.tensors())), arithmetic)


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


# --- memory of longer sequences
# --------------------------------------------------------------------------------------


@st.composite
def _long(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    return draw(long_cases(world)), {}


def check_long(backend: Backend, case: Case, how: How) -> float:
    """What is checked of every example, of Cases that are too large for every example: there scores are larger than
    queries, and the default bucket follows from the largest shard.
    """
    backend.submit(observe, case, None, False)
    return max(properties.check(case, expect(case), backend.collect()).values())


# --- NaN, infinity, and wrong calls
# ----------------------------------------------------------------------------------


@st.composite
def _poisoned(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    case = draw(cases(world))
    name = draw(st.sampled_from(("v", "q", "k")))
    # Scores of inf may all be -inf, which is a row that sees nothing: only v tells inf from NaN.
    infinite = name == "v" and draw(st.booleans())
    return case, {"token": draw(st.integers(0, case.tokens - 1)), "tensor": name, "infinite": infinite}


def check_poisoned(backend: Backend, case: Case, how: How) -> float:
    """A NaN in q, k or v, or an inf in v, reaches every output that sees it, leaves other batches and heads alone, and
    hangs nothing.
    """
    token, share = how["token"], case.heads // case.kv_heads
    clean = assemble(case, observe_on(backend, case, None, False), "out")
    edit = Edit("poison", int(how["infinite"]), positions=(token,), name=how["tensor"])
    out = assemble(case, observe_on(backend, case, edit, False), "out")
    seen = multiplicity(case.pattern, case.heads, case.tokens)[:share] > 0  # (query heads of kv head 0, N, N)
    sees = seen[:, :, token]
    if how["tensor"] == "q":  # of one row of query head 0, if that row sees anything
        sees = np.zeros_like(sees)
        sees[0, token] = seen[0, token].any()
    missed = sees.T & np.isfinite(out[0, :, :share, 0])
    if missed.any():
        row, head = np.argwhere(missed)[0]
        raise WrongResult(
            f"out is {out[0, row, head, 0]} at batch 0, token {row}, head {head}, dim 0, which sees "
            f"{'inf' if how['infinite'] else 'NaN'} in {how['tensor']} at token {token}"
        )
    _same_numbers("out", clean[1:], out[1:], "of other batches, once batch 0 is not finite")
    _same_numbers("out", clean[:, :, share:], out[:, :, share:], "of other heads, once head 0 is not finite")
    return 0.0


@st.composite
def _misused(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    case = draw(cases(world))
    if draw(
        st.booleans()
    ):  # ranks of a part of the world have two numbers each: this is where they meet without tensors
        case = _changed(case, elsewhere(draw, case))
    possible = misuse.applicable(case)
    # What takes two ranks to be wrong comes twice as often: on each rank by itself it looks right.
    possible += tuple(mistake for mistake in possible if not misuse.MISTAKES[mistake].alone)
    one = st.tuples(st.sampled_from(possible), st.integers(-1, len(case.ranks) - 1))
    # Many at a time, for each costs little beside the right call at the end. A list has 5 or 6 of 12 as a rule.
    made = [pair for least in (1, 0, 0, 0) for pair in draw(st.lists(one, min_size=least, max_size=12))]
    return case, {"mistakes": [[mistake, _culprit(mistake, number)] for mistake, number in made]}


def _culprit(mistake: str, number: int) -> int | None:
    """The index of the group that makes the mistake, None for all; to differ from the others takes just one."""
    if misuse.MISTAKES[mistake].together:
        return None
    if number < 0:
        return None if misuse.MISTAKES[mistake].alone else 0
    return number


def check_misused(backend: Backend, case: Case, how: How) -> float:
    """One rank, or every rank, is called wrongly: every rank raises the same error, which names the argument. So one
    mistake after the other; the next call works.
    """
    mistakes = [(mistake, culprit) for mistake, culprit in how["mistakes"]]
    backend.submit(misused, case, mistakes)
    expectation = expect(case)
    answers = backend.collect()
    for number, (mistake, culprit) in enumerate(mistakes):
        where = "on every rank" if culprit is None else f"on index {culprit} of the group"
        _check_errors(f"{mistake} {where}", misuse.MISTAKES[mistake], [errors[number] for errors, _ in answers])
    properties.check(case, expectation, [observation for _, observation in answers])
    return 0.0


def _check_errors(what: str, mistake: misuse.Mistake, errors: list[tuple[str, str] | None]) -> None:
    allowed = ("ValueError", "NotImplementedError") if mistake.error is None else (mistake.error,)
    for index, error in enumerate(errors):
        if error is None:
            raise WrongResult(f"index {index} of the group raised nothing: {what}")
        if error[0] not in allowed:
            raise WrongResult(f"index {index} of the group raised {error[0]}: {error[1]}; {what}")
        if mistake.error is None and error != errors[0]:
            raise WrongResult(f"index {index} of the group raised {error}, index 0 {errors[0]}: {what}")
        if mistake.argument not in error[1]:
            raise WrongResult(f"the error does not name {mistake.argument!r}: {what}: {error[1]}")


def misused(
    transport: Transport, case: Case, mistakes: list[tuple[str, int | None]]
) -> tuple[list[tuple[str, str] | None], Observation]:
    """Task: call ring_attention wrongly, in one way after the other, then rightly on all ranks."""
    errors = [misuse.call(transport, case, mistake, culprit) for mistake, culprit in mistakes]
    return errors, observe(transport, case, None, False)


# --- what a process keeps of a call
# ------------------------------------------------------------------------------------


@st.composite
def _neighbours(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    case = draw(cases(world))
    return case, isolation.draw_changes(draw, case)


@st.composite
def _left(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    return draw(cases(world)), {}


# --- helpers
# ---------------------------------------------------------------------------------------------------------


def _tame(case: Case) -> Case:
    """Without values that overflow 16 bits in one order of summation and not in another."""
    return replace(case, values="normal") if case.values == "huge" else case


def _changed(case: Case, how: Mapping[str, Any]) -> Case:
    listed: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in how.items()}
    return replace(case, **listed)


def _compared(case: Case) -> list[str]:
    return [name for name in QUANTITIES if name != "lse" or case.lse != "unused"]


def _ratio(name: str, a: np.ndarray, b: np.ndarray, allowed: np.ndarray, how: How) -> float:
    """The worst |a - b| as a fraction of both their bounds together."""
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(a == b, 0.0, np.abs(a - b) / allowed)  # equal infinities differ by nothing
    if not (ratio <= 1.0).all():
        where = np.unravel_index(int(np.argmax(np.nan_to_num(ratio, nan=np.inf))), ratio.shape)
        raise WrongResult(
            f"{name} at {_plain(where)} is {a[where]} for the Case and {b[where]} with {how}: "
            f"{ratio[where]:.3g} times the sum of their bounds {allowed[where]:.3g}"
        )
    return float(ratio.max(initial=0.0))


def _same_numbers(name: str, a: np.ndarray, b: np.ndarray, when: str) -> None:
    differ = (a != b) & ~(np.isnan(a) & np.isnan(b))
    if differ.any():
        where = tuple(np.argwhere(differ)[0])
        raise WrongResult(f"{name} at {_plain(where)} was {a[where]} and is {b[where]} {when}; must be the same bits")


def _plain(where: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in where)


LAWS = (
    Law("same on any ranks, layout, exchange", _anywhere, check_anywhere, 0.05),
    Law("later tokens change nothing", _later, check_later, 0.03),
    Law("batches and heads permute", _permuted, check_permuted, 0.03),
    Law("NaN and inf propagate", _poisoned, check_poisoned, 0.02),
    Law("wrong calls refused everywhere", _misused, check_misused, 0.08),
    Law("no call takes another for its like", _neighbours, isolation.check_neighbours, 0.08),
    Law("a call leaves nothing behind", _left, isolation.check_left, 0.02),
    Law("memory of longer shards", _long, check_long, 0.01, most=60),
    Law("error does not grow with ranks", _growth, check_growth, 0.003, most=20),
)
