"""The score of a query and a key: its scale and its softcap."""

from __future__ import annotations

from typing import NamedTuple


class Scores(NamedTuple):
    """Factor of q . k, and softcap t (Gemma 2, arXiv 2408.00118) or None: the score is t tanh(scale q . k / t)."""

    scale: float
    softcap: float | None = None
