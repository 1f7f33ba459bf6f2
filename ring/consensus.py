"""Bad input raises the same clear error on every rank, before any tensor moves.

Every rank validates its own arguments (`ring.validation`); then all ranks compare what they were called with, and in
which call of the group they are, forward or backward (`ring.comm.call_order`). A rank with a wrong argument tells the
others instead of leaving them waiting; where the ranks' arguments or calls differ, the error names them.

The ranks compare 16 bytes, a digest, and send each other words only where these differ.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from reference.documents import first_few
from reference.pattern import Pattern
from ring.caching.bounded_cache import BoundedCache
from ring.comm.call_order import NumberedCall, within_backward
from ring.comm.transport import Consensus, MissingRanks, Transport, all_gather_json
from ring.layout import Layout
from ring.validation import Call, refuse_unknown, validate

_DIGEST = 16
_LENGTH_BYTES = 36  # bytes of a document's length, an int in a tuple


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


_NO_ARGUMENTS = Signature({}, b"")
_UNKNOWN = CallSetting(_NO_ARGUMENTS)
_settings: BoundedCache[Hashable, CallSetting] = BoundedCache(256, most_bytes=2**26)


def agree(call: Call, numbered: NumberedCall, transport: Transport, check: bool) -> CallSetting:
    """The call's setting. Raise if this call is wrong or, with `check`, if any rank's is or if the ranks' calls differ.

    Raises ValueError or NotImplementedError; with `check` the same one on every rank.
    """
    error: Exception | None = None
    setting, where = _UNKNOWN, f"the forward of call {numbered.number}"
    try:
        if not isinstance(numbered.name, str | None):
            raise ValueError(f"name must be None or a string, got {type(numbered.name)}")
        refuse_unknown(call.unknown)
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
    thread = _thread_role() if transport.world_size > 1 else ""
    key = call.key(), transport.rank, transport.world_size, thread

    def validated() -> CallSetting:
        validate(call, transport)
        return CallSetting(signature_of(kind_of(call, thread)))

    try:
        return _settings.get_or_make(key, validated, lambda _: _LENGTH_BYTES * len(call.pattern.documents or ()))
    except TypeError:  # an argument that cannot be hashed is a wrong one
        pass
    return validated()


def agree_backward(numbered: NumberedCall, transport: Transport, check: bool) -> None:
    """Raise ValueError, with `check` on every rank, unless all ranks are in the same backward of the same call."""
    error: Exception | None = None
    try:
        numbered.calls.check_backward(numbered)
    except ValueError as found:
        error = found
    if check and (transport.world_size > 1 or error is not None):
        _compare(numbered.backward, _NO_ARGUMENTS, error, transport)
    elif error is not None:
        raise error
    numbered.backwards += 1  # on all ranks or, after an error, on none


def compare(where: str, signature: Mapping[str, object], error: Exception | None, transport: Consensus) -> None:
    """Raise the error of the first rank that has one, or a ValueError that names the first entry in which the ranks'
    signatures differ: the same on every rank. Every rank calls it. where: what this rank is doing, compared first. The
    signatures have the same names.

    Raises RuntimeError that names the ranks that do not come within the group's timeout.
    """
    with transport.calls.lock():
        if transport.world_size > 1 or error is not None:
            _compare(where, Signature(signature, json.dumps(signature).encode()), error, transport)


def _compare(where: str, signature: Signature, error: Exception | None, transport: Consensus) -> None:
    """where: what this rank is in: a call, and its direction."""
    digest = b"\0" * _DIGEST if error is not None else _digest(where.encode() + b"\0" + signature.digest)
    try:
        if transport.all_equal(digest) and error is None:
            return
    except MissingRanks as absent:
        raise RuntimeError(absent.message(where)) from absent
    said = [type(error).__name__, str(error)] if error is not None else [where, signature.entries]
    # Two more collective calls cost nothing here: an error follows.
    everyone = all_gather_json([said, transport.calls.number], transport)
    transport.calls.advance_to(max(number for _, number in everyone))
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


def _thread_role() -> str:
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
