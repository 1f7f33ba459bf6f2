"""Number of tokens beyond which layers of a model may mix in another way, from the integers of its configuration.

A layer that compresses blocks of tokens, or selects some keys, does nothing special with fewer tokens than a block has
or than it selects. The comparison of `prepare` must therefore be longer. Windows and chunks that transformers' masks
carry are no such numbers: ring attention has them from the same masks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from torch import nn

LONGEST = 512  # tokens that the drawn example has for such a layer, at most: each module's output is kept in fp64
LENGTHS = re.compile("block|chunk|window|compress|stride|pool|rate|ratio")  # tokens of a block
COUNTS = re.compile("top_?k")  # of blocks or keys
OTHERS = re.compile("sliding_window|attention_chunk_size|layers|expert|moe|router|group|sampl|feed_forward|multiple")


def reach(model: Any) -> tuple[int, str]:
    """Return the greatest block times the greatest number of selected ones, and the names of both; 0 without any, and
    where the model cannot have so many tokens.

    Args:
        model: of transformers.
    """
    integers = _integers(model.config.get_text_config().to_dict())
    sizes = {name: size for name, size in integers if size > 1 and not OTHERS.search(name)}
    kinds = ([name for name in sizes if kind.search(name)] for kind in (LENGTHS, COUNTS))
    names = [max(kind, key=lambda name: sizes[name]) for kind in kinds if kind]
    tokens = math.prod(map(sizes.__getitem__, names)) if names else 0
    if tokens >= _most_tokens(model):
        return 0, ""
    return tokens, " and ".join(f"{x}={sizes[x]}" for x in names)


def _most_tokens(model: Any) -> float:
    """Return the number of tokens that a table of positions has; infinity without one."""
    most, tokens = (
        getattr(model.config.get_text_config(), "max_position_embeddings", None),
        model.get_input_embeddings(),
    )
    tables = (x.num_embeddings for x in model.modules() if isinstance(x, nn.Embedding) and x is not tokens)
    return most if most is not None and any(0 <= rows - most <= 3 for rows in tables) else math.inf


def _integers(value: Any, name: str = "") -> Iterator[tuple[str, int]]:
    if type(value) is int:
        yield name, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        yield from _integers(item, f"{name}.{key}".lstrip("."))
