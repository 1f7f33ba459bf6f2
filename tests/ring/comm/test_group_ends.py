"""A group that ends is let go: no cache keeps it, and no connection, thread or shared memory of it is left."""

from __future__ import annotations

import gc
import os
import re
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from reference.pattern import Pattern
from ring import Layout, ring_attention
from ring.dispatcher_op import _prepared
from ring.torch_compile import traced
from tests.support.ranks import Ranks
from verification.run.in_flight_calls import in_second_thread

pytestmark = pytest.mark.ranks

PAGES = "/memfd:ring-page"  # of the memory in which ranks of one machine agree


def _in_use() -> Counter[str]:
    """Resources of this process by kind: open files, threads, shared memory."""
    kept: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one with which the folder was read
            kept[f"open file {os.readlink(f'/proc/self/fd/{number}').partition(':[')[0]}"] += 1
    kept["threads"] = len(os.listdir("/proc/self/task"))
    kept.update(f"shared memory {page}" for page in _pages())
    return kept


def _pages() -> list[str]:
    """Files of shared memory that this process has mapped."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return [line[line.index(PAGES) :].rstrip("\n") for line in maps if PAGES in line]


def _left_since(before: Counter[str]) -> list[str]:
    """Return resources in use that were not before, once all had time to end."""
    deadline = time.monotonic() + 2.0
    while (more := _in_use() - before) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.005)
    return sorted(more)


def _call(group: dist.ProcessGroup, compiled: bool = False, exchange: str = "ring") -> None:
    """Forward and backward; compiled: by the operators of a compiled graph, without compiling one."""
    q, k, v = (torch.ones(1, 4, 2, 4, requires_grad=True) for _ in "qkv")
    layout = Layout.contiguous(4 * group.size(), group.size())
    if compiled:
        out = traced(
            q, k, v, Pattern.dense(), layout, group=group, kernel="auto", return_lse=False, exchange=exchange,
            bucket=None, scale=None, check=True, name=None,
        )  # fmt: skip
    else:
        out = ring_attention(q, k, v, Pattern.dense(), layout, group=group, exchange=exchange)
    assert isinstance(out, torch.Tensor)
    torch.autograd.grad(out.sum(), (q, k, v))


def _refused(group: dist.ProcessGroup) -> None:
    _call(group)
    with pytest.raises(ValueError, match="exchange must be one of"):
        _call(group, exchange="teleport")


def _by_two_threads(group: dist.ProcessGroup) -> None:
    """One has ended when the other one calls."""
    in_second_thread(partial(_call, group))
    _call(group)


WAYS: dict[str, Callable[[dist.ProcessGroup], None]] = {
    "eager": _call,
    "compiled": partial(_call, compiled=True),
    "refused": _refused,
    "threads": _by_two_threads,
}


def _left_of_a_group(way: str) -> list[str]:
    """List the leftovers of the second of two groups: the first also starts what a process has only once."""
    for _ in range(2):
        before = _in_use()
        group = dist.new_group(timeout=timedelta(seconds=60))
        WAYS[way](group)
        dist.destroy_process_group(group)
        seen = weakref.ref(group)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", ResourceWarning)
            del group
            gc.collect()
        assert not warned, warned[0].message
        kept = [] if seen() is None else [f"{type(seen()).__name__} in memory"]
        left = [*kept, *_left_since(before)]
        dist.barrier()
    return left + [f"prepared forward {number}" for number in _prepared]


def _in_a_fork(act: Callable[[], object]) -> str:
    """Return the error that `act` raises in a forked process."""
    here, there = os.pipe()
    if not os.fork():
        try:
            act()
        except BaseException as error:
            os.write(there, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(there)
    with open(here, encoding="utf-8") as pipe:
        return pipe.read()


def _forked(called_before: bool) -> tuple[str, str]:
    """Return the errors of a forward and a backward in forked processes, and call on the group afterwards."""
    group = dist.new_group(timeout=timedelta(seconds=60))
    q = torch.ones(1, 4, 2, 4, requires_grad=True)
    attend = partial(ring_attention, q, q, q, Pattern.dense(), Layout.contiguous(8, 2), group=group)
    backward = ""
    if called_before:
        out = attend()
        assert isinstance(out, torch.Tensor)
        backward = _in_a_fork(out.sum().backward)
    forward = _in_a_fork(attend)
    _call(group)
    dist.destroy_process_group(group)
    return forward, backward


@pytest.mark.parametrize("called_before", [False, True])
def test_forked_processes_cannot_use_their_parents_group(ranks: Ranks, called_before: bool) -> None:
    refusal = (
        r"RuntimeError: nothing can be called on this group any more, since on this rank process \d+ was forked from "
        r"process \d+, which created the group: create one here"
    )
    threads = "RuntimeError: Unable to handle autograd's threading in combination with fork"
    for forward, backward in ranks(2).run(_forked, called_before):
        assert re.fullmatch(refusal, forward), forward
        by_torch = torch.cuda.is_available() and backward.startswith(threads)  # beside a GPU autograd has threads
        assert not called_before or by_torch or re.fullmatch(refusal, backward), backward


@pytest.mark.parametrize("way", WAYS)
def test_ended_groups_are_freed(ranks: Ranks, way: str) -> None:
    assert ranks(2).run(_left_of_a_group, way) == [[], []]
