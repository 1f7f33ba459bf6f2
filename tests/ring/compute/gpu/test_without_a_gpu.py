"""Inputs of GPUs, without one: portions, rows of 16 bytes, parts of a merge, turns of threads."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ring.caching.bounded_cache import BoundedCache
from ring.compute import kernel_calls
from ring.compute.gpu import graph_replay
from ring.compute.gpu.merge_table import list_lanes, make_entries
from ring.compute.gpu.partial_results import Part, as_output, takes_part
from ring.compute.kernels import CUDNN, FLASH_CPU, MATH
from ring.compute.kernels.kernel import Kernel
from ring.compute.kernels.operands import over_batch
from ring.plan.blocks import Heads
from ring.plan.rows import Rows
from ring.plan.tile import Mask, Tile
from ring.strided_view import batched


def portioned(tile: Tile, most: int, monkeypatch: pytest.MonkeyPatch, kernel: Kernel = CUDNN) -> Any:
    """In portions of so many bytes, of a call with batch 3 and head dim 8."""
    monkeypatch.setattr(kernel_calls, "MAX_WORKSPACE", most)
    whole: Any = SimpleNamespace(shape=(3, 1000, 1000, 8))
    return kernel_calls.portions(kernel, tile, whole, 8)


@pytest.mark.parametrize(
    ("most", "counts"), [(1, [1] * 5), (12288, [1] * 5), (24576, [2, 2, 1]), (49152, [4, 1]), (5 * 12288, [5])]
)
def test_a_backward_goes_by_groups_of_heads(most: int, counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """5 groups of 2 query heads; 4 folds of 7 rows that see 4 folds of 9 keys: 64 tokens, 4 bytes each for every batch,
    head of a group and number of it, 12288 bytes a group.
    """
    rows, keys = Rows(10, 2, 7, 50, 4, head_step=3), Rows(20, 1, 9, 60, 4, head_step=1)
    tile = Tile(rows, keys, Heads(5, 2, 30, 4, 1), Heads(5, 1, 40, 2, 1), Mask.FULL)
    firsts = zip(accumulate(counts, initial=0), counts, strict=False)
    for part, (i, n) in zip(portioned(tile, most, monkeypatch), firsts, strict=True):
        assert (part.query_heads, part.key_heads) == (Heads(n, 2, 30 + 4 * i, 4, 1), Heads(n, 1, 40 + 2 * i, 2, 1))
        assert part.query_rows.key == replace(rows, start=10 + 3 * i).key
        assert part.key_rows.key == replace(keys, start=20 + i).key


def test_listed_rows_are_cut_into_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = replace(Rows.of(np.array([[3, 4, 9]])), head_step=5)
    tile = Tile(listed, listed, Heads(2, 1, 0, 1, 1), Heads(2, 1, 0, 1, 1), Mask.FULL)
    first, second = portioned(tile, 1, monkeypatch)
    assert first.query_rows.listed().tolist() == [[3, 4, 9]]
    assert second.query_rows.listed().tolist() == second.key_rows.listed().tolist() == [[8, 9, 14]]
    unordered = replace(tile, key_heads=Heads.of(((0,), (3,), (4,))))
    assert portioned(unordered, 1, monkeypatch) == [unordered]
    assert portioned(tile, 1, monkeypatch, FLASH_CPU) == [tile] == portioned(tile, 1, monkeypatch, MATH)


@pytest.mark.parametrize("row_step", [1, 4, 32])
def test_lanes_are_those_with_rows_of_a_part(row_step: int) -> None:
    """A listed row of one of 6 heads is in a listed lane. Others are listed only where steps do not divide row_step."""
    parts = [
        (Rows(3, 8, 5, 64, 3), Heads(1, 1, 0, 1, 1)), (Rows(1, 4, 20, head_step=1), Heads(3, 1, 1, 1, 1)),
        (Rows(7, 12, 4), Heads(1, 1, 4, 1, 1)), (Rows.of(np.array([[2, 9]])), Heads(1, 1, 5, 1, 1)),
    ]  # fmt: skip
    tables, held = [], set[tuple[int, int]]()
    for rows, heads in parts:
        out = torch.empty(rows.folds, 1, heads.groups, heads.per_group, rows.length, 8)
        tables.append(make_entries(Part(rows, heads, out, None), row_step))
        for group in range(heads.groups):
            listed = rows.listed().ravel() + group * rows.head_step
            held |= {(int(row) % row_step, heads.start + group) for row in listed}
    of_heads, entries = (np.concatenate(column) for column in zip(*tables, strict=True))
    lanes = {divmod(int(lane), 6) for lane in list_lanes(of_heads, entries, row_step, 6)}
    assert held <= lanes
    wanted = {1: {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1}, 4: {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 4},
              32: {0: 4, 1: 8, 2: 8, 3: 8, 4: 8, 5: 32}}[row_step]  # fmt: skip
    assert {head: sum(lane[1] == head for lane in lanes) for head in range(6)} == wanted


STRIDED = {  # of (batch, head, row), and where it begins, in numbers of 2 bytes; strides of what is given, None: a copy
    "rows of a shard": ((2, 3, 5), (120, 8, 24), 0, (120, 8, 24)),
    "begins elsewhere": ((2, 3, 5), (120, 8, 24), 4, None),
    "batches elsewhere": ((2, 3, 5), (124, 8, 24), 0, None),
    "heads elsewhere": ((2, 3, 5), (160, 12, 32), 0, None),
    "rows elsewhere": ((2, 3, 5), (160, 8, 28), 0, None),
    "one batch, wherever the next would be": ((1, 3, 5), (7, 8, 24), 0, (120, 8, 24)),
    "one head, wherever the next would be": ((2, 1, 5), (120, 3, 24), 0, (120, 120, 24)),
    "one row, wherever the next would be": ((2, 3, 1), (120, 8, 5), 0, (120, 8, 8)),
    "every row the same": ((2, 3, 5), (24, 8, 0), 0, (24, 8, 0)),
}


@pytest.mark.parametrize(("sizes", "strides", "begin", "wanted"), STRIDED.values(), ids=STRIDED)
def test_rows_for_gpus_begin_at_multiples_of_16_bytes(
    sizes: tuple[int, ...], strides: tuple[int, ...], begin: int, wanted: tuple[int, ...] | None
) -> None:
    """And where there is one batch, head or row, its stride is what it would be were the rest contiguous."""
    x = torch.arange(512, dtype=torch.bfloat16).as_strided((*sizes, 8), (*strides, 1), begin)
    found = batched(x[None, :, :, None])
    assert torch.equal(found, x) and (found.data_ptr() == x.data_ptr()) is (wanted is not None)
    assert found.is_contiguous() if wanted is None else found.stride() == (*wanted, 1)


def test_rows_for_gpus_have_their_numbers_side_by_side() -> None:
    x = torch.arange(2048, dtype=torch.bfloat16).view(2, 32, 4, 8).transpose(1, 3)[None, :, :, None]
    found = batched(x)
    assert torch.equal(found, x.reshape(found.shape)) and found.is_contiguous()


def test_each_row_of_the_batch_brings_its_sequences() -> None:
    found = over_batch(np.array([0, 3, 4, 9]), 3)
    assert found.dtype == np.int32 and found.tolist() == [0, 3, 4, 9, 12, 13, 18, 21, 22, 27]


B, N, H, D = 2, 12, 6, 8
LISTED = Rows.of(np.array([[4, 5, 6, 7], [0, 1, 2, 3], [8, 9, 10, 11]]))


def part_of(memory: torch.Tensor, folds: int, per_group: int) -> Part:
    """A (B, N, H, D) tensor as the tile of a call that takes all of it."""
    length, groups = N // folds, H // per_group
    tile = memory.view(B, folds, length, groups, per_group, D).permute(1, 0, 3, 4, 2, 5)
    return Part(Rows(0, 1, length, length, folds), Heads(groups, per_group, 0, per_group, 1), tile, None)


def test_parts_become_outputs_or_are_merged() -> None:
    memory = torch.randn(B, N, H, D).bfloat16()
    for folds, per_group in product((1, 3), (1, 2, 6)):
        found = as_output(part_of(memory, folds, per_group), memory, torch.bfloat16)
        assert found is not None and found.data_ptr() == memory.data_ptr() and torch.equal(found, memory)
    part = part_of(memory, 3, 2)
    by_head = torch.randn(B, H, N, D).bfloat16().transpose(1, 2).unflatten(1, (3, 4)).unflatten(3, (3, 2))
    others = {
        "another type": replace(part, out=part.out.float()),
        "rows from the second on": replace(part, rows=replace(part.rows, start=1)),
        "every other row": replace(part, rows=Rows(0, 2, 4, 4, 3)),
        "segments in another order": replace(part, rows=LISTED),
        "rows that go by the head": replace(part, rows=replace(part.rows, head_step=1)),
        "heads the other way round": replace(part, heads=Heads.of(((4, 5), (2, 3), (0, 1)))),
        "among others in memory": part_of(torch.randn(2, B, N, H, D).bfloat16()[0], 3, 2),
        "laid out by heads": replace(part, out=by_head.permute(1, 0, 3, 4, 2, 5)),
        "fewer rows": replace(part, rows=Rows(0, 1, 4, 4, 2), out=part.out[:2]),
    }
    assert {name for name, one in others.items() if as_output(one, memory, torch.bfloat16) is not None} == set()
    assert takes_part(part.rows, part.heads, part.out) and takes_part(LISTED, part.heads, part.out)
    assert not takes_part(part.rows, Heads.of(((0, 3), (1, 4), (2, 6))), part.out), "heads that are listed"
    assert not takes_part(part.rows, part.heads, part.out.transpose(4, 5)), "numbers that do not lie side by side"
    assert not takes_part(Rows(0, 3, 4, 1, 3), part.heads, part.out), "folds that lie between each other"


def test_threads_on_one_stream_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """All calls are on one stream, and captured after the first, with the same memory."""
    inputs, outputs, turn = [torch.empty(4)], [torch.empty(4)], threading.Lock()
    graph = SimpleNamespace(replay=lambda: torch.mul(inputs[0], 2.0, out=outputs[0]))

    def captured(*_: Any) -> graph_replay._Replay:
        return graph_replay._Replay(graph, inputs, outputs, [], turn)

    for name, value in (
        ("_captured", captured),
        ("WARMUP_CALLS", 0),
        ("_call_counts", BoundedCache(2)),
        ("_replays", BoundedCache(2)),
    ):
        monkeypatch.setattr(graph_replay, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=7))

    def wrong(number: float) -> list[float]:
        x, found = torch.full((4,), number), list[float]()
        for _ in range(2000):
            (doubled,) = graph_replay.replayed(f"call {number}", [x], lambda x: [2 * x])
            found += [y for y in doubled.tolist() if y != 2 * number]
        return found

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(wrong, (1.0, 2.0))) == [[], []]
    finally:
        sys.setswitchinterval(before)
