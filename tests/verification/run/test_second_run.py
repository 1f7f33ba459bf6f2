"""The second run of an example: called in every way that must not change a bit, and refused where it does."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from reference.pattern import Branch, Pattern
from ring import strided_view as store
from ring.comm.transport import RecordingTransport, SoloTransport
from ring.plan.blocks import Heads
from tests.support.plain_case import plain
from verification.case import AGAIN
from verification.check import properties
from verification.check.expectation import expect
from verification.run import rank as execute
from verification.run.backends import GlooBackend, observe_on
from verification.run.layouts import strided_copy
from verification.run.rank import Pass, attend, observe, repeats, shards
from verification.run.second_run import ALIGNMENT, another_default_device, in_one_storage

pytestmark = pytest.mark.ranks

case = partial(
    plain, tokens=9, order="zigzag", pattern=Pattern((Branch(), Branch(4, 2, 1)), causal=True), kv_heads=1,
    head_dim=3, bucket=3, kernel="auto", lse="differentiated", strided=True,
)  # fmt: skip


@pytest.mark.parametrize("again", AGAIN)
@pytest.mark.parametrize("lse", ["unused", "returned", "differentiated", "alone"])
def test_the_first_run_is_ordinary_and_the_second_is_what_the_case_says(
    again: str, lse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []  # what ring_attention is called with
    real = execute.ring_attention

    def spy(q: Any, k: Any, v: Any, *args: Any, **options: Any) -> Any:
        wanted = "".join(name for name, x in zip("qkv", (q, k, v), strict=True) if x.requires_grad)
        together = k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        device, grad = torch.empty(0).device.type, torch.is_grad_enabled()
        seen.append({**options, "wanted": wanted, "grad": grad, "device": device, "together": together})
        return real(q, k, v, *args, **options)

    monkeypatch.setattr(execute, "ring_attention", spy)
    given = case(1, again=again, lse=lse)
    properties.check(given, expect(given), [observe(SoloTransport(), given)])
    # On other numbers "between" has two more calls, both around the second run's backward, others one.
    assert len(seen) == 2 + {"between": 2, "pipelined": 1, "no_grad": 1}.get(again, 0)
    first, second, *others = seen
    assert all(call["wanted"] == "qkv" and call["check"] and call["grad"] is (again != "no_grad") for call in others)
    assert [call["device"] for call in seen] == ["cpu", "meta" if again == "meta" else "cpu", *["cpu"] * len(others)]
    assert [call["together"] for call in seen] == [False, again == "shared", *[False] * len(others)]
    assert (first["wanted"], first["grad"], first["check"]) == ("qkv", True, True)
    assert isinstance(first["group"], RecordingTransport)
    assert second["check"] is (again != "unchecked") and second["grad"] is (again != "no_grad")
    assert second["wanted"] == (again if set(again) <= set("qkv") else "qkv")
    assert (second["group"] is None) is (again == "group")


def test_only_lse_is_differentiated() -> None:
    given = case(1, lse="alone")
    _, _, _, dout, dlse = given.tensors()
    assert not dout.any() and dlse.abs().min() > 0
    results = attend(SoloTransport(), given, shards(given, 0, given.tensors())).results
    assert results[2] is not None and results[2].any()
    assert results[4] is not None and not results[4].any(), "dv goes by dout alone"


@pytest.mark.parametrize(
    "again", ["group", "unchecked", "no_grad", "kv", "backward", "between", "pipelined", "shared", "meta"]
)
def test_on_real_ranks(again: str) -> None:
    with closing(GlooBackend()) as backend:
        backend.start(3)
        for group in (None, (0, 2)):
            given = case(3, group=group, again=again, exchange="direct")
            properties.check(given, expect(given), observe_on(backend, given))


def test_in_one_storage_numbers_strides_and_alignment_are_as_they_were() -> None:
    whole, empty = torch.arange(12.0).view(1, 3, 4, 1), torch.empty(1, 0, 4, 1)
    given = [whole, strided_copy(whole + 12), empty, torch.ones(1, 32, 2, 1), whole[:, 1:] + 0.5]
    given.append(torch.arange(12.0).view(1, 3, 4, 1).expand(1, 3, 4, 5))
    found = in_one_storage(given)
    assert len({x.untyped_storage().data_ptr() for x in found}) == 1
    for x, y in zip(given, found, strict=True):
        assert torch.equal(x, y) and x.stride() == y.stride() and not y.requires_grad
        assert (y.storage_offset() - x.storage_offset()) * 4 % ALIGNMENT == 0
    (size,) = {x.untyped_storage().nbytes() for x in found}
    assert size == sum(-(-x.untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT for x in given)
    for i, x in enumerate(found):  # nobody writes over another's numbers
        x.fill_(float(i))
    assert all(bool((x == i).all()) for i, x in enumerate(found))


def test_the_default_device_is_another_only_inside_and_nothing_is_kept() -> None:
    heads = Heads.of(((0,), (2,)))
    store._head_index(heads, torch.device("cpu"))
    with pytest.raises(ZeroDivisionError), another_default_device():
        assert torch.ones(1).is_meta and store._head_index.cache_info().currsize == 0
        store._head_index(heads, torch.device("cpu"))
        raise ZeroDivisionError
    assert not torch.ones(1).is_meta and store._head_index.cache_info().currsize == 0


def test_what_the_second_run_did_not_give_is_not_compared() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    run = Pass((x, None, x, x, x), ("a",), ("b",), ("c",), ("d",), 8, 9)
    less: dict[str, Any] = {"results": (x, None, None, None, None), "sent_backward": None, "buffer_backward": None}
    assert repeats(run, run) and repeats(run, replace(run, **less))
    for name, other in (
        ("results", (x, None, None, y, None)), ("results", (x, x, None, None, None)), ("sent_forward", ()),
        ("received_forward", ()), ("sent_backward", ()), ("received_backward", ()), ("buffer_backward", 10),
        ("buffer_forward", 0),
    ):  # fmt: skip
        changed: dict[str, Any] = {name: other}
        assert not repeats(run, replace(run, **changed))
