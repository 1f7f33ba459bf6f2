"""`ring_attention` on simulated ranks: a wrong call and calls that differ are told alike on all; equal ones are taken.

What is wrong with arguments on one rank alone, `tests/ring/test_attention_call.py` has.
"""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from reference.pattern import Branch, Pattern
from ring import Layout, ring_attention, validation
from ring.comm.transport import MissingRanks, SoloTransport
from ring.compute.kernels import candidates, fa4
from ring.compute.kernels.kernel import HOPPER, KernelSetting, Scores
from ring.settings import Settings
from tests.support.attention_cases import inputs
from verification.run.simulation.simulated_transport import SimulatedTransport
from verification.run.simulation.simulation import Simulation

pytestmark = pytest.mark.ranks

Arguments = dict[str, Any]  # of ring_attention, by name
DENSE = Pattern.dense()


class Unspeakable:
    """Nothing that an argument may be; and who wants to say what was given, fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __repr__(self) -> str:
        raise self.error


def together(*changes: Arguments, before: Arguments | None = None) -> list[str]:
    """Return what ring_attention raises on each rank, typed, when rank i calls it with changes[i]; or "fine"."""
    world = len(changes)

    def step(transport: SimulatedTransport) -> str:
        arguments: Arguments = {name: torch.ones(1, 2, 2, 4) for name in "qkv"}
        arguments |= {"group": transport, "pattern": DENSE, "layout": Layout.contiguous(2 * world, world)}
        try:
            if before is not None:
                ring_attention(**arguments | before)
            ring_attention(**arguments | changes[transport.rank])
        except Exception as error:  # of any type: which it is, is what is asked
            return f"{type(error).__name__}: {error}"
        return "fine"

    return Simulation(world, 0).run(step)


@pytest.mark.parametrize(
    "pair",
    [
        ({"scale": 1}, {"scale": 1.0}), ({"scale": 0.0}, {"scale": -0.0}), ({"bucket": 1},) * 2,
        ({"softcap": 1}, {"softcap": 1.0}), ({"softcap": 1e30},) * 2, ({"sinks": -torch.full((2,), math.inf)},) * 2,
        ({"sinks": torch.zeros(2)}, {"sinks": -torch.zeros(2)}),
        ({"sinks": torch.zeros(2)}, {"sinks": torch.nn.Parameter(torch.zeros(2), requires_grad=False)}),
        ({"bucket": 2**40},) * 2, ({"scale": sys.float_info.max},) * 2, ({"scale": -sys.float_info.max},) * 2,
    ],
)  # fmt: skip
def test_calls_that_mean_the_same_agree(pair: tuple[Arguments, Arguments]) -> None:
    assert together(*pair) == ["fine"] * 2


BUCKET = "ValueError: rank 1: bucket must be None or a number of tokens from 1 to 2**40, got "
SCALE = "ValueError: rank 1: scale must be None or a finite number, got "
SOFTCAP = "ValueError: rank 1: softcap must be None or a number from 1e-30 to 1e30, got "
SINKS = "ValueError: rank 1: sinks must be finite"
LAYOUT = "ValueError: rank 1: layout must be for the 2 ranks of the group, got one for "
TOO_MANY = "an integer of too many digits"
WRONG: list[tuple[Arguments, str]] = [
    ({"scale": math.nan}, f"{SCALE}nan"),
    ({"scale": -math.inf}, f"{SCALE}-inf"),
    ({"scale": 10**5000}, f"{SCALE}{TOO_MANY}"),
    ({"bucket": 2**40 + 1}, f"{BUCKET}1099511627777"),
    ({"bucket": 10**100 + 1}, f"{BUCKET}{TOO_MANY}"),
    *(({"softcap": t}, f"{SOFTCAP}{t}") for t in (0.0, -1.0, math.nan, math.inf, 1e31)),
    ({"softcap": 10**5000}, f"{SOFTCAP}{TOO_MANY}"),
    ({"sinks": torch.tensor([0.0, math.nan])}, f"{SINKS}, or -inf for no sink, got nan for query head 1"),
    ({"sinks": torch.tensor([math.inf, 0.0])}, f"{SINKS}, or -inf for no sink, got inf for query head 0"),
    ({"exchange": ["ring"]}, "ValueError: rank 1: exchange must be one of"),
    ({"kernel": None}, "ValueError: rank 1: kernel must be one of"),
    ({"name": b"layer"}, "ValueError: rank 1: name must be None or a string, got <class 'bytes'>"),
    ({"pattern": Pattern((Branch(heads=range(2, 3)),))},
     "ValueError: rank 1: pattern must be one for the 2 query heads"),
    # Rank 2 has no tokens: what rank 1 holds fits.
    ({"layout": Layout.from_cuts(range(4), (0, 2, 4, 4))}, f"{LAYOUT}3"),
    ({"q": np.zeros((1, 2, 2, 4))}, "ValueError: rank 1: q must be a (batch, local tokens, heads, head dim) tensor"),
    ({"kernel": "cudnn"},
     "NotImplementedError: rank 1: kernel 'cudnn' takes cuda tensors, got cpu; 'auto' and 'math' take any"),
    # An error is of its kind for all; if Python has no such kind, of the nearest, and says what it was.
    ({"kernel": Unspeakable(TypeError("no words"))}, "TypeError: rank 1: no words"),
    ({"kernel": Unspeakable(KeyError("no words"))}, """KeyError: "rank 1: 'no words'"""),
    ({"kernel": Unspeakable(torch.OutOfMemoryError("no words"))}, "RuntimeError: rank 1: OutOfMemoryError: no words"),
    ({"kernel": Unspeakable(MissingRanks((), "no words"))}, "RuntimeError: rank 1: MissingRanks: "),
    ({"kernel": Unspeakable(UnicodeDecodeError("utf8", b"", 0, 1, "no words"))},
     "ValueError: rank 1: UnicodeDecodeError: 'utf8' codec can't decode"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "said"), WRONG, ids=[f"{[*wrong]} {said[-20:]}" for wrong, said in WRONG])
def test_whatever_is_wrong_on_one_rank_is_said_on_all(arguments: Arguments, said: str) -> None:
    first, second = together({}, arguments)
    assert first == second and first.startswith(said), first
    assert together(arguments, arguments)[0] == first.replace("rank 1", "rank 0")


TYPES: list[tuple[str, Any, Any]] = [  # what a right call had before, and what equals it but is of another type
    ("bucket", 1, True), ("bucket", 2, 2.0), ("bucket", 2, np.int64(2)), ("scale", 1.0, True), ("scale", 0, False),
    ("sinks", torch.zeros(2), torch.zeros(2).double()), ("sinks", torch.zeros(2), torch.zeros(3)),
    ("softcap", 1.0, True), ("softcap", 0.5, torch.tensor(0.5)), ("softcap", 0.5, np.float32(0.5)),
    ("scale", 0.5, np.float32(0.5)), ("scale", 0.5, complex(0.5)), ("scale", 0.5, torch.tensor(0.5)),
    ("return_lse", True, 1), ("return_lse", True, np.bool_(True)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "right", "wrong"), TYPES)
def test_equal_arguments_of_another_type_are_refused(name: str, right: Any, wrong: Any) -> None:
    """Settings of calls are cached by their arguments, so an equal one of another type would find them."""
    for said in together({name: wrong}, {name: wrong}, before={name: right}):
        assert said.startswith(f"ValueError: rank 0: {name} must"), said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({name: torch.ones(1, 17, 2, 4).long() for name in "qkv"}, "dtype must be one of"),
        ({"q": np.zeros((1, 17, 2, 4))}, "q must be a"),
    ],
)
def test_autocast_hides_nothing_that_is_wrong(changes: Arguments, said: str) -> None:
    arguments: Arguments = {name: torch.ones(1, 17, 2, 4) for name in "qkv"} | changes
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=said):
        ring_attention(**arguments, pattern=DENSE, layout=Layout.contiguous(17, 1))


@pytest.mark.parametrize("name", ("q", "k", "v", "out", "lse"))
def test_inputs_changed_before_backward_are_refused(name: str) -> None:
    """Gradients from the changed numbers would be wrong."""
    q, k, v = (x.requires_grad_() for x in inputs()[:3])
    out, lse = ring_attention(q, k, v, DENSE, Layout.contiguous(17, 1), return_lse=True)
    with torch.no_grad():
        {"q": q, "k": k, "v": v, "out": out, "lse": lse}[name].zero_()
    with pytest.raises(RuntimeError, match="inplace operation"):
        torch.autograd.grad(out.sum(), (q, k, v))


def documents(*lengths: int) -> Arguments:
    return {"pattern": Pattern.dense(documents=lengths)}


def tree(*lengths: int) -> Arguments:
    """A prompt and two answers."""
    return {"pattern": Pattern.tree((None, 0, 0), lengths)}


ORDER = "calls on a group must come in the same order on every rank"
DOCUMENTS = "documents must be the same on every rank: "
SLICES = "slices must be the same on every rank: "
VALUES = "sinks must be the same on every rank: "
DIFFERENT: list[tuple[tuple[Arguments, ...], str]] = [
    (({"bucket": 3}, {"bucket": 4}), "bucket must be the same on every rank: rank 0 has 3, rank 1 4"),
    (({}, {}, {"bucket": 5}), "bucket must be the same on every rank: rank 0 has None, rank 2 5"),
    (({"scale": 0.0}, {}), "scale must be the same on every rank: rank 0 has 0.0, rank 1 None"),
    # Which a sum would drop.
    (({"scale": 1e-20}, {"scale": 2e-20}), "scale must be the same on every rank: rank 0 has 1e-20, rank 1 2e-20"),
    (({"softcap": 1.5}, {}), "softcap must be the same on every rank: rank 0 has 1.5, rank 1 None"),
    (({}, {"v": torch.ones(1, 2, 2, 3)}), "head dim of v must be the same on every rank: rank 0 has 4, rank 1 3"),
    (({}, {"sinks": torch.ones(2)}),
     "dtype of sinks must be the same on every rank: rank 0 has None, rank 1 torch.float32"),
    (({"sinks": torch.zeros(2)}, {"sinks": torch.zeros(2)}, {"sinks": torch.tensor([0.0, 1e-9])}),
     f"{VALUES}rank 0 has 0.0 as number 1 of 2, rank 2 {float(torch.tensor(1e-9))} as number 1 of 2"),
    (({"sinks": torch.zeros(2)}, {"sinks": -torch.full((2,), math.inf)}),
     f"{VALUES}rank 0 has 0.0 as number 0 of 2, rank 1 -inf as number 0 of 2"),
    (({"name": "größte ∞"}, {}),
     f"{ORDER}: rank 0 is in the forward of call 1 ('größte ∞'), rank 1 in the forward of call 1"),
    ((documents(4), {}), f"{DOCUMENTS}rank 0 has (4), rank 1 None"),
    (({}, documents(1, 1, 1, 1)), f"{DOCUMENTS}rank 0 has None, rank 1 (1, 1, 1, 1)"),
    ((documents(1, 1, 2), documents(1, 2, 1)), f"{DOCUMENTS}rank 0 has 1 as number 1 of 3, rank 1 2 as number 1 of 3"),
    ((documents(4), documents(4, 0)), f"{DOCUMENTS}rank 0 has none as number 1 of 1, rank 1 0 as number 1 of 2"),
    ((documents(*9000 * (0,), 1, 3), documents(*9000 * (0,), 3, 1)),
     f"{DOCUMENTS}rank 0 has 1 as number 9000 of 9002, rank 1 3 as number 9000 of 9002"),
    ((tree(1, 2, 1), tree(1, 1, 2)),
     SLICES + "rank 0 has {} as number 1 of 4, rank 1 {} as number 1 of 4".format(
         ["branch 0", 1, 3, 1, 3, None, 0], ["branch 0", 1, 2, 1, 2, None, 0])),
    (({}, documents(*9000 * (0,), 4)), f"{DOCUMENTS}rank 0 has None, rank 1 (0, 0, 0, 0, 0, 0, ...)"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), DIFFERENT, ids=[said[:80] for _, said in DIFFERENT])
def test_ranks_that_differ_are_told_in_what(changes: tuple[Arguments, ...], said: str) -> None:
    assert together(*changes) == [f"ValueError: {said}"] * len(changes)


@pytest.mark.parametrize("name", ("q", "k", "v"))
def test_one_tensor_requiring_gradients_is_a_difference(name: str) -> None:
    wanted = {name: torch.ones(1, 2, 2, 4, requires_grad=True)}
    said = "ValueError: requires_grad must be the same on every rank: rank 0 has False, rank 1 True"
    assert together({}, wanted) == [said] * 2


def test_sinks_requiring_gradients_are_a_difference() -> None:
    q = torch.ones(1, 2, 2, 4, requires_grad=True)
    first, second = ({"q": q, "sinks": torch.zeros(2).requires_grad_(x)} for x in (False, True))
    said = "ValueError: requires_grad of sinks must be the same on every rank: rank 0 has False, rank 1 True"
    assert together(first, second) == [said] * 2


class OneRankMore(SoloTransport):
    """A rank of two, which needs nothing of the other one."""

    world_size = 2

    def all_gather(self, payload: bytes) -> list[bytes]:
        return [payload] * 2


def test_calls_are_checked_anew_on_other_groups() -> None:
    layout, own = Layout.contiguous(4, 2), Pattern.dense(causal=True, window=0)
    q, k, v = torch.ones(3, 1, 2, 2, 4)
    ring_attention(q, k, v, own, layout, group=OneRankMore(), exchange="direct")
    with pytest.raises(ValueError, match="layout must be for the 1 ranks of the group, got one for 2"):
        ring_attention(q, k, v, own, layout, group=SoloTransport(), exchange="direct")


FIRST, SECOND = Branch(4, 2, (0, 1), range(0, 2)), Branch(None, 3, 1)
PATTERN = Pattern((FIRST, SECOND), causal=True)
OTHERS = {
    "causal": replace(PATTERN, causal=False),
    "the order of branches": Pattern((SECOND, FIRST), True),
    "a segment length": Pattern((replace(FIRST, segment_length=5), SECOND), True),
    "a dilation rate": Pattern((FIRST, replace(SECOND, dilation_rate=2)), True),
    "an offset": Pattern((FIRST, replace(SECOND, offset=2)), True),
    "offsets of heads": Pattern((replace(FIRST, offset=(1, 0)), SECOND), True),
    "heads": Pattern((Branch(4, 2, (0,), range(0, 1)), SECOND), True),
    "a window": Pattern((FIRST, replace(SECOND, window=5)), True),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_patterns_that_differ_in_anything_are_refused(other: Pattern) -> None:
    first, second = together({"pattern": PATTERN}, {"pattern": other})
    assert first == second and first.startswith("ValueError: pattern must be the same on every rank: rank 0 has")


def at_its_end(*order: int) -> tuple[Layout, Layout]:
    return Layout.from_cuts(order, (0, 2, 4)), Layout.from_cuts((*order[:2], order[3], order[2]), (0, 2, 4))


SIX = Layout.contiguous(6, 3)


@pytest.mark.parametrize(
    "layouts",
    [
        (Layout.from_cuts(range(6), (0, 2, 3, 6)), SIX, SIX),  # rank 0 has its tokens by either of them
        (Layout.from_cuts(range(7), (0, 2, 4, 7)), SIX, SIX),
        at_its_end(0, 1, 2, 3), at_its_end(2, 3, 0, 1), at_its_end(1, 3, 0, 2),  # one run, two runs, and listed
    ],
)  # fmt: skip
def test_layouts_that_differ_in_anything_are_refused(layouts: tuple[Layout, ...]) -> None:
    first, *others = together(*({"layout": layout} for layout in layouts))
    assert set(others) == {first}
    assert first.startswith("ValueError: layout must be the same on every rank: rank 0 has")


@pytest.mark.parametrize(
    ("kernel", "dtype", "dims", "refused"),
    [
        ("flash", torch.bfloat16, (64, 64), None), ("flash", torch.float16, (256, 256), None),
        ("flash", torch.float16, (12, 12), "head dims up to 256 that are multiples of 8"),
        ("flash", torch.bfloat16, (192, 128), "the same for keys and values"),
        ("cudnn", torch.bfloat16, (192, 128), None),
        ("cudnn", torch.bfloat16, (264, 264), "of compute capability 9.0 also up to 256"),
        ("cudnn", torch.float32, (64, 64), "got dtype torch.float32, head dim 64, of values 64"),
        ("fa4", torch.bfloat16, (128, 128), None), ("fa4", torch.bfloat16, (40, 40), "head dims 32, 64, 96, 128, 160"),
        ("fa4", torch.float32, (64, 64), "takes dtype float16 or bfloat16 and"),
    ],
)  # fmt: skip
def test_gpu_kernels_without_a_tile_are_refused(
    kernel: str, dtype: torch.dtype, dims: tuple[int, int], refused: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Needs no GPU: nothing is computed."""
    q, v = (SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(1, 8, 3, dim)) for dim in dims)
    call: Any = SimpleNamespace(settings=Settings(kernel=kernel), q=q, k=q, v=v, scoring=Scores(1.0))
    monkeypatch.setattr(fa4, "installed_version", lambda: fa4.VERSION)
    setting = KernelSetting(candidates(kernel), "cuda", HOPPER, dtype, dims, 1, 1, call.scoring)
    monkeypatch.setattr(validation, "make_kernel_setting", lambda *_: setting)
    with nullcontext() if refused is None else pytest.raises(NotImplementedError, match=refused):
        validation._validate_kernel(call)


@pytest.mark.parametrize("kernel", ["flash", "cudnn", "fa4"])
def test_missing_kernel_features_are_named(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A softcap, or the package of FlashAttention-4. Needs no GPU."""
    q = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, shape=(1, 8, 3, 64))
    call: Any = SimpleNamespace(
        settings=Settings(kernel=kernel, softcap=30.0), q=q, k=q, v=q, scoring=Scores(1.0, 30.0)
    )
    monkeypatch.setattr(fa4, "installed_version", lambda: None)
    missing, lacking = "is not installed: pip install", f"{kernel!r} has no softcap, got softcap=30.0"
    with pytest.raises(NotImplementedError, match=missing if kernel == "fa4" else lacking):
        validation._validate_kernel(call)
