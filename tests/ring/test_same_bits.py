"""`same_bits`: the plain reference's bits on any ranks, in any layout of whole chunks; refusals on every rank."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from reference import Branch, Pattern
from reference.cost import Setting
from reference.same_bits import attention_in_chunks
from reference.slices import Slice
from ring import Layout, ring_attention
from ring.attend_parts import fixed_order
from ring.comm.transport import SoloTransport
from ring.nn import ContextParallel
from ring.plan.exchange import parse
from ring.plan.plan import plan_of
from ring.validation import _validate_same_bits
from tests.support.attention_cases import call, normal, plain
from verification.run.rank import same_bits
from verification.run.simulation.simulated_transport import SimulatedTransport
from verification.run.simulation.simulation import RankError, Simulation

CHUNK = 16
DOCUMENTS = (37, 0, 5, 48, 16)  # 106 tokens
PATTERNS = {
    "dense": Pattern.dense(),
    "causal": Pattern.dense(causal=True),
    "documents": Pattern.dense(causal=True, documents=DOCUMENTS),
    "window": Pattern.dense(causal=True, window=21),
    "window both ways": Pattern.dense(window=9, documents=DOCUMENTS),
    "longnet": Pattern((Branch(32, 1), Branch(64, 2, (0, 1, 1, 0)), Branch(None, 3, 1)), causal=True),
    "per head": Pattern((Branch(48, heads=range(1)), Branch(None, 2, heads=range(1, 4), window=30)), causal=True),
}
MASKS = {
    "spans": Pattern.spans([(3, 20), (43, 60)], documents=DOCUMENTS, window=30),
    "tree": Pattern.tree([None, 0, 0, 2], [40, 30, 20, 16]),
    "slices": Pattern.slices([((0, 50), (0, 40), "causal"), ((30, 106), (40, 106), (-30, 12))]),
    "counted twice": Pattern.slices([((0, 70), (9, 90), "both"), ((20, 50), (0, 60), "full")], DOCUMENTS, counted=True),
    "bands": Pattern((
        Branch(64, 2, (0, 1, 1, 0), slices=(Slice(low=-12, high=-8), Slice(high=-14), Slice(low=-7, high=2))),
        Branch(window=20, slices=(Slice(50, 54, 60, 64), Slice(low=-40, high=0), Slice(50, 54, 55, 58))),
    )),
}  # fmt: skip
ALL = PATTERNS | MASKS
N = 106


def tensors(dtype: torch.dtype, keys: int = N, batch: int = 2) -> list[Tensor]:
    """q, k, v, dout, dlse"""
    shapes = (batch, N, 4, 8), (batch, keys, 2, 8), (batch, keys, 2, 4), (batch, N, 4, 4), (batch, 4, N)
    kinds = [dtype] * 4 + [torch.float64 if dtype == torch.float64 else torch.float32]
    return [normal(*shape, seed=seed).to(kind) for seed, (shape, kind) in enumerate(zip(shapes, kinds, strict=True))]


def dealt(n: int, p: int, documents: Sequence[int] | None, seed: int) -> Layout:
    """Whole chunks in a random order, in unequal shards."""
    chunks, begin, drawn = [], 0, random.Random(seed)
    for length in documents or (n,):
        chunks += [range(begin + at, begin + min(at + CHUNK, length)) for at in range(0, length, CHUNK)]
        begin += length
    drawn.shuffle(chunks)
    ends = list(accumulate(map(len, chunks), initial=0))
    cuts = sorted(drawn.choice(ends) for _ in range(p - 1))
    return Layout.from_cuts([token for chunk in chunks for token in chunk], [0, *cuts, n])


def results(
    x: Sequence[Tensor], pattern: Pattern, layout: Layout, key_layout: Layout | None = None, **options: Any
) -> list[Tensor]:
    """Return out, lse, dq, dk, dv of the whole sequence."""
    of_keys = layout if key_layout is None else key_layout

    def step(transport: SimulatedTransport) -> list[Tensor]:
        rank = transport.rank
        leaves = [on.shard(t, rank).requires_grad_() for on, t in zip((layout, of_keys, of_keys), x, strict=False)]
        out, lse = call(*leaves, pattern, layout, key_layout=of_keys, group=transport, same_bits=CHUNK, **options)
        incoming = [layout.shard(x[3], rank), layout.shard(x[4], rank, 2)]
        return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, incoming)]

    found = Simulation(layout.world_size, seed=1).run(step)
    places = (layout, 1), (layout, 2), (layout, 1), (of_keys, 1), (of_keys, 1)
    return [on.unshard([rank[i] for rank in found], dim) for i, (on, dim) in enumerate(places)]


def expected(x: Sequence[Tensor], pattern: Pattern, **options: Any) -> Sequence[Tensor]:
    q, k, v, dout, dlse = x
    return attention_in_chunks(q, k, v, pattern, CHUNK, dout=dout, dlse=dlse, **options)


def assert_same(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    names = ("out", "lse", "dq", "dk", "dv")
    assert [name for name, x, y in zip(names, found, wanted, strict=True) if not same_bits(x, y)] == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pattern", ALL.values(), ids=ALL)
def test_bits_are_those_of_the_reference(pattern: Pattern, dtype: torch.dtype) -> None:
    x = tensors(dtype)
    options: dict[str, Any] = {"softcap": 3.0, "sinks": normal(4, seed=9).to(x[4].dtype)} if pattern.causal else {}
    wanted = expected(x, pattern, **options)
    layout = Layout.whole_chunks(N, 2, CHUNK, pattern.documents)
    assert_same(results(x, pattern, layout, exchange="direct", **options), wanted)


@pytest.mark.parametrize("exchange, ranks", [
    ("ring", 2), ("ring", 4), ("direct", 3), ("gather", 3), ("all-to-all", 2), ("ring:2+direct", 4),
    ("all-to-all:2+ring", 4), ("direct+all-to-all:2", 4), ("ring", 8),
])  # fmt: skip
@pytest.mark.parametrize("pattern", ALL.values(), ids=ALL)
def test_bits_are_those_of_one_rank(pattern: Pattern, exchange: str, ranks: int) -> None:
    x = tensors(torch.float32)
    wanted = results(x, pattern, Layout.contiguous(N, 1))
    layouts = Layout.whole_chunks(N, ranks, CHUNK, pattern.documents), dealt(N, ranks, pattern.documents, ranks)
    for layout, bucket in zip(layouts, (CHUNK, None), strict=True):
        assert_same(results(x, pattern, layout, exchange=exchange, bucket=bucket), wanted)


@pytest.mark.parametrize("pattern", ALL.values(), ids=ALL)
def test_ranks_return_as_many_sums_as_the_reference_counts(pattern: Pattern) -> None:
    layout = Layout.whole_chunks(N, 3, CHUNK, pattern.documents)
    positions = [layout.positions(rank).numpy() for rank in range(3)]
    wanted = Setting(pattern, positions, 1, 4, 2, 8, chunk=CHUNK).returned_slots
    for rank, exchange in product(range(3), ("ring", "direct", "gather")):
        steps = plan_of(pattern, layout, rank, 4, 2, parse(exchange, 3).keys, N, chunk=CHUNK).steps
        assert sum(sent.stop - sent.start for step in steps for sent in step.return_sends) == wanted[rank].sum()


@pytest.mark.parametrize("pattern", [Pattern.dense(causal=True, window=50), PATTERNS["longnet"]], ids=str)
@pytest.mark.parametrize("keys", [40, 170])
def test_keys_of_another_sequence_keep_their_bits(keys: int, pattern: Pattern) -> None:
    x = tensors(torch.float32, keys)
    wanted = expected(x, pattern)
    for exchange in ("ring", "gather"):
        layouts = dealt(N, 3, None, 5), dealt(keys, 3, None, 6)
        assert_same(results(x, pattern, *layouts, exchange=exchange), wanted)


def test_no_result_is_minus_zero() -> None:
    x, pattern = tensors(torch.float32), PATTERNS["causal"]
    x[2].fill_(-1e-45)  # averages of it are rounded to -0.0
    assert_same(results(x, pattern, Layout.contiguous(N, 1)), expected(x, pattern))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_an_entry_has_the_bits_of_a_batch(dtype: torch.dtype) -> None:
    x, pattern = tensors(dtype, batch=3), PATTERNS["longnet"]
    batch = results(x, pattern, Layout.contiguous(N, 1))
    alone = results([t[1:2] for t in x], pattern, dealt(N, 2, None, 3), exchange="ring")
    assert_same(alone, [t[1:2] for t in batch])


def test_later_tokens_change_no_bit_of_a_slice() -> None:
    """Nor if the slice, a window, ends with the shorter sequence."""
    x, pattern = tensors(torch.float32), Pattern.slices([((0, 64), (0, 64), (-20, 0))])
    whole = results(x, pattern, Layout.contiguous(N, 1))
    begin = results([*(t[:, :64] for t in x[:4]), x[4][:, :, :64]], pattern, Layout.contiguous(64, 1))
    assert_same(begin, [whole[0][:, :64], whole[1][:, :, :64], *(t[:, :64] for t in whole[2:])])


def test_strides_of_gradients_change_no_bit() -> None:
    q, dout = normal(1, 64, 4, 12, seed=1).float(), normal(1, 64, 12, 4, seed=2).float().mT
    k, dlse = normal(1, 64, 2, 12, seed=3).float(), torch.zeros(1, 4, 64)
    x, pattern = [q, k, k, dout, dlse], PATTERNS["causal"]
    assert_same(results(x, pattern, Layout.contiguous(64, 1)), expected(x, pattern))


def test_modules_and_compiled_graphs_keep_the_bits() -> None:
    x, pattern = tensors(torch.float32), PATTERNS["causal"]
    q, k, v = x[:3]
    layout = Layout.contiguous(N, 1)
    wanted = results(x, pattern, layout)[0]
    context = ContextParallel(layout, SoloTransport(), same_bits=CHUNK)
    assert same_bits(context.attention(q, k, v, pattern), wanted) and "same_bits=16" in repr(context)
    attend = torch.compile(lambda *qkv: plain(*qkv, pattern, layout, same_bits=CHUNK), fullgraph=True)
    assert same_bits(attend(q, k, v), wanted)


REFUSED = {
    "zigzag": ({"layout": Layout.zigzag(N, 2)}, r"at position 26 on rank 0: write Layout.whole_chunks\(106, 2, 16\)"),
    "reversed": ({"layout": Layout.from_cuts(range(N)[::-1], (0, 58, N))}, "chunks of same_bits=16 tokens whole"),
    "behind": ({"layout": Layout.from_cuts([*range(40, N), *range(40)], (0, 66, N))}, "at position 40 on rank 0"),
    "keys": ({"key_layout": Layout.zigzag(N, 2)}, "key_layout must hold chunks of same_bits=16 tokens whole"),
    "documents": ({"pattern": PATTERNS["documents"]}, r"write Layout.whole_chunks\(106, 2, 16, documents\)"),
    "bucket": ({"bucket": 15}, "bucket must be None or at least same_bits, 16 tokens, got 15"),
    "kernel": ({"kernel": "flash"}, "kernel 'flash' has no fixed bits on cpu, got same_bits=16: use 'auto' or 'math'"),
    "auto": ({"exchange": "auto"}, "exchange 'auto' is not predicted with same_bits"),
    "a shared head": ({"exchange": "all-to-all", "heads": 1}, "divides the query heads of a key/value head"),
    "a head of both": ({"exchange": "all-to-all", "heads": 3}, "got 3 key/value heads for 2 ranks that divide heads"),
    "size": ({"same_bits": 24}, "same_bits must be None or the tokens of a chunk, a multiple of 16"),
    "type": ({"same_bits": True}, "same_bits must be None"),
}  # fmt: skip


@pytest.mark.parametrize("arguments, message", REFUSED.values(), ids=REFUSED)
def test_refusals_name_the_argument_on_every_rank(arguments: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {
        "layout": Layout.whole_chunks(N, 2, CHUNK),
        "pattern": PATTERNS["causal"],
        "same_bits": CHUNK,
    }
    options |= {"exchange": "direct"} | arguments
    heads = options.pop("heads", 2)

    def step(transport: SimulatedTransport) -> None:
        layouts = options["layout"], options.get("key_layout", options["layout"])
        q, k = (torch.ones(1, on.counts[transport.rank], x, 8) for on, x in zip(layouts, (12, heads), strict=True))
        with pytest.raises((ValueError, NotImplementedError), match=message):
            ring_attention(q, k, k, group=transport, **options)

    Simulation(2, seed=1).run(step)


def test_chunks_on_gpus_are_whole_tiles() -> None:
    call: Any = SimpleNamespace(settings=None, q=SimpleNamespace(is_cuda=True))
    with pytest.raises(ValueError, match="same_bits must be a multiple of 128 tokens on GPUs, got 144"):
        _validate_same_bits(call, 144, 2)


def test_other_chunks_on_another_rank_are_refused() -> None:
    layout = Layout.whole_chunks(N, 2, 32)

    def step(transport: SimulatedTransport) -> None:
        x = torch.ones(1, layout.counts[transport.rank], 2, 8)
        ring_attention(x, x, x, PATTERNS["causal"], layout, group=transport, same_bits=32 if transport.rank else 16)

    with pytest.raises(RankError, match="same_bits must be the same on every rank: rank 0 has 16, rank 1 32"):
        Simulation(2, seed=1).run(step)


def test_switches_of_determinism_are_as_before() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with fixed_order():
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
