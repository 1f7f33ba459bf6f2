"""Replays calls on GPUs as CUDA graphs, so that a short one costs the host a launch instead of some hundred operations.

A model makes the same call in every layer and in every step. When it has come some times it is captured in a graph;
from then on its tensors are copied to where the graph reads them, the graph is replayed, and what it wrote is copied
out. So one graph serves all calls of a setting, wherever their tensors lie, and a setting that hardly ever comes is
never captured.

All graphs of a stream read and write the same memory, since they run one after the other there: what one call takes.
Threads that call on one stream take turns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakSet

import torch

from ring.caching.bounded_cache import BoundedCache
from ring.caching.graph_keepalive import keep_alive_for_one_graph

# Bytes of queries up to which a call is replayed. Longer ones keep the GPU busy for longer than they take the host, so
# that the copies cost more than they save. 0: nothing is replayed.
MOST_BYTES = 2**24
BEFORE = 8  # calls of a setting before it is captured, which takes as long as some such calls
_GRAPHS, _SEEN = 128, 1024
_ALIGNMENT = 512  # bytes at which tensors begin, as those of the allocator do

Tensors = Sequence[torch.Tensor]
Form = tuple[Sequence[int], torch.dtype]  # of a tensor


class _Replay(NamedTuple):
    graph: Any  # torch.cuda.CUDAGraph
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    reads: list[object]  # what else must be there as long as the graph
    turn: threading.Lock  # of those that use the same memory


class _StreamMemory:
    """Where the graphs of one stream are captured, and what they read and write."""

    def __init__(self, device: torch.device) -> None:
        self.stream, self.turn = torch.cuda.Stream(device), threading.Lock()
        self._pool, self._graphs = torch.cuda.graph_pool_handle(), WeakSet[Any]()
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def capture_in(self, graph: Any) -> None:
        """Begin to capture a graph in the memory of those that are there. Torch gives it up with the last of them."""
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        # Threads that have nothing to do with this call may go on, with what a capture elsewhere would not allow.
        graph.capture_begin(self._pool, "thread_local")
        self._graphs.add(graph)

    def take(self, forms: Sequence[Form]) -> list[torch.Tensor]:
        """Tensors side by side. Larger memory takes the place of a smaller one, which the graphs before go on to use;
        at twice the size, so that all of it is less than twice the last.
        """
        sizes = [dtype.itemsize * torch.Size(shape).numel() for shape, dtype in forms]
        begins = [0]
        for size in sizes:
            begins.append(begins[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        if begins[-1] > self._memory.numel():
            most = max(begins[-1], 2 * self._memory.numel())
            self._memory = torch.empty(most, dtype=torch.uint8, device=self._memory.device)
        places = zip(begins, sizes, forms, strict=False)
        return [self._memory[at : at + size].view(dtype).view(*shape) for at, size, (shape, dtype) in places]


_seen: BoundedCache[Hashable, int] = BoundedCache(_SEEN)
_replays: BoundedCache[Hashable, _Replay] = BoundedCache(_GRAPHS)


def replayed(what: Hashable, inputs: Tensors, results: Sequence[Form], compute: Callable[..., Tensors]) -> Tensors:
    """compute(*inputs), computed by it or by a graph of it.

    what: all that decides what is computed, of tensors of which shapes and types, and by which streams; results: shapes
    and types of what it returns.
    """
    stream = torch.cuda.current_stream(inputs[0].device)
    key = what, stream.cuda_stream
    replay = _replays.get(key)
    if replay is None:
        seen = _seen.put(key, _seen.get(key, 0) + 1)
        computed = compute(*inputs)
        if seen >= BEFORE:  # just now: what ranks settle once, and what is copied to a GPU once, is not yet forgotten
            _replays.put(key, _captured(compute, inputs, results, stream))
        return computed
    with replay.turn:
        torch._foreach_copy_(replay.inputs, list(inputs))
        replay.graph.replay()
        found = [torch.empty_like(x) for x in replay.outputs]
        torch._foreach_copy_(found, replay.outputs)
    return found


@torch.inference_mode(False)  # else only inference could use it
def _captured(
    compute: Callable[..., Tensors], inputs: Tensors, results: Sequence[Form], current: torch.cuda.Stream
) -> _Replay:
    memory = _memory_of(current.device, current.cuda_stream)
    with memory.turn:
        return _captured_in(memory, compute, inputs, results, current)


def _captured_in(
    memory: _StreamMemory, compute: Callable[..., Tensors], inputs: Tensors, results: Sequence[Form],
    current: torch.cuda.Stream,
) -> _Replay:  # fmt: skip
    taken = memory.take([*((x.shape, x.dtype) for x in inputs), *results])
    own, outputs = taken[: len(inputs)], taken[len(inputs) :]
    graph = torch.cuda.CUDAGraph()
    memory.stream.wait_stream(current)
    with keep_alive_for_one_graph() as reads, torch.no_grad(), torch.cuda.stream(memory.stream):
        memory.capture_in(graph)
        try:
            for to, found in zip(outputs, compute(*own), strict=True):
                to.copy_(found)
        finally:
            graph.capture_end()
    current.wait_stream(memory.stream)
    return _Replay(graph, own, outputs, reads, memory.turn)


@lru_cache(maxsize=64)
def _memory_of(device: torch.device, stream: int) -> _StreamMemory:
    return _StreamMemory(device)
