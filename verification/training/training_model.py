"""Model: the small language model of a TrainingCase."""

from __future__ import annotations

from dataclasses import dataclass, field

from reference import validators
from verification.saved_fields import FLAG, REAL, SavedFields, choice, integer, optional

KINDS = ("llama", "longnet", "sdpa")
NORMS = ("rms", "layer")
POSITIONS = ("rotary", "learned", "none")
ROTARY_THETA, OTHER_THETA = 10000.0, 100.0
NORM_EPS = 3e-5  # no library's default, so that an eps that is not passed on shows
# A layer norm of two numbers is +1 or -1, a step function: rounding decides where they are nearly equal. A norm of
# queries or keys gives their direction, which rounding decides where they are nearly 0. Both are rarer with four
# numbers. So narrower norms are drawn in fp64 only, where rounding decides one in 1e13.
MIN_NORM_WIDTH = 4
_SIZE = integer(1, 4096)  # any dimension of a model


@dataclass(frozen=True)
class Model(SavedFields):
    """A small language model: embedding, layers, a norm, a head. Raises ValueError, naming the field, its value and
    the allowed values."""

    # "llama": norm, `ring.nn.SelfAttention`, norm, gated feed-forward; "longnet": `ring.nn.LongNetBlock`s; "sdpa":
    # plain modules whose inner attention is `ring.nn.RingAttention`.
    kind: str = field(metadata=choice(*KINDS))
    layers: int = field(metadata=_SIZE)
    dim: int = field(metadata=_SIZE)
    heads: int = field(metadata=_SIZE)
    kv_heads: int = field(metadata=_SIZE)
    head_dim: int = field(metadata=_SIZE)
    norm: str = field(metadata=choice(*NORMS))  # a "longnet" has "layer"
    tied: bool = field(metadata=FLAG)  # the head shares the embedding's weights
    qk_norm: bool = field(metadata=FLAG)  # queries and keys are normalised, head by head; "llama" only
    bias: bool = field(metadata=FLAG)  # in the attention's projections; always in a "longnet"
    subln: bool = field(metadata=FLAG)  # a norm before the last projection of each part; "longnet" only
    positions: str = field(metadata=choice(*POSITIONS))  # "learned": a table of vectors, added to the embedding
    scale: float | None = field(default=None, metadata=optional(REAL))  # None: head_dim ** -0.5; "sdpa" only
    bases: int = field(default=1, metadata=integer(1, 2))  # rotary bases; two alternate by layer

    def __post_init__(self) -> None:
        super().__post_init__()
        validators.grouped_heads(self.heads, self.kv_heads)
        if self.positions == "rotary" and self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; it must be even with positions 'rotary'")
        for name, kind, without in (("qk_norm", "llama", False), ("subln", "longnet", False), ("scale", "sdpa", None)):
            value = getattr(self, name)
            if value is not without and self.kind != kind:
                raise ValueError(f"{name} is {value} and kind is {self.kind!r}; {name} must be {without} then")
        if self.kind == "longnet":
            self._check_longnet()

    @property
    def has_steps(self) -> bool:
        """True if some norm is so narrow that it may be a step; such a model is for fp64 only."""
        narrow = self.norm == "layer" and self.dim < MIN_NORM_WIDTH
        return narrow or (self.qk_norm and self.head_dim < MIN_NORM_WIDTH)

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
