"""AllGatherPipeline, GradReducePipeline, UseOrder and the pool, without any module."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sixfold.fsdp import AllGatherPipeline, FsdpError, GradReducePipeline, TemporaryBucketAllocator
from sixfold.fsdp.placement.use_order import UseOrder


def gathers() -> tuple[AllGatherPipeline, list[str]]:
    log: list[str] = []

    def start(unit):
        log.append(f"start {unit}")
        return lambda: log.append(f"done {unit}")

    return AllGatherPipeline(["a", "b"], start), log


LEGAL = {("EMPTY", "gather"): "GATHERING", ("GATHERING", "wait"): "READY", ("READY", "free"): "EMPTY"}


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["gather", "wait", "free"])), max_size=30))
def test_only_the_three_legal_moves_pass_and_others_name_unit_and_history(moves):
    pipeline, _ = gathers()
    states = {"a": "EMPTY", "b": "EMPTY"}
    done = {"a": [], "b": []}
    for unit, move in moves:
        after = LEGAL.get((states[unit], move))
        if after is None:
            with pytest.raises(FsdpError) as caught:
                getattr(pipeline, move)(unit)
            assert caught.value.unit == unit
            assert (", ".join(done[unit][-12:]) or "nothing yet") in str(caught.value)
        else:
            getattr(pipeline, move)(unit)
            states[unit] = after
            done[unit].append(move)
        assert {name: pipeline.state(name).value for name in states} == states


def test_a_gather_starts_at_once_and_is_finished_by_wait():
    pipeline, log = gathers()
    pipeline.gather("a")
    pipeline.gather("b")
    pipeline.wait("a")
    assert log == ["start a", "start b", "done a"]


def reduces() -> tuple[GradReducePipeline, list[str]]:
    log: list[str] = []

    def start(unit):
        log.append(f"start {unit}")
        return lambda: log.append(f"done {unit}")

    return GradReducePipeline(["a", "b", "c"], start), log


def test_reductions_finish_first_in_first_out_down_to_the_limit():
    pipeline, log = reduces()
    for unit in "abc":
        pipeline.put(unit)
    pipeline.drain(2)
    assert log[3:] == ["done a"]
    pipeline.finish()
    assert log[3:] == ["done a", "done b", "done c"]
    assert len(pipeline) == 0


def test_a_unit_in_flight_cannot_be_put_again():
    pipeline, _ = reduces()
    pipeline.put("a")
    with pytest.raises(FsdpError, match=r"in flight; drain it first\. History: put") as caught:
        pipeline.put("a")
    assert (caught.value.unit, caught.value.op) == ("a", "reduce")
    pipeline.finish()
    pipeline.put("a")


def test_unknown_units_and_negative_limits_are_refused():
    pipeline, _ = reduces()
    with pytest.raises(FsdpError, match="no such unit"):
        pipeline.put("z")
    with pytest.raises(FsdpError, match=r"drain\(-1\)"):
        pipeline.drain(-1)
    with pytest.raises(FsdpError, match="no such unit"):
        gathers()[0].gather("z")


def test_a_pool_gives_any_free_slot_and_says_when_there_is_none():
    pool = TemporaryBucketAllocator([16, 16], torch.device("cpu"))
    assert {pool.allocate("a", 16), pool.allocate("b", 16)} == {0, 1}
    assert pool.allocate("c", 16) is None
    pool.free("a")
    assert pool.allocate("c", 16) is not None
    with pytest.raises(FsdpError, match="holds no slot"):
        pool.free("a")
    with pytest.raises(FsdpError, match="already"):
        pool.allocate("c", 16)
    pool.free("b")
    with pytest.raises(FsdpError, match="needs 17 bytes"):
        pool.allocate("d", 17)


def test_the_recorded_order_is_followed_until_a_step_leaves_it():
    order = UseOrder()
    for unit in (0, 1, 2, 1):
        order.use(unit)
    assert list(order.coming()) == []
    order.next_step()
    order.use(0)
    assert list(order.coming()) == [1, 2, 1]
    order.use(2)  # not what was recorded: no more guesses in this step
    assert list(order.coming()) == []
    order.use(1)
    order.next_step()
    order.use(0)
    assert list(order.coming()) == [2, 1]
