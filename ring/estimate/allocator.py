"""Predicts the peak of torch's allocator on a GPU, from the plans of some ranks: inputs, results and all between.

    forward   q, k, v, lse, received keys, and the partial results of all tiles until they are merged. One that covers
              everything becomes the output. Partial results of more than twice the bytes of an fp32 accumulator are
              merged into one (`ring.compute.gpu.gpu_accumulator`).
    backward  q, k, v, out, dout, received keys, returned gradients, and for each tile the summands so far and the
              workspace of its kernel: dq in fp32, two numbers for each row; and, where query heads share a key/value
              head, dk and dv in fp32 by FlashAttention-4, or of every query head by the others. Gradients that
              FlashAttention-4 writes in place are there from the beginning.

Buffers from which messages are sent lie in symmetric memory, which is not torch's allocator's: send buffers, gradients,
and received keys that a ring passes on. They are counted in `Pass.buffers`. The memory of a graph that replays short
calls is not counted either.
"""

from __future__ import annotations

from ring.compute.gpu.kernel_times import PASSES, fastest
from ring.compute.gpu.partial_results import MAX_PENDING
from ring.compute.kernel_calls import MAX_WORKSPACE
from ring.compute.kernel_choice import work_of
from ring.compute.kernels import FA4, MATH
from ring.compute.kernels.kernel import HOPPER, Kernel
from ring.estimate.counting import Counted
from ring.estimate.rank_work import kernels_for, rank_plan, size_of
from ring.estimate.rates import Kernels
from ring.estimate.tile_seconds import taking
from ring.plan.cover import cover
from ring.plan.exchanges.key_exchange import KeyExchange
from ring.plan.plan import Plan
from ring.plan.tile import Tile, is_everything

_RANKS = 4  # at most, of which all are looked at
_WIDE = 4  # bytes of fp32


def allocated(
    setting: Counted, exchange: KeyExchange, *, bucket: int, by_default: bool, narrow: bool, kernels: Kernels
) -> tuple[int, int]:
    """Return the bytes of forward and of backward on the fullest of some ranks, for 16-bit tensors."""
    # More plans would take seconds; that of the rank with most pairs is made anyway.
    ranks = range(setting.world) if setting.world <= _RANKS else {0, int(setting.pairs.argmax())}
    plans = [rank_plan(setting, exchange, bucket, by_default, kernels, rank) for rank in ranks]
    return (
        max(_forward(plan, setting) for plan in plans),
        max(_backward(plan, setting, narrow, kernels) for plan in plans),
    )


def _inputs(plan: Plan, setting: Counted) -> tuple[int, int, int, int]:
    """Return the bytes of q, of k and v, of out, and of lse."""
    rows, keys = int(setting.counts[plan.rank]) * setting.heads, int(setting.key_counts[plan.rank]) * setting.kv_heads
    (dim, value_dim), item = setting.dims, setting.batch * setting.itemsize
    return rows * dim * item, keys * setting.slot_bytes()[0], rows * value_dim * item, rows * setting.batch * _WIDE


def _received(plan: Plan, setting: Counted) -> int:
    if any(step.relayed for step in plan.steps):
        return 0
    return plan.sizes.receive_buffers * plan.sizes.receive * setting.slot_bytes()[0]


def _forward(plan: Plan, setting: Counted) -> int:
    q, kv, out, lse = _inputs(plan, setting)
    rows = sum(size_of(tile.query_rows, tile.query_heads) for tile in plan.tiles) * setting.batch
    parts, wide = rows * setting.dims[1] * setting.itemsize, out // setting.itemsize * _WIDE
    given = q + kv + lse + _received(plan, setting)
    if parts > MAX_PENDING * wide:
        return given + out + wide + int(MAX_PENDING * wide)
    whole = any(
        is_everything(tile.query_rows, tile.query_heads, int(setting.counts[plan.rank]), setting.heads)
        for tile in plan.tiles
    )
    return given + parts + rows * _WIDE + (0 if whole else out)


def _backward(plan: Plan, setting: Counted, narrow: bool, kernels: Kernels) -> int:
    q, kv, out, lse = _inputs(plan, setting)
    tiles, tokens = plan.tiles, int(setting.counts[plan.rank])
    chosen = [kernel_of(tile, setting, kernels) for tile in tiles]
    in_place = [kernel.writes_in_place(tile) for tile, kernel in zip(tiles, chosen, strict=True)]
    queries = cover(
        ((x.query_rows, x.query_heads) if placed else None for x, placed in zip(tiles, in_place, strict=True)),
        tokens, setting.heads,
    )  # fmt: skip
    keys = cover(
        ((x.key_rows, x.key_heads) if placed else None for x, placed in zip(plan.local, in_place, strict=False)),
        int(setting.key_counts[plan.rank]), setting.kv_heads,
    )  # fmt: skip
    slot, gradient = setting.slot_bytes(narrow)
    held = q + kv + 2 * out + 2 * lse + _received(plan, setting) + plan.sizes.returned * gradient
    held += (q if queries else 0) + (kv if keys else 0)
    peak, of_dq, wide = 0, 0, q // setting.itemsize * _WIDE
    for number, (tile, kernel) in enumerate(zip(tiles, chosen, strict=True)):
        rows, of_keys = size_of(tile.query_rows, tile.query_heads), size_of(tile.key_rows, tile.key_heads) * slot
        of_dq += 0 if number in queries else rows * setting.dims[0] * setting.batch * setting.itemsize
        new = 0 if number in keys else of_keys
        peak = max(peak, held + of_dq + new + _workspace(tile, kernel, setting))
        of_dq = wide if of_dq > MAX_PENDING * wide else of_dq  # summed
        held += new if number < len(plan.local) else 0
    held += of_dq
    whole = queries or any(is_everything(x.query_rows, x.query_heads, tokens, setting.heads) for x in tiles)
    return max(peak, held + (0 if whole else q))


def _workspace(tile: Tile, kernel: Kernel, setting: Counted) -> int:
    """Return the bytes of a fused backward beyond its operands and results, which `kernel_calls.portions` bounds."""
    rows = size_of(tile.query_rows, tile.query_heads) * setting.batch
    slots, share = size_of(tile.key_rows, tile.key_heads), setting.heads // setting.kv_heads
    elements, bytes_of = setting.batch * sum(setting.dims), setting.itemsize
    of_keys = 0 if share == 1 else slots * elements * (_WIDE if kernel is FA4 else share * bytes_of)
    return min(MAX_WORKSPACE, rows * _WIDE * (setting.dims[0] + 2) + of_keys)


def kernel_of(tile: Tile, setting: Counted, kernels: Kernels) -> Kernel:
    """Return the kernel of a tile's backward, as `ring.compute.kernel_choice` chooses it."""
    usable = taking(kernels_for(setting, kernels), tile)
    return fastest(usable, HOPPER, work_of(tile, PASSES[1], setting.dims, setting.batch)) if usable else MATH
