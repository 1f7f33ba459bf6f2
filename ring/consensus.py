"""Raises the same error on every rank for bad input, before any tensor moves.

Every rank validates its own arguments (`ring.validation`). Then the ranks compare their arguments and their position in
the sequence of calls, forward or backward (`ring.comm.call_order`). A rank with a wrong argument tells the others, so
that they do not wait for it. Where arguments or positions differ, the error names both.

The ranks compare a digest of 16 bytes, and exchange text only if digests differ.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
from torch.utils.checkpoint import _StopRecomputationError

from reference.documents import first_few
from reference.pattern import Pattern
from ring.caching.bounded_cache import BoundedCache
from ring.comm.call_order import NumberedCall, within_backward
from ring.comm.rank_error import described, make_error
from ring.comm.transport import Consensus, MissingRanks, Transport, all_gather_json
from ring.layout import Layout
from ring.plan.exchange import DIRECT, ExchangeSpec, depends_on_hosts, is_auto, parse, with_number
from ring.validation import Call, refuse_transforms, refuse_unknown, validate

T = TypeVar("T")
_DIGEST = 16
_LENGTH_BYTES = 36  # memory of a document's length, an int in a tuple


class Signature(NamedTuple):
    """The arguments that must be equal on every rank, by name, and their digest."""

    entries: Mapping[str, object]
    digest: bytes


@dataclass(frozen=True, eq=False)
class CallSetting:
    """The validated setting of all calls that differ only in tensors' values: one object, by which plans are cached."""

    signature: Signature
    exchange: ExchangeSpec


_NO_ARGUMENTS = Signature({}, b"")
_UNKNOWN = CallSetting(_NO_ARGUMENTS, parse(DIRECT.name, 1))
_settings: BoundedCache[Hashable, CallSetting] = BoundedCache(256, most_bytes=2**26)


def agree(call: Call, numbered: NumberedCall, transport: Transport) -> CallSetting:
    """Return the call's setting if the call is valid and, with `check`, if all ranks make this call.

    Raises ValueError or NotImplementedError; with `check` the same one on every rank.
    """
    check = call.settings.check
    hosts = hosts_of(call, numbered, transport)
    error: Exception | None = None
    setting, signature, where = _UNKNOWN, _NO_ARGUMENTS, f"the forward of call {numbered.number}"
    try:
        if not isinstance(numbered.name, str | None):
            raise ValueError(f"name must be None or a string, got {type(numbered.name)}")
        if call.unknown:
            refuse_unknown(call.unknown)
        refuse_transforms()
        if transport.world_size > 1:
            numbered.calls.check_thread(numbered)
        setting = setting_of(call, transport, hosts)
        signature = setting.signature if call.sinks is None else _with_values(setting.signature, call.sinks)
        if transport.world_size > 1:
            where = numbered.forward
            numbered.calls.enter(where)
    except Exception as exception:  # of any type: the other ranks must learn of it
        if not check:
            numbered.calls.enter("")
            raise
        error = exception
    if check and (transport.world_size > 1 or error is not None):
        _compare(where, signature, error, transport)
    return setting


def _with_values(signature: Signature, sinks: torch.Tensor) -> Signature:
    """Add the values of sinks to a signature; not on GPUs, where the host would wait for them.

    Raises ValueError for NaN and +inf.
    """
    if not sinks.is_cpu:
        return signature
    values = [value + 0.0 for value in sinks.tolist()]  # so that -0.0 equals 0.0
    for head, value in enumerate(values):
        if not value < math.inf:
            raise ValueError(f"sinks must be finite, or -inf for no sink, got {value} for query head {head}")
    return Signature({**signature.entries, "sinks": values}, signature.digest + str(values).encode())


def hosts_of(call: Call, this: NumberedCall, transport: Transport) -> tuple[int, ...]:
    """Return the hosts of the ranks if the exchange depends on them. Raises RuntimeError for ranks that do not come."""
    if not depends_on_hosts(call.settings.exchange):
        return ()
    try:
        return transport.hosts
    except MissingRanks as missing:
        raise RuntimeError(missing.message(this.forward)) from missing


def setting_of(call: Call, transport: Transport, hosts: tuple[int, ...]) -> CallSetting:
    """Validate a call and return its setting. Cached, so that equal calls are validated once.

    hosts: of the ranks, if the exchange depends on them. Raises ValueError or NotImplementedError for an invalid call.
    """
    thread = _thread_role() if transport.world_size > 1 else ""
    key = call.key(), transport.rank, transport.world_size, thread, hosts

    def validated() -> CallSetting:
        resolved = _with_exchange(call, transport, hosts)
        return CallSetting(_signature(resolved, thread), parse(resolved.settings.exchange, transport.world_size))

    try:
        return _settings.get_or_make(key, validated, lambda _: _listed_bytes(call.pattern))
    except TypeError:  # an unhashable argument is invalid: raise its own error
        pass
    return validated()


def _with_exchange(call: Call, transport: Transport, hosts: tuple[int, ...]) -> Call:
    """Validate a call and return it with the name of its exchange, without "auto", and with a number of ranks."""
    exchange = call.settings.exchange
    automatic = is_auto(exchange)
    if automatic and call.settings.same_bits is not None:
        raise NotImplementedError(
            "exchange 'auto' is not predicted with same_bits: name one, as 'direct'; bits are equal"
        )
    call = _exchanged(call, DIRECT.name if automatic else with_number(exchange, hosts))
    validate(call, transport)
    if not automatic:
        return call
    from ring.estimate.choice import chosen  # most calls need no estimates

    return _exchanged(call, chosen(call, hosts))


def _exchanged(call: Call, exchange: str) -> Call:
    """Return the call with another exchange."""
    return replace(call, settings=replace(call.settings, exchange=exchange))


def agree_backward(numbered: NumberedCall, transport: Transport, check: bool, *gradients: torch.Tensor | None) -> None:
    """Raise ValueError, with `check` on every rank, unless all ranks are in the same backward of the same call;
    NotImplementedError for gradients of a transform, as of several backwards at once.
    """
    error: Exception | None = None
    if transport.world_size > 1:
        numbered.calls.enter(numbered.backward)
    try:
        numbered.calls.check_backward(numbered)
        refuse_transforms(*gradients)
    except (ValueError, NotImplementedError) as exception:
        if not check:
            numbered.calls.enter("")
            raise
        error = exception
    if check and (transport.world_size > 1 or error is not None):
        _compare(numbered.backward, _NO_ARGUMENTS, error, transport)
    numbered.backwards += 1  # on all ranks; after an error on none


def agreed_result(
    call: NumberedCall | str,
    compute: Callable[[], tuple[Mapping[str, object], T]],
    ranks: Consensus,
    check: bool = True,
) -> T:
    """Return what this rank computes, once all ranks have done so for one call. Collective.

    call: what this rank is doing, compared first. compute: returns a signature and the result. Raises what `compare`
    raises; without `check` this rank's error alone.
    """
    error: Exception | None = None
    signature: Mapping[str, object] = {}
    results: list[T] = []
    with ranks.calls.lock():
        try:
            if ranks.world_size > 1:
                ranks.calls.check_thread(call)
            signature, result = compute()
            results.append(result)
        except _StopRecomputationError:  # by which checkpointing ends a recomputation early, on every rank
            raise
        except Exception as wrong:  # of any type: the other ranks must raise it too
            if not check:
                raise
            error = wrong
        if check:
            compare(str(call), signature, error, ranks)
    return results[0]


def compare(where: str, signature: Mapping[str, object], error: Exception | None, transport: Consensus) -> None:
    """Raise the same error on every rank if a rank has one, or if signatures differ. Collective.

    where: what this rank is doing, compared first. signature: has the same names on every rank. Raises the first rank's
    error, ValueError for the first difference, or RuntimeError for ranks that do not come within the group's timeout.
    """
    with transport.calls.lock():
        if transport.world_size > 1 or error is not None:
            transport.calls.enter(where)
            _compare(where, Signature(signature, json.dumps(signature).encode()), error, transport)
            transport.calls.enter("")


def _compare(where: str, signature: Signature, error: Exception | None, transport: Consensus) -> None:
    """`compare`, with a signature that has its digest."""
    _drop_frames(error)
    digest = b"\0" * _DIGEST if error is not None else _digest(where.encode() + b"\0" + signature.digest)
    try:
        if transport.all_equal(digest) and error is None:
            return
    except MissingRanks as missing:
        raise RuntimeError(missing.message(where)) from missing
    report = (where, signature.entries) if error is None else described(error)
    # The cost of two more collectives does not matter: an error follows.
    gathered = all_gather_json([report, transport.calls.number], transport)
    transport.calls.advance_to(max(number for _, number in gathered))
    transport.calls.enter("")
    raise _marked(_joint_error([(str(kind), text) for (kind, text), _ in gathered]), transport)


def _marked(error: Exception, transport: Consensus) -> Exception:
    """Note the group on an error. A frame that raises what it names would keep the tensors of the call."""
    vars(error)["ring_group"] = id(transport.calls)
    return error


def is_joint(error: Exception, transport: Consensus) -> bool:
    """Return True if all ranks raised this error together, or if that is impossible since a rank did not come."""
    return vars(error).get("ring_group") == id(transport.calls) or isinstance(error.__cause__, MissingRanks)


def _drop_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error and of its causes. Their frames hold the error itself and the call's tensors: a
    cycle, which would keep the tensors until the garbage collector runs.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST).digest()


def _joint_error(reports: list[tuple[str, str | dict[str, object]]]) -> Exception:
    """Build the error that all ranks raise. reports: by rank, an error's type and text, or a call and its signature."""
    for rank, (kind, text) in enumerate(reports):
        if isinstance(text, str):
            return make_error(rank, kind, text)
    first_where, first = reports[0]
    assert isinstance(first, dict)
    for rank, (where, _) in enumerate(reports):
        if where != first_where:
            difference = f"rank 0 is in {first_where}, rank {rank} in {where}"
            return ValueError(f"calls on a group must come in the same order on every rank: {difference}")
    for rank, (_, entries) in enumerate(reports):
        assert isinstance(entries, dict)
        for name, value in entries.items():
            if value != first[name]:
                difference = _difference(first[name], value, rank)
                return ValueError(f"{name} must be the same on every rank: {difference}")
    raise AssertionError("ranks that disagree differ in something")


def _difference(first: object, other: object, rank: int) -> str:
    """Describe how a rank's value differs from rank 0's; of lists, which may be long, the first difference."""
    if not (isinstance(first, list) and isinstance(other, list)):
        a, b = (first_few(x) if isinstance(x, list) else x for x in (first, other))
        return f"rank 0 has {a}, rank {rank} {b}"
    pairs = enumerate(zip(first, other, strict=False))
    i = next((i for i, (a, b) in pairs if a != b), min(len(first), len(other)))
    a, b = (x[i] if i < len(x) else "none" for x in (first, other))
    return f"rank 0 has {a} as number {i} of {len(first)}, rank {rank} {b} as number {i} of {len(other)}"


def _thread_role() -> str:
    """Return the role of this thread. Thread names may differ between ranks; but if one rank calls from its main thread
    and another does not, two threads per rank are calling.
    """
    if within_backward():
        return "autograd's"
    return "the main one" if threading.current_thread() is threading.main_thread() else "another one"


def _listed_bytes(pattern: Pattern) -> int:
    """Return the bytes of a pattern's documents and slices in a signature."""
    slices = sum(len(branch.slices or ()) for branch in pattern.branches)
    return _LENGTH_BYTES * (len(pattern.documents or ()) + 6 * slices)


def _described(layout: Layout) -> str:
    return f"{layout.n} tokens, cuts {layout.cuts}, order {layout.digest.hex()}"


def _signature(call: Call, thread: str) -> Signature:
    """Return the signature of a validated call."""
    q, settings = call.q, call.settings.entries()
    exchange = settings.pop("exchange")
    pattern, slices = replace(call.pattern, documents=None).to_dict(), []
    for number, branch in enumerate(pattern["branches"]):  # of slices, which may be thousands, one is named
        slices += [[f"branch {number}", *one] for one in branch.get("slices", ())]
        branch["slices"] = len(branch["slices"]) if "slices" in branch else None
    entries = {
        "batch size": q.shape[0],
        "query heads": q.shape[2],
        "key/value heads": call.k.shape[2],
        "head dim": q.shape[3],
        "head dim of v": call.v.shape[3],
        "dtype": str(q.dtype),
        "device type": q.device.type,
        "pattern": pattern,
        "slices": slices,
        "documents": call.pattern.documents,
        "layout": _described(call.layout),
        "key_layout": _described(call.key_layout),
        **settings,
        "dtype of sinks": None if call.sinks is None else str(call.sinks.dtype),
        "requires_grad": call.differentiated,
        "requires_grad of sinks": call.sinks_differentiated,
        "exchange": exchange,  # after what "auto" chooses by: the first difference is named
        "calling thread": thread,
    }
    return Signature(entries, _digest(json.dumps(entries).encode()))
