"""TrainingCase: everything that one training run depends on, and nothing else.

Like a `verification.case.Case` it is frozen, hashable and travels as JSON: ranks, the dense expectation and a replay
rebuild the same model, tokens and labels from it in any process.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, dataclass, replace
from dataclasses import fields as fields_of
from itertools import pairwise
from typing import Any

import torch

from reference import fields, shards
from reference.pattern import Pattern
from reference.shards import Division, Shards
from verification.case import DEVICES, DTYPES, EXCHANGES, ORDERS, ORDERS_BY_DOCUMENT, SEEDED_ORDERS
from verification.training.call_names import checked_calls
from verification.training.training_model import Model
from verification.wording import misfits

TRAINING_DTYPES = ("float64", "float32", "bfloat16")
WRAPPERS = ("none", "ddp", "fsdp2", "hsdp2")
CHECKPOINTING = ("none", "reentrant", "non-reentrant", "selective")
OPTIMISERS = ("sgd", "adamw")
LABELS = ("all", "some", "shards", "ranks", "none")
HANDLES = ("recorded", "group", "mesh")
COMPILED = ("no", "aot_eager")
ARRANGEMENTS = ("contiguous", "strided")
LOSSES = ("mean", "scaled", "given")
PACKED_BY, SPOILT = ("batch", "handle"), ("nan", "inf")
VOCABULARY = 11  # tokens are numbers below it

_MOST = {"world": 64, "tokens": 4096, "batch": 64, "accumulation": 64, "steps": 16}
_GREATEST_SEED = 2**31


@dataclass(frozen=True)
class TrainingCase:
    """One training run of a few steps.

    world         ranks
    data          how many of them share no sequence: world = data * context, where `context` ranks share each sequence
    arrangement   of the ranks that share a sequence: "contiguous" (0, 1, ...), or "strided" (0, data, 2 data, ...)
    tokens        length n of each sequence
    batch         sequences of a data rank in a micro-batch
    order, cuts   which rank of a context group holds which tokens: as in a `verification.case.Case`
    model         a `Model`
    pattern       who sees whom, in every layer; the documents that each sequence is packed from, if there are some
    exchange, bucket: of the attention, as in a `verification.case.Case`
    handle        what the context handle is given as its group: "recorded", a transport that records its messages;
                  "group", the process group; "mesh", the `DeviceMesh` of one dimension
    dtype         "float64"; "float32"; "bfloat16": parameters in float32, mixed precision as the wrapper has it
                  (autocast, or FSDP's policy)
    wrapper       "none" (`ring.nn.average_gradients`), "ddp", "fsdp2" (over all ranks), "hsdp2" (FSDP2 within a context
                  group, replicated over the data ranks)
    accumulation  micro-batches of a step
    checkpointing of each layer: "none", "reentrant", "non-reentrant", or "selective" (the ring's forward is saved)
    clipping      the largest norm of the gradients, or None
    optimiser     "sgd" with momentum, or "adamw"
    steps         of the optimiser
    labels        "all"; "some" (a third is ignored); "shards" (those that one rank of each context group holds are
                  ignored); "ranks" (one data rank has none, or, where there is one data rank, one micro-batch); "none"
    seed          of parameters, tokens and labels
    device        "cpu" or "cuda"
    resumed       None, or the order of another layout: after the first step the run is saved, and taken up by a new
                  model, optimiser and mesh, whose ranks all share each sequence in that order, cut evenly
    compiled      "no"; or the backend of `torch.compile(fullgraph=True)`: of the whole model, under FSDP of each layer,
                  which FSDP then surrounds. A graph names its group, so that the handle is "group" or "mesh"
    later_documents  the documents of the second step, of the third, and so on, for a step without any None; None: all
                  steps have those of the pattern
    loss          "mean", `cross_entropy` as it is; "scaled", with another label to ignore, for gradients twice as
                  large, and the backward of half of it; or "given", `token_mean` of losses that are computed elsewhere,
                  infinite where nothing is labelled
    packed_by     who knows the documents: the "batch", whose sharding is given them, or the "handle"
    drops_zeros   whether a rank without a wrapper has no gradient, in place of one that is all zero
    spoilt        None; or what the gradients of a parameter are in the end, "nan" or "inf", when all are clipped
    calls         what is called after the last step: rare calls that are right, and wrong ones
    own_documents the documents that the patterns of modules have by themselves: those of the batch, which every step
                  then has, stand in their place. None with a "longnet", which makes its pattern by itself

    Raises ValueError, at construction, naming the field, what was given and what is allowed.
    """

    world: int
    data: int
    arrangement: str
    tokens: int
    batch: int
    order: str
    cuts: tuple[int, ...] | None
    model: Model
    pattern: Pattern
    exchange: str
    bucket: int | None
    handle: str
    dtype: str
    wrapper: str
    accumulation: int
    checkpointing: str
    clipping: float | None
    optimiser: str
    steps: int
    labels: str
    seed: int
    device: str = "cpu"
    resumed: str | None = None
    compiled: str = "no"
    later_documents: tuple[tuple[int, ...] | None, ...] | None = None
    loss: str = "mean"
    packed_by: str = "batch"
    drops_zeros: bool = False
    spoilt: str | None = None
    calls: tuple[str, ...] = ()
    own_documents: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            fields.integer(name, getattr(self, name), 1, most)
        fields.integer("data", self.data, 1, self.world)
        fields.integer("seed", self.seed, 0, _GREATEST_SEED)
        for name, allowed in _CHOICES.items():
            fields.choice(name, getattr(self, name), allowed)
        if self.world % self.data:
            raise ValueError(f"data is {self.data}; it must divide world, {self.world}")
        if not isinstance(self.model, Model):
            raise ValueError(f"model is {self.model!r}; it must be a Model")
        if not isinstance(self.pattern, Pattern):
            raise ValueError(f"pattern is {self.pattern!r}; it must be a reference.Pattern")
        self.pattern.validate(self.model.heads)
        self.pattern.validate_tokens(self.tokens)
        if self.resumed is not None:
            fields.choice("resumed", self.resumed, _CHOICES["order"])
            if self.steps < 2:
                raise ValueError(f"resumed is {self.resumed!r}; it must be None with one step")
        if self.compiled != "no" and self.handle == "recorded":
            raise ValueError(f"handle is 'recorded'; it must be 'group' or 'mesh' with compiled {self.compiled!r}")
        if self.bucket is not None:
            fields.integer("bucket", self.bucket, 1)
        fields.flag("drops_zeros", self.drops_zeros)
        if self.spoilt is not None:
            fields.choice("spoilt", self.spoilt, SPOILT)
        object.__setattr__(self, "calls", checked_calls(self.calls))
        if self.clipping is not None:
            object.__setattr__(self, "clipping", fields.real("clipping", self.clipping))
        self._set_cuts()
        self._set_later_documents()
        self._set_own_documents()
        if self.model.kind == "longnet":
            self._check_longnet()

    def _check_longnet(self) -> None:
        """The block makes its pattern from segment lengths and ratios, so it must be one that it makes."""
        lengths, ratios = self.longnet
        if None in lengths or self.pattern_of_modules != Pattern.longnet(
            lengths, ratios, self.model.heads, self.pattern.causal, "torchscale"
        ):
            raise ValueError(f"pattern is {self.pattern}; with 'longnet' it must be torchscale's for its branches")

    def _set_cuts(self) -> None:
        if self.cuts is None:
            return
        cuts = fields.integers("cuts", self.cuts)
        rising = all(a <= b for a, b in pairwise(cuts))
        if len(cuts) != self.context + 1 or cuts[0] != 0 or cuts[-1] != self.tokens or not rising:
            raise ValueError(
                f"cuts is {cuts}; it must be {self.context + 1} non-decreasing offsets from 0 to {self.tokens}"
            )
        object.__setattr__(self, "cuts", cuts)

    def _set_later_documents(self) -> None:
        if self.later_documents is None:
            return
        if not isinstance(self.later_documents, (tuple, list)) or len(self.later_documents) != self.steps - 1:
            raise ValueError(
                f"later_documents is {self.later_documents!r}; it must be None, or have an entry for each of the "
                f"{self.steps} steps but the first"
            )
        kept = [None if one is None else fields.integers("later_documents", one) for one in self.later_documents]
        for lengths in kept:
            replace(self.pattern, documents=lengths).validate_tokens(self.tokens)
        object.__setattr__(self, "later_documents", tuple(kept))

    def _set_own_documents(self) -> None:
        if self.own_documents is None:
            return
        if self.model.kind == "longnet" or not self.always_packed:
            raise ValueError(
                f"own_documents is {self.own_documents!r}; it must be None with a model of kind 'longnet', and where a "
                "step has no documents"
            )
        object.__setattr__(self, "own_documents", fields.integers("own_documents", self.own_documents))
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
            return tuple(tuple(range(d * self.context, (d + 1) * self.context)) for d in range(self.data))
        return tuple(tuple(range(d, self.world, self.data)) for d in range(self.data))

    def coordinates(self, rank: int) -> tuple[int, int]:
        """(data rank, index in the context group)."""
        return next((d, group.index(rank)) for d, group in enumerate(self.mesh) if rank in group)

    @property
    def parts(self) -> tuple[TrainingCase, ...]:
        """What follows one another on different meshes: a Case for each, with its own number of steps. The sequences of
        a step are the same ones, in the same order.
        """
        if self.resumed is None:
            return (self,)
        mesh: dict[str, Any] = {"data": 1, "accumulation": self.data * self.accumulation}
        later = None if self.later_documents is None else self.later_documents[1:]
        others: dict[str, Any] = {"order": self.resumed, "cuts": None, "steps": self.steps - 1, "resumed": None}
        return (
            replace(self, steps=1, resumed=None, later_documents=None),
            replace(self, **mesh, **others, pattern=self.at(1).pattern, later_documents=later or None),
        )

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

    @property
    def longnet(self) -> tuple[list[int | None], list[int]]:
        """Segment lengths and dilated ratios of the pattern's branches."""
        return [b.segment_length for b in self.pattern.branches], [b.dilation_rate for b in self.pattern.branches]

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
        data = {f.name: getattr(self, f.name) for f in fields_of(self)}
        data |= {"calls": [*self.calls], "cuts": self.cuts and [*self.cuts]}
        return data | {"model": asdict(self.model), "pattern": self.pattern.to_dict()}

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, data: object) -> TrainingCase:
        """Raises ValueError for what is no JSON object, an unknown or missing field, or a value not allowed."""
        given = _fields_of(cls, "a TrainingCase", data)
        model = Model(**_fields_of(Model, "model", given["model"]))
        return cls(**given | {"model": model, "pattern": Pattern.from_dict(given["pattern"])})


def _fields_of(kind: type[Any], what: str, data: object) -> dict[str, Any]:
    """A JSON object with the fields of that dataclass; those that have a default may be missing: files from before
    there were such fields stay good."""
    if not isinstance(data, dict):
        raise ValueError(f"{what} must be a JSON object, got {type(data).__name__}")
    known = {f.name: f.default is MISSING for f in fields_of(kind)}
    unknown, missing = sorted(set(data) - set(known)), sorted({n for n, needed in known.items() if needed} - set(data))
    if unknown or missing:
        raise ValueError(f"{what}: {misfits(unknown, missing)}")
    return data


_CHOICES: dict[str, tuple[str, ...]] = {
    "arrangement": ARRANGEMENTS,
    "order": (*ORDERS, *ORDERS_BY_DOCUMENT),
    "exchange": EXCHANGES,
    "handle": HANDLES,
    "dtype": TRAINING_DTYPES,
    "wrapper": WRAPPERS,
    "checkpointing": CHECKPOINTING,
    "optimiser": OPTIMISERS,
    "labels": LABELS,
    "device": DEVICES,
    "compiled": COMPILED,
    "loss": LOSSES,
    "packed_by": PACKED_BY,
}
