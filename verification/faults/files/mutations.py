"""Mutations of a saved record: damage of its bytes, and other values, names and structures in its JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from verification.faults.files.stock import stock

_MARK = "a mark that stands for raw text"
ACTING = ("\x1b[2J", "\x1b]0;title\x07", "\r", "\x00", "\x7f", "\x9b31m", "\u202e", "\u2066", "\u2028", "\ud800")
TYPES = ("null", "true", "0", "-1", "1.5", '""', '"x"', "[]", "{}", "[[]]", "[0, null]", '{"a": 0}')
NAMES = (
    "trap:adapter",
    "trap:adapter.x",
    "trap",
    "os:system",
    "verification.peers.adapters.trap:x",
    "./trap.py:x",
    ":",
)


def _bits(draw: random.Random, text: bytes) -> bytes:
    changed = bytearray(text)
    for _ in range(draw.randint(1, 8)):
        changed[draw.randrange(len(text))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _splice(draw: random.Random, text: bytes) -> bytes:
    other = _dumped(draw.choice(stock()))
    return text[: draw.randrange(len(text))] + other[draw.randrange(len(other)) :]


def _raw(choose: Callable[[random.Random], str]) -> Callable[[random.Random, bytes], bytes]:
    """Return the mutation that puts raw text in the place of a value."""

    def mutate(draw: random.Random, text: bytes) -> bytes:
        record = json.loads(text)
        container, key = draw.choice(list(_places(record)))
        container[key] = _MARK
        return _dumped(record).replace(json.dumps(_MARK).encode(), choose(draw).encode())

    return mutate


def _number(draw: random.Random) -> str:
    return draw.choice(
        (f"{draw.choice(('', '-'))}{10 ** draw.randint(6, 4000)}", "9" * 5000, "1e400", "1e308", "1e-320")
    )


def _nested(draw: random.Random) -> str:
    opening, closing = draw.choice((("[", "]"), ('{"a":', "}")))
    depth = int(10 ** draw.uniform(1, 5))
    return f"{opening * depth}0{closing * depth}"


def _keys(draw: random.Random, text: bytes) -> bytes:
    """Drop a key, or give its value to another one or to two."""
    record = json.loads(text)
    container, key = draw.choice([(x, key) for x, key in _places(record) if isinstance(x, dict)])
    value, others = container[key], [k for x, k in _places(draw.choice(stock())) if isinstance(x, dict)]
    if draw.random() < 0.7:
        del container[key]
    if draw.random() < 0.8:
        container[draw.choice((*others, "", "__class__", draw.choice(ACTING)))] = value
    return _dumped(record)


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container in a record with each of its keys or indices."""
    for key in data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        yield data, key
        yield from _places(data[key])


def _dumped(record: Any) -> bytes:
    return json.dumps(record).encode()


MUTATIONS: dict[str, tuple[str, Callable[[random.Random, bytes], bytes]]] = {
    "bits": ("flipped bits", _bits),
    "cut": ("a cut file", lambda draw, text: text[: draw.randrange(len(text))]),
    "splice": ("two files spliced", _splice),
    "type": ("a value of another type", _raw(lambda draw: draw.choice(TYPES))),
    "number": ("a huge number", _raw(_number)),
    "nested": ("deep nesting", _raw(_nested)),
    "nan": ("NaN or infinity", _raw(lambda draw: draw.choice(("NaN", "Infinity", "-Infinity")))),
    "keys": ("other keys", _keys),
    "control": ("control characters", _raw(lambda draw: json.dumps("".join(draw.choices(ACTING, k=3))))),
    "name": ("a name of a module", _raw(lambda draw: json.dumps(draw.choice(NAMES)))),
}


def mutated(kind: str, draw: random.Random) -> bytes:
    """Return a record of the stock with a mutation of that kind."""
    return MUTATIONS[kind][1](draw, _dumped(draw.choice(stock())))
