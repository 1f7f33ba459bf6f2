"""Out, lse, dq, dk and dv have the same bits on any ranks, in any layout, by any exchange, alone and in a batch.

The integers of the floating-point numbers are compared: 0.0 is not -0.0. NaN equals NaN.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from hypothesis import reject
from hypothesis import strategies as st

from reference import validators
from verification.case import ORDERS_BY_CHUNK, Case
from verification.check.attention_on_ranks import AttentionOnRanks, Claims, any_case, claimed
from verification.check.checks import assemble, compared
from verification.check.laws.any_sharding import settled
from verification.check.laws.law import How, Law, anything, bounded, changed, flag
from verification.check.supported import check_supported
from verification.failures import WrongResult
from verification.run.observation import Observation
from verification.run.rank import InputEdit
from verification.strategies.cases import cases, in_chunks, other_sharding


@st.composite
def _draw(draw: st.DrawFn, world: int, claims: Claims = any_case) -> tuple[Case, How]:
    case = draw(cases(world))
    case = in_chunks(draw, replace(case, hosts=1) if claims is any_case else case.for_any_ranks())
    if case.lse == "apart":  # its gradients depend on the rank that holds a token
        case = replace(case, lse="differentiated")
    case = claimed(claims, case)
    orders = ("contiguous", "zigzag") if case.same_bits is None else ORDERS_BY_CHUNK
    how: How = other_sharding(draw, case) | {"order": draw(st.sampled_from(orders)), "cuts": None}
    how |= {"world": world, "strided": draw(st.booleans())}
    if claims is not any_case:  # which may need all ranks, so there must be fewer
        how |= {"world": draw(st.integers(1, world)), "group": None, "exchange": case.exchange, "strided": case.strided}
    case, how = settled(Case.for_same_bits if claims is any_case else claims, case, how)
    how["entry"] = draw(st.sampled_from((None, *range(case.batch)))) if case.batch > 1 else None
    return (case, how) if other_of(case, how) != case else reject()


def other_of(case: Case, how: How) -> Case:
    """Return the Case in the other way. Its bucket holds a chunk, which is longer on GPUs than `how` knows."""
    other = changed(case, {name: value for name, value in how.items() if name != "entry"})
    other = other if other.same_bits is None else other.for_same_bits()
    return other if how["entry"] is None else replace(other, batch=1)


def observe_both(ranks: AttentionOnRanks, case: Case, how: How) -> tuple[list[Observation], list[Observation]]:
    """Return the Observations of the Case, and of the other one on its own number of ranks."""
    other, entry = other_of(case, how), how["entry"]
    edit = None if entry is None else InputEdit("alone", case.batch, order=(entry,))
    first = ranks.observe(case)
    if other.world == case.world:
        return first, ranks.observe(other, edit)
    try:
        ranks.backend.start(other.world)
        return first, ranks.observe(other, edit)
    finally:
        ranks.backend.start(case.world)


def differences(
    case: Case, how: How, both: tuple[list[Observation], list[Observation]], names: Iterable[str]
) -> dict[str, str]:
    """Return where the results of these names differ in a bit, in words, by name."""
    other, entry, found = other_of(case, how), how["entry"], dict[str, str]()
    for name in names:
        a, b = assemble(case, both[0], name), assemble(other, both[1], name)
        a = a if entry is None else a[entry : entry + 1]
        differ = (a.view(np.int64) != b.view(np.int64)) & ~(np.isnan(a) & np.isnan(b))
        if differ.any():
            where = tuple(map(int, np.argwhere(differ)[0]))
            found[name] = f"{name} at {where} is {a[where]} and {b[where]} ({differ.sum()} of {differ.size} differ)"
    return found


def check_same_bits(ranks: AttentionOnRanks, case: Case, how: How) -> float:
    """Results that are promised to have the same bits have them with another group, order, exchange, bucket, strides,
    and for an entry of the batch alone."""
    names = [name for name in compared(case) if name in ranks.attention.same_bits(case)]
    found = differences(case, how, observe_both(ranks, case, how), names)
    if found:
        raise WrongResult(f"{'; '.join(found.values())}: for the Case and with {how}; they must be the same bits")
    return 0.0


def _precondition(case: Case, how: How) -> None:
    other = other_of(case, how)
    if other == case or other.world > case.world:
        raise ValueError(f"how is {how}; it must change the Case, and have no more ranks")
    for one in (case, other):
        check_supported(one)


def _claimed(claims: Claims, case: Case, how: How) -> None:
    if claims(other_of(case, how)) != other_of(case, how):
        raise ValueError(f"how is {how}; it must make a Case that is claimed")


def _entry(case: Case, name: str, value: object) -> None:
    validators.optional(lambda name, value: validators.integer(name, value, 0, case.batch - 1), name, value)


SAME_BITS = Law(
    "same bits on any ranks", _draw, check_same_bits, _precondition, share=0.04,
    how=dict.fromkeys(("group", "order", "cuts", "exchange"), anything)
    | {"world": bounded, "bucket": bounded, "strided": flag, "entry": _entry},
    cases={"gradients that do not depend on the rank: lse other than 'apart'": lambda case: case.lse != "apart"},
    of_any="it promises no bits, or the claim has one group, order and batch only", of_others=_claimed,
)  # fmt: skip
