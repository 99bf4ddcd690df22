"""A rank's memory over a step as SVG: bytes by purpose, stacked, and below them what each unit holds.

    memory_timeline.py's Timeline --> SVG text (this file)

One column per moment. What is held is drawn to scale; of the temporary memory in it the parts in use are dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sixfold.fsdp.report.memory_timeline import Moment, Timeline

_COLOURS = {
    "gathering": "#a8cdf0",
    "gathered": "#4285d0",
    "summing": "#94be57",
    "reducing": "#3a9662",
    "not in use": "#e8e8ee",
    "kept": "#bebecc",
}
_WORDS = {
    "kept": "main weights, main gradients, optimizer, sources",
    "gathered": "gathered",
    "gathering": "being gathered",
    "summing": "summed here",
    "reducing": "being reduced",
    "not in use": "temporary memory not in use",
}
_LETTERS = {"g": "gathering", "G": "gathered", "s": "summing", "r": "reducing"}
_WIDTH, _HEIGHT, _LABEL, _ROW, _TITLE, _LETTER = 1000, 220, 170, 14, 24, 6.2  # pixels


def draw_svg(timeline: Timeline) -> str:
    """One SVG document."""
    moments = timeline.moments
    column = _WIDTH / len(moments)
    rows = [at for at in range(len(timeline.units)) if any(m.weights[at] + m.sums[at] != ".." for m in moments)]
    height = _TITLE + _HEIGHT + _TITLE + (_ROW + 2) * len(rows) + 2 * _TITLE
    width = _LABEL + _WIDTH + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="4" y="16" font-size="13">{escape(_headline(timeline))}</text>',
    ]
    lines += _stack(moments, timeline.held_peak, column)
    lines += _units(timeline, rows, column)
    lines += _legend(height - _TITLE)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _headline(timeline: Timeline) -> str:
    parts = ", ".join(f"{name} {_short(nbytes)}" for name, nbytes in timeline.purposes.items() if nbytes)
    return f"at most {_short(timeline.held_peak)} held ({parts}); {len(timeline.moments)} moments"


def _short(nbytes: int) -> str:
    """Three digits and a unit."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes} B"


def _stack(moments: Sequence[Moment], most: int, column: float) -> list[str]:
    """Bars from below: what is kept, what is in use, the rest of the temporary memory."""
    lines = []
    scale = _HEIGHT / max(1, most)
    temporary = max(moment.busy for moment in moments)
    for at, moment in enumerate(moments):
        # Temporary memory is the part of what is held that is in use at some moment.
        bands = [
            ("kept", max(0, moment.held - temporary)),
            ("gathered", moment.gathered),
            ("gathering", moment.gathering),
            ("summing", moment.summing),
            ("reducing", moment.reducing),
            ("not in use", min(temporary, moment.held) - moment.busy),
        ]
        base = float(_TITLE + _HEIGHT)
        title = escape(f"{at} {moment.move} {moment.unit if moment.unit is not None else ''}".strip())
        for name, nbytes in bands:
            if nbytes > 0:
                tall = nbytes * scale
                base -= tall
                lines.append(
                    f'<rect x="{_LABEL + at * column:.2f}" y="{base:.2f}" width="{column:.2f}" height="{tall:.2f}" '
                    f'fill="{_COLOURS[name]}"><title>{title}: {name} {nbytes:,} bytes</title></rect>'
                )
    lines.append(f'<text x="4" y="{_TITLE + 10}">{_short(most)}</text>')
    return lines


def _units(timeline: Timeline, rows: Sequence[int], column: float) -> list[str]:
    """A row for each unit: upper half its weights, lower half its gradients."""
    lines = []
    top = 2.0 * _TITLE + _HEIGHT
    for row, at in enumerate(rows):
        y = top + row * (_ROW + 2)
        name = timeline.units[at] or "(root)"
        lines.append(f'<text x="4" y="{y + 11:.0f}">{escape(name[-26:])}</text>')
        for half, letters in enumerate(
            ([m.weights[at] for m in timeline.moments], [m.sums[at] for m in timeline.moments])
        ):
            for begin, end, letter in _runs(letters):
                what = _LETTERS[letter]
                lines.append(
                    f'<rect x="{_LABEL + begin * column:.2f}" y="{y + half * _ROW / 2:.1f}" '
                    f'width="{(end - begin) * column:.2f}" height="{_ROW / 2:.1f}" fill="{_COLOURS[what]}">'
                    f"<title>{escape(name)}: {_WORDS[what]}, moments {begin} to {end}</title></rect>"
                )
    return lines


def _runs(letters: Sequence[str]) -> list[tuple[int, int, str]]:
    """(begin, end, letter) of equal letters that are not "."."""
    runs: list[tuple[int, int, str]] = []
    for at, letter in enumerate(letters):
        if runs and runs[-1][1] == at and runs[-1][2] == letter:
            runs[-1] = (runs[-1][0], at + 1, letter)
        elif letter != ".":
            runs.append((at, at + 1, letter))
    return runs


def _legend(top: float) -> list[str]:
    lines, x = [], 4.0
    for name, words in _WORDS.items():
        lines.append(f'<rect x="{x:.0f}" y="{top:.0f}" width="12" height="12" fill="{_COLOURS[name]}"/>')
        lines.append(f'<text x="{x + 16:.0f}" y="{top + 10:.0f}">{words}</text>')
        x += 34 + _LETTER * len(words)
    return lines
