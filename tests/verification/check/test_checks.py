"""Every check passes what is right, and refuses each wrong observation by its own kind of failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from reference import Branch, Pattern
from reference.exact import QUANTITIES, Expectation
from reference.shards import default_bucket
from verification.case import Case
from verification.check.checks import CHECKS, assemble, check_all, costs
from verification.check.expectation import expect
from verification.failures import MismatchedMessages, WrongResult
from verification.run import observation
from verification.run.layouts import layout_of
from verification.run.observation import LONGER, Division, Observation, carry
from verification.run.workspace import Workspace, limits

# Head 0 sees even positions of segments of 6, head 1 odd ones; heads 2 and 3 see nothing.
PATTERN = Pattern((Branch(6, 2, (0, 1), range(0, 2)),), causal=True)


def case(**changes: object) -> Case:
    given: dict[str, object] = {
        "world": 5, "group": (1, 2, 4), "tokens": 12, "order": "zigzag", "cuts": None, "pattern": PATTERN,
        "batch": 2, "heads": 4, "kv_heads": 4, "head_dim": 3, "dtype": "float32", "scale": None, "score_scale": 1.0,
        "values": "normal", "seed": 1, "exchange": "direct", "bucket": None, "kernel": "math", "lse": "returned",
        "strided": False,
    }  # fmt: skip
    return Case(**given | changes)  # type: ignore[arg-type]


def honest(given: Case, expectation: Expectation) -> list[Observation]:
    """What ranks see that compute exactly, round once, and send one message to each peer that is owed something."""
    layout, defined, due = layout_of(given), given.shards(), costs(given)

    def shard(name: str, rank: int) -> Any:
        exact = torch.from_numpy(np.ascontiguousarray(expectation.exact[name]))
        result = layout.shard(exact, rank, dim=2 if name == "lse" else 1)
        return carry(result.to(given.accumulator_dtype if name == "lse" else given.torch_dtype))

    accumulator = str(given.accumulator_dtype).removeprefix("torch.")
    found = []
    bucket = default_bucket(LONGER, given.heads, given.kv_heads, given.torch_dtype.itemsize)
    for i in range(layout.world_size):
        arrays = {name: shard(name, i) for name in QUANTITIES}
        if given.lse == "unused":
            arrays["lse"] = None
        logs: dict[str, Any] = {}
        for phase in ("forward", "backward"):
            sent = getattr(due, f"sent_{phase}")
            logs[f"sent_{phase}"] = tuple((j, int(x), f"{i}->{j}") for j, x in enumerate(sent[i]) if x)
            logs[f"received_{phase}"] = tuple((j, int(x), f"{j}->{i}") for j, x in enumerate(sent[:, i]) if x)
            logs[f"buffer_{phase}"] = int(getattr(due, f"buffer_{phase}")[i])
        dtypes = (given.dtype, accumulator, given.dtype, given.dtype, given.dtype)
        said = Division(defined.positions[i], defined.counts, defined.positions[i], defined.place, bucket)
        found.append(
            Observation(
                said, **arrays, dtypes=dtypes, **logs, inputs_unchanged=True, repeat_equal=True, **spaces(given, i)
            )
        )
    return found


def spaces(given: Case, index: int) -> dict[str, Any]:
    """The most that a rank may take, where that is measured."""
    if not given.measured:
        return {"workspace_forward": None, "workspace_backward": None}
    due = costs(given)
    most = limits(given, index, int(due.buffer_forward[index]), int(due.buffer_backward[index]))
    product = tuple(sorted((most.query_vectors, most.key_vectors)))
    return {
        f"workspace_{phase}": Workspace(getattr(most, phase), frozenset({product}))  # type: ignore[arg-type]
        for phase in ("forward", "backward")
    }


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("lse", ["unused", "returned", "differentiated"])
@pytest.mark.parametrize("exchange", ["ring", "direct", "gather"])
def test_what_is_right_passes(dtype: str, lse: str, exchange: str) -> None:
    given = case(dtype=dtype, lse=lse, exchange=exchange, order="shuffled", cuts=(0, 7, 7, 12), bucket=2)
    found = check_all(given, expect(given), honest(given, expect(given)))
    assert list(found) == list(CHECKS)
    ratios = found["values"] | found["gradients"]
    assert set(ratios) == set(QUANTITIES) - ({"lse"} if lse == "unused" else set())
    assert all(0 <= ratio <= 1 for ratio in ratios.values())
    if dtype in ("bfloat16", "float16"):
        assert found["values"]["out"] > 0.3  # one rounding, and the bound is little more


def altered(x: Any, where: tuple[int, ...], value: float) -> Any:
    x = x.copy()
    x[where] = value
    return x


def refused(
    check: str, change: Callable[[list[Observation]], Any], kind: type[AssertionError], says: str, **changes: object
) -> None:
    """The changed observations fail in that check and so in all of them together; as they were they pass it."""
    given = case(**changes)
    expectation = expect(given)
    right = honest(given, expectation)
    CHECKS[check](given, expectation, right)
    wrong = change(list(right))
    with pytest.raises(kind, match=says) as caught:
        CHECKS[check](given, expectation, wrong)
    assert type(caught.value) is kind
    with pytest.raises(kind):
        check_all(given, expectation, wrong)


def on(rank: int, **changes: Any) -> Callable[[list[Observation]], list[Observation]]:
    """Changes to what one rank saw; a function is applied to what it saw."""

    def change(seen: list[Observation]) -> list[Observation]:
        made = {name: x(getattr(seen[rank], name)) if callable(x) else x for name, x in changes.items()}
        return [*seen[:rank], replace(seen[rank], **made), *seen[rank + 1 :]]

    return change


# --- layout


def told(**changes: Any) -> Callable[[Division], Division]:
    """Changes to what a layout says; a function is applied to what it said."""
    return lambda said: replace(
        said, **{name: x(getattr(said, name)) if callable(x) else x for name, x in changes.items()}
    )


def test_a_layout_that_is_not_as_defined() -> None:
    mine = r"rank 2 \(index 1 of the group\)"
    for changes, says in (
        ({"positions": lambda x: x[::-1]}, rf"{mine} holds positions \[9, 8, 3, 2\]; .* differs: 9, not 2$"),
        ({"positions": lambda x: x[:-1]}, rf"{mine} holds positions \[2, 3, 8\]; .*; 3 of them where there are 4$"),
        ({"sharded": lambda x: x[::-1]}, rf"{mine} is given by `shard` positions \[9, 8, 3, 2\]; the zigzag order"),
        ({"counts": (4, 5, 3)}, rf"{mine} has counts \(4, 5, 3\); the zigzag order makes them \(4, 4, 4\)"),
        ({"place": lambda x: x[::-1]}, rf"on {mine}, `unshard` takes .*; the zigzag order has them at \[ ?0, "),
    ):
        refused("layout", on(1, layout=told(**changes)), WrongResult, f"layout: {says}")
    swapped = on(0, layout=told(positions=lambda x: x[np.r_[:30, 31, 30, 32:64]]))
    says = r"layout: rank 0 holds positions .* \.\.\., .*; entry 30 is the first that differs: 31, not 30$"
    refused("layout", swapped, WrongResult, says, tokens=128, group=None, world=2, order="contiguous")
    cut = on(1, layout=told(counts=(4, 5, 3)))
    refused("layout", cut, WrongResult, r"the zigzag order, cut at \(0, 3, 3, 12\), makes them", cuts=(0, 3, 3, 12))


# --- values: index 1 of zigzag(12, 3) holds tokens 2, 3, 8, 9


def judge_of(name: str) -> str:
    return "gradients" if name.startswith("d") else "values"


@pytest.mark.parametrize("name", QUANTITIES)
def test_an_entry_beyond_its_bound(name: str) -> None:
    given = case()
    bound = expect(given).bound[name]
    where = (1, 0, 2) if name == "lse" else (1, 2, 0, 1)  # token 8
    size = bound[1, 0, 8] if name == "lse" else bound[1, 8, 0, 1]
    place = "at batch 1, token 8, head 0" + ("" if name == "lse" else ", dim 1")
    assert size > 0

    def shift(times: float) -> Callable[[Any], Any]:
        return lambda x: altered(x, where, x[where] + times * size)

    says = f"values: {name} is .* {place} \\(held by rank 2 \\(index 1 of the group\\)\\), expected .*times its bound"
    refused(judge_of(name), on(1, **{name: shift(3.0)}), WrongResult, says)
    expectation = expect(given)
    near = on(1, **{name: shift(0.5)})(honest(given, expectation))
    assert 0.2 < CHECKS[judge_of(name)](given, expectation, near)[name] < 0.9


def test_shards_in_the_wrong_place() -> None:
    def swap(seen: list[Observation]) -> list[Observation]:
        return [replace(seen[0], out=seen[1].out), replace(seen[1], out=seen[0].out), seen[2]]

    refused("values", swap, WrongResult, "values: out", pattern=Pattern.dense())


def test_the_message_counts_and_picks_the_worst() -> None:
    def change(x: Any) -> Any:
        return altered(altered(x, (0, 0, 0, 0), 50.0), (0, 0, 0, 1), 5000.0)

    refused("gradients", on(2, dv=change), WrongResult, "5000.0 at batch 0.*dim 1.*; 2 of 288", pattern=Pattern.dense())


# --- what nothing selects: heads 2 and 3


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_a_row_or_key_without_partner_must_be_exactly_zero(name: str) -> None:
    tiny = 2.0**-40
    says = f"unseen: {name} is {tiny} at batch 0, token 2, head 3, dim 0"
    refused("unseen", on(1, **{name: lambda x: altered(x, (0, 0, 3, 0), tiny)}), WrongResult, says)
    nan = on(1, **{name: lambda x: altered(x, (0, 0, 3, 0), np.nan)})
    refused("unseen", nan, WrongResult, f"unseen: {name} is nan")


@pytest.mark.parametrize("value", [0.0, -1e10, np.inf, np.nan])
def test_a_row_without_partner_must_have_lse_minus_infinity(value: float) -> None:
    refused("unseen", on(1, lse=lambda x: altered(x, (0, 3, 0), value)), WrongResult, "unseen: lse .* head 3 .*-inf")


def test_zero_may_be_negative() -> None:
    given = case()
    seen = on(1, out=lambda x: altered(x, (0, 0, 3, 0), -0.0))(honest(given, expect(given)))
    check_all(given, expect(given), seen)


# --- finite


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", QUANTITIES)
def test_nothing_else_is_infinite_or_nan(name: str, value: float) -> None:
    where = (0, 0, 2) if name == "lse" else (0, 2, 0, 0)
    wrong = on(1, **{name: lambda x: altered(x, where, value)})
    refused("finite", wrong, WrongResult, f"finite: {name} is .* token 8, head 0")
    refused(judge_of(name), wrong, WrongResult, f"values: {name} is .* token 8, head 0")


def test_an_infinity_has_the_sign_of_what_the_bound_allows() -> None:
    given = case(dtype="float16", pattern=Pattern.dense())
    expectation = expect(given)
    where = (0, 2, 1, 0)
    for exact, bound, allowed in (
        (-6e4, 1e4, (-np.inf,)),
        (6e4, 1e4, (np.inf,)),
        (-6e4, 2e5, (-np.inf, np.inf)),
        (0.0, 7e4, (-np.inf, np.inf)),
        (6e4, 5e3, ()),
    ):
        expectation.exact["dk"][where], expectation.bound["dk"][where] = exact, bound
        seen = honest(given, expectation)
        for value in (-np.inf, np.inf):
            spoilt = on(1, dk=lambda x, value=value: altered(x, (0, 0, 1, 0), value))(seen)
            if value in allowed:
                assert CHECKS["finite"](given, expectation, spoilt) == {}
                assert CHECKS["gradients"](given, expectation, spoilt)["dk"] <= 1
            else:
                with pytest.raises(WrongResult, match="finite: dk is .*dim 0"):
                    CHECKS["finite"](given, expectation, spoilt)


def test_overflow_of_the_type_is_right_where_the_result_passes_it() -> None:
    given = case(dtype="float16", pattern=Pattern.dense())
    expectation = expect(given)
    expectation.exact["dk"][0, 2, 1, 0] = -7e4
    seen = honest(given, expectation)
    assert seen[1].dk[0, 0, 1, 0] == -np.inf
    assert CHECKS["finite"](given, expectation, seen) == {}
    assert np.isfinite(CHECKS["values"](given, expectation, seen)["dk"])
    expectation.exact["dk"][0, 2, 1, 1] = -7e4  # here a finite number is wrong, though an infinity would be right
    with pytest.raises(WrongResult, match="values: dk .*dim 1"):
        CHECKS["values"](given, expectation, seen)
    expectation.exact["dk"][0, 2, 1, 1] = seen[1].dk[0, 0, 1, 1]
    for value in (np.inf, np.nan):
        wrong = on(1, dk=lambda x, value=value: altered(x, (0, 0, 1, 0), value))(seen)
        for check in ("finite", "values"):
            with pytest.raises(WrongResult, match=f"{check}: dk"):
                CHECKS[check](given, expectation, wrong)


# --- answers


def test_answers_of_another_shape_or_type() -> None:
    refused(
        "answers", on(2, dk=lambda x: x[:, :-1]), WrongResult, "dk of rank 4 .*has shape .*3, 4, 3.*, not .*4, 4, 3"
    )
    refused("answers", on(0, lse=lambda x: x.transpose(0, 2, 1)), WrongResult, "lse of rank 1 .*shape", tokens=15)
    refused("answers", on(0, lse=None), WrongResult, "lse of rank 1 .*shape None")
    dtypes = ("float32", "float32", "float32", "bfloat16", "float32")
    refused("answers", on(0, dtypes=dtypes), WrongResult, "dk of rank 1 .*is bfloat16, not float32")
    refused("answers", on(0, dtypes=("bfloat16",) * 5), WrongResult, "lse of .* not float32", dtype="bfloat16")
    refused("answers", lambda seen: seen[:2], WrongResult, "2 ranks answered, the group has 3")
    refused("answers", on(1, lse=np.zeros((2, 4, 4))), WrongResult, "not asked for", lse="unused")


# --- flags


def test_changed_inputs_and_unequal_repeats() -> None:
    refused("inputs", on(2, inputs_unchanged=False), WrongResult, "inputs: changed on rank 4")
    refused(
        "repeat",
        on(1, repeat_equal=False),
        WrongResult,
        "repeat: a second run .no_grad. differs on rank 2",
        again="no_grad",
    )


# --- communication


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_messages_that_do_not_agree(phase: str) -> None:
    sent, received = f"sent_{phase}", f"received_{phase}"

    def edit(change: Callable[[int, int, str], tuple[int, int, str]]) -> Callable[[Any], Any]:
        return lambda log: (change(*log[0]), *log[1:])

    says = f"messages: {phase}, number 0 from rank 1 .* to rank .*"
    for name, change, words in (
        (sent, edit(lambda peer, size, label: (peer, size + 4, label)), "sent .* received"),
        (sent, edit(lambda peer, size, label: (peer, size, "other")), "sent 'other'"),
        (sent, lambda log: log[1:], "sent nothing, received"),
    ):
        refused("messages", on(0, **{name: change}), MismatchedMessages, says + words, pattern=Pattern.dense())
    missing = on(1, **{received: lambda log: log[1:]})
    refused("messages", missing, MismatchedMessages, "received nothing", pattern=Pattern.dense())
    for peer in (1, 3, -1):
        wrong = on(1, **{sent: lambda log, peer=peer: ((peer, 4, "x"), *log)})
        refused("messages", wrong, MismatchedMessages, f"rank 2 .* names peer {peer}", pattern=Pattern.dense())


def test_messages_out_of_order() -> None:
    def split(seen: list[Observation]) -> list[Observation]:
        (peer, size, label), *rest = seen[0].sent_forward
        sent = ((peer, size - 4, label), (peer, 4, "tail"), *rest)
        back = [x for x in seen[peer].received_forward if x[0] != 0]
        seen[0] = replace(seen[0], sent_forward=sent)
        seen[peer] = replace(seen[peer], received_forward=(*back, (0, size - 4, label), (0, 4, "tail")))
        return seen

    def swapped(seen: list[Observation]) -> list[Observation]:
        seen = split(seen)
        first, second, *rest = seen[0].sent_forward
        return [replace(seen[0], sent_forward=(second, first, *rest)), *seen[1:]]

    given = case(pattern=Pattern.dense())
    check_all(given, expect(given), split(honest(given, expect(given))))
    refused("messages", swapped, MismatchedMessages, "number 0 .*'tail'", pattern=Pattern.dense())


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("exchange", ["ring", "direct", "gather"])
def test_bytes_and_buffers_that_cost_more_or_less(phase: str, exchange: str) -> None:
    def more(seen: list[Observation]) -> list[Observation]:
        """One message more, on both sides, so that only the sum is wrong."""
        sent, received = f"sent_{phase}", f"received_{phase}"
        seen = on(0, **{sent: lambda log: (*log, (2, 8, "more"))})(seen)
        return on(2, **{received: lambda log: (*log, (0, 8, "more"))})(seen)

    refused("traffic", more, WrongResult, f"traffic: {phase}, rank 1 .*to rank 4", exchange=exchange)
    for change in (-4, 4):
        wrong = on(1, **{f"buffer_{phase}": lambda held, change=change: held + change})
        refused("buffers", wrong, WrongResult, f"buffers: {phase}, rank 2", exchange=exchange)


def test_a_default_bucket_beyond_the_budget() -> None:
    def greedy(seen: list[Observation]) -> list[Observation]:
        return [replace(x, layout=replace(x.layout, bucket=x.layout.bucket + 1)) for x in seen]

    refused("buffers", greedy, WrongResult, "buffers: the default bucket on rank .* the memory budget makes it")


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("bucket", [2, 40])
def test_a_workspace_beyond_its_limits(phase: str, bucket: int) -> None:
    field = f"workspace_{phase}"
    changes: dict[str, Any] = {"measured": True, "bucket": bucket, "pattern": Pattern.dense()}

    def products(*pairs: tuple[int, int]) -> Callable[[list[Observation]], list[Observation]]:
        return on(1, **{field: lambda found: Workspace(found.largest, frozenset(pairs))})

    rows, keys = 2 * 4 * max(bucket, 16), 2 * 4 * bucket
    where = f"workspace: {phase}, rank 2 .index 1 of the group. "
    larger = on(1, **{field: lambda found: Workspace(found.largest + 1, found.products)})
    refused("workspace", larger, WrongResult, f"{where}made a tensor of", **changes)
    for pair in ((keys + 1, keys + 1), (1, max(rows, keys) + 1)):
        refused("workspace", products((1, 1), pair), WrongResult, f"{where}multiplied {pair[0]} vectors", **changes)
    refused("workspace", products(), WrongResult, f"{where}has rows that see keys", **changes)


def test_carried_arrays_keep_every_bit() -> None:
    x = torch.randn(100).to(torch.bfloat16)
    assert torch.equal(torch.from_numpy(np.asarray(carry(x))).to(torch.bfloat16), x)
    assert carry(torch.randn(3, dtype=torch.float64)).dtype == np.float64
    assert observation.dtype_name(x) == "bfloat16"


def test_a_shard_of_another_shape_is_wrong_wherever_it_is_put_together() -> None:
    """Laws compare results that no other check has seen."""
    given = case()
    seen = honest(given, expect(given))
    assert assemble(given, seen, "lse").shape == (2, 4, 12)
    assert seen[1].lse is not None
    seen[1] = replace(seen[1], lse=seen[1].lse[:, :, :3])
    with pytest.raises(WrongResult, match=r"lse of .* has shape \(2, 4, 3\)"):
        assemble(given, seen, "lse")
