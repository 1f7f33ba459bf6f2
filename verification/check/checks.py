"""The checks of every example, one small function each.

A check takes a Case, its Expectation and one Observation per rank, in the group's order. It returns the worst error as
a fraction of its bound, by quantity; empty if the check is exact. It raises WrongResult or MismatchedMessages with the
place of the error. Nothing is sampled, and no tolerance is chosen here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference import cost
from reference.bounds import Array
from reference.fast_oracle import Expectation
from reference.head_groups import groups_of
from reference.roundoff import LARGEST
from reference.shards import Ints, default_bucket
from verification.case import Case
from verification.check.numbered_exchange import with_number
from verification.check.oracle_agreement import check_twin
from verification.check.workspace_limits import limits
from verification.check.worst_entry import worst_entry
from verification.failures import MismatchedMessages, WrongResult
from verification.run.memory_meter import Workspace
from verification.run.observation import LONGER, RESULTS, Observations, RecordedMessage
from verification.wording import counted

Ratios = dict[str, float]


# --- sharding ---------------------------------------------------------------------------------------------------------


def check_layout(case: Case, expectation: Expectation, observations: Observations) -> Ratios:
    """Layouts equal `reference.shards` on every rank, and `shard` and `unshard` follow them."""
    defined = case.shards()
    for index, (observation, expected) in enumerate(zip(observations, defined.positions, strict=False)):
        layout = observation.layout
        for positions, verb in ((layout.positions, "holds"), (layout.sharded, "is given by `shard`")):
            if not np.array_equal(positions, expected):
                raise WrongResult(
                    f"layout: {_rank(case, index)} {verb} positions {_listed(positions)}; "
                    f"{_order(case)} gives it {_listed(expected)}{_first_difference(positions, expected)}"
                )
        if layout.counts != defined.counts:
            raise WrongResult(
                f"layout: {_rank(case, index)} has counts {layout.counts}; {_order(case)} makes them {defined.counts}"
            )
        if not np.array_equal(layout.place, defined.place):
            raise WrongResult(
                f"layout: on {_rank(case, index)}, `unshard` takes the tokens from places {_listed(layout.place)}"
                f" of the shards laid end to end; {_order(case)} has them at {_listed(defined.place)}"
                f"{_first_difference(layout.place, defined.place)}"
            )
    return {}


# --- results ----------------------------------------------------------------------------------------------------------


def check_answers(case: Case, expectation: Expectation, observations: Observations) -> Ratios:
    """One answer arrives per rank; every result has the dtype and the shape that the rank's inputs imply."""
    if len(observations) != len(case.ranks):
        raise WrongResult(f"answers: {counted(len(observations), 'rank')} answered, the group has {len(case.ranks)}")
    for index, observation in enumerate(observations):
        for name, dtype in zip(RESULTS, observation.dtypes, strict=True):
            result = getattr(observation, name)
            if name not in compared(case):
                if result is not None:
                    raise WrongResult(f"answers: {_rank(case, index)} returned {name}, which was not asked for")
                continue
            expected = expected_dtype(case, name)
            _check_shape(case, index, name, result)
            if dtype != expected:
                raise WrongResult(f"answers: {name} of {_rank(case, index)} is {dtype}, not {expected}")
    return {}


def _check_shape(case: Case, index: int, name: str, result: Array | None) -> None:
    """Raise WrongResult if one rank's result has another shape than it must, or is None."""
    length = (case.key_shards() if name in ("dk", "dv") else case.shards()).counts[index]
    heads = case.kv_heads if name in ("dk", "dv") else case.heads
    shape: tuple[int, ...] = (case.batch, length, heads, case.dims[name in ("out", "dv")])
    if name in ("lse", "dsinks"):
        shape = (case.batch, heads, length) if name == "lse" else (heads,)
    actual = None if result is None else result.shape
    if actual != shape:
        raise WrongResult(f"answers: {name} of {_rank(case, index)} has shape {actual}, not {shape}")


def check_unseen(case: Case, expectation: Expectation, observations: Observations) -> Ratios:
    """Rows that see nothing have exactly out = dq = 0 and lse = -inf, or their sink; keys that no row sees, dk = dv =
    0."""
    sinks = expectation.inputs.sinks
    for name in compared(case):
        if name == "dsinks":
            continue
        dead = expectation.dead_keys if name in ("dk", "dv") else expectation.dead_rows  # (H, N)
        if not dead.any():
            continue
        actual = assemble(case, observations, name)
        mask = dead[None] if name == "lse" else dead.T[None, :, :, None]
        expected = np.broadcast_to(0.0, actual.shape)
        if name == "lse":
            expected = np.broadcast_to(-np.inf if sinks is None else sinks[:, None], actual.shape)
        wrong = mask & (actual != expected)
        if wrong.any():
            where = _first(wrong)
            raise WrongResult(
                f"unseen: {name} is {actual[where]} {_place(case, name, where)}, not exactly {expected[where]}: "
                f"{'no query sees this key' if name in ('dk', 'dv') else 'this query sees no key'}"
            )
    return {}


def check_finite(case: Case, expectation: Expectation, observations: Observations) -> Ratios:
    """No result is NaN or infinite, except: -inf where rows see nothing; overflow where the exact result plus its bound
    exceeds the largest number of the dtype; anything where the bound is infinite."""
    for name in compared(case):
        actual, exact = assemble(case, observations, name), expectation.exact[name]
        if np.isfinite(actual).all():
            continue
        wrong = ~(np.isfinite(actual) | (actual == exact) | _overflow(case, expectation, name, actual))
        if wrong.any():
            where = _first(wrong)
            place = _place(case, name, where)
            raise WrongResult(f"finite: {name} is {actual[where]} {place}, expected {exact[where]}")
    return {}


def check_values(case: Case, expectation: Expectation, observations: Observations) -> Ratios:
    """|actual - exact| <= bound, in every entry of the output and of lse."""
    return _within_bounds(case, expectation, observations, ("out", "lse"))


def check_gradients(case: Case, expectation: Expectation, observations: Observations) -> Ratios:
    """|actual - exact| <= bound, in every entry of dq, dk and dv, and of the sum of the ranks' dsinks."""
    return _within_bounds(case, expectation, observations, ("dq", "dk", "dv", "dsinks"))


def _within_bounds(
    case: Case, expectation: Expectation, observations: Observations, quantities: Collection[str]
) -> Ratios:
    worst = {}
    for name in compared(case):
        if name not in quantities:
            continue
        actual, exact, bound = assemble(case, observations, name), expectation.exact[name], expectation.bound[name]
        with np.errstate(invalid="ignore"):
            error = np.abs(actual - exact)
        if not np.isfinite(error).all():  # -inf in its place and overflow are `check_finite`'s
            error = np.where((actual == exact) | _overflow(case, expectation, name, actual), 0.0, error)
        wrong = ~(error <= bound)
        if wrong.any():
            ratio = _ratio(error, bound)
            where = worst_entry(np.where(wrong, ratio, -1.0))
            raise WrongResult(
                f"values: {name} is {actual[where]} {_place(case, name, where)}, expected {exact[where]}: "
                f"error {error[where]:.3g} is {ratio[where]:.3g} times its bound {bound[where]:.3g}; "
                f"{int(wrong.sum())} of {wrong.size} entries exceed theirs",
                name,
                float(ratio[where]),
            )
        worst[name] = float(_ratio(error, bound).max(initial=0.0))
    return worst


def check_inputs(case: Case, expectation: Expectation, observations: Observations) -> Ratios:
    """Inputs and incoming gradients are unchanged, bit for bit."""
    changed = [i for i, x in enumerate(observations) if not x.inputs_unchanged]
    if changed:
        raise WrongResult(f"inputs: changed on {', '.join(_rank(case, i) for i in changed)}")
    return {}


def check_repeat(case: Case, expectation: Expectation, observations: Observations) -> Ratios:
    """A second run, varied by `again`, gives the same bits and sends the same messages."""
    differ = [i for i, x in enumerate(observations) if not x.repeat_equal]
    if differ:
        raise WrongResult(f"repeat: a second run ({case.again}) differs on {', '.join(_rank(case, i) for i in differ)}")
    return {}


# --- communication ----------------------------------------------------------------------------------------------------


def check_messages(case: Case, expectation: Expectation, observations: Observations) -> Ratios:
    """Messages that rank s posts for rank d match those that d expects from s, in order, bytes and label."""
    for phase in ("forward", "backward"):
        sent = [_by_peer(case, i, getattr(x, f"sent_{phase}")) for i, x in enumerate(observations)]
        received = [_by_peer(case, i, getattr(x, f"received_{phase}")) for i, x in enumerate(observations)]
        for src, to in enumerate(sent):
            for dst, back in enumerate(received):
                posted, expected = to.get(dst, []), back.get(src, [])
                if posted != expected:
                    different = (i for i, (a, b) in enumerate(zip(posted, expected, strict=False)) if a != b)
                    at = next(different, min(len(posted), len(expected)))
                    raise MismatchedMessages(
                        f"messages: {phase}, number {at} from {_rank(case, src)} to {_rank(case, dst)}: "
                        f"sent {_message(posted, at)}, received {_message(expected, at)}"
                    )
    return {}


def check_traffic(case: Case, expectation: Expectation, observations: Observations) -> Ratios:
    """Bytes sent from every rank to every other, forward and backward, are those of `reference.cost.sent`."""
    p, expected = len(observations), costs(case)
    for phase in ("forward", "backward"):
        sent = np.zeros((p, p), np.int64)
        for src, observation in enumerate(observations):
            for peer, size, _ in getattr(observation, f"sent_{phase}"):
                sent[src, peer] += size
        exact = getattr(expected, f"sent_{phase}")
        if not np.array_equal(sent, exact):
            src, dst = _first(sent != exact)
            raise WrongResult(
                f"traffic: {phase}, {_rank(case, src)} sent {sent[src, dst]} bytes to {_rank(case, dst)}; "
                f"the pattern, layout and exchange make it {exact[src, dst]}"
            )
    return {}


def check_buffers(case: Case, expectation: Expectation, observations: Observations) -> Ratios:
    """The peak of communication buffers on every rank is that of `reference.cost.buffers`, which in a backward with
    `same_bits` may be less, and the default bucket of a long sequence is the defined one."""
    bucket = default_bucket(LONGER, case.heads, case.kv_heads, case.torch_dtype.itemsize, case.device)
    for index, observation in enumerate(observations):
        if observation.layout.bucket != bucket:
            raise WrongResult(
                f"buffers: the default bucket on {_rank(case, index)} is {observation.layout.bucket} where the largest "
                f"shard has {LONGER} tokens; the memory budget makes it {bucket}"
            )
    expected = costs(case, observations[0].one_sided)
    for phase in ("forward", "backward"):
        peaks = [getattr(observation, f"buffer_{phase}") for observation in observations]
        for index, (peak, exact) in enumerate(zip(peaks, getattr(expected, f"buffer_{phase}"), strict=True)):
            bound = phase == "backward" and case.same_bits is not None  # where messages are cut it is no exact count
            if peak > exact or (peak < exact and not bound):
                raise WrongResult(
                    f"buffers: {phase}, {_rank(case, index)} held {peak} bytes at most; "
                    f"the pattern, layout, exchange and bucket make it {exact}"
                )
    return {}


def check_workspace(case: Case, expectation: Expectation, observations: Observations) -> Ratios:
    """Measured Cases stay within `workspace_limits.limits`: keys and rows of a kernel call, bytes of a new tensor."""
    if not case.measured:
        return {}
    exact = costs(case)
    for index, observation in enumerate(observations):
        allowed = limits(case, index, int(exact.buffer_forward[index]), int(exact.buffer_backward[index]))
        sees = not expectation.dead_rows[_computed(case, index)].all()
        for phase in ("forward", "backward"):
            workspace: Workspace = getattr(observation, f"workspace_{phase}")
            where = f"workspace: {phase}, {_rank(case, index)}"
            if sees and not workspace.products:
                raise WrongResult(f"{where} has rows that see keys, and no product of matrices was seen")
            for few, many in workspace.products:  # either may be the keys
                least, most = sorted((allowed.query_vectors, allowed.key_vectors))
                if few > least or many > most:
                    raise WrongResult(
                        f"{where} multiplied {few} vectors by {many}; {case.tokens_per_call} tokens per call allow "
                        f"{allowed.key_vectors} of keys and {allowed.query_vectors} of queries"
                    )
            if workspace.largest > (size := getattr(allowed, phase)):
                raise WrongResult(f"{where} made a tensor of {workspace.largest} bytes; the largest may have {size}")
    return {}


def _computed(case: Case, index: int) -> Any:
    """Return the query heads and rows that a rank computes, to index (H, N)."""
    groups = groups_of(with_number(case).exchange, len(case.ranks))
    (own,) = (group for group in groups.dividing if index in group)
    place, degree, rows = own.index(index), groups.degree, case.shards().positions
    heads = slice(place * case.heads // degree, (place + 1) * case.heads // degree)
    return heads, np.concatenate([rows[rank] for rank in own])


@dataclass(frozen=True, eq=False)
class Costs:
    """Exact costs of a Case: bytes sent (p, p), from row to column, and peak bytes of buffers (p,)."""

    sent_forward: NDArray[np.int64]
    sent_backward: NDArray[np.int64]
    buffer_forward: NDArray[np.int64]
    buffer_backward: NDArray[np.int64]


@lru_cache(maxsize=64)
def costs(case: Case, one_sided: bool = False) -> Costs:
    """Return the costs by `reference.cost`. Cached, so that it can be called while the ranks are at work.

    one_sided: ranks write into each other's memory."""
    case = with_number(case)
    sizes = case.batch, case.heads, case.kv_heads, case.head_dim, case.torch_dtype.itemsize, case.value_dim
    keys = None if case.keys is None else case.key_shards().positions
    setting = cost.Setting(
        case.pattern, case.shards().positions, *sizes, keys, lse_gradient=case.lse != "unused", chunk=case.same_bits
    )
    sent = cost.sent(setting, case.exchange, case.narrow)
    buffers = cost.buffers(setting, case.exchange, case.tokens_per_call, case.narrow, one_sided)
    return Costs(sent.forward, sent.backward, buffers.forward, buffers.backward)


# In the order in which they run, causes before effects: a wrong shape before wrong numbers.
CHECKS: dict[str, Callable[[Case, Expectation, Observations], Ratios]] = {
    "oracle": check_twin, "layout": check_layout, "answers": check_answers, "messages": check_messages,
    "unseen": check_unseen, "finite": check_finite, "values": check_values,
    "gradients": check_gradients, "inputs": check_inputs, "repeat": check_repeat,
    "traffic": check_traffic, "buffers": check_buffers, "workspace": check_workspace,
}  # fmt: skip


# --- helpers ----------------------------------------------------------------------------------------------------------


def assemble(case: Case, observations: Observations, name: str) -> Array:
    """Return a result of the whole sequence, in global token order, in fp64; of dsinks the sum over the ranks. Raises
    WrongResult for a wrong shape."""
    axis = 2 if name == "lse" else 1
    for index, observation in enumerate(observations):
        _check_shape(case, index, name, getattr(observation, name))
    with np.errstate(invalid="ignore"):  # NaN of some bits, which another check names
        shards = [np.asarray(getattr(x, name), np.float64) for x in observations]
    if name == "dsinks":
        return np.asarray(sum(shards))
    place = (case.key_shards() if name in ("dk", "dv") else case.shards()).place
    return np.concatenate(shards, axis).take(place, axis)


def compared(case: Case) -> list[str]:
    """Return the names of the results that the Case asks for, out of RESULTS."""
    left_out = {"lse"} if case.lse == "unused" else set()
    left_out |= set() if case.backward else {"dq", "dk", "dv"}
    left_out |= set() if case.backward and case.sinks else {"dsinks"}
    return [name for name in RESULTS if name not in left_out]


def expected_dtype(case: Case, name: str) -> str:
    """Return the name of a result's dtype."""
    dtype = {"lse": case.accumulator_dtype, "dsinks": case.sinks_dtype}.get(name, case.torch_dtype)
    return str(dtype).removeprefix("torch.")


def _overflow(case: Case, expectation: Expectation, name: str, actual: Array) -> NDArray[np.bool_]:
    """Mask of infinities that a result within its bound may round to, and of entries whose bound is infinite."""
    dtype = expected_dtype(case, name)
    exact, bound = expectation.exact[name], expectation.bound[name]
    beyond = np.where(actual > 0, exact, -exact) + bound > LARGEST[dtype]
    return np.isinf(actual) & beyond & np.isfinite(exact) | np.isposinf(bound)


def _ratio(error: Array, bound: Array) -> Array:
    """Return error / bound, where 0 / 0 is 0 and NaN counts as infinite."""
    ratio = np.zeros_like(error)
    with np.errstate(over="ignore"):  # an overflow is infinite, too
        np.divide(error, bound, out=ratio, where=bound > 0)
    return np.where((bound == 0) & (error != 0) | np.isnan(error), np.inf, ratio)


def _first(wrong: NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(wrong)[0])


def _place(case: Case, name: str, where: tuple[Any, ...]) -> str:
    if name == "dsinks":
        return f"at head {where[0]}, summed over the ranks"
    batch, *rest = (int(i) for i in where)
    head, token = (rest[0], rest[1]) if name == "lse" else (rest[1], rest[0])
    dim = "" if name == "lse" else f", dim {rest[2]}"
    holder = int((case.key_shards() if name in ("dk", "dv") else case.shards()).holder[token])
    return f"at batch {batch}, token {token}, head {head}{dim} (held by {_rank(case, holder)})"


def _rank(case: Case, index: int) -> str:
    """`rank 3`, with its index in the group if the group is not the whole world."""
    rank = case.ranks[index]
    return f"rank {rank}" if case.group is None else f"rank {rank} (index {index} of the group)"


def _order(case: Case) -> str:
    return f"the {case.order} order" if case.cuts is None else f"the {case.order} order, cut at {case.cuts},"


def _listed(numbers: Ints) -> str:
    """Format the numbers; of many, the first and the last few."""
    return np.array2string(numbers, separator=", ", threshold=24, edgeitems=8, max_line_width=10_000)


def _first_difference(actual: Ints, expected: Ints) -> str:
    """Describe the first difference of two lists: abbreviated, they may look equal."""
    common = min(len(actual), len(expected))
    different = np.flatnonzero(actual[:common] != expected[:common])
    if not len(different):
        return f"; {len(actual)} of them where there are {len(expected)}"
    first = different[0]
    return f"; entry {first} is the first that differs: {actual[first]}, not {expected[first]}"


def _by_peer(case: Case, index: int, messages: Iterable[RecordedMessage]) -> dict[int, list[tuple[int, Any]]]:
    by_peer: dict[int, list[tuple[int, Any]]] = {}
    for peer, size, label in messages:
        if not 0 <= peer < len(case.ranks) or peer == index:
            raise MismatchedMessages(
                f"messages: {_rank(case, index)} names peer {peer} for {label!r}; "
                f"it must be another index of the group of {len(case.ranks)}"
            )
        by_peer.setdefault(peer, []).append((size, label))
    return by_peer


def _message(messages: list[tuple[int, Any]], at: int) -> str:
    return f"{messages[at][1]!r} of {messages[at][0]} bytes" if at < len(messages) else "nothing"
