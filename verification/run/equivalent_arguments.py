"""The arguments of a call, written in another way: equal ones, which ranks must take for the same."""

from __future__ import annotations

import json

import numpy as np

from reference.pattern import Pattern
from ring import Layout
from verification.case import Case
from verification.run.layouts import layout_of


def rewritten(case: Case) -> tuple[Pattern, Layout, float | None]:
    """The pattern as it comes back from JSON, the layout made of its listed positions, the scale as an integer if it is
    a whole number.
    """
    pattern = Pattern.from_dict(json.loads(json.dumps(case.pattern.to_dict())))
    whole = case.scale is not None and case.scale.is_integer()
    return pattern, _listed(layout_of(case)), int(case.scale or 0) if whole else case.scale


def _listed(layout: Layout) -> Layout:
    """Layouts are equal if both are kept as runs, or both are listed: else it is the same object."""
    order = np.concatenate([layout.positions(rank).numpy() for rank in range(layout.world_size)])
    made = Layout.from_cuts(order, layout.cuts)
    return made if (made.runs is None) == (layout.runs is None) else layout
