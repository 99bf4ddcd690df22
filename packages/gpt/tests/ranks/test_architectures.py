"""Every architecture at every layout: transformers' logits over two ranks, and twenty steps of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from context_helpers import cut, put_back
from gpt_helpers import plain_run, tiny_config
from hf_helpers import CASES, write_folder
from model_helpers import boundaries
from run_helpers import lines, losses, run_all

import ranktest
import sixfold.blending  # noqa: F401 - a run imports it late; here the server of ranks has it loaded
from sixfold import dist_ckpt
from sixfold.gpt import GPTModel
from sixfold.gpt.checkpoints.trained_model import saved_model
from sixfold.gpt.parallel.axes import Axes, Axis

ROW = 40
TOKENS = torch.randint(0, 100, (2, ROW), generator=torch.Generator().manual_seed(0))
PACKED = boundaries(2, ROW, [1, 13, 52, 79])
WAYS = ("tp", "tp, every rank the whole sequence", "cp", "ring", "ep")
IMPORTED = (
    "llama",
    "qwen3_moe",
    "mistral",
    "mixtral",
    "llama_yarn",
    "olmo2",
    "olmo3",
    "gemma2",
    "gemma3_text",
    "deepseek_v3",
    "deepseek_v3_plain_queries",
)


def axes_of(way: str, rank: int, ranks: int) -> Axes:
    axis = Axis(rank, ranks, dist.group.WORLD)
    return {
        "tp": Axes(tp=axis, exchange=axis, statistics=axis),
        "tp, every rank the whole sequence": Axes(tp=axis, exchange=axis, statistics=axis, sequence=False),
        "cp": Axes(cp=axis, statistics=axis),
        "ring": Axes(cp=axis, statistics=axis, cp_comm_type="p2p"),
        "ep": Axes(ep=axis, exchange=axis),
    }[way]


def logits_over_ranks(rank: int, ranks: int, folders: dict[str, str]) -> dict[tuple[str, str], torch.Tensor]:
    """Of each import, each way and rows of packed documents: the logits that this rank has."""
    found = {}
    for case, folder in folders.items():
        config = saved_model(folder)
        for way in WAYS:
            if way == "ep" and not config.num_experts:
                continue
            model = GPTModel(config, axes=axes_of(way, rank, ranks))
            mine = model.sharded_state_dict()
            state = dist_ckpt.load(mine, folder, group=None, validate_access_integrity=False)
            model.load_state_dict({name.removeprefix("model."): state[name] for name in mine})
            tokens = cut(TOKENS, rank, ranks) if way in ("cp", "ring") else TOKENS
            with torch.no_grad():
                found[case, way] = model(tokens, cu_seqlens=PACKED)
    return found


@pytest.fixture(scope="module")
def imported(tmp_path_factory, chosen) -> tuple[dict[str, Any], list[dict[tuple[str, str], torch.Tensor]]]:
    """transformers' model of each case, and the logits of two ranks."""
    pytest.importorskip("safetensors", reason="needs the extra hf")
    pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")
    from sixfold.gpt.huggingface.convert import import_model

    wanted, folder = [case for case in IMPORTED if (case,) in chosen("case")], tmp_path_factory.mktemp("imported")
    sizes = {"num_local_experts": 4, "num_experts": 4}
    peers = {
        case: write_folder(folder / case, case, **{k: v for k, v in sizes.items() if k in CASES[case][1]})
        for case in wanted
    }
    folders = {case: str(import_model(folder / case, folder / f"{case}-run")) for case in wanted}
    return peers, ranktest.run_ranks(logits_over_ranks, 2, folders, timeout=120)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", IMPORTED)
@pytest.mark.slow
def test_logits_over_two_ranks_are_those_of_transformers_reading_each_document_alone(imported, case):
    peers, by_rank = imported
    with torch.no_grad():
        bounds = zip(PACKED[:-1].tolist(), PACKED[1:].tolist(), strict=True)
        expected = torch.cat([peers[case](TOKENS.flatten()[None, b:e]).logits[0] for b, e in bounds])
    assert expected.abs().max() > 0.3
    ways = [way for name, way in by_rank[0] if name == case]
    assert len(ways) == (5 if any(part in case for part in ("moe", "mixtral", "deepseek")) else 4)
    for way in ways:
        parts = [rank[case, way] for rank in by_rank]
        for whole in [put_back(parts)] if way in ("cp", "ring") else parts:
            torch.testing.assert_close(
                whole.flatten(0, 1), expected, rtol=0, atol=1e-5, msg=lambda m, w=way: f"{w}: {m}"
            )


SLIDING = "model.layer_types=['sliding_attention', 'full_attention']"
OLMO = ("model.qk_norm=true", "model.qk_norm_over=projection", "model.norm_position=post")
GEMMA = (
    SLIDING, "model.sliding_window=7", "model.norm_position=both", "model.zero_centered_norm=true",
    "model.hidden_act=gelu_pytorch_tanh", "model.scale_embeddings=true", "model.query_pre_attn_scalar=5",
)  # fmt: skip
EXPERTS = ("model.num_experts=4", "model.moe_ffn_hidden_size=32", "model.router_aux_loss=0")
DEEPSEEK = (
    "model.num_query_groups=4", "model.q_lora_rank=20", "model.kv_lora_rank=12", "model.qk_nope_head_dim=6",
    "model.qk_rope_head_dim=4", "model.v_head_dim=8", "model.rope_interleave=true", *EXPERTS,
    "model.scoring_func=sigmoid", "model.n_group=2", "model.expert_bias=true", "model.routed_scaling_factor=1.5",
    "model.shared_ffn_hidden_size=32", "model.expert_bias_update_rate=0",
)  # fmt: skip
MODELS = {
    "mistral": ("model.sliding_window=7",),
    "windows and full rows": ("model.sliding_window=7", SLIDING, "model.qk_norm=true"),
    "olmo2": OLMO,
    "olmo3": (*OLMO, SLIDING, "model.sliding_window=7", "model.rope_local_base_freq=100.0"),
    "gemma2": (*GEMMA, "model.attn_logit_softcapping=2.0", "model.final_logit_softcapping=3.0"),
    "gemma3": (*GEMMA, "model.qk_norm=true", "model.rope_local_base_freq=100.0"),
    "deepseek_v3": DEEPSEEK,
    "mixtral": ("model.sliding_window=7", *EXPERTS),
}
# With small weights what norms behind a part read is near their epsilon, and they enlarge what a sum was rounded by.
SHORT = (
    "model.init_std=0.2",
    "train.steps=20",
    "train.micro_batch_size=1",
    "train.global_batch_size=2",
    "model.num_layers=2",
)
LAYOUTS = {
    "tp": ("parallel.tp=2",),
    "cp": ("parallel.cp=2", "parallel.cp_comm_type=p2p"),
    "pp": ("parallel.pp=2", "train.recompute=selective"),
    "dp": ("parallel.dp=2", "train.recompute=full"),
    "ep": ("parallel.dp=2", "parallel.ep=2", "parallel.sharding=optim"),
    "cp gathered": ("parallel.cp=2", "train.recompute=selective"),
}
RUNS = [
    (model, layout)
    for model, overrides in MODELS.items()
    for layout in LAYOUTS
    if layout != "ep" or set(EXPERTS) <= set(overrides)
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, chosen):
    """The run of every model and layout."""
    folder, wanted = tmp_path_factory.mktemp("architectures"), chosen("model", "layout")
    found = {
        (model, layout): tiny_config(folder, *SHORT, *MODELS[model], *LAYOUTS[layout], run=f"{model} {layout}")
        for model, layout in RUNS
        if (model, layout) in wanted
    }
    run_all((2, config) for config in found.values())
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("model", "layout"), RUNS)
@pytest.mark.slow
def test_twenty_steps_have_the_losses_of_one_process(trained, model, layout):
    config = trained[model, layout]
    expected_losses, expected_norms = zip(*plain_run(config, 20), strict=True)
    assert min(expected_norms) > config.train.clip_grad, "a norm that clips nothing would hide a wrong one"
    assert losses(config) == pytest.approx(expected_losses, rel=1e-6)
    assert [entry["grad_norm"] for entry in lines(config, "step")] == pytest.approx(expected_norms, rel=2e-6)
