"""Equal arguments of a call, written in another way: ranks must treat them as the same."""

from __future__ import annotations

import json

import numpy as np

from reference.pattern import Pattern
from ring import Layout
from verification.case import Case
from verification.run.layouts import key_layout_of, layout_of


def rewritten(case: Case) -> tuple[Pattern, Layout, Layout, float | None]:
    """Return the pattern from its JSON, the layouts from their lists of positions, and a whole scale as an integer."""
    pattern = Pattern.from_dict(json.loads(json.dumps(case.pattern.to_dict())))
    whole = case.scale is not None and case.scale.is_integer()
    return (
        pattern,
        _listed(layout_of(case)),
        _listed(key_layout_of(case)),
        int(case.scale or 0) if whole else case.scale,
    )


def _listed(layout: Layout) -> Layout:
    """Rebuild the layout from its positions. Layouts stored as runs never equal listed ones: keep the object then."""
    order = np.concatenate([layout.positions(rank).numpy() for rank in range(layout.world_size)])
    rebuilt = Layout.from_cuts(order, layout.cuts)
    return rebuilt if (rebuilt.runs is None) == (layout.runs is None) else layout
