"""The merge on GPUs: all partial results of a row in one pass, where `ring.compute.accumulator` takes one after the
other.

A naive merge reads and writes the whole fp32 accumulator for every partial result: more bytes than all partial results
have together. Here they are kept as the kernels left them, in 16 bits and on their own grids, until one pass of
`ring.compute.gpu.merge_kernel` computes the output. The same pass sums gradients.

A partial result that covers everything, as a branch without dilation gives it, becomes the output: only rows that
others hold too are touched. The plain version, `ring.compute.accumulator`, is the reference, and takes the partial
results whose heads are listed.
"""

from __future__ import annotations

import torch

from ring.compute.accumulator import Accumulator, Sum
from ring.compute.gpu.merge_kernel import Job, run
from ring.compute.gpu.partial_results import Part, as_output, takes_part, whole
from ring.plan.blocks import Heads
from ring.plan.rows import Rows

# Partial results are kept until they hold this many times the bytes of an fp32 accumulator; then they are merged.
MOST_KEPT = 2.0


class _Kept:
    """Partial results of a (B, N, H, D) tensor, kept until they are combined. `weighted`: by lse, else summed.

    What the kernel does not take goes to `plain`, the reference, whose tensors are then one more partial result.
    """

    def __init__(self, like: torch.Tensor, weighted: bool) -> None:
        self._like, self._weighted = like, weighted
        self._parts: list[Part] = []
        self._kept = 0
        self._plain: Accumulator | Sum | None = None
        self.since: torch.cuda.Event | None = None
        if torch.cuda.is_current_stream_capturing():
            self.since = torch.cuda.current_stream().record_event()

    def keep(self, part: Part) -> None:
        self._parts.append(part)
        self._kept += part.out.nbytes
        if self._kept > MOST_KEPT * 4 * self._like.numel():
            self.materialize()

    def materialize(self) -> Accumulator | Sum:
        """Combine what there is into the plain accumulator."""
        if self._plain is None:
            self._plain = Accumulator(self._like) if self._weighted else Sum(self._like)
        if self._parts:
            lse = self._plain.lse if isinstance(self._plain, Accumulator) else None
            run([self._job(self._plain.out, lse)], self.since)
        return self._plain

    def result(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        job = self.last(dtype)
        run([job], self.since)
        return job.out, job.lse

    def last(self, dtype: torch.dtype) -> Job:
        """What is left to do for the result, in that type."""
        like = self._like
        batch, tokens, heads, _ = like.shape
        lse = torch.empty(batch, heads, tokens, dtype=torch.float32, device=like.device) if self._weighted else None
        for number, part in enumerate(self._parts):
            out = as_output(part, like, dtype)
            if out is not None:
                self._parts.insert(0, self._parts.pop(number))
                return self._job(out, lse)
        return self._job(torch.empty(like.shape, dtype=dtype, device=like.device), lse)

    def _job(self, out: torch.Tensor, lse: torch.Tensor | None) -> Job:
        """Write what all parts make together, the plain accumulator among them. It, or the first part, may be what is
        written to: a program reads its rows before it writes them. Forget the parts.
        """
        parts, plain = self._parts, self._plain
        self._parts, self._kept = [], 0
        return Job(parts if plain is None else [*parts, whole(plain)], out, lse, self._like.dtype)


class CombinedAccumulator:
    """As `Accumulator`: output and lse of the own query rows, from partial results in 16 bits or fp32."""

    def __init__(self, query: torch.Tensor) -> None:
        self._kept = _Kept(query, weighted=True)

    def merge(self, rows: Rows, heads: Heads, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge a partial result. out: (F, B, groups, per_group, L, D); lse the same without D."""
        if takes_part(rows, heads, out):
            self._kept.keep(Part(rows, heads, out, lse))
        else:
            plain = self._kept.materialize()
            assert isinstance(plain, Accumulator)
            plain.merge(rows, heads, out, lse)

    def result(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse), out in that type."""
        out, lse = self._kept.result(dtype)
        assert lse is not None
        return out, lse


class CombinedSum:
    """As `Sum`: gradients, from summands in 16 bits or fp32."""

    def __init__(self, like: torch.Tensor) -> None:
        self._kept = _Kept(like, weighted=False)

    def add(self, rows: Rows, heads: Heads, tile: torch.Tensor) -> None:
        """Add a summand, (F, B, groups, per_group, L, D)."""
        if takes_part(rows, heads, tile):
            self._kept.keep(Part(rows, heads, tile, None))
        else:
            plain = self._kept.materialize()
            assert isinstance(plain, Sum)
            plain.add(rows, heads, tile)

    def materialize(self) -> None:
        """Add what was kept: a tile lies in a buffer that is about to change."""
        self._kept.materialize()

    def result(self, dtype: torch.dtype) -> torch.Tensor:
        """The sum in that type."""
        return self._kept.result(dtype)[0]

    def last(self, dtype: torch.dtype) -> Job:
        return self._kept.last(dtype)

    @property
    def since(self) -> torch.cuda.Event | None:
        return self._kept.since

    @staticmethod
    def results(sums: list[CombinedSum], dtype: torch.dtype) -> list[torch.Tensor]:
        """The sum of each in that type, all at once."""
        jobs = [one.last(dtype) for one in sums]
        run(jobs, sums[0].since)
        return [job.out for job in jobs]
