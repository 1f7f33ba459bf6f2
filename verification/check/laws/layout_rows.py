"""What a layout says of rows and of itself: shards and what is made of them, its orders of every type, equality."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import torch

from reference import shards
from ring.layout import Layout, numbered_layout
from verification.case import Case

TOKENS, MOST_RANKS = 40, 6
NAMED = ("contiguous", "zigzag", "striped", "hilbert")
KINDS = (torch.float32, torch.int64, torch.bool, torch.uint8, torch.float64)


def named(case: Case) -> Iterator[str]:
    """The orders that have names, also of fewer tokens than ranks and of none."""
    rng = np.random.default_rng(case.seed)
    for name in NAMED:
        for n in (0, int(rng.integers(1, MOST_RANKS)), *rng.integers(1, TOKENS, 2).tolist()):
            p = int(rng.integers(1, MOST_RANKS + 1))
            made: Layout = getattr(Layout, name)(n, p)
            found = [made.positions(rank).tolist() for rank in range(p)]
            if n == 0:
                wanted: list[list[int]] = [[] for _ in range(p)]
            else:
                wanted = [mine.tolist() for mine in shards.shards(name, n, p, None).positions]
            if found != wanted or made.counts != tuple(map(len, wanted)) or (made.n, made.world_size) != (n, p):
                yield f"Layout.{name}({n}, {p}) is {made} and gives ranks {found}, must give {wanted}"


def orders(case: Case) -> Iterator[str]:
    """Given as any sequence of integers; what it was made of may change afterwards, and the layout may not."""
    rng = np.random.default_rng(case.seed)
    for _ in range(3):
        yield from _of_any_type(rng)


def _of_any_type(rng: np.random.Generator) -> Iterator[str]:
    n, p = int(rng.integers(2, TOKENS)), int(rng.integers(1, MOST_RANKS + 1))
    cuts = _cuts(rng, n, p)
    order = rng.permutation(n) if rng.integers(4) else np.roll(np.arange(n), int(rng.integers(n)))
    twice = torch.from_numpy(order.repeat(2))
    given: dict[str, Any] = {
        "list": order.tolist(), "tuple": tuple(order.tolist()), "uint8": order.astype(np.uint8),
        "int64": order.copy(), "int32 tensor": torch.from_numpy(order.astype(np.int32)),
        "tensor": torch.from_numpy(order.copy()), "strided tensor": twice[::2],
    }  # fmt: skip
    made = {}
    for name, one in given.items():
        offsets: list[Any] = list(cuts) if len(name) % 2 else [*np.array(cuts)]
        made[name] = Layout.from_cuts(one, offsets)
        if not isinstance(one, tuple):
            one[0], one[-1] = one[-1], one[0]
            offsets[-1] += 1
    for back in (range(n - 1, -1, -1), range(n)):
        turned = Layout.from_cuts(back, cuts)
        if [x for rank in range(p) for x in turned.positions(rank).tolist()] != list(back):
            yield f"Layout.from_cuts({back}, {cuts}) holds another order, by {turned}"
    for name, layout in made.items():
        found = [layout.positions(rank).tolist() for rank in range(p)]
        if found != [order[a:b].tolist() for a, b in pairwise(cuts)] or layout.cuts != cuts:
            yield f"Layout.from_cuts of a {name} {order.tolist()}, changed later, and {cuts} gives ranks {found}"
        if layout != made["list"] or hash(layout) != hash(made["list"]):
            yield f"Layout.from_cuts makes another layout of a {name} than of a list, of equal numbers"


def rows(case: Case) -> Iterator[str]:
    """`shard` along any dimension of tensors of any type, and back."""
    rng = np.random.default_rng(case.seed)
    for _ in range(4):
        layout = some_layout(rng)
        dim, kind, sizes = int(rng.integers(3)), KINDS[rng.integers(len(KINDS))], [2, 3, 2]
        sizes[dim] = layout.n
        x = torch.from_numpy(rng.integers(0, 2 if kind is torch.bool else 100, sizes)).to(kind)
        given = dim - 3 if rng.integers(2) else dim
        pieces = [layout.shard(x, rank, given) for rank in range(layout.world_size)]
        for rank, piece in enumerate(pieces):
            if not torch.equal(piece, torch.from_numpy(np.take(x.numpy(), layout.positions(rank).numpy(), dim))):
                yield f"shard along dim {given} of a {kind} {tuple(sizes)} gives rank {rank} other rows, by {layout}"
        whole = layout.unshard(tuple(pieces), given)
        if whole.dtype != kind or not torch.equal(whole, x):
            yield f"unshard along dim {given} does not turn the shards of a {kind} {tuple(sizes)} back, by {layout}"
        yield from _refused(layout, x, dim)
        leaf = torch.ones(layout.n, 2, requires_grad=True)
        weighted = [(rank + 1) * layout.shard(leaf, rank, 0) for rank in range(layout.world_size)]
        layout.unshard(weighted, 0).sum().backward()
        wanted = torch.empty(layout.n, 2)
        for rank in range(layout.world_size):
            wanted[layout.positions(rank)] = float(rank + 1)
        if leaf.grad is None or not torch.equal(leaf.grad, wanted):
            yield f"gradients do not flow through shard and unshard, by {layout}"


def _refused(layout: Layout, x: torch.Tensor, dim: int) -> Iterator[str]:
    """Rows too few or too many along that dimension, though there are as many along another."""
    square = torch.zeros(layout.n, layout.n + 1, layout.n)
    tries: list[tuple[str, Any]] = [
        ("shard of a row too many along dim 1", lambda: layout.shard(square, 0, 1)),
        ("shard of a row too many along the default dim", lambda: layout.shard(square, 0)),
        ("shard for a rank too many", lambda: layout.shard(x, layout.world_size, dim)),
        ("shard for rank -1", lambda: layout.shard(x, -1, dim)),
        ("positions for a rank too many", lambda: layout.positions(layout.world_size)),
        ("positions for rank -1", lambda: layout.positions(-1)),
        ("unshard of a shard too many", lambda: layout.unshard([torch.zeros(2, c) for c in (*layout.counts, 0)])),
        ("unshard of other counts", lambda: layout.unshard([torch.zeros(2, c + 1) for c in layout.counts])),
    ]
    for what, act in tries:
        try:
            act()
        except ValueError:
            continue
        yield f"{what} must be refused as ValueError, by {layout}"


def equality(case: Case) -> Iterator[str]:
    """Equal for one order and cuts; another order, other cuts or other tokens make another layout."""
    rng = np.random.default_rng(case.seed)
    for _ in range(4):
        layout = some_layout(rng)
        n, p = layout.n, layout.world_size
        order = np.concatenate([layout.positions(rank).numpy() for rank in range(p)])
        same = Layout.from_cuts(order, layout.cuts)
        others = [Layout.from_cuts(order, cuts) for cuts in {_cuts(rng, n, p) for _ in range(3)} - {layout.cuts}]
        others += [Layout.from_cuts(order, (0, *layout.cuts)), Layout.from_cuts(order, (*layout.cuts, n))]
        others += [Layout.from_cuts(np.append(order, n), (*layout.cuts[:-1], n + 1))]
        others += [Layout.from_cuts(order[::-1], layout.cuts)] if n > 1 else []
        one, *rest = [layout, same] if (same.runs is None) == (layout.runs is None) else [layout]
        for equal in rest:
            if one != equal or hash(one) != hash(equal) or len({one, equal}) != 1:
                yield f"layouts of one order and cuts must be equal, got {one} and {equal} of {order.tolist()}"
        for first, second in combinations([layout, *others], 2):
            if first == second:
                yield f"layouts of other orders or cuts must not be equal: {first} and {second} of {order.tolist()}"
        yield from _copies(layout)
        if layout in (layout.cuts, None, layout.digest):
            yield "a layout equals something that is none"


def _copies(layout: Layout) -> Iterator[str]:
    """Each is equal, holds the same, and has a number of its own; and nobody can set a field of a key of caches."""
    ways = {"copy": copy.copy(layout), "deep copy": copy.deepcopy(layout), "pickle": pickle.loads(pickle.dumps(layout))}
    for way, made in ways.items():
        if (
            made != layout
            or hash(made) != hash(layout)
            or repr(made).split("number")[0] != repr(layout).split("number")[0]
        ):
            yield f"a layout and what {way} makes of it must be equal and hash alike, got {made} of {layout}"
        elif made.number == layout.number or numbered_layout(made.number) is not made:
            yield f"what {way} makes of a layout must have a number of its own, by which it is found"
        elif any(not torch.equal(made.positions(r), layout.positions(r)) for r in range(layout.world_size)):
            yield f"what {way} makes of a layout holds other positions: {made} of {layout}"
    try:
        setattr(layout, "cuts", layout.cuts)  # noqa: B010 - a type checker knows that it is frozen
    except FrozenInstanceError:
        return
    yield "cuts of a layout, a key of caches, can be set"


def some_layout(rng: np.random.Generator) -> Layout:
    """With a name, or of any order and cuts."""
    n, p = int(rng.integers(1, TOKENS)), int(rng.integers(1, MOST_RANKS + 1))
    way = int(rng.integers(6))
    if way < len(NAMED):
        made: Layout = getattr(Layout, NAMED[way])(n, p)
        return made
    if way == len(NAMED):
        return Layout.zigzag(n, p, documents=(n // 3, 0, n - n // 3))
    return Layout.from_cuts(rng.permutation(n), _cuts(rng, n, p))


def _cuts(rng: np.random.Generator, n: int, p: int) -> tuple[int, ...]:
    return (0, *sorted(rng.integers(0, n + 1, p - 1).tolist()), n)
