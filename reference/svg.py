"""Pictures as SVG text, which need no package: fields of shaded cells, and lanes of bars along a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from typing import NamedTuple

import numpy as np

# Smallest value of a shade, its colour, its name in the legend. 1, 1/2, 1/4, 1/16 and 1/64 lie far from the limits.
SHADES = (
    (0.0, "#dbe9f6", "less than 1/32"), (1 / 32, "#a9cce5", "1/32 to 1/8"), (1 / 8, "#68a9d3", "1/8 to 5/8"),
    (5 / 8, "#1c66a8", "5/8 to 3/2"), (3 / 2, "#08306b", "more than 3/2"),
)  # fmt: skip
_WHOLE = {4: "1", 5: "2 or more"}  # their names if all values are integers
KERNEL, MESSAGE, LINE = "#1c66a8", "#e69f00", "#d55e00"
_CELLS, _LINES = 96, 64  # at most: cells of a row, lines between documents
_LETTER, _TOP, _GAP = 6, 22, 16  # px: width of a letter, margin above, space between fields


@dataclass(frozen=True)
class Picture:
    """A picture that Jupyter shows.

    Args:
        svg: its text, to save as a file.
    """

    svg: str = field(repr=False)

    def _repr_html_(self) -> str:
        return self.svg


class Field(NamedTuple):
    """Shaded cells: values >= 0, (rows, columns); 0 is white. Lines lie before the columns `across` and rows `down`."""

    title: str
    values: np.ndarray
    across: Sequence[float] = ()
    down: Sequence[float] = ()


class Bar(NamedTuple):
    """A bar of a lane. tip: what a mouse over it shows."""

    begin: float
    width: float
    tip: str


class Lane(NamedTuple):
    """A name, the kernels, and the messages under them."""

    name: str
    kernels: Sequence[Bar]
    messages: Sequence[Bar]


def fields(
    panels: Sequence[Field], size: tuple[int, int], axis: tuple[str, str], end: str, notes: Sequence[str],
    names: Sequence[str] = (),
) -> Picture:  # fmt: skip
    """Draw fields side by side, each of `size` px.

    Args:
        axis: names of the rows and of the columns, which begin at 0.
        end: where the columns end.
        notes: lines under the fields, which the legend of the shades follows.
        names: of the rows; none: `axis` names them.
    """
    (width, height), margin = size, _margin(names)
    parts, present = [], set[int]()
    for number, panel in enumerate(panels):
        left = margin + number * (width + _GAP)
        shades = np.searchsorted([least for least, *_ in SHADES[1:]], panel.values, side="right") + 1
        shades[panel.values <= 0] = 0
        present |= set(np.unique(shades).tolist()) - {0}
        rows, columns = shades.shape
        scale = f"translate({left} {_TOP}) scale({width / max(columns, 1):.6g} {height / max(rows, 1):.6g})"
        parts += [_text(left, _TOP - 8, panel.title), f'<g transform="{scale}" shape-rendering="crispEdges">']
        parts += [f'<path fill="{SHADES[shade - 1][1]}" d="{path}"/>' for shade, path in _paths(shades)]
        lines = [f"M{left + x * width / columns:.1f} {_TOP}v{height}" for x in panel.across]
        lines += [f"M{left} {_TOP + y * height / rows:.1f}h{width}" for y in panel.down]
        parts += ["</g>", f'<path stroke="{LINE}" stroke-width="0.7" d="{"".join(lines)}"/>']
        parts.append(f'<rect x="{left}" y="{_TOP}" width="{width}" height="{height}" fill="none" stroke="#888"/>')
        below = _TOP + height + 14
        parts += [_text(left, below, "0"), _text(left + width, below, end, "end")]
        parts.append(_text(left + width // 2, below, axis[1], "middle"))
    middles = [_TOP + (row + 0.5) * height / len(names) + 4 for row in range(len(names))]
    parts += [_text(margin - 6, y, name, "end") for y, name in zip(middles, names, strict=True)]
    if not names:
        turned = f"translate({margin - 8} {_TOP + height // 2}) rotate(-90)"
        parts.append(f'<g transform="{turned}">{_text(0, 0, axis[0], "middle")}</g>')
    whole = all((panel.values == np.round(panel.values)).all() for panel in panels)
    names_of_shades = _WHOLE if whole else {shade: name for shade, (_, _, name) in enumerate(SHADES, 1)}
    legend = [(SHADES[shade - 1][1], names_of_shades[shade]) for shade in sorted(present)]
    return _page(parts, (margin, margin + len(panels) * (width + _GAP)), _TOP + height + 34, notes, legend)


def lanes(
    rows: Sequence[Lane], end: float, ticks: Sequence[tuple[float, str]], title: str, notes: Sequence[str]
) -> Picture:
    """Draw lanes one below the other, from 0 to `end` of the axis, with named places on it."""
    width, high, left = 720, 11, _margin([lane.name for lane in rows])
    scale = width / end if end > 0 else 0.0
    parts, bottom = [], _TOP + len(rows) * (2 * high + 6)
    for number, lane in enumerate(rows):
        top = _TOP + number * (2 * high + 6)
        parts.append(_text(left - 6, top + high + 4, lane.name, "end"))
        for y, colour, bars in ((top, KERNEL, lane.kernels), (top + high, MESSAGE, lane.messages)):
            parts += [
                f'<rect x="{left + bar.begin * scale:.1f}" y="{y}" width="{max(bar.width * scale, 0.5):.1f}" '
                f'height="{high - 1}" fill="{colour}" stroke="#fff"><title>{escape(bar.tip)}</title></rect>'
                for bar in bars if bar.width > 0
            ]  # fmt: skip
    for x, name in ticks:
        at = left + x * scale
        parts.append(f'<path stroke="#ccc" d="M{at:.1f} {_TOP - 4}V{bottom}"/>')
        parts.append(_text(at, bottom + 14, name, "middle"))
    parts.append(_text(left, _TOP - 8, title))
    return _page(
        parts, (left, left + width + 2 * _GAP), bottom + 34, notes, [(KERNEL, "kernels"), (MESSAGE, "messages")]
    )


def cell_tokens(n: int) -> int:
    """Return the tokens of a cell: a power of 2, so that segments begin with a cell where they can."""
    return 1 << max(-(-n // _CELLS) - 1, 0).bit_length()


def document_lines(documents: Sequence[int] | None, size: int) -> list[float]:
    """Return where documents meet, in cells of `size` tokens; none if they are many."""
    edges = np.unique(np.cumsum(documents or (0,)))[:-1]
    return [] if len(edges) > _LINES else (edges / size).tolist()


def tokens_text(tokens: int) -> str:
    """Format a number of tokens: 32 Ki if it is a multiple, else in full."""
    for power, name in ((40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")):
        if tokens and tokens % 2**power == 0:
            return f"{tokens >> power} {name}"
    return f"{tokens:,}"


def _paths(shades: np.ndarray) -> Iterable[tuple[int, str]]:
    """Yield (shade, path): the runs of equal cells in each row, as rectangles."""
    paths: dict[int, list[str]] = {}
    for y, row in enumerate(shades.tolist()):
        x = 0
        for shade, run in groupby(row):
            length = len(list(run))
            if shade:
                paths.setdefault(shade, []).append(f"M{x} {y}h{length}v1h-{length}z")
            x += length
    return ((shade, "".join(paths[shade])) for shade in sorted(paths))


def _margin(names: Sequence[str]) -> int:
    """Return the pixels that names on the left take."""
    return 20 + _LETTER * max((len(name) for name in names), default=0)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def _page(
    parts: Sequence[str], edges: tuple[int, int], below: int, notes: Sequence[str], legend: Sequence[tuple[str, str]]
) -> Picture:
    """Put notes and legend under the parts, between the edges or wider, and all on white."""
    (left, width), x, y = edges, edges[0], below + 16 * len(notes)
    rest = [_text(left, below + 16 * line, note) for line, note in enumerate(notes)]
    for colour, name in legend:
        rest += [f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/>', _text(x + 14, y, name)]
        x += 14 + _LETTER * len(name) + 14
    width = max(width, x, *(left + _LETTER * len(note) for note in notes))
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y + 8}" viewBox="0 0 {width} {y + 8}" '
        'font-family="sans-serif" font-size="11" fill="#222">'
    )
    return Picture("\n".join([opening, '<rect width="100%" height="100%" fill="#fff"/>', *parts, *rest, "</svg>"]))
