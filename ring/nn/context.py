"""The handle that modules take: ranks, layout and exchange of a sharded sequence.

Make it once for a layout; it never changes. It is an argument of a module's forward, like the batch itself. A forward
that activation checkpointing recomputes therefore sees the same layout as the original.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from reference.documents import Documents, begins, checked_documents, first_few
from reference.pattern import Pattern, numbered_pattern
from ring.attention import attend_packed
from ring.comm.group import transport_over
from ring.comm.process_group import ProcessGroupTransport
from ring.comm.transport import Transport
from ring.consensus import agreed_result, compare, is_joint
from ring.layout import Layout, numbered_layout
from ring.validation import refuse_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
PLAIN = tuple(Pattern.dense(causal).text for causal in (True, False))  # patterns that a handle's mask replaces


def _positions(layout: Layout, rank: int, packed: Pattern | None) -> Tensor:
    """Global positions of a rank's tokens, or those within the documents or the tree of `packed`: (tokens,) int64, on
    the CPU.
    """
    positions = layout.positions(rank)
    if packed is not None and (packed.depths or packed.copies):
        return packed.positions(layout.n)[positions]
    return positions if packed is None or packed.packed is None else positions - begins(packed.packed, positions)


@torch.library.custom_op("ring::positions", mutates_args=())
def positions_in_graph(x: Tensor, *, layout: int, rank: int, packed: int) -> Tensor:
    """Return the positions of x (B, tokens, ...), (tokens,) int64 on its device, by the number of a layout and that of
    the pattern with the documents; 0: none. A graph calls it, so that positions are no constants there.

    Raises ValueError for another number of tokens.
    """
    positions = _positions(numbered_layout(layout), rank, numbered_pattern(packed) if packed else None)
    if len(positions) != x.shape[1]:
        raise ValueError(f"x must have the {len(positions)} tokens of this rank, got {x.shape[1]}")
    return positions.to(x.device)


@positions_in_graph.register_fake
def _(x: Tensor, **_: int) -> Tensor:
    return x.new_empty((x.shape[1],), dtype=torch.int64)


def _pattern_over(layout: Layout, documents: tuple[int, ...] | None, pattern: Pattern | None = None) -> Pattern | None:
    """A pattern over the documents, with the slices of `pattern`, and its own documents in place of None. ValueError
    if they are invalid or do not add up to the layout's tokens.
    """
    if documents is None and pattern is None:
        return None
    over = Pattern.dense(documents=documents) if pattern is None else pattern
    if documents is not None:
        over = replace(over, documents=documents)
    over.validate_tokens(layout.n)
    return over


def _check_same_documents(pattern: Pattern, documents: Documents | None) -> None:
    """Raise ValueError for a pattern over other documents than a handle's, beside slices: these fit one of both."""
    if pattern.documents is not None and pattern.documents != documents:
        raise ValueError(
            f"documents of the pattern must be those of the handle or batch, {first_few(documents or ())}, or None "
            f"where one of both has slices, which are positions in these, got {first_few(pattern.documents)}: give the "
            "pattern's constructor the documents of the batch"
        )


class ContextParallel:
    """A sequence sharded over the ranks of a context-parallel group. Immutable; compares by identity.

    Args:
        layout: positions of each rank.
        group: a process group, a `DeviceMesh` of one dimension, a `Transport`, or None: the default group, if any.
        exchange: "direct" (needed keys, from their owner), "direct-kept" (the same, kept for the backward), "ring"
            (neighbour to neighbour), "gather" (all keys), "all-to-all" (heads for rows), "all-to-all-kept", two of
            them, as "all-to-all:4+ring" or, by hosts, "all-to-all+ring", or "auto", the fastest by prediction (see
            `ring_attention`).
        bucket: maximum key/value tokens per receive buffer and kernel call; None: chosen by a memory budget.
        kernel: "auto", "math", "flash" or, on GPUs, "cudnn" or "fa4".
        same_bits: tokens of a chunk, for attention with the same bits on any number of ranks, or None; the layout holds
            whole chunks of the documents, as `Layout.whole_chunks` (see `ring_attention`).
        check: compare the ranks' arguments before any tensor moves. Without it a wrong call may cause a hang.
        documents: lengths of the documents that the sequence is packed from, which replace those of modules' patterns;
            None: those of the patterns. `with_documents` makes a handle for each packed batch.

    Raises:
        ValueError: documents do not add up to the layout's tokens, the layout's number of ranks is not the group's, the
            mesh has several dimensions, or the process is not in the group.
    """

    # Not a dataclass: wrappers that cast a forward's inputs would rebuild it.
    layout: Layout
    group: dist.ProcessGroup | DeviceMesh | Transport | None
    exchange: str
    bucket: int | None
    kernel: str
    same_bits: int | None
    check: bool
    transport: Transport
    _packed: Pattern | None  # any pattern over the documents, if there are any

    def __init__(
        self,
        layout: Layout,
        group: dist.ProcessGroup | DeviceMesh | Transport | None = None,
        *,
        exchange: str = "direct",
        bucket: int | None = None,
        kernel: str = "auto",
        same_bits: int | None = None,
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
        cache: dict[Hashable, object] = {}
        self.__dict__.update(
            layout=layout, group=group, exchange=exchange, bucket=bucket, kernel=kernel, same_bits=same_bits,
            check=check, transport=transport, _packed=packed, _cache=cache,
        )  # fmt: skip

    def with_documents(self, documents: tuple[int, ...] | None) -> ContextParallel:
        """Return a handle with the same layout, group and settings for a sequence packed from these documents.

        Args:
            documents: their lengths, which add up to the layout's tokens; None: those of the patterns.

        Raises:
            ValueError: the documents do not add up to the layout's tokens, or are not parts of those of the handle's
                pattern, which its slices fit.
        """
        over, own = _pattern_over(self.layout, documents, self.pattern), self.documents
        if self.pattern is not None and own is not None and over is not None and over.packed is not None:
            parts = set(accumulate(over.packed)).issuperset(accumulate(own))  # which only hide pairs, as of padding
            if not parts or over.copies:
                _check_same_documents(self.pattern, over.packed)
        return self._over(over)

    def with_pattern(self, pattern: Pattern, documents: tuple[int, ...] | None = None) -> ContextParallel:
        """Return a handle with the same layout, group and settings for a sequence with this mask, as of one batch.

        It replaces the plain attention of modules, causal or not. Positions are those of the pattern: depths in a tree.

        Args:
            pattern: with slices, as `Pattern.tree` and `Pattern.slices` make it. Without documents it has those of
                the handle.
            documents: in place of the handle's.

        Raises:
            ValueError: pattern is no such pattern, reaches beyond the layout's tokens, or has other documents than the
                handle.
        """
        if not isinstance(pattern, Pattern) or not pattern.has_slices:
            raise ValueError(f"pattern must be a Pattern with slices, as Pattern.tree(...), got {pattern!r}")
        if documents is None and self.pattern is None:  # not those of a pattern that is replaced
            documents = self.documents
        if documents is not None and not pattern.depths:
            _check_same_documents(pattern, checked_documents(documents))
        return self._over(_pattern_over(self.layout, documents, pattern))

    def _over(self, packed: Pattern | None) -> ContextParallel:
        context = type(self).__new__(type(self))
        cache: dict[Hashable, object] = {}
        context.__dict__.update(self.__dict__ | {"_packed": packed, "_cache": cache})
        return context

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{name} cannot be set: make another ContextParallel")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{name} cannot be deleted: make another ContextParallel")

    def __copy__(self) -> ContextParallel:
        """Return self: a module's copy runs over the same ranks."""
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> ContextParallel:
        """Return self, as `__copy__` does."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a ContextParallel cannot be pickled, since its group belongs to this process: make a new one, and save a "
            "module's state_dict() instead of the module"
        )

    def __repr__(self) -> str:
        packed = "" if self.documents is None else f", documents={first_few(self.documents)}"
        packed = packed if self.same_bits is None else f", same_bits={self.same_bits}{packed}"
        return (
            f"ContextParallel(rank {self.rank} of {self.world_size}, {self.tokens} of {self.layout.n} tokens, "
            f"exchange={self.exchange!r}, bucket={self.bucket}, kernel={self.kernel!r}, check={self.check}{packed})"
        )

    @property
    def documents(self) -> Documents | None:
        """Lengths of the documents, or None."""
        return None if self._packed is None else self._packed.packed

    @property
    def pattern(self) -> Pattern | None:
        """The pattern of `with_pattern`, or None."""
        return self._packed if self._packed is not None and self._packed.has_slices else None

    @property
    def rank(self) -> int:
        """Number of this rank in the group."""
        return self.transport.rank

    @property
    def first_rank(self) -> int:
        """Number in the world of the group's first rank, by which ranks of a batch tell context groups apart."""
        if isinstance(self.transport, ProcessGroupTransport):
            return dist.get_process_group_ranks(self.transport.group)[0]
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return self.transport.world_size

    @property
    def tokens(self) -> int:
        """Number of tokens on this rank."""
        return self.layout.counts[self.rank]

    @property
    def positions(self) -> Tensor:
        """Global positions of this rank's tokens, or positions within documents or, in a tree, depths: (tokens,) int64,
        on the CPU.
        """
        return _positions(self.layout, self.rank, self._packed)

    def positions_on(self, device: torch.device) -> Tensor:
        """Return `positions`, (tokens,) int64, on a device: one tensor for all callers, who must not change it.

        Args:
            device: of the result.
        """
        return self.cached(("positions", device), lambda: self.positions.to(device))

    def positions_of(self, x: Tensor) -> Tensor:
        """Return `positions_on` the device of x, also while a graph is traced for a handle that has not cached them.

        Args:
            x: (B, tokens, ...) with this rank's tokens.
        """

        def traced() -> Tensor:
            packed = 0 if self._packed is None else self._packed.number
            positions: Tensor = torch.ops.ring.positions(x, layout=self.layout.number, rank=self.rank, packed=packed)
            return positions

        key = "positions", x.device
        return self.cached(key, traced) if torch.compiler.is_compiling() else self.positions_on(x.device)

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return make(), cached by key: the layers of a sequence share it.

        Args:
            key: of the value in the cache.
            make: computes the value.
        """
        cache: dict[Hashable, T] = self.__dict__["_cache"]
        if torch.compiler.is_compiling() and key not in cache:
            return make()  # do not cache: the graph's next run may reuse the memory of its outputs
        if key not in cache:
            with torch.inference_mode(False), torch.no_grad():  # usable in training, even if first called in inference
                cache[key] = make()
        return cache[key]

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's part of a tensor of the whole sequence: a new tensor.

        Args:
            x: any shape, with the layout's n tokens along `dim`.
            dim: dimension of the tokens.

        Raises:
            ValueError: x has another length along `dim`.
        """
        return self.layout.shard(x, self.rank, dim)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pattern: Pattern,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        name: str | None = None,
    ) -> Tensor:
        """Return `ring.ring_attention` of this rank's shards under this handle's settings: (B, N, H, Dv) in q's dtype.

        Args:
            q: (B, N, H, D) with this rank's N tokens, in fp64, fp32, bf16 or fp16.
            k: (B, N, Hk, D); query head h reads head h // (H / Hk).
            v: (B, N, Hk, Dv).
            pattern: the attention mask. Its documents are replaced by the handle's, if that has any. A handle with
                a pattern has it in place of a plain one, and takes no other.
            scale: factor of the scores; None: D ** -0.5.
            softcap: bound t of the scores, t tanh(score / t); None: no bound.
            sinks: (H,), a score of each head that every row sees, with value 0; None: none.
            name: label of this call in errors, as "layer 3"; the ranks compare it.

        Raises:
            ValueError, NotImplementedError: an argument is wrong on some rank. Every rank raises the same error.
            RuntimeError: a rank, which the error names, did not come within the timeout.
        """
        # Not self.group: None or a mesh may meanwhile denote another group than the one that the shards are for.
        group: dist.ProcessGroup | Transport | None = self.transport
        if isinstance(self.transport, ProcessGroupTransport) and self.transport is not self.group:
            group = self.transport.group
        settings: dict[str, Any] = {
            "layout": self.layout, "group": group, "exchange": self.exchange,
            "bucket": self.bucket, "kernel": self.kernel, "scale": scale, "softcap": softcap, "sinks": sinks,
            "same_bits": self.same_bits, "check": self.check, "name": name,
        }  # fmt: skip
        try:
            self._check_pattern(pattern)
        except ValueError as error:
            self.raise_everywhere(error, name)
        return attend_packed(self._packed, q, k, v, pattern, **settings)

    def _check_pattern(self, pattern: object) -> None:
        """Raise for a pattern beside the handle's, or one whose rotary positions are not the handle's."""
        if not isinstance(pattern, Pattern):
            return  # the call itself refuses it
        if self.pattern is not None and (pattern.has_slices or pattern.text not in PLAIN):
            raise ValueError(
                "pattern must be plain attention where the handle has a pattern, which replaces it (with_pattern), got "
                f"one with a window, segments, rates or slices: {first_few(pattern.branches)}"
            )
        either = pattern.has_slices or self.pattern is not None
        if either and pattern.documents is not None and self._packed is not None:  # in this order: graphs guard each
            _check_same_documents(pattern, self.documents)
        if (pattern.depths or pattern.copies) and self.pattern is None:
            raise ValueError(
                f"pattern of {'a tree' if pattern.depths else 'noisy frames'} must be the handle's, so that rotary "
                "positions are its own and not places: write "
                "shard_batch(context, tokens, labels, pattern=pattern), or context.with_pattern(pattern)"
            )

    def check_local(self, name: str, x: Tensor, shape: tuple[str, ...], dim: int) -> None:
        """Validate that x has the dimensions of `shape` and, along `dim`, the tokens of this rank.

        Args:
            name: of x, in the message.
            x: any value.
            shape: a word for each dimension, as "batch".
            dim: the dimension of the tokens.

        Raises:
            ValueError, NotImplementedError: x is no such tensor; x is a DTensor.
        """
        refuse_dtensor(name, x)
        if not isinstance(x, Tensor) or x.dim() != len(shape):
            got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(type(x))
            raise ValueError(f"{name} must be {self._local_shape(shape)}, got {got}")
        tokens = x.shape[dim]
        # Under torch.compile a comparison would specialize the graph to this length; the operator compares as well.
        if torch.compiler.is_compiling() or tokens == self.tokens:
            return
        whole = ", the whole sequence: give each rank its shard, from shard_batch or context.shard"
        raise ValueError(
            f"{name} must be {self._local_shape(shape)}, got {tokens}{whole if tokens == self.layout.n else ''}"
        )

    def _local_shape(self, shape: tuple[str, ...]) -> str:
        return f"a ({', '.join(shape)}) tensor with the {self.tokens} tokens of this rank"

    def agree(self, doing: str, compute: Callable[[], tuple[dict[str, object], T]]) -> T:
        """Return what this rank computes for a collective call, once all ranks of the group agree on the call.

        Args:
            doing: name of the call in errors.
            compute: raises for a wrong argument; returns the values that must be equal on all ranks, by name, and the
                result.

        Raises:
            Exception: `compute` raised on some rank, or the values differ. Every rank raises the same error; without
                `self.check` this rank alone raises its own.
        """
        calls = self.transport.calls
        with calls.lock():
            return agreed_result(calls.begin(doing), compute, self.transport, self.check)

    def raise_everywhere(self, error: Exception, name: str | None = None) -> NoReturn:
        """Raise this rank's error instead of a call of `attention`, in which the other ranks are or will be.

        They raise the same error there; if several ranks have errors, all raise that of the first of these ranks.
        Without `check` only this rank raises, and the others may wait. An error that they raised there already is
        raised as it is.

        Args:
            error: to raise.
            name: of the call of `attention`.
        """
        if torch.compiler.is_compiling() or is_joint(error, self.transport):  # nothing runs while a graph is traced
            raise error
        calls = self.transport.calls
        with calls.lock():
            call = calls.begin(name)
            if self.check:
                compare(call.forward, {}, error, self.transport)
        raise error


def checked_context(
    context: object, required: str = "a ContextParallel, an argument of the module or of its forward", instead: str = ""
) -> ContextParallel:
    """Return the handle; ValueError, on this rank alone, for anything else: without it no rank can be reached."""
    if not isinstance(context, ContextParallel):
        raise ValueError(f"context must be {required}, got {context!r}{instead}")
    return context
