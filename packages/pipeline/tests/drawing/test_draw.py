"""Drawings: text by eye, SVG as XML, traces there and back, PNG where matplotlib is."""

import json
import random
import re
from xml.etree import ElementTree

import pytest

from sixfold.pipeline import (
    Costs,
    Program,
    ScheduleError,
    draw,
    gpipe,
    interleaved,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    schedules,
    simulate,
    zb_h1,
    zb_interleaved,
    zb_v,
)
from sixfold.pipeline.drawing.draw import draw_png
from sixfold.pipeline.drawing.trace import read_trace
from sixfold.pipeline.passes import lower, unshard

SVG = "{http://www.w3.org/2000/svg}"


def timeline_of(program, **costs):
    return simulate(program, Costs.per_rank(program, **costs))


def test_measured_is_drawn_beside_simulated_at_one_scale():
    program = one_f_one_b(2, 3)
    assert draw(timeline_of(program), beside=timeline_of(program, hop=0.5)) == (
        "simulated\n"
        "0: 0F0 0F1 ........0B0     0F2 0B1     ....0B2\n"
        "1: ....1F0 1B0     1F1 1B1     1F2 1B2     ........\n"
        "measured\n"
        "0: 0F0 0F1 ............0B0     0F2 0B1     ........0B2\n"
        "1: ......1F0 1B0     1F1 1B1     ....1F2 1B2     ..........\n"
    )


def test_a_text_picture_stays_narrow_when_one_action_is_tiny():
    program = Program.parse("0: 0F0 0I0 0W0")
    drawing = draw(simulate(program, Costs([1.0], [1.0], [1e-6])))
    assert max(map(len, drawing.splitlines())) <= 404
    assert drawing.startswith("0: 0F0 ") and "0I0" in drawing


@pytest.mark.parametrize("program", [gpipe(3, 4), zb_v(4, 8), lower(zb_h1(2, 3)), pipedream_2bw(2, 2)])
def test_an_svg_has_a_box_per_action_in_its_place(program):
    timeline = timeline_of(program, hop=0.25)
    root = ElementTree.fromstring(draw(timeline, format="svg"))
    titles = [box.find(f"{SVG}title").text for box in root.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    assert titles == [f"{action} {start:g}..{end:g}" for _, action, start, end in timeline.events]
    boxes = [box for box in root.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    scale = 1100 / timeline.makespan
    for box, (_, _, start, end) in zip(boxes, timeline.events, strict=True):
        assert float(box.get("x")) == pytest.approx(54 + start * scale, abs=0.01)
        if end > start:
            assert float(box.get("width")) == pytest.approx((end - start) * scale, abs=0.01)


def test_an_svg_has_a_dark_ground_where_the_reader_has_one():
    root = ElementTree.fromstring(draw(timeline_of(gpipe(2, 2)), format="svg", unit="s"))
    (style,) = root.iter(f"{SVG}style")
    assert "prefers-color-scheme: dark" in style.text
    fills = {element.get("fill") for element in root.iter()}
    named = re.findall(r'\[fill="([^"]+)"\]', style.text)
    assert named and set(named) <= fills, "the rules name fills that the picture has"


def test_two_timelines_share_one_svg_scale():
    program = gpipe(2, 2)
    root = ElementTree.fromstring(draw(timeline_of(program), format="svg", beside=timeline_of(program, hop=3.0)))
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert any(w.startswith("simulated: makespan 9") for w in words) and any(
        w.startswith("measured: makespan 15") for w in words
    )
    ends = [
        float(b.get("x")) + float(b.get("width")) for b in root.iter(f"{SVG}rect") if b.find(f"{SVG}title") is not None
    ]
    assert max(ends[:8]) == pytest.approx(54 + 1100 * 9 / 15, abs=0.02)


@pytest.mark.parametrize("seed", range(5))
def test_a_trace_has_one_event_per_action_in_microseconds_and_reads_back(seed):
    rng = random.Random(seed)
    program = rng.choice((gpipe(3, 4), zb_v(3, 5), lower(one_f_one_b(2, 3))))
    timeline = timeline_of(program, forward=rng.random() + 0.1, hop=rng.random())
    events = json.loads(draw(timeline, format="trace"))["traceEvents"]
    assert [(e["ph"], e["tid"], e["name"]) for e in events] == [
        ("X", rank, str(a)) for rank, a, _, _ in timeline.events
    ]
    assert [(e["ts"], e["dur"]) for e in events] == [
        pytest.approx((start * 1e6, (end - start) * 1e6)) for _, _, start, end in timeline.events
    ]
    again = read_trace(draw(timeline, format="trace"))
    assert again.makespan == pytest.approx(timeline.makespan)
    assert again.peak_activations == pytest.approx(timeline.peak_activations)
    assert [event[:2] for event in again.events] == [event[:2] for event in timeline.events]


@pytest.mark.parametrize("name", schedules.__all__)
def test_a_trace_has_exactly_one_event_per_action_of_every_schedule(name):
    program = getattr(schedules, name)(3, 6)
    for drawn in (program, timeline_of(program, hop=0.5)):
        events = json.loads(draw(drawn, format="trace"))["traceEvents"]
        assert [(e["ph"], e["tid"], e["name"]) for e in events] == [("X", r, str(a)) for r, _, a in program.entries()]


def test_a_measured_trace_may_hold_other_events_and_start_at_any_time():
    events = [
        {"name": "python", "ph": "X", "tid": 7, "ts": 0, "dur": 10},
        {"name": "thread_name", "ph": "M", "tid": 0},
        {"name": "0B0", "ph": "X", "tid": 0, "ts": 5_000_000, "dur": 2_000_000},
        {"name": "0F0", "ph": "X", "tid": 0, "ts": 3_000_000, "dur": 1_000_000},
    ]
    timeline = read_trace(json.dumps({"traceEvents": events}))
    assert [(str(a), start, end) for _, a, start, end in timeline.events] == [("0F0", 0, 1), ("0B0", 2, 4)]
    assert (timeline.makespan, timeline.ideal) == (4, 3)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "the trace is not JSON"),
        ("[" * 100_000, "the trace is not JSON"),
        (draw(gpipe(2, 2), format="trace", beside=gpipe(2, 2)), "0F0 is there 2 times"),
        (
            '{"traceEvents": [{"name": "0F0", "ph": "X", "tid": 0, "ts": 1' + "0" * 400 + ', "dur": 2}]}',
            "ts and dur are",
        ),
        ("{}", 'no list "traceEvents"'),
        ('{"traceEvents": [{"name": "python", "ph": "X"}]}', "no event whose name is an action"),
        ('{"traceEvents": [{"name": "0F0", "ph": "X", "tid": 0, "ts": -1, "dur": 2}]}', "'ts': -1"),
        ('{"traceEvents": [{"name": "0F0", "ph": "X", "tid": "a", "ts": 1, "dur": 2}]}', "'tid': 'a'"),
        ('{"traceEvents": [{"name": "0F0", "ph": "X", "tid": 1, "ts": 1, "dur": 2}]}', "rank 0 has no line"),
    ],
)
def test_a_trace_that_is_none_is_refused(text, says):
    with pytest.raises(ScheduleError) as error:
        read_trace(text)
    assert says in str(error.value)


def test_a_program_is_drawn_to_scale_with_unit_costs():
    program = gpipe(2, 2)
    assert draw(program, format="trace") == draw(timeline_of(program), format="trace")
    assert draw(unshard(lower(program)), format="svg").count("<title>") == 8


@pytest.mark.slow
def test_png_is_a_picture_of_both(tmp_path):
    pytest.importorskip("matplotlib", reason="PNG is the extra plot, which needs matplotlib")
    draw_png(zb_v(2, 3), tmp_path / "a.png", beside=timeline_of(zb_v(2, 3), hop=0.5))
    data = (tmp_path / "a.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n") and len(data) > 5000


def test_nothing_that_takes_time_cannot_be_drawn_to_scale():
    program = gpipe(1, 1)
    nothing = simulate(program, Costs([0.0], [0.0], [0.0]))
    for format in ("text", "svg"):
        with pytest.raises(ScheduleError, match="no action that takes time"):
            draw(nothing, format=format)


def relative_luminance(red, green, blue):
    """WCAG 2's, of channels in 0..255."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (red / 255, green / 255, blue / 255)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(
    "program",
    [interleaved(2, 4, chunks=4), zb_interleaved(2, 4, chunks=3), zb_v(2, 4), pipedream(2, 3)],
    ids=lambda program: program.name,
)
def test_labels_in_a_picture_have_the_contrast_that_reading_needs(program):
    timeline = simulate(program, Costs.per_rank(program))
    labels = re.findall(
        r'<rect [^>]*fill="#(..)(..)(..)"[^>]*><title>[^<]*</title></rect>\n<text [^>]*fill="(white|black)">',
        draw(timeline, format="svg"),
    )
    assert len(labels) > 8
    for *channels, ink in labels:
        box = relative_luminance(*(int(channel, 16) for channel in channels))
        assert (1.05 / (box + 0.05) if ink == "white" else (box + 0.05) / 0.05) >= 4.5, (channels, ink)


def test_a_picture_with_a_unit_has_an_axis_whose_numbers_lie_at_their_times():
    timeline = simulate(one_f_one_b(ranks=2, microbatches=4), Costs((0.012, 0.013), (0.02, 0.02), (0.01, 0.01)))
    text = draw(timeline, format="svg", unit="s")
    ticks = re.findall(r'<text x="([\d.]+)" y="\d+" text-anchor="middle" fill="#5c5c5c">([\d.]+)( s)?</text>', text)
    places = {float(number): float(x) for x, number, _ in ticks}
    assert ticks[-1][2] == " s" and 0.0 in places and len(places) >= 4
    (zero, one), *_ = ((places[0.0], x) for number, x in places.items() if number)
    scale = (one - zero) / min(number for number in places if number)
    assert all(abs(zero + number * scale - x) < 0.1 for number, x in places.items())
    assert 'fill="#5c5c5c"' not in draw(timeline, format="svg")
