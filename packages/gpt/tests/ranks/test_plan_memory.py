"""What ``sixfold plan`` says of a rank's memory, beside what a run of that layout holds on this machine.

nox -s full, or nox -s "ranks(gpt)" -- --memory-matrix      all cases; a sample without it
"""

from __future__ import annotations

import pytest
from config_helpers import MINIMAL
from plan_helpers import measured_rank, rank_in_flight

import ranktest
from sixfold.gpt import TrainConfig
from sixfold.gpt.checks import check_world
from sixfold.gpt.devices import DEVICES
from sixfold.gpt.layout import Layout
from sixfold.gpt.plan import plan_layout

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
}
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
    "narrow": ("fsdp.reduce_dtype=bfloat16", "fsdp.grad_dtype=bfloat16"),
    "last": ("fsdp.grad_reduce=last",),
    "replicas": ("parallel.dp_replicate=2", "parallel.sharding=optim_grads_params"),
    "muon": ("optimizer.name=muon",),
    "budget": ("fsdp.gathered_bytes=1100000", "model.tie_embeddings=false"),
    "bucket": ("fsdp.bucket_bytes=200000", "fsdp.reduce_buffers=1"),
    "fp8": ("train.precision=fp8",),
    "fp8 kept": ("train.precision=fp8", "parallel.sharding=optim"),
}


CASES = [(1, case) for case in ONE] + [(2, case) for case in TWO]
SAMPLE = {
    (1, "bf16"), (1, "selective"), (1, "long rows"), (1, "qwen"), (2, "no_shard bf16"), (2, "optim bf16"),
    (2, "optim_grads bf16"), (2, "optim_grads_params fp32"), (2, "pp wave"), (2, "pp uneven full"), (2, "fp8"),
}  # fmt: skip


def pytest_generate_tests(metafunc):
    """The sample, or all cases."""
    if "measured" in metafunc.fixturenames:
        every = metafunc.config.getoption("--memory-matrix")
        metafunc.parametrize(("ranks", "case"), [one for one in CASES if every or one in SAMPLE], ids=str)


def config_of(ranks: int, overrides: tuple[str, ...]) -> TrainConfig:
    """One microbatch on each rank of dp; two where it is said that sums wait for the last one."""
    config = TrainConfig.from_text(MINIMAL, (*WIDE, *overrides))
    batch = config.train.micro_batch_size * ranks // config.parallel.pp * (1 + (config.fsdp.grad_reduce == "last"))
    return TrainConfig.from_text(MINIMAL, (*WIDE, *overrides, f"train.global_batch_size={batch}"))


@pytest.fixture(scope="module")
def measured(request):
    """Bytes of every rank of every case."""
    found = {}
    every = request.config.getoption("--memory-matrix")
    for ranks, known in ((1, ONE), (2, TWO)):
        cases = {case: overrides for case, overrides in known.items() if every or (ranks, case) in SAMPLE}
        texts = [config_of(ranks, overrides).to_toml() for overrides in cases.values()]
        if ranks == 1:
            rows = [measured_rank(0, 1, texts)]
        else:
            rows = ranktest.run_ranks(measured_rank, ranks, texts, timeout=120)
        for number, case in enumerate(cases):
            found[ranks, case] = [row[number] for row in rows]
    return found


def test_memory_of_a_plan_is_what_a_run_holds(measured, ranks, case):
    config = config_of(ranks, {1: ONE, 2: TWO}[ranks][case])
    layout = Layout(config, check_world(config, ranks), "cpu")
    for held in measured[ranks, case]:
        stages = layout.stages_of(held["pp_rank"])
        plan = layout.stored(stages, held["data_rank"])
        sharded = config.parallel.sharding == "optim_grads_params"
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
        assert plan.total == pytest.approx(weights + plan.gathered + gradients + reducing + plan.optimizer, rel=0.05)
        saved = sum(layout.activation_bytes(stage) for stage in stages)
        assert saved == pytest.approx(held["activations"], rel=0.05)


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
def flights():
    """Bytes of both ranks of every case of several microbatches in flight."""
    known = FLIGHTS | VERSIONS
    configs = {case: TrainConfig.from_text(MINIMAL, (*WIDE, *overrides)) for case, overrides in known.items()}
    texts = [config.to_toml() for config in configs.values()]
    rows = ranktest.run_ranks(rank_in_flight, 2, texts, timeout=120)
    return {case: (configs[case], [row[n] for row in rows]) for n, case in enumerate(configs)}


@pytest.mark.parametrize("case", FLIGHTS)
def test_activations_of_a_plan_are_the_most_that_graphs_hold_with_several_microbatches_in_flight(flights, case):
    """Beside them the plan counts inputs and outputs of stages that wait, which are no saved tensors: 2 to 4 % here."""
    config, rows = flights[case]
    planned = plan_layout(config, 2, DEVICES["cpu"])
    assert planned.microbatches == 4
    assert [one.microbatches_held for one in planned.stages] == [2, 1]
    for plan, held in zip(planned.ranks, rows, strict=True):
        assert plan.activations == pytest.approx(held["activations"], rel=0.05)


@pytest.mark.parametrize("case", VERSIONS)
def test_a_plan_of_versions_counts_main_weights_always(flights, case):
    config, rows = flights[case]
    for plan, held in zip(plan_layout(config, 2, DEVICES["cpu"]).ranks, rows, strict=True):
        assert plan.stored.optimizer == pytest.approx(held["main_weights"] + held["moments"], rel=0.01)
        assert plan.stored.parameters == pytest.approx(held["newest"], rel=0.01)
        assert plan.stored.gradients == pytest.approx(held["gradients"], rel=0.05)
        whole = held["versions"] + held["main_weights"] + held["moments"] + held["gradients"]
        assert plan.stored.total + plan.older == pytest.approx(whole, rel=0.05)
