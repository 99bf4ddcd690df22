"""What ``sixfold plan`` says of a rank's memory, beside what a run of that layout holds on this machine.

nox -s full, or nox -s "ranks(gpt)" -- --memory-matrix      all cases; a sample without it
"""

from __future__ import annotations

import pytest
from config_helpers import MINIMAL
from plan_helpers import measured_rank, rank_in_flight, stated_by_tier

import ranktest
from sixfold.dist_ckpt.memory_tier import bytes_per_domain
from sixfold.gpt import TrainConfig
from sixfold.gpt.config.rules import check_world
from sixfold.gpt.machine.devices import DEVICES
from sixfold.gpt.plan.layout import Layout
from sixfold.gpt.plan.plan import plan_layout

# Matrices of some size, so that alignment weighs as little as it does in a model of use.
WIDE = (
    "model.hidden_size=128",
    "model.ffn_hidden_size=320",
    "model.num_query_groups=2",
    "model.vocab_size=1000",
    "data.seq_length=192",
    "train.micro_batch_size=2",
    "run.device=cpu",
)
OLMO = ("model.qk_norm=true", "model.qk_norm_over=projection", "model.norm_position=post")
LONG = ("data.seq_length=520", "train.micro_batch_size=1", "model.num_layers=2")
FULL_AND_SLIDING = ["full_attention", "sliding_attention"]
LATENTS = (
    "model.num_query_groups=4",
    "model.q_lora_rank=48",
    "model.kv_lora_rank=40",
    "model.qk_nope_head_dim=24",
    "model.qk_rope_head_dim=8",
    "model.v_head_dim=16",
)
ROUTED = (
    "model.num_experts=4",
    "model.router_aux_loss=0",
    "model.scoring_func=sigmoid",
    "model.expert_bias=true",
    "model.n_group=2",
    "model.shared_ffn_hidden_size=64",
    "model.routed_scaling_factor=2.5",
)
GEMMA = (
    "model.norm_position=both",
    "model.zero_centered_norm=true",
    "model.hidden_act=gelu_pytorch_tanh",
    "model.scale_embeddings=true",
    "model.query_pre_attn_scalar=5",
    "model.attn_logit_softcapping=2.0",
    "model.final_logit_softcapping=3.0",
    "model.sliding_window=50",
    f"model.layer_types={2 * FULL_AND_SLIDING}",
)
ONE = {
    "bf16": (),
    "fp32": ("train.precision=fp32",),
    "no_shard": ("parallel.sharding=no_shard",),
    "untied": ("model.tie_embeddings=false",),
    "qwen": ("model.qkv_bias=true", "model.qk_norm=true", "data.document_mask=false"),
    "full": ("train.recompute=full",),
    "selective": ("train.recompute=selective",),
    "long rows": ("data.seq_length=520", "train.micro_batch_size=1", "model.num_layers=2"),
    "long plain rows": ("data.seq_length=520", "data.document_mask=false", "model.num_query_groups=4"),
    "rank order": ("fsdp.grad_sum=rank_order", "fsdp.reduce_buffers=3", "fsdp.gathered_bytes=all"),
    "olmo": OLMO,
    "norms before and behind": ("model.norm_position=both", "train.recompute=selective"),
    "two tables": (
        "model.sliding_window=50", f"model.layer_types={2 * FULL_AND_SLIDING}", "model.rope_local_base_freq=9",
    ),
    "gemma": GEMMA,
    "latents": LATENTS,
    "latents, long rows": (*LONG, *LATENTS, "model.q_lora_rank=0", "data.document_mask=false"),
    "sigmoid experts": (*LATENTS, *ROUTED),
    "gemma, long rows": (*LONG, *GEMMA, "model.layer_types=[]"),
    "windows": ("model.sliding_window=50",),
    "dropout": ("train.hidden_dropout=0.1", "train.embedding_dropout=0.1"),
    "dropout, selective": ("train.hidden_dropout=0.1", "train.recompute=selective"),
    "dropout, full": ("train.hidden_dropout=0.1", "train.recompute=full"),
    "long plain rows, windows": (
        *LONG, "data.document_mask=false", "model.sliding_window=50", f"model.layer_types={FULL_AND_SLIDING}",
    ),
}  # fmt: skip
SHARED = ("model.shared_ffn_hidden_size=64", "model.shared_expert_gate=true")
TWO = {
    f"{sharding} {precision}": (f"parallel.sharding={sharding}", f"train.precision={precision}")
    for sharding in ("no_shard", "optim", "optim_grads", "optim_grads_params")
    for precision in ("bf16", "fp32")
} | {
    "pp": ("parallel.pp=2",),
    "pp fp32 untied": ("parallel.pp=2", "train.precision=fp32", "model.tie_embeddings=false"),
    "pp wave": ("parallel.pp=2", "parallel.schedule=zb_v", "parallel.stages_per_rank=2"),
    "pp uneven full": ("parallel.pp=2", "parallel.layers_per_stage=[1, 3]", "train.recompute=full"),
    "rank order": ("fsdp.grad_sum=rank_order", "model.tie_embeddings=false"),
    "tree": ("parallel.grad_sum=tree",),
    "tree no_shard": ("parallel.grad_sum=tree", "parallel.sharding=no_shard", "train.precision=fp32"),
    "tree split": ("parallel.grad_sum=tree", "parallel.pp=2", "parallel.schedule=zb_v", "parallel.stages_per_rank=2"),
    "narrow": ("fsdp.reduce_dtype=bfloat16", "fsdp.grad_dtype=bfloat16"),
    "last": ("fsdp.grad_reduce=last",),
    "replicas": ("parallel.dp_replicate=2", "parallel.sharding=optim_grads_params"),
    "muon": ("optimizer.name=muon",),
    "budget": ("fsdp.gathered_bytes=1100000", "model.tie_embeddings=false"),
    "bucket": ("fsdp.bucket_bytes=200000", "fsdp.reduce_buffers=1"),
    "fp8": ("train.precision=fp8",),
    "fp8 kept": ("train.precision=fp8", "parallel.sharding=optim"),
    "tp": ("parallel.tp=2",),
    "tp, every rank the whole sequence": ("parallel.tp=2", "parallel.sequence=false", "train.recompute=selective"),
    "tp full": ("parallel.tp=2", "train.recompute=full", "train.precision=fp32", "model.tie_embeddings=false"),
    "tp qwen": ("parallel.tp=2", "model.qkv_bias=true", "model.qk_norm=true", "parallel.sharding=no_shard"),
    "tp olmo": ("parallel.tp=2", *OLMO),
    "tp olmo full": ("parallel.tp=2", "train.recompute=full", "parallel.sequence=false", *OLMO),
    "tp norms before and behind": ("parallel.tp=2", "train.recompute=selective", "model.norm_position=both"),
    "experts tp olmo full": (
        "parallel.tp=2", "train.recompute=full", "parallel.sequence=false", "model.num_experts=4", *SHARED, *OLMO,
    ),
    "tp latents": ("parallel.tp=2", *LATENTS),
    "tp latents full": ("parallel.tp=2", "train.recompute=full", *LATENTS, "model.q_lora_rank=0"),
    "tp latents, every rank the whole sequence": ("parallel.tp=2", "parallel.sequence=false", *LATENTS),
    "cp latents": ("parallel.cp=2", "parallel.cp_comm_type=p2p", *LATENTS),
    "ep sigmoid experts": ("parallel.ep=2", *ROUTED),
    "muon latents": ("optimizer.name=muon", *LATENTS),
    "tp gemma": ("parallel.tp=2", *GEMMA),
    "ring gemma": ("parallel.cp=2", "parallel.cp_comm_type=p2p", *GEMMA),
    "tp long rows": ("parallel.tp=2", "data.seq_length=520", "model.num_layers=2", "train.micro_batch_size=1"),
    "cp": ("parallel.cp=2",),
    "cp plain rows": ("parallel.cp=2", "data.document_mask=false", "train.recompute=selective"),
    "cp full": ("parallel.cp=2", "train.recompute=full", "train.precision=fp32"),
    "cp long rows": ("parallel.cp=2", "data.seq_length=520", "model.num_layers=2", "train.micro_batch_size=1"),
    "cp long plain rows": ("parallel.cp=2", "data.seq_length=520", "data.document_mask=false", "model.num_layers=2"),
    "ring": ("parallel.cp=2", "parallel.cp_comm_type=p2p"),
    "ring plain rows": ("parallel.cp=2", "parallel.cp_comm_type=p2p", "data.document_mask=false"),
    "ring of windows": ("parallel.cp=2", "parallel.cp_comm_type=p2p", "model.sliding_window=50"),
    "cp of windows": (*LONG, "parallel.cp=2", "data.document_mask=false", "model.sliding_window=50"),
    "ring full": ("parallel.cp=2", "parallel.cp_comm_type=p2p", "train.recompute=full", "train.precision=fp32"),
    "experts": ("model.num_experts=4", "parallel.sharding=optim"),
    "experts fp8": ("model.num_experts=4", "train.precision=fp8", "parallel.tp=2", *SHARED),
    "ep fp8": ("model.num_experts=4", "parallel.ep=2", "train.precision=fp8"),
    "ep": ("model.num_experts=4", "parallel.ep=2"),
    "ep no_shard": ("model.num_experts=4", "parallel.ep=2", "parallel.sharding=no_shard"),
    "ep full": ("model.num_experts=4", "parallel.ep=2", "train.recompute=full", "train.precision=fp32"),
    "ep shared": (
        "model.num_experts=4", "parallel.ep=2", "model.shared_ffn_hidden_size=64", "model.shared_expert_gate=true",
        "model.dense_layers=1", "model.moe_ffn_hidden_size=64",
    ),
    "experts tp": ("model.num_experts=4", "parallel.tp=2", "train.recompute=selective"),
    "experts tp full": ("model.num_experts=4", "parallel.tp=2", "train.recompute=full", *SHARED),
    "experts tp, every rank the whole sequence": (
        "model.num_experts=4", "parallel.tp=2", "parallel.sequence=false", *SHARED,
    ),
    "experts tp full, every rank the whole sequence": (
        "model.num_experts=4", "parallel.tp=2", "parallel.sequence=false", "train.recompute=full", *SHARED,
    ),
}  # fmt: skip
FOUR = {
    "tp pp": ("parallel.tp=2", "parallel.pp=2"),
    "tp split": ("parallel.tp=2", "parallel.pp=2", "parallel.schedule=zb_h1"),
    "tp split full": ("parallel.tp=2", "parallel.pp=2", "parallel.schedule=zb_h1", "train.recompute=full"),
    "tp split selective": (
        "parallel.tp=2", "parallel.pp=2", "parallel.schedule=zb_h1", "train.recompute=selective",
    ),
    "tp dp": ("parallel.tp=2", "train.precision=fp32"),
    "cp tp": ("parallel.cp=2", "parallel.tp=2"),
    "ring of four": ("parallel.cp=4", "parallel.cp_comm_type=p2p"),
    "cp of four": ("parallel.cp=4", "model.tie_embeddings=false"),
    "cp pp": ("parallel.cp=2", "parallel.pp=2"),
    "ep cp": ("model.num_experts=4", "parallel.cp=2", "parallel.ep=4"),
    "ep tp": ("model.num_experts=4", "parallel.tp=2", "parallel.ep=2"),
    "ep pp": ("model.num_experts=4", "parallel.pp=2", "parallel.ep=2", "model.tie_embeddings=false"),
    "ep dp": ("model.num_experts=8", "parallel.ep=2", "parallel.sharding=optim_grads"),
    "ep in replicas": ("model.num_experts=4", "parallel.ep=2", "parallel.dp_replicate=2"),
    "ep rank order": ("model.num_experts=4", "parallel.ep=2", "fsdp.grad_sum=rank_order"),
    "ep narrow muon": (
        "model.num_experts=4", "parallel.ep=2", "fsdp.reduce_dtype=bfloat16", "optimizer.name=muon",
    ),
}  # fmt: skip
KNOWN = {1: ONE, 2: TWO, 4: FOUR}


CASES = [(ranks, case) for ranks, known in KNOWN.items() for case in known]
SAMPLE = {
    (1, "selective"), (1, "long rows"), (2, "optim bf16"), (2, "optim_grads_params fp32"), (2, "pp uneven full"),
    (2, "fp8"), (2, "ring"), (1, "long plain rows, windows"), (2, "experts tp, every rank the whole sequence"),
}  # fmt: skip


def pytest_generate_tests(metafunc):
    """The sample, or all cases."""
    if "measured" in metafunc.fixturenames:
        every = metafunc.config.getoption("--memory-matrix")
        metafunc.parametrize(("ranks", "case"), [one for one in CASES if every or one in SAMPLE], ids=str)


def config_of(ranks: int, overrides: tuple[str, ...]) -> TrainConfig:
    """One microbatch on each rank of dp; two where sums wait for the last one, three where a tree has them."""
    config = TrainConfig.from_text(MINIMAL, (*WIDE, *overrides))
    dp = ranks // config.parallel.world  # the degrees but dp
    batch = (
        config.train.micro_batch_size * dp * (1 + (config.fsdp.grad_reduce == "last") + 2 * (config.grad_sum == "tree"))
    )
    return TrainConfig.from_text(MINIMAL, (*WIDE, *overrides, f"train.global_batch_size={batch}"))


@pytest.fixture(scope="module")
def measured(request):
    """Bytes of every rank of every case."""
    found = {}
    every = request.config.getoption("--memory-matrix")
    for ranks, known in KNOWN.items():
        cases = {case: overrides for case, overrides in known.items() if every or (ranks, case) in SAMPLE}
        texts = [config_of(ranks, overrides).to_toml() for overrides in cases.values()]
        if ranks == 1:
            rows = [measured_rank(0, 1, texts)]
        elif texts:
            rows = ranktest.run_ranks(measured_rank, ranks, texts, timeout=120)
        for number, case in enumerate(cases):
            found[ranks, case] = [row[number] for row in rows]
    return found


def check_stored(layout, held):
    """What is stored is as planned; (the plan's total, what was measured), activations apart."""
    config = layout.config
    plan = layout.stored(layout.stages_of(held["pp_rank"]), held["data_rank"])
    alone = layout.parallel.dp * layout.parallel.cp == 1 and config.fsdp.gathered_bytes is None  # whole weights
    sharded = config.parallel.sharding == "optim_grads_params" and not alone
    fp32 = config.train.precision == "fp32"
    gathered = held["kept_gathered"] + held["gather_arena"]
    main = held["main_weights"]
    weights = (main if fp32 else held["gather_source"]) if sharded else gathered
    assert plan.parameters == pytest.approx(weights, rel=0.01)
    assert plan.optimizer == pytest.approx(held["moments"] + (0 if fp32 else main), rel=0.01)
    assert plan.gathered == pytest.approx(gathered if sharded else 0, rel=0.05)
    gradients = held["main_gradients"] + held["local_gradients"]
    reducing = held["reduce_buffers"] + held["reduce_scratch"]
    assert plan.gradients + plan.reducing == pytest.approx(gradients + reducing, rel=0.05)
    measured = weights + plan.gathered + gradients + reducing + plan.optimizer
    assert plan.total == pytest.approx(measured, rel=0.05)
    return plan.total, measured


@pytest.mark.slow
def test_memory_of_a_plan_is_what_a_run_holds(measured, ranks, case):
    config = config_of(ranks, KNOWN[ranks][case])
    layout = Layout(config, check_world(config, ranks), "cpu")
    balanced = 0.05 if config.parallel.ep == 1 else 0.1  # experts get what is routed to them
    for held in measured[ranks, case]:
        planned, stored = check_stored(layout, held)
        saved = sum(layout.activation_bytes(stage) for stage in layout.stages_of(held["pp_rank"]))
        assert saved == pytest.approx(held["activations"], rel=balanced)
        assert planned + saved == pytest.approx(stored + held["activations"], rel=0.05)


# Of what autograd saves a plan says the most there can be: of a frozen matrix it saves no input.
AMONG = 'train.frozen=["embedding", "layers.0", "layers.1.ffn", "layers.2-3.attention.q", "layers.3.ffn_norm"]'
FROZEN = {
    f"{sharding} {precision}": (AMONG, f"parallel.sharding={sharding}", f"train.precision={precision}")
    for sharding in ("no_shard", "optim", "optim_grads", "optim_grads_params")
    for precision in ("bf16", "fp32")
} | {
    "last": (AMONG, "fsdp.grad_reduce=last"),
    "tree": (AMONG, "parallel.grad_sum=tree"),
    "pp": (AMONG, "parallel.pp=2"),
    "tp": ('train.frozen=["layers.0", "layers.1.attention_norm", "norm", "head"]', "parallel.tp=2",
           "model.tie_embeddings=false"),
    "experts": ('train.frozen=["layers.*.ffn.experts.gate", "layers.1"]', "model.num_experts=4", "parallel.ep=2"),
    "lora": ("lora.rank=16", "train.precision=fp32"),
    "lora tp": ("lora.rank=16", "parallel.tp=2", 'lora.targets=["q", "out", "up", "down"]'),
    "lora pp": ("lora.rank=16", "parallel.pp=2", "model.tie_embeddings=false", "train.recompute=full"),
    "muon, fp8": (AMONG, "optimizer.name=muon", "train.precision=fp8"),
}  # fmt: skip


@pytest.mark.slow
def test_frozen_parts_have_no_gradients_and_no_moments_in_a_plan_as_in_a_run():
    configs = {case: config_of(2, overrides) for case, overrides in FROZEN.items()}
    rows = ranktest.run_ranks(measured_rank, 2, [config.to_toml() for config in configs.values()], timeout=120)
    for number, (case, config) in enumerate(configs.items()):
        layout = Layout(config, check_world(config, 2), "cpu")
        print(case)
        for held in (row[number] for row in rows):
            check_stored(layout, held)
            saved = sum(layout.activation_bytes(stage) for stage in layout.stages_of(held["pp_rank"]))
            assert held["activations"] <= 1.02 * saved
        planned, whole = plan_layout(config, 2, DEVICES["cpu"]), {}
        for row in rows:
            whole |= row[number]["state"]
        assert sum(planned.saved_bytes_R) == pytest.approx(sum(whole.values()), rel=0.01)


def test_a_checkpoint_of_a_plan_is_what_ranks_save(measured, ranks, case):
    """All ranks' shares together, each tensor once."""
    planned = plan_layout(config_of(ranks, KNOWN[ranks][case]), ranks, DEVICES["cpu"])
    whole = {}
    for held in measured[ranks, case]:
        whole |= held["state"]
    assert sum(planned.saved_bytes_R) == pytest.approx(sum(whole.values()), rel=0.01)


@pytest.mark.slow
def test_memory_of_snapshots_is_what_a_tier_states():
    """Heads of frames and their alignment come on top: 2 % of this small model."""
    config = TrainConfig.from_text(
        MINIMAL, (*WIDE, "model.hidden_size=512", "model.ffn_hidden_size=1536", "train.global_batch_size=4")
    )
    planned = plan_layout(config, 2, DEVICES["cpu"])
    stated = ranktest.run_ranks(stated_by_tier, 2, config.to_toml(), timeout=60)
    assert stated[0] == stated[1]
    domains = [f"rank {rank}" for rank in range(2)]
    for domain, nbytes in bytes_per_domain(planned.saved_bytes_R, domains).items():
        assert stated[0][domain] == pytest.approx(nbytes, rel=0.02), (domain, nbytes)


def test_traffic_of_a_plan_is_what_a_run_sends_over_each_axis(measured, ranks, case):
    """Over tp, cp and to experts elsewhere; of rows that are routed the expected number."""
    config = config_of(ranks, KNOWN[ranks][case])
    planned = plan_layout(config, ranks, DEVICES["cpu"]).traffic
    rows = measured[ranks, case]
    for axis, expected in (("tp", planned.tp), ("cp", planned.cp), ("ep", planned.ep)):
        sent = [held[f"{axis}_sent"] for held in rows]
        even = axis != "ep" or config.parallel.ep == 1
        # Of pipeline ranks a plan tells the one that sends most; 2 kB: the few numbers of a step.
        assert max(sent) == pytest.approx(expected, rel=0.01 if even else 0.15, abs=2000), (axis, sent)


FLIGHTS = {
    "1f1b": ("parallel.pp=2", "train.global_batch_size=8"),
    "1f1b fp32 untied": (
        "parallel.pp=2", "train.global_batch_size=8", "train.precision=fp32", "model.tie_embeddings=false",
    ),
}  # fmt: skip
WEIGHTS = ("parallel.pp=2", "parallel.sharding=no_shard", "train.clip_grad=0", "model.tie_embeddings=false")
VERSIONS = {
    f"{schedule} {precision}": (
        *WEIGHTS, f"parallel.schedule={schedule}", f"train.precision={precision}", f"train.global_batch_size={batch}",
    )
    for schedule, batch in (("pipedream", 2), ("pipedream_2bw", 4))
    for precision in ("bf16", "fp32")
}  # fmt: skip


@pytest.fixture(scope="module")
def flights(chosen):
    """Bytes of both ranks of every case of several microbatches in flight."""
    known = {case: overrides for case, overrides in (FLIGHTS | VERSIONS).items() if (case,) in chosen("flight")}
    configs = {case: TrainConfig.from_text(MINIMAL, (*WIDE, *overrides)) for case, overrides in known.items()}
    texts = [config.to_toml() for config in configs.values()]
    rows = ranktest.run_ranks(rank_in_flight, 2, texts, timeout=120)
    return {case: (configs[case], [row[n] for row in rows]) for n, case in enumerate(configs)}


@pytest.mark.parametrize("flight", FLIGHTS)
@pytest.mark.slow
def test_activations_of_a_plan_are_the_most_that_graphs_hold_with_several_microbatches_in_flight(flights, flight):
    """Beside them the plan counts inputs and outputs of stages that wait, which are no saved tensors: 2 to 4 % here."""
    config, rows = flights[flight]
    planned = plan_layout(config, 2, DEVICES["cpu"])
    assert planned.microbatches == 4
    assert [one.microbatches_held for one in planned.stages] == [2, 1]
    for plan, held in zip(planned.ranks, rows, strict=True):
        assert plan.activations == pytest.approx(held["activations"], rel=0.05)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("flight", VERSIONS)
def test_a_plan_of_versions_counts_main_weights_always(flights, flight):
    config, rows = flights[flight]
    for plan, held in zip(plan_layout(config, 2, DEVICES["cpu"]).ranks, rows, strict=True):
        assert plan.stored.optimizer == pytest.approx(held["main_weights"] + held["moments"], rel=0.01)
        assert plan.stored.parameters == pytest.approx(held["newest"], rel=0.01)
        assert plan.stored.gradients == pytest.approx(held["gradients"], rel=0.05)
        whole = held["versions"] + held["main_weights"] + held["moments"] + held["gradients"]
        assert plan.stored.total + plan.older == pytest.approx(whole, rel=0.05)
