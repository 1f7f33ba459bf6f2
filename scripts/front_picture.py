"""Draws the picture of the front page: a ring of ranks with keys on their way, and a dilated mask.

python scripts/front_picture.py ring/images/front.svg
"""

from __future__ import annotations

import sys
from math import cos, pi, sin
from pathlib import Path

from reference.svg import KERNEL, MESSAGE
from ring import Pattern

RANKS, CENTRE, RADIUS, DISC = 4, (170, 190), 105, 38  # px
MASK = Pattern.longnet([16, 48], [1, 3], heads=1, causal=True).picture(48).svg


def place(rank: float, radius: float = RADIUS) -> tuple[float, float]:
    """Return x, y of a place on the ring, clockwise from its top."""
    angle = 2 * pi * rank / RANKS
    return CENTRE[0] + radius * sin(angle), CENTRE[1] - radius * cos(angle)


def rank_disc(rank: int) -> str:
    """Draw a rank, with its queries, which stay."""
    x, y = place(rank)
    return (
        f'<circle cx="{x:.0f}" cy="{y:.0f}" r="{DISC}" fill="{KERNEL}"/>'
        f'<g fill="#fff" text-anchor="middle"><text x="{x:.0f}" y="{y - 3:.0f}">rank {rank}</text>'
        f'<text x="{x:.0f}" y="{y + 12:.0f}" font-size="11">q{rank}, out, lse</text></g>'
    )


def message(rank: int) -> str:
    """Draw the keys and values that a rank sends to the next one."""
    (x0, y0), (x1, y1), (x, y) = place(rank + 0.28), place(rank + 0.72), place(rank + 0.5, RADIUS + 26)
    return (
        f'<path d="M{x0:.0f} {y0:.0f}A{RADIUS} {RADIUS} 0 0 1 {x1:.0f} {y1:.0f}" fill="none" stroke="{MESSAGE}" '
        'stroke-width="3" marker-end="url(#arrow)"/>'
        f'<text x="{x:.0f}" y="{y + 4:.0f}" text-anchor="middle">k{rank} v{rank}</text>'
    )


def picture() -> str:
    """Return the picture as SVG text."""
    opening = (
        '<svg xmlns="http://www.w3.org/2000/svg" width="760" height="400" viewBox="0 0 760 400" '
        'font-family="sans-serif" font-size="13" fill="#222">'
    )
    arrow = (
        f'<defs><marker id="arrow" markerWidth="7" markerHeight="7" refX="3" refY="3" orient="auto" fill="{MESSAGE}">'
        '<path d="M0 0L6 3L0 6z"/></marker></defs>'
    )
    parts = [
        opening,
        '<rect width="100%" height="100%" fill="#fff"/>',
        arrow,
        '<text x="24" y="24">A rank holds n / p tokens. Keys and values go round.</text>',
        *(message(rank) for rank in range(RANKS)),
        *(rank_disc(rank) for rank in range(RANKS)),
        '<text x="430" y="24">Each token sees a dilated grid of its segment.</text>',
        f'<g transform="translate(410 34) scale(0.86)">{MASK}</g>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture())
