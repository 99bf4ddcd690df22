"""Calls that everybody makes: a group by default, classes that are not known, torch's options, files, later groups."""

from __future__ import annotations

import pytest
import torch
from fsdp_helpers import Block, make_net, same
from torch import nn

from sixfold.fsdp import FsdpError, FullyShardedDataParallel, fully_shard, fully_shard_optimizer


def test_a_class_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(FsdpError, match=r"'LlamaDecoderLayer' matches no module of .*several times: .*Block \(\d\)"):
        fully_shard(make_net(), fsdp_unit_modules=["LlamaDecoderLayer"])


@pytest.mark.parametrize("name", ["reshard_after_forward", "mp_policy", "auto_wrap_policy", "sync_module_states"])
def test_options_of_torchs_wrappers_are_refused_with_ours(name):
    with pytest.raises(FsdpError, match=rf"fully_shard has no option {name}; \w+"):
        fully_shard(make_net(), fsdp_unit_modules=[Block], **{name: True})


@pytest.mark.parametrize("train", [True, False])
def test_linear_units_of_torchs_transformer_layers_train_as_plain_ones(train):
    def made():
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    plain, net = made(), made()
    model = fully_shard(net, fsdp_unit_modules=[nn.Linear])
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    ours = fully_shard_optimizer(torch.optim.AdamW(net.parameters(), lr=1e-2), model)
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        for call, step in ((plain, optimizer), (net, ours)):
            call(x).square().mean().backward()
            step.step()
            step.zero_grad()
    assert same(plain.state_dict(), model.full_state_dict()) == []
    plain.train(train), net.train(train)
    with torch.no_grad():
        assert torch.equal(plain(x), net(x))


def test_an_open_file_of_safetensors_is_loaded_as_it_is(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors, a peer that only tests use")
    plain = make_net()
    safetensors.save_file(plain.state_dict(), tmp_path / "weights")
    torch.manual_seed(9)
    model = fully_shard(make_net(), fsdp_unit_modules=[Block])
    for _, main in model.main_parameters():
        main.data.zero_()
    with pytest.importorskip("safetensors").safe_open(tmp_path / "weights", "pt") as file:
        model.load_full_state_dict(file)
    assert same(plain.state_dict(), model.full_state_dict()) == []


def test_a_parameter_that_add_param_group_brings_later_is_refused_with_the_call_that_works():
    net = make_net()
    first, last = next(iter(net.parameters())), list(net.named_parameters())[-1]
    model = fully_shard(net, fsdp_unit_modules=[Block])
    optimizer = fully_shard_optimizer(torch.optim.SGD([first], lr=0.1), model)
    optimizer.add_param_group({"params": [last[1]]})
    remedy = r"optimizer.add_param_group\(\{'params': \[dict\(model.main_parameters\(\)\)\['" + last[0]
    with pytest.raises(FsdpError, match=remedy):
        optimizer.step()
    optimizer.param_groups.pop()
    optimizer.add_param_group({"params": [dict(model.main_parameters())[last[0]]]})
    optimizer.step()


def test_a_method_of_the_module_is_refused_on_the_wrapper_with_the_call_that_works():
    class Net(nn.Linear):
        def twice(self, x):
            return self(self(x))

    model = FullyShardedDataParallel(Net(3, 3))
    assert not hasattr(model, "twice") and not hasattr(model, "nothing_like_it")
    with pytest.raises(
        FsdpError, match=r"no twice, the wrapped Net has; .*model.entry\(model.module, method='twice'\)"
    ):
        _ = model.twice
    assert model.entry(model.module, method="twice")(torch.ones(1, 3)).shape == (1, 3)


@pytest.mark.parametrize("norm_type", [1, float("inf")])
def test_another_norm_is_refused_and_the_second_is_taken(norm_type):
    net = make_net()
    model = fully_shard(net, fsdp_unit_modules=[Block])
    assert model.clip_grad_norm_(1.0, norm_type=2) == 0
    with pytest.raises(FsdpError, match=f"norm_type is {norm_type}; it is 2"):
        model.clip_grad_norm_(1.0, norm_type=norm_type)


def test_a_group_is_a_group_or_none_or_the_world():
    with pytest.raises(FsdpError, match="process_group is 'all'; it is a ProcessGroup, None for one process"):
        fully_shard(make_net(), process_group="all")
