"""`ring_attention` on simulated ranks: a wrong call and calls that differ are told alike on all; equal ones are taken.

What is wrong with arguments on one rank alone, `tests/ring/test_attention_single.py` has.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reference.pattern import Branch, Pattern
from ring import Layout, agreement, ring_attention
from verification.run.simulation.simulated_transport import SimulatedTransport
from verification.run.simulation.simulation import Simulation

pytestmark = pytest.mark.ranks

Arguments = dict[str, Any]  # of ring_attention, by name


class Unspeakable:
    """Nothing that an argument may be; and who wants to say what was given, fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __repr__(self) -> str:
        raise self.error


def together(*changes: Arguments) -> list[str]:
    """What ring_attention raises on each rank, with its type, when rank i calls it with changes[i]; or "fine"."""
    world = len(changes)

    def step(transport: SimulatedTransport) -> str:
        q, k, v = (torch.randn(1, 2, 1, 4) for _ in range(3))
        arguments: Arguments = {"q": q, "k": k, "v": v, "group": transport, "pattern": Pattern.dense()}
        arguments |= {"layout": Layout.contiguous(2 * world, world)} | changes[transport.rank]
        try:
            ring_attention(**arguments)
        except Exception as error:  # of any type: which it is, is what is asked
            return f"{type(error).__name__}: {error}"
        return "fine"

    return Simulation(world, 0).run(step)


@pytest.mark.parametrize("scales", ((1, 1.0), (0.0, -0.0)))
def test_calls_that_mean_the_same_agree(scales: tuple[float, float]) -> None:
    assert together(*({"scale": scale} for scale in scales)) == ["fine"] * 2


@pytest.mark.parametrize(
    "arguments", ({"bucket": 1}, {"bucket": 2**40}, {"scale": sys.float_info.max}, {"scale": -sys.float_info.max})
)
def test_the_least_and_the_greatest_numbers_are_taken(arguments: Arguments) -> None:
    assert together(arguments, arguments) == ["fine"] * 2


BUCKET = "ValueError: rank 1: bucket must be None or a number of tokens from 1 to 2**40, got"
SCALE = "ValueError: rank 1: scale must be None or a finite number, got"
LAYOUT = "ValueError: rank 1: layout must be for the 2 ranks of the group, got one for"
WRONG: list[tuple[str, Arguments, str]] = [
    ("no number as scale", {"scale": float("nan")}, f"{SCALE} nan"),
    ("endless scale", {"scale": 10**5000}, f"{SCALE} an integer of too many digits"),
    ("a bucket one too large", {"bucket": 2**40 + 1}, f"{BUCKET} 1099511627777"),
    ("a bucket beyond 64 bits", {"bucket": 2**63}, f"{BUCKET} 9223372036854775808"),
    ("the most digits that are shown", {"bucket": 10**100}, f"{BUCKET} 1{'0' * 100}"),
    ("too many digits", {"bucket": 10**100 + 1}, f"{BUCKET} an integer of too many digits"),
    ("endless bucket", {"bucket": 10**5000}, f"{BUCKET} an integer of too many digits"),
    (
        "an argument of others",
        {"is_causal": True},
        "ValueError: rank 1: is_causal is no argument of ring_attention: write Pattern.dense(causal=True)",
    ),
    # Rank 2 has no tokens: what rank 1 holds fits.
    ("one rank too many", {"layout": Layout.from_cuts(range(4), (0, 2, 4, 4))}, f"{LAYOUT} 3"),
    ("one rank too few", {"layout": Layout.contiguous(4, 1)}, f"{LAYOUT} 1"),
    (
        "cudnn on the CPU",
        {"kernel": "cudnn"},
        "NotImplementedError: rank 1: kernel 'cudnn' takes cuda tensors, got cpu; 'auto' and 'math' take any",
    ),
    # An error of any other type is a ValueError for all, and says what it was.
    *(
        (type(error).__name__, {"kernel": Unspeakable(error)}, f"ValueError: rank 1: {type(error).__name__}: {error}")
        for error in (KeyError("no words"), RuntimeError("no words"), ZeroDivisionError("no words"))
    ),
]


@pytest.mark.parametrize(("arguments", "said"), [wrong[1:] for wrong in WRONG], ids=[wrong[0] for wrong in WRONG])
def test_whatever_is_wrong_on_one_rank_is_said_on_all(arguments: Arguments, said: str) -> None:
    assert together({}, arguments) == [said] * 2


@pytest.mark.parametrize(
    ("changes", "said"),
    (
        (({"bucket": 3}, {"bucket": 4}), "bucket must be the same on every rank: rank 0 has 3, rank 1 4"),
        (({}, {}, {"bucket": 5}), "bucket must be the same on every rank: rank 0 has None, rank 2 5"),
        (({"scale": 1e-20}, {"scale": 2e-20}), "scale must be the same on every rank: rank 0 has 1e-20, rank 1 2e-20"),
    ),
    ids=("two ranks", "the last of three", "scales that a sum would drop"),
)
def test_ranks_that_differ_are_told_in_what(changes: tuple[Arguments, ...], said: str) -> None:
    assert together(*changes) == [f"ValueError: {said}"] * len(changes)


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ((4,), None, "rank 0 has (4), rank 1 None"),
        (None, (1,) * 4, "rank 0 has None, rank 1 (1, 1, 1, 1)"),
        ((1, 1, 2), (1, 2, 1), "rank 0 has 1 as number 1 of 3, rank 1 2 as number 1 of 3"),
        ((4,), (4, 0), "rank 0 has none as number 1 of 1, rank 1 0 as number 1 of 2"),
        ((0,) * 9000 + (1, 3), (0,) * 9000 + (3, 1),
         "rank 0 has 1 as number 9000 of 9002, rank 1 3 as number 9000 of 9002"),
        ((4,), (0,) * 9000 + (4,), "rank 0 has 4 as number 0 of 1, rank 1 0 as number 0 of 9001"),
        (None, (0,) * 9000 + (4,), "rank 0 has None, rank 1 (0, 0, 0, 0, 0, 0, ...)"),
    ],
)  # fmt: skip
def test_documents_that_differ_are_told_by_the_first_difference(one: Any, other: Any, said: str) -> None:
    patterns = ({"pattern": Pattern.dense(documents=documents)} for documents in (one, other))
    assert together(*patterns) == [f"ValueError: documents must be the same on every rank: {said}"] * 2


def test_documents_that_do_not_add_up_are_refused_on_every_rank() -> None:
    said = "documents must add up to the 4 tokens of the sequence, got 3 in 2 documents, (2, 1)"
    wrong = {"pattern": Pattern.dense(documents=(2, 1))}
    assert together(wrong, wrong) == [f"ValueError: rank 0: {said}"] * 2
    assert together({}, wrong) == [f"ValueError: rank 1: {said}"] * 2


@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
@pytest.mark.parametrize(
    ("dtype", "heads", "dim", "taken"),
    [
        (torch.bfloat16, 3, 64, True), (torch.float16, 1, 128, True), (torch.float16, 8, 12, False),
        (torch.bfloat16, 8, 136, False), (torch.float32, 8, 64, False),
    ],
)  # fmt: skip
def test_a_fused_kernel_of_gpus_is_refused_where_it_takes_no_tile(
    kernel: str, dtype: torch.dtype, heads: int, dim: int, taken: bool
) -> None:
    """Needs no GPU: nothing is computed."""
    q: Any = SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(1, 8, heads, dim))
    call: Any = SimpleNamespace(kernel=kernel, q=q, return_lse=False, differentiated=True)
    with nullcontext() if taken else pytest.raises(NotImplementedError, match=f"{dtype} and head dim {dim}"):
        agreement._validate_fused(call)


PATTERN = Pattern((Branch(4, 2, (0, 1), range(0, 2)), Branch(None, 3, 1)), causal=True)
OTHERS = {
    "causal": Pattern(PATTERN.branches, False),
    "fewer branches": Pattern(PATTERN.branches[:1], True),
    "the order of branches": Pattern(PATTERN.branches[::-1], True),
    "a segment length": Pattern((Branch(5, 2, (0, 1), range(0, 2)), PATTERN.branches[1]), True),
    "a dilation rate": Pattern((PATTERN.branches[0], Branch(None, 2, 1)), True),
    "an offset": Pattern((PATTERN.branches[0], Branch(None, 3, 2)), True),
    "offsets of heads": Pattern((Branch(4, 2, (1, 0), range(0, 2)), PATTERN.branches[1]), True),
    "heads": Pattern((Branch(4, 2, (0,), range(0, 1)), PATTERN.branches[1]), True),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_patterns_that_differ_in_anything_are_refused(other: Pattern) -> None:
    tensors = {name: torch.zeros(1, 2, 2, 4) for name in "qkv"}
    said = together({**tensors, "pattern": PATTERN}, {**tensors, "pattern": other})
    assert said[0] == said[1] and said[0].startswith("ValueError: pattern must be the same on every rank: rank 0 has")
