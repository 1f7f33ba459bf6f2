"""Cases: validation, JSON, tensors that follow from the Case alone, layouts, strided copies."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import given as drawing

from reference import Branch, Pattern, cost
from ring.plan.exchange import NAMES
from tests.support.plain_case import plain
from verification.case import DTYPES, ORDERS, ORDERS_BY_DOCUMENT, SINKS, VALUES, Case, Keys
from verification.case_line import read_case_line, write_case_line
from verification.run.layouts import key_layout_of, layout_of, strided_copy
from verification.search.experiment import on_device
from verification.strategies.cases import cases_and_chunks, cases_of_others

case = partial(
    plain, 4, group=(0, 1, 3), tokens=13, order="zigzag", cuts=(0, 5, 5, 13), batch=2, heads=4, kv_heads=2, head_dim=3,
    pattern=Pattern((Branch(8, 2, (0, 1, 1, 0)), Branch(None, 1, 0, range(1, 3))), causal=True), seed=7,
    exchange="direct", bucket=4, kernel="auto", lse="differentiated", strided=True,
)  # fmt: skip


chunked = partial(plain, 2, tokens=40, order="chunks", same_bits=16)


def test_json_round_trips_cases() -> None:
    for given in (case(score_scale=1), plain(3, scale=-2), case(pattern=Pattern.dense(documents=(0, 12, 1))),
                  case(value_dim=5, softcap=30, sinks="some"), case(keys=Keys(5, "zigzag", (0, 5, 5, 5))),
                  chunked(order="dealt chunks", keys=Keys(40, "chunks")), case(hosts=3),
                  case(hosts=3, exchange="ring+direct"), case(exchange="auto")):  # fmt: skip
        again = Case.from_json(given.to_json())
        assert again == given and hash(again) == hash(given) and "\n" not in given.to_json()
    data = json.loads(case(again="no_grad", measured=True).to_json())
    del data["again"], data["measured"], data["value_dim"], data["softcap"], data["sinks"]
    del data["keys"], data["hosts"], data["same_bits"]
    assert data["pattern"].pop("documents") is None
    assert Case.from_json(json.dumps(data)) == case()


@pytest.mark.parametrize(
    ("field", "values"),
    {
        "world": (0, 2.0, True), "group": ((), (0, 4), (1, 1, 2), "012"), "tokens": (0,), "order": ("random", None),
        "cuts": ((0, 13), (0, 6, 5, 13), (0, 5, 5, 12), (1, 5, 5, 13)), "batch": (-1,), "heads": (3, 5),
        "kv_heads": (0,), "head_dim": (0,), "dtype": ("float8",), "scale": (float("nan"), float("inf"), "1"),
        "score_scale": (0.0, -1.0, 1e4), "values": ("other",), "seed": (-1, 2**63), "exchange": ("all",),
        "value_dim": (0, 2.0), "softcap": (0, -1.0, 1e31, 1e-31, float("nan")), "sinks": ("other", True),
        "bucket": (0,), "kernel": ("cutlass",), "lse": (True,), "strided": (1,), "again": ("never",),
        "keys": ((5,), 5, (0, "zigzag", None), (5, "other", None), (5, "zigzag", (0, 5)), (5, "zigzag", (0, 1, 2, 6))),
        "measured": (None,), "hosts": (0, 2, 6, True), "pattern": (None, Pattern((Branch(heads=range(3, 5)),))),
    }.items(),
)  # fmt: skip
def test_a_bad_field_is_named(field: str, values: tuple[object, ...]) -> None:
    for value in values:
        with pytest.raises(ValueError, match="heads" if isinstance(value, Pattern) else field):
            replace(case(), **{field: value})  # type: ignore[arg-type]


CUT: list[dict[str, Any]] = [
    {"order": "striped"}, {"cuts": (0, 20, 40)}, {"keys": Keys(40, "zigzag")}, {"same_bits": 24}, {"same_bits": 0},
    {"device": "cuda"}, {"same_bits": None}, {"keys": Keys(9, "chunks"), "same_bits": None, "order": "zigzag"},
]  # fmt: skip


@pytest.mark.parametrize("changes", CUT, ids=str)
def test_chunks_that_are_cut_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="same_bits is|orders of chunks need same_bits"):
        chunked(**changes)


def test_chunks_are_whole_in_other_orders_and_on_gpus() -> None:
    whole = chunked(order="contiguous", cuts=(0, 16, 40), pattern=Pattern.dense(documents=(16, 0, 24)))
    assert whole.shards().counts == (16, 24)
    moved = on_device(chunked(bucket=20, order="dealt chunks"), "cuda")
    assert (moved.same_bits, moved.bucket, moved.tokens) == (128, 128, 384)


def test_unrunnable_choices_are_refused() -> None:
    with pytest.raises(ValueError, match="^again is 'no_grad' and exchange is 'auto'"):
        case(exchange="auto", again="no_grad")
    with pytest.raises(ValueError, match="^hosts is 3 and exchange is 'auto'"):
        case(exchange="auto", hosts=3)


def test_last_document_is_lengthened_to_the_sum() -> None:
    for documents in ((), (12,), (14,), (13, 1)):
        with pytest.raises(ValueError, match="documents must add up to the 13 tokens"):
            case(pattern=Pattern.dense(documents=documents))
    assert case(cuts=None).lengthened(16, order="striped") == case(tokens=16, cuts=None, order="striped")
    packed = case(cuts=None, pattern=Pattern.dense(documents=(3, 10)))
    assert packed.lengthened(16) == case(tokens=16, cuts=None, pattern=Pattern.dense(documents=(3, 13)))
    with pytest.raises(ValueError, match="documents must add up to the 12 tokens"):
        replace(packed, keys=Keys(12))
    assert replace(packed, keys=Keys(13, "striped", (0, 3, 3, 13))).lengthened(16).keys == Keys(16, "striped")


def test_slices_fit_both_sequences_and_a_line() -> None:
    line = "tokens=13 world=3 slices=[[0,13,0,5,null,-2],[4,13,5,9,-3,1]] documents=13"
    sliced = read_case_line(line)
    assert sliced.pattern.branches[0].slices == ((0, 13, 0, 5, None, -2), (4, 13, 5, 9, -3, 1))
    assert Case.from_json(sliced.to_json()) == sliced and read_case_line("slices=none").pattern == Pattern.dense()
    for tokens, keys in ((12, None), (None, Keys(8))):
        with pytest.raises(ValueError, match="slices must lie within the (12|8) tokens"):
            replace(sliced, pattern=replace(sliced.pattern, documents=None), tokens=tokens or 13, keys=keys)
    crossed = replace(sliced, pattern=replace(sliced.pattern, documents=None), keys=Keys(9))
    assert (crossed.tokens, crossed.key_tokens) == (13, 9)


def test_an_order_of_two_words_is_written_between_quotes() -> None:
    dealt = read_case_line('tokens=70 world=3 order="dealt chunks" bucket=16 same_bits=16')
    line = write_case_line(dealt)
    assert dealt.order == "dealt chunks" and line is not None and read_case_line(line) == dealt
    with pytest.raises(ValueError, match="'chunks' is no name=value of a Case"):
        read_case_line(line.replace('"', ""))


@pytest.mark.parametrize("keys", (None, Keys(5), Keys(20, "shuffled", (0, 0, 20, 20)), Keys(1, "hilbert")))
def test_keys_may_have_a_sequence_of_their_own(keys: Keys | None) -> None:
    """Shards and tensors of the queries stay; the layout of the keys is the defined one."""
    given, tokens = case(keys=keys), 13 if keys is None else keys.tokens
    q, k, v, dout, dlse = given.tensors()
    assert q.shape == dout.shape == (2, 13, 4, 3) and k.shape == v.shape == (2, tokens, 2, 3)
    assert dlse.shape == (2, 4, 13) and given.key_tokens == tokens
    layout, defined = key_layout_of(given), given.key_shards()
    assert layout.n == tokens and layout.counts == defined.counts
    for rank, positions in enumerate(defined.positions):
        assert layout.positions(rank).tolist() == positions.tolist()
    assert given.for_any_ranks().keys == (keys and keys._replace(cuts=None))
    assert given.shards() is case().shards()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", VALUES)
def test_tensors_are_finite_and_shaped(values: str, dtype: str) -> None:
    for scale in (1.0, 1024.0):
        q, k, v, dout, dlse = case(values=values, dtype=dtype, score_scale=scale).tensors()
        assert q.shape == dout.shape == (2, 13, 4, 3) and k.shape == v.shape == (2, 13, 2, 3)
        assert {x.dtype for x in (q, k, v, dout)} == {DTYPES[dtype]} and dlse.shape == (2, 4, 13)
        assert dlse.dtype == (torch.float64 if dtype == "float64" else torch.float32)
        assert all(x.isfinite().all() and x.is_contiguous() for x in (q, k, v, dout, dlse))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks_and_values_of_another_head_dim(dtype: str) -> None:
    q, k, v, dout, _ = case(dtype=dtype, value_dim=5).tensors()
    assert q.shape == (2, 13, 4, 3) and dout.shape == (2, 13, 4, 5)
    assert k.shape == (2, 13, 2, 3) and v.shape == (2, 13, 2, 5)
    assert case(value_dim=3) == case() and case(value_dim=5).dims == (3, 5) and case().dims == (3, 3)
    many = partial(case, dtype=dtype, heads=40, pattern=Pattern.dense())
    for seed, kind in ((7, many().accumulator_dtype), (8, DTYPES[dtype])):
        for sinks in SINKS:
            *tensors, drawn = many(sinks=sinks, seed=seed).tensors()
            assert drawn.shape == (40,) and drawn.dtype == kind and not drawn.isnan().any()
            assert bool(drawn.isneginf().any()) == (sinks == "some") and (drawn.max() > 1e3) == (sinks == "large")
            plain_ones = many(seed=seed).tensors()
            assert all(torch.equal(x, y) for x, y in zip(tensors, plain_ones, strict=True))


def test_kinds_of_values_are_what_they_say() -> None:
    assert case().tensors()[4].abs().min() > 0 and case(lse="alone").tensors()[4].abs().min() > 0
    assert not case(lse="returned").tensors()[4].any(), "dlse is zero unless lse is differentiated"
    q, k, v, *_ = case(values="ties").tensors()
    assert all((x == x.round()).all() and x.abs().max() < 8 for x in (q, k, v))
    q, k, v, *_ = case(values="onehot").tensors()
    assert all((x.sum(-1) == 1).all() and ((x == 0) | (x == 1)).all() for x in (q, k, v))
    q, k, v, *_ = case(values="constant").tensors()
    assert all((x == x[:, :1]).all() for x in (q, k, v))
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        q, k, *_ = case(values="huge", dtype=dtype, tokens=40, cuts=None, head_dim=8).tensors()
        products = torch.einsum("bihd,bjhd->bhij", q[:, :, :2].double(), k.double())
        assert q.abs().max() < 65504 < products.abs().max()
        assert 100 < (products * 8**-0.5).abs().mean() < 10_000
        products = torch.mul(*case(values="tiny", dtype=dtype).tensors()[1:3]).abs()
        normal = torch.finfo(DTYPES[dtype]).tiny
        assert (products < normal).any() and (products > normal).any()


def test_shards_by_definition_are_the_layout_s() -> None:
    for order, cuts in product((*ORDERS, *ORDERS_BY_DOCUMENT), (None, (0, 5, 5, 13))):
        given = case(order=order, cuts=cuts, pattern=Pattern.dense(documents=(6, 0, 7)))
        layout, defined = layout_of(given), given.shards()
        assert layout.counts == defined.counts
        assert all(layout.positions(i).tolist() == defined.positions[i].tolist() for i in range(3))


def test_ranks_layouts_and_tokens_per_call() -> None:
    def order_of(**changes: Any) -> list[int]:
        layout = layout_of(case(**changes))
        return [int(position) for i in range(3) for position in layout.positions(i)]

    assert case().ranks == (0, 1, 3) and case(group=None, cuts=None).ranks == (0, 1, 2, 3)
    assert layout_of(case(group=None, cuts=None, order="contiguous")).counts == (3, 3, 3, 4)
    assert layout_of(case()).counts == (5, 0, 8) and order_of() == order_of(cuts=None)
    assert case(bucket=4).tokens_per_call == 4 and case(bucket=None).tokens_per_call == 1024
    # q and output 4 heads, k and v 2: 12 elements of 2 bytes; 4 (2 x 2 + 3 x 4) bytes a token of a bucket
    long = case(bucket=None, dtype="float16", tokens=60000, cuts=(0, 10000, 10000, 60000))
    assert long.tokens_per_call == 50000 * 24 // (10 * 64)
    shuffled = order_of(order="shuffled")
    assert shuffled == order_of(order="shuffled") != order_of(order="shuffled", seed=8)
    assert sorted(shuffled) == list(range(13)) and layout_of(case(order="shuffled", cuts=None)).counts == (4, 4, 5)


def test_a_line_names_sinks_softcap_and_value_dim() -> None:
    line = "world=4 tokens=13 seed=7 softcap=30 sinks=normal value_dim=4"
    assert read_case_line(line) == plain(
        4, tokens=13, heads=1, kv_heads=1, head_dim=16, seed=7, softcap=30.0, sinks="normal", value_dim=4
    )


@pytest.mark.parametrize(
    "name",
    ("group", "cuts", "scale", "bucket", "value_dim", "softcap", "sinks", "documents", "segment_length", "window"),
)
def test_a_line_writes_none(name: str) -> None:
    assert read_case_line(f"{name}=none") == read_case_line(f"{name}=null") == read_case_line("tokens=16")
    with pytest.raises(ValueError, match=rf"{name} (is '\[?x\]?'; it must be|must be) .*None"):
        read_case_line(f"{name}=x")
    with pytest.raises(ValueError, match="heads is 'none'; it must be an integer of at least 1"):
        read_case_line("heads=none")


def test_strided_sinks_are_every_second_entry() -> None:
    y = strided_copy(torch.arange(3.0))
    assert torch.equal(y, torch.arange(3.0)) and y.stride() == (2,)


@pytest.mark.parametrize("shape", [(2, 5, 3, 4), (1, 5, 1, 1), (1, 1, 1, 1), (2, 0, 3, 4), (2, 3, 5)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_strided_copy_is_equal_and_strided(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    y = strided_copy(x)
    assert torch.equal(x, y) and y.dtype == dtype and y.storage_offset() > 0
    if x.numel() > max(shape):
        assert not y.is_contiguous() and not y.transpose(1, 2).is_contiguous()
    stored = torch.as_strided(y, (y.untyped_storage().nbytes() // y.element_size(),), (1,), 0)
    assert stored.isnan().sum() == len(stored) - x.numel()


@settings(
    max_examples=60, phases=[Phase.generate], database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
@drawing(cases_of_others(2) | cases_and_chunks(3))
def test_written_lines_read_as_the_same_case(drawn: Case) -> None:
    line, (branch, *others) = write_case_line(drawn), drawn.pattern.branches
    assert read_case_line(line) == drawn if line else others or branch.heads is not None


def test_every_exchange_is_drawn() -> None:
    assert sorted(cost.EXCHANGES) == sorted(NAMES)
