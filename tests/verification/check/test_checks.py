"""Every check refuses each wrong observation, by its own kind of failure; bounds count all that plans merge."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, settings
from hypothesis import given as drawing
from hypothesis import strategies as st

from reference.fast_oracle import QUANTITIES, multiplicity
from reference.head_groups import KEY_EXCHANGES
from reference.pattern import Branch, Pattern
from reference.roundoff import mask_parts, max_pairs
from ring.plan.tile import Tile
from tests.ring.plan.plan_walk import PlanSetting, PlanWalk
from tests.support.plain_case import plain
from verification.case import Case
from verification.check import properties
from verification.check.checks import CHECKS, assemble
from verification.check.expectation import expect, sum_lengths
from verification.failures import MismatchedMessages, WrongResult
from verification.run.backends import SimBackend, observe_on
from verification.run.layouts import layout_of
from verification.run.observation import Observation
from verification.strategies.cases import cases as drawn_cases

pytestmark = pytest.mark.ranks

# Head 0 sees even positions of segments of 6, head 1 odd ones; heads 2 and 3 see nothing.
PATTERN = Pattern((Branch(6, 2, (0, 1), range(0, 2)),), causal=True)
Honest = Callable[[Case], list[Observation]]


def case(**changes: Any) -> Case:
    """On three of five ranks; index 1 of zigzag(12, 3) holds tokens 2, 3, 8, 9."""
    given: dict[str, Any] = {
        "group": (1, 2, 4), "order": "zigzag", "pattern": PATTERN, "batch": 2, "heads": 4, "kv_heads": 4,
        "head_dim": 3, "seed": 1, "exchange": "direct", "lse": "returned",
    }  # fmt: skip
    return plain(5, **given | changes)


@pytest.fixture(scope="module")
def honest() -> Iterator[Honest]:
    """Observations of simulated ranks."""
    with closing(SimBackend()) as backend:
        backend.start(1)
        yield lambda given: observe_on(backend, given)


Change = Callable[[list[Observation]], list[Observation]]


def judge_of(name: str) -> str:
    return "gradients" if name.startswith("d") else "values"


def changed(**changes: Any) -> Callable[[Any], Any]:
    """A dataclass with other values; a function is applied to the value that was there."""
    return lambda x: replace(x, **{name: y(getattr(x, name)) if callable(y) else y for name, y in changes.items()})


def on(rank: int, **changes: Any) -> Change:
    """Changes to what one rank saw."""
    return lambda seen: [changed(**changes)(x) if i == rank else x for i, x in enumerate(seen)]


def said(**changes: Any) -> Change:
    return on(1, layout=changed(**changes))


def at(*where: int, value: float) -> Callable[[Any], Any]:
    """An array with another value at one place."""

    def change(x: Any) -> Any:
        x = x.copy()
        x[where] = value
        return x

    return change


def one_message_more(seen: list[Observation]) -> list[Observation]:
    """On both sides, so that only the sum is wrong."""
    seen = on(0, sent_backward=lambda log: (*log, (2, 8, "more")))(seen)
    return on(2, received_backward=lambda log: (*log, (0, 8, "more")))(seen)


def first(**changes: Any) -> Callable[[Any], Any]:
    """The first message of a log with other entries."""
    return lambda log: (tuple((dict(zip(("peer", "size", "label"), log[0], strict=True)) | changes).values()), *log[1:])


MINE = r"rank 2 \(index 1 of the group\)"
ALL, NO_LSE = {"pattern": Pattern.dense()}, {"lse": "unused"}
MEASURED = ALL | {"measured": True, "bucket": 2}
SINKS = {"sinks": "normal", "value_dim": 5, "softcap": 2.0}
DTYPES = ("float32", "float32", "float32", "bfloat16", "float32", "float32")
FOUND: list[tuple[str, Change, str, dict[str, Any]]] = [  # the check, what is wrong, what is said, changes of the Case
    ("layout", said(positions=lambda x: x[::-1]), rf"{MINE} holds positions \[9, 8, 3, 2\]; .* differs: 9, not 2$", {}),
    ("layout", said(positions=lambda x: x[:-1]), r"holds positions \[2, 3, 8\]; .*; 3 of them where there are 4$", {}),
    ("layout", said(sharded=lambda x: x[::-1]), rf"{MINE} is given by `shard` positions \[9, 8, 3, 2\]", {}),
    ("layout", said(counts=(4, 5, 3)), r"the zigzag order, cut at \(0, 3, 3, 12\), makes", {"cuts": (0, 3, 3, 12)}),
    ("layout", said(place=lambda x: x[::-1]), rf"on {MINE}, `unshard` takes .* has them at \[ ?0, ", {}),
    ("answers", on(2, dk=lambda x: x[:, :-1]), "dk of rank 4 .*has shape .*3, 4, 3.*, not .*4, 4, 3", {}),
    ("answers", on(0, dtypes=DTYPES), "dk of rank 1 .*is bfloat16, not float32", {}),
    ("answers", on(0, dtypes=("bfloat16",) * 6), "lse of .* not float32", {"dtype": "bfloat16"}),
    *(("answers", on(1, **{name: lambda x: x[..., :3]}), rf"{name} of .* has shape .*3,?\), not .*{size}", SINKS)
      for name, size in (("out", r"5\)"), ("dv", r"5\)"), ("dsinks", r"\(4,\)"))),
    ("answers", on(1, dtypes=(*DTYPES[:3], "float32", "float32", "bfloat16")), "dsinks of .* not float32", SINKS),
    ("answers", on(1, dsinks=np.zeros(4)), "dsinks, which was not asked for", {}),
    ("answers", lambda seen: seen[:2], "2 ranks answered, the group has 3", {}),
    ("answers", on(1, lse=np.zeros((2, 4, 4))), "not asked for", NO_LSE),
    *(("unseen", on(1, **{name: at(0, 0, 3, 0, value=2.0**-40)}), f"{name} is 9.09.* at batch 0, token 2, head 3", {})
      for name in ("out", "dq", "dk", "dv")),
    ("unseen", on(1, out=at(0, 0, 3, 0, value=np.nan)), "unseen: out is nan", {}),
    *(("unseen", on(1, lse=at(0, 3, 0, value=x)), "unseen: lse .* head 3 .*-inf", {}) for x in (0.0, -1e10, np.inf)),
    ("unseen", on(1, lse=at(0, 3, 0, value=-np.inf)), "unseen: lse is -inf .* head 3 .*not exactly ", SINKS),
    ("unseen", on(1, out=at(0, 0, 3, 0, value=1e-9)), "unseen: out .* not exactly 0", SINKS),
    ("gradients", on(2, dsinks=at(1, value=50.0)), "values: dsinks is .* at head 1, summed over the ranks, exp", SINKS),
    ("gradients", lambda seen: [changed(dsinks=lambda x: 2 * x)(x) for x in seen], "values: dsinks .* of 4 ", SINKS),
    ("finite", on(0, dsinks=at(0, value=np.nan)), "finite: dsinks is nan at head 0", SINKS),
    *((check, on(1, **{name: at(0, *((0, 2) if name == "lse" else (2, 0, 0)), value=value)}),
       f"{'finite' if check == 'finite' else 'values'}: {name} is .* token 8, head 0", {})
      for name in QUANTITIES for check in ("finite", judge_of(name)) for value in (np.nan, -np.inf)),
    ("values", lambda seen: [seen[1], seen[0], seen[2]], "values: out", ALL),
    ("gradients", on(2, dv=lambda x: at(0, 0, 0, 1, value=5e3)(at(0, 0, 0, 0, value=50.0)(x))),
     "5000.0 at batch 0.*dim 1.*; 2 of 288", ALL),
    ("inputs", on(2, inputs_unchanged=False), "inputs: changed on rank 4", {}),
    ("repeat", on(1, repeat_equal=False), "a second run .no_grad. differs on rank 2", {"again": "no_grad"}),
    *(("messages", on(0, **{f"sent_{phase}": change}), f"{phase}, number 0 from rank 1 .* to rank .*{words}", ALL)
      for phase in ("forward", "backward")
      for change, words in ((first(size=4), "sent .* received"), (first(label="other"), "sent 'other'"),
                            (lambda log: [x for x in log if x[0] != log[0][0]], "sent nothing, received"))),
    *(("messages", on(1, sent_forward=first(peer=peer)), f"rank 2 .* names peer {peer}", ALL) for peer in (1, 3, -1)),
    ("messages", on(0, sent_backward=lambda log: log[::-1]), "backward, number 0 from rank 1", ALL),
    *(("traffic", one_message_more, "backward, rank 1 .*to rank 4", {"exchange": exchange})
      for exchange in ("ring", "direct", "gather")),
    *(("buffers", on(1, **{f"buffer_{phase}": lambda held: held - 4}), f"buffers: {phase}, rank 2", {})
      for phase in ("forward", "backward")),
    ("buffers", said(bucket=lambda x: x + 1), "the default bucket on rank .* the memory budget makes it", {}),
    *(("workspace", on(1, **{f"workspace_{phase}": change}), f"{phase}, {MINE} {words}", MEASURED)
      for phase in ("forward", "backward")
      for change, words in ((changed(largest=2**20), "made a tensor of"),
                            (changed(products=frozenset({(17, 17)})), "multiplied 17 vectors"),
                            (changed(products=frozenset({(1, 2 * 4 * 16 + 1)})), "multiplied 1 vectors"),
                            (changed(products=frozenset()), "has rows that see keys"))),
]  # fmt: skip


@pytest.mark.parametrize("row", FOUND, ids=lambda row: f"{row[0]}: {row[2]}")
def test_faults_are_found_by_their_check(honest: Honest, row: tuple[str, Change, str, dict[str, Any]]) -> None:
    """And so by all checks together; as they were, the observations pass. The failure has the title of its property."""
    check, change, words, changes = row
    given = case(**changes)
    expectation, right = expect(given), honest(given)
    CHECKS[check](given, expectation, right)
    wrong, kind = change(right), MismatchedMessages if check == "messages" else WrongResult
    with pytest.raises(kind, match=words) as caught:
        properties.check(given, expectation, wrong, (check,))
    assert type(caught.value) is kind
    (broken,) = (one for one in properties.PROPERTIES if check in one.checks)
    assert caught.value.broken == properties.broken_by(caught.value) == broken.title
    with pytest.raises(kind):
        properties.check(given, expectation, wrong)


@pytest.mark.parametrize("name", QUANTITIES)
def test_an_entry_beyond_its_bound(honest: Honest, name: str) -> None:
    given = case()
    expectation = expect(given)
    where, whole = ((1, 0, 2), (1, 0, 8)) if name == "lse" else ((1, 2, 0, 1), (1, 8, 0, 1))
    size = expectation.bound[name][whole]

    def off(times: float) -> list[Observation]:
        return on(1, **{name: lambda x: at(*where, value=x[where] + times * size)(x)})(honest(given))

    with pytest.raises(WrongResult, match=f"values: {name} is .* at batch 1, token 8, .*times its bound"):
        CHECKS[judge_of(name)](given, expectation, off(3.0))
    with pytest.raises(WrongResult, match=f"{name} of .* has shape"):
        assemble(given, on(1, **{name: lambda x: x[:, :, :1]})(off(0.0)), name)
    assert size > 0 and 0.2 < CHECKS[judge_of(name)](given, expectation, off(0.5))[name] < 0.9


@pytest.mark.parametrize(
    "exact, bound, allowed",
    [(6e4, 1e4, [np.inf]), (-6e4, 2e5, [-np.inf, np.inf]), (6e4, 5e3, []), (0.0, np.inf, [-np.inf, np.inf, np.nan])],
)
def test_overflow_is_right_beyond_the_range_of_the_type(
    honest: Honest, exact: float, bound: float, allowed: list[float]
) -> None:
    given = case(dtype="float16", pattern=Pattern.dense())
    expectation = expect(given)
    expectation.exact["dk"][0, 2, 1, 0], expectation.bound["dk"][0, 2, 1, 0] = exact, bound
    for value in (-np.inf, np.inf, np.nan):
        seen = on(1, dk=at(0, 0, 1, 0, value=value))(honest(given))
        with nullcontext() if value in allowed else pytest.raises(WrongResult, match="finite: dk is .*dim 0"):
            assert CHECKS["finite"](given, expectation, seen) == {}
            assert CHECKS["gradients"](given, expectation, seen)["dk"] <= 1


class CountedWalk(PlanWalk):
    """Counts the tiles too that give a row of a query head something, and those that give a key something for it."""

    def __init__(self, case: Case) -> None:
        bucket, heads = case.tokens_per_call, (case.heads, case.kv_heads)
        super().__init__(PlanSetting(case.pattern, layout_of(case), *heads, case.exchange, bucket))
        self.of_rows, self.of_keys = (np.zeros((case.heads, case.tokens), np.int64) for _ in range(2))

    def _compute(self, rank: int, tile: Tile, *rest: Any) -> None:
        before = self.pairs.copy()
        super()._compute(rank, tile, *rest)
        seen = self.pairs > before
        self.of_rows += seen.any(2)
        self.of_keys += seen.any(1)


def most_merged(case: Case) -> tuple[int, int]:
    """The most partial results of a row, and partial gradients of a key from all of its query heads."""
    (walk := CountedWalk(case)).go()
    of_keys = walk.of_keys.reshape(case.kv_heads, -1, case.tokens).sum(1)
    return int(walk.of_rows.max(initial=0)), int(of_keys.max(initial=0))


ALONE = plain(4, tokens=128, order="striped", pattern=Pattern((Branch(16),), True))  # the last key travels by itself


@drawing(st.sampled_from((1, 2, 3, 4, 8)).flatmap(drawn_cases))
@example(plain(4, tokens=48, pattern=Pattern.dense(True, window=14)))
@example(ALONE)
@example(plain(3, tokens=55, order="striped", cuts=(0, 41, 45, 55), pattern=Pattern((Branch(27),), True)))
@example(plain(2, tokens=8, pattern=Pattern.spans([(0, 7)], window=0)))
@example(
    plain(2, tokens=64, order="permuted", heads=3, kv_heads=3, seed=38, pattern=Pattern((Branch(None, 5, (0, 1, 2)),)))
)
@example(plain(3, tokens=50, order="striped", pattern=Pattern.slices([((3, 50), (0, 41), (-20, -3))])))
@example(plain(4, tokens=40, order="zigzag", pattern=Pattern.tree([None, 0, 0, 1], [13, 9, 11, 7])))
@settings(max_examples=100, derandomize=True, deadline=None, database=None)
def test_counts_bound_the_merges(case: Case) -> None:
    sizes = [size for size in range(2, len(case.ranks)) if len(case.ranks) % size == 0]
    for exchange in (*KEY_EXCHANGES, *(f"ring:{size}+direct" for size in sizes)):
        for bucket in {case.bucket, None, 3}:
            other = replace(case, exchange=exchange, bucket=bucket)
            counts = sum_lengths(other, "math")
            of_rows, of_keys = most_merged(other)
            assert of_rows <= counts.merges and of_keys <= counts.row_merges, other.to_json()


def parts_of_a_row(branch: Branch, causal: bool) -> int:
    return mask_parts(Pattern((branch,), causal), 24).rows


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("branch", (Branch(window=4), Branch(9, window=3), Branch(None, 3, 1, window=7)))
def test_counts_of_what_a_window_leaves(branch: Branch, causal: bool) -> None:
    count = multiplicity(Pattern((branch,), causal), 4, 24)
    keys, rows = max_pairs(Pattern((branch,), causal), 24, heads=4, kv_heads=2)
    assert keys == count.sum(-1).max() and rows == count.reshape(2, -1, 24).sum(1).max()
    assert parts_of_a_row(Branch(8, window=7), True) == 1 and parts_of_a_row(Branch(8, window=6), True) == 3
    assert parts_of_a_row(Branch(None, 4, window=23), False) == 1  # it hides nothing
    assert parts_of_a_row(Branch(None, 4, window=19), False) == 5
    assert most_merged(ALONE)[0] == 6
