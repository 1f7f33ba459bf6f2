"""Sums of gradients that ranks return to a key's owner for attention in chunks (`reference.same_bits`)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from reference.remote_rows import Ints, SettingView
from reference.same_bits import Part, blocks_in_chunks, tree


def subtrees(ranks: Sequence[int]) -> Counter[int]:
    """Return the number of largest subtrees of which each rank has all parts. ranks: of the parts, in order."""
    found: Counter[int] = Counter()

    def join(left: int, right: int) -> int:
        if left != right:
            found.update((left, right))
        return left if left == right else -1  # several ranks have it

    found[tree(ranks, join)] += 1
    return Counter({rank: count for rank, count in found.items() if rank >= 0})


def returned_sums(setting: SettingView, index: int, chunk: int) -> tuple[Ints, Ints]:
    """Return how many sums of each key's gradients each rank returns to the owner through branch `index`: (p, n_k), in
    the order of `Setting.rows`, 0 for the owner; and the rows of each key's range, (n_k,).

    Ranks have whole chunks, and return sums of all rows of a range. A rank needs the keys of which it returns a sum.
    """
    reader, place = setting.query_owner[np.argsort(setting.query_rows)], np.argsort(setting.rows)
    found, sizes = np.zeros((setting.world, place.size), np.int64), np.zeros(place.size, np.int64)
    alone = replace(setting.pattern, branches=setting.pattern.branches[index : index + 1])
    counts = (setting.heads, setting.kv_heads), (reader.size, place.size)
    for _, parts in blocks_in_chunks(alone, *counts, chunk):
        for _, own in groupby(sorted(parts, key=_first_key), _first_key):  # in the order of queries, as parts are
            ranges = [part.ranges for part in own]
            for rank, count in subtrees([int(reader[queries[0]]) for queries, _ in ranges]).items():
                found[rank, place[ranges[0][1]]] = count
            sizes[place[ranges[0][1]]] = len(ranges[0][1])
    found[setting.owner, np.arange(place.size)] = 0
    return found, sizes


def _first_key(part: Part) -> int:
    return int(part.ranges[1][0])
