"""Modules on the meta device start with the bits of real ones, for any layout, one module in memory at a time.

The oracle is ``Net()`` after the same ``manual_seed``.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from fsdp_helpers import Block, same
from fsdp_memory_helpers import peak_bytes
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from sixfold.fsdp import BufferConfig, FsdpError, FullyShardedDataParallel

LAYERS = {
    "linear": lambda: nn.Linear(5, 7),
    "bilinear": lambda: nn.Bilinear(3, 4, 5),
    "embedding": lambda: nn.Embedding(11, 5, padding_idx=2),
    "embedding bag": lambda: nn.EmbeddingBag(11, 5),
    "conv": lambda: nn.Sequential(nn.Conv1d(4, 6, 3, groups=2), nn.Conv2d(3, 5, 3), nn.Conv3d(2, 3, 2)),
    "transposed conv": lambda: nn.Sequential(nn.ConvTranspose1d(4, 6, 3), nn.ConvTranspose2d(3, 5, 3)),
    "norms": lambda: nn.Sequential(
        nn.LayerNorm(5), nn.GroupNorm(2, 4), nn.RMSNorm(7), nn.InstanceNorm1d(3, affine=True)
    ),
    "batch norm": lambda: nn.Sequential(nn.BatchNorm1d(5), nn.BatchNorm2d(3), nn.SyncBatchNorm(3)),
    "prelu": lambda: nn.PReLU(3),
    "lstm": lambda: nn.LSTM(3, 5, num_layers=2, bidirectional=True, proj_size=2),
    "gru and rnn": lambda: nn.ModuleList([nn.GRU(3, 5), nn.RNN(3, 5), nn.LSTMCell(3, 5), nn.GRUCell(3, 5)]),
    "attention": lambda: nn.MultiheadAttention(6, 2),
    "attention of other widths": lambda: nn.MultiheadAttention(6, 2, kdim=4, vdim=5, add_bias_kv=True),
    "encoder layers": lambda: nn.Sequential(*(nn.TransformerEncoderLayer(6, 2, 9) for _ in range(2))),
    "decoder layer": lambda: nn.TransformerDecoderLayer(6, 2, 9),
    "adaptive softmax": lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 20, cutoffs=[5, 10]),
}


def both(make, **options):
    """The state of ``make()``, the wrapped meta twin, and whether both leave the generator at the same place."""
    torch.manual_seed(3)
    real = make()
    after_real = torch.rand(1)
    with torch.device("meta"):
        meta = make()
    torch.manual_seed(3)
    model = FullyShardedDataParallel(meta, **options)
    return real, model, torch.equal(after_real, torch.rand(1))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_of_torch_starts_as_a_real_one(name):
    real, model, alike = both(lambda: nn.Sequential(nn.Linear(2, 3), LAYERS[name](), nn.Linear(3, 2)))
    assert same(dict(real.state_dict()), model.full_state_dict()) == []
    assert alike


def test_an_lstm_made_of_meta_tensors_runs():
    real, model, _ = both(lambda: nn.LSTM(3, 5, num_layers=2))
    x = torch.randn(4, 2, 3)
    assert torch.equal(real(x)[0], model(x)[0])


class Odd(nn.Module):
    """Tied in the middle to a layer with a bias of its own, shared and plain buffers, frozen and uneven parameters."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(17, 13)
        self.head = nn.Linear(13, 17)
        self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList(Block(13, hidden=19 + 4 * i) for i in range(2))
        self.norms = nn.ModuleList([nn.BatchNorm1d(13), nn.BatchNorm1d(13)])
        self.norms[1].running_mean = self.norms[0].running_mean
        self.attention = nn.MultiheadAttention(13, 1)
        self.blocks[1].up.requires_grad_(False)
        self.again = nn.Linear(13, 17, bias=False)
        self.again.weight = self.embedding.weight
        self.last = nn.Linear(13, 5)


GRAINS = ["element", "row", "tensor", 3]
UNITS = [[], [Block], [Block, nn.Embedding, nn.Linear]]
LAYOUTS = [
    (strategy, GRAINS[at % 4], UNITS[at % 3]) for at, strategy in enumerate(["no_shard", "optim", "optim_grads"])
]
LAYOUTS += [("optim_grads_params", grain, units) for grain in GRAINS for units in UNITS]


@pytest.mark.parametrize(("strategy", "grain", "units"), LAYOUTS)
def test_a_meta_module_starts_as_the_real_one_in_every_layout(strategy, grain, units):
    options = {"strategy": strategy, "granularity": lambda name, parameter: grain, "fsdp_unit_modules": units}
    real, model, alike = both(Odd, **options)
    assert same(dict(real.state_dict()), model.full_state_dict()) == []
    assert alike
    assert model.module.norms[0].running_mean is model.module.norms[1].running_mean
    frozen = [name for name, p in real.named_parameters() if not p.requires_grad]
    assert [name for name, p in model.main_parameters() if not p.requires_grad] == frozen


@contextmanager
def fake_rank(rank, ranks):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("grain", GRAINS)
@pytest.mark.slow
def test_the_parts_of_all_ranks_are_the_real_values(grain):
    """Five ranks, one after the other."""
    torch.manual_seed(3)
    real = Odd().state_dict()
    seen = {name: torch.full_like(value.reshape(-1), torch.nan) for name, value in real.items() if value.dim()}
    for rank in range(5):
        with fake_rank(rank, 5) as group:
            _, model, _ = both(
                Odd,
                process_group=group,
                granularity=lambda name, parameter: grain,
                fsdp_unit_modules=[Block],
                initial="trust",
            )
            for record in model.state_records():
                seen[record.name][record.start : record.stop] = record.tensor
            del model
    for name in dict(Odd().named_parameters()):
        assert torch.equal(seen[name], real[name].reshape(-1)), name


class Wide(nn.Module):
    """Six units of 1 MiB."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(6))


def test_one_module_at_a_time_is_whole_while_a_model_is_made():
    with fake_rank(1, 4) as group:
        with torch.device("meta"):
            net = Wide()
        shared = BufferConfig(fill_freed=False, merge_bytes=None)  # it takes memory for each unit; a unit is one module
        options = {"process_group": group, "fsdp_unit_modules": [nn.Linear], "initial": "trust", "buffers": shared}
        made = []
        peak = peak_bytes(lambda: made.append(FullyShardedDataParallel(net, **options)))
        kept = sum(made.pop().report()["bytes"].values())
    module = 512 * 512 * 4
    assert kept < 6 * module, "less than the model: a quarter of it, two slots, two buffers of reductions"
    assert abs(peak - kept - module) < 100_000


def test_modules_that_their_layers_cannot_fill_are_refused_by_name():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    cases = {
        r"module 0 \(Own\) is on the meta device and has no reset_parameters": Own,
        r"module 0 \(Transformer\) .* give init_fn": lambda: nn.Transformer(4, 2, 1, 1, 4, batch_first=True),
        r"module 0 \(TransformerEncoder\) .*copies one layer": lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 1, 4), 2, enable_nested_tensor=False
        ),
    }
    for says, make in cases.items():
        with torch.device("meta"):
            net = nn.Sequential(make())
        with pytest.raises(FsdpError, match=says):
            FullyShardedDataParallel(net)


def test_init_fn_fills_attention_and_tied_modules_by_name_as_on_a_real_module():
    def fill(name, module):
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter, std=1 + len(name))

    def make():
        return nn.Sequential(nn.MultiheadAttention(6, 2), nn.Linear(6, 6))

    torch.manual_seed(5)
    real = make()
    torch.manual_seed(4)
    with torch.no_grad():
        for name, module in real.named_modules():
            fill(name, module)
    with torch.device("meta"):
        net = make()
    torch.manual_seed(4)
    model = FullyShardedDataParallel(net, init_fn=fill)
    assert same(dict(real.state_dict()), model.full_state_dict()) == []
