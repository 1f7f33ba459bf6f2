"""The second run of an example, the law of streams, and the meter and the limits of the workspace."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from reference.head_groups import KEPT
from reference.pattern import Branch, Pattern
from ring import Layout, ring_attention
from ring import strided_view as store
from ring.comm.transport import SoloTransport
from ring.plan.blocks import Heads
from tests.support.plain_case import plain
from verification.case import AGAIN
from verification.check import properties
from verification.check.attention_on_ranks import AttentionOnRanks
from verification.check.expectation import expect
from verification.check.laws.streams import STREAMS_DO_NOT_MATTER, check_streams
from verification.check.workspace_limits import WorkspaceLimits, limits
from verification.run import rank as execute
from verification.run.backends import GlooBackend, SimBackend
from verification.run.layouts import strided_copy
from verification.run.memory_meter import Meter, Workspace
from verification.run.rank import CallResult, RankCall, observe, repeats, run_attention, shards, whole_tensors
from verification.run.recording_transport import RecordingTransport
from verification.run.second_run import ALIGNMENT, another_default_device, in_one_storage
from verification.runner import PROFILES, RunPlan, laws_on

pytestmark = pytest.mark.ranks

case = partial(
    plain, tokens=9, order="zigzag", pattern=Pattern((Branch(), Branch(4, 2, 1)), causal=True), kv_heads=1,
    head_dim=3, bucket=3, kernel="auto", lse="differentiated", strided=True,
)  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_graphs_operators_are_called_for_half_of_the_seeds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    called, given, alone = Mock(side_effect=execute.traced), case(1, again="group", seed=seed), SoloTransport()
    monkeypatch.setattr(execute, "traced", called)
    call = run_attention(alone, given, shards(given, 0, whole_tensors(given, None)), "group")
    assert called.call_count == seed // 2 and all(x is not None for x in call.results[:5])


@pytest.mark.parametrize("exchange", KEPT)
@pytest.mark.parametrize("again", ["alike", "no_grad"])
def test_buffers_are_measured_where_something_is_kept(exchange: str, again: str) -> None:
    given, alone = case(1, exchange=exchange), SoloTransport()
    call = run_attention(alone, given, shards(given, 0, whole_tensors(given, None)), again)
    assert (call.buffer_forward is None) == (again == "no_grad")  # without gradients nothing is kept


@pytest.mark.parametrize("again", AGAIN)
@pytest.mark.parametrize("lse", ["unused", "returned", "differentiated", "alone"])
def test_second_runs_follow_the_case(again: str, lse: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_shared_storage_keeps_values_strides_and_alignment() -> None:
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


def test_default_device_is_restored() -> None:
    heads = Heads.of(((0,), (2,)))
    store._head_index(heads, torch.device("cpu"))
    with pytest.raises(ZeroDivisionError), another_default_device():
        assert torch.ones(1).is_meta and store._head_index.cache_info().currsize == 0
        store._head_index(heads, torch.device("cpu"))
        raise ZeroDivisionError
    assert not torch.ones(1).is_meta and store._head_index.cache_info().currsize == 0


WARNED = """
from ring.comm.transport import SoloTransport
from tests.support.plain_case import plain
from verification.check.laws.refusal_cases import Layout, call, ring_attention, torch
from verification.run.rank import observe
case = plain(1, tokens=4, heads=4, kv_heads=4, strided=True, dtype="bfloat16", again="autocast", seed=3)
observe(SoloTransport(), case), call(SoloTransport(), case, "another dtype than the others", 0)
ring_attention(*[torch.ones(1, 4, 4, 8).transpose(1, 2)] * 3, case.pattern, Layout.contiguous(4, 1))"""


def test_strides_of_heads_first_warn_users_alone() -> None:
    done = subprocess.run([sys.executable, "-c", WARNED], capture_output=True, text=True, check=True)
    assert done.stderr.count("strides of heads first") == 1 and "<string>:8: UserWarning" in done.stderr


def test_missing_second_results_are_not_compared() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    run = CallResult((x, None, x, x, x), ("a",), ("b",), ("c",), ("d",), 8, 9)
    less: dict[str, Any] = {"results": (x, None, None, None, None), "sent_backward": None, "buffer_backward": None}
    assert repeats(run, run) and repeats(run, replace(run, **less))
    for name, other in (
        ("results", (x, None, None, y, None)), ("results", (x, x, None, None, None)), ("sent_forward", ()),
        ("received_forward", ()), ("sent_backward", ()), ("received_backward", ()), ("buffer_backward", 10),
        ("buffer_forward", 0),
    ):  # fmt: skip
        changed: dict[str, Any] = {name: other}
        assert not repeats(run, replace(run, **changed))


def test_bits_are_compared_on_gpus_where_sums_have_a_fixed_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention-4 adds the gradients of three query heads of a key/value head in any order otherwise."""
    fixed: list[bool] = []

    def attend(q: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        fixed.append(torch.are_deterministic_algorithms_enabled())
        return q.clone()

    monkeypatch.setattr(execute, "ring_attention", attend)
    for drawn, expected in (("alike", True), ("no_grad", False)):
        on_gpu = plain(1, tokens=4, heads=4, kv_heads=4, again=drawn, device="cuda")
        x = torch.ones(1, 4, 4, 8)
        RankCall.forward(SoloTransport(), on_gpu, (x, x, x, x, x))
        assert fixed.pop() is expected and not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("kind", (SimBackend, GlooBackend))
def test_law_of_streams_is_drawn_on_gpus_alone(kind: type[SimBackend | GlooBackend]) -> None:
    with closing(kind(10.0)) as backend:
        backend.start(2)
        for lse in ("unused", "differentiated", "alone", "apart"):
            given = plain(2, lse=lse, strided=lse == "alone", pattern=Pattern.dense(causal=True))
            assert 0.0 < check_streams(AttentionOnRanks(backend), given, {}) < 1.0
    for name in ("nccl", "gloo", "sim"):
        laws = laws_on(RunPlan((2,), PROFILES["quick"], None, 1, name, Path()), 2)
        assert (STREAMS_DO_NOT_MATTER.name in {experiment.name for experiment, _ in laws}) == (name == "nccl")


measured = partial(
    plain, 2, tokens=100, cuts=(0, 60, 100), batch=2, heads=6, kv_heads=3, dtype="bfloat16", bucket=20, measured=True
)


def test_limits_on_paper() -> None:
    rows, scores, keys = 2 * 60 * 6 * 4 * 4, 2 * 20 * 6 * 8 * 4, 2 * 20 * 3 * 4 * 4
    assert rows > scores > keys
    assert limits(measured(), 0, 0, 0) == WorkspaceLimits(2 * 6 * 20, 2 * 3 * 20, rows, rows)
    assert limits(measured(bucket=3), 0, 0, 0) == WorkspaceLimits(2 * 6 * 16, 2 * 3 * 3, rows, rows)
    assert limits(measured(cuts=(0, 99, 100)), 1, 7, 9999) == WorkspaceLimits(2 * 6 * 20, 2 * 3 * 20, scores, 9999)
    assert limits(measured(cuts=(0, 100, 100), kv_heads=6, head_dim=9), 1, 0, 0).forward == 2 * 20 * 6 * 9 * 4
    assert limits(measured(cuts=(0, 99, 100), bucket=200, dtype="float64"), 1, 0, 0).forward == 2 * 100 * 6 * 8 * 8


def test_meter_counts_products_and_allocations() -> None:
    q, k, before = torch.randn(2, 3, 10, 4), torch.randn(2, 3, 7, 4), torch.randn(1000)
    with Meter(4) as meter:
        q @ k.mT
        assert meter.take() == Workspace(2 * 3 * 10 * 7 * 4, frozenset({(6 * 7, 6 * 10)}))
        before[1:].view(3, 333).mul_(2)  # a view, and in place: nothing is made
        torch.arange(5000)
        assert meter.take() == Workspace(0, frozenset())
        mask = before > 0
        assert meter.take().largest == 1000 == mask.numel()
        q[0, 0] @ k[0, 0].T
        torch.baddbmm(torch.zeros(3, 10, 7), q[0], k[0].mT)
        torch.randn(5, 6) @ torch.randn(6, 7)  # no product of vectors of the head dim
        assert meter.take().products == {(7, 10), (21, 30)}
        torch.nn.functional.scaled_dot_product_attention(q, k, k)
        assert (6 * 7, 6 * 10) in meter.take().products


@pytest.mark.parametrize("bucket", (4, 10))
def test_meter_looks_into_the_operator(bucket: int) -> None:
    q, k = torch.randn(1, 10, 3, 4), torch.randn(1, 10, 1, 4)
    with Meter(4) as meter:
        ring_attention(q, k, k, Pattern.dense(), Layout.contiguous(10, 1), bucket=bucket, kernel="math")
    seen = meter.take()
    assert seen.products and all(few <= 3 * 10 and many <= 3 * 16 for few, many in seen.products)
    assert max(few for few, _ in seen.products) == bucket
    assert 4 * 3 * 10 * 4 <= seen.largest <= 4 * 3 * 10 * max(4, bucket) and meter.peak > meter.held
