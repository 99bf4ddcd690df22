"""torch.compile of units, of the module and of the wrapper: bit for bit the plain module, and nothing compiled twice.

``aot_eager`` traces forward and backward as inductor does and runs them by the plain kernels, so bits can be compared.
"""

from __future__ import annotations

import pytest
import torch
from fsdp_helpers import Block, batch, loss_of, make_adamw, make_net, same
from torch._dynamo.utils import counters

from sixfold.fsdp import BufferConfig, fully_shard, fully_shard_optimizer


def forwards(net, backend):
    for block in net.blocks:
        block.forward = torch.compile(block.forward, backend=backend)


def modules(net, backend):
    for at, block in enumerate(net.blocks):
        net.blocks[at] = torch.compile(block, backend=backend)


def in_place(net, backend):
    for block in net.blocks:
        block.compile(backend=backend)


def train(net, optimizer, call, step):
    loss_of(call(batch(step, 0, 0)), batch(step, 0, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture(autouse=True)
def _nothing_compiled_is_left():
    yield
    torch._dynamo.reset()


def compiled_frames(*, before=None, around=None, units=(Block,), backend="eager", steps=3, buffers=None, **options):
    """Frames that dynamo compiled up to each step; fails unless all weights are the plain module's."""
    torch._dynamo.reset()
    counters.clear()
    plain, net = make_net(**options), make_net(**options)
    twin = make_adamw(plain.parameters())
    if before is not None:
        before(net, backend)
    model = fully_shard(net, fsdp_unit_modules=list(units), buffers=buffers or BufferConfig())
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    call = net if around is None else around(net, model)
    frames = []
    for step in range(steps):
        train(plain, twin, plain, step)
        train(net, optimizer, call, step)
        frames.append(counters["frames"]["total"])
    found = {name.replace("_orig_mod.", ""): value for name, value in model.full_state_dict().items()}
    assert same(plain.state_dict(), found) == []
    return frames


@pytest.mark.parametrize("way", [forwards, modules], ids=["block.forward", "torch.compile(block)"])
@pytest.mark.slow
def test_a_compiled_unit_is_one_graph_without_breaks(way):
    units = [Block] if way is forwards else ["OptimizedModule"]
    assert compiled_frames(before=way, units=units, backend="aot_eager") == [3, 3, 3]
    assert not counters["graph_break"]


@pytest.mark.parametrize("recompute", ["around", "inside", "reentrant"])
@pytest.mark.slow
def test_compiled_units_are_recomputed_bit_for_bit(recompute):
    compiled_frames(before=forwards, recompute=recompute)


@pytest.mark.parametrize(
    "way",
    [
        {"before": in_place},
        {"around": lambda net, model: torch.compile(net, backend="eager")},
        {"around": lambda net, model: torch.compile(model, backend="eager")},
    ],
    ids=["block.compile()", "torch.compile(net)", "torch.compile(model)"],
)
@pytest.mark.slow
def test_what_compiles_the_hooks_too_falls_back_there_is_right_and_settles(way):
    """Units' hooks run between the graphs; after the second step nothing is compiled any more."""
    frames = compiled_frames(steps=5, layers=1, **way)
    assert counters["graph_break"] and frames[-1] == frames[-2]


def test_a_compiler_that_takes_data_itself_reads_no_weight_outside_its_call():
    """Tracing for a backward (``aot_eager``, inductor) takes ``.data`` of gathered weights, then runs the hooks."""
    compiled_frames(
        around=lambda net, model: torch.compile(net, backend="aot_eager"),
        layers=1,
        steps=2,
        buffers=BufferConfig(gathered_bytes="double"),
    )
    assert not any("_digest" in str(reason) for reason in counters["graph_break"])
