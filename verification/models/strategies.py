"""Hypothesis strategies that draw small ModelCases. The first entry of every `sampled_from` is the simplest."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from verification.models.batches import global_batch
from verification.models.model_case import ModelCase
from verification.strategies.cases import Draw, cuts_of
from verification.strategies.documents import documents_of, ends_of

MODEL_LABELS = ("all", "some", "shards", "ranks")
MODEL_CHECKPOINTING = ("none", "non-reentrant", "selective")  # what any model stands

_ceilings = st.sampled_from((4, 24, 24, 24))
_tokens = {ceiling: st.integers(2, ceiling) for ceiling in (4, 24)}
_batches = st.sampled_from((1, 1, 2))
_orders = st.sampled_from(("contiguous", "zigzag", "striped", "zigzag", "hilbert", "spliced", "shuffled", "permuted"))
_arrangements = st.sampled_from(("contiguous", "strided"))
_labels = st.sampled_from(MODEL_LABELS)
_exchanges = st.sampled_from(("direct", "ring", "gather"))
_dtypes = st.sampled_from(("float64",) * 7 + ("float32",))
_wrappers = st.sampled_from(("none", "ddp", "fsdp2", "none", "ddp", "hsdp2"))
_accumulations = st.sampled_from((1, 1, 2, 3))
_checkpointing = st.sampled_from(("none", "non-reentrant", "none", "selective"))
_clipping = st.sampled_from((None, None, 0.1, 0.02, 1e6))  # 1e6 never clips: only the norm is checked
_optimisers = st.sampled_from(("sgd", "adamw"))
_steps = st.sampled_from((1, 1, 2, 3))
_seeds = st.integers(0, 255)
_flags = st.sampled_from((False, False, True))


@st.composite
def model_cases(draw: Draw, world: int) -> ModelCase:
    """Draw ModelCases for a world of that many ranks. Some label is in every step."""
    tokens = draw(_tokens[draw(_ceilings)])
    data = draw(st.sampled_from([d for d in range(1, world + 1) if world % d == 0]))
    case = ModelCase(
        world=world, data=data, arrangement=draw(_arrangements), tokens=tokens, batch=draw(_batches),
        order=draw(_orders), cuts=cuts_of(draw, tokens, world // data), packed=None, padding=False,
        labels=draw(_labels), exchange=draw(_exchanges), dtype=draw(_dtypes), wrapper=draw(_wrappers),
        accumulation=draw(_accumulations), checkpointing=draw(_checkpointing), clipping=draw(_clipping),
        optimiser=draw(_optimisers), steps=draw(_steps), seed=draw(_seeds),
    )  # fmt: skip
    padding, packed = draw(_flags), documents_of(draw, tokens, ends_of(case.shards()))
    case = replace(case, packed=packed, padding=padding and packed is None)
    if all(global_batch(case, step).labelled for step in range(case.steps)):
        return case
    return replace(case, packed=None, padding=False, labels="all")
