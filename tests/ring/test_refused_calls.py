"""A refused call leaves no reference cycle: its tensors are freed with its error, before the garbage collector runs.

Calls within transforms are refused on every rank.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring import Layout, Pattern, ring_attention
from ring.comm.call_order import Calls
from ring.nn import ContextParallel, average_gradients
from tests.support.nn_ranks import said
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _refuse(*_: object) -> NoReturn:
    raise ValueError("refused")


def _refused(direction: str, check: bool) -> list[bool]:
    """Have the last rank refuse a call. Return whether each tensor of this rank is still there."""
    world = dist.get_world_size()
    wrong = dist.get_rank() == world - 1
    q, k, v = (torch.ones(1, 2, 1, 4, requires_grad=True) for _ in range(3))
    tensors = [weakref.ref(x) for x in (q, k, v)]
    attend = partial(ring_attention, q, k, v, Pattern.dense(), Layout.contiguous(2 * world, world), check=check)
    if direction == "forward":
        with pytest.raises(ValueError, match="exchange must be"):
            attend(exchange="no such" if wrong else "ring", group=dist.group.WORLD)
    else:
        out = attend(group=dist.group.WORLD)
        assert isinstance(out, torch.Tensor)
        with (
            patch.object(Calls, "check_backward", _refuse if wrong else Mock()),
            pytest.raises(ValueError, match="refused"),
        ):
            out.sum().backward()
        del out
    del q, k, v, attend
    return [tensor() is not None for tensor in tensors]


def _refused_without_collector(direction: str, check: bool) -> list[bool]:
    with no_collector():
        return _refused(direction, check)


@pytest.mark.parametrize(("world", "check"), [(1, True), (1, False), (2, True)])
@pytest.mark.parametrize("direction", ("forward", "backward"))
def test_a_refused_call_keeps_no_tensor(ranks: Ranks, world: int, direction: str, check: bool) -> None:
    assert ranks(world).run(_refused_without_collector, direction, check) == [[False] * 3] * world


def _refused_gradients() -> bool:
    wrong = dist.get_rank() == 1
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.float32))
    reference = weakref.ref(parameter)
    with no_collector():
        with pytest.raises(ValueError):
            average_gradients([parameter, "no tensor"] if wrong else [parameter])  # type: ignore[list-item]
        del parameter
        return reference() is not None


def _refused_check(check: bool) -> bool:
    x = torch.ones(3)
    reference = weakref.ref(x)
    context = ContextParallel(Layout.contiguous(2, 1), dist.group.WORLD, check=check)
    with no_collector():
        with pytest.raises(ValueError, match="refused"):
            context.agree("a step", partial(_refuse, x))
        del x
        return reference() is not None


def test_refused_arguments_of_a_step_are_not_kept(ranks: Ranks) -> None:
    assert ranks(2).run(_refused_gradients) == [False] * 2


@pytest.mark.parametrize("check", (True, False))
def test_a_refused_check_of_a_context_keeps_nothing(ranks: Ranks, check: bool) -> None:
    assert ranks(1).run(_refused_check, check) == [False]


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], object]] = {
    "vmap": lambda f, x: torch.func.vmap(f)(x.expand(2, *x.shape)),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "is_grads_batched": lambda f, x: torch.autograd.grad(
        f(x.requires_grad_()), x, x.expand(2, *x.shape), is_grads_batched=True
    ),
}


def _transformed(name: str) -> tuple[str, str]:
    """Answers to a call that rank 0 alone makes in a transform, and to a plain one after it."""

    def attend(x: Tensor) -> Tensor:
        out = ring_attention(x, x, x, Pattern.dense(), Layout.contiguous(4, 2))
        assert isinstance(out, Tensor)
        return out

    def plainly(x: Tensor) -> object:
        return torch.autograd.grad(attend(x.requires_grad_()), x, x) if name == "is_grads_batched" else attend(x)

    given, x = torch.ones(2, 1, 2, 1, 4)
    answer = said(lambda: plainly(given) if dist.get_rank() else TRANSFORMS[name](attend, given))
    return answer, said(lambda: attend(x))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_is_refused_on_both_ranks(ranks: Ranks, name: str) -> None:
    first, second = ranks(2).run(_transformed, name)
    assert first == second and first[1] == "fine"
    assert first[0].startswith("NotImplementedError: rank 0: ring_attention does not work within torch.func's vmap")
