"""What a run spent, from lines that are written as a run writes them, with times that are known beforehand."""

import pytest
from run_script import Script, kept_alive

from sixfold.gpt.errors import ConfigError
from sixfold.gpt.observe.run_costs import events_of, measure


def test_the_costs_of_a_run_are_those_that_it_had():
    found = measure(kept_alive())
    assert (found.world, found.steps, found.failures, found.from_checkpoint) == (3, 23, 2, 1.0)
    assert (found.step_s, found.save_s, found.written_s, found.interval) == (2.0, 0.5, 1.5, 4)
    assert found.snapshot_s == pytest.approx(0.25)
    assert found.restart_s == pytest.approx(3.1) and found.recover_s is None
    # The step before ended 0.25 s, the lost part and the wait before; half an update is 1.125 s.
    assert found.detect_s == pytest.approx(0.25 + 0.9 + 0.3 - 1.125)
    updates = 10 - 1 + (14 - 8) + (24 - 12)
    wall = updates * 2.25 + 5 * 0.5 + 2 * (0.9 + 0.3 + 3.1)  # up to the last update, whose save comes later
    assert found.wall_s == pytest.approx(wall)
    assert found.mtbf_s == pytest.approx((wall - 2 * (3.1 + found.detect_s)) / 2)
    assert found.goodput == pytest.approx(23 * 2.0 / wall)


def test_lines_of_some_steps_tell_the_same_within_a_step():
    found = measure(kept_alive(every=2))
    assert (found.step_s, found.save_s, found.failures) == (2.0, 0.5, 2)
    assert found.snapshot_s == pytest.approx(0.25) and found.restart_s == pytest.approx(3.1)


def test_a_recovery_from_memory_is_another_cost_than_one_from_a_checkpoint():
    lines = kept_alive()
    next(line for line in lines if line["kind"] == "recovery")["source"] = "memory"
    found = measure(lines)
    assert found.recover_s == pytest.approx(3.1) and found.restart_s == pytest.approx(3.1)
    assert found.from_checkpoint == 0.5


def test_a_step_that_is_told_behind_the_recovery_was_done_before_the_failure():
    run, told = Script(), Script()
    for one in (run, told):
        one.start(0)
        one.updates(1, 6)
        one.clock += 1.0
        one.start(6, {"source": "memory", "seconds": 0.5, "generation": 2, "lost": []})
        one.updates(7, 9)
    late = next(line for line in told.lines if (line["kind"], line["step"]) == ("step", 6))
    told.lines.remove(late)
    at = next(place for place, line in enumerate(told.lines) if line["kind"] == "recovery")
    told.lines.insert(at + 1, late)
    assert measure(told.lines) == measure(run.lines)


def test_a_rank_that_is_lost_in_a_recovery_is_a_failure_too():
    run = Script()
    run.start(0)
    run.updates(1, 3)
    for number in (2, 3):
        run.clock += 3.0
        run.start(0, {"source": "the start", "seconds": 2.0, "generation": number, "lost": []})
    run.updates(1, 6)
    found = measure(run.lines)
    assert (found.failures, found.steps, found.save_s) == (2, 5, 0.5)


def test_the_time_until_somebody_starts_a_run_again_is_not_its_own():
    run = Script()
    run.start(0)
    run.updates(1, 6)
    run.clock += 10_000
    run.start(4)
    run.updates(5, 9)
    found = measure(run.lines)
    assert (found.steps, found.failures, found.mtbf_s) == (4 - 1 + 4, 0, None)
    assert found.wall_s == pytest.approx(5 * 2.25 + 0.5 + 4 * 2.25 + 0.5)


def test_a_resize_is_no_failure_and_one_rank_less_after_a_loss_is():
    run = Script()
    run.start(0)
    run.updates(1, 6)
    run.clock += 3.0
    run.start(6, {"source": "memory", "seconds": 2.0, "generation": 2, "lost": []}, world=4)
    run.updates(7, 10)
    run.clock += 3.0
    run.start(10, {"source": "memory", "seconds": 2.0, "generation": 3, "lost": [{"rank": 1, "why": "?"}]}, world=2)
    run.updates(11, 14)
    found = measure(run.lines)
    assert (found.failures, found.world, found.from_checkpoint) == (1, 2, 0.0)
    kinds = [(one.kind, one.step) for one in events_of(run.lines) if one.kind != "checkpoint"]
    assert kinds == [("resize", 6), ("failure", 10), ("recovery", 10)]


def test_ranks_that_hang_are_a_failure_although_none_is_named():
    run = Script()
    run.start(0)
    run.updates(1, 6)
    run.clock += 3.0
    run.start(6, {"source": "memory", "seconds": 2.0, "generation": 2, "lost": []})
    run.updates(7, 10)
    assert measure(run.lines).failures == 1


def test_a_run_without_two_steps_is_refused():
    with pytest.raises(ConfigError, match="runs/a has no two lines `step` in a row"):
        measure([{"kind": "start", "time": 1.0, "step": 0, "world": 1}], "runs/a")


def test_events_have_the_step_before_a_failure_and_the_step_of_a_recovery():
    found = [(event.kind, event.step) for event in events_of(kept_alive())]
    assert found == [
        ("checkpoint", 4), ("checkpoint", 8), ("failure", 10), ("recovery", 8), ("checkpoint", 12), ("failure", 14),
        ("recovery", 12), ("checkpoint", 16), ("checkpoint", 20), ("checkpoint", 24),
    ]  # fmt: skip
    failure, recovery = [event for event in events_of(kept_alive()) if event.kind != "checkpoint"][:2]
    assert recovery.time - failure.time == 2.0
