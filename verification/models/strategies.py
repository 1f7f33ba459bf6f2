"""Hypothesis strategies: the fields of any StepCase, and small ModelCases.

The first entry of every `sampled_from` is the simplest (as in `verification.strategies.cases`), so that shrinking ends
at the smallest model and mesh.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

from hypothesis import strategies as st

from verification.case import ORDERS_BY_CHUNK
from verification.models.batches import IGNORED, global_batch, held_out
from verification.models.model_case import MODEL_DTYPES, ModelCase
from verification.models.step_case import ARRANGEMENTS, OPTIMISERS, WRAPPERS, Split, StepCase
from verification.strategies.cases import Draw, cuts_of
from verification.strategies.documents import documents_of, ends_of

AnyStepCase = TypeVar("AnyStepCase", bound=StepCase)
MAX_TOKENS = 24
EXCHANGES = ("direct", "direct-kept", "ring", "gather", "all-to-all")
WHOLE_HEADS = (
    "direct",
    "direct-kept",
    "ring",
    "gather",
)  # exchanges of any model with `same_bits`, which refuses to divide heads
MODEL_LABELS = ("all", "some", "shards", "ranks")
MODEL_CHECKPOINTING = ("none", "non-reentrant", "selective")  # what any model stands

_ceilings = st.sampled_from((4, MAX_TOKENS, MAX_TOKENS, MAX_TOKENS))
_tokens = {ceiling: st.integers(2, ceiling) for ceiling in (4, MAX_TOKENS)}
_labels = st.sampled_from(MODEL_LABELS)
_dtypes = st.sampled_from(("float64",) * 7 + ("float32",))
_checkpointing = st.sampled_from(("none", *MODEL_CHECKPOINTING))
_held = st.sampled_from((0, 0, 1, 2, 3, 5))
_resumed_after = st.sampled_from((0, 0, 1, 2))
_flags = st.sampled_from((False, False, True))
_exchanges_of_chunks = st.sampled_from(WHOLE_HEADS)
_orders_of_chunks = st.sampled_from(ORDERS_BY_CHUNK)
_orders = (
    "contiguous", "zigzag", "striped", "hilbert", "spliced", "paired", "shuffled", "permuted", "swapped", "stepped",
)  # fmt: skip
_fields = {
    "arrangement": st.sampled_from(ARRANGEMENTS), "batch": st.sampled_from((1, 1, 2)),
    "order": st.sampled_from(_orders), "exchange": st.sampled_from(EXCHANGES),
    "wrapper": st.sampled_from(WRAPPERS), "accumulation": st.sampled_from((1, 1, 2, 3)),
    "clipping": st.sampled_from((None, None, 0.1, 0.02, 1e6)),  # 1e6 never clips: only the norm is checked
    "optimiser": st.sampled_from(OPTIMISERS), "steps": st.sampled_from((1, 1, 2, 3)), "seed": st.integers(0, 255),
}  # fmt: skip


@cache
def _data_ranks(world: int) -> st.SearchStrategy[int]:
    """Sizes of the data dimension; those with a context group are twice as likely as data ranks alone."""
    divisors = _divisors(world)
    return st.sampled_from([d for d in divisors if d < world] + divisors)


def step_fields(draw: Draw, world: int, tokens: int) -> dict[str, Any]:
    """Draw what ModelCases and TrainingCases have in common, for sequences of that length."""
    data = draw(_data_ranks(world))
    drawn = {name: draw(strategy) for name, strategy in _fields.items()}
    return {"world": world, "data": data, "tokens": tokens, "cuts": cuts_of(draw, tokens, world // data)} | drawn


@st.composite
def model_cases(draw: Draw, world: int) -> ModelCase:
    """Draw ModelCases for a world of that many ranks. Some label is in every step."""
    case = ModelCase(
        **step_fields(draw, world, draw(_tokens[draw(_ceilings)])), packed=None, padding=False, labels=draw(_labels),
        dtype=draw(_dtypes), checkpointing=draw(_checkpointing),
    )  # fmt: skip
    padding, packed = draw(_flags), documents_of(draw, case.tokens, ends_of(case.shards()))
    case = replace(case, packed=packed, padding=padding and packed is None)
    if not all(global_batch(case, step).labelled for step in range(case.steps)):
        case = replace(case, packed=None, padding=False, labels="all")
    return replace(
        case,
        held=draw(_held),
        resumed_after=draw(_resumed_after) % case.steps,
        context_before=draw(st.sampled_from((1, 2))) if case.data == 1 else 1,
    )


@st.composite
def chunked_cases(draw: Draw, world: int, chunk: int) -> ModelCase:
    """Draw ModelCases with `same_bits`, without other ranks."""
    case, dtype, exchange = draw(model_cases(world)), draw(st.sampled_from(MODEL_DTYPES)), draw(_exchanges_of_chunks)
    tokens = max(draw(st.integers(2, 6 * chunk)), chunk * (case.context - 1) + 1)
    case = replace(
        case, tokens=tokens, cuts=None, packed=None, order="chunks", same_bits=chunk, wrapper="none", dtype=dtype,
        exchange=exchange, held=0, resumed_after=0, context_before=1,
    )  # fmt: skip
    packed = documents_of(draw, tokens, ends_of(case.shards()))
    return if_valid(case, packed=packed, padding=case.padding and packed is None)


@st.composite
def other_splits(draw: Draw, case: ModelCase) -> ModelCase:
    """Draw other ranks, up to as many, for a ModelCase; none if one of them has no chunk."""
    split = Split(**split_fields(draw, case, _exchanges_of_chunks, _checkpointing))
    if case.same_bits is None:
        return if_valid(case, other_ranks=replace(split, order=case.order))
    case = if_valid(case, other_ranks=split)
    return if_valid(case, other_ranks=replace(split, order=draw(_orders_of_chunks)))


def split_fields(
    draw: Draw, case: StepCase, exchanges: st.SearchStrategy[str], checkpointing: st.SearchStrategy[str]
) -> dict[str, Any]:
    """Draw the fields of a Split, up to as many ranks as the Case has."""
    world = draw(st.integers(1, case.world))
    data = draw(st.sampled_from([d for d in _divisors(world) if case.sequences % d == 0]))
    accumulation = draw(st.sampled_from(_divisors(case.sequences // data)))
    return {
        "world": world, "data": data, "accumulation": accumulation, "batch": case.sequences // data // accumulation,
        "arrangement": draw(st.sampled_from(ARRANGEMENTS)), "order": "chunks", "exchange": draw(exchanges),
        "checkpointing": draw(checkpointing),
    }  # fmt: skip


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def if_valid(case: AnyStepCase, **changes: Any) -> AnyStepCase:
    """Return the Case with these changes, unchanged if they are not valid, as where a rank then has no chunk."""
    with suppress(ValueError):
        return replace(case, **changes)
    return case


def has_labels(case: ModelCase | None) -> bool:
    """True for a ModelCase with a label in every step and in every batch that is evaluated alone: without, a mean over
    labels is not defined."""
    if case is None or not all(global_batch(case, step).labelled for step in range(case.steps)):
        return False
    batches = global_batch(*held_out(case)).labels[0, 0].split(case.batch) if case.held else ()
    return all(bool((labels != IGNORED).any()) for labels in batches)
