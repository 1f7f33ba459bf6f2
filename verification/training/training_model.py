"""Model: the small language model of a TrainingCase."""

from __future__ import annotations

from dataclasses import dataclass, field

from reference import validators
from verification.training.declared import FLAG, REAL, check_fields, choice, integer, optional

KINDS = ("llama", "longnet", "sdpa")
NORMS = ("rms", "layer")
POSITIONS = ("rotary", "learned", "none")
ROTARY_THETA, OTHER_THETA = 10000.0, 100.0
NORM_EPS = 3e-5  # nobody's default, so that one that is not passed on shows
# A layer norm of two numbers gives +1 and -1, by which is larger: a step, at which rounding decides. Of four, all would
# have to be nearly equal. A norm of queries and keys gives their direction, which rounding decides where they are
# nearly 0: two numbers are so more often than four. So narrower norms are drawn in fp64 alone, where rounding decides
# for one in 1e13.
LEAST_OF_A_NORM = 4
_SIZE = integer(1, 4096)  # of anything in a model


@dataclass(frozen=True)
class Model:
    """A small language model: embedding, layers, a norm, a head. Raises ValueError, naming the field, what was given
    and what is allowed."""

    # "llama": norm, `ring.nn.SelfAttention`, norm, gated feed-forward; "longnet": `ring.nn.LongNetBlock`s; "sdpa":
    # plain modules whose inner attention is `ring.nn.RingAttention`.
    kind: str = field(metadata=choice(*KINDS))
    layers: int = field(metadata=_SIZE)
    dim: int = field(metadata=_SIZE)
    heads: int = field(metadata=_SIZE)
    kv_heads: int = field(metadata=_SIZE)
    head_dim: int = field(metadata=_SIZE)
    norm: str = field(metadata=choice(*NORMS))  # a "longnet" has "layer"
    tied: bool = field(metadata=FLAG)  # whether the head has the embedding's weights
    qk_norm: bool = field(metadata=FLAG)  # whether queries and keys are normalised, head by head; "llama" alone
    bias: bool = field(metadata=FLAG)  # of the attention's projections; those of a "longnet" have some
    subln: bool = field(metadata=FLAG)  # a norm before the last projection of each part; "longnet" alone
    positions: str = field(metadata=choice(*POSITIONS))  # "learned": a table of vectors, added to the embedding
    scale: float | None = field(default=None, metadata=optional(REAL))  # None: head_dim ** -0.5; "sdpa" alone
    bases: int = field(default=1, metadata=integer(1, 2))  # of rotary positions; layers take two in turn

    def __post_init__(self) -> None:
        check_fields(self)
        validators.grouped_heads(self.heads, self.kv_heads)
        if self.positions == "rotary" and self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; it must be even with positions 'rotary'")
        for name, kind, without in (("qk_norm", "llama", False), ("subln", "longnet", False), ("scale", "sdpa", None)):
            given = getattr(self, name)
            if given is not without and self.kind != kind:
                raise ValueError(f"{name} is {given} and kind is {self.kind!r}; {name} must be {without} then")
        if self.kind == "longnet":
            self._check_longnet()

    @property
    def has_steps(self) -> bool:
        """Whether it has norms that may be steps, so that it is for fp64 alone."""
        of_all = self.norm == "layer" and self.dim < LEAST_OF_A_NORM
        return of_all or (self.qk_norm and self.head_dim < LEAST_OF_A_NORM)

    def theta(self, layer: int) -> float:
        """The base of the rotary positions of that layer."""
        return OTHER_THETA if self.bases == 2 and layer % 2 else ROTARY_THETA

    def _check_longnet(self) -> None:
        if self.bases != 1:
            raise ValueError(f"bases is {self.bases}; it must be 1 with 'longnet'")
        if self.norm != "layer" or not self.bias:
            raise ValueError(f"norm is {self.norm!r}, bias is {self.bias}; they must be 'layer', True with 'longnet'")
        if self.dim != self.heads * self.head_dim:
            raise ValueError(
                f"dim is {self.dim}; with 'longnet' it must be heads * head_dim, {self.heads * self.head_dim}"
            )
