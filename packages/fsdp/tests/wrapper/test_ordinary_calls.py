"""Calls that everybody makes: a group by default, classes that are not known, torch's options, files, later groups."""

from __future__ import annotations

import inspect
from functools import partial

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from fsdp_helpers import Block, make_net, same
from torch import nn
from torch.distributed.fsdp import wrap

from sixfold.fsdp import FsdpError, FullyShardedDataParallel, MixedPrecision, fully_shard, fully_shard_optimizer
from sixfold.fsdp.setup.options import Options
from sixfold.fsdp.setup.torch_options import OPTIONS


def test_a_class_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(FsdpError, match=r"'LlamaDecoderLayer' matches no module of .*several times: .*Block \(\d\)"):
        fully_shard(make_net(), fsdp_unit_modules=["LlamaDecoderLayer"])


def options_of_torch():
    """Arguments of torch's three wrappers, by name, as the installed torch has them."""
    wrappers = (torch_fsdp.FullyShardedDataParallel, torch_fsdp.fully_shard, nn.parallel.DistributedDataParallel)
    return {name for wrapper in wrappers for name in inspect.signature(wrapper).parameters} - {"module"}


# Debugging aids of DDP that nobody's guide names; their error has no word of ours.
RARE = {"check_reduction", "delay_all_reduce_named_params", "dim", "param_to_hook_all_reduce"}
NEWER = {"batched_grad_copy", "bucket_cap_mb_list", "forward_sync_buffers"}  # of torch 2.13's DDP


@pytest.mark.parametrize("wrapper", [fully_shard, FullyShardedDataParallel])
def test_options_of_torchs_wrappers_are_refused_with_ours(wrapper):
    ours = set(Options.names())
    foreign = options_of_torch() - ours
    assert foreign - RARE - NEWER <= OPTIONS.keys()
    for name in sorted(foreign | OPTIONS.keys()):
        with pytest.raises(FsdpError, match=rf"^{name} is no option of sixfold.fsdp; \w+"):
            wrapper(make_net(), fsdp_unit_modules=[Block], **{name: None})


@pytest.mark.parametrize(
    "policy",
    [
        wrap.ModuleWrapPolicy({Block}),
        partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        partial(wrap._module_wrap_policy, module_classes={Block}),
        ["Block"],  # accelerate's transformer_cls_names_to_wrap
    ],
    ids=["class", "transformer", "modules", "names"],
)
def test_a_policy_of_torchs_is_refused_with_its_classes_which_make_the_units(policy):
    for options in ({"auto_wrap_policy": policy}, {"fsdp_unit_modules": policy}):
        if options == {"fsdp_unit_modules": ["Block"]}:
            continue  # that is ours
        with pytest.raises(FsdpError, match=r"write (fsdp_unit_modules=)?\['Block'\]"):
            fully_shard(make_net(), **options)
    assert len(fully_shard(make_net(), fsdp_unit_modules=["Block"]).units) > 2


def test_a_policy_by_size_is_refused_with_the_way_to_name_units():
    policy = partial(wrap.size_based_auto_wrap_policy, min_num_params=100)
    with pytest.raises(FsdpError, match=r"name the classes of the units: fsdp_unit_modules=\["):
        fully_shard(make_net(), auto_wrap_policy=policy)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("FULL_SHARD", "optim_grads_params"),
        ("SHARD_GRAD_OP", "optim_grads"),
        ("NO_SHARD", "no_shard"),
    ],
)
def test_a_strategy_of_torchs_is_refused_with_ours(theirs, ours):
    for name in ("strategy", "sharding_strategy"):
        with pytest.raises(FsdpError, match=f"write strategy='{ours}'"):
            fully_shard(make_net(), **{name: torch_fsdp.ShardingStrategy[theirs]})
    assert fully_shard(make_net(), strategy=ours).report()["strategy"] == ours


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"mixed_precision": torch_fsdp.MixedPrecision(param_dtype=torch.bfloat16)}, "MixedPrecision"),
        ({"mixed_precision": torch_fsdp.MixedPrecisionPolicy()}, "MixedPrecision"),
        ({"mixed_precision": "bf16"}, "it is sixfold.fsdp.MixedPrecision"),
        ({"buffers": 25}, "it is sixfold.fsdp.BufferConfig"),
        ({"mesh": 2}, "it is a DeviceMesh"),
        ({"process_group": (None, None)}, "it is a ProcessGroup"),
        ({"init_fn": 3}, "it is a function or None"),
        ({"granularity": 3}, "it is a function or None"),
        ({"mesh_for": 3}, "it is a function or None"),
        ({"fault_store": "tcp"}, "it is a store"),
        ({"grad_divisor": "4"}, "it is a number, or None"),
        ({"timeout_s": "60"}, "it is a number"),
        ({"timeout_s": True}, "it is a number"),
        ({"fsdp_unit_module": [Block]}, "is fsdp_unit_modules meant?"),
    ],
    ids=str,
)
def test_a_value_of_another_kind_is_refused_with_the_kind_that_is_meant(options, told):
    with pytest.raises(FsdpError, match=f"^{next(iter(options))} .*{told}"):
        fully_shard(make_net(), **options)


@pytest.mark.parametrize("name", ["buffer_dtype", "cast_forward_inputs", "keep_low_precision_grads", "output_dtype"])
def test_arguments_of_torchs_mixed_precision_are_refused_with_ours(name):
    with pytest.raises(FsdpError, match=f"{name} is no option of MixedPrecision; "):
        MixedPrecision(param_dtype=torch.bfloat16, **{name: None})
    assert "cast_inputs" in inspect.signature(MixedPrecision).parameters


def test_arguments_without_a_name_are_refused():
    with pytest.raises(FsdpError, match="NoneType, list is given without a name after the module; write process_gr"):
        FullyShardedDataParallel(make_net(), None, [Block])
    with pytest.raises(FsdpError, match=r"^a list is wrapped; an nn\.Module is"):
        fully_shard([make_net()])
    net = make_net()
    model, optimizer = fully_shard(net), torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(FsdpError, match="a SGD; it takes the optimizer, then what fully_shard returned"):
        fully_shard_optimizer(model, optimizer)


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
