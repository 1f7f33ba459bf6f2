"""Case: everything that one example depends on, and nothing else. Ranks, the expectation and a replay rebuild the same
tensors from it in any process, so a failing Case is all that a reproduction needs.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reference import shards, validators
from reference.cost import EXCHANGES
from reference.head_groups import ALL_TO_ALL, AUTO, groups_of, numbered
from reference.pattern import Pattern
from reference.shards import Division, Shards
from verification.saved_fields import FLAG, SavedFields, choice, instance, integer, number, optional

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ORDERS = (
    *("contiguous", "zigzag", "striped", "hilbert", "spliced", "stepped", "paired", "shuffled", "permuted", "swapped"),
    "dealt",
)
SEEDED_ORDERS = ("shuffled", "permuted", "swapped", "dealt chunks")  # these depend on the seed, too
# Orders within each document. They are not drawn; claims of peers move Cases to them.
ORDERS_BY_DOCUMENT = ("contiguous by document", "zigzag by document")
ORDERS_BY_CHUNK = shards.BY_CHUNK  # of Cases with `same_bits`
TILE = {"cpu": 16, "cuda": 128}  # by device: a chunk is a multiple
CPU_KERNELS, GPU_KERNELS = ("auto", "math", "flash"), ("cudnn", "fa4")
KERNELS = (*CPU_KERNELS, *GPU_KERNELS)
DEVICES = ("cpu", "cuda")
LSE = ("unused", "returned", "differentiated", "alone", "apart")
AGAIN = (
    *("alike", "unchecked", "group", "no_grad", "backward", "between", "pipelined", "shared", "meta", "autocast"),
    *("q", "k", "v", "qk", "qv", "kv", "apart", "dtype", "graph", "written"),
)
_REQUIRES_GRAD = ("qkv", "q", "k", "v", "qk", "qv", "kv")
_LOSSES = ("returned", "differentiated", "neither", "alone")
SINKS = ("normal", "large", "some")

_GREATEST_SEED = 2**63 - 1  # what torch.Generator takes
_GREATEST_SCALE = 1024.0  # beyond it every softmax is a plain maximum, or overflows
_SOFTCAPS = (1e30, 1e-30)  # the greatest and the least one of `ring_attention`


_GREATEST_HALF = 65504.0  # the largest finite number of float16
_HUGE = 128.0  # products of normal numbers times this exceed 65504 in their tails
# Exponents e of the smallest normal number, 2**-e: products of two numbers with half the exponent lie there.
_UNDERFLOW = {"float64": 1022, "float32": 126, "bfloat16": 126, "float16": 14}


def _huge(case: Case, generator: torch.Generator, *x: Tensor) -> tuple[Tensor, ...]:
    """Return inputs far below 65504 whose q . k exceeds it, with scores of hundreds to thousands. Only two components
    are large: the rounding error of a score grows with |q| . |k|, and the check would be vacuous if it came near 1."""
    q, k, v, dout = x
    q[..., :2] *= _HUGE
    k[..., :2] *= _HUGE
    return q, k, v, dout / 16  # gradients carry another factor of the queries: keep them inside fp16


def _tiny(case: Case, generator: torch.Generator, *x: Tensor) -> tuple[Tensor, ...]:
    """Return numbers whose products lie around the smallest normal number, some of them below the subnormals."""
    middle = _UNDERFLOW[case.dtype] // 2
    exponents = (torch.randint(middle - 8, middle + 9, t.shape, generator=generator) for t in x)
    return tuple(torch.ldexp(t, -e) for t, e in zip(x, exponents, strict=True))


_VALUES: dict[str, Any] = {
    "normal": lambda case, generator, *x: x,
    # Small integers: many scores are exactly equal.
    "ties": lambda case, generator, *x: (t.round_() for t in x),
    "huge": _huge,
    "tiny": _tiny,
    # Every row is a unit vector: scores are scale or 0, and each output entry is a share of the softmax.
    "onehot": lambda case, generator, *x: (
        torch.zeros_like(t).scatter_(-1, t.argmax(-1, keepdim=True), 1.0) for t in x
    ),
    # Every token has the same query, key and value: the output is that value, whatever the pattern.
    "constant": lambda case, generator, *x: (*(t[:, :1].expand_as(t) for t in x[:3]), x[3]),
    # All components of a vector are equal, as in the gradient of a sum: strided tensors store one of them.
    "flat": lambda case, generator, *x: (t[..., :1].expand_as(t) for t in x),
}
VALUES = tuple(_VALUES)


def division_of(
    order: str, tokens: int, ranks: int, cuts: tuple[int, ...] | None, seed: int, documents: tuple[int, ...] | None,
    chunk: int | None = None,
) -> Division:  # fmt: skip
    """Return all that shards depend on. The seed is 0, and the documents and the chunk are None, for orders that do not
    depend on them, so that such Cases share a cache entry."""
    documents = documents if order in (*ORDERS_BY_DOCUMENT, *ORDERS_BY_CHUNK) else None
    chunk = chunk if order in ORDERS_BY_CHUNK else None
    return order, tokens, ranks, cuts, seed if order in SEEDED_ORDERS else 0, documents, chunk


def splits_heads(exchange: str, ranks: int, heads: int, kv_heads: int, hosts: int = 1) -> bool:
    """Return True if several ranks compute query heads of one key/value head."""
    degree = groups_of(numbered(exchange, ranks, hosts), ranks).degree
    return any(place * heads // degree % (heads // kv_heads) for place in range(degree))


class Keys(NamedTuple):
    """The sequence of the keys in cross-attention: its length, and its order and cuts as in `Case`; in JSON a list."""

    tokens: int
    order: str = "contiguous"
    cuts: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Case(SavedFields):
    """One example. Frozen, hashable, and travels as JSON.

    world         ranks that exist
    group         global ranks that take part, ascending; index i of the group holds shard i. None: all
    tokens        length n of the sequence
    order         order of the tokens: one of ORDERS; "spliced" has the even positions contiguous, the odd ones
                  striped, "stepped" the first half contiguous, the rest striped; "paired" has neighbouring shards half
                  the ring apart; "shuffled" is a permutation drawn from the seed, "permuted" one of a few whole
                  ranges; "swapped" has a few positions in each other's place; "dealt" gives each rank three stripes;
                  one of ORDERS_BY_DOCUMENT; or, of whole chunks with `same_bits`, "chunks" and "dealt chunks"
    cuts          p + 1 non-decreasing offsets into the order from 0 to n, p the size of the group; None: the layout's
                  own
    pattern       the attention mask; its documents, if any, add up to the tokens
    batch, heads, kv_heads, head_dim
    dtype         of q, k, v, dout: a name in DTYPES. lse and dlse are float32, for float64 float64
    scale         factor on q . k, any finite number up to 1024 in size; None: head_dim ** -0.5
    score_scale   factor on the queries before they are rounded, 0 < score_scale <= 1024: how large scores get
    values        one of VALUES
    seed          0 <= seed < 2**63
    exchange      "ring", "direct", "direct-kept", "gather", "all-to-all", "all-to-all-kept", or two, as
                  "all-to-all:2+ring" and "all-to-all+ring"; or "auto" (`ring.plan.exchange`)
    bucket        tokens per kernel call, or None
    kernel        "auto", "math", "flash" or, on GPUs, "cudnn" and "fa4"
    lse           "unused"; "returned" (and compared); "differentiated" (its gradient takes part as well); "alone" (only
                  lse is differentiated, not the output); "apart" (each rank's loss takes its own choice of both:
                  see `loss_of`)
    strided       whether inputs and incoming gradients are non-contiguous (`verification.run.layouts.strided_copy`)
    again         how the second run differs from the first, which must not change a bit of what both give: "alike";
                  "unchecked" (check=False); "group" (called with the process group itself, where there is one, for
                  every other seed as a mesh; of four seeds two by the operators of a compiled graph);
                  "no_grad" (forward alone, and another after it, on other numbers); "backward" (after a backward of
                  other gradients through the same graph); "between" (with another call, on other numbers, between
                  forward and backward, and one after); "pipelined" (another call's forward follows the forward, its
                  backward the backward); "shared" (k and v, or q too, lie in one storage); "meta" (while torch's
                  meta device is the default one); "autocast" (16-bit numbers are given as fp32 under autocast, for
                  every other seed only k and v, and some in the other 16-bit type if that loses nothing; others under
                  one that leaves them as they are); which of q, k and v require gradients; "apart" (on each rank
                  others of them do: see `second_run_of`); "dtype" (while another default dtype is set); "graph" (a
                  backward with create_graph, for every other seed under autocast); or "written" (every other rank
                  writes the same arguments in another way: `verification.run.equivalent_arguments`)
    device        "cpu", or "cuda": on GPUs, whose fused kernels work in 16 bits
    measured      True if the first run's workspace is measured (`verification.run.memory_meter`), which takes time
    backward      False for forward alone: no gradients are computed. Not drawn: claims of peers set it
    value_dim     head dim of v and of the output; None: head_dim
    softcap       bound t of the scores, which become t tanh(score / t); None: none
    sinks         None, or a score for each query head, of one more key of value 0: "normal"; "large", of sizes up to
                  10^4; or "some", where about half of them are -inf. In the dtype of lse for odd seeds, else in that of
                  q. They require gradients, but in half of the second runs in which not all of q, k and v do
    keys          None: those of the same tokens; or the `Keys` of a sequence of its own. Documents, if any, add up to
                  the tokens of both
    hosts         number of hosts, which divides the ranks evenly, in order. In a simulation messages between hosts come
                  last. Elsewhere ranks pretend these hosts if the exchange depends on them
                  (`verification.run.pretended_hosts`)
    same_bits     None, or the length of the chunks, a multiple of 16 and on GPUs of 128: the results then have the same
                  bits on any ranks. Each rank holds whole chunks of the documents, of queries and of keys

    Raises ValueError, at construction, naming the field, what was given and what is allowed.
    """

    world: int = field(metadata=integer(1))
    group: tuple[int, ...] | None
    tokens: int = field(metadata=integer(1))
    order: str = field(metadata=choice(*ORDERS, *ORDERS_BY_DOCUMENT, *ORDERS_BY_CHUNK))
    cuts: tuple[int, ...] | None
    pattern: Pattern = field(metadata=instance(Pattern, "reference.Pattern"))
    batch: int = field(metadata=integer(1))
    heads: int = field(metadata=integer(1))
    kv_heads: int = field(metadata=integer(1))
    head_dim: int = field(metadata=integer(1))
    dtype: str = field(metadata=choice(*DTYPES))
    scale: float | None = field(metadata=optional(number(_GREATEST_SCALE)))
    score_scale: float = field(metadata=number(_GREATEST_SCALE))
    values: str = field(metadata=choice(*VALUES))
    seed: int = field(metadata=integer(0, _GREATEST_SEED))
    exchange: str
    bucket: int | None = field(metadata=optional(integer(1)))
    kernel: str = field(metadata=choice(*KERNELS))
    lse: str = field(metadata=choice(*LSE))
    strided: bool = field(metadata=FLAG)
    again: str = field(default="alike", metadata=choice(*AGAIN))
    measured: bool = field(default=False, metadata=FLAG)
    device: str = field(default="cpu", metadata=choice(*DEVICES))
    backward: bool = field(default=True, metadata=FLAG)
    value_dim: int | None = field(default=None, metadata=optional(integer(1)))
    softcap: float | None = field(default=None, metadata=optional(number(*_SOFTCAPS)))
    sinks: str | None = field(default=None, metadata=optional(choice(*SINKS)))
    keys: Keys | None = None
    hosts: int = field(default=1, metadata=integer(1))
    same_bits: int | None = field(default=None, metadata=optional(integer(1)))

    def __post_init__(self) -> None:
        super().__post_init__()
        validators.grouped_heads(self.heads, self.kv_heads)
        self.pattern.validate(self.heads)
        if self.keys is None:
            self.pattern.validate_tokens(self.tokens)
        if not self.backward and self.through_lse:
            raise ValueError(f"backward is False and lse is {self.lse!r}; lse must be 'unused' or 'returned' then")
        if self.score_scale <= 0:
            raise ValueError(f"score_scale is {self.score_scale}; it must be greater than 0")
        if self.value_dim == self.head_dim:
            object.__setattr__(self, "value_dim", None)  # equal Cases compare equal
        if self.group is not None:
            group = validators.integers("group", self.group)
            if not group or list(group) != sorted(set(group)) or group[0] < 0 or group[-1] >= self.world:
                raise ValueError(f"group is {group}; it must be ascending ranks of range({self.world}), at least one")
            object.__setattr__(self, "group", group)
        if len(self.ranks) % self.hosts:
            raise ValueError(f"hosts is {self.hosts}; it must divide the {len(self.ranks)} ranks of the group")
        if self.exchange != AUTO:
            groups_of(numbered(self.exchange, len(self.ranks), self.hosts), len(self.ranks))
        elif self.again == "no_grad":
            raise ValueError(
                "again is 'no_grad' and exchange is 'auto', which chooses for forward alone where nothing requires "
                "gradients; one of them must be another"
            )
        elif self.hosts > 1:
            raise ValueError(f"hosts is {self.hosts} and exchange is 'auto', which is refused on more than one")
        if self.cuts is not None:
            object.__setattr__(self, "cuts", validators.offsets("cuts", self.cuts, len(self.ranks), self.tokens))
        if self.keys is not None:
            object.__setattr__(self, "keys", self._valid_keys(self.keys))
        self._check_chunks()

    def _check_chunks(self) -> None:
        orders, chunk = (self.order, "" if self.keys is None else self.keys.order), self.same_bits
        if chunk is None:
            if set(orders) & set(ORDERS_BY_CHUNK):
                raise ValueError(f"order is {orders[0]!r}, of keys {orders[1]!r}; orders of chunks need same_bits")
            return
        if chunk % TILE[self.device]:
            raise ValueError(f"same_bits is {chunk}; it must be a multiple of {TILE[self.device]} on {self.device!r}")
        divisions, documents = (self.shards(), self.key_shards()), self.pattern.documents
        if not all(shards.holds_whole_chunks(division, chunk, documents) for division in divisions):
            raise ValueError(f"same_bits is {chunk}; orders and cuts must leave its chunks whole")

    def _valid_keys(self, value: object) -> Keys:
        if not isinstance(value, (tuple, list)) or len(value) != len(Keys._fields):
            raise ValueError(f"keys is {value!r}; it must be None or (tokens, order, cuts)")
        tokens, order, cuts = value
        validators.integer("tokens of keys", tokens, 1)
        self.pattern.validate_tokens(self.tokens, tokens)
        if cuts is not None:
            cuts = validators.offsets("cuts of keys", cuts, len(self.ranks), tokens)
        return Keys(tokens, validators.choice("order of keys", order, (*ORDERS, *ORDERS_BY_CHUNK)), cuts)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the group; the i-th holds shard i."""
        return tuple(range(self.world)) if self.group is None else self.group

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def accumulator_dtype(self) -> torch.dtype:
        """Dtype of lse and dlse."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    @property
    def sinks_dtype(self) -> torch.dtype:
        return self.accumulator_dtype if self.seed % 2 else self.torch_dtype

    @property
    def dims(self) -> tuple[int, int]:
        """Head dims of keys and of values."""
        return self.head_dim, self.value_dim or self.head_dim

    @property
    def key_tokens(self) -> int:
        """Length of the sequence of the keys."""
        return self.tokens if self.keys is None else self.keys.tokens

    @property
    def through_lse(self) -> bool:
        """True if a gradient comes in through lse."""
        return self.lse in ("differentiated", "alone", "apart")

    @property
    def fixed_order(self) -> bool:
        """True if kernels on GPUs are to sum in the same order in every run, since the bits of two are compared. Not if
        the second has no gradients: the faster kernels, whose order is their own, must be right, too."""
        return self.device == "cuda" and self.again != "no_grad"

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def narrow(self) -> bool:
        """True if gradients of keys return to their owner in 16 bits, by an exchange that depends on no hosts."""
        straight = groups_of(self.exchange, len(self.ranks)).straight
        usual = self.same_bits is None
        return usual and self.device == "cuda" and straight and self.torch_dtype.itemsize == 2

    @property
    def tokens_per_call(self) -> int:
        """Tokens of the bucket; the default bucket if the Case has none."""
        if self.bucket is not None:
            return self.bucket
        largest, of_keys = max(self.shards().counts), max(self.key_shards().counts)
        default = shards.default_bucket(
            largest, self.heads, self.kv_heads, self.torch_dtype.itemsize, self.device, of_keys
        )
        return max(default, self.same_bits or 0)

    def shards(self) -> Shards:
        """Return the positions of each rank by definition; the ranks' `Layout` is checked against them."""
        return shards.shards(*self.division())

    def key_shards(self) -> Shards:
        """Return the positions of each rank's keys."""
        return shards.shards(*self.key_division())

    def division(self) -> Division:
        """Return all that the shards depend on."""
        sizes = self.tokens, len(self.ranks), self.cuts, self.seed
        return division_of(self.order, *sizes, self.pattern.documents, self.same_bits)

    def key_division(self) -> Division:
        """Return all that the shards of the keys depend on, like `division`."""
        if self.keys is None:
            return self.division()
        tokens, order, cuts = self.keys
        sizes = tokens, len(self.ranks), cuts, self.seed
        return division_of(order, *sizes, self.pattern.documents, self.same_bits)

    def second_run_of(self, index: int) -> str:
        """Return `again` for the rank at that index of the group. "apart": some of q, k and v, by the seed. "written":
        "alike" on every other rank."""
        if self.again == "written" and index % 2 == self.seed % 2:
            return "alike"
        if self.again != "apart":
            return self.again
        return _REQUIRES_GRAD[(self.seed + index * (1 + self.seed // len(_REQUIRES_GRAD) % 6)) % len(_REQUIRES_GRAD)]

    def loss_of(self, index: int) -> str:
        """Return `lse` for the loss of the rank at that index of the group. "apart": "returned" (the output alone),
        "alone", "differentiated" (both) or "neither", by the seed."""
        return self.lse if self.lse != "apart" else _LOSSES[(self.seed + index) % len(_LOSSES)]

    def for_any_ranks(self) -> Case:
        """Return the Case without what one number of ranks alone can have but its own cuts: cuts of keys, hosts, and
        an exchange in groups of ranks.
        """
        exchange = self.exchange
        if exchange not in EXCHANGES:
            exchange = ALL_TO_ALL if ALL_TO_ALL in exchange else "ring"
        keys = None if self.keys is None else self.keys._replace(cuts=None)
        return replace(self, exchange=exchange, keys=keys, hosts=1)

    def for_same_bits(self) -> Case:
        """Return the nearest Case that takes `same_bits`: its bucket holds a chunk, its kernel has fixed bits, and
        key/value heads lie on one rank. The exchange "auto" and measurements are left out."""
        exchange = "direct" if self.exchange == AUTO or self._splits_heads() else self.exchange
        kernel = "auto" if self.kernel == "cudnn" or (self.kernel, self.device) == ("flash", "cpu") else self.kernel
        bucket = None if self.bucket is None else max(self.bucket, self.same_bits or 1)
        return replace(self, exchange=exchange, kernel=kernel, bucket=bucket, measured=False)

    def _splits_heads(self) -> bool:
        return splits_heads(self.exchange, len(self.ranks), self.heads, self.kv_heads, self.hosts)

    def lengthened(self, tokens: int, **changes: Any) -> Case:
        """Return the Case with these changes and at least as many tokens: the last document takes the new ones."""
        documents = self.pattern.documents
        if documents is None:
            return replace(self, tokens=tokens, **changes)
        longer = (*documents[:-1], documents[-1] + tokens - self.tokens)
        if self.keys is not None:
            changes = {"keys": self.keys._replace(tokens=tokens, cuts=None)} | changes
        return replace(self, tokens=tokens, pattern=replace(self.pattern, documents=longer), **changes)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return q (B, n, H, D), k (B, m, Hk, D), v (B, m, Hk, Dv), dout (B, n, H, Dv), dlse (B, H, n) and, with sinks,
        these (H,), of n tokens and m keys: the whole sequences, contiguous, on the CPU. dlse is zero unless
        `through_lse`, dout is if lse is "alone"."""
        generator = torch.Generator().manual_seed(self.seed)
        dim, value_dim = self.dims
        queries, keys = (self.batch, self.tokens, self.heads), (self.batch, self.key_tokens, self.kv_heads)
        of_lse = self.batch, self.heads, self.tokens
        shapes = (*queries, dim), (*keys, dim), (*keys, value_dim), (*queries, value_dim), of_lse
        sizes = [math.prod(shape) for shape in shapes]
        # Drawn in the accumulator's type: numbers of 24 bits are dense enough for all but float64, and far cheaper.
        numbers = torch.randn(sum(sizes), dtype=self.accumulator_dtype, generator=generator).split(sizes)
        q, k, v, dout, dlse = (x.view(shape) for x, shape in zip(numbers, shapes, strict=True))
        q, k, v, dout = _VALUES[self.values](self, generator, q, k, v, dout)
        if not self.through_lse:
            dlse.zero_()
        if self.lse == "alone":
            dout = torch.zeros_like(dout)
        if self.lse == "apart":  # zero for the tokens of ranks whose loss does not take the output, or lse
            dout = dout.clone()
            for index, positions in enumerate(self.shards().positions):
                loss, rows = self.loss_of(index), torch.tensor(positions)
                if loss in ("alone", "neither"):
                    dout[:, rows] = 0.0
                if loss in ("returned", "neither"):
                    dlse[:, :, rows] = 0.0
        q = q * self.score_scale
        if self.dtype == "float16":
            q = q.clamp(-_GREATEST_HALF, _GREATEST_HALF)  # large values and a large score_scale may exceed it
        q, k, v, dout = (x.to(self.torch_dtype).contiguous() for x in (q, k, v, dout))
        return (q, k, v, dout, dlse) if self.sinks is None else (q, k, v, dout, dlse, self._sinks())

    def _sinks(self) -> Tensor:
        generator = torch.Generator().manual_seed(_GREATEST_SEED - self.seed)  # other numbers than those of q
        sinks, sizes = torch.randn(2, self.heads, dtype=self.accumulator_dtype, generator=generator)
        if self.sinks == "large":
            sinks = sinks.sign() * 10 ** (4 * sizes.abs().clamp(max=1.0))
        if self.sinks == "some":
            sinks = sinks.masked_fill(sizes > 0, -torch.inf)
        return sinks.to(self.sinks_dtype)

    def to_json(self) -> str:
        """Return one line of JSON; `from_json` turns it back into an equal Case."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Case:
        """Read a Case, or the record of one. Raises ValueError for text that is no JSON object, and as `from_dict`."""
        data = json.loads(text)
        if isinstance(data, dict) and data.get("kind") == "case":  # of a record
            del data["kind"]
        return cls.from_dict(data)
