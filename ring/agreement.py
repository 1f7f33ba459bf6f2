"""Bad input raises the same clear error on every rank, before any tensor moves.

Every rank checks its own arguments; then all ranks compare what they were called with, and in which call of the group
they are, forward or backward (`ring.comm.call_order`). A rank with a wrong argument tells the others instead of leaving them
waiting; where the ranks' arguments or calls differ, the error names them.

The ranks compare 16 bytes, a digest, and send each other words only where these differ.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from reference.documents import first_few, told
from reference.pattern import Pattern, check_pattern
from ring.caching.bounded_cache import Bounded
from ring.comm.call_order import NumberedCall, within_backward
from ring.comm.transport import Absent, Consensus, Transport, all_gather_json
from ring.compute.kernels import KERNELS, fused
from ring.layout import Layout
from ring.plan.plan import EXCHANGES

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_DIGEST = 16
_A_LENGTH = 36  # bytes of a document's length, an int in a tuple
_MOST = 2**40  # tokens: plans count in 64 bits
_LARGEST = sys.float_info.max
_INSTEAD = {  # of arguments of other attentions
    "attn_mask": "masks are patterns, as Pattern.dense(causal=True) or Pattern.dense(documents=lengths)",
    "is_causal": "write Pattern.dense(causal=True)",
    "causal": "write Pattern.dense(causal=True)",
    "dropout_p": "dropout of attention is not supported, leave it out",
    "window_size": "write Pattern.dense(window=w), for (w, 0) with causal=True",
    "enable_gqa": "leave it out, k and v may have fewer heads than q",
}


@dataclass(eq=False)
class Call:
    """The arguments of one call of `ring_attention` on one rank, as given."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    pattern: Pattern
    layout: Layout
    exchange: str
    bucket: int | None
    kernel: str
    scale: float | None
    return_lse: bool
    differentiated: bool  # see `wants_gradients`
    unknown: tuple[str, ...] = ()  # names of arguments that there are not

    def key(self) -> tuple[object, ...]:
        """All that decides whether the call is right, and its plan: equal for calls that are alike in it. Types stand
        beside values, since 1, 1.0 and True are equal.
        """
        given = (self.exchange, self.bucket, self.kernel, self.scale, self.return_lse, self.differentiated)
        kinds = (type(self.bucket), type(self.scale), type(self.return_lse))
        return _kind(self.q), _kind(self.k), _kind(self.v), self.pattern, self.layout, given, kinds

    @property
    def factor(self) -> float:
        """Of the scores."""
        return self.q.shape[3] ** -0.5 if self.scale is None else float(self.scale)


def _kind(x: object) -> tuple[object, ...]:
    return (type(x), x.shape, x.dtype, x.device, x.layout) if isinstance(x, torch.Tensor) else (type(x),)


def wants_gradients(*tensors: torch.Tensor) -> bool:
    """Whether what is computed of them can be differentiated. An operator does not see this of its own tensors."""
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors)


class Signature(NamedTuple):
    """What must be the same on every rank, by the name of the argument, and the same as bytes."""

    entries: Mapping[str, object]
    digest: bytes


@dataclass(frozen=True, eq=False)
class CallSetting:
    """Calls that are alike in all but the numbers of their tensors, and right; one object for all of them, so that what
    is made for a setting can be kept by it.
    """

    signature: Signature


_NOTHING = Signature({}, b"")
_UNKNOWN = CallSetting(_NOTHING)
_settings: Bounded[Hashable, CallSetting] = Bounded(256, most_bytes=2**26)


def agree(call: Call, numbered: NumberedCall, transport: Transport, check: bool) -> CallSetting:
    """The call's setting. Raise if this call is wrong or, with `check`, if any rank's is or if the ranks' calls differ.

    Raises ValueError or NotImplementedError; with `check` the same one on every rank.
    """
    error: Exception | None = None
    setting, where = _UNKNOWN, f"the forward of call {numbered.number}"
    try:
        if not isinstance(numbered.name, str | None):
            raise ValueError(f"name must be None or a string, got {type(numbered.name)}")
        for unknown in call.unknown:
            instead = _INSTEAD.get(unknown, "help(ring_attention) lists those that there are")
            raise ValueError(f"{unknown} is no argument of ring_attention: {instead}")
        if transport.world_size > 1:
            numbered.calls.check_thread(numbered)
        setting = setting_of(call, transport)
        if transport.world_size > 1:
            where = numbered.forward
    except Exception as found:  # of any type: the other ranks must hear of it
        error = found
    if check and (transport.world_size > 1 or error is not None):
        _compare(where, setting.signature, error, transport)
    elif error is not None:
        raise error
    return setting


def setting_of(call: Call, transport: Transport) -> CallSetting:
    """Of a call that is right; what was found right once is not looked at again.

    Raises ValueError or NotImplementedError for a wrong one.
    """
    thread = _thread() if transport.world_size > 1 else ""
    key = call.key(), transport.rank, transport.world_size, thread

    def found_right() -> CallSetting:
        validate(call, transport)
        return CallSetting(signature_of(kind_of(call, thread)))

    try:
        return _settings.once(key, found_right, lambda _: _A_LENGTH * len(call.pattern.documents or ()))
    except TypeError:  # an argument that cannot be hashed is a wrong one
        pass
    return found_right()


def agree_backward(numbered: NumberedCall, transport: Transport, check: bool) -> None:
    """Raise ValueError, with `check` on every rank, unless all ranks are in the same backward of the same call."""
    error: Exception | None = None
    try:
        numbered.calls.check_backward(numbered)
    except ValueError as found:
        error = found
    if check and (transport.world_size > 1 or error is not None):
        _compare(numbered.backward, _NOTHING, error, transport)
    elif error is not None:
        raise error
    numbered.backwards += 1  # on all ranks or, after an error, on none


def compare(where: str, signature: Mapping[str, object], error: Exception | None, transport: Consensus) -> None:
    """Raise the error of the first rank that has one, or a ValueError that names the first entry in which the ranks'
    signatures differ: the same on every rank. Every rank calls it. where: what this rank is doing, compared first. The
    signatures have the same names.

    Raises RuntimeError that names the ranks that do not come within the group's timeout.
    """
    with transport.calls.turn():
        if transport.world_size > 1 or error is not None:
            _compare(where, Signature(signature, json.dumps(signature).encode()), error, transport)


def _compare(where: str, signature: Signature, error: Exception | None, transport: Consensus) -> None:
    """where: what this rank is in: a call, and its direction."""
    digest = b"\0" * _DIGEST if error is not None else _digest(where.encode() + b"\0" + signature.digest)
    try:
        if transport.all_equal(digest) and error is None:
            return
    except Absent as absent:
        raise RuntimeError(absent.told(where)) from absent
    said = [type(error).__name__, str(error)] if error is not None else [where, signature.entries]
    # Two more collective calls cost nothing here: an error follows.
    everyone = all_gather_json([said, transport.calls.number], transport)
    transport.calls.catch_up(max(number for _, number in everyone))
    raise _joint_error([(str(kind), text) for (kind, text), _ in everyone])


def _digest(what: bytes) -> bytes:
    return hashlib.blake2b(what, digest_size=_DIGEST).digest()


def _joint_error(said: list[tuple[str, str | dict[str, object]]]) -> Exception:
    """said: by rank, the type of an error and its text, or in which call the rank is and its signature."""
    for rank, (kind, text) in enumerate(said):
        if isinstance(text, str):
            if kind == "NotImplementedError":
                return NotImplementedError(f"rank {rank}: {text}")
            named = text if kind == "ValueError" else f"{kind}: {text}"
            return ValueError(f"rank {rank}: {named}")
    there, first = said[0]
    assert isinstance(first, dict)
    for rank, (where, _) in enumerate(said):
        if where != there:
            given = f"rank 0 is in {there}, rank {rank} in {where}"
            return ValueError(f"calls on a group must come in the same order on every rank: {given}")
    for rank, (_, entries) in enumerate(said):
        assert isinstance(entries, dict)
        for name, value in entries.items():
            if value != first[name]:
                given = _difference(first[name], value, rank)
                return ValueError(f"{name} must be the same on every rank: {given}")
    raise AssertionError("ranks that disagree differ in something")


def _difference(there: object, here: object, rank: int) -> str:
    """What rank 0 and another have of one name; of lists, which may have thousands of entries, the first difference."""
    if not (isinstance(there, list) and isinstance(here, list)):
        first, other = (first_few(x) if isinstance(x, list) else x for x in (there, here))
        return f"rank 0 has {first}, rank {rank} {other}"
    pairs = enumerate(zip(there, here, strict=False))
    number = next((i for i, (a, b) in pairs if a != b), min(len(there), len(here)))
    one, other = (x[number] if number < len(x) else "none" for x in (there, here))
    return f"rank 0 has {one} as number {number} of {len(there)}, rank {rank} {other} as number {number} of {len(here)}"


class CallKind(NamedTuple):
    """All that two calls must have in common."""

    batch: int
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    device: str
    pattern: Pattern
    layout: Layout
    exchange: str
    bucket: int | None
    kernel: str
    scale: float | None
    return_lse: bool
    differentiated: bool
    thread: str


def kind_of(call: Call, thread: str) -> CallKind:
    """Of a call that was found right."""
    q = call.q
    return CallKind(
        q.shape[0], q.shape[2], call.k.shape[2], q.shape[3], q.dtype, q.device.type, call.pattern, call.layout,
        call.exchange, call.bucket, call.kernel, call.scale, call.return_lse, call.differentiated, thread,
    )  # fmt: skip


def _thread() -> str:
    """Threads may have any names, which differ between ranks; but where one rank calls from its main thread and another
    does not, two threads of each call at a time.
    """
    if within_backward():
        return "autograd's"
    return "the main one" if threading.current_thread() is threading.main_thread() else "another than the main one"


def signature_of(kind: CallKind) -> Signature:
    entries = {
        "batch size": kind.batch,
        "query heads": kind.heads,
        "key/value heads": kind.kv_heads,
        "head dim": kind.dim,
        "dtype": str(kind.dtype),
        "device type": kind.device,
        "pattern": replace(kind.pattern, documents=None).to_dict(),
        "documents": kind.pattern.documents,
        "layout": f"{kind.layout.n} tokens, cuts {kind.layout.cuts}, order {kind.layout.digest.hex()}",
        "exchange": kind.exchange,
        "bucket": kind.bucket,
        "kernel": kind.kernel,
        "scale": None if kind.scale is None else float(kind.scale) + 0.0,  # 1 is 1.0, and -0.0 is 0.0
        "return_lse": kind.return_lse,
        "requires_grad": kind.differentiated,
        "calling thread": kind.thread,
    }
    return Signature(entries, _digest(json.dumps(entries).encode()))


def validate(call: Call, transport: Transport) -> None:
    """Raise ValueError or NotImplementedError, naming the argument, what was given and what is allowed."""
    check_pattern(call.pattern)
    if not isinstance(call.layout, Layout):
        raise ValueError(f"layout must be a Layout, got {call.layout!r}")
    _validate_options(call)
    if call.layout.world_size != transport.world_size:
        raise ValueError(
            f"layout must be for the {transport.world_size} ranks of the group, got one for {call.layout.world_size}"
        )
    call.pattern.validate_tokens(call.layout.n)
    _validate_tensors(call, call.layout.counts[transport.rank])
    call.pattern.validate(call.q.shape[2])


def _validate_options(call: Call) -> None:
    if call.exchange not in EXCHANGES:
        raise ValueError(f"exchange must be one of {EXCHANGES}, got {call.exchange!r}")
    if call.kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {KERNELS}, got {call.kernel!r}")
    bucket = call.bucket
    if bucket is not None and (not isinstance(bucket, int) or isinstance(bucket, bool) or not 1 <= bucket <= _MOST):
        raise ValueError(f"bucket must be None or a number of tokens from 1 to 2**40, got {told(bucket)}")
    scale = call.scale
    if scale is not None:
        if not isinstance(scale, (int, float)) or isinstance(scale, bool) or not abs(scale) <= _LARGEST:
            raise ValueError(f"scale must be None or a finite number, got {told(scale)}")
    if not isinstance(call.return_lse, bool):
        raise ValueError(f"return_lse must be True or False, got {call.return_lse!r}")


def _validate_tensors(call: Call, tokens: int) -> None:
    tensors = {"q": call.q, "k": call.k, "v": call.v}
    for name, x in tensors.items():
        refuse_dtensor(name, x)
        if not isinstance(x, torch.Tensor) or x.dim() != 4:
            given = f"shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else repr(type(x))
            raise ValueError(f"{name} must be a (batch, local tokens, heads, head dim) tensor, got {given}")
        if x.layout is not torch.strided or x.is_complex() or x.is_quantized:
            raise NotImplementedError(f"{name} must be a dense real tensor, got {x.layout}, {x.dtype}")
    q, k, v = call.q, call.k, call.v
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape, got {tuple(k.shape)} and {tuple(v.shape)}")
    if q.dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {[str(d) for d in DTYPES]}, got {q.dtype}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ValueError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")
        if (x.shape[0], x.shape[3]) != (q.shape[0], q.shape[3]):
            raise ValueError(
                f"{name} must have q's batch and head dim {(q.shape[0], q.shape[3])}, got {(x.shape[0], x.shape[3])}"
            )
    if min(q.shape[0], q.shape[2], q.shape[3], k.shape[2]) < 1:
        raise ValueError(f"batch, heads and head dim must be >= 1, got q {tuple(q.shape)}, k {tuple(k.shape)}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"query heads must be a multiple of key/value heads, got {q.shape[2]} and {k.shape[2]}")
    for name, x in tensors.items():
        if x.shape[1] != tokens:
            got = f"{x.shape[1]}: heads first? Write {name}.transpose(1, 2)" if x.shape[2] == tokens else x.shape[1]
            raise ValueError(f"{name} must have the {tokens} tokens that the layout gives this rank, got {got}")
    if call.kernel in ("flash", "cudnn"):
        _validate_fused(call)


def is_dtensor(x: object) -> bool:
    """The class is looked up, not imported: whoever has one has imported it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def refuse_dtensor(name: str, x: Any) -> None:
    """NotImplementedError for a DTensor, where the shard of this rank is wanted."""
    if is_dtensor(x):
        raise NotImplementedError(
            f"{name} must be a plain tensor, the shard of this rank, got a DTensor placed {x.placements}: give "
            f"{name}.to_local(), sharded as the layout says"
        )


def _validate_fused(call: Call) -> None:
    """A fused kernel that was asked for by name takes what it can, tile by tile, but not a call without such a tile."""
    name, q = call.kernel, call.q
    takes = ("cuda",) if name == "cudnn" else ("cpu", "cuda")
    if q.device.type not in takes:
        kinds = " and ".join(takes)
        raise NotImplementedError(f"kernel {name!r} takes {kinds} tensors, got {q.device}; 'auto' and 'math' take any")
    if fused(name, q.device, q.dtype, q.shape[3]) != name:
        raise NotImplementedError(
            f"on GPUs kernel {name!r} takes dtype float16 or bfloat16 and head dims up to 128 that are multiples of 8, "
            f"got dtype {q.dtype} and head dim {q.shape[3]}; 'auto' and 'math' take any"
        )
    if call.return_lse and call.differentiated:
        raise NotImplementedError(
            f"kernel {name!r} has no gradient through lse: with return_lse=True use kernel 'auto' or 'math', or no_grad"
        )
