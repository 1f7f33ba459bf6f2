"""Layouts that are made for documents, and lengths of documents that are made of what trainers have, are as defined.

Most drawn Cases have layouts that know of no documents; and a layout that is only less even than it says computes the
right numbers. So these are looked at by themselves, on one rank, without messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from reference import fields, shards
from reference.documents import documents_from_cu_seqlens, documents_from_positions
from reference.exact import multiplicity
from reference.pattern import Branch, Pattern
from ring import balance
from ring.comm.transport import Transport
from ring.layout import Layout
from verification.case import Case
from verification.check.laws import document_layouts, layout_rows
from verification.check.laws.law import How, Law, nothing_wrong
from verification.draw.cases import cases
from verification.run.backends import Backend

LONGER = 32  # tokens
ENOUGH = 1.05  # of the mean work, which no rank of a balanced layout need be below


def _lengths(case: Case) -> tuple[int, ...]:
    """Some of no token and of one, whatever the Case has."""
    packed = case.pattern.documents
    return packed or (0, 1, 1, *([case.tokens - 2] if case.tokens > 2 else []), 0)


def _helpers(case: Case) -> Iterator[str]:
    lengths = _lengths(case)
    ends = list(accumulate(lengths, initial=0))
    positions = [x for length in lengths for x in range(length)]
    without_empty = tuple(length for length in lengths if length)
    for edges in (ends, np.array(ends), np.array(ends, np.uint16), torch.tensor(ends, dtype=torch.int32)):
        if (found := documents_from_cu_seqlens(edges, ends[-1])) != lengths:
            yield f"documents_from_cu_seqlens makes {found} of {ends}, must be {lengths}"
    for within in (positions, np.array(positions, np.int64), torch.tensor(positions, dtype=torch.int64)[None]):
        if (found := documents_from_positions(within)) != without_empty:
            yield f"documents_from_positions makes {found} of {positions}, must be {without_empty}"


def _zigzag(case: Case, ranks: int) -> Iterator[str]:
    lengths = _lengths(case)
    n = sum(lengths)
    made = Layout.zigzag(n, ranks, documents=lengths)
    if made.world_size != ranks:
        yield f"zigzag by document for {ranks} ranks must be for those that hold nothing, too, got {made}"
        return
    held = shards.shards("zigzag" + shards.BY_DOCUMENT, n, ranks, None, 0, lengths).positions
    for rank, wanted in enumerate(held):
        if not np.array_equal(made.positions(rank).numpy(), wanted):
            yield f"zigzag by document gives rank {rank} {made.positions(rank).tolist()}, must be {wanted.tolist()}"


def _balanced(case: Case, ranks: int) -> Iterator[str]:
    longer = replace(case, tokens=case.tokens + LONGER, cuts=None, pattern=Pattern.dense(causal=True))
    near = replace(longer, pattern=Pattern.dense(causal=True, window=case.seed % 8))
    for one in (case, longer, near):
        yield from _uneven(one, ranks)
    yield from _takes_other_heads(case, ranks)


def _uneven(case: Case, ranks: int) -> Iterator[str]:
    """Cut where the work is equal, no rank has more than the mean and the work of one token: so much is possible."""
    work = multiplicity(case.pattern, case.heads, case.tokens).sum((0, 2))
    made = Layout.balanced(case.pattern, case.tokens, ranks, case.heads)
    if made.world_size != ranks:
        yield f"a balanced layout for {ranks} ranks must be for those that hold nothing, too, got {made}"
        return
    held = [made.positions(rank).numpy() for rank in range(ranks)]
    if sorted(np.concatenate(held).tolist()) != list(range(case.tokens)):
        yield f"a balanced layout has the positions {held}"
    most, mean = max(int(work[mine].sum()) for mine in held), float(work.sum()) / ranks
    if most > max(ENOUGH * mean, mean + float(work.max())):
        yield f"a balanced layout gives a rank the work {most} where the mean is {mean}"


def _work(case: Case) -> Iterator[str]:
    """What a layout is balanced by is counted pair by pair, with and without a window in dilated branches."""
    dilated = tuple(replace(branch, window=case.seed % 8) for branch in case.pattern.branches)
    for pattern in (case.pattern, replace(case.pattern, branches=dilated)):
        found = balance.work(pattern, case.tokens, case.heads)
        wanted = multiplicity(pattern, case.heads, case.tokens).sum((0, 2))
        if not np.array_equal(found, wanted):
            yield f"the work of {pattern} is counted as {found.tolist()}, must be {wanted.tolist()}"


def _takes_other_heads(case: Case, ranks: int) -> Iterator[str]:
    """As many as there are not, of a pattern that names an offset for each."""
    pattern = replace(case.pattern, branches=(Branch(None, 2, (0,) * case.heads), *case.pattern.branches))
    try:
        Layout.balanced(pattern, case.tokens, ranks, case.heads + 1)
    except ValueError:
        return
    yield f"a balanced layout must refuse {case.heads + 1} heads, which {pattern} does not fit"


def _equal(case: Case, ranks: int) -> Iterator[str]:
    """One order is one layout, by whatever name it is made: ranks compare these."""
    for n in (1, case.tokens, ranks + case.seed % 3):
        for made in (Layout.contiguous(n, ranks), Layout.zigzag(n, ranks), Layout.striped(n, ranks)):
            order = torch.cat([made.positions(rank) for rank in range(ranks)])
            listed = Layout.from_cuts(order, made.cuts)
            if listed.runs is not None and (listed != made or hash(listed) != hash(made)):
                yield f"{made} and {listed}, of one order and cuts, must be equal"


def _own_memory(case: Case, ranks: int) -> Iterator[str]:
    """What a layout is made of may change afterwards."""
    order = np.random.default_rng(case.seed).permutation(case.tokens)
    cuts = [rank * case.tokens // ranks for rank in range(ranks + 1)]
    for given in (order.copy(), torch.from_numpy(order.copy()), order.tolist()):
        made = Layout.from_cuts(given, cuts)
        given[0], given[-1] = given[-1], given[0]
        held = torch.cat([made.positions(rank) for rank in range(ranks)]).numpy()
        if not np.array_equal(held, order):
            yield f"a layout changes with the {type(given).__name__} that it was made of"


def wrong(transport: Transport, case: Case, ranks: int) -> list[str]:
    """Task: what is wrong, of rank 0."""
    if transport.rank:
        return []
    looked = (
        _helpers(case), _work(case), _zigzag(case, ranks), _balanced(case, ranks), _equal(case, ranks),
        _own_memory(case, ranks), document_layouts.zigzags(case, ranks), document_layouts.balanced(case, ranks),
        document_layouts.helpers(case, ranks), layout_rows.named(case), layout_rows.orders(case),
        layout_rows.rows(case), layout_rows.equality(case),
    )  # fmt: skip
    return [word for words in looked for word in words]


def check_made(backend: Backend, case: Case, how: How) -> float:
    return nothing_wrong(backend, wrong, case, how["ranks"])


@st.composite
def _draw(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    """ranks: of the layouts, more than there are."""
    return draw(cases(world)), {"ranks": draw(st.integers(1, 4))}


def _premise(case: Case, how: Any) -> None:
    fields.exactly("how", how, ["ranks"])
    fields.integer("ranks of how", how["ranks"], 1, 64)


LAYOUTS_ARE_AS_DEFINED = Law("made layouts are as defined", _draw, check_made, _premise, share=0.06, most=60)
