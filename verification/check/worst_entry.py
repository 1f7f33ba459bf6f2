"""Search for the worst entry of an array of error / bound."""

import numpy as np

from reference.bounds import Array


def worst_entry(ratio: Array) -> tuple[int, ...]:
    """Return the index of the largest number, or of a NaN."""
    return tuple(map(int, np.unravel_index(int(np.argmax(np.nan_to_num(ratio, nan=np.inf))), ratio.shape)))
