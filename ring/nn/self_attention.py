"""Self-attention of a layer over a sharded sequence: projections, rotary positions, the ring.

The projections see only this rank's tokens; positions are the global positions of these tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from reference.pattern import Pattern, check_pattern
from ring.nn.context import ContextParallel, checked_context
from ring.nn.rotary import THETA, cached_angles, check_rotation, has_token_shape, rotate
from ring.settings import check_softcap

SHAPE = ("batch", "local tokens", "dim")


class SelfAttention(nn.Module):
    """q_proj, k_proj, v_proj and o_proj as in Llama, with the ring between them.

    Args:
        dim: of x.
        heads: number of query heads.
        pattern: the attention mask.
        kv_heads: number of key/value heads; query head h reads head h // (heads / kv_heads). None: as many as heads.
        head_dim: None: dim / heads.
        value_head_dim: head dim of the values; None: head_dim.
        bias: True for biases of the four projections.
        rotary_theta: base of the rotary positions; None: no positions.
        qk_norm: RMSNorm of each head's queries and keys before the rotation.
        inner_norm_eps: epsilon of a LayerNorm of all heads' outputs before o_proj (torchscale's subln, arXiv
            2210.06423); None: no LayerNorm.
        softcap: bound t of the scores, t tanh(score / t); None: no bound.
        sinks: True for a parameter `sinks`, (heads,), initially 0: for each head the score of one more key, of value 0,
            that every token sees.
        name: of this module in errors, as "layer 3"; the ranks compare it.
        device, dtype: of the parameters; None: torch's defaults.

    Raises:
        ValueError: sizes do not fit each other or the pattern; softcap or sinks is not as above.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        pattern: Pattern,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        bias: bool = False,
        rotary_theta: float | None = THETA,
        qk_norm: bool = False,
        inner_norm_eps: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        name: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        check_sizes(dim=dim, heads=heads, kv_heads=kv_heads)
        if head_dim is None and dim % heads:
            raise ValueError(f"dim must be a multiple of heads unless head_dim is given, got {dim} and {heads}")
        head_dim = dim // heads if head_dim is None else head_dim
        value_head_dim = head_dim if value_head_dim is None else value_head_dim
        check_sizes(head_dim=head_dim, value_head_dim=value_head_dim)
        if heads % kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
        check_softcap(softcap)
        if not isinstance(sinks, bool):
            raise ValueError(f"sinks must be True or False, got {sinks!r}: the values are those of the parameter sinks")
        check_pattern(pattern)
        pattern.validate(heads)
        if rotary_theta is not None:
            check_rotation(head_dim, rotary_theta)
        self.dim, self.heads, self.kv_heads, self.head_dim = dim, heads, kv_heads, head_dim
        self.value_head_dim, self.softcap = value_head_dim, softcap
        self.pattern, self.rotary_theta, self.name = pattern, rotary_theta, name
        inner = heads * value_head_dim
        self.q_proj = nn.Linear(dim, heads * head_dim, bias, device, dtype)
        self.k_proj = nn.Linear(dim, kv_heads * head_dim, bias, device, dtype)
        self.v_proj = nn.Linear(dim, kv_heads * value_head_dim, bias, device, dtype)
        self.o_proj = nn.Linear(inner, dim, bias, device, dtype)
        self.q_norm = nn.RMSNorm(head_dim, 1e-6, device=device, dtype=dtype) if qk_norm else None
        self.k_norm = nn.RMSNorm(head_dim, 1e-6, device=device, dtype=dtype) if qk_norm else None
        self.sinks = nn.Parameter(torch.zeros(heads, device=device, dtype=dtype)) if sinks else None
        self.inner_norm = None
        if inner_norm_eps is not None:
            self.inner_norm = nn.LayerNorm(inner, inner_norm_eps, device=device, dtype=dtype)

    def forward(self, x: Tensor, context: ContextParallel, positions: Tensor | None = None) -> Tensor:
        """Return the projected attention of this rank's tokens over the whole sequence: (B, N, dim).

        Args:
            x: (B, N, dim) with this rank's N tokens, in the parameters' dtype.
            context: handle of the sharded sequence.
            positions: None, or the context's, (N,) or (B, N), int64 or int32, on x's device.

        Raises:
            ValueError, NotImplementedError: on every rank for a wrong argument on one; on this alone without a context.
        """
        check_input(x, self.dim, context, positions, self.name)
        q, k, v = self._project(x, context)
        out = context.attention(q, k, v, self.pattern, softcap=self.softcap, sinks=self.sinks, name=self.name).flatten(
            2
        )  # (B, N, H Dv)
        return self.o_proj(out if self.inner_norm is None else self.inner_norm(out))

    def _project(self, x: Tensor, context: ContextParallel) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (B, N, H, D), k (B, N, Hk, D) and v (B, N, Hk, Dv)."""
        with errors_on_every_rank(x, context, self.name):
            q = self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))
            k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
            v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.value_head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary_theta is not None:
            angles = cached_angles(context, q, self.rotary_theta)
            q, k = rotate(q, *angles), rotate(k, *angles)
        return q, k, v

    def extra_repr(self) -> str:
        return f"{self.pattern}, rotary_theta={self.rotary_theta}, name={self.name!r}"


def check_sizes(**sizes: int) -> None:
    """Raise ValueError unless every size is an integer >= 1."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {size!r}")


def check_input(x: Tensor, dim: int, context: ContextParallel, positions: Tensor | None, name: str | None) -> None:
    """Raise, on every rank, unless x is this rank's (B, N, dim) and positions are None or the context's."""
    checked_context(context)
    try:
        context.check_local("x", x, SHAPE, 1)
        if x.shape[2] != dim or not x.is_floating_point():
            raise ValueError(f"x must be a real tensor with last dimension {dim}, got {x.dtype}, {tuple(x.shape)}")
        if positions is not None:
            _check_positions(positions, x, context)
    except Exception as error:  # of any type: the other ranks must raise it too
        context.raise_everywhere(error, name)


@contextmanager
def errors_on_every_rank(x: Tensor, context: ContextParallel, name: str | None) -> Iterator[None]:
    """Raise torch's errors about x (a dtype other than the parameters', say) on every rank."""
    try:
        yield
    except RuntimeError as error:
        context.raise_everywhere(
            ValueError(f"x must fit the module's parameters, got {x.dtype} on {x.device}: {error}"), name
        )


def _check_positions(positions: Tensor, x: Tensor, context: ContextParallel) -> None:
    if not isinstance(positions, Tensor) or positions.dtype not in (torch.int64, torch.int32):
        got = str(positions.dtype) if isinstance(positions, Tensor) else repr(type(positions))
        raise ValueError(f"positions must be None or an int64 or int32 tensor, got {got}")
    if not (has_token_shape(positions, x) or has_token_shape(positions, x[:1])):
        allowed = f"{tuple(x.shape[1:2])} or {tuple(x.shape[:2])}"
        raise ValueError(f"positions must have the shape {allowed}, got {tuple(positions.shape)}")
    if positions.device != x.device:
        raise ValueError(f"positions must be on x's device {x.device}, got {positions.device}")
    if torch.compiler.is_compiling():  # a graph cannot depend on values; the computation uses the context's positions
        return
    own = context.positions_on(x.device)
    if own._version:
        raise ValueError("positions must not be modified, got the context's own, into which something was written")
    if _same_memory(positions, own):  # true for a batch's positions: saves a wait for the GPU
        return
    wrong = (positions != own).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        kind = "global positions" if context.documents is None else "positions within each document"
        if context.pattern is not None and (context.pattern.depths or context.pattern.copies):
            kind = "depths, or positions of clean frames"
        raise ValueError(
            f"positions must be this rank's {kind}: at {at} it is {int(own[at[-1]])}, got {int(positions[at])}"
        )


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """True if they are one tensor, or one is the other detached, as checkpointing does."""
    return (a.dtype, a.shape, a.stride(), a.data_ptr()) == (b.dtype, b.shape, b.stride(), b.data_ptr())
