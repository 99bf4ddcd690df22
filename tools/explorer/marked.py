"""A counter-example as a picture: the cells around what is wrong, and the waits that block each other.

    ScheduleError, rows of cells --> SVG (this file) --> the page, which colours its classes

Places are positions in the ranks' lists, not times: a program that cannot run has no times. The report's own text
stands beside the picture and says the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from sixfold.pipeline import ScheduleError

__all__ = ["draw_marked", "rows_of_csv"]

_CELLS, _RANKS = 11, 24  # cells of a row, and rows
_LETTER, _HEIGHT, _LABEL, _TOP = 7.4, 26, 96, 6  # pixels


def rows_of_csv(text: str) -> list[list[str]]:
    """The cells as they were pasted, for a text that is no program."""
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    return [[cell.strip() for cell in line.split(",")] for line in lines]


def draw_marked(rows: Sequence[Sequence[str]], error: ScheduleError) -> str:
    """An SVG of the rows around the places that ``error`` names; "" if it names none."""
    cells = [list(row) for row in rows]
    places = [(rank, position) for rank, position, _ in error.cycle]
    if not places and error.rank is not None and error.position is not None:
        places = [(error.rank, error.position)]
    absent = None
    if not places and error.rank is not None and error.action is not None:
        absent = _make_room(cells, error)
        places = [absent]
    if not places or any(rank >= len(cells) or at >= len(cells[rank]) for rank, at in places):
        return ""
    return _svg(cells, places, absent, loop=bool(error.cycle))


def _make_room(cells: list[list[str]], error: ScheduleError) -> tuple[int, int]:
    """Put a cell that says what is missing behind the last one of its stage and microbatch; where it is."""
    assert error.rank is not None and error.action is not None, "the caller has looked"
    row, action = cells[error.rank], error.action
    own = [f"{action.stage}{kind}{action.microbatch}" for kind in ("F", "B", "I", "W")]
    near = [at for at, cell in enumerate(row) if any(part in own for part in _parts(cell))]
    place = near[-1] + 1 if near else len(row)
    row.insert(place, f"no {action}")
    return error.rank, place


def _parts(cell: str) -> list[str]:
    return cell.removesuffix("OVERLAP_F_B").strip("()").split(";")


def _svg(cells: list[list[str]], places: list[tuple[int, int]], absent: tuple[int, int] | None, *, loop: bool) -> str:
    first_of = dict(sorted(places, reverse=True))  # of a rank with several marks the first
    top = max(0, min(first_of) - _RANKS // 4)
    ranks = range(top, min(top + _RANKS, len(cells)))
    starts = {rank: _start(len(cells[rank]), first_of.get(rank, min(first_of.values()))) for rank in ranks}
    shown = {rank: cells[rank][starts[rank] : starts[rank] + _CELLS] for rank in ranks}
    widest = max((len(cell) for row in shown.values() for cell in row), default=3)
    wide = widest * _LETTER + 14
    gap = 30 if loop else 6  # room for the arrows
    y_of = {rank: _TOP + at * (_HEIGHT + gap) for at, rank in enumerate(ranks)}
    width, height = _LABEL + _CELLS * (wide + 4) + 30, _TOP + len(y_of) * (_HEIGHT + gap) - gap + _TOP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family="monospace" font-size="12" role="img" '
        f'aria-label="{escape(_said(cells, places, loop=loop))}">',
        '<defs><marker id="wait" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" markerHeight="5" '
        'orient="auto-start-reverse"><path class="head" d="M0 0 L8 4 L0 8 z"/></marker></defs>',
    ]
    middle: dict[tuple[int, int], tuple[float, float]] = {}
    for rank, row in shown.items():
        start, y = starts[rank], y_of[rank]
        more = "…" if start else ""
        lines.append(f'<text class="label" x="4" y="{y + 17}">rank {rank} [{start}]{more}</text>')
        for at, cell in enumerate(row, start):
            x = _LABEL + (at - start) * (wide + 4)
            middle[rank, at] = (x + wide / 2, y + _HEIGHT / 2)
            kind = "absent" if (rank, at) == absent else "wrong" if (rank, at) in places else "cell"
            lines.append(
                f'<g class="{kind}"><rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{_HEIGHT}" rx="3"/>'
                f'<text x="{x + wide / 2:.1f}" y="{y + 17}" text-anchor="middle">{escape(cell)}</text></g>'
            )
        if start + _CELLS < len(cells[rank]):
            lines.append(f'<text class="label" x="{_LABEL + _CELLS * (wide + 4):.1f}" y="{y + 17}">…</text>')
    if loop:
        lines += _arrows([middle[place] for place in places if place in middle])
    return "\n".join([*lines, "</svg>"])


def _start(length: int, middle: int) -> int:
    return max(0, min(middle - _CELLS // 2, length - _CELLS))


def _arrows(points: Sequence[tuple[float, float]]) -> list[str]:
    """From each cell to the next one of the cycle, bent aside so that two that cross are seen as two."""
    lines = []
    for at, (x, y) in enumerate(points):
        to_x, to_y = points[(at + 1) % len(points)]
        half = _HEIGHT / 2
        begin, end = (y + half, to_y - half - 2) if to_y > y else (y - half, to_y + half + 2)
        bend = 14 if to_y > y else -14
        control = f"{(x + to_x) / 2 + bend:.1f} {(begin + end) / 2:.1f}"
        path = f"M{x + bend / 2:.1f} {begin:.1f} Q{control} {to_x + bend / 2:.1f} {end:.1f}"
        lines.append(f'<path class="wait" marker-end="url(#wait)" d="{path}"/>')
    return lines


def _said(cells: list[list[str]], places: list[tuple[int, int]], *, loop: bool) -> str:
    """The picture in words, for those who do not see it."""
    named = [f"rank {rank} [{at}] {cells[rank][at]}" for rank, at in places]
    return f"{' waits for '.join([*named, named[0]])}" if loop else f"{named[0]} is wrong"
