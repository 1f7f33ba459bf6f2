"""StepCase: the fields that ModelCase and TrainingCase share, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

from reference import shards, validators
from reference.pattern import Pattern
from reference.shards import Division, Shards
from verification.case import (
    DEVICES,
    DTYPES,
    EXCHANGES,
    ORDERS,
    ORDERS_BY_CHUNK,
    ORDERS_BY_DOCUMENT,
    TILE,
    division_of,
)
from verification.saved_fields import FLAG, INTEGERS, REAL, SavedFields, choice, instance, integer, optional

ARRANGEMENTS = ("contiguous", "strided")
CHECKPOINTING = ("none", "reentrant", "non-reentrant", "selective")
LABELS = ("all", "some", "shards", "ranks", "none")
OPTIMISERS = ("sgd", "adamw")
STEP_DTYPES = ("float64", "float32", "bfloat16")
WRAPPERS = ("none", "ddp", "fsdp2", "hsdp2")
STEP_ORDERS = (*ORDERS, *ORDERS_BY_DOCUMENT, *ORDERS_BY_CHUNK)


@dataclass(frozen=True, kw_only=True)
class Split(SavedFields):
    """Another division of a step's sequences among ranks, and what else may differ there. Raises ValueError."""

    world: int = field(metadata=integer(1, 64))
    data: int = field(metadata=integer(1))
    accumulation: int = field(metadata=integer(1))
    batch: int = field(metadata=integer(1))
    arrangement: str = field(metadata=choice(*ARRANGEMENTS))
    order: str = field(metadata=choice(*STEP_ORDERS))
    exchange: str = field(metadata=choice(*EXCHANGES))
    checkpointing: str = field(metadata=choice(*CHECKPOINTING))


@dataclass(frozen=True, kw_only=True)
class StepCase(SavedFields):
    """A training run of a few steps: its mesh, tokens, labels, wrapper and optimizer. Frozen, hashable, saved as JSON:
    any process rebuilds the same tokens and labels from it. `verification.models.ModelCase` describes the fields."""

    world: int = field(metadata=integer(1, 64))
    data: int = field(metadata=integer(1))
    arrangement: str = field(metadata=choice(*ARRANGEMENTS))
    tokens: int = field(metadata=integer(1, 4096))
    batch: int = field(metadata=integer(1, 64))
    order: str = field(metadata=choice(*STEP_ORDERS))
    cuts: tuple[int, ...] | None = field(metadata=INTEGERS)
    exchange: str = field(metadata=choice(*EXCHANGES))
    dtype: str = field(metadata=choice(*STEP_DTYPES))
    wrapper: str = field(metadata=choice(*WRAPPERS))
    accumulation: int = field(metadata=integer(1, 64))
    checkpointing: str = field(metadata=choice(*CHECKPOINTING))
    clipping: float | None = field(metadata=optional(REAL))
    optimiser: str = field(metadata=choice(*OPTIMISERS))
    steps: int = field(metadata=integer(1, 16))
    labels: str = field(metadata=choice(*LABELS))
    seed: int = field(metadata=integer(0, 2**31))
    device: str = field(default="cpu", metadata=choice(*DEVICES))
    # Tokens of a chunk: `SameWeights` in place of a wrapper, and layouts of whole chunks. None: neither.
    same_bits: int | None = field(default=None, metadata=optional(integer(1)))
    compares: bool = field(default=False, metadata=FLAG)  # `SameWeights` compares chunks before the first step
    # Ranks of a second run with the same sequences, which must have the same bits; None: there is none.
    other_ranks: Split | None = field(default=None, metadata=optional(instance(Split, "Split")))

    def __post_init__(self) -> None:
        super().__post_init__()
        validators.integer("data", self.data, 1, self.world)
        if self.world % self.data:
            raise ValueError(f"data is {self.data}; it must divide world, {self.world}")
        Pattern.dense(documents=self.lengths).validate_tokens(self.tokens)
        if self.cuts is not None:
            validators.offsets("cuts", self.cuts, self.context, self.tokens)
        self._check_chunks()

    def _check_chunks(self) -> None:
        chunk, by_chunk = self.same_bits, self.order in ORDERS_BY_CHUNK
        if by_chunk != (chunk is not None) or (by_chunk and self.cuts is not None):
            raise ValueError(
                f"order is {self.order!r}, cuts is {self.cuts} and same_bits is {chunk}; with same_bits order must be "
                f"one of {', '.join(ORDERS_BY_CHUNK)} and cuts None, without it another one"
            )
        if chunk is None:
            if self.compares:
                raise ValueError("compares is True; it must be False without same_bits")
            return
        if chunk % TILE[self.device]:
            raise ValueError(f"same_bits is {chunk}; it must be a multiple of {TILE[self.device]} on {self.device!r}")
        if self.wrapper != "none":
            raise ValueError(f"wrapper is {self.wrapper!r}; it must be 'none' with same_bits, {chunk}")
        if not all(self.shards().counts):
            raise ValueError(f"tokens is {self.tokens}; with same_bits, {chunk}, every rank must have a chunk")
        starts = self.positions() % chunk == 0
        fewest = min(int(starts[torch.from_numpy(held.copy())].sum()) for held in self.shards().positions)
        if self.compares and fewest * self.batch < 2:
            raise ValueError("compares is True; it must be False where a rank has a single chunk of one sequence")

    def _check_other_ranks(self) -> None:
        if self.other_ranks is not None and self.elsewhere.sequences != self.sequences:
            raise ValueError(
                f"other_ranks is {self.other_ranks}; it must have the {self.sequences} sequences of a step"
            )

    @property
    def sequences(self) -> int:
        """Sequences of a step."""
        return self.data * self.accumulation * self.batch

    @property
    def elsewhere(self) -> Self:
        """The run on the other ranks."""
        assert self.other_ranks is not None
        return replace(self, **self.other_ranks.to_dict(), cuts=None, other_ranks=None)

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """Lengths of the documents that each sequence is packed from; None: one, unpacked."""
        raise NotImplementedError

    @property
    def padded(self) -> bool:
        """True if rows end in padding."""
        return False

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks, ascending."""
        return tuple(range(self.world))

    @property
    def context(self) -> int:
        """Number of ranks that share a sequence."""
        return self.world // self.data

    @property
    def mesh(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each context group, by data rank: (data, context)."""
        if self.arrangement == "contiguous":
            return tuple(self.ranks[d * self.context : (d + 1) * self.context] for d in range(self.data))
        return tuple(self.ranks[d :: self.data] for d in range(self.data))

    def coordinates(self, rank: int) -> tuple[int, int]:
        """Return (data rank, index in the context group).

        Args:
            rank: global rank, 0 .. world - 1.
        """
        return next((d, group.index(rank)) for d, group in enumerate(self.mesh) if rank in group)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of products, and of the keys and values that are sent."""
        return DTYPES[self.dtype]

    @property
    def parameter_dtype(self) -> torch.dtype:
        """Dtype of the parameters in the optimizer."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    @property
    def fully_sharded(self) -> bool:
        """True if FSDP shards the parameters."""
        return self.wrapper in ("fsdp2", "hsdp2")

    @property
    def optimizer(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """Class of the optimizer, and its arguments."""
        if self.optimiser == "sgd":
            return torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}
        # AdamW divides a gradient by its size, so the rounding of one near 0 would become a full step: eps bounds that.
        return torch.optim.AdamW, {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-3, "weight_decay": 0.1}

    @property
    def documents(self) -> tuple[int, ...]:
        """Lengths of the documents; an unpacked sequence is one."""
        return (self.tokens,) if self.lengths is None else self.lengths

    def positions(self) -> torch.Tensor:
        """Return the position of each token within its document: (n,) int64."""
        return torch.cat([torch.arange(length) for length in self.documents])

    def at(self, step: int) -> Self:
        """Return the Case with the documents of a step in every step.

        Args:
            step: from 0.
        """
        return self

    def shards(self) -> Shards:
        """Return the positions that each index of a context group holds."""
        return shards.shards(*self.division())

    def division(self) -> Division:
        """Return the arguments of `reference.shards.shards`."""
        return division_of(self.order, self.tokens, self.context, self.cuts, self.seed, self.lengths, self.same_bits)
