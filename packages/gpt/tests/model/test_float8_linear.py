"""train.float8_products: which products are of float8 numbers, what they leave alone, and what they need.

torchao's part is by definition (float8_helpers.py); where torchao is installed it is compared with it.
"""

import sys
from dataclasses import replace

import pytest
import torch
from float8_helpers import LinearByDefinition, products, put_in
from gpt_helpers import tiny_config
from model_helpers import boundaries, small
from moe_helpers import tiny_experts
from run_helpers import final_tensors, losses
from torch import nn

from sixfold.gpt import ConfigError, train
from sixfold.gpt.model import decoder, float8_linear
from sixfold.gpt.model.decoder import GPTModel
from sixfold.gpt.model.float8_linear import check_float8, use_float8
from sixfold.gpt.plan.report import run

ON = ("train.precision=bf16", "run.device=auto", "train.steps=2", "train.float8_products=true")
OFF = (*ON[:-1], "train.float8_products=false")


@pytest.fixture
def torchao(monkeypatch):
    put_in(monkeypatch)


def test_torchao_multiplies_by_the_definition():
    pytest.importorskip("torchao.float8", reason="needs torchao, the extra float8")
    model = GPTModel(small(num_layers=1, num_query_groups=4)).bfloat16()
    use_float8(model, emulate=True)
    generator = torch.Generator().manual_seed(0)
    for part in (model.layers["0"].attention, model.layers["0"].ffn):
        for name, linear in part.named_children():
            x = torch.randn(2, 24, linear.in_features, generator=generator).bfloat16().requires_grad_()
            upstream = torch.randn(2, 24, linear.out_features, generator=generator).bfloat16()
            out = linear(x)
            found = torch.autograd.grad(out, (x, linear.weight), upstream)
            wanted = products(x.flatten(0, 1), linear.weight, upstream.flatten(0, 1))
            for one, other in zip((out, *found), wanted, strict=True):
                one = one.detach().double().view(other.shape)
                assert (one - other).norm() < 5e-3 * other.norm(), name  # of a result in bfloat16


@pytest.mark.parametrize(
    ("config", "converted"),
    [
        (small(num_query_groups=4, qkv_bias=True, tie_embeddings=False),
         "attention.q attention.k attention.v attention.out ffn.gate ffn.up ffn.down"),
        (tiny_experts(hidden_size=32, num_attention_heads=4, num_query_groups=4, shared_ffn_hidden_size=16),
         "attention.q attention.k attention.v attention.out"),
    ],
    ids=["dense", "experts"],
)  # fmt: skip
def test_linears_of_layers_are_converted_and_no_head_router_expert_or_parameter(torchao, config, converted):
    model = GPTModel(config, device="meta")
    before = dict(model.named_parameters())
    use_float8(model)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    found = [name for name, module in model.named_modules() if isinstance(module, LinearByDefinition)]
    assert found == [f"layers.{layer}.{name}" for layer in range(config.num_layers) for name in converted.split()]


def test_real_torchao_keeps_the_parameters_of_a_model_without_memory():
    pytest.importorskip("torchao.float8", reason="needs torchao, the extra float8")
    model = GPTModel(small(num_query_groups=4, qkv_bias=True, tie_embeddings=False), device="meta")
    before = dict(model.named_parameters())
    use_float8(model)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    kinds = {type(module).__name__ for module in model.modules() if isinstance(module, nn.Linear)}
    assert kinds == {"Float8Linear", "Linear"}, "the head is as it was"


def distances(found, wanted):
    return [(a.double() - b.double()).norm() / b.double().norm() for a, b in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.slow
def test_a_model_is_near_the_plain_one_and_the_same_however_its_layers_run(torchao, recompute, compiled):
    config, cu = small(num_query_groups=4), boundaries(2, 24, [7, 30])
    tokens = torch.randint(0, 100, (2, 24), generator=torch.Generator().manual_seed(1))

    def gradients(**options):
        model = GPTModel(config)
        if options.get("float8", True):
            use_float8(model)
        model.recompute = options.get("recompute", "none")
        if options.get("compiled"):
            for block in model.layers.values():
                block._layer = torch.compile(block._layer, backend="eager")
        losses = model(tokens, labels=tokens, cu_seqlens=cu)
        losses.float().mean().backward()
        return [losses.detach(), *(p.grad for p in model.parameters())]

    plain, once = gradients(float8=False), gradients()
    other = gradients(recompute=recompute, compiled=compiled)
    torch.compiler.reset()
    assert max(distances(other, once)) < 1e-3, "a last bit that falls otherwise moves an operand by its rounding"
    distance = distances(once, plain)
    assert 0 < distance[0] < 5e-3, "losses"
    assert max(distance[1:]) < 0.2, "gradients, of which e5m2 keeps two bits"


@pytest.mark.parametrize(
    "layout", ["", "parallel.schedule=zb_h1", "train.compile=true", "parallel.sharding=optim_grads_params"]
)
@pytest.mark.slow
def test_a_run_is_near_that_of_bfloat16_and_its_checkpoint_has_the_same_tensors(tmp_path, torchao, monkeypatch, layout):
    compiling = torch.compile
    monkeypatch.setattr(decoder.torch, "compile", lambda function, *, backend: compiling(function, backend="eager"))
    options, schedule = [layout] if layout and "zb" not in layout else [], layout.partition("schedule=")[2]
    plain, ours = tiny_config(tmp_path, *OFF, *options, run="plain"), tiny_config(tmp_path, *ON, *options, run="ours")
    for config in (plain, ours):
        train(replace(config, parallel=replace(config.parallel, schedule=schedule or "one_f_one_b")))
    torch.compiler.reset()
    assert losses(ours) == pytest.approx(losses(plain), rel=5e-3)
    assert losses(ours) != losses(plain)
    of_plain, of_ours = final_tensors(plain), final_tensors(ours)
    assert {key: t.shape for key, t in of_ours.items()} == {key: t.shape for key, t in of_plain.items()}


@pytest.mark.slow
def test_schedules_of_split_backwards_have_the_losses_of_whole_ones(tmp_path, torchao):
    found = []
    for schedule in ("one_f_one_b", "zb_h1"):
        config = tiny_config(tmp_path, *ON, run=schedule)
        train(replace(config, parallel=replace(config.parallel, schedule=schedule)))
        found.append(losses(config))
    assert found[1] == pytest.approx(found[0], rel=1e-6)


def test_matrices_that_the_kernel_does_not_take_are_refused_by_name(torchao):
    with pytest.raises(
        ConfigError, match=r"k of layer 0 has the shape \(8, 32\) on this rank; .* multiples of 16: train"
    ):
        use_float8(GPTModel(small(num_query_groups=1), device="meta"))


def test_devices_that_do_not_multiply_float8_are_refused_by_name(torchao, monkeypatch):
    with pytest.raises(
        ConfigError, match=r"this device is a CPU, which does not multiply float8 .* capability 8\.9; train"
    ):
        check_float8(torch.device("cpu"))
    cuda = float8_linear.torch.cuda
    monkeypatch.setattr(cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match=r"this device is NVIDIA A100, which does not multiply"):
        check_float8(torch.device("cuda"))
    monkeypatch.setattr(cuda, "get_device_capability", lambda device: (8, 9))
    check_float8(torch.device("cuda"))
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match=r"torchao cannot be imported \(.*\): pip install 'sixfold-gpt\[float8\]'"):
        check_float8(torch.device("cuda"))


def test_a_run_on_a_cpu_is_refused_before_it_begins(tmp_path):
    with pytest.raises(ConfigError, match="this device is a CPU, which does not multiply float8 numbers"):
        train(tiny_config(tmp_path, *ON))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.precision=fp32", r"train\.precision is 'fp32' and .*train\.precision = 'bf16' works, or"),
        (
            "train.precision=fp8",
            r"train\.precision is 'fp8' and train\.float8_products true: its operands are rounded",
        ),
        (
            "run.device=cpu",
            r"run\.device is 'cpu' and .*: no CPU multiplies float8 numbers; run\.device = 'cuda' works",
        ),
        ("lora.rank=4", r"lora\.rank is 4 and .*an adapter is a product of its own; lora\.rank = 0 works"),
        ("data.seq_length=20", r"data\.seq_length is 20 .* takes a multiple of 16; data\.seq_length = 16 or 24 works"),
        (
            "parallel.schedule=pipedream train.clip_grad=0 parallel.sharding=no_shard",
            r"train\.float8_products is True and",
        ),
    ],
)
def test_keys_that_it_does_not_go_with_are_refused_by_name(tmp_path, override, words):
    with pytest.raises(ConfigError, match=words):
        tiny_config(tmp_path, *ON, *override.split())


def test_a_gather_in_chunks_needs_more_tokens(tmp_path):
    options = ("parallel.tp=2", "data.seq_length=24", "train.micro_batch_size=2")
    tiny_config(tmp_path, *ON, *options)
    with pytest.raises(ConfigError, match="the 48 tokens of a microbatch takes a multiple of 64"):
        tiny_config(tmp_path, *ON, *options, "parallel.tp_overlap=true")


def test_a_provider_is_refused_beside_it(tmp_path, torchao):
    with pytest.raises(
        ConfigError, match=r"train\.float8_products is True, which is of GPTModel and not of a model_prov"
    ):
        train(tiny_config(tmp_path, *ON), model_provider=lambda pre_process, post_process, vp_stage: nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("keys", "told"), [(ON, "; bf16, float8 products counted as bf16, recompute none"), (OFF, "; bf16, recompute none")]
)
def test_a_plan_says_that_it_counts_its_products_as_bfloat16(tmp_path, keys, told):
    assert told in run(tiny_config(tmp_path, *keys), world=1, device="h100")
