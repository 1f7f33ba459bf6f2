"""Every cache of the ring is bounded by number and by bytes, says what its entries weigh, and is all that is kept.

A server meets other lengths with every request, and a training with packed documents has other plans in every step:
what is kept of each and never forgotten fills the memory within days, which no single call shows.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from reference.documents import Documents
from reference.pattern import Branch, Pattern
from ring import Layout, ring_attention
from ring.agreement import CallSetting
from ring.caching.bounded import Bounded
from ring.comm.calls import KEPT, Calls
from ring.comm.transport import SoloTransport
from ring.compiled import traced
from ring.plan import plan
from ring.plan.plan import plan_of
from verification.run.caches import bounded_of, clear_caches, recent_of

RING = ("ring",)
MOST_SETTINGS, MOST_ENTRIES, MOST_BYTES = 512, 8192, 2**30  # of any `Bounded`, of any functools cache, in bytes
BOUNDED = [one for one in bounded_of(RING) if not one[0].startswith("ring.compute.gpu.")]  # entries of one size
DENSE = Branch()
LONG, DOCUMENTS = 600, (3, 1) * 100 + (200,)


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    clear_caches(RING)
    yield
    clear_caches(RING)


def test_caches_are_found_by_name() -> None:
    assert "ring.plan.plan" in {name for name, _ in BOUNDED}
    assert "ring.layout.numbered_layout" in {name for name, _ in recent_of(RING)}


@pytest.mark.parametrize(("name", "cache"), BOUNDED, ids=[name for name, _ in BOUNDED])
def test_a_cache_is_bounded_by_number_and_by_bytes(name: str, cache: Bounded[Any, Any]) -> None:
    for number in range(MOST_SETTINGS + 1):
        cache.keep(number, number)
    assert len(cache) <= MOST_SETTINGS
    cache.clear()
    for number in range(2):
        cache.keep(number, number, MOST_BYTES)
    assert len(cache) == 1


def test_functools_caches_are_bounded() -> None:
    sizes = {name: cache.cache_parameters()["maxsize"] for name, cache in recent_of(RING)}
    assert {name: most for name, most in sizes.items() if most is None or most > MOST_ENTRIES} == {}


def test_the_last_calls_of_a_group_are_known() -> None:
    calls = Calls()
    made = [weakref.ref(calls.again(number, None)) for number in range(1, KEPT + 20)]
    assert [number for number, ref in enumerate(made, 1) if ref() is not None] == list(range(20, KEPT + 20))


def test_plans_of_ever_other_documents_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.striped(600, 2)
    lengths = [(1, 2, 3, 4, 590 - i, i) for i in range(40)]
    one = plan_of(Pattern.dense(True, lengths[0]), layout, 0, 1, 1, "direct", 64)
    assert one.nbytes > 1000
    kept: Bounded[object, plan.Plan] = Bounded(128, most_bytes=5 * one.nbytes)
    monkeypatch.setattr(plan, "_plans", kept)
    sizes = []
    for documents in lengths:
        found = plan_of(Pattern.dense(True, documents), layout, 0, 1, 1, "direct", 64)
        assert plan_of(Pattern.dense(True, documents), layout, 0, 1, 1, "direct", 64) is found
        sizes.append(len(kept))
        assert sum(x.nbytes for x in kept.values()) <= 5 * one.nbytes
    assert max(sizes) < 10 and all(b <= a + 1 for a, b in pairwise(sizes))


# --- of calls ---------------------------------------------------------------------------------------------------------


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
    "backward, too": {"backward": True},
    "refused": {"bucket": 0},
    "of branches, listed": {"order": np.random.default_rng(0).permutation(30), "branch": Branch(7, 3, 1)},
    "packed, listed": {"order": np.random.default_rng(0).permutation(LONG), "documents": DOCUMENTS, "backward": True},
}


def _call(
    order: Any = range(30), documents: tuple[int, ...] | None = None, branch: Branch = DENSE, bucket: int = 64,
    call: Callable[..., Any] = ring_attention, backward: bool = False,
) -> list[tuple[str, Callable[[], bool]]]:  # fmt: skip
    """What the call was given and gave, each with a function that says whether it is in memory."""
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
    storages = [StorageWeakRef(x.untyped_storage()) for x in tensors]
    refs = {"pattern": weakref.ref(pattern), "layout": weakref.ref(layout), "transport": weakref.ref(group)}
    alive = [(name, lambda ref=ref: ref() is not None) for name, ref in refs.items()]
    return [*alive, *(("a tensor", lambda storage=storage: not storage.expired()) for storage in storages)]


@pytest.mark.parametrize("kind", CALLS)
def test_entries_say_what_they_weigh_and_nothing_else_is_kept(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    light, keep = [], Bounded.keep

    def weighed(self: Bounded[Any, Any], key: Any, value: Any, nbytes: int = 0) -> Any:
        if weight(value) > max(1024, 2 * nbytes):
            light.append(f"a {type(value).__name__} of {weight(value)} bytes is kept as one of {nbytes}")
        return keep(self, key, value, nbytes)

    monkeypatch.setattr(Bounded, "keep", weighed)
    held = _call(**CALLS[kind])
    assert light == []
    clear_caches(RING)
    gc.collect()
    assert [name for name, alive in held if alive()] == []
