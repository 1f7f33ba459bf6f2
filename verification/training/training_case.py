"""TrainingCase: everything that one training run depends on, and nothing else. Like a `verification.case.Case` it is
frozen, hashable and travels as JSON: the same model, tokens and labels are rebuilt from it in any process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from reference import shards, validators
from reference.pattern import Pattern
from reference.shards import Division, Shards
from verification.case import DEVICES, DTYPES, EXCHANGES, ORDERS, ORDERS_BY_DOCUMENT, SEEDED_ORDERS
from verification.training.declared import (
    FLAG,
    INTEGERS,
    REAL,
    check_fields,
    choice,
    instance,
    integer,
    optional,
    read_fields,
)
from verification.training.training_model import Model

TRAINING_DTYPES = ("float64", "float32", "bfloat16")
WRAPPERS = ("none", "ddp", "fsdp2", "hsdp2")
CHECKPOINTING = ("none", "reentrant", "non-reentrant", "selective")
OPTIMISERS = ("sgd", "adamw")
LABELS = ("all", "some", "shards", "ranks", "none")
HANDLES = ("recorded", "group", "mesh")
COMPILED = ("no", "aot_eager")
ARRANGEMENTS = ("contiguous", "strided")
LOSSES = ("mean", "scaled", "given")
PACKED_BY = ("batch", "handle")
VOCABULARY = 11  # tokens are numbers below it
_ORDERS = (*ORDERS, *ORDERS_BY_DOCUMENT)


@dataclass(frozen=True)
class TrainingCase:
    """One training run of a few steps. Raises ValueError, naming the field, what was given and what is allowed."""

    world: int = field(metadata=integer(1, 64))  # ranks
    # How many ranks share no sequence: world = data * context, where `context` ranks share each sequence.
    data: int = field(metadata=integer(1))
    # The ranks that share a sequence: "contiguous" (0, 1, ...), or "strided" (0, data, 2 data, ...).
    arrangement: str = field(metadata=choice(*ARRANGEMENTS))
    tokens: int = field(metadata=integer(1, 4096))  # length n of each sequence
    batch: int = field(metadata=integer(1, 64))  # sequences of a data rank in a micro-batch
    # Which rank of a context group holds which tokens, as in a `verification.case.Case`.
    order: str = field(metadata=choice(*_ORDERS))
    cuts: tuple[int, ...] | None = field(metadata=optional(INTEGERS))
    model: Model = field(metadata=instance(Model, "Model"))
    # Who sees whom, in every layer; the documents that each sequence is packed from, if there are some.
    pattern: Pattern = field(metadata=instance(Pattern, "reference.Pattern"))
    # Of the attention, as in a `verification.case.Case`.
    exchange: str = field(metadata=choice(*EXCHANGES))
    bucket: int | None = field(metadata=optional(integer(1)))
    # The group of the context handle: "recorded", a transport that records its messages; "group", the process group;
    # "mesh", the `DeviceMesh` of one dimension.
    handle: str = field(metadata=choice(*HANDLES))
    # "bfloat16" has parameters in float32, and mixed precision as the wrapper has it (autocast, or FSDP's policy).
    dtype: str = field(metadata=choice(*TRAINING_DTYPES))
    # "none" (`ring.nn.average_gradients`), "ddp", "fsdp2" (over all ranks), "hsdp2" (FSDP2 within a context group,
    # replicated over the data ranks).
    wrapper: str = field(metadata=choice(*WRAPPERS))
    accumulation: int = field(metadata=integer(1, 64))  # micro-batches of a step
    checkpointing: str = field(metadata=choice(*CHECKPOINTING))  # of each layer; "selective" saves the ring's forward
    clipping: float | None = field(metadata=optional(REAL))  # the largest norm of the gradients
    optimiser: str = field(metadata=choice(*OPTIMISERS))  # "sgd" has momentum
    steps: int = field(metadata=integer(1, 16))
    # "some": a third is ignored; "shards": those that one rank of each context group holds are ignored; "ranks": one
    # data rank has none, or, where there is one data rank, one micro-batch.
    labels: str = field(metadata=choice(*LABELS))
    seed: int = field(metadata=integer(0, 2**31))  # of parameters, tokens and labels
    device: str = field(default="cpu", metadata=choice(*DEVICES))
    # The order of another layout: after the first step the run is saved, and taken up by a new model, optimiser and
    # mesh, whose ranks all share each sequence in that order, cut evenly.
    resumed: str | None = field(default=None, metadata=optional(choice(*_ORDERS)))
    # The backend of `torch.compile(fullgraph=True)`: of the whole model, under FSDP of each layer, which FSDP then
    # surrounds. A graph names its group, so that the handle is "group" or "mesh".
    compiled: str = field(default="no", metadata=choice(*COMPILED))
    # The documents of the second step, of the third, and so on, for a step without any None; None: all steps have
    # those of the pattern.
    later_documents: tuple[tuple[int, ...] | None, ...] | None = None
    # "mean": `cross_entropy` as it is; "scaled": with another label to ignore, for gradients twice as large, and the
    # backward of half of it; "given": `token_mean` of losses computed elsewhere, infinite where nothing is labelled.
    loss: str = field(default="mean", metadata=choice(*LOSSES))
    # Who knows the documents: the "batch", whose sharding is given them, or the "handle".
    packed_by: str = field(default="batch", metadata=choice(*PACKED_BY))
    drops_zeros: bool = field(default=False, metadata=FLAG)  # without a wrapper, a gradient of zeros becomes None
    # What the gradients of a parameter are in the end, when all are clipped.
    spoilt: str | None = field(default=None, metadata=optional(choice("nan", "inf")))
    # The documents that the patterns of modules have by themselves: those of the batch, which every step then has,
    # stand in their place. None with a "longnet", which makes its pattern by itself.
    own_documents: tuple[int, ...] | None = field(default=None, metadata=optional(INTEGERS))

    def __post_init__(self) -> None:
        check_fields(self)
        validators.integer("data", self.data, 1, self.world)
        if self.world % self.data:
            raise ValueError(f"data is {self.data}; it must divide world, {self.world}")
        self.pattern.validate(self.model.heads)
        self.pattern.validate_tokens(self.tokens)
        if self.resumed is not None and self.steps < 2:
            raise ValueError(f"resumed is {self.resumed!r}; it must be None with one step")
        if self.compiled != "no" and self.handle == "recorded":
            raise ValueError(f"handle is 'recorded'; it must be 'group' or 'mesh' with compiled {self.compiled!r}")
        self._check_cuts()
        self._set_later_documents()
        self._check_own_documents()
        if self.model.kind == "longnet":
            self._check_longnet()

    def _check_longnet(self) -> None:
        """The block makes its pattern from segment lengths and ratios, so it must be one that it makes."""
        pattern, heads = self.pattern_of_modules, self.model.heads
        lengths, ratios = [b.segment_length for b in pattern.branches], [b.dilation_rate for b in pattern.branches]
        if None in lengths or pattern != Pattern.longnet(lengths, ratios, heads, pattern.causal, "torchscale"):
            raise ValueError(f"pattern is {self.pattern}; with 'longnet' it must be torchscale's for its branches")

    def _check_cuts(self) -> None:
        cuts = self.cuts
        if cuts is None:
            return
        if len(cuts) != self.context + 1 or cuts[0] != 0 or cuts[-1] != self.tokens or list(cuts) != sorted(cuts):
            raise ValueError(
                f"cuts is {cuts}; it must be {self.context + 1} non-decreasing offsets from 0 to {self.tokens}"
            )

    def _set_later_documents(self) -> None:
        if self.later_documents is None:
            return
        if not isinstance(self.later_documents, (tuple, list)) or len(self.later_documents) != self.steps - 1:
            raise ValueError(
                f"later_documents is {self.later_documents!r}; it must be None, or have an entry for each of the "
                f"{self.steps} steps but the first"
            )
        kept = [None if one is None else validators.integers("later_documents", one) for one in self.later_documents]
        for lengths in kept:
            replace(self.pattern, documents=lengths).validate_tokens(self.tokens)
        object.__setattr__(self, "later_documents", tuple(kept))

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
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.world))

    @property
    def context(self) -> int:
        """Ranks that share a sequence."""
        return self.world // self.data

    @property
    def mesh(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each context group, by data rank: (data, context)."""
        if self.arrangement == "contiguous":
            return tuple(self.ranks[d * self.context : (d + 1) * self.context] for d in range(self.data))
        return tuple(self.ranks[d :: self.data] for d in range(self.data))

    def coordinates(self, rank: int) -> tuple[int, int]:
        """(data rank, index in the context group)."""
        return next((d, group.index(rank)) for d, group in enumerate(self.mesh) if rank in group)

    @property
    def parts(self) -> tuple[TrainingCase, ...]:
        """What follows one another on different meshes: a Case for each, with its own number of steps. The sequences of
        a step are the same ones, in the same order."""
        if self.resumed is None:
            return (self,)
        after = replace(
            self, data=1, accumulation=self.data * self.accumulation, order=self.resumed, cuts=None,
            steps=self.steps - 1, resumed=None, pattern=self.at(1).pattern,
            later_documents=(self.later_documents or ())[1:] or None,
        )  # fmt: skip
        return replace(self, steps=1, resumed=None, later_documents=None), after

    def at(self, step: int) -> TrainingCase:
        """The Case whose steps all have the documents that this one has in that step, the first being 0."""
        if self.later_documents is None:
            return self
        documents = self.later_documents[step - 1] if step else self.pattern.documents
        return replace(self, pattern=replace(self.pattern, documents=documents), later_documents=None)

    @property
    def parameter_dtype(self) -> torch.dtype:
        """In which the optimiser keeps parameters."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    @property
    def torch_dtype(self) -> torch.dtype:
        """In which products are computed, and keys and values travel."""
        return DTYPES[self.dtype]

    @property
    def recomputed(self) -> bool:
        """Whether each forward of the ring runs once more within backward."""
        return self.checkpointing in ("reentrant", "non-reentrant")

    @property
    def always_packed(self) -> bool:
        """Whether every step has documents."""
        return all(lengths is not None for lengths in (self.pattern.documents, *(self.later_documents or ())))

    @property
    def pattern_of_modules(self) -> Pattern:
        """Without the documents that come with each batch."""
        return replace(self.pattern, documents=self.own_documents)

    @property
    def documents(self) -> tuple[int, ...]:
        """Their lengths; the whole sequence is one where there are none."""
        return (self.tokens,) if self.pattern.documents is None else self.pattern.documents

    def positions(self) -> torch.Tensor:
        """Of each token of a sequence within its document: (n,) int64."""
        return torch.cat([torch.arange(length) for length in self.documents])

    def shards(self) -> Shards:
        """Which index of a context group holds which positions, by definition."""
        return shards.shards(*self.division())

    def division(self) -> Division:
        """As that of a `verification.case.Case`."""
        seed = self.seed if self.order in SEEDED_ORDERS else 0
        documents = self.pattern.documents if self.order in ORDERS_BY_DOCUMENT else None
        return self.order, self.tokens, self.context, self.cuts, seed, documents

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it; `from_dict` turns it back into an equal TrainingCase."""
        return vars(self) | {"model": asdict(self.model), "pattern": self.pattern.to_dict()}

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, data: object) -> TrainingCase:
        """Raises ValueError for what is no JSON object, an unknown or missing field, or a value not allowed."""
        if isinstance(data, dict) and "calls" in data:  # a field of earlier versions
            if data["calls"]:
                raise ValueError("calls must be empty: calls beside the steps are tests of tests/ring/nn now")
            data = {name: value for name, value in data.items() if name != "calls"}
        given = read_fields(cls, "a TrainingCase", data)
        model = Model(**read_fields(Model, "model", given["model"]))
        return cls(**given | {"model": model, "pattern": Pattern.from_dict(given["pattern"])})
