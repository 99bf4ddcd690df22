"""Loss curves: the points that are drawn, and the files."""

import json
import re
from xml.etree import ElementTree

import pytest

from sixfold.gpt.errors import ConfigError
from sixfold.gpt.observe.loss_plot import EVENT_STYLES, curve, figure_of, plot, smoothed


def records(*entries):
    """("step", number, loss) and others to records one second apart."""
    found = []
    for i, (kind, number, *rest) in enumerate(entries):
        record = {"kind": kind, "time": 1000.0 + i, "step": number, "tokens": 64 * number}
        record |= {"layout": rest[0]} if kind == "resume" else {"loss": rest[0]} if rest else {}
        found.append(record)
    return found


RUN = records(
    ("start", 0), ("step", 1, 5.0), ("step", 2, 4.0), ("step", 3, 3.0), ("resume", 1, {"pp": 1, "dp": 2}),
    ("step", 2, 4.5), ("step", 3, 3.5), ("eval", 3, 3.2), ("step", 4, None), ("step", 5, 2.5),
)  # fmt: skip


def test_each_step_is_drawn_once_and_a_loss_that_was_not_finite_is_left_out():
    found = curve(RUN, "run", "step")
    assert (found.x, found.loss) == ([1, 2, 3, 5], [5.0, 4.5, 3.5, 2.5])
    assert found.evals == {"": ([3], [3.2])}


def test_each_validation_set_has_points_of_its_own():
    entries = records(("step", 1, 5.0), ("eval", 1, 4.0), ("eval", 1, 3.0), ("step", 2, 4.0), ("eval", 2, 2.0))
    for record, name in zip([r for r in entries if r["kind"] == "eval"], ("wiki", "code", "wiki"), strict=True):
        record["name"] = name
    one = curve(entries, "run", "step")
    assert one.evals == {"wiki": ([1, 2], [4.0, 2.0]), "code": ([1], [3.0])}
    pytest.importorskip("matplotlib", reason="needs matplotlib, an extra")
    drawn = figure_of([one], by_dataset=False, events=False, references={}, marks={}).axes[0].get_lines()
    named = {line.get_label(): line.get_marker() for line in drawn if "validation" in line.get_label()}
    assert named == {"run, validation wiki": "o", "run, validation code": "s"}


def test_a_resume_tells_how_far_the_run_had_come():
    [resume] = curve(RUN, "run", "step").resumes
    assert (resume.x, resume.ended_after, resume.resumed_at, resume.layout) == (1, 3, 1, "dp2")


def test_the_axis_is_steps_tokens_or_seconds_since_the_start():
    assert curve(RUN, "run", "tokens").x == [64, 128, 192, 320]
    found = curve(RUN, "run", "seconds")
    assert found.x == [1, 5, 6, 9] and found.resumes[0].x == 4


def test_smoothing_is_a_centred_mean_that_ends_on_the_last_value():
    assert smoothed([1.0, 2.0, 6.0, 2.0, 1.0], 1) == [1.0, 3.0, 10 / 3, 3.0, 1.0]
    assert smoothed([4.0, 7.0], 0) == [4.0, 7.0]


def write_run(folder, entries=RUN):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in entries))
    return folder


@pytest.mark.parametrize(("suffix", "magic"), [(".svg", b"<?xml"), (".png", b"\x89PNG")])
@pytest.mark.slow
def test_the_ending_chooses_the_format(tmp_path, suffix, magic):
    pytest.importorskip("matplotlib", reason="needs matplotlib, the extra plot")
    run = write_run(tmp_path / "first")
    out = plot(
        [run, run / "metrics.jsonl"],
        tmp_path / "new" / f"loss{suffix}",
        references={"zlib": 1.9},
        marks={"end": (5, 2)},
    )
    assert out.read_bytes().startswith(magic)


def test_an_svg_has_a_dark_ground_where_the_reader_has_one_and_every_colour_of_its_ground_and_frame(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib, the extra plot")
    text = plot([write_run(tmp_path / "run")], tmp_path / "loss.svg", references={"zlib": 1.9}).read_text()
    drawing, style = text.split("<style>@media (prefers-color-scheme: dark)")
    ElementTree.fromstring(text)
    for colour in re.findall(r'\[style\*="([^"]+)"\]', style):
        assert colour in drawing, f"matplotlib writes {colour!r} otherwise by now"
    assert "stroke: #000000" in style and "fill: #ffffff" in style


def test_a_plot_shows_names_lines_and_restarts(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib, the extra plot")
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none"}):
        out = plot([write_run(tmp_path / "r1")], tmp_path / "loss.svg", references={"zlib": 1.93}, unit="nats per byte")
    text = out.read_text()
    assert all(
        part in text for part in ("zlib 1.93", "nats per byte", "ended after 3,", "resumed at 1 as dp2", "updates")
    )


@pytest.mark.parametrize(
    ("entries", "out", "says"),
    [
        (RUN, "loss.pdf", r"ends in \.svg or \.png"),
        ([], "loss.svg", "no step with a loss"),
        (None, "loss.svg", "no metrics"),
    ],
)
def test_what_cannot_be_drawn_is_said(tmp_path, entries, out, says):
    run = tmp_path / "run" if entries is None else write_run(tmp_path / "run", entries)
    with pytest.raises(ConfigError, match=says):
        plot([run], tmp_path / out)


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'sixfold-gpt\[plot\]'"):
        plot([write_run(tmp_path / "run")], tmp_path / "loss.svg")


@pytest.mark.slow
def test_each_dataset_has_a_curve_of_the_steps_that_read_it(tmp_path):
    entries = records(("step", 1, 3.0), ("step", 2, 2.0), ("step", 3, 1.0))
    for record, losses in zip(entries, ({"wiki": 4.0, "code": 2.0}, {"wiki": 3.0}, {"code": 1.0}), strict=True):
        record["loss_by_dataset"] = losses
    assert curve(entries, "run", "step").datasets == {"code": ([1, 3], [2.0, 1.0]), "wiki": ([1, 2], [4.0, 3.0])}
    pytest.importorskip("matplotlib", reason="needs matplotlib, the extra plot")
    write_run(tmp_path / "run", entries)
    text = plot([tmp_path / "run"], tmp_path / "loss.svg", by_dataset=True).read_text()
    assert "<!-- wiki -->" in text and "<!-- code -->" in text
    assert "<!-- wiki -->" not in plot([tmp_path / "run"], tmp_path / "plain.svg").read_text()


SPARSE = records(
    ("start", 0), ("step", 7, 5.0), ("eval", 10, 4.5), ("step", 14, 4.0), ("eval", 20, 3.5), ("step", 21, 3.0),
    ("resume", 20, {"pp": 2}), ("step", 21, 3.0), ("eval", 30, 2.5),
)  # fmt: skip


@pytest.mark.parametrize(
    ("axis", "places"), [("step", [10, 20, 30]), ("tokens", [640, 1280, 1920]), ("seconds", [2, 4, 8])]
)
def test_every_evaluation_is_drawn_also_of_steps_without_a_line(axis, places):
    found = curve(SPARSE, "run", axis)
    assert found.evals == {"": (places, [4.5, 3.5, 2.5])}
    assert found.resumes[0].x == {"step": 20, "tokens": 1280, "seconds": 6}[axis]


def test_an_evaluation_before_the_first_line_is_drawn():
    assert curve(records(("eval", 5, 4.0), ("step", 10, 3.0)), "run", "tokens").evals[""][0] == [320]


@pytest.fixture
def figures(monkeypatch):
    """The figures that were drawn, with what draws them."""
    pytest.importorskip("matplotlib", reason="needs matplotlib, the extra plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found, save = [], Figure.savefig

    def saved(figure, *args, **options):
        save(figure, *args, **options)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        found.append((figure, canvas.get_renderer()))

    monkeypatch.setattr(Figure, "savefig", saved)
    return found


def restarted_often(steps, restarts, low=0.02):
    entries = [("start", 0)]
    for number in range(1, steps + 1):
        if number - 1 in restarts:
            entries.append(("resume", number - 1, {"pp": 2, "dp": 2, "tp": 2}))
        entries.append(("step", number, low + 5.5 * 0.9**number))
        if number % 20 == 0:
            entries.append(("eval", number, low + 6 * 0.9**number))
    return records(*entries)


@pytest.mark.slow
def test_restarts_legend_and_points_lie_apart_and_nothing_is_cropped(tmp_path, figures):
    runs = [
        write_run(tmp_path / "a", restarted_often(120, (30, 31, 33, 60, 110))),
        write_run(tmp_path / "b", restarted_often(100, (31, 58, 59, 60, 61, 62))),
    ]
    plot(runs, tmp_path / "loss.png")
    [(figure, renderer)] = figures
    [axes] = figure.axes
    low, high = axes.get_ylim()
    points = [y for line in axes.lines if len(line.get_ydata()) > 2 for y in line.get_ydata()]
    assert 0 <= low < min(points) and max(points) < high, "no negative loss, and the first updates are there"
    boxes = [text.get_window_extent(renderer) for text in axes.texts]
    inside = axes.get_window_extent(renderer)
    assert len(boxes) == 8, "a number for each restart that is told, and what they are"
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:i]), axes.texts[i].get_text()
        assert not box.overlaps(inside.shrunk(0.99, 0.99)), "no text hides data"
    [legend] = figure.legends
    assert not legend.get_window_extent(renderer).overlaps(inside)
    assert "and 4 more, in metrics.jsonl" in axes.texts[-1].get_text()


@pytest.mark.slow
@pytest.mark.parametrize("lowest", [0.6, 0.05, 0.001])
def test_numbers_of_a_logarithmic_axis_lie_apart(tmp_path, figures, lowest):
    entries = records(*(("step", number, lowest + 10 * 0.7**number) for number in range(1, 80)))
    for at in range(12):
        entries += records(("resume", 70 + at // 6, {"pp": 2}))
    plot([write_run(tmp_path / "run", entries)], tmp_path / "loss.png")
    [(figure, renderer)] = figures
    [axes] = figure.axes
    low, high = axes.get_ylim()
    ticks = zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
    boxes = [label.get_window_extent(renderer) for at, label in ticks if low <= at <= high]
    assert axes.get_yscale() == "log" and len(boxes) >= 3
    assert not any(box.overlaps(other) for i, box in enumerate(boxes) for other in boxes[:i])


def test_a_loss_that_falls_little_has_a_plain_axis_that_does_not_go_below_zero(tmp_path, figures):
    entries = records(*(("step", number, 0.2 + 0.1 / number) for number in range(1, 30)))
    plot([write_run(tmp_path / "run", entries)], tmp_path / "loss.png")
    [(figure, _)] = figures
    assert figure.axes[0].get_yscale() == "linear" and figure.axes[0].get_ylim()[0] >= 0


KEPT_ALIVE = records(
    ("start", 0), ("step", 1, 5.0), ("step", 2, 4.0), ("save", 2), ("step", 3, 3.0), ("start", 2), ("recovery", 2),
    ("step", 3, 3.0), ("step", 4, 2.5), ("save", 4), ("no_snapshot", 4), ("replicas", 3), ("replicas", 4),
    ("start", 4), ("recovery", 4),
)  # fmt: skip
KEPT_ALIVE[6]["seconds"] = KEPT_ALIVE[14]["seconds"] = 1.5
KEPT_ALIVE[0]["world"] = KEPT_ALIVE[5]["world"] = 2
KEPT_ALIVE[13]["world"] = 4
KEPT_ALIVE[11]["result"], KEPT_ALIVE[12]["result"] = "agree", "differ"


@pytest.mark.parametrize(
    ("axis", "places"),
    [
        ("step", [[3], [2], [4], [2, 4], [4], [4]]),
        ("tokens", [[192], [128], [256], [128, 256], [256], [256]]),
        ("seconds", [[4.5], [6], [14], [3, 9], [10], [12]]),
    ],
)
@pytest.mark.slow
def test_events_are_vertical_lines_with_a_legend(axis, places):
    pytest.importorskip("matplotlib", reason="needs matplotlib, the extra plot")
    kinds = ("failure", "recovery", "resize", "checkpoint", "no snapshot", "copies differ")
    places = dict(zip(kinds, places, strict=True))
    one = curve(KEPT_ALIVE, "run", axis)
    drawn = figure_of([one], by_dataset=False, events=True, references={}, marks={}).axes[0]
    colours = {EVENT_STYLES[kind][0]: kind for kind in places}
    found = {kind: [] for kind in places}
    for line in drawn.lines:
        if line.get_color() in colours and list(line.get_ydata()) == [0, 1]:
            found[colours[line.get_color()]].append(line.get_xdata()[0])
    assert found == places
    assert drawn.get_legend_handles_labels()[1] == ["run", *(f"{kind} ({len(found[kind])})" for kind in found)]


@pytest.mark.slow
def test_events_are_drawn_only_if_asked_for(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib, the extra plot")
    plain = figure_of([curve(KEPT_ALIVE, "run", "step")], by_dataset=False, events=False, references={}, marks={})
    assert not {line.get_color() for line in plain.axes[0].lines} & {style[0] for style in EVENT_STYLES.values()}
    run = write_run(tmp_path / "run", KEPT_ALIVE)
    text = plot([run], tmp_path / "loss.svg", events=True).read_text()
    assert all(word in text for word in ("failure", "recovery", "checkpoint"))
