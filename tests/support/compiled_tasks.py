"""What two ranks do with compiled functions and models that call the ring: importable functions, for a pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from ring import Layout, Pattern, ring_attention
from ring.comm.group import transport_over
from ring.comm.process_group import ProcessGroupTransport
from ring.comm.transport import RecordingTransport
from ring.nn import ContextParallel, LongNetBlock, RingAttention, SelfAttention
from ring.nn.frameworks import recompute

LENGTHS = (16, 23, 30, 37)
PATTERN = Pattern.longnet((4, None), (1, 2), 2, causal=True)


@dataclass
class Compared:
    """Of a function, compiled and not: the greatest difference of its results and gradients; graphs that were made."""

    difference: float
    graphs: int


def compared(name: str, group: str, backend: str) -> Compared:
    """One of FUNCTIONS or MODULES over sequences of all LENGTHS, whose layouts differ."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    over: Any = {"none": None, "group": dist.group.WORLD, "mesh": init_device_mesh("cpu", (2,))}[group]
    function = FUNCTIONS.get(name) or MODULES[name]()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    worst = 0.0
    for tokens in LENGTHS:
        context = ContextParallel(Layout.zigzag(tokens, 2), over)
        plain, found = (results(one, *inputs(name, context), context) for one in (function, compiled))
        worst = max(worst, *(float((x - y).abs().max()) for x, y in zip(plain, found, strict=True)))
    return Compared(worst, torch._dynamo.utils.counters["stats"]["unique_graphs"])


def inputs(name: str, context: ContextParallel) -> list[Tensor]:
    """This rank's: x (1, N, 8) for modules, else q, k, v (1, N, 2, 4)."""
    draw = torch.Generator().manual_seed(context.layout.n)
    shapes = [(1, context.layout.n, 8)] if name in MODULES else [(1, context.layout.n, 2, 4)] * 3
    wholes = [torch.randn(shape, dtype=torch.float64, generator=draw) for shape in shapes]
    return [context.shard(x).requires_grad_() for x in wholes]


def results(function: Callable[..., Tensor], *given: Any) -> list[Tensor]:
    """What it returns, and the gradients, of the sum of its squares, by the tensors that it is given."""
    out, leaves = function(*given), [x for x in given if isinstance(x, Tensor)]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def once(q: Tensor, k: Tensor, v: Tensor, context: ContextParallel) -> Tensor:
    return attend(q.sin(), k, v, context).cos()


def twice_with_lse(q: Tensor, k: Tensor, v: Tensor, context: ContextParallel) -> Tensor:
    """The second call is of other settings, and of the first one's result; gradients flow through its lse."""
    first = attend(q, k, v, context, name="first", scale=0.3)
    found = ring_attention(
        first, k, v, Pattern.dense(), context.layout, group=context.group, exchange="direct", bucket=3,
        kernel="math", return_lse=True, name="second",
    )  # fmt: skip
    assert isinstance(found, tuple)
    return found[0] + found[1].transpose(1, 2).unsqueeze(-1)


def without_gradients_of_keys(q: Tensor, k: Tensor, v: Tensor, context: ContextParallel) -> Tensor:
    return attend(q, k.detach(), v, context) + k


def attend(q: Tensor, k: Tensor, v: Tensor, context: ContextParallel, **options: Any) -> Tensor:
    out = ring_attention(q, k, v, PATTERN, context.layout, group=context.group, **options)
    assert isinstance(out, Tensor)
    return out


def kept(q: Tensor, k: Tensor, v: Tensor, context: ContextParallel) -> Tensor:
    out = checkpoint(once, q, k, v, context, use_reentrant=False, context_fn=recompute.attention_kept)
    assert isinstance(out, Tensor)
    return out


def computed_again(q: Tensor, k: Tensor, v: Tensor, context: ContextParallel) -> Tensor:
    out = checkpoint(once, q, k, v, context, use_reentrant=False)
    assert isinstance(out, Tensor)
    return out


class Inner(nn.Module):
    """`RingAttention` with x as queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = RingAttention(PATTERN)

    def forward(self, x: Tensor, context: ContextParallel) -> Tensor:
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)  # (B, H, N, D)
        out: Tensor = self.attention(heads, heads, heads, context=context)
        return out.transpose(1, 2).flatten(2)


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return make().double()

    return made


FUNCTIONS: dict[str, Any] = {
    "once": once, "twice, with lse": twice_with_lse, "no gradients of keys": without_gradients_of_keys,
    "kept": kept, "computed again": computed_again,
}  # fmt: skip
MODULES: dict[str, Callable[[], nn.Module]] = {
    "RingAttention": Inner,
    "SelfAttention": seeded(lambda: SelfAttention(8, 2, PATTERN, kv_heads=1, qk_norm=True, name="layer 0")),
    "LongNetBlock": seeded(lambda: LongNetBlock(8, 2, (4, 16), (1, 2), name="layer 0")),
}


# --- how often, and whether at all ------------------------------------------------------------------------------------


def forwards_of(name: str, compile_it: bool) -> tuple[int, int]:
    """How many forwards of the ring one forward and backward of a function run, and the number of the last call."""
    torch._dynamo.reset()
    context = ContextParallel(Layout.zigzag(16, 2))
    function = torch.compile(FUNCTIONS[name], fullgraph=True, backend="aot_eager") if compile_it else FUNCTIONS[name]
    seen: list[Any] = []
    prepare = ProcessGroupTransport.prepare
    ProcessGroupTransport.prepare = lambda self, key, outgoing: seen.append(key)  # type: ignore[method-assign]
    try:
        results(function, *inputs(name, context), context)
    finally:
        ProcessGroupTransport.prepare = prepare  # type: ignore[method-assign]
    return sum("forward" in key for key in seen), context.transport.calls.number


def one_rank_drops_its_result(backend: str) -> int:
    """The other rank needs its messages. Returns the number of the last call."""
    torch._dynamo.reset()
    context = ContextParallel(Layout.zigzag(16, 2))

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend(q, k, v, context)
        return out + 1 if context.rank == 1 else q + 1

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    with torch.no_grad():
        compiled(*inputs("once", context))
    return context.transport.calls.number


def two_backwards() -> bool:
    """Whether a graph that is kept goes backward twice, to the same gradients."""
    context = ContextParallel(Layout.zigzag(16, 2))
    leaves = inputs("once", context)
    out, _, number = torch.ops.ring.attention_forward(*leaves, **settings_of(context))
    first, second = (torch.autograd.grad(out.sum(), leaves, retain_graph=True) for _ in range(2))
    assert context.transport.calls.again(int(number), None).backwards == 2
    return all(x.equal(y) for x, y in zip(first, second, strict=True))


def settings_of(context: ContextParallel) -> dict[str, Any]:
    from ring.compiled import name_of, text_of

    return {
        "layout": context.layout.number, "pattern": text_of(PATTERN), "group": name_of(context.group),
        "exchange": "ring", "bucket": None, "kernel_name": "auto", "scale": None, "return_lse": False, "check": True,
        "name": None, "differentiated": True,
    }  # fmt: skip


# --- errors -----------------------------------------------------------------------------------------------------------


def refusals() -> dict[str, str]:
    """What is said of wrong calls within a graph; afterwards a right one runs on the same group."""
    context = ContextParallel(Layout.zigzag(16, 2))
    recording = RecordingTransport(transport_over(None, 2))
    q, k, v = inputs("once", context)
    calls: dict[str, Callable[[], object]] = {
        "a transport": lambda: compiled(q, k, v, context.layout, recording),
        "tokens": lambda: compiled(q[:, :5], k, v, context.layout, None),
        "another layout on rank 1": lambda: compiled(
            q, k, v, Layout.striped(16, 2) if context.rank else context.layout, None
        ),
        "exchange": lambda: compiled(q, k, v, context.layout, None, exchange="post"),
        "nothing": lambda: compiled(q, k, v, context.layout, None),
    }

    def attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, group: Any, **options: Any) -> Any:
        return ring_attention(q, k, v, PATTERN, layout, group=group, **options)

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    said = {}
    for name, act in calls.items():
        torch._dynamo.reset()
        try:
            act()
            said[name] = "fine"
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said
