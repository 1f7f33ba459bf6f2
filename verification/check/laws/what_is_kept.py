"""What is kept for settings, layouts, plans and forwards is bounded by number and by bytes, and is all that is kept.

A server meets other lengths with every request, and a training with packed documents has other plans in every step:
what is kept of each and never forgotten fills the memory within days, which no single call shows. So each cache is
given more than it may keep; and once all are emptied, nothing is there any more of calls that differed in everything.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from reference import fields
from reference.pattern import Branch, Pattern
from ring import ring_attention
from ring.caching.beside import kept_beside
from ring.caching.bounded import Bounded
from ring.comm.calls import KEPT, Calls
from ring.comm.transport import SoloTransport, Transport
from ring.compiled import traced
from ring.layout import Layout
from verification.case import Case
from verification.check.laws.law import How, Law, nothing_wrong
from verification.draw.cases import cases
from verification.draw.pattern_lists import some_branch
from verification.run.backends import Backend
from verification.run.caches import bounded_of, clear_caches, recent_of
from verification.run.weights import weighed

PACKAGES = ("ring",)
MOST_SETTINGS, MOST_ENTRIES, MOST_BYTES = 512, 8192, 2**30  # of any `Bounded`, of any functools cache, in bytes
CALLS, HEADS, LATER = 3, 1, 20
LONG, DOCUMENTS = 600, 200  # tokens and documents of one call whose plan has some weight


class _Thing:
    """May be a key, and can be referred to weakly."""


# --- what is kept by one object ---------------------------------------------------------------------------------------


def _like_a_list(rng: np.random.Generator) -> Iterator[str]:
    """A `Bounded`, and a list of (key, value, bytes) of which the first are dropped; what it forgets is freed."""
    most, most_bytes = int(rng.integers(1, 8)), int(rng.integers(1, 100)) if rng.integers(3) else None
    kept: Bounded[Any, Any] = Bounded(most, most_bytes)
    wanted: list[tuple[Any, Any, int]] = []
    seen: list[weakref.ref[Any]] = []
    for step in range(30):
        if step == 20:
            kept.clear()
            wanted.clear()
        known = [key for key, *_ in wanted]
        key: Any = known[rng.integers(len(known))] if known and rng.integers(2) else _Thing()
        value, nbytes = _Thing(), int(rng.integers(0, 60))
        seen += [weakref.ref(key), weakref.ref(value)]
        if rng.integers(2):
            _once(kept, key, value, nbytes)
            entry = next((one for one in wanted if one[0] is key), (key, value, nbytes))
        else:
            kept.keep(key, value, nbytes)
            entry = key, value, nbytes
        at = known.index(key) if key in known else len(wanted)
        wanted[at : at + 1] = [entry]
        while len(wanted) > most or (len(wanted) > 1 and sum(n for *_, n in wanted) > (most_bytes or np.inf)):
            del wanted[0]
        if [(k, v) for k, v, _ in wanted] != list(kept.items()):
            yield f"Bounded({most}, {most_bytes}) keeps {len(kept)} entries after step {step}, must keep {len(wanted)}"
            return
    del known
    alive = {id(one) for k, v, _ in [*wanted, entry, (key, value, 0)] for one in (k, v)}
    if any((one := ref()) is not None and id(one) not in alive for ref in seen):
        yield f"Bounded({most}, {most_bytes}) keeps keys or values that it has forgotten"


def _once(kept: Bounded[Any, Any], key: Any, value: Any, nbytes: int) -> None:
    kept.once(key, lambda: value, lambda _: nbytes)


def _beside() -> Iterator[str]:
    """`kept_beside`: made once for an object and the other arguments, and freed with it."""
    table = kept_beside(lambda of, *rest: _Thing())
    one, other = _Thing(), _Thing()
    if table(one, 1) is not table(one, 1) or len({table(one, 1), table(one, 2), table(other, 1), table(one)}) != 4:
        yield "what is kept beside an object must be made once for it and each of the other arguments"
    seen = weakref.ref(table(one, 1))
    del one
    if seen() is not None:
        yield "what is kept beside an object must be freed with it"


def _calls() -> Iterator[str]:
    """How often a call went backward is known of the last KEPT calls of a group."""
    calls = Calls()
    made = [weakref.ref(calls.again(number, None)) for number in range(1, KEPT + LATER)]
    alive = [number for number, ref in enumerate(made, 1) if ref() is not None]
    if alive != list(range(LATER, KEPT + LATER)):
        yield f"of {len(made)} calls the last {KEPT} must be known, got {len(alive)}"


# --- what is kept by modules ------------------------------------------------------------------------------------------


def _each_cache() -> Iterator[str]:
    """Filled with more than it may keep, by number and by bytes."""
    for name, recent in recent_of(PACKAGES):
        most = recent.cache_parameters()["maxsize"]
        if most is None or most > MOST_ENTRIES:
            yield f"the cache {name} may keep {most} entries, must keep at most {MOST_ENTRIES}"
    for name, cache in bounded_of(PACKAGES):
        if name.startswith("ring.compute.gpu."):  # more entries, all of one size
            continue
        cache.clear()
        for number in range(MOST_SETTINGS + 1):
            cache.keep(number, number)
        if len(cache) > MOST_SETTINGS:
            yield f"a cache of {name} keeps {len(cache)} entries, must keep at most {MOST_SETTINGS}"
        cache.clear()
        for number in range(2):
            cache.keep(number, number, MOST_BYTES)
        if len(cache) > 1:
            yield f"a cache of {name} keeps entries of {2 * MOST_BYTES} bytes, must keep at most {MOST_BYTES}"
        cache.clear()


def _everything(rng: np.random.Generator) -> Iterator[str]:
    """Once all caches are empty, nothing is in memory of calls that differ in everything, right ones and wrong ones."""
    with weighed() as too_light:
        seen = [one for _ in range(CALLS) for one in _call(rng, int(rng.integers(1, 40)))]
        seen += _call(rng, LONG, (LONG // DOCUMENTS, 1) * (DOCUMENTS // 2))
    yield from too_light
    clear_caches(PACKAGES)
    for generation in (1, 2):  # what refused calls had is in cycles with their errors; the last takes long
        if any(alive() for _, alive in seen):
            gc.collect(generation)
    found = sorted({what for what, alive in seen if alive()})
    if found:
        yield f"when all caches are empty, {', '.join(found)} of calls are still in memory"


def _call(rng: np.random.Generator, n: int, packed: tuple[int, ...] = ()) -> list[tuple[str, Any]]:
    """Of what a call was given and gave: what it is, and whether it is alive. packed: documents but for the last."""
    heavy = len(packed) > 1
    listed = heavy or rng.integers(2)
    layout = Layout.from_cuts(rng.permutation(n), (0, n)) if listed else Layout.contiguous(n, 1)
    packed = packed or (n // 3,)
    documents = (*packed, n - sum(packed)) if heavy or rng.integers(2) else None
    branch = Branch() if heavy else some_branch(rng, HEADS)
    pattern = Pattern((branch,), bool(rng.integers(2)), documents)
    q, k, v = (torch.ones(1, n, HEADS, 2, requires_grad=bool(rng.integers(2))) for _ in range(3))
    settings: dict[str, Any] = {
        "group": SoloTransport(), "exchange": "ring", "bucket": n if heavy else int(rng.integers(1, 99)),
        "kernel": "math", "scale": float(rng.random()), "return_lse": False, "check": True, "name": f"call {n}",
    }  # fmt: skip
    held: list[tuple[str, Any]] = [("patterns", pattern), ("layouts", layout), ("transports", settings["group"])]
    tensors = [q, k, v]
    if way := int(rng.integers(4)):
        out = (ring_attention if way < 3 else traced)(q, k, v, pattern, layout, **settings)
        assert isinstance(out, torch.Tensor)
        tensors.append(out)
        if out.requires_grad and way > 1:
            out.sum().backward()
    else:
        with suppress(ValueError):
            ring_attention(q, k, v[:, :0], pattern, layout, **settings)
    storages = [("tensors", StorageWeakRef(x.untyped_storage())) for x in tensors]
    refs = [(what, weakref.ref(one)) for what, one in held]
    return [(what, lambda ref=ref: ref() is not None) for what, ref in refs] + [
        (what, lambda storage=storage: not storage.expired()) for what, storage in storages
    ]


# --- the law ----------------------------------------------------------------------------------------------------------


def wrong(transport: Transport, case: Case) -> list[str]:
    """Task: what is wrong, of rank 0, without messages. The process's caches are empty afterwards."""
    if transport.rank:
        return []
    rng = np.random.default_rng(case.seed)
    looked = (*(_like_a_list(rng) for _ in range(6)), _beside(), _calls(), _everything(rng), _each_cache())
    return [word for words in looked for word in words]


def check_kept(backend: Backend, case: Case, how: How) -> float:
    return nothing_wrong(backend, wrong, case)


@st.composite
def _draw(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    return draw(cases(world)), {}


def _premise(case: Case, how: Any) -> None:
    """Holds for any Case."""
    fields.exactly("how", how, [])


WHAT_IS_KEPT_IS_BOUNDED = Law(
    "what is kept is bounded", _draw, check_kept, _premise, share=0.03, most=20, on_gpus=False
)
