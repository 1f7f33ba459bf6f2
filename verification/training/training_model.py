"""Model: the small language model of a TrainingCase."""

from __future__ import annotations

from dataclasses import dataclass

from reference import fields

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
_MOST_SIZE = 4096  # of anything in a model


@dataclass(frozen=True)
class Model:
    """A small language model: embedding, layers, a norm, a head.

    kind        "llama": norm, `ring.nn.SelfAttention`, norm, gated feed-forward; "longnet": `ring.nn.LongNetBlock`s;
                "sdpa": plain modules whose inner attention is `ring.nn.RingAttention`
    layers, dim, heads, kv_heads, head_dim
    norm        "rms" or "layer"; a "longnet" has "layer"
    tied        whether the head has the embedding's weights
    qk_norm     whether queries and keys are normalised, head by head; "llama" alone
    bias        whether the attention's projections have biases; those of a "longnet" have
    subln       a norm before the last projection of attention and feed-forward; "longnet" alone
    positions   "rotary"; "learned", a table of vectors that is added to the embedding; or "none"
    scale       factor of the scores; None: head_dim ** -0.5. "sdpa" alone
    bases       of rotary positions: 1, or 2, which layers take in turn; "llama" and "sdpa" alone

    Raises ValueError, at construction, naming the field, what was given and what is allowed.
    """

    kind: str
    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    norm: str
    tied: bool
    qk_norm: bool
    bias: bool
    subln: bool
    positions: str
    scale: float | None = None
    bases: int = 1

    def __post_init__(self) -> None:
        for name, allowed in (("kind", KINDS), ("norm", NORMS), ("positions", POSITIONS)):
            fields.choice(name, getattr(self, name), allowed)
        for name in ("layers", "dim", "heads", "kv_heads", "head_dim"):
            fields.integer(name, getattr(self, name), 1, _MOST_SIZE)
        for name in ("tied", "qk_norm", "bias", "subln"):
            fields.flag(name, getattr(self, name))
        fields.grouped_heads(self.heads, self.kv_heads)
        if self.positions == "rotary" and self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; it must be even with positions 'rotary'")
        if self.qk_norm and self.kind != "llama":
            raise ValueError(f"qk_norm is True and kind is {self.kind!r}; qk_norm must be False then")
        if self.subln and self.kind != "longnet":
            raise ValueError(f"subln is True and kind is {self.kind!r}; subln must be False then")
        if self.scale is not None:
            object.__setattr__(self, "scale", fields.real("scale", self.scale))
            if self.kind != "sdpa":
                raise ValueError(f"scale is {self.scale} and kind is {self.kind!r}; scale must be None then")
        fields.integer("bases", self.bases, 1, 2)
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
