"""What [lora] takes, and what it is not combined with."""

import pytest
from config_helpers import config_with

from sixfold.gpt.config.layer_tensors import full_name, layer_tensors, parameter_names
from sixfold.gpt.config.lora import LoraConfig
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.model.decoder import GPTModel
from sixfold.gpt.model.lora import add_adapters
from sixfold.gpt.parallel.weight_sharding import Cuts

SOME = 'lora.targets=["q", "down"]'


@pytest.mark.parametrize("bias", [False, True])
def test_sizes_are_those_of_the_modules_with_their_adapters(bias):
    config = config_with("lora.rank=2", f"model.qkv_bias={str(bias).lower()}")
    model = GPTModel(config.model, device="meta")
    add_adapters(model, config.lora)
    inside = {n: p.numel() for n, p in model.named_parameters() if n.startswith("layers.1.")}
    sizes = layer_tensors(config.model, 1, lora=config.lora)
    assert {full_name(1, short): size for short, size in sizes.items()} == inside
    assert [full_name(1, short) for short in sizes] == list(inside), "in the order of the module"
    assert parameter_names(config.model) == [n for n, _ in model.named_parameters() if "lora" not in n]


@pytest.mark.parametrize("target", LoraConfig().targets)
def test_one_matrix_of_an_adapter_is_cut_where_its_base_is_and_the_other_is_whole(target):
    part = "attention" if target in ("q", "k", "v", "out") else "ffn"
    cuts, name = Cuts(tp_rank=1, tp=2), f"layers.0.{part}.{target}"
    (axis,) = cuts.of(f"{name}.weight")
    assert cuts.of(f"{name}.lora_a") == ({1: (1, 2)} if axis == 1 else {})
    assert cuts.of(f"{name}.lora_b") == ({0: (1, 2)} if axis == 0 else {})


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["lora.dropout=0.1"], r"lora\.dropout is 0\.1 and lora\.rank 4: adapters read what the base reads"),
        (['train.frozen=["norm"]'], r"train\.frozen is \['norm'\] and lora\.rank 4: all but adapters is frozen"),
        (["optimizer.name=muon"], r"optimizer\.name is 'muon' and lora\.rank 4: Muon's matrices are frozen"),
        (["train.precision=fp8"], r"train\.precision is 'fp8' and lora\.rank 4"),
        (["model.num_experts=4"], r"lora\.targets has gate, up, down and model\.num_experts is 4, whose matrices are"),
        (["lora.targets=[]"], r"lora\.targets is \[\]; it names one or more of q, k, v, out"),
        (['lora.targets=["q", "q"]'], "each once"),
        (['lora.targets=["q_proj"]'], r"lora\.targets.*'q_proj'.*one of q, k, v, out, gate, up, down"),
        (["lora.rank=0", SOME], r"lora\.targets is \['q', 'down'\] and lora\.rank 0, without which there are no"),
        (["lora.alpha=0"], r"lora\.alpha is 0"),
        (
            ["parallel.schedule=pipedream_2bw", "parallel.sharding=no_shard", "train.clip_grad=0"],
            r"parallel\.schedule is 'pipedream_2bw' and lora\.rank 4",
        ),
        (
            ["model.kv_lora_rank=8", "model.qk_nope_head_dim=6", "model.qk_rope_head_dim=4", "model.v_head_dim=8",
             "model.num_query_groups=0"],
            r"model\.kv_lora_rank is 8 and lora\.rank 4: linears of latent attention have no adapters",
        ),
    ],
)  # fmt: skip
def test_what_adapters_do_not_go_with_is_refused_with_the_reason(keys, words):
    with pytest.raises(ConfigError, match=words):
        config_with("lora.rank=4", *keys)
