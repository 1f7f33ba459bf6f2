"""The oracle: attention over a `Pattern`, dense, in fp64, by formula; output, log-sum-exp and gradients.

    s_ij = scale * q_i . k_j          lse_i = log sum_j c_ij e^{s_ij}        P_ij = c_ij e^{s_ij - lse_i}
    O = P V                           dV = P^T dO                            D = rowsum(dO * O)
    dS = P * (dO V^T - D + dlse)      dQ = scale * dS K                      dK = scale * dS^T Q

c is the multiplicity of `reference.pattern`; one softmax over this multiset of keys equals LongNet's mixture
of branches (arXiv 2307.02486, equations 9-10). A row that no branch selects, or whose scores are all -inf, has
out = 0, lse = -inf, gradient 0.

softcap t   s_ij = t tanh(scale * q_i . k_j / t), before the mask (Gemma 2). Its derivative 1 - (s_ij / t)^2 is one more
            factor of dS in dQ and dK.
sinks b_h   one for each query head (gpt-oss): each of its rows sees one more key, of score b_h and value 0, so that
            lse_i = log(e^b + sum_j c_ij e^{s_ij}) and db = sum_i e^{b - lse_i} (dlse_i - D_i). Neither softcap nor
            scale applies to it. A row that sees nothing else has out = 0, lse = b_h, dq = 0. b_h = -inf is no sink.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from reference import validators
from reference.documents import check_tokens
from reference.pattern import Pattern, check_pattern, multiplicity

BLOCK_ELEMENTS = 2**26  # of one (B, Hq, rows, Nk) matrix: bounds the memory for long sequences


@torch.no_grad()
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    *,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out (B, Nq, Hq, Dv) and lse (B, Hq, Nq), both fp64.

    NaN and inf propagate by IEEE arithmetic: a zero weight times NaN is NaN.

    Args:
        q, k, v: (B, Nq, Hq, D), (B, Nk, Hk, D), (B, Nk, Hk, Dv): tokens before heads, unlike torch's own attention,
            which cannot always be seen. Query head h uses key/value head h // (Hq / Hk).
        pattern: the attention mask.
        q_positions, k_positions: int64 >= 0, (Nq,) and (Nk,), in the whole sequence, also with packed documents.
            Default 0, 1, ...; the tokens must then be the whole sequence.
        scale: default D ** -0.5.
        sinks: (Hq,), one score per query head, -inf for a head without one; None: no head has one.
        softcap: t > 0; None: scores are not capped.

    Raises:
        ValueError: shapes, positions or pattern are inconsistent, or softcap is not a positive number.
    """
    return _Problem(q, k, v, pattern, q_positions, k_positions, scale, sinks, softcap).attention()


@torch.no_grad()
def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    weights: str = "attached",
) -> tuple[Tensor, ...]:
    """Return dq (B, Nq, Hq, D), dk (B, Nk, Hk, D), dv (B, Nk, Hk, Dv) and, with sinks, dsinks (Hq,), all fp64.

    They are the gradients of sum(dout * out) + sum(dlse * lse).

    weights="detached" is for comparison with torchscale: it is not the gradient of `attention`. With O_b the output of
    branch b alone, D_b = rowsum(dO * O_b) and dS = sum_b M_b * e^{s - lse} * (dO V^T - D_b + dlse). A sink is a branch
    with output 0.

    Args:
        q, k, v: (B, Nq, Hq, D), (B, Nk, Hk, D), (B, Nk, Hk, Dv). Query head h uses key/value head h // (Hq / Hk).
        pattern: the attention mask.
        dout: (B, Nq, Hq, Dv).
        dlse: (B, Hq, Nq), or None for zeros.
        q_positions, k_positions: int64 >= 0, (Nq,) and (Nk,), in the whole sequence, also with packed documents.
            Default 0, 1, ...; the tokens must then be the whole sequence.
        scale: default D ** -0.5.
        sinks: (Hq,), one score per query head, -inf for a head without one; None: no head has one.
        softcap: t > 0; None: scores are not capped.
        weights: "detached" treats LongNet's mixture weights (shares of the softmax denominator) as constants.

    Raises:
        ValueError: shapes, positions or pattern are inconsistent, softcap is not a positive number, or weights has
            another value.
    """
    if weights not in ("attached", "detached"):
        raise ValueError(f"weights must be 'attached' or 'detached', got {weights!r}")
    return _Problem(q, k, v, pattern, q_positions, k_positions, scale, sinks, softcap).gradients(dout, dlse, weights)


@torch.no_grad()
def attention_and_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, ...]:
    """Return out, lse, dq, dk, dv and, with sinks, dsinks of `attention` and `gradients`, which share the softmax if it
    is one block.

    Args:
        q, k, v: (B, Nq, Hq, D), (B, Nk, Hk, D), (B, Nk, Hk, Dv). Query head h uses key/value head h // (Hq / Hk).
        pattern: the attention mask.
        dout: (B, Nq, Hq, Dv).
        dlse: (B, Hq, Nq), or None for zeros.
        q_positions, k_positions: int64 >= 0, (Nq,) and (Nk,), in the whole sequence, also with packed documents.
            Default 0, 1, ...; the tokens must then be the whole sequence.
        scale: default D ** -0.5.
        sinks: (Hq,), one score per query head, -inf for a head without one; None: no head has one.
        softcap: t > 0; None: scores are not capped.

    Raises:
        ValueError: shapes, positions or pattern are inconsistent, or softcap is not a positive number.
    """
    x = _Problem(q, k, v, pattern, q_positions, k_positions, scale, sinks, softcap)
    return (*x.attention(), *x.gradients(dout, dlse, "attached"))


class _Softmax(NamedTuple):
    """Softmax of R rows.

    p       (B, Hq, R, Nk): P
    lse     (B, Hq, R)
    sink    (B, Hq, R, 1): the sink's probability, e^{b - lse}
    dead    (B, Hq, R, 1): True for rows in which no key has weight
    c       (Hq, R, Nk): multiplicity
    slope   (B, Hq, R, Nk): derivative of the softcap, or None
    """

    p: Tensor
    lse: Tensor
    sink: Tensor
    dead: Tensor
    c: Tensor
    slope: Tensor | None


class _Problem:
    """Validated inputs in fp64, heads first, with k and v repeated for the query heads that share them."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pattern: Pattern,
        q_positions: Tensor | None,
        k_positions: Tensor | None,
        scale: float | None,
        sinks: Tensor | None,
        softcap: float | None,
    ) -> None:
        check_pattern(pattern)
        arguments = pattern, q_positions, k_positions, sinks
        try:
            self.q_positions, self.k_positions = _checked_positions(q, k, v, *arguments)
        except ValueError as error:
            try:
                _checked_positions(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), *arguments)
            except (ValueError, IndexError):
                raise error from None
            raise ValueError(f"{error}; heads first? Write q.transpose(1, 2), and so for k and v") from None
        self.pattern, self.group = pattern, q.shape[2] // k.shape[2]
        self._cached: tuple[slice, _Softmax] | None = None
        self.scale = q.shape[3] ** -0.5 if scale is None else scale
        self.softcap = None if softcap is None else validators.positive("softcap", softcap)
        self.q, self.k, self.v = (t.double().transpose(1, 2) for t in (q, k, v))  # (B, H, N, D), of v (B, H, N, Dv)
        self.has_sinks = sinks is not None
        sinks = self.q.new_full(self.q.shape[1:2], -torch.inf) if sinks is None else sinks.to(self.q)
        self.sinks = sinks.view(-1, 1, 1)  # (Hq, 1, 1)
        if self.group > 1:
            self.k, self.v = (t.repeat_interleave(self.group, dim=1) for t in (self.k, self.v))

    def attention(self) -> tuple[Tensor, Tensor]:
        """Return out and lse, in the form of the public `attention`."""
        lse = self.q.new_zeros(self.q.shape[:-1])  # (B, Hq, Nq)
        out = self.v.new_zeros(*lse.shape, self.v.shape[-1])  # (B, Hq, Nq, Dv)
        for rows in self.blocks():
            x = self.softmax(rows)
            lse[:, :, rows] = x.lse
            out[:, :, rows] = (x.p @ self.v).masked_fill(x.dead, 0.0)
        return out.transpose(1, 2).contiguous(), lse

    def gradients(self, dout: Tensor, dlse: Tensor | None, weights: str) -> tuple[Tensor, ...]:
        """Return dq, dk, dv and, with sinks, dsinks, in the form of the public `gradients`."""
        batch, heads, queries, _ = self.q.shape
        dlse = self.q.new_zeros(self.q.shape[:-1]) if dlse is None else dlse
        shapes = (batch, queries, heads, self.v.shape[-1]), (batch, heads, queries)
        for name, grad, shape in zip(("dout", "dlse"), (dout, dlse), shapes, strict=True):
            if grad.shape != shape:
                raise ValueError(f"{name} must have the shape {shape}, got {tuple(grad.shape)}")
        dout, dlse = dout.double().transpose(1, 2), dlse.double().unsqueeze(-1)  # (B, Hq, Nq, Dv), (B, Hq, Nq, 1)
        dq, dk, dv = torch.zeros_like(self.q), torch.zeros_like(self.k), torch.zeros_like(self.v)  # (B, Hq, N, D or Dv)
        dsinks = torch.zeros_like(self.sinks)  # (Hq, 1, 1)
        for rows in self.blocks():
            p, _, sink, dead, c, slope = self.softmax(rows)
            # A row without weight passes no gradient on, not even an infinite one (that of lse^2 is -inf there).
            do, dl = dout[:, :, rows].masked_fill(dead, 0.0), dlse[:, :, rows].masked_fill(dead, 0.0)
            dp = do @ self.v.mT  # (B, Hq, R, Nk)
            if weights == "attached":
                delta = (do * (p @ self.v)).sum(-1, keepdim=True)  # (B, Hq, R, 1)
                ds = p * (dp - delta + dl)
            else:
                delta, ds = torch.zeros_like(dl), torch.zeros_like(p)
                for branch in self.pattern.branches:
                    share = p / c.clamp(min=1) * self.count(rows, replace(self.pattern, branches=(branch,)))
                    weight = share.sum(-1, keepdim=True)  # (B, Hq, R, 1), of this branch in the mixture
                    alone = share @ self.v / weight.masked_fill(weight == 0, 1.0)  # (B, Hq, R, Dv)
                    ds += share * (dp - (do * alone).sum(-1, keepdim=True) + dl)
            dsinks += (sink * (dlse[:, :, rows] - delta)).sum((0, 2), keepdim=True)[0]
            if slope is not None:
                ds *= slope
            dq[:, :, rows] = self.scale * (ds @ self.k).masked_fill(dead, 0.0)
            dk += self.scale * (ds.mT @ self.q[:, :, rows])
            dv += p.mT @ do
        grads = dq.transpose(1, 2).contiguous(), self.fold(dk), self.fold(dv)
        return (*grads, dsinks.masked_fill(self.sinks == -torch.inf, 0.0).flatten()) if self.has_sinks else grads

    def blocks(self) -> Iterator[slice]:
        batch, heads, queries, _ = self.q.shape
        # Use small blocks on a CPU: twice as fast, since not every operation maps fresh memory.
        elements = BLOCK_ELEMENTS // 16 if self.q.device.type == "cpu" else BLOCK_ELEMENTS
        rows = max(1, elements // max(1, batch * heads * self.k.shape[2]))
        return (slice(start, start + rows) for start in range(0, queries, rows))

    def count(self, rows: slice, pattern: Pattern) -> Tensor:  # (Hq, R, Nk)
        return multiplicity(pattern, self.q_positions[rows], self.k_positions, self.q.shape[1])

    def softmax(self, rows: slice) -> _Softmax:
        """Return the softmax of some rows. Caches the last: for a short sequence forward and backward share them."""
        if self._cached is None or self._cached[0] != rows:
            self._cached = rows, self._softmax(rows)
        return self._cached[1]

    def _softmax(self, rows: slice) -> _Softmax:
        c, slope = self.count(rows, self.pattern), None
        s = self.scale * (self.q[:, :, rows] @ self.k.mT)
        if self.softcap is not None:
            s = self.softcap * torch.tanh(s / self.softcap)
            slope = 1 - (s / self.softcap) ** 2
        s = s.masked_fill(c == 0, -torch.inf)
        dead = (s == -torch.inf).all(-1, keepdim=True)  # nothing is selected, or only scores of -inf
        top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -torch.inf)
        top = torch.maximum(top, self.sinks)
        top = top.masked_fill(top == -torch.inf, 0.0)  # -inf - -inf would be NaN
        e, sink = c * torch.exp(s - top), torch.exp(self.sinks - top)
        total = e.sum(-1, keepdim=True) + sink  # (B, Hq, R, 1)
        # Compute P from e / total, not from lse, in which a huge maximum absorbs the logarithm.
        weights = total.masked_fill(total == 0, 1.0)
        return _Softmax(e / weights, (top + total.log()).squeeze(-1), sink / weights, dead, c, slope)

    def fold(self, x: Tensor) -> Tensor:
        """(B, Hq, Nk, D) -> (B, Nk, Hk, D), D of k or v: the sum over the query heads that share a key/value head."""
        batch, heads, keys, dim = x.shape
        x = x.reshape(batch, heads // self.group, self.group, keys, dim).sum(2)
        return x.transpose(1, 2).contiguous()


def _checked_positions(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the positions of queries and keys. Raises ValueError unless the arguments fit each other."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    fitting = q.ndim == k.ndim == v.ndim == 4 and q.shape[::3] == k.shape[::3] and k.shape[:3] == v.shape[:3]
    if not fitting or not q.shape[3] or not v.shape[3]:
        raise ValueError(f"q must be (B, Nq, Hq, D), k (B, Nk, Hk, D), v (B, Nk, Hk, Dv), D and Dv >= 1; got {shapes}")
    if not k.shape[2] or q.shape[2] % k.shape[2]:
        raise ValueError(f"query heads must be a multiple of the key/value heads; got {shapes}")
    if q_positions is None and k_positions is None and q.shape[1] != k.shape[1]:
        raise ValueError(f"queries and keys differ in number and have no positions; got {shapes}")
    if sinks is not None and sinks.shape != q.shape[2:3]:
        raise ValueError(f"sinks must have the shape ({q.shape[2]},), one per query head; got {tuple(sinks.shape)}")
    pattern.validate(q.shape[2])
    queries = None if q_positions is not None else q.shape[1]
    if k_positions is None:
        pattern.validate_tokens(queries, k.shape[1])
    elif queries is not None:
        check_tokens(pattern.packed, queries)
    return _positions("q_positions", q_positions, q), _positions("k_positions", k_positions, k)


def _positions(name: str, positions: Tensor | None, x: Tensor) -> Tensor:
    """Validated positions of the tokens of x (B, N, H, D), int64 (N,) on its device."""
    if positions is None:
        return torch.arange(x.shape[1], device=x.device)
    if positions.dtype not in (torch.int32, torch.int64) or positions.shape != x.shape[1:2]:
        got = f"{positions.dtype} of shape {tuple(positions.shape)}"
        raise ValueError(f"{name} must be int64 of shape ({x.shape[1]},), got {got}")
    if (positions < 0).any():
        raise ValueError(f"{name} must be >= 0, got {int(positions.min())}")
    return positions.to(x.device, torch.int64)
