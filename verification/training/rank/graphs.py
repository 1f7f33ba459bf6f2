"""Compiles parts of a model by `torch.compile(fullgraph=True)`, and counts the runs of their graphs.

dynamo is imported only when something is compiled: the import takes seconds.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import hub

T = TypeVar("T", bound=Callable[..., Any])
# Limit of graphs per function. Layers share one function: two layers, with and without gradients, with no, some and
# changed documents, take more than torch's 8.
MAX_GRAPHS = 32


class Graphs:
    """Compiled graphs of one model. runs: number of forward runs; a silent fallback to eager lowers it."""

    def __init__(self, backend: str) -> None:
        """backend: a name of a torch.compile backend, or "no" to compile nothing."""
        self.runs = 0
        self._compile: Callable[..., Callable[..., Any]] | None = None
        if backend != "no":
            from torch._dynamo import config, lookup_backend, reset

            _silence_torch()
            config.recompile_limit = MAX_GRAPHS
            reset()  # drop the graphs of earlier Cases, which the process would keep
            self._compile = lookup_backend(backend)

    def compiled(self, function: T) -> T:
        """Return the module or function, to be compiled when it first runs; unchanged if nothing is compiled."""
        if self._compile is None:
            return function
        compiled: T = torch.compile(function, fullgraph=True, backend=self._counted)  # type: ignore[assignment]
        return compiled

    def _counted(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        """Backend of torch.compile: call the chosen one, and count the runs of its graphs."""
        assert self._compile is not None
        run = self._compile(graph, inputs)

        def counted(*arguments: Any) -> Any:
            self.runs += 1
            return run(*arguments)

        return counted


def _silence_torch() -> None:
    """Suppress harmless output and leftovers of compilation in every rank."""
    # A warning that layers with saved attention must not modify anything in place: none does.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    # tqdm's lock, of a bar that is never shown, is a semaphore, which leaks when a rank is terminated. Without tqdm
    # torch has its own bar, without a lock.
    if hasattr(hub.tqdm, "set_lock"):
        hub.tqdm.set_lock(threading.RLock())
