"""Leaks of an implementation: what each further call on the same Case leaves behind."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from functools import partial

import torch

from verification.failures import Malformed
from verification.run.processes.process_tree import descendants
from verification.wording import counted

CALLS = 3  # a cache that grows at its first calls is no leak


def _live(kind: type) -> int:
    return sum(issubclass(type(x), kind) for x in gc.get_objects())  # isinstance may ask a proxy, which acts


COUNTS: dict[str, Callable[[], int]] = {
    "tensor": partial(_live, torch.Tensor),
    "autograd node": partial(_live, torch.autograd.graph.Node),  # it may keep tensors
    "thread": threading.active_count,
    "open file": lambda: len(os.listdir("/proc/self/fd")),
    "child": lambda: len(descendants(os.getpid())),
}


def must_keep_nothing(function: str, call: Callable[[], object]) -> None:
    """Call CALLS times, and raise Malformed if the number of anything in COUNTS grows with every call."""
    gc.collect()
    gc.freeze()  # what exists is not counted, and costs no time below
    before = {name: count() for name, count in COUNTS.items()}
    growth: dict[str, list[int]] = {name: [] for name in COUNTS}
    for _ in range(CALLS):
        call()
        gc.collect()
        after = {name: count() for name, count in COUNTS.items()}
        for name in COUNTS:
            growth[name].append(after[name] - before[name])
        before = after
    kept = [f"{counted(min(grown), name)} more" for name, grown in growth.items() if min(grown) > 0]
    if kept:
        raise Malformed(f"{function} leaves {', '.join(kept)} after each call on the same Case; it must leave none")
