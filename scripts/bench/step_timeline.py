"""The time of a step on a GPU by kind of work, and that in which it computes nothing.

events of torch's profiler -> kinds -> milliseconds
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

IDLE, OTHER = "idle", "other kernels"
MESSAGES = "messages"
OWN = {
    "_put": MESSAGES,
    "_pull": MESSAGES,
    "_wait": MESSAGES,
    "_pack": "merges",
    "_combine": "merges",
    "_merge_pair": "merges",
}  # kernels of `ring`, by name
# A kind, and parts of the names of its kernels and copies, in small letters. The first that fits counts.
PARTS = {
    MESSAGES: ("nccl", "memcpy ptop", "memcpy peer"),
    "attention": ("flash", "fmha", "sdpa"),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas"),
}
KINDS = (*dict.fromkeys((*PARTS, *OWN.values())), OTHER, IDLE)


class Event(NamedTuple):
    """A kernel, copy or fill. begin, length: in microseconds."""

    name: str
    begin: float
    length: float


def kind_of(name: str) -> str:
    """Return the kind of a kernel or copy by its name."""
    small = name.lower()
    named = next((kind for kind, parts in PARTS.items() if any(part in small for part in parts)), OTHER)
    return OWN.get(name, named)


def timeline(events: Iterable[Event]) -> dict[str, float]:
    """Return the milliseconds of each kind. Those of messages overlap with others. IDLE: those between the first event
    and the end of the last in which the GPU computes nothing, where it may wait for messages.
    """
    events = sorted(events, key=lambda event: event.begin)
    ms = dict.fromkeys(KINDS, 0.0)
    computed = end = events[0].begin if events else 0.0
    for event in events:
        ms[kind_of(event.name)] += event.length / 1000
        if kind_of(event.name) != MESSAGES:
            ms[IDLE] += max(0.0, event.begin - computed) / 1000
            computed = max(computed, event.begin + event.length)
        end = max(end, event.begin + event.length)
    ms[IDLE] += (end - computed) / 1000
    return ms


def profiled(run: Callable[[], object]) -> list[Event]:
    """Return what a call does on the GPU. The host is not traced: that would delay it."""
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        run()
        torch.cuda.synchronize()
    return [
        Event(event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in traced.events() or []
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
