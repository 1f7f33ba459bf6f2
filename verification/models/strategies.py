"""Hypothesis strategies: the fields of any StepCase, and small ModelCases.

The first entry of every `sampled_from` is the simplest (as in `verification.strategies.cases`), so that shrinking ends
at the smallest model and mesh.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from hypothesis import strategies as st

from verification.models.batches import IGNORED, global_batch, held_out
from verification.models.model_case import ModelCase
from verification.models.step_case import ARRANGEMENTS, OPTIMISERS, WRAPPERS
from verification.strategies.cases import Draw, cuts_of
from verification.strategies.documents import documents_of, ends_of

MAX_TOKENS = 24
EXCHANGES = ("direct", "ring", "gather", "all-to-all")
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
    divisors = [d for d in range(1, world + 1) if world % d == 0]
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


def has_labels(case: ModelCase | None) -> bool:
    """True for a ModelCase with a label in every step and in every batch that is evaluated alone: without, a mean over
    labels is not defined."""
    if case is None or not all(global_batch(case, step).labelled for step in range(case.steps)):
        return False
    batches = global_batch(*held_out(case)).labels[0, 0].split(case.batch) if case.held else ()
    return all(bool((labels != IGNORED).any()) for labels in batches)
