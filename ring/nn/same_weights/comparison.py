"""Comparison of a model's tokens with those of a chunk alone: what depends on the chunks beside it has other bits.

A forward and backward of all chunks of this rank is recorded: attention, the outputs of modules, and the gradients of
parameters in some chunks. Then the model gets each of these chunks alone. Its attention returns what was recorded, and
everything else must come out the same, bit by bit. So dropout, a mean over the tokens of a rank, a router that drops
tokens, or a kernel whose bits depend on the number of rows are found, and none of them is in a list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ring.consensus import compare
from ring.nn.batch_group import BatchRanks
from ring.nn.context import ContextParallel
from ring.nn.same_weights.chunk_rows import ChunkRows
from ring.nn.same_weights.chunked_calls import ChunkedCalls, Forward
from ring.nn.same_weights.errors_of_one_rank import run_together

T = TypeVar("T")
OFF = "SameWeights(..., compare=False) leaves the comparison out, and its promise"
COMPARISON = "the comparison of SameWeights"
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_FACTOR = 0x9E3779B97F4A7C15 - 2**64  # odd, so that no number's change is lost in the digest


class Piece:
    """A chunk of an entry of the batch: its rows, and what was recorded of it.

    digests: of outputs by module and number of its call, in their order. attention: of each call "out", "dout", which
    is a digest, the gradients "q", "k", "v", and, if dout "differs" in the chunk alone. gradients: of parameters, by
    number.
    """

    def __init__(self, entry: int, number: int, begin: int, end: int) -> None:
        self.entry, self.number, self.begin, self.end = entry, number, begin, end
        self.digests: dict[tuple[str, int], int] = {}
        self.attention: list[dict[str, Tensor | int]] = []
        self.gradients: dict[int, Tensor] = {}

    def of(self, x: Tensor) -> Tensor:
        """Return its rows of a tensor (B, N, ...), as a new tensor (1, rows, ...)."""
        return x[self.entry : self.entry + 1, self.begin : self.end].detach().clone()


def compare_alone(
    model: nn.Module, calls: ChunkedCalls, parameters: Sequence[Tensor], forward: Forward, args: Any, kwargs: Any,
    ranks: BatchRanks,
) -> None:  # fmt: skip
    """Run the model twice, and raise NotImplementedError, with the module's name, if a chunk alone has other bits on
    some rank. Collective; gradients, buffers and random numbers are as before, also after an error.
    """
    context = forward.context
    places = list(zip(forward.places(), forward.chunks.rows * forward.batch, strict=True))
    pieces = [Piece(*place, *rows) for place, rows in (places[0], places[-1])][: len(places)]
    failures: list[Exception] = []
    if len(pieces) < 2:
        failures.append(
            ValueError(
                f"layout must give every rank two chunks or sequences, which are compared, got one: take chunks of "
                f"fewer tokens than same_bits={context.same_bits}. {OFF}"
            )
        )
    recorded = _with_handle((args, kwargs), _handle(_Recording, context, pieces))
    recorded = tree_map(lambda x: x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x, recorded)

    def run() -> None:
        calls.probing = True
        try:
            _run(model, calls, forward, pieces, recorded, lambda x: _direction(x, *x.shape[:2]))
        finally:
            calls.probing = False

    with _restored(model, parameters) as changed:
        run_together(COMPARISON, run, model, context, ranks)
        used = [name for name, x in model.named_parameters() if x.grad is not None]
        changed_buffers = changed()
        for piece in pieces:
            try:
                if used:
                    raise NotImplementedError(
                        f"parameters must be used by calls of their modules alone, but {', '.join(used[:3])} "
                        "have a gradient from elsewhere: chunks cannot be told apart there"
                    )
                if changed_buffers:
                    raise NotImplementedError(
                        f"buffers must stay as they are, but a forward changes {', '.join(changed_buffers[:3])}: {OFF}"
                    )
                handle = _handle(_Alone, context, [piece])
                _compare(model, calls, parameters, handle, forward, piece, (args, kwargs))
            except Exception as error:  # raised on every rank
                failures.append(error)

    compare(COMPARISON, {}, failures[0] if failures else None, ranks)


def _run(
    model: nn.Module, calls: ChunkedCalls, forward: Forward, pieces: Sequence[Piece], arguments: tuple[Any, Any],
    direction: Callable[[Tensor], Tensor],
) -> None:  # fmt: skip
    """Make a forward and a backward, and note what they do in some chunks. direction: the gradient of an output."""

    def insert(_: Forward, index: int, entry: int, chunk: int, gradient: Tensor) -> None:
        for piece in pieces:
            if (entry, chunk) == (piece.entry, piece.number):
                before = piece.gradients.get(index)
                piece.gradients[index] = gradient.clone() if before is None else before + gradient

    before, calls.insert = calls.insert, insert
    shape, (args, kwargs) = (forward.batch, forward.chunks.tokens), arguments
    try:
        with calls.within(forward), _digested(model, shape, pieces):
            values = tree_leaves(model(*args, **kwargs))
        outputs = [x for x in values if isinstance(x, Tensor) and x.shape[:2] == shape and x.requires_grad]
        torch.autograd.backward(outputs, [direction(x) for x in outputs])
    finally:
        calls.insert, calls.running = before, None


def _direction(like: Tensor, batch: int, tokens: int) -> Tensor:
    """Return a gradient (batch, tokens, ...) of an output, of which `like` has some rows."""
    rows = torch.arange(batch * tokens, device=like.device).view(batch, tokens, 1)
    columns = torch.arange(like[0, 0].numel(), device=like.device)
    return torch.cos(1.37 * rows + 0.61 * columns).view(batch, tokens, *like.shape[2:]).to(like.dtype)


def _compare(
    model: nn.Module, calls: ChunkedCalls, parameters: Sequence[Tensor], context: ContextParallel, forward: Forward,
    piece: Piece, arguments: tuple[Any, Any],
) -> None:  # fmt: skip
    """Raise NotImplementedError if the chunk alone has other bits than were recorded."""
    batch, tokens, rows = forward.batch, forward.chunks.tokens, piece.end - piece.begin

    def cut(x: Any) -> Any:
        if isinstance(x, Tensor) and x.shape[1:2] == (tokens,):
            return piece.of(x) if x.shape[0] == batch else x[:, piece.begin : piece.end].clone()
        if isinstance(x, Tensor) and x.shape == (tokens,):  # positions
            return x[piece.begin : piece.end].clone()
        return x

    alone = Piece(0, piece.number, 0, rows)
    chunk = Forward(context, ChunkRows(((0, rows),), (piece.number,), forward.chunks.count, rows), 1)
    _run(
        model, calls, chunk, [alone], tree_map(cut, _with_handle(arguments, context)),
        lambda x: piece.of(_direction(x, batch, tokens)),
    )  # fmt: skip
    for where, digest in alone.digests.items():
        if piece.digests.get(where, digest) != digest:
            raise NotImplementedError(_text(f"the output of {where[0]}", piece))
    for number, noted in enumerate(piece.attention):
        if noted.get("differs"):
            raise NotImplementedError(_text(f"the gradient of attention, in call {number}", piece))
    for name, index in _names(model, parameters):
        if not _same(piece.gradients.get(index), alone.gradients.get(index)):
            raise NotImplementedError(_text(f"the gradient of {name}", piece))


def _text(what: str, piece: Piece) -> str:
    return (
        f"{what} must not depend on the chunks beside one, but rows {piece.begin} to {piece.end - 1} alone have other "
        f"bits: dropout, what mixes tokens, what is compiled, or an operation before it, between modules, whose bits "
        f"depend on the number of tokens, cannot be the same on any number of ranks. {OFF}"
    )


@contextmanager
def no_random_numbers(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Raise NotImplementedError if random numbers are drawn inside, as by dropout that began after the comparison."""
    before = _random_states(parameters)
    yield
    if any(not torch.equal(x, y) for x, y in zip(before, _random_states(parameters), strict=True)):
        raise NotImplementedError(
            "the model must draw no random numbers, but this forward drew some: dropout, for one, cannot be the same "
            f"on any number of ranks. {OFF}"
        )


def _random_states(parameters: Sequence[Tensor]) -> list[Tensor]:
    devices = sorted({x.device.index for x in parameters if x.is_cuda})
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


# --- handles ---


class _Recording(ContextParallel):
    """A handle that records attention in some chunks."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        q, k, v = (x.view_as(x) for x in (q, k, v))
        out = super().attention(q, k, v, *args, **kwargs)
        for piece in self.__dict__["pieces"]:
            noted: dict[str, Tensor | int] = {"out": piece.of(out)}
            piece.attention.append(noted)
            for name, x in (("q", q), ("k", k), ("v", v), ("dout", out)):
                if x.requires_grad:
                    x.register_hook(partial(_note, noted, name, piece))
        return out


def _note(noted: dict[str, Tensor | int], name: str, piece: Piece, gradient: Tensor) -> None:
    part = piece.of(gradient)
    noted[name] = _digest(part) if name == "dout" else part


class _NoTransport:
    def __getattr__(self, name: str) -> NoReturn:
        raise NotImplementedError(f"the model must not send tokens between ranks but by attention: {OFF}")


class _Alone(ContextParallel):
    """A handle of a chunk alone, whose attention is the recorded one."""

    @property
    def tokens(self) -> int:
        piece = self.__dict__["pieces"][0]
        return piece.end - piece.begin

    @property
    def positions(self) -> Tensor:
        piece = self.__dict__["pieces"][0]
        return self.__dict__["whole"].positions[piece.begin : piece.end].clone()

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls = self.__dict__["calls"]
        return _Replayed.apply(q, k, v, self.__dict__["pieces"][0].attention[next(calls)])

    def agree(self, doing: str, compute: Callable[[], tuple[dict[str, object], T]]) -> T:
        return compute()[1]

    def raise_everywhere(self, error: Exception, name: str | None = None) -> NoReturn:
        raise error


class _Replayed(torch.autograd.Function):
    """The recorded attention of a chunk, and its recorded gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, noted: dict[str, Any]) -> Tensor:
        ctx.noted = noted
        return noted["out"].clone()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        ctx.noted["differs"] = ctx.noted.get("dout") != _digest(dout)
        return ctx.noted.get("q"), ctx.noted.get("k"), ctx.noted.get("v"), None


def _handle(kind: type[ContextParallel], context: ContextParallel, pieces: list[Piece]) -> ContextParallel:
    handle = kind.__new__(kind)
    cache: dict[Any, Any] = {}
    handle.__dict__.update(context.__dict__ | {"_cache": cache, "pieces": pieces, "whole": context})
    if kind is _Alone:
        handle.__dict__.update(transport=_NoTransport(), calls=iter(range(len(pieces[0].attention))))
    return handle


def _with_handle(values: Any, context: ContextParallel) -> Any:
    return tree_map(lambda x: context if isinstance(x, ContextParallel) else x, values)


# --- bits ---


@contextmanager
def _digested(model: nn.Module, shape: tuple[int, int], pieces: Sequence[Piece]) -> Iterator[None]:
    """Note the digests of the outputs of modules in some chunks."""
    hooks = [
        module.register_forward_hook(partial(_note_output, shape, pieces, name))
        for name, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _note_output(
    shape: tuple[int, int], pieces: Sequence[Piece], name: str, module: nn.Module, args: Any, output: Any
) -> None:
    for at, x in enumerate(tree_leaves(output)):
        if isinstance(x, Tensor) and x.shape[:2] == shape:
            for piece in pieces:
                key = f"{name or 'model'} ({type(module).__name__})" + (f", value {at}" if at else "")
                number = sum(where == key for where, _ in piece.digests)
                piece.digests[key, number] = _digest(piece.of(x))


def _digest(x: Tensor) -> int:
    """Return a number that another bit anywhere changes, but for chance."""
    bits = x.detach().contiguous().flatten().view(_INTEGERS[min(x.itemsize, 8)]).long()  # complex128: two integers
    return int((bits * (torch.arange(len(bits), device=x.device) * _FACTOR + 1)).sum())


def _same(x: Tensor | None, y: Tensor | None) -> bool:
    if x is None or y is None:
        return x is y
    return x.shape == y.shape and x.dtype == y.dtype and _digest(x) == _digest(y)


def _names(model: nn.Module, parameters: Sequence[Tensor]) -> Iterator[tuple[str, int]]:
    names = {id(x): name for name, x in model.named_parameters()}
    return ((names[id(x)], index) for index, x in enumerate(parameters))


@contextmanager
def _restored(model: nn.Module, parameters: Sequence[Tensor]) -> Iterator[Callable[[], list[str]]]:
    """Leave gradients, buffers and random numbers as they were. Yields a function that names changed buffers."""
    buffers = {name: (x, x.clone()) for name, x in model.named_buffers()}

    def changed() -> list[str]:
        now = dict(model.named_buffers())
        return [name for name, (x, before) in buffers.items() if now.get(name) is not x or not _same(x, before)]

    devices = sorted({x.device.index for x in parameters if x.is_cuda})
    places = [(module, dict(module._buffers)) for module in model.modules()]
    try:
        with torch.random.fork_rng(devices):
            yield changed
    finally:
        for module, own in places:
            module._buffers.update(own)
        with torch.no_grad():
            for x, before in buffers.values():
                x.copy_(before)
        for x in parameters:
            x.grad = None
