"""Whatever PyTorch's schedule classes generate and lower is proved here: no false rejection."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace

import pytest

from sixfold.pipeline import Program, ScheduleError, schedules, verify
from sixfold.pipeline.passes import lower, optimizer_step, reduce_grad, unshard

theirs = pytest.importorskip("torch.distributed.pipelining.schedules", reason="torch's schedules are the oracle")

LOOPED = {
    "LoopedBFS": (theirs.ScheduleLoopedBFS, (1, 2, 3)),
    "Interleaved1F1B": (theirs.ScheduleInterleaved1F1B, (1, 2, 3)),
    "InterleavedZeroBubble": (theirs.ScheduleInterleavedZeroBubble, (1, 2, 3)),
    "ZBVZeroBubble": (theirs.ScheduleZBVZeroBubble, (2,)),
    "DualPipeV": (theirs.ScheduleDualPipeV, (2,)),
}


def generated(make, ranks: int, microbatches: int, chunks: int, **options):
    """A schedule object of PyTorch whose stages are names only."""
    stages = [
        SimpleNamespace(
            stage_index=i, num_stages=ranks * chunks, group_size=ranks, group_rank=0, is_first=i == 0, submod=None
        )
        for i in range(chunks)
    ]
    return make(stages, microbatches, **options)


def csv(rows: dict) -> str:
    """PyTorch's own dump of a table of actions."""
    return "".join(",".join("" if a is None else str(a) for a in rows[r]) + "\r\n" for r in sorted(rows))


@pytest.mark.parametrize("name", LOOPED)
@pytest.mark.slow
def test_what_pytorch_makes_and_lowers_is_accepted(name):
    make, every_chunks = LOOPED[name]
    proved = 0
    for ranks, microbatches in (*itertools.product((1, 2, 3, 4), (1, 3, 4, 8)), (8, 16)):
        for chunks in every_chunks:
            try:
                schedule = generated(make, ranks, microbatches, chunks)
            except (ValueError, IndexError):  # sizes that PyTorch refuses
                continue
            compute = Program.from_csv(csv(schedule.pipeline_order))
            verify(compute)
            lowered = Program.from_csv(csv(schedule.pipeline_order_with_comms))
            assert lowered.placement == compute.placement
            verify(lowered)
            proved += 1
    assert proved >= 8


@pytest.mark.parametrize("name", LOOPED)
def test_our_passes_lower_their_orders_as_they_do(name):
    make, every_chunks = LOOPED[name]
    for ranks, microbatches in ((2, 4), (3, 6), (4, 8)):
        schedule = generated(make, ranks, microbatches, every_chunks[-1])
        compute = Program.from_csv(csv(schedule.pipeline_order))
        ours = lower(reduce_grad(unshard(compute)))
        assert str(ours) == str(Program.from_csv(csv(schedule.pipeline_order_with_comms)))


@pytest.mark.parametrize("name", LOOPED)
def test_their_lowered_programs_take_our_steps(name):
    make, every_chunks = LOOPED[name]
    schedule = generated(make, 2, 4, every_chunks[-1])
    program = Program.from_csv(csv(schedule.pipeline_order_with_comms))
    for when in ("flush", "post_validated"):
        verify(optimizer_step(program, when=when))


def test_their_late_receives_need_a_transport_that_buffers():
    for ranks, microbatches in ((2, 4), (4, 8)):
        schedule = generated(theirs.ScheduleInterleaved1F1B, ranks, microbatches, 2, defer_pp_recv=True)
        program = Program.from_csv(csv(schedule.pipeline_order_with_comms))
        with pytest.raises(ScheduleError, match="deadlock") as caught:
            verify(program)
        assert caught.value.cycle
        verify(program, transport="buffered")


@pytest.mark.parametrize("name", ["ZBVZeroBubble", "InterleavedZeroBubble"])
def test_their_late_receives_of_zero_bubble_take_each_others_tensors(name):
    # Rank 1 asks for a gradient and an activation in another order than rank 0 sends them: one edge, no tags.
    schedule = generated(LOOPED[name][0], 2, 4, 2, defer_pp_recv=True)
    with pytest.raises(ScheduleError, match="an edge keeps its order"):
        verify(Program.from_csv(csv(schedule.pipeline_order_with_comms)), transport="buffered")


def same(theirs: Program, ours: Program) -> bool:
    return (theirs.ranks, theirs.placement) == (ours.ranks, ours.placement)


@pytest.mark.parametrize("name", LOOPED)
def test_an_alias_is_their_schedule_or_says_in_what_theirs_differs(name):
    make, every_chunks = LOOPED[name]
    entry = schedules.by_name(name)
    assert name in entry.aliases
    for ranks, microbatches, chunks in itertools.product((1, 2, 3, 4), (1, 2, 3, 4, 6, 8), every_chunks):
        try:
            program = Program.from_csv(csv(generated(make, ranks, microbatches, chunks).pipeline_order))
        except (ValueError, IndexError):  # sizes that PyTorch refuses
            continue
        if entry.arguments_for(chunks) is None:
            assert entry.aliases[name] == "takes several stages per rank too"
        elif name == "LoopedBFS":  # in each list the same forwards and the backwards of each stage the other way round
            turned = str(entry.with_chunks(ranks, microbatches, chunks))
            turned = re.sub("B([0-9]+)", lambda k, m=microbatches: f"B{m - 1 - int(k[1])}", turned)
            assert str(program) == turned and "descending" in entry.aliases[name]
        elif name == "DualPipeV":
            ours = entry.with_chunks(ranks, microbatches, chunks)
            assert microbatches >= 2 * ranks and str(program).count("OVERLAP") > str(ours).count("OVERLAP")
            assert [[str(part) for e in row for part in e.each()] for row in program.ranks] == [
                [str(part) for e in row for part in e.each()] for row in ours.ranks
            ]
        else:
            assert same(program, entry.with_chunks(ranks, microbatches, chunks))


def test_every_name_that_torchtitan_writes_is_known():
    for name in ("1F1B", "GPipe", *LOOPED):
        assert theirs.get_schedule_class(name)
        assert schedules.by_name(name) == schedules.by_name(name.lower())


def test_their_gpipe_passes_and_their_table_of_1f1b_is_refused_by_both():
    rows = {}
    for make in (theirs.ScheduleGPipe, theirs.Schedule1F1B):
        schedule = object.__new__(make)  # its table needs sizes only
        schedule._num_stages, schedule._n_microbatches, schedule.pp_group_size = 3, 4, 3
        rows[make.__name__] = schedule._get_pipeline_order()
    verify(Program.from_csv(csv(rows["ScheduleGPipe"])))
    with pytest.raises(ScheduleError, match="0F4 is missing"):
        verify(Program.from_csv(csv(rows["Schedule1F1B"])))
    with pytest.raises(AssertionError, match="without first running Forward"):
        theirs._validate_schedule(rows["Schedule1F1B"], 3, 3, 4)
