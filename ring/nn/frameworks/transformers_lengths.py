"""Number of tokens beyond which layers of a model may mix in another way, from the integers of its configuration.

A layer that compresses blocks of tokens, or selects some keys, does nothing special with fewer tokens than a block has
or than it selects. The comparison of `prepare` must therefore be longer. Windows and chunks that transformers' masks
carry are no such numbers: ring attention has them from the same masks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

LONGEST = 512  # tokens that the drawn example has for such a layer, at most: each module's output is kept in fp64
LENGTHS = re.compile("block|chunk|window|compress|stride|pool|rate|ratio")  # tokens of a block
COUNTS = re.compile("top_?k")  # of blocks or keys
OTHERS = re.compile("sliding_window|attention_chunk_size|layers|expert|moe|router|group|sampl|feed_forward|multiple")


class Reach(NamedTuple):
    """tokens: the greatest block times the greatest number of them. source: the configuration's names."""

    tokens: int
    source: str


def reach(model: Any) -> Reach:
    """Return the tokens beyond which layers may mix in another way; 0 tokens if the configuration has no such integer.

    Args:
        model: of transformers.
    """
    numbers = [x for x in _integers(model.config.get_text_config().to_dict()) if not OTHERS.search(x[0])]
    greatest = [
        max((x for x in numbers if kind.search(x[0])), key=lambda x: x[1], default=None) for kind in (LENGTHS, COUNTS)
    ]
    tokens, parts = 1, [x for x in greatest if x is not None and x[1] > 1]
    for _, size in parts:
        tokens *= size
    return Reach(tokens if parts else 0, " and ".join(f"{name}={size}" for name, size in parts))


def _integers(value: Any, name: str = "") -> Iterator[tuple[str, int]]:
    if type(value) is int:
        yield name, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        yield from _integers(item, f"{name}.{key}".lstrip("."))
