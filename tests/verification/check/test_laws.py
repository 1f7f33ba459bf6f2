"""Laws between Cases find what is planted against them; `peers/test_peer_laws.py` has those of any attention."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from reference.pattern import Branch, Pattern
from reference.slices import tree_slices
from ring import attend, attention, consensus, programs
from ring.comm.call_order import Calls
from ring.compute.accumulator import Accumulator
from tests.support.drawing import draw_many
from tests.support.plain_case import plain
from tests.support.planted import plant, plant_on_results
from verification.case import Case
from verification.check.attention_on_ranks import AttentionOnRanks
from verification.check.laws import LAWS
from verification.check.laws.same_bits import SAME_BITS, other_of
from verification.experiments import check_case
from verification.failures import VerificationFailure
from verification.run.backends import SimBackend

pytestmark = pytest.mark.ranks

BY_NAME = {law.name: law for law in LAWS}
Plant = Callable[[], object]


results: Callable[[Any], Plant] = partial(partial, plant_on_results)  # as that takes a function


def before(act: Callable[[Any], object]) -> Plant:
    """Each call begins with act(arguments by position)."""

    def spoil(real: Any, args: Any, options: Any) -> Any:
        act(args)
        return real(*args, **options)

    return partial(plant, spoil)


def keeps_results(real: Any, args: Any, options: Any, kept: list[Any] = []) -> Any:  # noqa: B006 - it is to be kept
    kept.append(real(*args, **options))
    return kept[-1]


def keeps_one_output(real: Any, args: Any, options: Any, kept: dict[Any, Tensor] = {}) -> Any:  # noqa: B006 - likewise
    """All calls of a rank on tensors of one shape give the same output tensor."""
    result = real(*args, **options)
    out = result[0] if isinstance(result, tuple) else result
    place = options["group"].rank if options["group"] is not None else 0
    kept.setdefault(place, out.data).copy_(out.data)
    out.data = kept[place]
    return result


def forgets_the_pattern() -> None:
    """A plan is kept for a layout and a rank, whatever the pattern."""
    real, kept = programs.plan_of, dict[Any, Any]()
    programs.plan_of = lambda pattern, *others, **keys: kept.setdefault(others[:2], real(pattern, *others, **keys))


def ignores_sinks_after_the_first_call() -> None:
    real, kept = attend.accumulator_for, dict[Any, Any]()
    attend.accumulator_for = lambda like, sinks: real(like, kept.setdefault(like.shape, sinks))


def accumulates_in_16_bits() -> None:
    real = Accumulator.merge

    def merge(self: Any, *args: Any) -> None:
        real(self, *args)
        self.out.copy_(self.out.bfloat16())

    Accumulator.merge = merge  # type: ignore[method-assign, assignment]


def says_less() -> None:
    real = consensus._joint_error
    consensus._joint_error = lambda reports: ValueError(str(real(reports)).partition(":")[0])


def ignores(owner: Any, name: str, result: Any = None) -> Plant:
    """Replace the function by one that does nothing."""
    return lambda: setattr(owner, name, lambda *arguments: result)


def in_flight(*deviation: Any) -> dict[str, Any]:
    """Two calls in flight on all ranks, the second one's backward first, as pipelines have it."""
    order = [["forward", 0], ["forward", 1], ["backward", 1], ["backward", 0]]
    told = list(deviation) or None
    return {"members": None, "groups": [0, 0], "names": [None, "b"], "order": order, "deviation": told}


def wrongly(mistake: str) -> dict[str, Any]:
    return {"mistakes": [[mistake, 1]], "compiled": False, "new_group": False, "without_page": None}


NODES = {"parents": [None, 0, 0, 2], "lengths": [3, 1, 2, 6]}
TREE = plain(2, pattern=Pattern((Branch(slices=tuple(tree_slices(NODES["parents"], NODES["lengths"]))),)))
WRITTEN, LEAVES = "a mask written in another way", "a tree equals its leaves"
MOVED = {"group": None, "order": "contiguous", "cuts": None, "exchange": "gather", "bucket": None}
LONG = plain(8, tokens=512, heads=4, kv_heads=4, head_dim=16, dtype="bfloat16")
MEASURED = plain(2, tokens=64, measured=True, bucket=16)
CALLS, LEFT, LIKE = "calls are not confused", "a call leaves nothing behind", "no call takes another for its like"
REFUSED = "wrong calls refused everywhere"
TEETH: list[tuple[str, Plant, Case, dict[str, Any], str]] = [
    ("same on any ranks, layout, exchange",
     results(lambda out, args, options: out + (options["exchange"] == "gather")), plain(2), MOVED, "times the sum of"),
    (WRITTEN, results(lambda out, args, options: out + args[3].has_slices), plain(2, pattern=Pattern.dense(True)),
     {"way": "causality and windows", "seed": 0}, "times the sum of"),
    (WRITTEN, results(lambda out, args, options: out + len(args[3].branches[0].slices)), TREE,
     {"way": "cut in two", "seed": 1}, "times the sum of"),
    (WRITTEN, results(lambda out, args, options: out + args[3].branches[0].slices[0].q0), TREE,
     {"way": "in another order", "seed": 3}, "times the sum of"),
    (LEAVES, results(lambda out, args, options: out + args[3].has_slices), TREE, NODES, r"out of \[0, 1, 2, 3\]"),
    (LEAVES, results(lambda out, args, options: out + 0 * out.detach() + (out - out.detach()) * args[3].has_slices),
     TREE, NODES, "summed over leaves"),
    (REFUSED, ignores(consensus, "validate"), plain(2), wrongly("one token too many in q"), "index 0 .* nothing"),
    (REFUSED, says_less, plain(2), wrongly("another name than the others"), "does not name"),
    (CALLS, partial(plant, keeps_one_output), plain(2), in_flight(), "other results than by themselves: out of call 0"),
    (CALLS, ignores(attention, "agree_backward"), plain(2), in_flight("skips", 1, 2), "index 0 other results"),
    (CALLS, ignores(Calls, "advance_to"), plain(2), in_flight("skips", 1, 3),
     "rank 0 is in the forward of call 6, rank 1 in the forward of call 7"),
    (CALLS, says_less, plain(2), in_flight("skips", 1, 2), "the error does not name 'the backward of call"),
    (CALLS, ignores(Calls, "check_thread"), plain(2), in_flight("thread", 1, 1),
     "index 0 raised None after 2 steps|error does not name .calls on a group"),
    (CALLS, ignores(Calls, "lock", nullcontext()), plain(2), in_flight("overlaps", 1, 1), "began while another"),
    ("a broken-off call closes its group", ignores(Calls, "mark_broken"), plain(2), {"check": True},
     "must be refused"),
    (LIKE, forgets_the_pattern, plain(2), {"causal": True}, "out is"),
    (LIKE, ignores_sinks_after_the_first_call, plain(2), {"sinks": "normal"}, "out is"),
    ("batches and heads permute", results(lambda out, args, options: out * options["sinks"].cumsum(0)[:, None]),
     plain(2, batch=2, sinks="normal"), {"batch": [1, 0], "kv_heads": [1, 0]}, "out"),
    (LEFT, partial(plant, keeps_results), plain(2), {}, "in memory when all results are dropped: q, k, v, out"),
    (LEFT, before(lambda args: torch.manual_seed(0)), plain(2), {}, "changed by the call: torch's random numbers"),
    (LEFT, before(lambda args: torch.set_default_dtype(torch.float64)), plain(2), {}, "by the call: the default dtype"),
    ("memory of longer shards", before(lambda args: torch.zeros(args[4].n, args[4].n)), MEASURED, {},
     "workspace: forward, .* made a tensor"),
    ("error does not grow with ranks", accumulates_in_16_bits, LONG, {"shift": 1}, "the RMS error of out"),
]  # fmt: skip


def other_way(**changes: Any) -> dict[str, Any]:
    """The same Case on both of two ranks, with these changes."""
    same = {"world": 2, "group": None, "order": "chunks", "cuts": None, "exchange": "all-to-all", "bucket": None}
    return same | {"strided": False, "entry": None} | changes


def without_chunks(spoil: Any, real: Any, args: Any, options: Any) -> Any:
    """Call it without chunks: by heads, results have the same bits on any ranks all the same."""
    out, lse = real(*args, **{name: x for name, x in options.items() if name != "same_bits"})
    return spoil(out, options["exchange"], len(args[0])), lse


NEGATIVE = {False: 0.0, True: -0.0}
BITS: list[tuple[Any, dict[str, Any], str | None]] = [
    (lambda out, exchange, batch: out, {"world": 1}, None),
    (
        lambda out, exchange, batch: out,
        {"exchange": "ring", "order": "dealt chunks"},
        "out at .*; lse .*; dq .*; dk .*; dv",
    ),
    (lambda out, exchange, batch: out, {"entry": 1, "strided": True}, None),
    (lambda out, exchange, batch: out + 2.0**-22 * batch, {"entry": 1}, r"out at \(0, 0, 0, 0\) .* differ\): for"),
    (lambda out, exchange, batch: out * NEGATIVE[exchange == "gather"], {"exchange": "gather"}, "is -?0.0 and -?0.0 "),
    (lambda out, exchange, batch: out * float("nan"), {"exchange": "all-to-all:2+direct"}, None),
]


def plant_bits(number: int) -> None:
    plant(partial(without_chunks, BITS[number][0]))


@pytest.mark.parametrize("number", range(len(BITS)))
def test_bits_are_compared_as_integers(number: int) -> None:
    _, changes, said = BITS[number]
    case = plain(2, tokens=80, head_dim=16, batch=2, order="chunks", same_bits=16, exchange="all-to-all",
                 pattern=Pattern.dense(True), lse="differentiated")  # fmt: skip
    how = other_way(**changes)
    SAME_BITS.validate(case, how)
    with closing(SimBackend(10.0, partial(plant_bits, number))) as backend:
        backend.start(2)
        with nullcontext() if said is None else pytest.raises(VerificationFailure, match=said):
            assert SAME_BITS.check(AttentionOnRanks(backend), case, how) == 0.0
        ratios = check_case(backend, replace(case, again="alike"), ("answers", "traffic", "buffers"))
        assert set(ratios) == {"every rank answers", "bytes sent", "buffers"}


def test_the_same_bits_have_a_way_that_is_taken() -> None:
    for world in (1, 2, 4):
        drawn = draw_many(SAME_BITS.draw(world), 40)
        for case, how in drawn:
            SAME_BITS.validate(case, how)
            assert case.same_bits is not None and other_of(case, how) != case
        assert any(how["entry"] is not None for _, how in drawn)


def plant_number(number: int) -> None:
    TEETH[number][1]()


@pytest.mark.parametrize("number", range(len(TEETH)), ids=[f"{name}: {said}" for name, *_, said in TEETH])
def test_broken_laws_are_found(number: int) -> None:
    name, _, case, how, said = TEETH[number]
    BY_NAME[name].validate(case, how)
    with closing(SimBackend(10.0, partial(plant_number, number))) as backend:
        backend.start(case.world)
        with pytest.raises(VerificationFailure, match=said):
            BY_NAME[name].check(AttentionOnRanks(backend), case, how)
