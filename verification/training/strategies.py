"""Hypothesis strategies that draw small TrainingCases. Models are tiny: errors of composition show at any size."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import reject
from hypothesis import strategies as st

from reference.pattern import Pattern
from verification.case import ORDERS_BY_CHUNK, splits_heads
from verification.models.step_case import STEP_DTYPES
from verification.models.strategies import EXCHANGES, MAX_TOKENS, if_valid, split_fields, step_fields
from verification.strategies.cases import Draw, bucket_of, pattern_of
from verification.strategies.documents import documents_of, ends_of, windowed
from verification.training.training_case import OtherRanks, TrainingCase
from verification.training.training_model import Model

_tokens = st.integers(1, MAX_TOKENS)
_min_tokens = st.integers(2, 8)
_kinds = st.sampled_from(("sdpa", "llama", "longnet"))
_layers = st.sampled_from((1, 1, 2))
_dims = st.sampled_from((4, 8, 16, 12, 32))
_heads = st.sampled_from(((1, 1), (2, 2), (2, 1), (4, 2), (3, 1), (4, 4)))
_head_dims = st.sampled_from((2, 4, 8, 3))
_even_head_dims = st.sampled_from((4, 2, 8))
_positions = st.sampled_from(("none", "rotary", "learned", "rotary"))
_norms = st.sampled_from(("rms", "layer"))
_handles = st.sampled_from(("recorded", "recorded", "recorded", "group", "mesh"))
# Compiling takes each rank seconds, a step hundredths of one: few TrainingCases are compiled. "inductor" is not drawn:
# it takes longer still, and calls our operators in the same places.
_compiled = st.sampled_from(("no",) * 11 + ("aot_eager",))
_dtypes = st.sampled_from(("float64",) * 6 + ("float32", "bfloat16"))
_checkpointing = st.sampled_from(("none", "non-reentrant", "reentrant", "selective"))
_resumed = st.sampled_from((None, None, None, None, None, None, "contiguous", "zigzag", "striped"))
_labels = st.sampled_from(("all", "some", "shards", "ranks", "all", "some", "shards", "ranks", "none"))
_flags = st.booleans()
_scales = st.sampled_from((None, None, 0.25, 1.5))
_losses = st.sampled_from(("mean", "mean", "scaled", "given"))
_packed_by = st.sampled_from(("batch", "handle"))
_spoilt = st.sampled_from((None,) * 6 + ("nan", "inf"))
_others = st.sampled_from((False, True, True))
_branches = st.sampled_from((1, 2, 3))
_ratios = st.sampled_from((1, 2, 3, 4))
_chunks = st.sampled_from((16, 16, 32))
_tokens_of_chunks = st.integers(1, 96)
_dtypes_of_bits = st.sampled_from(STEP_DTYPES)
_orders_of_chunks = st.sampled_from(ORDERS_BY_CHUNK)
_handles_of_chunks = st.sampled_from(("group", "mesh"))
_losses_of_chunks = st.sampled_from(("mean", "mean", "given"))


def _model(draw: Draw) -> Model:
    kind = draw(_kinds)
    heads, kv_heads = draw(_heads)
    positions, layers, tied = draw(_positions), draw(_layers), draw(_flags)
    head_dim = draw(_even_head_dims if positions == "rotary" or kind == "longnet" else _head_dims)
    # Draw these for every kind, used or not, so that later draws do not change when the kind shrinks.
    dim, norm, qk_norm, bias, subln = draw(_dims), draw(_norms), draw(_flags), draw(_flags), draw(_flags)
    scale, two_bases = draw(_scales), draw(_flags)
    longnet, llama = kind == "longnet", kind == "llama"
    return Model(
        kind=kind, layers=layers, dim=heads * head_dim if longnet else dim, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, norm="layer" if longnet else norm, tied=tied,
        qk_norm=llama and qk_norm, bias=longnet or bias, subln=longnet and subln,
        positions=positions, scale=scale if kind == "sdpa" else None,
        bases=2 if two_bases and not longnet else 1,
    )  # fmt: skip


def _pattern(draw: Draw, model: Model, tokens: int, ranks: int) -> Pattern:
    """Half are dense, and any may have windows, except LongNet's. ranks: number that share a sequence."""
    if model.kind != "longnet":
        dense = draw(_flags)
        pattern = Pattern.dense(causal=not draw(_flags)) if dense else pattern_of(draw, tokens, model.heads)
        return windowed(draw, pattern, tokens, ranks)
    count, shortest, growth = draw(_branches), draw(st.integers(1, tokens)), draw(_ratios)
    lengths = [shortest * growth**step for step in range(count)]
    return Pattern.longnet(lengths, [draw(_ratios) for _ in lengths], model.heads, draw(_flags), "torchscale")


@st.composite
def training_cases(draw: Draw, world: int) -> TrainingCase:
    """Draw TrainingCases for a world of that many ranks."""
    tokens, model = max(draw(_tokens), draw(_min_tokens)), _model(draw)
    fields, dtype = step_fields(draw, world, tokens), draw(_dtypes)
    compiled, handle, steps = draw(_compiled), draw(_handles), fields["steps"]
    case = TrainingCase(
        **fields, model=model, bucket=bucket_of(draw, tokens),
        handle="group" if compiled != "no" and handle == "recorded" else handle,  # a graph names its group
        compiled=compiled, dtype="float64" if model.has_steps else dtype, checkpointing=draw(_checkpointing),
        resumed=draw(_resumed) if steps > 1 else None, labels=draw(_labels), loss=draw(_losses),
        packed_by=draw(_packed_by), drops_zeros=draw(_flags), spoilt=draw(_spoilt),
        pattern=_pattern(draw, model, tokens, world // fields["data"]),  # last: its draws depend on the model
    )  # fmt: skip
    return _in_documents(draw, case)


def _in_documents(draw: Draw, case: TrainingCase) -> TrainingCase:
    """Draw documents for the steps and the modules."""
    model, steps, tokens, ends = case.model, case.steps, case.tokens, ends_of(case.shards())
    case = replace(case, pattern=replace(case.pattern, documents=documents_of(draw, tokens, ends)))
    if steps > 1 and draw(_others):
        case = replace(case, later_documents=tuple(documents_of(draw, tokens, ends) for _ in range(steps - 1)))
    if model.kind == "longnet" or not case.always_packed or not draw(_others):
        return case
    return replace(case, own_documents=documents_of(draw, tokens, ends))


@st.composite
def same_weights_cases(draw: Draw, world: int) -> TrainingCase:
    """Draw TrainingCases with `same_bits` and other ranks, up to as many."""
    case, chunk = draw(training_cases(world)), draw(_chunks)
    tokens, dtype = max(draw(_tokens_of_chunks), chunk * (world - 1) + 1), draw(_dtypes_of_bits)
    case = replace(
        case, tokens=tokens, cuts=None, order="chunks", same_bits=chunk, wrapper="none", compiled="no",
        handle=draw(_handles_of_chunks), loss=draw(_losses_of_chunks), resumed=case.resumed and "chunks",
        drops_zeros=False, dtype="float64" if case.model.has_steps else dtype,
        bucket=case.bucket and max(case.bucket, chunk), later_documents=None, own_documents=None,
        pattern=_pattern(draw, case.model, tokens, case.context),
    )  # fmt: skip
    case = _in_documents(draw, case)
    others, order = _other_ranks(draw, case), draw(_orders_of_chunks)
    case = if_valid(replace(case, other_ranks=others), order=order)
    others = replace(others, order=draw(_orders_of_chunks))
    case = if_valid(if_valid(case, other_ranks=others), compares=draw(_flags))
    if not takes_chunks(case):
        case = replace(case, exchange="direct", other_ranks=replace(others, order="chunks", exchange="direct"))
    return case if case.resumed or case.elsewhere != replace(case, other_ranks=None) else reject()


def _other_ranks(draw: Draw, case: TrainingCase) -> OtherRanks:
    fields = split_fields(draw, case, st.sampled_from(EXCHANGES), _checkpointing)
    return OtherRanks(**fields, bucket=draw(st.sampled_from((None, case.same_bits))))


def takes_chunks(case: TrainingCase) -> bool:
    """Return True if no exchange divides the query heads of a key/value head, which `same_bits` refuses."""
    heads = case.model.heads, case.model.kv_heads
    return not any(splits_heads(run.exchange, run.context, *heads) for run in (*case.parts, case.elsewhere))
