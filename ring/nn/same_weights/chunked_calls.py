"""Calls of modules, chunk by chunk: each module with parameters of its own is called once for each chunk.

So a module's operations have the same shapes on any number of ranks, whatever they are. A call gets copies of the
parameters, through which the gradients of its chunk reach the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.checkpoint import _StopRecomputationError

from ring.comm.call_order import within_backward
from ring.nn.context import ContextParallel
from ring.nn.same_weights.chunk_rows import ChunkRows, Cut, Join
from ring.nn.same_weights.pointwise import WholeVectors


@dataclass(eq=False)
class Forward:
    """A forward of the model: the chunks of this rank, and the sequences of the batch. done: after its backward, or
    when another forward begins, as it may if this one is `given_up`."""

    context: ContextParallel
    chunks: ChunkRows
    batch: int
    done: bool = False
    given_up: bool = False

    def places(self) -> Iterator[tuple[int, int]]:
        """Iterate over the entry and the number of the chunk of each piece."""
        return ((entry, number) for entry in range(self.batch) for number in self.chunks.numbers)


Insert = Callable[[Forward, int, int, int, Tensor], None]  # forward, parameter, entry, chunk, gradient


class _Copy(torch.autograd.Function):
    """A parameter of a module, for one chunk. Its gradient goes to `insert`, and not to the parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, where: str, insert: Callable[[Tensor], None]) -> Tensor:
        ctx.where, ctx.insert = where, insert
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        if gradient.layout is not torch.strided:
            raise NotImplementedError(
                f"{ctx.where} must have dense gradients, got {gradient.layout}: write Embedding(sparse=False)"
            )
        ctx.insert(gradient)
        return None, None, None


def by_chunks(forward: Forward, where: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
    """Return call(number of the piece, *args, **kwargs) of each piece of the tensors among the arguments, joined.

    Raises NotImplementedError for a tensor that is not (B, N, ...), and for a result that is no tensor of the rows.
    """
    values, structure = tree_flatten((args, kwargs))
    cut: dict[int, tuple[Tensor, ...]] = {}
    for at, x in enumerate(values):
        if isinstance(x, Tensor) and x.dim():
            if x.shape[:2] != (forward.batch, forward.chunks.tokens):
                raise NotImplementedError(
                    f"{where} must be called with tensors (B, N, ...), here ({forward.batch}, "
                    f"{forward.chunks.tokens}, ...), so that it can be called chunk by chunk, got {tuple(x.shape)}"
                )
            cut[at] = Cut.apply(x, forward.chunks)
    if not cut:
        raise NotImplementedError(f"{where} must be called with tensors of tokens, (B, N, ...), got none")
    results = []
    for piece, (begin, end) in enumerate(forward.chunks.rows * forward.batch):
        args, kwargs = tree_unflatten([cut[at][piece] if at in cut else x for at, x in enumerate(values)], structure)
        result = call(piece, *args, **kwargs)
        if not isinstance(result, Tensor) or result.shape[:2] != (1, end - begin):
            got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise NotImplementedError(f"{where} must return a tensor (1, {end - begin}, ...) for a chunk, got {got}")
        results.append(result)
    joined: Tensor = Join.apply(forward.chunks, forward.batch, *results)
    return joined


class ChunkedCalls:
    """Calls the modules of a model chunk by chunk, within a forward and where its backward computes them again.

    Args:
        model: its modules with parameters get another `forward`, until `restore`.
        numbers: of parameters, by id.
        insert: takes gradients.

    probing: True to check that modules compute each row of a chunk from that row alone.
    """

    def __init__(self, model: nn.Module, numbers: dict[int, int], insert: Insert) -> None:
        self.running: Forward | None = None
        self.probing, self._inside, self._vectors = False, False, False
        self.insert, self._numbers = insert, numbers
        self._replaced: list[tuple[nn.Module, Any]] = []
        named = [(name, module) for name, module in model.named_modules() if _own_parameters(module)]
        for name, module in named:
            if next(module.children(), None) is not None:
                raise NotImplementedError(
                    f"{described_module(name, module)} must have no parameters of its own beside modules, got "
                    f"{', '.join(_own_parameters(module))}: what it does with them cannot be computed chunk by chunk"
                )
        for module in model.modules():
            if not _own_parameters(module):
                self._replaced.append((module, module.__dict__.get("forward")))
                module.forward = self._around(module, module.forward)
        for name, module in named:
            self._replaced.append((module, module.__dict__.get("forward")))
            module.forward = self._chunked(module, described_module(name, module), module.forward)

    @contextmanager
    def within(self, forward: Forward) -> Iterator[None]:
        """Call modules for this forward. It remains `running`, for its backward."""
        self.running, self._inside = forward, True
        try:
            yield
        except BaseException:
            self.running = None
            raise
        finally:
            self._inside = False

    def restore(self) -> None:
        """Give the modules their own `forward` again."""
        for module, before in self._replaced:
            del module.forward
            if before is not None:
                module.forward = before
        self._replaced.clear()

    def _around(self, module: nn.Module, own: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward of a module without parameters of its own: what it does itself has whole vectors."""

        @wraps(type(module).forward)
        def forward(of: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if of is not module:  # a copy
                return type(of).forward(of, *args, **kwargs)
            running = self.running if self._inside or within_backward() else None
            with nullcontext() if running is None else self._whole_vectors():
                return own(*args, **kwargs)

        return MethodType(forward, module)

    @contextmanager
    def _whole_vectors(self) -> Iterator[None]:
        if self._vectors:
            yield
            return
        self._vectors = True
        try:
            with WholeVectors():
                yield
        finally:
            self._vectors = False

    def _chunked(self, module: nn.Module, where: str, own: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(type(module).forward)
        def forward(of: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if of is not module:  # a copy
                return type(of).forward(of, *args, **kwargs)
            running = self.running if self._inside or within_backward() else None
            if running is None:
                return own(*args, **kwargs)
            if torch.compiler.is_compiling():
                raise NotImplementedError(f"{where} must not be compiled: chunks are separate calls")
            places = list(running.places())

            def call(piece: int, *args: Any, **kwargs: Any) -> Any:
                if self.probing and piece == 0:
                    _check_rows(where, own, args, kwargs)
                with self._copies(module, where, running, *places[piece]), _unchanged(where):
                    return own(*args, **kwargs)

            try:
                with self._whole_vectors():  # a layer that is computed again may not be called, but its class's forward
                    return by_chunks(running, where, call, args, kwargs)
            except Exception as error:  # of any type: in a recomputation the other ranks are in attention, or will be
                if self._inside or isinstance(error, _StopRecomputationError):
                    raise
                running.context.raise_everywhere(error)

        return MethodType(forward, module)  # so that a copy of the module has one of its own

    @contextmanager
    def _copies(self, module: nn.Module, where: str, running: Forward, entry: int, chunk: int) -> Iterator[None]:
        """Give a module copies of its parameters."""
        before = dict(module._parameters)
        for name, x in before.items():
            if x is not None and x.requires_grad and torch.is_grad_enabled():
                insert = partial(self.insert, running, self._numbers[id(x)], entry, chunk)
                module._parameters[name] = _Copy.apply(x, where, insert)
        try:
            yield
        finally:
            module._parameters.update(before)


@contextmanager
def _unchanged(where: str) -> Iterator[None]:
    """Name the module if it changes its parameters in place, which torch refuses for those of a chunk."""
    try:
        yield
    except RuntimeError as error:
        if f"Output 0 of {_Copy.__name__}" not in str(error):
            raise
        raise NotImplementedError(
            f"{where} must leave its parameters as they are in a forward: without Embedding(max_norm=), for one"
        ) from error


def _own_parameters(module: nn.Module) -> list[str]:
    return [name for name, x in module._parameters.items() if x is not None]


def described_module(name: str, module: nn.Module) -> str:
    return f"module {name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"


@torch.no_grad()
def _check_rows(where: str, own: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Raise NotImplementedError if NaN in other rows of a chunk reach the middle one."""

    def others_nan(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() < 2 or not x.is_floating_point():
            return x
        poisoned, middle = torch.full_like(x, torch.nan), x.shape[1] // 2
        poisoned[:, middle] = x[:, middle]
        return poisoned

    plain = own(*args, **kwargs)
    args, kwargs = tree_map(others_nan, (args, kwargs))
    poisoned = own(*args, **kwargs)
    if not isinstance(plain, Tensor) or plain.dim() < 2:
        return  # refused by the call itself
    middle = plain.shape[1] // 2
    if bool((poisoned[:, middle].isnan() & ~plain[:, middle].isnan()).any()):
        raise NotImplementedError(
            f"{where} must compute each token from that token alone, since it is called chunk by chunk, but NaN in "
            "other rows reach a row"
        )
