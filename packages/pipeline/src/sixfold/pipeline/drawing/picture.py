"""Timelines as pictures: rectangles to scale, first as numbers, then as SVG or through matplotlib.

    Timeline --> panels of boxes (this file) --> SVG text
                                             --> matplotlib --> PNG file (extra "plot")

Torch-free. One panel per timeline, all at one scale; one row per rank. Colour is the kind of action, the
shade its chunk, the number its microbatch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from pathlib import Path

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.program.action import WORK, Action, Kind
from sixfold.pipeline.program.program import Weights
from sixfold.pipeline.simulation.simulate import Timeline

__all__ = ["save_png", "write_svg"]

_COLOURS = {
    Kind.F: (66, 133, 208),
    Kind.B: (58, 150, 98),
    Kind.I: (64, 176, 166),
    Kind.W: (148, 190, 87),
    Kind.RECOMPUTE: (150, 150, 160),
    Kind.STEP: (190, 80, 120),
}
_LEGEND = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.RECOMPUTE: "forward again",
    Kind.STEP: "optimizer step",
}
_ROW, _GAP, _LABEL, _WIDTH, _TITLE, _LETTER = 22, 3, 54, 1100, 26, 6.2  # pixels
_AXIS = 24  # pixels, of ticks and their numbers
_DARK = (  # a reader's dark page: rules win over the attributes of the elements
    "<style>@media (prefers-color-scheme: dark) { rect[stroke] { stroke: #0d1117; } text:not([fill]) { fill: #e6edf3; }"
    ' text[fill^="#5c"] { fill: #9198a1; } rect[fill="white"] { fill: #0d1117; }'
    ' rect[fill="#f0f0f2"] { fill: #21262d; } }</style>'
)
_LEAST_STEP = 1.5  # pixels of an action that takes no time, such as STEP


@dataclass(frozen=True)
class _Box:
    rank: int
    begin: float
    end: float
    kind: Kind
    shade: float  # 0 the first chunk of a rank, towards 1 later ones
    label: str
    title: str


def write_svg(timelines: dict[str, Timeline], unit: str = "") -> str:
    """One SVG document with a panel per named timeline; with ``unit`` an axis of time below them."""
    panels = [(_headline(name, timeline, unit), timeline, _boxes(timeline)) for name, timeline in timelines.items()]
    longest = _longest(timelines)
    scale = _WIDTH / longest
    height = sum(_TITLE + len(timeline.peak_activations) * (_ROW + _GAP) + _GAP for _, timeline, _ in panels) + _TITLE
    height += _AXIS if unit else 0
    width = _LABEL + _WIDTH + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        _DARK,
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    top = 0.0
    for headline, timeline, boxes in panels:
        lines.append(f'<text x="4" y="{top + 17:.0f}" font-size="13">{escape(headline)}</text>')
        top += _TITLE
        for rank in range(len(timeline.peak_activations)):
            y = top + rank * (_ROW + _GAP)
            lines.append(f'<text x="4" y="{y + 15:.0f}">rank {rank}</text>')
            wide = timeline.makespan * scale
            lines.append(f'<rect x="{_LABEL}" y="{y:.0f}" width="{wide:.2f}" height="{_ROW}" fill="#f0f0f2"/>')
        for box in boxes:
            x, wide = _LABEL + box.begin * scale, max((box.end - box.begin) * scale, _LEAST_STEP)
            y = top + box.rank * (_ROW + _GAP)
            lines.append(
                f'<rect x="{x:.2f}" y="{y:.0f}" width="{wide:.2f}" height="{_ROW}" fill="{_css(box)}" stroke="white" '
                f'stroke-width="0.5"><title>{escape(box.title)}</title></rect>'
            )
            if wide > _LETTER * len(box.label) + 2:
                place = f'x="{x + wide / 2:.2f}" y="{y + 15:.0f}" text-anchor="middle"'
                lines.append(f'<text {place} fill="{_ink(box)}">{box.label}</text>')
        top += len(timeline.peak_activations) * (_ROW + _GAP) + _GAP
    if unit:
        lines += _axis(top, longest, scale, unit)
        top += _AXIS
    lines += _legend(top, {box.kind for _, _, boxes in panels for box in boxes})
    return "\n".join([*lines, "</svg>"]) + "\n"


def save_png(timelines: dict[str, Timeline], path: str | Path, unit: str = "") -> None:
    """The same picture as a PNG file, by matplotlib.

    Raises:
        ScheduleError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise ScheduleError("PNG needs matplotlib: pip install 'sixfold-pipeline[plot]', or draw SVG") from None
    rows = [len(timeline.peak_activations) for timeline in timelines.values()]
    figure = Figure(figsize=(13, 0.6 * len(rows) + 0.32 * sum(rows)), layout="constrained")
    axes = figure.subplots(len(rows), 1, squeeze=False, height_ratios=rows)[:, 0]
    longest = _longest(timelines)
    for axis, (name, timeline) in zip(axes, timelines.items(), strict=True):
        axis.set_title(_headline(name, timeline, unit), fontsize=9, loc="left")
        for box in _boxes(timeline):
            colour = tuple(channel / 255 for channel in _rgb(box))
            axis.barh(
                box.rank,
                box.end - box.begin,
                left=box.begin,
                height=0.9,
                color=colour,
                edgecolor="white",
                linewidth=0.4,
            )
            if (box.end - box.begin) / longest * 150 > len(box.label):
                axis.text(
                    (box.begin + box.end) / 2,
                    box.rank,
                    box.label,
                    ha="center",
                    va="center",
                    fontsize=7,
                    color=_ink(box),
                )
        axis.set_xlim(0, longest)
        axis.set_yticks(
            range(len(timeline.peak_activations)), [f"rank {r}" for r in range(len(timeline.peak_activations))]
        )
        axis.invert_yaxis()
    if unit:
        axes[-1].set_xlabel(f"time, {unit}", fontsize=9)
    seen = {box.kind for timeline in timelines.values() for box in _boxes(timeline)}
    keys = [kind for kind in _LEGEND if kind in seen]
    patches = [Patch(color="#" + "".join(f"{channel:02x}" for channel in _COLOURS[kind])) for kind in keys]
    figure.legend(
        patches, [_LEGEND[kind] for kind in keys], loc="outside lower left", ncols=6, frameon=False, fontsize=9
    )
    figure.savefig(path, dpi=120, format="png")


# ---- boxes, colours, words


def _boxes(timeline: Timeline) -> list[_Box]:
    """All work as boxes; the parts of an overlap share its time by turns."""
    own: dict[int, set[int]] = {}
    for rank, action, _, _ in timeline.events:
        own.setdefault(rank, set()).update(part.stage for part in action.each())
    chunk = {stage: at for stages in own.values() for at, stage in enumerate(sorted(stages))}
    most = max(chunk.values(), default=0)
    boxes = []
    for rank, action, start, end in (event for event in timeline.events if event[1].kind in WORK):
        parts = list(action.each())
        for at, part in enumerate(parts):
            step = (end - start) / len(parts)
            begin = start + at * step
            shade = chunk[part.stage] / (most + 1)
            title = f"{action} {start:g}..{end:g}"
            boxes.append(_Box(rank, begin, begin + step, part.kind, shade, _label(part), title))
    return boxes


def _label(action: Action) -> str:
    return "" if action.microbatch is None else str(action.microbatch)


def _rgb(box: _Box) -> tuple[int, ...]:
    """The kind's colour, darker for later chunks."""
    return tuple(round(channel * (1 - 0.55 * box.shade)) for channel in _COLOURS.get(box.kind, (120, 120, 120)))


def _css(box: _Box) -> str:
    return "#" + "".join(f"{channel:02x}" for channel in _rgb(box))


def _ink(box: _Box) -> str:
    """White on dark boxes, black on light ones, by the weights of Rec. 601: with either every label keeps 4.5 : 1."""
    red, green, blue = _rgb(box)
    return "white" if 299 * red + 587 * green + 114 * blue < 111_000 else "black"


def _axis(top: float, longest: float, scale: float, unit: str) -> list[str]:
    """Ticks at round times, each with its number; the unit at the last."""
    step = 10.0 ** math.floor(math.log10(longest / 5))
    step = next(one for one in (step, 2 * step, 5 * step, 10 * step) if longest / one <= 8)
    count = int(longest / step + 1e-9)
    lines = [f'<line x1="{_LABEL}" y1="{top:.0f}" x2="{_LABEL + longest * scale:.2f}" y2="{top:.0f}" stroke="#888"/>']
    for tick in range(count + 1):
        x, words = _LABEL + tick * step * scale, f"{tick * step:.10g}" + (f" {unit}" if tick == count else "")
        lines.append(f'<line x1="{x:.2f}" y1="{top:.0f}" x2="{x:.2f}" y2="{top + 4:.0f}" stroke="#888"/>')
        lines.append(f'<text x="{x:.2f}" y="{top + 16:.0f}" text-anchor="middle" fill="#5c5c5c">{escape(words)}</text>')
    return lines


def _headline(name: str, timeline: Timeline, unit: str) -> str:
    peaks = ", ".join(f"{peak:g}" for peak in timeline.peak_activations)
    bubble = f"bubble over ideal {timeline.bubble_over_ideal:.4f}"
    length = f"{timeline.makespan:.4g}" + (f" {unit}" if unit else "")
    words = f"makespan {length}, {bubble}, peak activations {peaks}"
    if timeline.weights is not Weights.FLUSHED:
        words += f", weight versions {', '.join(map(str, timeline.weight_versions))} ({timeline.weights})"
    return f"{name}: {words}" if name else words


def _legend(top: float, kinds: set[Kind]) -> list[str]:
    lines, x = [], float(_LABEL)
    for kind, words in _LEGEND.items():
        if kind in kinds:
            colour = "#" + "".join(f"{channel:02x}" for channel in _COLOURS[kind])
            lines.append(f'<rect x="{x:.0f}" y="{top + 6:.0f}" width="12" height="12" fill="{colour}"/>')
            lines.append(f'<text x="{x + 16:.0f}" y="{top + 16:.0f}">{words}</text>')
            x += 34 + _LETTER * len(words)
    return lines


def _longest(timelines: dict[str, Timeline]) -> float:
    longest = max(timeline.makespan for timeline in timelines.values())
    if not any(timeline.ideal for timeline in timelines.values()):
        raise ScheduleError("the timeline has no action that takes time; there is nothing to draw to scale")
    return longest
