"""Rules between tables, between a configuration and its world, and between a run and its past."""

import pytest
from config_helpers import config_with, words_of

from sixfold.gpt.config.batch_schedule import batch_size
from sixfold.gpt.config.resume_rules import noted_changes
from sixfold.gpt.config.train_config import check_world, resume_changes
from sixfold.gpt.errors import ConfigError
from sixfold.pipeline.schedules import by_name, registered


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.global_batch_size=18", "is 18 and train.micro_batch_size * parallel.dp is 4 * 1 = 4"),
        ("train.global_batch_size=18", "16 or 20 works"),
        ("train.batch_ramp=[[2, 6]]", "train.batch_ramp[0][1] is 6"),
        ("parallel.tp=3", "model.num_attention_heads is 4 and parallel.tp is 3; tp divides it: parallel.tp = 2 works"),
        ("parallel.layers_per_stage=[2, 2]", "has 2 entries and parallel.pp * stages_per_rank is 1"),
        ("parallel.layers_per_stage=[3]", "parallel.layers_per_stage sums to 3 and model.num_layers is 4"),
        ("parallel.stages_per_rank=2", "'looped_bfs' or 'v_half' or 'v_min' or 'zb_interleaved' or 'zb_v' takes"),
        ("parallel.schedule=zb_v", "'zb_v' puts 2 stages on a rank; parallel.stages_per_rank = 2 works"),
        ("pipeline.group=-1", "pipeline.group is -1; it is >= 0"),
        ("pipeline.group=4", "pipeline.group = 0 works, or parallel.schedule = 'interleaved'"),
        ("pipeline.waves=1", "pipeline.waves = 0 works, or parallel.schedule = 'hanayo'"),
        ("parallel.schedule=hanayo", "a wave is two stages on a rank: parallel.stages_per_rank = 2 works"),
        ("schedule.shape=constant and schedule.min_lr_ratio=0.5", "which never falls"),
        ("data.valid=['v'] and data.split=90,10,0", "with which nothing is split; give one of them"),
        ("schedule.decay_steps=10", "it is 0 unless the shape is 'wsd'"),
    ],
)  # fmt: skip
def test_tables_that_contradict_each_other_are_named_with_both_numbers(override, expected):
    with pytest.raises(ConfigError) as error:
        config_with(*override.split(" and "))
    assert expected in words_of(error)


def test_a_search_that_outlasts_those_who_wait_for_it_is_refused_with_values_that_work():
    planned = ("parallel.schedule=plan", "parallel.pp=2", "train.batch_ramp=[[1, 8], [2, 12], [3, 8]]")
    slow = (*planned, "pipeline.plan_seconds=20", "run.timeout_seconds=60")
    with pytest.raises(ConfigError) as error:
        config_with(*slow)
    said = words_of(error)
    assert "pipeline.plan_seconds is 20 for each of 3 global batch sizes, and run.timeout_seconds 60" in said
    assert "pipeline.plan_seconds = 10 works, or run.timeout_seconds = 120" in said
    config_with(*slow, "pipeline.plan_seconds=10")
    config_with(*slow, "run.timeout_seconds=120")
    config_with(*slow, "parallel.pp=1")


VERSIONS = ("parallel.pp=2", "parallel.sharding=no_shard", "train.clip_grad=0", "model.tie_embeddings=false")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("parallel.sharding=optim", "parallel.sharding is 'optim' and parallel.schedule 'pipedream_2bw'"),
        ("train.clip_grad=1.0", "train.clip_grad = 0.0 works"),
        ("model.tie_embeddings=true", "first and last stage are updated at different times"),
        ("train.compile=true", "train.compile = false works"),
        ("fsdp.gathered_bytes=100000", "fsdp.gathered_bytes is 100000"),
        ("fsdp.prefetch_bytes=1", "leave the key out"),
        ("fsdp.offload=true", "fsdp.offload = false works"),
        ("pipeline.edges=one", "where batches overlap; pipeline.edges = 'auto' works"),
        ("log.timeline_steps=[2]", "log.timeline_steps is [2] and parallel.schedule 'pipedream_2bw'"),
        ("log.timeline_steps=[2]", "log.profile_steps traces it; log.timeline_steps = [] works"),
        ("parallel.pp=8 and parallel.dp=1 and train.global_batch_size=8", "takes 7 or more"),
        ("parallel.schedule=pipedream and parallel.dp=1", "updates after each: train.global_batch_size = 4 works"),
    ],
)
def test_what_versions_of_weights_cannot_do_is_refused(override, expected):
    with pytest.raises(ConfigError) as error:
        config_with("parallel.schedule=pipedream_2bw", *VERSIONS, *override.split(" and "))
    assert expected in words_of(error)
    config_with("parallel.schedule=pipedream_2bw", *VERSIONS, "fsdp.grad_sum=rank_order")
    config_with("parallel.schedule=pipedream", *VERSIONS, "train.global_batch_size=4")


def test_microbatches_of_pipedream_are_counted_again_in_its_world():
    config = config_with("parallel.schedule=pipedream", *VERSIONS)
    assert check_world(config, 8).dp == 4
    with pytest.raises(ConfigError, match=r"updates after each: train\.global_batch_size = 8 works"):
        check_world(config, 4)


def test_groups_smaller_than_the_pipeline_are_refused_with_one_that_works():
    with pytest.raises(ConfigError, match=r"pipeline\.group is 1 and parallel\.pp 2; .* pipeline\.group = 2 works"):
        config_with("parallel.pp=2", "parallel.schedule=interleaved", "pipeline.group=1")


def test_warmup_and_decay_that_overlap_are_refused_with_the_room_there_is():
    with pytest.raises(ConfigError, match=r"schedule\.decay_steps = 70 works"):
        config_with("schedule.shape=wsd", "schedule.warmup_steps=30", "schedule.decay_steps=80")


@pytest.mark.parametrize(
    "override",
    [
        "pipeline.steps=3", "fsdp.user_buffers=require", "fsdp.nccl_min_ctas=4", "fsdp.nccl_max_ctas=4",
        "train.cuda_graphs=true", "data.changes=[{at = 64, sequence_length = 64}]",
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_key_with_what_to_use(override):
    with pytest.raises(ConfigError) as error:
        config_with(*override.split(" and "))
    assert words_of(error).startswith(override.partition("=")[0] + " is ")
    assert "is not supported: use " in words_of(error)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            "[{at = 70, weights = [1, 2]}]",
            "data.changes[0].at is 70, inside a step; it is where a step begins: 64 or 80",
        ),
        ("[{at = 64, weights = [1]}]", "data.changes[0].weights has 1 entries and the blend has 2"),
        ("[{at = 64, blend = ['a'], weights = [1, 2]}]", "weights has 2 entries and the blend has 1"),
        ("[{at = 64}]", "data.changes[0] at 64 changes nothing"),
        ("[{at = 64, blend = ['a']}, {at = 64, blend = ['b']}]", "data.changes[1].at is 64, and 64 comes before it"),
    ],
)
def test_a_change_of_the_blend_that_cannot_work_is_refused(changes, words):
    with pytest.raises(ConfigError) as error:
        config_with(f"data.changes={changes}")
    assert words in words_of(error)


def test_a_change_lies_on_a_step_of_the_ramp():
    change = "data.changes=[{at = 96, weights = [1, 2]}]"  # 4 steps of 16, then one of 32
    assert config_with("train.batch_ramp=[[4, 32]]", change).data.changes[0].at == 96
    with pytest.raises(ConfigError, match=r"at is 96, inside a step; it is where a step begins: 80 or 112 works"):
        config_with("train.batch_ramp=[[5, 32]]", change)


@pytest.mark.parametrize("order", ["megatron", "apportioned"])
def test_an_order_with_an_index_takes_no_changes_and_no_other_number_of_steps(order):
    with pytest.raises(ConfigError, match=rf"data\.order is '{order}', whose index is built for one blend"):
        config_with(f"data.order={order}", "data.changes=[{at = 64, blend = ['a']}]")
    with pytest.raises(ConfigError, match=r"cannot change train\.steps"):
        resume_changes(config_with(f"data.order={order}"), config_with(f"data.order={order}", "train.steps=200"))


@pytest.mark.parametrize("order", ["megatron", "apportioned"])
def test_an_order_with_an_index_has_no_blocks_of_documents(order):
    with pytest.raises(ConfigError, match=r"data\.document_shuffle is 'block' .* = 'auto' works"):
        config_with(f"data.order={order}", "data.document_shuffle=block")
    if order == "megatron":
        with pytest.raises(ConfigError, match=r"data\.deal is 'permuted' .*; data\.deal = 'in_turn' works"):
            config_with(f"data.order={order}", "data.deal=permuted")
    with pytest.raises(ConfigError, match=r"data\.packing is 'best_fit' .*; data\.order = 'stateless' works"):
        config_with(f"data.order={order}", "data.packing=best_fit")


def test_a_resumed_run_may_change_the_blend_ahead_of_it_alone():
    past, future = "{at = 32, blend = ['data/wiki']}", "{at = 64, blend = ['data/code']}"
    both = config_with(f"data.changes=[{past}, {future}]")
    resume_changes(both, config_with(f"data.changes=[{past}]"), step=4)
    resume_changes(both, config_with(f"data.changes=[{past.replace('data', 'moved')}]"), step=4)
    with pytest.raises(ConfigError, match=r"cannot change data\.changes"):
        resume_changes(both, config_with(f"data.changes=[{future}]"), step=4)


@pytest.mark.parametrize(
    ("overrides", "world", "dp"), [((), 1, 1), ((), 4, 4), (("parallel.pp=2",), 2, 1), (("parallel.pp=2",), 8, 4)]
)
def test_dp_is_what_the_world_leaves(overrides, world, dp):
    config = config_with(*overrides)
    parallel = check_world(config, world)
    assert parallel.dp == dp
    assert parallel.world == world


def test_the_world_nobody_gave_is_the_product_of_the_degrees():
    assert config_with("parallel.pp=4").parallel.world == 4
    assert config_with("parallel.pp=2", "parallel.dp=2").parallel.world == 4


@pytest.mark.parametrize(
    ("overrides", "world", "expected"),
    [
        (("parallel.pp=3",), 4, ("= 3", "world of 4", "3 or 6 works", "parallel.pp = 2 with parallel.dp = 2")),
        (("parallel.pp=2", "parallel.dp=2"), 3, ("is 4 ranks, and 3 are there", "a world of 4 works")),
        ((), 3, ("train.global_batch_size is 16", "4 * 3 = 12", "12 or 24 works")),
        ((), 0, ("a world of 1 works",)),
        (("parallel.dp_replicate=3",), 4, ("parallel.dp_replicate is 3 and parallel.dp 4", "= 2 works")),
    ],
)
def test_a_world_that_does_not_fit_is_named_with_a_value_that_works(overrides, world, expected):
    with pytest.raises(ConfigError) as error:
        check_world(config_with(*overrides), world)
    for words in expected:
        assert words in words_of(error)


@pytest.mark.parametrize(
    "override",
    [
        "parallel.pp=2", "pipeline.lookahead=1", "fsdp.grad_sum=rank_order", "checkpoint.every=5", "eval.every=5",
        "log.every=5", "run.dir=elsewhere", "train.steps=200", "train.micro_batch_size=2", "train.recompute=full",
        "data.blend=['moved/wiki', 'moved/code']", "data.cache_dir=elsewhere", "train.batch_ramp=[[50, 32]]",
        "data.document_shuffle=block", "data.max_epochs=0", "pipeline.edges=one", "checkpoint.every_minutes=0",
        "optimizer.weight_decay=0", "optimizer.beta2=0.99", "optimizer.eps=1", "train.precision=fp32",
        "train.precision=fp8", "train.compile=true", "train.deterministic=true", "train.batch_ramp=[[0, 16]]",
        "train.float8_products=true",
        "train.batch_ramp=[[0, 16], [50, 32]]", "data.tokenizer=moved/tokenizer.json", "data.eod_token=</s>",
    ],
)  # fmt: skip
def test_a_resumed_run_may_change_what_leaves_its_past_alone(override):
    resume_changes(config_with(), config_with(override), step=50)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.norm_eps=1e-6", "model.norm_eps"), ("data.seq_length=64", "data.seq_length"),
        ("data.blend=['data/code', 'data/wiki']", "data.blend"), ("train.seed=1", "train.seed"),
        ("train.global_batch_size=32", "train.global_batch_size"), ("model.rope_theta=5e5", "model.rope_theta"),
        ("optimizer.name=muon", "optimizer.name"), ("train.batch_ramp=[[49, 32]]", "train.batch_ramp"),
        ("data.names=['a', 'b']", "data.blend"),
    ],
)  # fmt: skip
def test_a_resumed_run_refuses_what_would_have_changed_its_past(override, key):
    with pytest.raises(ConfigError, match=rf"cannot change {key} \(was "):
        resume_changes(config_with(), config_with(override), step=50)


@pytest.mark.parametrize("override", ["data.tokenizer=other.json", "data.eod_token=</s>"])
def test_a_resumed_run_whose_loss_mask_reads_the_end_of_a_document_keeps_who_says_it(override):
    masked = "data.eod_mask_loss=true"
    with pytest.raises(ConfigError, match=rf"cannot change {override.partition('=')[0]} \(was "):
        resume_changes(config_with(masked), config_with(masked, override), step=50)
    with pytest.raises(ConfigError, match=r"cannot change data\.eod_mask_loss \(was True, is False\)"):
        resume_changes(config_with(masked), config_with(override), step=50)


@pytest.mark.parametrize("override", ["data.tokenizer=moved/tokenizer.json", "data.eod_token=</s>"])
def test_a_loss_mask_takes_another_name_of_the_same_end(override):
    masked = "data.eod_mask_loss=true"
    resume_changes(config_with(masked), config_with(masked, override), step=50, same_end=True)
    with pytest.raises(ConfigError, match=r"cannot change data\.eod_mask_loss \(was True, is False\)"):
        resume_changes(config_with(masked), config_with(override), step=50, same_end=True)


def test_all_changes_of_a_resumed_run_are_named_at_once():
    with pytest.raises(ConfigError) as error:
        resume_changes(config_with(), config_with("train.seed=1", "model.norm_eps=1"), step=50)
    assert "train.seed (was 1234, is 1)" in words_of(error)
    assert "model.norm_eps (was 1e-05, is 1.0)" in words_of(error)


@pytest.mark.parametrize("ramp", ["[]", "[[20, 32]]", "[[0, 8], [20, 32], [40, 16]]"])
def test_the_ramp_that_an_error_names_takes_another_batch_from_here_on_and_keeps_the_past(ramp):
    old = config_with(f"train.batch_ramp={ramp}", "train.micro_batch_size=1")
    wanted = ("train.global_batch_size=24", f"train.batch_ramp={ramp}", "train.micro_batch_size=1")
    if ramp == "[[0, 8], [20, 32], [40, 16]]":
        with pytest.raises(ConfigError, match="has no such batch"):  # no step has it: it would change nothing
            config_with(*wanted)
        return
    with pytest.raises(ConfigError) as error:
        resume_changes(old, config_with(*wanted), step=50)
    advice = (
        words_of(error).partition("for 24 from step 50 on: ")[2].replace("train.batch_ramp = ", "train.batch_ramp=")
    )
    new = config_with(*wanted, advice)
    resume_changes(old, new, step=50)
    assert [batch_size(new, step) for step in range(50)] == [batch_size(old, step) for step in range(50)]
    assert {batch_size(new, step) for step in range(50, 100)} == {24}


@pytest.mark.parametrize("order", ["megatron", "apportioned"])
def test_an_order_with_an_index_takes_no_other_batches_ahead_of_a_run(order):
    with pytest.raises(ConfigError, match=r"cannot change train\.batch_ramp"):
        resume_changes(
            config_with(f"data.order={order}"),
            config_with(f"data.order={order}", "train.batch_ramp=[[50, 32]]"),
            step=50,
        )


def test_a_branch_changes_learning_rate_schedule_clipping_decay_and_precision_and_says_so():
    trunk = config_with("schedule.shape=constant")
    branch = config_with(
        "schedule.shape=wsd", "schedule.decay_steps=20", "optimizer.lr=2e-3", "train.clip_grad=0.5",
        "optimizer.weight_decay=0", "train.precision=fp32",
    )  # fmt: skip
    resume_changes(trunk, branch, step=50)
    assert noted_changes(trunk, trunk) == {}
    assert noted_changes(trunk, branch) == {
        "optimizer.lr": [1e-3, 2e-3], "train.clip_grad": [1.0, 0.5], "schedule.shape": ["constant", "wsd"],
        "schedule.decay_steps": [0, 20], "optimizer.weight_decay": [0.1, 0.0], "train.precision": ["bf16", "fp32"],
    }  # fmt: skip


@pytest.mark.parametrize("name", [entry.name for entry in registered()])
def test_every_schedule_of_the_pipeline_package_is_taken_by_name(name):
    entry = by_name(name)
    options = [
        f"parallel.stages_per_rank={1 if entry.chunks == 1 else 2}",
        "parallel.pp=2",
        f"parallel.schedule={name}",
    ]
    if not entry.flushed:
        options += [*VERSIONS, *(["train.global_batch_size=4"] if name == "pipedream" else [])]
    assert config_with(*options).parallel.entry is entry
    assert by_name(config_with("parallel.pp=2", "parallel.schedule=plan").parallel.entry.name).split
