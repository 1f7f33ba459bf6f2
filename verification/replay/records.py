"""Saved counter-examples as they are read again: a file may have been edited, or come from elsewhere.

What is read is run and judged. So whatever would fail for a reason of its own is refused here: a Case that
`ring_attention` does not support, a law without its premise, sizes that no run would draw and no machine could hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from verification import runner
from verification.case import Case
from verification.check import isolation, laws
from verification.check.supported import check_supported
from verification.peers.peer_experiment import experiment_of
from verification.problems import real_size
from verification.run import mistakes as misuse
from verification.search.experiment import Experiment

_INTEGER = 2**40  # buckets, and what patterns count in: tokens that a plan can count
_MOST = {
    "world": max(runner.MOST_RANKS.values()), "tokens": 2**17, "batch": 2**12, "heads": 2**12, "kv_heads": 2**12,
    "head_dim": 2**12, "bucket": _INTEGER,
}  # fmt: skip


def understand(record: object) -> tuple[Experiment | None, Any, Any]:
    """(experiment, subject, what has a world size): None stands for the problem of real size.

    Raises ValueError for what is no counter-example, Refused for a peer that cannot be loaded.
    """
    if not isinstance(record, dict):
        raise ValueError(f"a counter-example must be a JSON object, got {type(record).__name__}")
    if "real_size" in record:
        _keys("a problem of real size", record, ["real_size"])
        _keys("real_size", record["real_size"], [field.name for field in fields(real_size.Problem)])
        problem = real_size.Problem(**record["real_size"])
        return None, problem, problem
    if "peer" in record:
        _keys("a counter-example of a peer", record, ["peer", "case"])
        _case(record["case"])
        return experiment_of(record)
    if "law" in record:
        _keys("a counter-example of a law", record, ["law", "case", "how"])
        known = {law.name: law for law in laws.LAWS}
        name, how = record["law"], record["how"]
        if not isinstance(name, str) or name not in known:
            raise ValueError(f"law is {name!r}; it must be one of {', '.join(known)}")
        case = _case(record["case"])
        PREMISES[name](case, how)
        return runner.law_experiment(known[name]), (case, how), case
    case = _case(record)
    return runner.EXAMPLES, case, case


# --- Cases ------------------------------------------------------------------------------------------------------------


def _case(data: object) -> Case:
    """Sizes first: a Case lists its ranks, and a pattern its heads, while they are being made."""
    if isinstance(data, dict):
        for name, most in _MOST.items():
            if name in data:
                _at_most(name, data[name], most)
        for number in _integers(data.get("pattern")):
            _at_most("an integer of pattern", number, _INTEGER)
    case = Case.from_json(json.dumps(data))
    check_supported(case)
    return case


def _at_most(name: str, value: object, most: int) -> None:
    if isinstance(value, (int, float)) and value > most:
        raise ValueError(f"{name} is {value}; it must be at most {most}")


def _integers(data: object) -> Iterator[int]:
    """All that are in it."""
    if isinstance(data, (dict, list)):
        for value in data.values() if isinstance(data, dict) else data:
            yield from _integers(value)
    elif isinstance(data, int):
        yield data


# --- premises of laws -------------------------------------------------------------------------------------------------


def _anywhere(case: Case, how: Any) -> None:
    _keys("how", how, ["group", "order", "cuts", "exchange", "bucket"])
    _tame(case)
    _at_most("bucket", how["bucket"], _INTEGER)
    check_supported(replace(case, **how))


def _later(case: Case, how: Any) -> None:
    _keys("how", how, ["position"])
    _index("position", how["position"], case.tokens)
    if not case.pattern.causal:
        raise ValueError("causal is False; the law that later tokens change nothing is one of causal patterns")


def _permuted(case: Case, how: Any) -> None:
    _keys("how", how, ["batch", "kv_heads"])
    _tame(case)
    for name, size in (("batch", case.batch), ("kv_heads", case.kv_heads)):
        order = how[name]
        if not isinstance(order, list) or not all(type(i) is int for i in order) or sorted(order) != list(range(size)):
            raise ValueError(f"{name} of how is {order!r}; it must be an order of range({size})")
    if laws.permuted(case.pattern, laws.head_order(case, tuple(how["kv_heads"]))) is None:
        raise ValueError(f"kv_heads of how is {how['kv_heads']}; it must leave the heads of every branch a range")


def _poisoned(case: Case, how: Any) -> None:
    _keys("how", how, ["token", "tensor", "infinite"])
    _index("token", how["token"], case.tokens)
    if how["tensor"] not in ("q", "k", "v"):
        raise ValueError(f"tensor of how is {how['tensor']!r}; it must be one of q, k, v")
    if not isinstance(how["infinite"], bool) or (how["infinite"] and how["tensor"] != "v"):
        raise ValueError(f"infinite of how is {how['infinite']!r}; it must be False or, with tensor 'v', True")


def _misused(case: Case, how: Any) -> None:
    _keys("how", how, ["mistakes"])
    made = how["mistakes"]
    if not isinstance(made, list) or not made or not all(isinstance(one, list) and len(one) == 2 for one in made):
        raise ValueError(f"mistakes of how is {made!r}; it must be a list of at least one [mistake, index or null]")
    possible = misuse.applicable(case)
    for name, culprit in made:
        if name not in possible:
            raise ValueError(f"a mistake of how is {name!r}; with this Case it must be one of {', '.join(possible)}")
        mistake = misuse.MISTAKES[name]
        if culprit is not None:
            _index(f"the index that makes {name!r}", culprit, len(case.ranks))
        if culprit is None and not (mistake.alone or mistake.together):
            raise ValueError(f"the index that makes {name!r} is null; it takes one rank that differs from the others")
        if culprit is not None and mistake.together:
            raise ValueError(f"the index that makes {name!r} is {culprit}; it must be null: all ranks make it together")


def _neighbours(case: Case, how: Any) -> None:
    if not isinstance(how, dict) or not how or not set(how) <= set(isolation.CHANGES):
        raise ValueError(f"how is {how!r}; it must be an object with some of the fields {', '.join(isolation.CHANGES)}")
    for name, value in how.items():
        _change(case, name, value)
        check_supported(isolation.neighbour(case, name, value))


def _change(case: Case, name: str, value: Any) -> None:
    branches = case.pattern.branches
    if name == "causal" and not isinstance(value, bool):
        raise ValueError(f"causal of how is {value!r}; it must be a boolean")
    if name in ("twice", "shifted"):
        _index(f"{name} of how", value, len(branches))
    if name == "shifted" and not isolation.can_shift(branches[value]):
        raise ValueError(f"shifted of how is {value}; that branch must have one offset, and a rate of more than 1")
    if name in ("bucket", "kv_heads"):
        _at_most(f"{name} of how", value, _INTEGER)


def _long(case: Case, how: Any) -> None:
    """Holds for any Case."""
    _keys("how", how, [])


def _growth(case: Case, how: Any) -> None:
    _keys("how", how, ["shift"])
    if type(how["shift"]) is not int or abs(how["shift"]) > 1024:
        raise ValueError(f"shift of how is {how['shift']!r}; it must be an integer of size at most 1024")
    for name, wanted in (("dtype", "bfloat16"), ("group", None), ("cuts", None), ("lse", "unused")):
        if getattr(case, name) != wanted:
            raise ValueError(f"{name} is {getattr(case, name)!r}; for the law of growing errors it must be {wanted!r}")


# By the name of the law: raises ValueError unless `how` is one that the law may draw for that Case.
PREMISES: dict[str, Callable[[Case, Any], None]] = {
    "same on any ranks, layout, exchange": _anywhere,
    "later tokens change nothing": _later,
    "batches and heads permute": _permuted,
    "NaN and inf propagate": _poisoned,
    "wrong calls refused everywhere": _misused,
    "no call takes another for its like": _neighbours,
    "a call leaves nothing behind": _long,
    "memory of longer shards": _long,
    "error does not grow with ranks": _growth,
}


def _keys(what: str, data: Any, names: list[str]) -> None:
    if not isinstance(data, dict) or sorted(data) != sorted(names):
        given = f"the fields {', '.join(data) or 'none'}" if isinstance(data, dict) else repr(data)
        raise ValueError(f"{what} must be an object with the fields {', '.join(names) or 'none'}, got {given}")


def _index(name: str, value: object, size: int) -> None:
    if type(value) is not int or not 0 <= value < size:
        raise ValueError(f"{name} is {value!r}; it must be an integer from 0 to {size - 1}")


def _tame(case: Case) -> None:
    if case.values == "huge":
        raise ValueError("values is 'huge'; this law takes none that overflow in one order of a sum and not in another")
