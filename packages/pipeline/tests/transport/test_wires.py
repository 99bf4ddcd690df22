"""Over edges that behave as NCCL's: fixed receive buffers, sends nobody waits for, no host wait for flags."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from pipeline_helpers import batch, equal_bits, gradients, layers, plain_loop, square_loss
from thread_helpers import on_threads, values_or_raise
from wire_helpers import WireTransport, wires

from sixfold.pipeline import PipelineRunner, Program, ScheduleError, Stage, gpipe, interleaved, one_f_one_b, zb_v
from sixfold.pipeline.transport import devices
from sixfold.pipeline.transport.routes import in_rounds

STEPS = 5
PROGRAMS = [one_f_one_b(2, 6), interleaved(2, 4), zb_v(2, 6)]


def runner_of(transport: WireTransport, program: Program, modules, **options) -> PipelineRunner:
    stages = [Stage(modules[s], s) for s in program.stages_of(transport.rank)]
    return PipelineRunner(program, stages, transport, square_loss, timeout_s=20, **options)


def train(transport: WireTransport, program: Program, options: dict) -> dict:
    """Some steps; per step what the host and the buffers did, and the gradients of all of them."""
    modules = layers(program.stages)
    runner = runner_of(transport, program, modules, **options)
    steps = []
    for seed in range(STEPS):
        before = transport.control.waits, sum(end.ring.made for end in transport.incoming.values())
        for group in transport.groups.values():
            group.received.clear()
        runner.step(*batch(2 * program.microbatches, seed))
        runner.check()
        places = {(edge, tag): at for edge, g in transport.groups.items() for tag, at in g.received}
        made = sum(end.ring.made for end in transport.incoming.values())
        steps.append((transport.control.waits - before[0], made - before[1], places))
    sent = [work for group in transport.groups.values() for work in group.sent]
    mine = program.stages_of(transport.rank)
    return {"steps": steps, "sent": sent, "gradients": {s: gradients(modules[s]) for s in mine}}


@pytest.mark.parametrize("options", [{}, {"dynamic_shapes": "announced"}, {"dynamic_shapes": True}], ids=str)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
@pytest.mark.slow
def test_the_bits_of_the_plain_loop_and_what_the_host_does_for_them(program, options):
    found = values_or_raise(on_threads(2, train, program, options, transports=wires(2)))
    oracle, m = layers(program.stages), program.microbatches
    for seed in range(STEPS):
        x, y = batch(2 * m, seed)
        plain_loop(oracle, list(x.tensor_split(m)), list(y.tensor_split(m)))
    for rank in found:
        for stage, made in rank["gradients"].items():
            assert equal_bits(made, gradients(oracle[stage]))
        assert rank["sent"] and not any(work.waited for work in rank["sent"])  # no stream and no host waits for a send
        # In the first step receives wait for their shape; from the third on nothing is allocated.
        assert [made for _, made, _ in rank["steps"][2:]] == [0] * (STEPS - 2)
        places = [places for _, _, places in rank["steps"][2:]]
        assert places[0] and all(other == places[0] for other in places)  # and every message has its address
        waits = [waits for waits, _, _ in rank["steps"][1:]]
        if options.get("dynamic_shapes") == "announced":
            assert waits == [0] * len(waits)
    if not options:
        forward = sum(waits for rank in found for waits, _, _ in rank["steps"][1:2])
        pairs = zip(program.placement, program.placement[1:], strict=False)
        assert forward == sum(a != b for a, b in pairs)  # once for each stage whose output is sent


def reshape(transport: WireTransport, say: bool) -> list:
    program, modules = one_f_one_b(2, 2), layers(2)
    runner = runner_of(transport, program, modules, dynamic_shapes="announced")
    runner.step(*batch(4))
    runner.step(*batch(8), new_shapes=say)
    runner.step(*batch(8))
    runner.check()
    return gradients(modules[transport.rank])


def test_shapes_change_when_all_ranks_say_so():
    found = values_or_raise(on_threads(2, reshape, True, transports=wires(2)))
    oracle = layers(2)
    for rows in (4, 8, 8):
        x, y = batch(rows)
        plain_loop(oracle, list(x.tensor_split(2)), list(y.tensor_split(2)))
    assert all(equal_bits(a, gradients(b)) for a, b in zip(found, oracle, strict=True))


def refused(transport: WireTransport) -> str:
    runner = runner_of(transport, one_f_one_b(2, 2), layers(2), dynamic_shapes="announced")
    runner.step(*batch(4))
    if transport.rank == 1:
        return ""
    with pytest.raises(ScheduleError, match=r"call step\(..., new_shapes=True\) on all ranks") as caught:
        runner.step(*batch(8))
    return str(caught.value)


def test_a_change_that_was_not_announced_is_refused_where_it_is_made():
    assert (
        "stage 0 made torch.float32 (4, 8) of microbatch 0"
        in values_or_raise(on_threads(2, refused, transports=wires(2)))[0]
    )


def differ(transport: WireTransport) -> str:
    first, second = gpipe(2, 2), one_f_one_b(2, 2)
    runner = runner_of(transport, first, layers(2), dynamic_shapes="announced")
    runner.step(*batch(4))
    runner.step(*batch(4), program=second)
    runner.check()
    runner.step(*batch(4), program=(first, second)[transport.rank])
    try:
        runner.check()
    except ScheduleError as error:
        return str(error)
    return ""


def test_ranks_in_different_programs_are_told_before_anything_is_applied():
    found = values_or_raise(on_threads(2, differ, transports=wires(2)))
    assert "rank 0 runs another program in this step" in found[1]


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_a_chain_of_ranks_connects_in_as_many_rounds_as_a_rank_has_edges(ranks):
    edges = [(r, r + 1) for r in range(ranks - 1)] + [(r + 1, r) for r in range(ranks - 1)]
    left = [in_rounds([edge for edge in edges if rank in edge]) for rank in range(ranks)]
    rounds = 0
    while any(left):
        met = {edge for mine in left for edge in mine[:1] if all(left[end][:1] == [edge] for end in edge)}
        assert met, "every rank waits"
        left = [mine[1:] if mine[:1] and mine[0] in met else mine for mine in left]
        rounds += 1
    assert rounds == max(sum(rank in edge for edge in edges) for rank in range(ranks))


def test_nccls_own_watchdog_comes_behind_ours(monkeypatch):
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), raising=False)
    assert timedelta(seconds=12) < devices.nccl_options(12.0)._timeout <= timedelta(seconds=60)
