"""A planned peak beside the most that a CUDA device's allocator held."""

from dataclasses import replace

import pytest
import torch
from config_helpers import MINIMAL
from plan_helpers import microbatch_of

from sixfold.gpt import TrainConfig
from sixfold.gpt.config.rules import check_world
from sixfold.gpt.data.token_stream import Microbatch
from sixfold.gpt.engine.rank_model import build_rank
from sixfold.gpt.engine.step import train_step
from sixfold.gpt.launch.rendezvous import World
from sixfold.gpt.machine.devices import device_named
from sixfold.gpt.parallel.mesh import make_mesh
from sixfold.gpt.plan.plan import plan_layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none here"),
]

# Large enough that what libraries keep for themselves is below a per cent.
SIZES = (
    "model.num_layers=8", "model.hidden_size=2048", "model.num_attention_heads=16", "model.num_query_groups=4",
    "model.ffn_hidden_size=5632", "model.vocab_size=32000", "data.seq_length=2048", "train.micro_batch_size=2",
    "run.device=cuda",
)  # fmt: skip


def on_device(found: Microbatch, device: torch.device) -> Microbatch:
    kwargs = {name: tensor.to(device) for name, tensor in found.kwargs.items()}
    return replace(found, tokens=found.tokens.to(device), kwargs=kwargs)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_planned_peak_is_the_most_that_is_allocated(microbatches, recompute):
    options = (*SIZES, f"train.recompute={recompute}", f"train.global_batch_size={2 * microbatches}")
    config = TrainConfig.from_text(MINIMAL, options)
    world = World(rank=0, size=1, local_rank=0, store=None, device=torch.device("cuda", 0))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    mesh = make_mesh(check_world(config, 1), world, world.device, 60.0)
    rank = build_rank(config, mesh, world, draw=False)
    with torch.no_grad():
        for record in rank.model.state_records():  # build_rank draws on the CPU: twelve seconds
            record.tensor.normal_(std=0.02)
    rank.model.refresh()
    batch = [on_device(microbatch_of(config, number), world.device) for number in range(microbatches)]
    train_step(rank, batch, 1e-3)
    torch.cuda.reset_peak_memory_stats()
    train_step(rank, batch, 1e-3)
    [planned] = plan_layout(config, 1, device_named("h100")).ranks
    assert planned.peak == pytest.approx(torch.cuda.max_memory_allocated() - before, rel=0.05)
