"""Predicts what a call of `ring_attention` takes, before anybody runs it: memory, messages, work and time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from reference import validators
from reference.pattern import Pattern, check_pattern
from ring.compute.kernels.kernel import HALF
from ring.default_bucket import default_bucket
from ring.estimate.counting import MAX_TOKENS, Problem
from ring.estimate.memory import memory_of
from ring.estimate.rank_work import rank_work
from ring.estimate.rates import Rates
from ring.estimate.stages import Work, stage_seconds, stages_of
from ring.estimate.tile_seconds import GPU
from ring.layout import Layout
from ring.plan.exchange import DIRECT, check_name, is_by_host, key_exchange, parse, with_number
from ring.plan.exchanges.key_exchange import KeyExchange
from ring.validation import DTYPES

ORDERS = ("contiguous", "zigzag", "striped", "hilbert", "balanced", "zigzag by document")
DEVICES = ("cpu", "cuda")
BYTES = ("shards", "accumulator", "gradients", "incoming", "kept", "buffers", "memory", "sent")
MAX_RANKS = 2**12
_GRAIN = 128  # tokens a rank: `longest` is a multiple
_MAX_BYTES = 2**60  # of a sequence's tensors: sums of them fit into 64 bits


@dataclass(frozen=True)
class Pass:
    """Forward or backward, on the rank that has most of each.

    Args:
        buffers: bytes for communication.
        memory: bytes of all: shards, buffers and, in forward, the accumulator or, in backward, gradients and incoming.
        sent: bytes.
        messages: sent.
        flops: operations of the matrix products.
        seconds: by the model of `ring.estimate.stages`; None without rates, as all times.
        computing: seconds of the kernels.
        messaging: seconds of the messages, hidden or not.
        exposed: seconds of messages that computing does not hide.
    """

    buffers: int
    memory: int
    sent: int
    messages: int
    flops: int
    seconds: float | None = None
    computing: float | None = None
    messaging: float | None = None
    exposed: float | None = None


@dataclass(frozen=True)
class Estimate:
    """One prediction, on the rank that has most of each, of those that are counted.

    Args:
        tokens, ranks, order, exchange, bucket: the setting. order is "given" for a layout of the caller's.
        shards: bytes of q, k, v, out and lse.
        accumulator: bytes of out and lse in the accumulator's dtype; forward. By heads: of the largest block.
        gradients: bytes of dq, dk and dv in the accumulator's dtype; backward. By heads: of the largest block, and of
            the own rows, in the dtypes in which they are sent.
        incoming: bytes of the gradient of out; backward.
        kept: bytes that each call keeps for its backward beside q, k, v, out and lse, by "direct-kept" and
            "all-to-all-kept"; also part of the buffers. A model holds them of all layers that it does not recompute.
        pairs: (query head, query, key) triples of one batch entry.
        imbalance: pairs of the busiest rank / mean, of all ranks.
        forward, backward: the two passes.
        longest: tokens that fit the given memory, see `longest`; None if no memory is given.
        counted: ranks whose messages and buffers are counted; of more than 32 some, see `ring.estimate.counting`.
    """

    tokens: int
    ranks: int
    order: str
    exchange: str
    bucket: int
    shards: int
    accumulator: int
    gradients: int
    incoming: int
    kept: int
    pairs: int
    imbalance: float
    forward: Pass
    backward: Pass
    longest: int | None = None
    counted: int = 1

    def flat(self) -> dict[str, Any]:
        """Return all fields in one dictionary, those of the passes as forward_memory and so on."""
        row: dict[str, Any] = {}
        for name, value in vars(self).items():
            row |= {f"{name}_{k}": x for k, x in vars(value).items()} if isinstance(value, Pass) else {name: value}
        return row


class Estimates(tuple[Estimate, ...]):
    """Estimates, one a row, and their forms for other programs.

    Args:
        iterable: of the rows, at least one.
    """

    def to_table(self, width: int = 80) -> str:
        """Return a table with a column for each row; those that the width has no room for stand below.

        Args:
            width: characters of a line.
        """
        rows = [row.flat() for row in self]
        names = [name for name in rows[0] if any(row[name] is not None for row in rows)]
        columns = [["", *(_shown(name, row[name]) for name in names)] for row in rows]
        titles = _aligned(["rank with most of each", *(name.replace("_", " ") for name in names)])
        size = max(len(value) for column in columns for value in column) + 2
        most = max(1, (width - len(titles[0])) // size)
        blocks = [[titles, *map(_aligned, columns[at : at + most])] for at in range(0, len(columns), most)]
        return "\n\n".join("\n".join("  ".join(x).rstrip() for x in zip(*block, strict=True)) for block in blocks)

    def to_json(self) -> str:
        """Return a JSON list with an object a row."""
        return json.dumps([row.flat() for row in self], indent=1)


def _aligned(column: list[str]) -> list[str]:
    return [value.ljust(max(map(len, column))) for value in column]


def _shown(name: str, value: Any) -> str:
    """Format bytes in MiB, times in ms, operations and pairs in powers of ten."""
    unit = name.removeprefix("forward_").removeprefix("backward_")
    if unit in BYTES:
        return f"{value / 2**20:,.1f} MiB"
    if isinstance(value, float):
        return f"{value:.3f}" if unit == "imbalance" else f"{1e3 * value:,.3f} ms"
    return f"{value:.4g}" if unit in ("pairs", "flops") else str(value)


@dataclass(frozen=True)
class EstimatedCall:
    """The arguments of `estimate` that do not depend on tokens and ranks."""

    pattern: Pattern
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    batch: int
    dtype: torch.dtype
    exchange: str
    bucket: int | None
    device: str

    def __post_init__(self) -> None:
        check_pattern(self.pattern)
        for name in ("heads", "kv_heads", "head_dim", "value_dim", "batch"):
            validators.integer(name, getattr(self, name), 1, MAX_TOKENS)
        validators.grouped_heads(self.heads, self.kv_heads)
        self.pattern.validate(self.heads)
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; it must be one of {', '.join(map(str, DTYPES))}")
        if not is_by_host(self.exchange):
            check_name(self.exchange, "for 'auto' ring.estimate.choose(...) lists all of them")
        validators.optional(validators.integer, "bucket", self.bucket, 1, MAX_TOKENS)
        validators.choice("device", self.device, DEVICES)

    def problem(self, layout: Layout, key_layout: Layout) -> Problem:
        """Return the problem of a layout, counted as its attributes are read. Raises ValueError for too many bytes."""
        tokens = max(layout.n, key_layout.n) * self.batch * self.heads
        if tokens * (self.head_dim + self.value_dim) * layout.world_size * 8 >= _MAX_BYTES:
            raise ValueError("batch, heads, head_dim and value_dim are too large together: tensors have 2**60 bytes")
        sizes = self.batch, self.heads, self.kv_heads, self.head_dim, self.value_dim, self.dtype.itemsize
        return Problem(self.pattern, layout, key_layout, *sizes)

    def bucket_of(self, layout: Layout, key_layout: Layout) -> int:
        """Return the bucket that `ring_attention` uses."""
        if self.bucket is not None:
            return self.bucket
        return default_bucket(layout, self.heads, self.kv_heads, self.dtype, self.device, key_layout)

    @property
    def narrow(self) -> bool:
        """True if gradients of keys travel in the working dtype."""
        return self.device == "cuda" and self.keys.straight

    @property
    def keys(self) -> KeyExchange:
        """The exchange of keys, which does not depend on the number of ranks."""
        return key_exchange(self.exchange)

    def work(self, rates: Rates | None, bucket: int, strict: bool) -> Work | None:
        """Return what finds the work of a GPU with its exchange of keys; None without kernels of one. strict: as in
        `rank_work`.
        """
        if rates is None or rates.kernels is None:
            return None
        default = self.bucket is None
        return cache(
            partial(rank_work, bucket=bucket, by_default=default, narrow=self.narrow, strict=strict, rates=rates)
        )

    @property
    def operations(self) -> tuple[int, int]:
        """Operations of a pair in all batch entries, forward and backward."""
        of_keys, of_values = (2 * self.batch * dim for dim in (self.head_dim, self.value_dim))
        return of_keys + of_values, 3 * of_keys + 2 * of_values

    def memory(self, problem: Problem, bucket: int, one_sided: bool) -> dict[str, int]:
        """Return the terms of the memory by their names in `Estimate`, each of the rank that has most of it. one_sided:
        the ranks write into each other's memory.
        """
        exchange = parse(self.exchange, problem.ranks)
        terms = [memory_of(problem, exchange, bucket, rank, self.narrow, one_sided) for rank in problem.counted_ranks]
        return {name: max(term[name] for term in terms) for name in terms[0]}

    def peak(self, layout: Layout, one_sided: bool) -> int:
        """Return the bytes of the fullest rank at the peak. one_sided: as in `memory`."""
        terms = self.memory(self.problem(layout, layout), self.bucket_of(layout, layout), one_sided)
        return max(terms["forward_memory"], terms["backward_memory"])


def estimate(
    pattern: Pattern, layout: Layout | None = None, *, tokens: int | Sequence[int] | None = None,
    ranks: int | Sequence[int] | None = None, order: str | None = None, heads: int, kv_heads: int | None = None,
    head_dim: int, value_dim: int | None = None, batch: int = 1, dtype: torch.dtype = torch.bfloat16,
    exchange: str = "ring", bucket: int | None = None, device: str = "cuda", key_layout: Layout | None = None,
    rates: Rates | None = None, memory: int | None = None,
) -> Estimates:  # fmt: skip
    """Predict memory, messages, work and time of `ring_attention`, forward and backward, on the rank with most of each.

    Bytes, messages and operations are exactly those of the call, by the schedules of all ranks; of more than 32 ranks
    by those of some (`ring.estimate.counting`). Times are those of a model, which `ring.estimate.stages` states.
    Exchanges across hosts are experimental: their times were not compared with those of hosts.

    Args:
        pattern: the attention mask.
        layout: the order of the tokens on the ranks; None: made from tokens, ranks and order.
        tokens: of the sequence; several give a row each.
        ranks: p; several give a row each.
        order: one of ORDERS; None: "zigzag".
        heads, kv_heads: query heads, and key/value heads; None: as many.
        head_dim, value_dim: of queries and keys, and of values; None: head_dim.
        batch: sequences.
        dtype: of the tensors.
        exchange: as in `ring_attention`: "ring", "direct", "direct-kept", "gather", "all-to-all", "all-to-all-kept", or
            two, as "all-to-all:2+ring". Without a number, as "all-to-all+ring", only with rates that have
            ranks_per_host.
        bucket: in tokens; None: the default one.
        device: "cuda" or "cpu": the default bucket depends on it, and the dtype in which gradients travel.
        key_layout: of keys of another sequence; None: `layout`.
        rates: of the machine, as `Rates.of("NVIDIA H200")`; None: no times.
        memory: bytes of a rank, to find the longest sequence in this order; None: not looked for.

    Returns:
        A row for each number of tokens and of ranks.

    Raises:
        ValueError: an argument is invalid, or cannot be counted exactly.
    """
    kv_heads, value_dim = heads if kv_heads is None else kv_heads, head_dim if value_dim is None else value_dim
    call = EstimatedCall(pattern, heads, kv_heads, head_dim, value_dim, batch, dtype, exchange, bucket, device)
    if rates is not None:
        check_rates(rates)
    check_call(call, rates)
    if memory is not None:
        validators.integer("memory", memory, 1)
        if layout is not None or pattern.documents is not None:
            raise ValueError("memory must be None for a given layout, or documents: they have one number of tokens")
    order, layouts = layouts_of(pattern, layout, tokens, ranks, order, key_layout)
    return Estimates(row_of(call, order, *each, rates, memory) for each in layouts)


def layouts_of(
    pattern: Pattern, layout: Layout | None, tokens: int | Sequence[int] | None, ranks: int | Sequence[int] | None,
    order: str | None, key_layout: Layout | None,
) -> tuple[str, Iterator[tuple[Layout, Layout]]]:  # fmt: skip
    """Return the name of the order, and layouts of queries and keys. Raises ValueError for invalid arguments."""
    if layout is None:
        if tokens is None or ranks is None or key_layout is not None:
            raise ValueError("layout must be given with a key_layout, and where tokens or ranks are None")
        order = "zigzag" if order is None else order
        sizes = _several("tokens", tokens, MAX_TOKENS), _several("ranks", ranks, MAX_RANKS)
        return order, _layouts(pattern, *sizes, order)
    if tokens is not None or ranks is not None or order is not None:
        raise ValueError("tokens, ranks and order must be None for a given layout, which has them")
    return "given", iter([checked_layouts(layout, key_layout, pattern)])


def _several(name: str, given: object, most: int) -> Sequence[int]:
    several = given if isinstance(given, (list, tuple, range)) else (given,)
    if not several:
        raise ValueError(f"{name} is {given!r}; it must be an integer, or at least one")
    return [validators.integer(name, x, 1, most) for x in several]


def _layouts(
    pattern: Pattern, tokens: Sequence[int], ranks: Sequence[int], order: str
) -> Iterator[tuple[Layout, Layout]]:
    validators.choice("order", order, ORDERS)
    for n in tokens:
        pattern.validate_tokens(n)
        for p in ranks:
            layout = layout_of(pattern, n, p, order)
            yield layout, layout


def layout_of(pattern: Pattern, n: int, p: int, order: str) -> Layout:
    """Return the layout of one of ORDERS."""
    if order == "balanced":
        return Layout.balanced(pattern, n, p)
    if order == "zigzag by document":
        return Layout.zigzag(n, p, pattern.documents)
    make = {"contiguous": Layout.contiguous, "zigzag": Layout.zigzag, "striped": Layout.striped}
    return make.get(order, Layout.hilbert)(n, p)


def check_rates(rates: object) -> None:
    """Raise ValueError unless these are Rates."""
    if not isinstance(rates, Rates):
        raise ValueError(
            f"rates is {rates!r}; it must be Rates(forward=, backward=, link=, latency=), Rates.of('{GPU}') or None"
        )


def check_call(call: EstimatedCall, rates: Rates | None) -> None:
    """Raise ValueError if rates have measured kernels and none of them takes the call, or do not tell its hosts."""
    if is_by_host(call.exchange) and (rates is None or rates.ranks_per_host is None):
        raise ValueError(f"exchange is {call.exchange!r}; it must have a number, or rates ranks_per_host")
    if rates is None or rates.kernels is None:
        return
    dims, share = (call.head_dim, call.value_dim), call.heads // call.kv_heads
    if call.device != "cuda":
        wrong = f"device is {call.device!r}; it must be 'cuda'"
    elif call.dtype not in HALF:
        wrong = f"dtype is {call.dtype}; it must be one of {', '.join(map(str, HALF))}"
    elif not rates.kernels.taking(dims, share):
        wrong = f"head_dim and value_dim are {dims}; {' or '.join(rates.kernels.names)} must take them"
    else:
        return
    raise ValueError(f"{wrong} with measured kernels: give Rates(forward=, backward=, link=) for others")


def checked_layouts(layout: Layout, key_layout: Layout | None, pattern: Pattern) -> tuple[Layout, Layout]:
    """Return the layouts of queries and keys. Raises ValueError unless they fit each other and the pattern."""
    keys = layout if key_layout is None else key_layout
    for name, x in (("layout", layout), ("key_layout", keys)):
        if not isinstance(x, Layout):
            raise ValueError(f"{name} is {x!r}; it must be a Layout, as Layout.zigzag(n, p)")
        validators.at_most(f"tokens of the {name}", x.n, MAX_TOKENS)
        validators.at_most(f"ranks of the {name}", x.world_size, MAX_RANKS)
    pattern.validate_tokens(layout.n, keys.n)
    if keys.world_size != layout.world_size:
        raise ValueError(f"key_layout is for {keys.world_size} ranks; it must be for the {layout.world_size} of layout")
    return layout, keys


def row_of(
    call: EstimatedCall, order: str, layout: Layout, keys: Layout, rates: Rates | None, memory: int | None = None,
    problem: Problem | None = None,
) -> Estimate:  # fmt: skip
    """Return the estimate of checked arguments. problem: counted before, to order exchanges; None: counted here."""
    hosts = (0,) * layout.world_size if rates is None else rates.hosts(layout.world_size)
    one_sided = call.device == "cuda" and len(set(hosts)) <= 1
    call = replace(call, exchange=with_number(call.exchange, hosts))
    exchange, bucket = parse(call.exchange, layout.world_size), call.bucket_of(layout, keys)
    work = call.work(rates, bucket, strict=problem is None)
    problem = call.problem(layout, keys) if problem is None else problem
    ranks = problem.counted_ranks
    blocks = [stages_of(problem, exchange, bucket, rank, hosts, work) for rank in ranks]
    terms, slots = call.memory(problem, bucket, one_sided), problem.slot_bytes(call.narrow)
    pairs = problem.computed(exchange, problem.head_stages(exchange, bucket))
    most = int(pairs.max())

    def passed(name: str, backward: bool) -> Pass:
        times: dict[str, float] = {}
        if rates is not None:
            spent = (stage_seconds(own, backward, call.operations, slots, rates).times() for own in blocks)
            times = max(spent, key=lambda seconds: seconds["seconds"])
        sent = max(sum(x.sent(backward, slots) for x in own) for own in blocks)
        messages = max(sum(x.count(backward) for x in own) for own in blocks)
        flops = most * call.operations[backward]
        return Pass(terms[f"{name}_buffers"], terms[f"{name}_memory"], sent, messages, flops, **times)

    return Estimate(
        layout.n, problem.ranks, order, call.exchange, bucket, shards=terms["shards"], accumulator=terms["accumulator"],
        gradients=terms["gradients"], incoming=terms["incoming"], kept=terms["kept"], pairs=most,
        imbalance=most / (int(pairs.sum()) / problem.ranks) if most else 1.0,
        forward=passed("forward", False), backward=passed("backward", True), counted=len(ranks),
        longest=None if memory is None else longest(call, problem.ranks, order, memory, one_sided),
    )  # fmt: skip


def longest(call: EstimatedCall, ranks: int, order: str, memory: int, one_sided: bool) -> int:
    """Return tokens that fit the memory of a rank, 0 if none do, such that 128 more a rank do not.

    Found by bisection. Memory grows with the tokens, but for buffers that shrink where fewer messages of `direct` share
    a round, or fewer heads a block: there even more tokens may fit. Raises ValueError if it would be more than 2^31.
    """
    grain = _GRAIN * ranks
    layout = layout_of(call.pattern, grain, 1, order)
    alone = replace(call, exchange=DIRECT.name).memory(call.problem(layout, layout), grain, False)
    token = alone["shards"] // grain  # at least
    fits, fails = 0, memory * ranks // token // grain + 1
    if fails * grain > MAX_TOKENS:
        fails = MAX_TOKENS // grain
        if call.peak(layout_of(call.pattern, fails * grain, ranks, order), one_sided) <= memory:
            raise ValueError(f"memory is {memory}; it must be less than 2**31 tokens take on {ranks} ranks")
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if call.peak(layout_of(call.pattern, middle * grain, ranks, order), one_sided) <= memory:
            fits = middle
        else:
            fails = middle
    return fits * grain
