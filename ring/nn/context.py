"""The handle that modules take: over which ranks a batch's sequence is sharded, how, and by which exchange.

It is made once for a layout and never changes, and it is given to a module's forward like the batch itself. So a
forward that activation checkpointing computes again meets the layout that the first one had.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from reference.documents import Documents, begins, first_few
from reference.pattern import Pattern
from ring.attention import attend_packed
from ring.comm.group import transport_over
from ring.comm.process_group import ProcessGroupTransport
from ring.comm.transport import Transport
from ring.consensus import compare
from ring.layout import Layout
from ring.validation import refuse_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


def _pattern_over(layout: Layout, documents: tuple[int, ...] | None) -> Pattern | None:
    """A pattern over the documents. ValueError for what are none, or do not add up to the layout's tokens."""
    if documents is None:
        return None
    found = Pattern.dense(documents=documents)
    found.validate_tokens(layout.n)
    return found


class ContextParallel:
    """A sequence sharded over the ranks of a context-parallel group. Immutable, and equal to itself only.

    layout    which positions each rank holds
    group     a process group, a `DeviceMesh` of one dimension, a `Transport`, or None: the default group, or no group
              for a layout of one rank
    transport over that group
    exchange, bucket, kernel, check: as for `ring.ring_attention`
    documents the lengths of the documents that the sequence is packed from, in place of those of modules' patterns;
              None: as the patterns say. `with_documents` makes a handle for each packed batch.

    Raises ValueError for documents that do not add up to the layout's tokens, for a layout of another number of ranks
    than the group has, for a mesh of more dimensions, and on a process that is not in the group.
    """

    # Not a dataclass: wrappers that cast a forward's inputs rebuild those.
    layout: Layout
    group: dist.ProcessGroup | DeviceMesh | Transport | None
    exchange: str
    bucket: int | None
    kernel: str
    check: bool
    transport: Transport
    _packed: Pattern | None  # any pattern over the documents, if there are some

    def __init__(
        self,
        layout: Layout,
        group: dist.ProcessGroup | DeviceMesh | Transport | None = None,
        *,
        exchange: str = "direct",
        bucket: int | None = None,
        kernel: str = "auto",
        check: bool = True,
        documents: tuple[int, ...] | None = None,
    ) -> None:
        if not isinstance(layout, Layout):
            raise ValueError(f"layout must be a Layout, got {layout!r}")
        packed = _pattern_over(layout, documents)
        transport = transport_over(group, layout.world_size)
        if layout.world_size != transport.world_size:
            raise ValueError(
                f"layout must be for the {transport.world_size} ranks of the group, got one for {layout.world_size}"
            )
        kept: dict[Hashable, object] = {}
        self.__dict__.update(
            layout=layout, group=group, exchange=exchange, bucket=bucket, kernel=kernel, check=check,
            transport=transport, _packed=packed, _kept=kept,
        )  # fmt: skip

    def with_documents(self, documents: tuple[int, ...] | None) -> ContextParallel:
        """The same handle for a sequence that is packed from these documents.

        Raises ValueError for documents that do not add up to the layout's tokens.
        """
        found = ContextParallel.__new__(ContextParallel)
        kept: dict[Hashable, object] = {}
        found.__dict__.update(self.__dict__ | {"_packed": _pattern_over(self.layout, documents), "_kept": kept})
        return found

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{name} cannot be set: make another ContextParallel")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{name} cannot be deleted: make another ContextParallel")

    def __copy__(self) -> ContextParallel:
        """Itself: a module's copy runs over the same ranks."""
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> ContextParallel:
        """Likewise."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a ContextParallel cannot be pickled, since its group is of this process: make it anew, and save a "
            "module's state_dict() in place of the module"
        )

    def __repr__(self) -> str:
        packed = "" if self.documents is None else f", documents={first_few(self.documents)}"
        return (
            f"ContextParallel(rank {self.rank} of {self.world_size}, {self.tokens} of {self.layout.n} tokens, "
            f"exchange={self.exchange!r}, bucket={self.bucket}, kernel={self.kernel!r}, check={self.check}{packed})"
        )

    @property
    def documents(self) -> Documents | None:
        """Their lengths."""
        return None if self._packed is None else self._packed.packed

    @property
    def rank(self) -> int:
        """In the group."""
        return self.transport.rank

    @property
    def world_size(self) -> int:
        return self.transport.world_size

    @property
    def tokens(self) -> int:
        """That this rank holds."""
        return self.layout.counts[self.rank]

    @property
    def positions(self) -> Tensor:
        """The global positions of this rank's tokens, or with documents those within their documents: (tokens,) int64,
        on the CPU.
        """
        found = self.layout.positions(self.rank)
        return found if self.documents is None else found - begins(self.documents, found)

    def positions_on(self, device: torch.device) -> Tensor:
        """The same on a device: one tensor for all callers, who do not change it."""
        return self.cached(("positions", device), lambda: self.positions.to(device))

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returned when it was first asked for by this key: what a sequence's layers share."""
        kept: dict[Hashable, T] = self.__dict__["_kept"]
        if torch.compiler.is_compiling() and key not in kept:
            return make()  # what a graph computes may lie in memory that its next run uses again
        if key not in kept:
            with torch.inference_mode(False), torch.no_grad():  # usable in training, whoever asks first
                kept[key] = make()
        return kept[key]

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's part of a tensor of the whole sequence. ValueError for another length along `dim`."""
        return self.layout.shard(x, self.rank, dim)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, *, scale: float | None = None, name: str | None = None
    ) -> Tensor:
        """`ring_attention` on this rank's shards: q (B, N, H, D), k and v (B, N, Hk, D) -> like q."""
        # Not self.group: None, or a mesh, may have become another group than the one whose ranks the shards are for.
        group: dist.ProcessGroup | Transport | None = self.transport
        if isinstance(self.transport, ProcessGroupTransport) and self.transport is not self.group:
            group = self.transport.group
        settings: dict[str, Any] = {
            "layout": self.layout, "group": group, "exchange": self.exchange,
            "bucket": self.bucket, "kernel": self.kernel, "scale": scale, "check": self.check, "name": name,
        }  # fmt: skip
        return attend_packed(self._packed, q, k, v, pattern, **settings)

    def check_local(self, name: str, x: Tensor, shape: tuple[str, ...], dim: int) -> None:
        """Raise unless x has the dimensions that `shape` names and, along `dim`, the tokens of this rank.

        ValueError, NotImplementedError: as `ring_attention` raises for a wrong tensor. name: what the caller calls it.
        """
        refuse_dtensor(name, x)
        if not isinstance(x, Tensor) or x.dim() != len(shape):
            given = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(type(x))
            raise ValueError(f"{name} must be {self._wanted(shape)}, got {given}")
        found = x.shape[dim]
        # Within torch.compile a comparison would bind the graph to this length; the operator compares, too.
        if torch.compiler.is_compiling() or found == self.tokens:
            return
        whole = ", the whole sequence: give each rank its shard, as shard_batch and context.shard make it"
        raise ValueError(f"{name} must be {self._wanted(shape)}, got {found}{whole if found == self.layout.n else ''}")

    def _wanted(self, shape: tuple[str, ...]) -> str:
        return f"a ({', '.join(shape)}) tensor with the {self.tokens} tokens of this rank"

    def agree(self, doing: str, check: Callable[[], dict[str, object]]) -> None:
        """Raise one error on every rank if `check` raises on any of them, or returns another signature on some. Without
        `self.check` only what `check` raises on this rank. doing: what errors say that this rank is doing.
        """
        calls = self.transport.calls
        with calls.lock():
            call = calls.begin(doing)
            error: Exception | None = None
            signature: dict[str, object] = {}
            try:
                if self.world_size > 1:
                    calls.check_thread(call)
                signature = check()
            except Exception as found:  # of any type: the other ranks must hear of it
                error = found
            if self.check:
                compare(str(call), signature, error, self.transport)
            elif error is not None:
                raise error

    def raise_everywhere(self, error: Exception, name: str | None = None) -> NoReturn:
        """Raise this rank's error in place of a call of `attention`, to which the other ranks come or have come.

        They raise the same error there, or this rank theirs if it is of an earlier rank. Without `check` only this
        rank raises, and the others may wait. name: of the call.
        """
        if torch.compiler.is_compiling():  # no rank runs anything yet
            raise error
        calls = self.transport.calls
        with calls.lock():
            call = calls.begin(name)
            if self.check:
                compare(call.forward, {}, error, self.transport)
        raise error
