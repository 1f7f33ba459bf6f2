"""What handles of a sharded sequence promise: what they say, what they keep for all layers, what they refuse."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reference.pattern import Pattern
from ring.layout import Layout
from ring.nn import ContextParallel, SelfAttention
from verification.training.rank.other_calls import CallPlace, OtherCall, must, must_be, refused

KEPT = ("layout", "group", "exchange", "bucket", "kernel", "check", "transport")


def some_documents(draws: np.random.Generator, tokens: int) -> tuple[int, ...]:
    """Lengths of one to four documents, some of them empty."""
    edges = [0, *sorted(draws.integers(0, tokens + 1, draws.integers(0, 4)).tolist()), tokens]
    return tuple(end - start for start, end in pairwise(edges))


def within_documents(lengths: tuple[int, ...]) -> Tensor:
    """The position of each token within its document: (n,) int64."""
    return torch.cat([torch.arange(length) for length in lengths])


def _as_it_was_made(s: CallPlace) -> str:
    draws, given, layout = s.draws(), s.context, s.context.layout
    mine, lengths = s.shard().cpu(), some_documents(draws, s.case.tokens)
    settings: dict[str, Any] = {
        "exchange": ("ring", "gather", "direct")[draws.integers(3)], "bucket": (None, 1, 3)[draws.integers(3)],
        "kernel": ("math", "auto")[draws.integers(2)], "check": bool(draws.integers(2)),
    }  # fmt: skip
    made = ContextParallel(layout, given.group, **settings, documents=lengths)
    found = {name: getattr(made, name) for name in settings}
    must(found == settings, f"a handle made with {settings} has {found}")
    other = some_documents(draws, s.case.tokens)
    packed, bare = made.with_documents(other), made.with_documents(None)
    for handle, wanted in ((made, lengths), (packed, other), (bare, None), (given.with_documents(lengths), lengths)):
        _check_handle(s, handle, mine, wanted)
    for name in KEPT:
        must(getattr(packed, name) is getattr(made, name), f"with_documents must keep {name}")
    for same in (copy.copy(packed), copy.deepcopy({"handles": [packed]})["handles"][0]):
        must(same is packed, "a copy of a handle must be the handle itself")
    must(made != packed and bare != given and hash(made) == hash(made) and made == made, "equal to itself only")  # noqa: PLR0124
    for words, kinds, call in _refusals(s, packed):
        refused((words,), call, kinds)
    return repr(made)


def _check_handle(s: CallPlace, handle: ContextParallel, mine: Tensor, documents: tuple[int, ...] | None) -> None:
    """mine: the positions of this rank's tokens."""
    within = mine if documents is None else within_documents(documents)[mine]
    must_be(f"positions over documents {documents}", handle.positions, within)
    handle.positions.add_(1)
    must_be(f"positions over documents {documents}, once a caller changed his", handle.positions, within)
    on_device = handle.positions_on(s.device)
    must_be("positions on a device", on_device, within)
    must(handle.positions_on(s.device) is on_device, "all who ask for positions on a device must have one tensor")
    found = handle.documents if handle.documents is None else tuple(handle.documents)
    must(found == documents, f"documents must be {documents}, got {found}")
    must((documents is None) is ("documents=" not in repr(handle)), f"the documents must be in {handle!r}")
    counted = (handle.rank, handle.world_size, handle.tokens)
    must(counted == (*s.place("context"), len(mine)), f"rank, world_size and tokens are {counted}")
    whole = torch.arange(2.0 * s.case.tokens).view(2, -1)
    must_be("a shard along dimension -1", handle.shard(whole, -1), whole[:, mine])
    must_be("a shard along dimension 1", handle.shard(whole), whole[:, mine])
    must_be("a shard along dimension 0", handle.shard(whole.t(), 0), whole.t()[mine])


def _refusals(
    s: CallPlace, handle: ContextParallel
) -> list[tuple[str, tuple[type[Exception], ...], Callable[[], Any]]]:
    n, wrong = s.case.tokens, (ValueError,)
    more = Layout.contiguous(n, handle.world_size + 1)
    found: list[tuple[str, tuple[type[Exception], ...], Callable[[], Any]]] = [
        ("exchange cannot be set", (AttributeError,), lambda: setattr(handle, "exchange", "ring")),
        ("layout cannot be deleted", (AttributeError,), lambda: delattr(handle, "layout")),
        ("cannot be pickled", (TypeError,), lambda: pickle.dumps(handle)),
        ("documents", wrong, lambda: handle.with_documents(())),
        ("documents", wrong, lambda: ContextParallel(handle.layout, handle.group, documents=())),
        ("documents", wrong, lambda: handle.with_documents((n, 1))),
        ("documents", wrong, lambda: handle.with_documents((n + 1, -1))),
        ("documents", wrong, lambda: ContextParallel(handle.layout, handle.group, documents=(n - 1,))),
        ("layout must be for the", wrong, lambda: ContextParallel(more, handle.group)),
        ("layout must be a Layout", wrong, lambda: ContextParallel(n, handle.group)),  # type: ignore[arg-type]
        (str(n), wrong, lambda: handle.shard(torch.zeros(1, n + 1))),
    ]
    if s.case.world == handle.world_size:  # of data x context: a mesh of two dimensions
        found.append(("dimension", wrong, lambda: ContextParallel(handle.layout, s.mesh)))
    return found


def _layers_that_differ(s: CallPlace) -> str:
    """Of two layers that differ in one thing, theta, head size, dtype or documents, the second gives on a handle that
    the first has used what it gives on a handle of its own. Whoever asks first may do so in inference mode."""
    draws, context = s.draws(), s.context
    thetas, dims = [(100.0, 10000.0), (10000.0, None)][draws.integers(2)], (2, 4)
    kinds = [torch.float64, (torch.float32, torch.bfloat16)[draws.integers(2)]]
    handles = [context.with_documents(some_documents(draws, s.case.tokens)) for _ in range(2)]
    handles[0] = context if draws.integers(2) else handles[0]
    differs, first = draws.integers(4), draws.integers(0, 2, 4)
    for number in range(2):
        of = first ^ (np.arange(4) == differs) * number
        theta, head_dim, dtype, shared = thetas[of[0]], dims[of[1]], kinds[of[2]], handles[of[3]]
        layer = SelfAttention(4, 1, Pattern.dense(causal=True), head_dim=head_dim, rotary_theta=theta)
        _set(layer)
        layer = layer.to(s.device, dtype)
        whole = torch.linspace(-1.0, 1.0, 4 * s.case.tokens, dtype=torch.float64, device=s.device).view(1, -1, 4)
        x = whole[:, s.shard()].to(dtype)
        if not number and draws.integers(2):
            with torch.inference_mode():
                layer(x, shared)
        found = layer(x, shared)
        wanted = layer(x, ContextParallel(context.layout, context.group, documents=shared.documents))
        what = f"layer {number} in {dtype} with head_dim {head_dim}, theta {theta}, documents {shared.documents}"
        must_be(what, found.detach(), wanted.detach())
        ours, theirs = (torch.autograd.grad(out.sum(), layer.q_proj.weight)[0] for out in (found, wanted))
        must_be(f"the gradient of q_proj of {what}", ours, theirs)
    return ""


def _set(layer: torch.nn.Module) -> None:
    """Numbers that are no one's default."""
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.linspace(-1.0, 1.0, weight.numel()).view(weight.shape))


HANDLE_CALLS: dict[str, OtherCall] = {
    "handles as they were made": OtherCall(_as_it_was_made, ""),
    "layers that differ on one handle": OtherCall(_layers_that_differ, ""),
}
