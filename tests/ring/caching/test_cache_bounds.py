"""Every cache of the ring is bounded by number and by bytes, says what its entries weigh, and is all that is kept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from reference.documents import Documents
from reference.pattern import Branch, Pattern
from ring import Layout, ring_attention
from ring.caching.bounded_cache import BoundedCache
from ring.comm.call_order import MAX_CALLS, Calls
from ring.comm.transport import SoloTransport
from ring.consensus import CallSetting
from ring.torch_compile import traced
from verification.run.caches import bounded_caches, clear_caches, lru_caches

RING = ("ring",)
MAX_SETTINGS, MAX_ENTRIES, MAX_BYTES = 512, 8192, 2**30  # of any `BoundedCache`, of any functools cache, in bytes
BOUNDED = [one for one in bounded_caches(RING) if not one[0].startswith("ring.compute.gpu.")]  # entries of one size
DENSE = Branch()
LONG, DOCUMENTS = 600, (3, 1) * 100 + (200,)


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    clear_caches(RING)
    yield
    clear_caches(RING)


def test_caches_are_bounded_by_number_and_by_bytes() -> None:
    assert "ring.plan.plan" in dict(BOUNDED)
    for name, cache in BOUNDED:
        for number in range(MAX_SETTINGS + 1):
            cache.put(number, number)
        assert len(cache) <= MAX_SETTINGS, name
        cache.clear()
        for number in range(2):
            cache.put(number, number, MAX_BYTES)
        assert len(cache) == 1, name
    sizes = {name: cache.cache_parameters()["maxsize"] for name, cache in lru_caches(RING)}
    assert "ring.layout.numbered_layout" in sizes
    assert {name: most for name, most in sizes.items() if most is None or most > MAX_ENTRIES} == {}


def test_the_last_calls_of_a_group_are_known() -> None:
    calls = Calls()
    made = [weakref.ref(calls.get(number, None)) for number in range(1, MAX_CALLS + 20)]
    assert [number for number, ref in enumerate(made, 1) if ref() is not None] == list(range(20, MAX_CALLS + 20))


@pytest.mark.parametrize("exchange", ["ring", "direct", "gather", "all-to-all"])
def test_no_cache_keeps_a_listed_layout(exchange: str) -> None:
    layout = Layout.from_cuts(torch.randperm(64, generator=torch.Generator().manual_seed(1)), (0, 64))
    q = torch.zeros(1, 64, 1, 4)
    ring_attention(q, q, q, Pattern.dense(), layout, exchange=exchange)
    kept = weakref.ref(layout)
    del layout
    gc.collect()
    assert kept() is None


def weight(of: object) -> int:
    """Bytes of arrays and tensors in an entry of a cache; of a setting, those of its list of documents."""
    seen, total, rest = set[int](), 0, [of]
    while rest:
        one = rest.pop()
        if id(one) in seen or isinstance(one, Layout):  # its user has it, too
            continue
        seen.add(id(one))
        if isinstance(one, (np.ndarray, torch.Tensor)):
            total += one.nbytes
        elif isinstance(one, Documents):
            total += 8 * len(one) if isinstance(of, CallSetting) else 0  # a plan shares them with its key
        elif isinstance(one, (tuple, list)):
            rest += one
        elif isinstance(one, dict):
            rest += [*one, *one.values()]
        elif hasattr(one, "__dict__") and type(one).__module__.startswith("ring."):
            rest += vars(one).values()
    return total


CALLS: dict[str, dict[str, Any]] = {
    "alone": {},
    "in a graph": {"call": traced},
    "refused": {"bucket": 0},
    "of branches, listed": {"order": np.random.default_rng(0).permutation(30), "branch": Branch(7, 3, 1)},
    "packed, listed": {"order": np.random.default_rng(0).permutation(LONG), "documents": DOCUMENTS, "backward": True},
}


def _call(
    order: Any = range(30), documents: tuple[int, ...] | None = None, branch: Branch = DENSE, bucket: int = 64,
    call: Callable[..., Any] = ring_attention, backward: bool = False,
) -> Callable[[], list[object]]:  # fmt: skip
    """Return a function that lists what of what the call was given and gave is in memory."""
    n = len(order)
    pattern, layout, group = Pattern((branch,), True, documents), Layout.from_cuts(order, (0, n)), SoloTransport()
    tensors = [torch.ones(1, n, 1, 2, requires_grad=backward) for _ in range(3)]
    settings: dict[str, Any] = {"kernel": "math", "exchange": "ring", "scale": 0.5, "check": True, "name": f"call {n}"}
    try:
        out = call(*tensors, pattern, layout, group=group, bucket=bucket, return_lse=False, **settings)
        tensors.append(out)
        if backward:
            out.sum().backward()
    except ValueError:
        assert not bucket
    refs: list[Callable[[], object]] = [weakref.ref(pattern), weakref.ref(layout), weakref.ref(group)]
    storages = [StorageWeakRef(x.untyped_storage()) for x in tensors]
    return lambda: [*filter(None, (ref() for ref in refs)), *(one for one in storages if not one.expired())]


@pytest.mark.parametrize("kind", CALLS)
def test_entries_state_all_bytes_they_hold(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    light, put = [], BoundedCache.put

    def weighed(self: BoundedCache[Any, Any], key: Any, value: Any, nbytes: int = 0) -> Any:
        if weight(value) > max(1024, 2 * nbytes):
            light.append(f"a {type(value).__name__} of {weight(value)} bytes is kept as one of {nbytes}")
        return put(self, key, value, nbytes)

    monkeypatch.setattr(BoundedCache, "put", weighed)
    held = _call(**CALLS[kind])
    assert light == []
    clear_caches(RING)
    gc.collect()
    assert held() == []
