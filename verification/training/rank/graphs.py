"""What of a model is compiled, by `torch.compile(fullgraph=True)`, and how often its graphs run.

dynamo is imported where something is compiled: it would take seconds of every command.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import hub

T = TypeVar("T", bound=Callable[..., Any])
# Of one function. Layers share theirs: two of them, with gradients and without, over no documents, some, and others
# than before, take more than the 8 that torch allows.
MOST_GRAPHS = 32


class Graphs:
    """Of one model. runs: how often one of them ran, forward. Who runs without a graph, and says nothing, has fewer."""

    def __init__(self, backend: str) -> None:
        """backend: of torch.compile, or "no", by which nothing is compiled."""
        self.runs = 0
        self._compile: Callable[..., Callable[..., Any]] | None = None
        if backend != "no":
            from torch._dynamo import config, lookup_backend, reset

            _quieten()
            config.recompile_limit = MOST_GRAPHS
            reset()  # the graphs of earlier Cases: a process would keep them all
            self._compile = lookup_backend(backend)

    def compiled(self, what: T) -> T:
        """A module or a function, compiled when it first runs; as it is where nothing is compiled."""
        if self._compile is None:
            return what
        found: T = torch.compile(what, fullgraph=True, backend=self._counted)  # type: ignore[assignment]
        return found

    def _counted(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        """A backend of torch.compile: the one that was named, its graphs counted as they run."""
        assert self._compile is not None
        run = self._compile(graph, inputs)

        def counted(*given: Any) -> Any:
            self.runs += 1
            return run(*given)

        return counted


def _quieten() -> None:
    """What torch says and leaves when it compiles, in every rank, and what is no fault."""
    # That a layer whose attention is kept must change nothing in place: none does.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    # Its progress bar, which is never shown, makes a semaphore of processes, left over where a rank is ended. Torch has
    # a bar of its own, without a lock, where the package tqdm is not installed.
    if hasattr(hub.tqdm, "set_lock"):
        hub.tqdm.set_lock(threading.RLock())
