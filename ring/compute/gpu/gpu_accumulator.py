"""The merge on GPUs: all partial results of a row in one pass. `ring.compute.accumulator` merges them one by one.

A naive merge reads and writes the whole fp32 accumulator for every partial result: more bytes than all partial results
have together. Here they stay pending as the kernels returned them, in 16 bits and on their own grids, until one pass
of `ring.compute.gpu.merge_kernel` computes the output. The same pass sums gradients.

A partial result that covers everything, as a branch without dilation returns, becomes the output: only rows that other
results cover as well are rewritten. So do several that kernels write in place (`ring.plan.cover`). The reference,
`ring.compute.accumulator`, takes listed heads.
"""

from __future__ import annotations

import torch

from ring.compute.accumulator import Accumulator, Sum
from ring.compute.gpu.merge_kernel import Job, run
from ring.compute.gpu.partial_results import MAX_PENDING, Part, as_output, takes_part, whole
from ring.plan.blocks import Heads
from ring.plan.rows import Rows
from ring.strided_view import StridedView


class _PendingParts:
    """Partial results of a (B, N, H, D) tensor that are not combined yet. weighted: average them by lse; else sum.
    sinks, (H,): lse of one more partial result, of output 0, that the final job merges.

    Results that the kernel does not take go to `_plain`, the reference, whose tensors become one more partial result.
    """

    def __init__(self, like: torch.Tensor, weighted: bool, sinks: torch.Tensor | None = None) -> None:
        self._like, self._weighted = like, weighted
        self._sinks = None if sinks is None else sinks.to(torch.float32).contiguous()
        self._parts: list[Part] = []
        self._output: torch.Tensor | None = None  # memory of the result, in which the first parts are
        self._in_place = 0  # number of these
        self._bytes = 0
        self._plain: Accumulator | Sum | None = None

    def place(self, rows: Rows, heads: Heads) -> torch.Tensor | None:
        if self._output is None:
            self._output = torch.empty(self._like.shape, dtype=self._like.dtype, device=self._like.device)
        return StridedView(self._output).place(rows, heads)

    def add(self, part: Part) -> None:
        if self._output is not None and _share_memory(part.out, self._output):
            self._parts.insert(self._in_place, part)
            self._in_place += 1
        else:
            self._parts.append(part)
        self._bytes += part.out.nbytes
        if self._bytes > MAX_PENDING * 4 * self._like.numel():
            self.materialize()

    def materialize(self) -> Accumulator | Sum:
        """Combine all parts into the plain accumulator."""
        if self._plain is None:
            self._plain = Accumulator(self._like) if self._weighted else Sum(self._like)
        if self._parts:
            lse = self._plain.lse if isinstance(self._plain, Accumulator) else None
            run([self._job(self._plain.out, lse)])
        return self._plain

    def result(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        job = self.final_job(dtype)
        run([job])
        return job.out, job.lse

    def final_job(self, dtype: torch.dtype) -> Job:
        """Return the job that computes the result in `dtype`."""
        like = self._like
        batch, tokens, heads, _ = like.shape
        lse = torch.empty(batch, heads, tokens, dtype=torch.float32, device=like.device) if self._weighted else None
        in_place = sum(
            part.rows.folds * part.rows.length * part.heads.groups * part.heads.per_group
            for part in self._parts[: self._in_place]
        )
        if self._output is not None and self._output.dtype == dtype and in_place == tokens * heads:
            return self._job(self._output, lse, self._sinks, self._in_place)
        for number, part in enumerate(self._parts):
            out = as_output(part, like, dtype)
            if out is not None:
                self._parts.insert(0, self._parts.pop(number))
                return self._job(out, lse, self._sinks, 1)
        return self._job(torch.empty(like.shape, dtype=dtype, device=like.device), lse, self._sinks)

    def _job(
        self, out: torch.Tensor, lse: torch.Tensor | None, sinks: torch.Tensor | None = None, in_place: int = 0
    ) -> Job:
        """Return a job that combines all parts and the plain accumulator, and forget the parts. `out` may be the plain
        accumulator or have the first parts: a program reads its rows before it writes them.
        """
        parts, plain = self._parts, self._plain
        self._parts, self._output, self._in_place, self._bytes = [], None, 0, 0
        return Job(parts if plain is None else [*parts, whole(plain)], out, lse, self._like.dtype, sinks, in_place)


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


class CombinedAccumulator:
    """Output and lse of the own query rows, like `Accumulator`, from partial results in 16 bits or fp32."""

    def __init__(self, like: torch.Tensor, sinks: torch.Tensor | None = None) -> None:
        self._pending = _PendingParts(like, weighted=True, sinks=sinks)

    def merge(self, rows: Rows, heads: Heads, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge a partial result. out: (F, B, groups, per_group, L, D); lse the same without D."""
        if takes_part(rows, heads, out):
            self._pending.add(Part(rows, heads, out, lse))
        else:
            plain = self._pending.materialize()
            assert isinstance(plain, Accumulator)
            plain.merge(rows, heads, out, lse)

    def result(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse), out in `dtype`."""
        out, lse = self._pending.result(dtype)
        assert lse is not None
        return out, lse


class CombinedSum:
    """Gradients, like `Sum`, from summands in 16 bits or fp32."""

    def __init__(self, like: torch.Tensor) -> None:
        self._pending = _PendingParts(like, weighted=False)

    def place(self, rows: Rows, heads: Heads) -> torch.Tensor | None:
        """Return memory of the sum for a summand that is then added, (F B, heads, L, D); None if there is no such view.
        Summands in it must not overlap.
        """
        return self._pending.place(rows, heads)

    def add(self, rows: Rows, heads: Heads, tile: torch.Tensor) -> None:
        """Add a summand, (F, B, groups, per_group, L, D)."""
        if takes_part(rows, heads, tile):
            self._pending.add(Part(rows, heads, tile, None))
        else:
            plain = self._pending.materialize()
            assert isinstance(plain, Sum)
            plain.add(rows, heads, tile)

    def materialize(self) -> None:
        """Add all pending summands: the buffer of one is about to change."""
        self._pending.materialize()

    def result(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the sum in `dtype`."""
        return self._pending.result(dtype)[0]

    def final_job(self, dtype: torch.dtype) -> Job:
        return self._pending.final_job(dtype)

    @staticmethod
    def results(sums: list[CombinedSum], dtype: torch.dtype) -> list[torch.Tensor]:
        """Return each sum in `dtype`, computed together."""
        jobs = [x.final_job(dtype) for x in sums]
        run(jobs)
        return [job.out for job in jobs]
