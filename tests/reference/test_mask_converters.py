"""Masks of other libraries become slices and back, each pair held beside a dense mask."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from reference.mask_converters import (
    flashmask_from_slices,
    magi_from_slices,
    slices_from_flashmask,
    slices_from_function,
    slices_from_magi,
    spans_from_token_types,
)
from reference.pattern import Branch, Pattern
from reference.slices import Slice, meet
from tests.reference.test_slices import MASKS, N, seen


def dense(slices: tuple[Slice, ...], n: int = N) -> torch.Tensor:
    """Number of slices that see each pair."""
    places = torch.arange(n)
    return sum((one.sees(places[:, None], places).int() for one in slices), torch.zeros(n, n, dtype=torch.int32))


def drawn(seed: int) -> torch.Tensor:
    """Mask of a few disjoint slices, some with open ends, some empty."""
    draw = random.Random(seed)
    slices: list[Slice] = []
    for _ in range(6):
        (q0, q1), (k0, k1) = (sorted(draw.choices(range(N + 1), k=2)) for _ in range(2))
        low, high = draw.choice([None, draw.randint(-N, N)]), draw.choice([None, draw.randint(-N, N)])
        one = Slice(q0, draw.choice([q1, None]), k0, draw.choice([k1, None]), low, high)
        if not any(meet(one, other) for other in slices):
            slices.append(one)
    return dense(tuple(slices))


WANTED = {name: seen(pattern)[0] for name, (pattern, _) in MASKS.items()} | {
    f"drawn {seed}": drawn(seed) for seed in range(40)
}


@pytest.mark.parametrize("mask", WANTED)
def test_a_function_and_magi_slices_keep_a_mask(mask: str) -> None:
    wanted = WANTED[mask]
    slices = slices_from_function(lambda q, k: wanted[q, k] > 0, N)
    assert torch.equal(dense(slices), wanted)
    magi = magi_from_slices(slices, N)
    assert torch.equal(dense(slices_from_magi(*magi)), wanted)
    assert torch.equal(dense(slices_from_magi(*map(torch.tensor, magi))), wanted) or not slices
    assert len(magi.attn_type_map) <= 3 * len(slices)


@pytest.mark.parametrize("mask", MASKS)
def test_slices_of_a_constructor_become_few_others(mask: str) -> None:
    pattern = MASKS[mask][0]
    own = pattern.branches[0].slices
    assert own is not None
    assert torch.equal(dense(slices_from_magi(*magi_from_slices(pattern, N))), WANTED[mask])
    assert len(slices_from_function(lambda q, k: WANTED[mask][q, k] > 0, N)) <= 3 * max(4, len(own))


@pytest.mark.parametrize("mask", WANTED)
def test_flashmask_keeps_a_mask_or_refuses_it(mask: str) -> None:
    wanted = WANTED[mask]
    hidden = torch.nn.functional.pad((wanted == 0).int(), (0, 0, 1, 0)).diff(dim=0) == 1
    most = hidden.sum(0)  # intervals of queries that do not see each key
    slices = slices_from_function(lambda q, k: wanted[q, k] > 0, N)
    if (most > 2).any():
        with pytest.raises(ValueError, match=rf"at most two intervals .* for key {int((most > 2).int().argmax())}"):
            flashmask_from_slices(slices, N)
        return
    indices, causal = flashmask_from_slices(slices, N)
    assert indices.dtype == torch.int32 and indices.shape[:3] == (1, 1, N)
    assert torch.equal(dense(slices_from_flashmask(indices, causal)), wanted)


@pytest.mark.parametrize("pattern", [Pattern.dense(True, (7, 0, 12, 5), 3), Pattern.prefix([2, 3], (4, 20))])
def test_a_pattern_converts_with_documents_and_window(pattern: Pattern) -> None:
    wanted = seen(pattern)[0]
    assert torch.equal(dense(slices_from_magi(*magi_from_slices(pattern, N))), wanted)
    assert torch.equal(dense(slices_from_flashmask(*flashmask_from_slices(pattern, N))), wanted)


@pytest.mark.parametrize("causal, width", [(True, 1), (True, 2), (False, 2), (False, 4)])
def test_flashmask_indices_hide_what_they_name(causal: bool, width: int) -> None:
    queries = torch.arange(N)[:, None]
    for seed in range(10):
        x = torch.randint(-2, N + 3, (N, width), generator=torch.Generator().manual_seed(seed))
        first, second, third, fourth = (x[:, min(i, width - 1)] for i in range(4))
        if causal:
            hidden = (queries < torch.arange(N)) | ((queries >= first) & ((queries < second) | (width == 1)))
        elif width == 2:
            hidden = (queries >= first) | (queries < second)
        else:
            hidden = ((queries >= first) & (queries < second)) | ((queries >= third) & (queries < fourth))
        assert torch.equal(dense(slices_from_flashmask(x, causal)), (~hidden).int())


def test_flashmask_takes_the_shortest_form() -> None:
    spans_of_rows = slices_from_function(lambda q, k: WANTED["prefix"][q, k] > 0, N)
    for slices, causal, numbers in (((Slice(high=0),), True, 1), (spans_of_rows, False, 2), ((), True, 1)):
        indices, is_causal = flashmask_from_slices(slices, N)
        assert (is_causal, indices.shape[-1]) == (causal, numbers)


def test_a_mask_function_of_flex_attention_converts() -> None:
    def mask_mod(b: Any, h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) & (q - k <= 700) | (k < 64) & (k <= q)

    slices = slices_from_function(lambda q, k: mask_mod(0, 0, q, k), 4096)
    assert len(Pattern.slices(slices).branches[0].slices or ()) <= 6
    assert torch.equal(dense(slices, 4096) > 0, mask_mod(0, 0, torch.arange(4096)[:, None], torch.arange(4096)))


def test_consecutive_tokens_of_a_type_are_a_span() -> None:
    types = [1, 1, 0, 2, 1, 0, 0, 1]
    assert spans_from_token_types(types) == [(0, 2), (4, 5), (7, 8)]
    assert spans_from_token_types(torch.tensor([types]), (1, 2)) == [(0, 2), (3, 5), (7, 8)]
    assert spans_from_token_types([]) == spans_from_token_types([0, 0]) == []


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "unequal": (lambda: slices_from_magi([[0, 4]], [[0, 4]], [0, 1]), "an entry for each slice, got 1, 1 and 2"),
    "kind": (lambda: slices_from_magi([[0, 4]], [[0, 4]], [4]), "attn_type_map must hold 0 full.*got 4"),
    "range": (lambda: slices_from_magi([[4, 0]], [[0, 4]], [0]), r"a range of q_ranges must be a range.*\(4, 0\)"),
    "fraction": (lambda: slices_from_magi([[0, 4]], torch.tensor([[0, 4.5]]), [0]), "a range of k_ranges must be"),
    "overlap": (lambda: slices_from_magi([[0, 4]] * 2, [[0, 4]] * 2, [0, 1]), r"see a pair once.*slices\(\[\("),
    "beyond": (lambda: magi_from_slices((Slice(0, 9),), 8), "slices must lie within the 8 tokens"),
    "beyond, too": (lambda: flashmask_from_slices((Slice(0, 4, 0, 9),), 8), "slices must lie within the 8 tokens"),
    "segments": (lambda: flashmask_from_slices(Pattern((Branch(4),)), 8), r"segments and rates.*\(4, 1, None\)"),
    "branches": (lambda: magi_from_slices(Pattern((Branch(),) * 2), 4), "pattern must have one branch for all heads"),
    "form": (lambda: slices_from_flashmask(torch.zeros(1, 1, 4, 4, dtype=torch.int32), True), "keys, 1 or 2.*=True"),
    "two heads": (lambda: slices_from_flashmask(torch.zeros(1, 2, 4, 1, dtype=torch.int32), True), "and one head"),
    "intervals": (
        lambda: slices_from_function(lambda q, k: (k % 2 == 0) & (q > 2), 12),
        "at most 4 intervals of keys, got another at query 3 and key 8",
    ),
    "slices": (
        lambda: slices_from_function(lambda q, k: (q % 2 == k // 1024 % 2) & (k % 1024 < 900), 4096),
        "at most 4096 slices, got more, one of them at query",
    ),
    "tokens": (lambda: slices_from_function(lambda q, k: k <= q, 4097), "must be 0 to 4096, got 4097"),
    "scores": (lambda: slices_from_function(lambda q, k: k - q, 8), r"a bool tensor \(8, 8\), got torch"),
    "shape": (lambda: slices_from_function(lambda q, k: torch.ones(3, dtype=torch.bool), 8), r"of shape \(3,\)"),
    "no function": (lambda: slices_from_function(torch.ones(8, 8), 8), "must take queries and keys"),  # type: ignore[arg-type]
    "no tokens": (lambda: magi_from_slices((Slice(high=0),), -1), "tokens is -1; it must be an integer"),
    "fraction of tokens": (lambda: flashmask_from_slices((Slice(high=0),), 8.5), "tokens is 8.5"),  # type: ignore[arg-type]
    "causality": (lambda: slices_from_flashmask([[2], [2]], "False"), "causal must be True or False, got 'False'"),  # type: ignore[arg-type]
    "ragged": (lambda: slices_from_flashmask([[2], [2, 3]], True), "startend_row_indices must be .* equal length"),
    "set of types": (lambda: spans_from_token_types([0, 1, 1], {1, 2}), r"types must be a list of integers.*\{1, 2\}"),  # type: ignore[arg-type]
    "rows": (lambda: spans_from_token_types([[0, 1], [1, 0]]), "integers of one row"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_a_mask_that_cannot_be_said_is_refused_by_name(kind: str) -> None:
    convert, message = REFUSED[kind]
    with pytest.raises(ValueError, match=message):
        convert()
