"""ModelCase: all inputs of a training run of a user's model, except the model. Frozen, hashable, saved as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from verification.models.step_case import StepCase
from verification.saved_fields import FLAG, INTEGERS, choice, integer

MODEL_DTYPES = ("float64", "float32")


@dataclass(frozen=True, kw_only=True)
class ModelCase(StepCase):
    """Training run of a few steps: all its inputs except the user's model.

    Args:
        world: number of ranks, 1 .. 64: data x context, where `context` ranks share each sequence.
        data: number of data ranks; divides world.
        arrangement: ranks of a context group: "contiguous" (0, 1, ...), or "strided" (0, data, 2 data, ...).
        tokens: length of each sequence, 1 .. 4096.
        batch: sequences of a data rank in a micro-batch, 1 .. 64.
        order: order in which tokens are divided among a context group, one of `STEP_ORDERS`.
        cuts: context + 1 non-decreasing offsets into the order, from 0 to tokens; None: the order's own.
        packed: lengths of the documents that each sequence is packed from, tokens in all; None: one, unpacked.
        padding: whether rows end in tokens 0 without labels, up to half of a row. False with packed.
        labels: which labels are ignored beside those at ends of documents: "all": none; "some": a third;
            "shards": the shard of one rank in each context group; "ranks": all of one data rank, or of one micro-batch
            if there is a single data rank; "none": every label, which a Setup never gets.
        exchange: of the `ContextParallel` handle: "ring", "direct" or "gather".
        dtype: of parameters and arithmetic, "float64" or "float32".
        wrapper: "none" (gradients are averaged by `ring.nn.average_gradients`), "ddp", "fsdp2" (over all ranks), or
            "hsdp2" (FSDP2 within a context group, replicated over the data ranks).
        accumulation: micro-batches of a step, 1 .. 64.
        checkpointing: of each layer: "none", "reentrant", "non-reentrant", or "selective", which keeps the outputs of
            attention.
        clipping: greatest norm of the gradients, >= 0; None: they are not clipped.
        optimiser: "sgd", with momentum, or "adamw".
        steps: number of steps, 1 .. 16.
        seed: of initial parameters, tokens, labels and random orders, 0 .. 2^31.
        device: of all ranks, "cpu" or "cuda".
        held: sequences of an evaluation after the last step, 0 .. 64; 0: none.
        resumed_after: number of steps, below `steps`, whose checkpoint starts the run; 0: it starts anew.
        same_bits: tokens of a chunk of `ring.nn.SameWeights`, which takes the wrapper's place, with an order of whole
            chunks; None: neither.
        compares: whether `SameWeights` compares chunks before the first step. False without same_bits.
        other_ranks: ranks of a second run of the same sequences, which must have the same bits; None: there is none.
        context_before: ranks of a context group that saved the checkpoint, on CPUs, 1 .. 64. `data` is the same.

    Raises:
        ValueError: a field has a wrong value. The message names the field, its value and the allowed values.
    """

    packed: tuple[int, ...] | None = field(metadata=INTEGERS)
    padding: bool = field(metadata=FLAG)
    dtype: str = field(metadata=choice(*MODEL_DTYPES))
    held: int = field(default=0, metadata=integer(0, 64))
    resumed_after: int = field(default=0, metadata=integer(0))
    context_before: int = field(default=1, metadata=integer(1, 64))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resumed_after >= self.steps:
            raise ValueError(f"resumed_after is {self.resumed_after}; it must be below steps, {self.steps}")
        if self.padding and self.packed is not None:
            raise ValueError(f"padding is True; it must be False with packed {self.packed}")
        if self.other_ranks is not None and (self.held or self.resumed_after):
            raise ValueError(
                f"held is {self.held}, resumed_after {self.resumed_after}; both must be 0 with other_ranks"
            )
        self._check_other_ranks()

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """Lengths of the documents that each sequence is packed from; None: one, unpacked."""
        return self.packed

    @property
    def padded(self) -> bool:
        """True if rows end in padding."""
        return self.padding

    def before(self) -> ModelCase:
        """Return the run that saved the checkpoint. Its batches are those of this ModelCase."""
        return replace(self, world=self.data * self.context_before, cuts=None, device="cpu")

    def without_empty_shards(self) -> ModelCase:
        """Return the nearest ModelCase in which every rank has tokens, for `Setup.claims`."""
        if 0 not in self.shards().counts:
            return self
        return replace(self, cuts=None, packed=None, tokens=max(self.tokens, 2 * self.world))
