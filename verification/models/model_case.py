"""ModelCase: all inputs of a training run of a user's model, except the model. Frozen, hashable, saved as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from reference import shards, validators
from reference.pattern import Pattern
from reference.shards import Division, Shards
from verification.case import EXCHANGES, ORDERS, SEEDED_ORDERS
from verification.training.declared import FLAG, INTEGERS, REAL, check_fields, choice, integer, optional, read_fields
from verification.training.training_case import ARRANGEMENTS, OPTIMISERS, WRAPPERS

MODEL_DTYPES = ("float64", "float32")
MODEL_LABELS = ("all", "some", "shards", "ranks")
MODEL_CHECKPOINTING = ("none", "non-reentrant", "selective")


@dataclass(frozen=True)
class ModelCase:
    """Training run of a few steps: all its inputs except the user's model.

    Args:
        world: number of ranks, 1 .. 64: data x context, where `context` ranks share each sequence.
        data: number of data ranks; divides world.
        arrangement: ranks of a context group: "contiguous" (0, 1, ...), or "strided" (0, data, 2 data, ...).
        tokens: length of each sequence, 1 .. 4096.
        batch: sequences of a data rank in a micro-batch, 1 .. 64.
        order: order in which tokens are divided among a context group, one of `verification.case.ORDERS`.
        cuts: context + 1 non-decreasing offsets into the order, from 0 to tokens; None: the order's own.
        packed: lengths of the documents that each sequence is packed from, tokens in all; None: one, unpacked.
        padding: whether rows end in tokens 0 without labels, up to half of a row. False with packed.
        labels: which labels are ignored beside those at ends of documents: "all": none; "some": a third;
            "shards": the shard of one rank in each context group; "ranks": all of one data rank, or of one micro-batch
            if there is a single data rank.
        exchange: of the `ContextParallel` handle: "ring", "direct" or "gather".
        dtype: of parameters and arithmetic, "float64" or "float32".
        wrapper: "none" (gradients are averaged by `ring.nn.average_gradients`), "ddp", "fsdp2" (over all ranks), or
            "hsdp2" (FSDP2 within a context group, replicated over the data ranks).
        accumulation: micro-batches of a step, 1 .. 64.
        checkpointing: of each layer: "none", "non-reentrant", or "selective", which keeps the outputs of attention.
        clipping: greatest norm of the gradients, >= 0; None: they are not clipped.
        optimiser: "sgd", with momentum, or "adamw".
        steps: number of steps, 1 .. 16.
        seed: of initial parameters, tokens, labels and random orders, 0 .. 2^31.

    Raises:
        ValueError: a field has a wrong value. The message names the field, its value and the allowed values.
    """

    world: int = field(metadata=integer(1, 64))
    data: int = field(metadata=integer(1))
    arrangement: str = field(metadata=choice(*ARRANGEMENTS))
    tokens: int = field(metadata=integer(1, 4096))
    batch: int = field(metadata=integer(1, 64))
    order: str = field(metadata=choice(*ORDERS))
    cuts: tuple[int, ...] | None = field(metadata=optional(INTEGERS))
    packed: tuple[int, ...] | None = field(metadata=optional(INTEGERS))  # lengths of documents; None: one, unpacked
    padding: bool = field(metadata=FLAG)  # rows end in tokens 0 without labels, up to half of a row
    labels: str = field(metadata=choice(*MODEL_LABELS))
    exchange: str = field(metadata=choice(*EXCHANGES))
    dtype: str = field(metadata=choice(*MODEL_DTYPES))
    wrapper: str = field(metadata=choice(*WRAPPERS))
    accumulation: int = field(metadata=integer(1, 64))
    checkpointing: str = field(metadata=choice(*MODEL_CHECKPOINTING))
    clipping: float | None = field(metadata=optional(REAL))
    optimiser: str = field(metadata=choice(*OPTIMISERS))
    steps: int = field(metadata=integer(1, 16))
    seed: int = field(metadata=integer(0, 2**31))

    def __post_init__(self) -> None:
        check_fields(self)
        validators.integer("data", self.data, 1, self.world)
        if self.world % self.data:
            raise ValueError(f"data is {self.data}; it must divide world, {self.world}")
        if self.padding and self.packed is not None:
            raise ValueError(f"padding is True; it must be False with packed {self.packed}")
        Pattern.dense(documents=self.packed).validate_tokens(self.tokens)
        cuts = (0, self.tokens) if self.cuts is None else self.cuts
        number = len(cuts) if self.cuts is None else self.context + 1
        if len(cuts) != number or (cuts[0], cuts[-1]) != (0, self.tokens) or list(cuts) != sorted(cuts):
            raise ValueError(f"cuts is {cuts}; it must be {number} non-decreasing offsets from 0 to {self.tokens}")

    @property
    def device(self) -> str:
        """Device of all ranks: the CPU."""
        return "cpu"

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
    def documents(self) -> tuple[int, ...]:
        """Lengths of the documents; an unpacked sequence is one."""
        return (self.tokens,) if self.packed is None else self.packed

    def at(self, step: int) -> ModelCase:
        """Return the Case of a step: this one, since all steps have the same documents.

        Args:
            step: from 0.
        """
        return self

    def shards(self) -> Shards:
        """Return the positions that each index of a context group holds."""
        return shards.shards(*self.division())

    def without_empty_shards(self) -> ModelCase:
        """Return the nearest ModelCase in which every rank has tokens, for `Setup.claims`."""
        if 0 not in self.shards().counts:
            return self
        return replace(self, cuts=None, packed=None, tokens=max(self.tokens, 2 * self.world))

    def division(self) -> Division:
        """Return the arguments of `reference.shards.shards`."""
        seed = self.seed if self.order in SEEDED_ORDERS else 0
        return self.order, self.tokens, self.context, self.cuts, seed, None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object; `from_dict` turns it back into an equal ModelCase."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, data: object) -> ModelCase:
        """Read the JSON object that `to_dict` returns.

        Args:
            data: a dict of all fields by name.

        Raises:
            ValueError: data is something else, a field is unknown or missing, or its value is wrong.
        """
        return cls(**read_fields(cls, "a ModelCase", data))
