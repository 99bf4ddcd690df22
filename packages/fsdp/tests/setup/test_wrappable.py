"""What is looked at when a module is wrapped: memory that parameters share, buffers that nobody fills."""

from __future__ import annotations

import pytest
import torch
from fsdp_helpers import Net as PlainNet
from torch import nn

from sixfold.fsdp import FsdpError, FullyShardedDataParallel, fully_shard


def test_parameters_tied_by_data_are_refused_with_how_to_tie_them():
    net = PlainNet()
    net.head.weight.data = net.embedding.weight.data
    with pytest.raises(FsdpError, match=r"head.weight lies in the memory of embedding.weight") as caught:
        fully_shard(net)
    assert "head.weight = embedding.weight" in str(caught.value)
    net.head.weight = net.embedding.weight  # the remedy
    fully_shard(net)


def test_a_buffer_over_a_weight_is_refused_and_parts_of_one_memory_are_not():
    net = nn.Linear(4, 4)
    net.register_buffer("seen", net.weight.detach()[1:])
    with pytest.raises(FsdpError, match=r"module buffer seen lies in the memory of weight"):
        fully_shard(net)
    net.seen = net.seen.clone()  # the remedy
    fully_shard(net)
    parts = nn.ParameterList(nn.Parameter(one) for one in torch.randn(12).view(3, 4))
    fully_shard(parts)


@pytest.mark.filterwarnings("ignore:.*torch.jit.:DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda part: torch.jit.trace(part, torch.ones(1, 4))])
def test_a_scripted_part_is_refused_by_its_name_and_the_module_stays_as_it_was(make):
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(make(nn.Linear(4, 4))))
    with pytest.raises(FsdpError, match=r"^1\.0 is a module of torch\.jit, which takes no hooks"):
        fully_shard(net)
    net(torch.ones(1, 4)).sum().backward()
    assert all(type(one) is nn.Parameter and one.grad is not None for one in net.parameters())


@pytest.mark.parametrize("form", [lambda view: view, lambda view: [view], lambda view: {"first": view}])
def test_a_view_of_a_weight_in_an_attribute_is_refused_since_it_would_keep_start_values(form):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].shown = form(net[0].weight[1:])
    with pytest.raises(FsdpError, match=r"attribute 1.shown lies in the memory of 0.weight"):
        fully_shard(net)
    net[1].shown = form(net[0].weight[1:].clone())  # the remedy
    fully_shard(net)


def test_a_view_that_a_hook_sets_before_each_forward_is_as_in_the_plain_module():
    torch.manual_seed(0)
    net = nn.utils.spectral_norm(nn.Linear(4, 4))  # its weight is an attribute, a view until the first forward
    plain, x = nn.utils.spectral_norm(nn.Linear(4, 4)), torch.randn(3, 4)
    plain.load_state_dict(net.state_dict())
    assert torch.equal(fully_shard(net)(x), plain(x))


class Rotary(nn.Module):
    """As transformers' rotary embeddings: frequencies that no state dict holds."""

    def __init__(self, device=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, device=device))
        self.register_buffer("inv_freq", 1.0 / torch.arange(1, 5, device=device), persistent=False)
        self.register_buffer("position_ids", torch.arange(4, device=device), persistent=False)

    def forward(self, x):
        return x * self.inv_freq[self.position_ids] * self.weight


@pytest.mark.parametrize("left", ["inv_freq", "position_ids"])
def test_a_buffer_that_init_fn_leaves_and_no_load_brings_is_refused(left):
    def fill(name, module):
        for key in {"inv_freq", "position_ids"} - {left} if isinstance(module, Rotary) else ():
            setattr(module, key, getattr(Rotary(), key))

    with torch.device("meta"):
        net = nn.Sequential(Rotary(), nn.Linear(4, 4))
    with pytest.raises(FsdpError, match=rf"0.{left} was on the meta device, init_fn left it as it was"):
        FullyShardedDataParallel(net, init_fn=fill)


def test_a_meta_llama_with_init_fn_that_does_nothing_is_refused_and_with_frequencies_is_as_loaded():
    transformers = pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")
    config = transformers.LlamaConfig(
        vocab_size=17, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config)

    def meta():
        with torch.device("meta"):
            return transformers.LlamaForCausalLM(config)

    with pytest.raises(FsdpError, match=r"rotary_emb.inv_freq was on the meta device, init_fn left it"):
        FullyShardedDataParallel(meta(), fsdp_unit_modules=["LlamaDecoderLayer"], init_fn=lambda name, module: None)

    def fill(name, module):
        for key in list(module._non_persistent_buffers_set):
            setattr(module, key, plain.get_submodule(name)._buffers[key].clone())

    model = FullyShardedDataParallel(meta(), fsdp_unit_modules=["LlamaDecoderLayer"], init_fn=fill)
    model.load_full_state_dict(plain.state_dict())
    tokens = torch.arange(8).view(2, 4)
    assert torch.equal(model(tokens).logits, plain(tokens).logits)


def test_a_parameter_that_init_fn_leaves_is_nan_until_it_is_loaded():
    with torch.device("meta"):
        net = nn.Linear(4, 4)
    model = FullyShardedDataParallel(net, init_fn=lambda name, module: None)
    assert model(torch.ones(1, 4)).isnan().all()
    model.load_full_state_dict(nn.Linear(4, 4).state_dict())
    assert model(torch.ones(1, 4)).isfinite().all()
