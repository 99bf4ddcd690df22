"""The losses of runs as a picture, from their metrics.jsonl alone.

    metrics.jsonl --> read_all --> Curve (pure) --> draw (this file) --> .svg or .png

Needs matplotlib (the extra ``plot``), which is imported when something is drawn. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import log10
from pathlib import Path
from typing import Any, Literal

from sixfold.gpt.errors import ConfigError
from sixfold.gpt.files.output_files import MARK, refuse_foreign
from sixfold.gpt.observe.metrics import EVALUATIONS, last_of_each_step, read_all
from sixfold.gpt.observe.run_costs import EVENT_KINDS, events_of

Axis = Literal["step", "tokens", "seconds"]
AXIS_LABELS: dict[str, str] = {
    "step": "updates",
    "tokens": "tokens trained on",
    "seconds": "seconds since the first start",
}
COLOURS = ("#2a6f97", "#c8553d", "#588157", "#8f5ea2", "#b08900", "#3d405b")
GREY = "#8a8a8a"
DASHES = ("-", "--", "-.", ":")
MARKERS = "os^Dv*"  # of validation sets
EVENT_STYLES = {  # colour, dashes and width of the vertical line of each kind
    "failure": ("#d1242f", "-", 1.2),
    "recovery": ("#2da44e", "--", 1.2),
    "resize": ("#3d405b", "-.", 1.2),
    "checkpoint": (GREY, ":", 0.8),
    "no snapshot": ("#b08900", ":", 1.2),
    "copies differ": ("#8f5ea2", "-", 1.2),
}
DARK = (  # of an SVG on a reader's dark page: ground, frame, letters, the first curve
    "<style>@media (prefers-color-scheme: dark) { g[id^=text] { fill: #e6edf3; } "
    '[style*="fill: #ffffff"] { fill: #0d1117 !important; } [style*="stroke: #ffffff"] { stroke: #0d1117 !important; } '
    '[style*="stroke: #000000"] { stroke: #e6edf3 !important; } [style*="#ececec"] { stroke: #30363d !important; } '
    '[style*="fill: #5c5c5c"] { fill: #9198a1 !important; } [style*="fill: #2a6f97"] { fill: #58a6d6 !important; } '
    '[style*="stroke: #2a6f97"] { stroke: #58a6d6 !important; } }</style>\n'
)
_NUMBER_WIDTH = 0.022  # of the axis: numbers of restarts that are nearer than this stand above each other
_MOST_RESTARTS = 8  # that are told below the axis


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """A restart: the last step before it, the step it went on from, and the layout that went on."""

    x: float
    ended_after: int
    resumed_at: int
    layout: str

    def __str__(self) -> str:
        return f"ended after {self.ended_after:,}, resumed at {self.resumed_at:,} as {self.layout}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """What one run contributes; every list of x is on the chosen axis."""

    name: str
    x: list[float]
    loss: list[float]
    smooth: list[float]
    evals: dict[str, tuple[list[float], list[float]]]  # by validation set, and averaged weights or not: x and loss
    resumes: list[Resume]
    datasets: dict[str, tuple[list[float], list[float]]]  # by name: x and smoothed loss
    events: dict[str, list[float]]  # x of each, by kind; see EVENT_STYLES


def smoothed(values: Sequence[float], reach: int) -> list[float]:
    """Mean of each value and the ``reach`` before and after it, fewer near the ends; it lags behind no fall."""
    sums = [0.0, *accumulate(values)]
    out = []
    for i in range(len(values)):
        near = min(reach, i, len(values) - 1 - i)
        out.append((sums[i + near + 1] - sums[i - near]) / (2 * near + 1))
    return out


def layout_text(layout: Mapping[str, int]) -> str:
    """``{"pp": 2, "dp": 1, ...}`` -> ``pp2``; degrees of one are left out."""
    return " ".join(f"{axis}{size}" for axis, size in layout.items() if size > 1) or "one process"


def curve(records: Sequence[dict[str, Any]], name: str, axis: Axis) -> Curve:
    """Turn records into points, ordered by step. Steps whose loss is null have no point.

    Args:
        records: from ``read_all``: the lines that a resumed run replaced tell how far it had come.
    """
    once = last_of_each_step(records)
    steps = sorted((r for r in once if r["kind"] == "step" and r["loss"] is not None), key=lambda r: int(r["step"]))
    began = min((float(r["time"]) for r in records), default=0.0)

    def place(record: Mapping[str, Any]) -> float:
        return float(record["time"]) - began if axis == "seconds" else float(record[axis])

    at = {int(r["step"]): place(r) for r in steps}
    evals = [r for r in once if r["kind"] in EVALUATIONS and r["loss"] is not None]

    def of_step(record: Mapping[str, Any]) -> float:
        """Where a line lies that counts no tokens of training; not every step has a line of its own."""
        return _between(at, int(record["step"])) if axis == "tokens" else place(record)

    loss = [float(r["loss"]) for r in steps]
    return Curve(
        name=name,
        x=[at[int(r["step"])] for r in steps],
        loss=loss,
        smooth=smoothed(loss, len(loss) // 60),
        evals=_by_set(evals, of_step),
        resumes=_resumes(records, at, float(began), axis),
        datasets=_by_dataset(steps, at),
        events=_events(records, at, float(began), axis),
    )


def _between(at: Mapping[int, float], step: int) -> float:
    """The place of any step, of those of some: on the line between the two nearest, the first from (0, 0)."""
    known = sorted({0: 0.0, **at}.items())
    (low, low_x), (high, high_x) = next(
        ((one, other) for one, other in pairwise(known) if step <= other[0]),
        tuple(known[-2:]) if at else (known[0],) * 2,
    )
    return low_x if high == low else low_x + (high_x - low_x) * (step - low) / (high - low)


def _by_set(
    evals: Sequence[Mapping[str, Any]], place: Callable[[Mapping[str, Any]], float]
) -> dict[str, tuple[list[float], list[float]]]:
    found: dict[str, tuple[list[float], list[float]]] = {}
    for record in evals:
        average = "averaged weights" if record["kind"] == "eval_ema" else ""
        name = ", ".join(part for part in (record.get("name", ""), average) if part)
        places, losses = found.setdefault(name, ([], []))
        places.append(place(record))
        losses.append(float(record["loss"]))
    return found


def _by_dataset(
    steps: Sequence[Mapping[str, Any]], at: Mapping[int, float]
) -> dict[str, tuple[list[float], list[float]]]:
    """x and smoothed loss of each dataset, of the steps that read it."""
    points: dict[str, list[tuple[float, float]]] = {}
    for record in steps:
        for name, loss in record.get("loss_by_dataset", {}).items():
            if loss is not None:
                points.setdefault(name, []).append((at[int(record["step"])], float(loss)))
    return {
        name: ([x for x, _ in pairs], smoothed([loss for _, loss in pairs], len(pairs) // 30))
        for name, pairs in sorted(points.items())
    }


def _resumes(records: Sequence[Mapping[str, Any]], at: Mapping[int, float], began: float, axis: Axis) -> list[Resume]:
    """Restarts, each with the last step that was reported before it."""
    found, reached = [], 0
    for record in records:
        if record["kind"] == "step":
            reached = int(record["step"])
        elif record["kind"] == "resume":
            step = int(record["step"])
            x = float(record["time"]) - began if axis == "seconds" else _between(at, step)
            text = layout_text(record["layout"])
            found.append(Resume(x=x, ended_after=max(reached, step), resumed_at=step, layout=text))
    return found


def _events(
    records: Sequence[Mapping[str, Any]], at: Mapping[int, float], began: float, axis: Axis
) -> dict[str, list[float]]:
    """Where each event lies."""
    found: dict[str, list[float]] = {kind: [] for kind in EVENT_KINDS}
    for event in events_of(records):
        found[event.kind].append(event.time - began if axis == "seconds" else _between(at, event.step))
    return found


def plot(
    runs: Sequence[str | Path],
    out: str | Path,
    *,
    x: Axis = "step",
    by_dataset: bool = False,
    events: bool = False,
    references: Mapping[str, float] | None = None,
    marks: Mapping[str, tuple[float, float]] | None = None,
    unit: str = "nats per token",
    title: str = "",
) -> Path:
    """Draw the losses of ``runs`` into ``out``.

    Args:
        runs: run folders or metrics.jsonl files; one colour each.
        out: ``.svg`` or ``.png``.
        x: what lies along the axis.
        by_dataset: a thin line for each dataset of the blend as well.
        events: a vertical line for each failure, recovery and checkpoint.
        references: dashed lines by name, in ``unit``.
        marks: points by name, (x, loss) each.
    Raises:
        ConfigError: another ending, a run without metrics or without a step, or matplotlib is not installed.
    """
    out = Path(out)
    if out.suffix not in (".svg", ".png"):
        raise ConfigError(f"--out is {str(out)!r}; a plot ends in .svg or .png")
    refuse_foreign(out)
    curves = [_read(Path(run), x) for run in runs]
    figure = figure_of(curves, by_dataset=by_dataset, events=events, references=references or {}, marks=marks or {})
    _dress(figure.axes[0], curves, references or {}, AXIS_LABELS[x], unit, title, by_dataset)
    out.parent.mkdir(parents=True, exist_ok=True)
    # No date in the file: the same losses give the same bytes.
    figure.savefig(out, dpi=150, metadata={"Date": None, "Creator": MARK} if out.suffix == ".svg" else {"Author": MARK})
    if out.suffix == ".svg":
        out.write_text(out.read_text(encoding="utf-8").replace("</svg>", f"{DARK}</svg>"), encoding="utf-8")
    return out


def figure_of(
    curves: Sequence[Curve],
    *,
    by_dataset: bool,
    events: bool,
    references: Mapping[str, float],
    marks: Mapping[str, tuple[float, float]],
) -> Any:
    """A figure of matplotlib with all that is drawn; ``_dress`` gives it its frame and its words."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a plot needs matplotlib: pip install 'sixfold-gpt[plot]'") from error
    figure = Figure(figsize=(9, 5), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    _draw_references(axes, references)
    for number, one in enumerate(curves):
        _draw_curve(axes, one, COLOURS[number % len(COLOURS)])
        for i, (name, (places, losses)) in enumerate(one.datasets.items() if by_dataset else ()):
            # Datasets differ in dashes; and in colour, where colours do not tell runs apart.
            colour = COLOURS[(i + 1) % len(COLOURS)] if len(curves) == 1 else COLOURS[number % len(COLOURS)]
            axes.plot(places, losses, color=colour, linewidth=1.2, linestyle=DASHES[i % len(DASHES)], zorder=3,
                      label=name if len(curves) == 1 else f"{one.name}, {name}")  # fmt: skip
    if events:
        _draw_events(axes, curves)
    for name, (at, loss) in marks.items():
        axes.plot([at], [loss], "D", color=COLOURS[1], markersize=6, markeredgecolor="white", zorder=5)
        axes.annotate(
            name,
            (at, loss),
            xytext=(0, -9),
            textcoords="offset points",
            ha="right",
            va="top",
            color=COLOURS[1],
            fontsize=9,
        )
    return figure


def _draw_events(axes: Any, curves: Sequence[Curve]) -> None:
    """Vertical lines behind the curves; the legend has each kind once, with how many there were."""
    for kind, (colour, dashes, width) in EVENT_STYLES.items():
        places = [x for one in curves for x in one.events[kind]]
        for number, x in enumerate(places):
            label = f"{kind} ({len(places):,})" if number == 0 else "_nolegend_"
            axes.axvline(x, color=colour, linewidth=width, linestyle=dashes, zorder=1.5, label=label)


def _read(run: Path, axis: Axis) -> Curve:
    try:
        records = read_all(run)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{run} holds no metrics.jsonl; name the run.dir of a run") from error
    found = curve(records, run.parent.name if run.name == "metrics.jsonl" else run.name, axis)
    if not found.x:
        raise ConfigError(f"{run} has no step with a loss yet; train first")
    return found


def _draw_references(axes: Any, references: Mapping[str, float]) -> None:
    for name, value in references.items():
        axes.axhline(value, color=GREY, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        axes.annotate(
            f"{name} {value:.2f}",
            (1, value),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 3),
            textcoords="offset points",
            ha="right",
            va="bottom",
            color="#5c5c5c",
            fontsize=9,
        )


def _draw_curve(axes: Any, one: Curve, colour: str) -> None:
    axes.plot(one.x, one.loss, color=colour, alpha=0.25, linewidth=0.8, zorder=2)
    axes.plot(one.x, one.smooth, color=colour, linewidth=2, zorder=3, label=one.name)
    for number, (name, (places, losses)) in enumerate(one.evals.items()):
        axes.plot(
            places, losses, MARKERS[number % len(MARKERS)], color=colour, markersize=5, markeredgecolor="white",
            zorder=4, label=f"{one.name}, validation{name and f' {name}'}",
        )  # fmt: skip
    for resume in one.resumes:
        axes.axvline(resume.x, color=colour, linewidth=1, linestyle=":", zorder=1)


def _tell_restarts(axes: Any, curves: Sequence[Curve], x_label: str) -> None:
    """A number above a restart's line, and what it was below the axis: texts never lie over each other or data.

    Of many the first are told; the others have a line alone.
    """
    found = [(resume, number) for number, one in enumerate(curves) for resume in one.resumes]
    found.sort(key=lambda pair: pair[0].x)
    shown = len(found) if len(found) <= _MOST_RESTARTS else _MOST_RESTARTS - 1
    low, high = axes.get_xlim()
    rows: list[float] = []  # where the newest number of each row stands
    told = []
    for number, (resume, run) in enumerate(found[:shown], 1):
        at = (resume.x - low) / (high - low)
        row = next((i for i, last in enumerate(rows) if at - last >= _NUMBER_WIDTH), len(rows))
        rows[row : row + 1] = [at]
        axes.annotate(
            str(number),
            (resume.x, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 2 + 10 * row),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=8,
            color=COLOURS[run % len(COLOURS)],
        )
        whose = f"{curves[run].name} " if len(curves) > 1 else ""
        told.append(f"{number}: {whose}{resume}")
    if shown < len(found):
        told.append(f"and {len(found) - shown} more, in metrics.jsonl")
    axes.set_xlabel(x_label)
    if told:
        axes.annotate(
            "\n".join(told), (0, 0), xycoords="axes fraction", xytext=(0, -36), textcoords="offset points",
            ha="left", va="top", fontsize=8, color="#5c5c5c",
        )  # fmt: skip


def _dress(
    axes: Any,
    curves: Sequence[Curve],
    references: Mapping[str, float],
    x_label: str,
    unit: str,
    title: str,
    by_dataset: bool,
) -> None:
    """Limits that hold every point; a scale that shows where the curve is flat too. Quiet frame and grid."""
    sources = [losses for c in curves for _, losses in c.datasets.values() if by_dataset]
    smooth = [c.smooth for c in curves] + sources
    points = [
        *references.values(),
        *(x for c in curves for x in c.loss),
        *(x for c in curves for _, losses in c.evals.values() for x in losses),
        *(x for s in sources for x in s),
    ]
    lowest, highest = min(points), max(points)
    typical = max(sorted(losses)[len(losses) * 9 // 10] for losses in smooth)
    if lowest > 0 and highest > 1.5 * max(typical, lowest + 0.5):  # a first fall that would press the rest flat
        axes.set_yscale("log")
        axes.set_ylim(lowest / 1.1, highest * 1.1)
        _number_decades(axes, log10(highest / lowest))
        unit = f"{unit} (logarithmic)"
    else:
        room = 0.06 * max(highest - lowest, 1e-3)
        axes.set_ylim(max(lowest - room, 0.0) if lowest >= 0 else lowest - room, highest + room)
    axes.set_xlim(left=0)
    axes.margins(x=0.01)
    _tell_restarts(axes, curves, x_label)
    axes.set_ylabel(f"loss, {unit}")
    axes.grid(axis="y", color="#ececec", zorder=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if title:
        axes.figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    handles, names = axes.get_legend_handles_labels()
    if len(names) > 1:  # below the picture, where no data is
        axes.figure.legend(handles, names, loc="outside lower left", ncols=4, frameon=False, fontsize=9)


def _number_decades(axes: Any, decades: float) -> None:
    """Plain numbers on a logarithmic axis, between the decades too where there is room for them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    between = (1, 2, 3, 5, 7) if decades <= 1.5 else (1, 3) if decades <= 3 else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=between))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
