"""Measured timelines hold messages and slots too; every statistic is that of the work, tick by tick."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import chain
from math import inf, nan

import pytest
from schedule_helpers import SCHEDULES

from sixfold.pipeline import (
    Action,
    Costs,
    ScheduleError,
    draw,
    gpipe,
    interleaved,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    simulate,
)
from sixfold.pipeline.cli import main
from sixfold.pipeline.drawing.trace import read_trace, write_trace
from sixfold.pipeline.passes import lower, optimizer_step, recompute, unshard
from sixfold.pipeline.simulation.simulate import measured

NO_WORK = ("SEND", "RECV", "SHARD", "REDUCE")


def with_messages(program, timeline, rng):
    """The simulated events of ``program`` and, at whole times of the step, each message and slot of its lists."""
    end = int(timeline.makespan)
    events = list(timeline.events)
    for rank, row in enumerate(program.ranks):
        for action in row:
            if any(word in str(action) for word in NO_WORK):
                begin = rng.randint(0, end)
                events.append((rank, action, float(begin), float(rng.randint(begin, end))))
    rng.shuffle(events)
    return events


def by_ticks(events, ranks):
    """Makespan, each rank's ticks of work and the longest way from a rank's first to its last, with sets of ticks."""
    ticks = [set() for _ in range(ranks)]
    for rank, action, start, end in events:
        if not any(word in str(action) for word in NO_WORK):
            ticks[rank].update(range(int(start), int(end)))
    makespan = max(int(end) for *_, end in events)
    return makespan, [len(mine) for mine in ticks], max(max(mine) + 1 - min(mine) for mine in ticks if mine)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.slow
def test_messages_and_slots_are_not_work_in_any_statistic(name):
    rng = random.Random(name)
    for change in (lower, lambda p: unshard(lower(p), 1), lambda p: recompute(lower(p), microbatches=2)):
        program = change(SCHEDULES[name](3, 4))
        if program.weights == "flushed":
            program = optimizer_step(program, when=rng.choice(("flush", "post_validated")))
        costs = Costs(*([rng.randint(1, 4) for _ in range(program.stages)] for _ in range(3)), hop=rng.randint(0, 3))
        simulated = simulate(program, costs)
        events = with_messages(program, simulated, rng)
        found = measured(events, program.weights)
        makespan, busy, span = by_ticks(events, 3)
        ideal = max(busy)
        assert (found.makespan, found.ideal) == (makespan, ideal) == (simulated.makespan, simulated.ideal)
        assert found.bubble_over_ideal == pytest.approx((makespan - ideal) / ideal) and found.bubble_over_ideal >= 0
        assert found.bubble_over_total == pytest.approx(1 - sum(busy) / (3 * makespan))
        assert found.span_over_ideal == pytest.approx((span - ideal) / ideal)
        for statistic in ("bubble_over_ideal", "bubble_over_total", "span_over_ideal", "weight_versions"):
            assert getattr(found, statistic) == pytest.approx(getattr(simulated, statistic)), statistic
        # An output that is recomputed is let go at its SEND, which is anywhere here.
        assert found.peak_outputs == simulated.peak_outputs or "RECOMPUTE" in str(program)
        assert sorted(map(str, found.events)) == sorted(map(str, events))  # all are kept


def test_a_receive_that_is_posted_early_is_no_work():
    program = one_f_one_b(2, 2)
    simulated = simulate(program, Costs.per_rank(program))
    assert (simulated.ideal, simulated.makespan) == (6, 9)
    found = measured([*simulated.events, (0, Action.parse("0RECV_B0"), 0.0, 5.0)])
    assert (found.ideal, found.makespan, found.bubble_over_ideal) == (6, 9, 0.5)


def test_a_message_that_ends_last_ends_the_step_and_work_on_two_streams_counts_once():
    f, b = Action.parse("0F0"), Action.parse("0B0")
    late = measured([(0, f, 0.0, 1.0), (0, b, 1.0, 3.0), (0, Action.parse("0REDUCE_GRAD"), 2.0, 5.0)])
    assert (late.makespan, late.ideal, late.span_over_ideal) == (5, 3, 0)
    long = measured([(0, Action.parse("0UNSHARD"), 0.0, 9.0), (0, f, 1.0, 2.0), (0, b, 2.0, 4.0)])
    assert (long.makespan, long.ideal, long.span_over_ideal) == (9, 3, 0)
    twice = measured([(0, f, 0.0, 2.0), (0, b, 1.0, 3.0)])
    assert (twice.makespan, twice.ideal, twice.bubble_over_ideal) == (3, 3, 0)


def test_pictures_show_the_work_where_it_was():
    rng = random.Random(1)
    program = unshard(lower(gpipe(2, 3)))
    plain = simulate(program, Costs.per_rank(program, hop=1.0))
    full = measured(with_messages(program, plain, rng))
    assert draw(full) == draw(plain)
    assert draw(full, format="svg") == draw(plain, format="svg")
    kept = read_trace(draw(full, format="trace"))
    assert len(kept.events) == len(full.events) and kept.ideal == pytest.approx(full.ideal)
    with pytest.raises(ScheduleError, match="no action that takes time"):
        draw(measured([(0, Action.parse("0F0"), 1.0, 1.0), (0, Action.parse("0SEND_F0"), 1.0, 2.0)]))


@pytest.mark.parametrize(
    "program", [unshard(lower(interleaved(2, 4, 2)), 1), lower(pipedream(2, 4))], ids=lambda p: p.name
)
def test_slots_that_come_again_in_a_step_are_read_back(program):
    events = with_messages(program, simulate(program, Costs.per_rank(program)), random.Random(2))
    kept = read_trace(draw(measured(events, program.weights), format="trace"))
    assert Counter(str(event[1]) for event in kept.events) == Counter(map(str, chain(*program.ranks)))


def test_a_trace_of_another_tool_does_not_say_weights_and_the_program_does(tmp_path, capsys):
    program = pipedream_2bw(2, 2, steps=3)
    document = json.loads(draw(program, format="trace"))
    del document["otherData"]
    text = json.dumps(document)
    with pytest.raises(ScheduleError, match="flushed weights"):
        read_trace(text)
    assert read_trace(text, program.weights).weight_versions == (2, 2)
    (tmp_path / "trace.json").write_text(text)
    (tmp_path / "program.txt").write_text(str(program))
    assert main(["draw", str(tmp_path / "program.txt"), "--measured", str(tmp_path / "trace.json")]) == 0
    assert capsys.readouterr().out.count("weights: 2bw") == 2


@pytest.mark.parametrize("times", [(nan, 1.0), (0.0, nan), (0.0, inf), (-1.0, 1.0), (2.0, 1.0)])
def test_times_that_no_clock_gives_are_refused(times):
    with pytest.raises(ScheduleError, match="; times are finite and >= 0, and the end is not before the start"):
        measured([(0, Action.parse("0F0"), *times), (0, Action.parse("0B0"), 3.0, 4.0)])


@pytest.mark.parametrize("rank", [0, 1])
def test_events_of_two_steps_or_of_a_stage_on_two_ranks_are_refused(rank):
    f, b = Action.parse("0F0"), Action.parse("0B0")
    with pytest.raises(ScheduleError, match="0F0 is there 2 times; give the events of one step"):
        measured([(0, f, 0.0, 1.0), (0, b, 1.0, 2.0), (rank, f, 2.0, 3.0)])


def test_an_action_that_a_trace_has_alone_and_in_an_overlap_is_refused():
    overlap = Action.parse("(0F1;0B0)OVERLAP_F_B")
    events = [(0, Action.parse("0F0"), 0.0, 1.0), (0, overlap, 1.0, 3.0), (0, Action.parse("0B1"), 3.0, 5.0)]
    assert measured(events).ideal == 5
    text = write_trace({"": measured(events)})
    document = json.loads(text)
    document["traceEvents"].append({"name": "0B0", "ph": "X", "tid": 0, "ts": 2e6, "dur": 1e6})
    with pytest.raises(ScheduleError, match="0B0 is there 2 times"):
        read_trace(json.dumps(document))
