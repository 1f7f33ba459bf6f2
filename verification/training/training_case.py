"""TrainingCase: all inputs of a training run of one of the project's own models."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from reference import validators
from reference.pattern import Pattern
from verification.models.step_case import STEP_ORDERS, Split, StepCase
from verification.saved_fields import FLAG, INTEGERS, choice, instance, integer, optional
from verification.training.training_model import Model

HANDLES = ("recorded", "group", "mesh")
COMPILED = ("no", "aot_eager")
LOSSES = ("mean", "scaled", "given")
PACKED_BY = ("batch", "handle")


@dataclass(frozen=True, kw_only=True)
class OtherRanks(Split):
    """A Split with another bucket."""

    bucket: int | None = field(metadata=optional(integer(1)))


@dataclass(frozen=True, kw_only=True)
class TrainingCase(StepCase):
    """One training run of a few steps. dtype "bfloat16": float32 parameters, with the wrapper's mixed precision
    (autocast, or FSDP's policy). Raises ValueError, naming the field, its value and the allowed values."""

    model: Model = field(metadata=instance(Model, "Model"))
    # The attention mask of every layer, with the documents that each sequence is packed from, if any.
    pattern: Pattern = field(metadata=instance(Pattern, "reference.Pattern"))
    bucket: int | None = field(metadata=optional(integer(1)))  # as in a `verification.case.Case`
    # The group of the context handle: "recorded", a transport that records its messages; "group", the process group;
    # "mesh", the `DeviceMesh` of one dimension.
    handle: str = field(metadata=choice(*HANDLES))
    # Order of the layout after a resume: a checkpoint after step one is loaded into a new model, optimiser and mesh.
    # There all ranks share each sequence, in this order, in even shards.
    resumed: str | None = field(default=None, metadata=optional(choice(*STEP_ORDERS)))
    # Backend of `torch.compile(fullgraph=True)`, applied to the whole model, or with FSDP to each layer before FSDP
    # wraps it. A graph refers to its group by name, so the handle must be "group" or "mesh".
    compiled: str = field(default="no", metadata=choice(*COMPILED))
    # Documents of each step after the first; an entry None is a step without documents. None: all steps have the
    # pattern's.
    later_documents: tuple[tuple[int, ...] | None, ...] | None = None
    # "mean": plain `cross_entropy`; "scaled": another ignored label, gradients doubled, backward of half the loss;
    # "given": `token_mean` of losses that the program computes, infinite at unlabelled tokens.
    loss: str = field(default="mean", metadata=choice(*LOSSES))
    # Where the documents are passed: with the "batch" to `shard_batch`, or by the context "handle".
    packed_by: str = field(default="batch", metadata=choice(*PACKED_BY))
    drops_zeros: bool = field(default=False, metadata=FLAG)  # without a wrapper, a gradient of zeros becomes None
    # Value that fills the gradients of one parameter for a clip after the last step.
    spoilt: str | None = field(default=None, metadata=optional(choice("nan", "inf")))
    # Documents in the patterns of modules. Those of the batch replace them, so every step must have documents.
    # None with a "longnet", which builds its own pattern.
    own_documents: tuple[int, ...] | None = field(default=None, metadata=INTEGERS)
    other_ranks: OtherRanks | None = field(default=None, metadata=optional(instance(OtherRanks, "OtherRanks")))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pattern.validate(self.model.heads)
        self.pattern.validate_tokens(self.tokens)
        if self.resumed is not None and self.steps < 2:
            raise ValueError(f"resumed is {self.resumed!r}; it must be None with one step")
        if self.compiled != "no" and self.handle == "recorded":
            raise ValueError(f"handle is 'recorded'; it must be 'group' or 'mesh' with compiled {self.compiled!r}")
        self._set_later_documents()
        self._check_own_documents()
        if self.model.kind == "longnet":
            self._check_longnet()
        self._check_same_bits()

    def _check_same_bits(self) -> None:
        """Refuse what `SameWeights` or its check does not take, in any step and part, and on the other ranks."""
        if self.same_bits is None:
            if self.other_ranks is not None:
                raise ValueError(f"other_ranks is {self.other_ranks}; it must be None without same_bits")
            return
        self._check_other_ranks()
        for name, allowed in (("compiled", ("no",)), ("handle", ("group", "mesh")), ("loss", ("mean", "given"))):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(
                    f"{name} is {value!r}; with same_bits it must be one of {', '.join(map(repr, allowed))}"
                )
        for run in (self, *self.parts):
            for step in range(run.steps):
                run.at(step)  # which raises where a rank has no chunk

    def _check_longnet(self) -> None:
        """The block builds its pattern from segment lengths and ratios; other patterns are refused."""
        pattern, heads = self.pattern_of_modules, self.model.heads
        lengths, ratios = [b.segment_length for b in pattern.branches], [b.dilation_rate for b in pattern.branches]
        if None in lengths or pattern != Pattern.longnet(lengths, ratios, heads, pattern.causal, "torchscale"):
            raise ValueError(f"pattern is {self.pattern}; with 'longnet' it must be torchscale's for its branches")

    def _set_later_documents(self) -> None:
        if self.later_documents is None:
            return
        if not isinstance(self.later_documents, (tuple, list)) or len(self.later_documents) != self.steps - 1:
            raise ValueError(
                f"later_documents is {self.later_documents!r}; it must be None, or have an entry for each of the "
                f"{self.steps} steps but the first"
            )
        documents = [None if x is None else validators.integers("later_documents", x) for x in self.later_documents]
        for lengths in documents:
            replace(self.pattern, documents=lengths).validate_tokens(self.tokens)
        object.__setattr__(self, "later_documents", tuple(documents))

    def _check_own_documents(self) -> None:
        if self.own_documents is None:
            return
        if self.model.kind == "longnet" or not self.always_packed:
            raise ValueError(
                f"own_documents is {self.own_documents!r}; it must be None with a model of kind 'longnet', and where a "
                "step has no documents"
            )
        self.pattern_of_modules.validate_tokens(self.tokens)

    @property
    def parts(self) -> tuple[TrainingCase, ...]:
        """Consecutive stretches of the run, each on its own mesh: one before a resume, one after it. Each is a Case
        with its own number of steps. A step has the same sequences, in the same order."""
        if self.resumed is None:
            return (self,)
        after = replace(
            self, data=1, accumulation=self.data * self.accumulation, order=self.resumed, cuts=None,
            steps=self.steps - 1, resumed=None, pattern=self.at(1).pattern,
            later_documents=(self.later_documents or ())[1:] or None, other_ranks=None,
        )  # fmt: skip
        return replace(self, steps=1, resumed=None, later_documents=None, other_ranks=None), after

    @property
    def elsewhere(self) -> TrainingCase:
        """The run on the other ranks, without the resume."""
        assert self.other_ranks is not None
        return replace(self, **self.other_ranks.to_dict(), other_ranks=None, resumed=None)

    def stretched(self, times: int, device: str) -> TrainingCase:
        """The Case on a device, with so many times longer sequences, documents, chunks and buckets.

        Args:
            times: at least 1.
            device: "cpu" or "cuda".
        """

        def longer(lengths: tuple[int, ...] | None) -> tuple[int, ...] | None:
            return None if lengths is None else tuple(times * length for length in lengths)

        def times_of(number: int | None) -> int | None:
            return None if number is None else times * number

        others, later = self.other_ranks, self.later_documents
        return replace(
            self, device=device, tokens=times * self.tokens, same_bits=times_of(self.same_bits),
            bucket=times_of(self.bucket), own_documents=longer(self.own_documents),
            pattern=replace(self.pattern, documents=longer(self.pattern.documents)),
            later_documents=None if later is None else tuple(map(longer, later)),
            other_ranks=None if others is None else replace(others, bucket=times_of(others.bucket)),
        )  # fmt: skip

    def at(self, step: int) -> TrainingCase:
        """The Case with the documents of that step in every step. step: from 0."""
        if self.later_documents is None:
            return self
        documents = self.later_documents[step - 1] if step else self.pattern.documents
        pattern = replace(self.pattern, documents=documents)
        return replace(self, pattern=pattern, later_documents=None, other_ranks=None)

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """Lengths of the documents that each sequence is packed from; None: one, unpacked."""
        return self.pattern.documents

    @property
    def recomputed(self) -> bool:
        """True if backward runs each forward of the ring again."""
        return self.checkpointing in ("reentrant", "non-reentrant")

    @property
    def always_packed(self) -> bool:
        """True if every step has documents."""
        return all(lengths is not None for lengths in (self.pattern.documents, *(self.later_documents or ())))

    @property
    def pattern_of_modules(self) -> Pattern:
        """The pattern that modules are built with: without the documents of the batches."""
        return replace(self.pattern, documents=self.own_documents)

    @classmethod
    def from_dict(cls, data: object) -> TrainingCase:
        """Read a JSON object. Raises ValueError for anything else, an unknown or missing field, or a wrong value."""
        if isinstance(data, dict) and data.get("calls") == []:  # of 0.1.0
            data = {name: value for name, value in data.items() if name != "calls"}
        return super().from_dict(data)
