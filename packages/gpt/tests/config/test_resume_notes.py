"""What a resume notes of a changed configuration: every key that trains or evaluates otherwise, and no other."""

from dataclasses import asdict

import pytest
from config_helpers import config_with
from gpt_helpers import tiny_config
from run_helpers import lines, losses

from sixfold.gpt import train
from sixfold.gpt.config.resume_rules import noted_changes, resume_changes

WHOLE = ("parallel.sharding=no_shard", "model.tie_embeddings=false", "train.clip_grad=0")
UNFLUSHED = (*WHOLE, "parallel.schedule=pipedream_2bw")
PIPEDREAM = (*WHOLE, "parallel.schedule=pipedream", "train.micro_batch_size=16")
EXPERTS = ("model.num_experts=4", "model.experts_per_token=2")
CHANGE = "data.changes=[{at = 800, weights = [1, 9]}]"  # behind step 50

# Keys of the tables that are free at a resume which change no number, or only how sums are rounded.
ALIKE = {
    "parallel": {
        "cp", "tp", "ep", "dp", "dp_replicate", "sequence", "tp_overlap", "cp_comm_type", "stages_per_rank", "sharding",
        "grad_sum",
    },
    "pipeline": {
        "waves", "steps", "group", "lookahead", "dynamic_shapes", "edges", "memory_cap", "plan_steps", "plan_seconds",
    },
    "fsdp": {
        "grad_sum", "gathered_bytes", "prefetch_bytes", "reduce_buffers", "align_bytes", "user_buffers", "bucket_bytes",
        "nccl_min_ctas", "nccl_max_ctas", "offload", "grad_reduce", "checks",
    },
    "checkpoint": {"every", "every_minutes", "keep", "keep_every", "background", "save_initial", "init_from", "resume"},
    "eval": {"every"},
    "log": {
        "every", "tensorboard", "wandb", "profile_steps", "memory_steps", "memory_ranks", "straggler_every",
        "straggler_factor", "timeline_steps", "digest_every",
    },
    "elastic": {
        "spares", "attempts", "hung_after_seconds", "replace", "dp", "memory_every", "memory_lazy", "memory_folder",
        "memory_replicas", "compare_replicas_every",
    },
    "run": {"dir", "device", "timeout_seconds"},
}  # fmt: skip
NOTED = [
    # before, what changes, keys that are noted
    (UNFLUSHED[1:2], UNFLUSHED, {"parallel.schedule", "train.clip_grad"}),
    (UNFLUSHED, WHOLE, {"parallel.schedule"}),
    (PIPEDREAM, (*PIPEDREAM, "parallel.pp=2"), {"parallel.pp"}),
    (
        (*PIPEDREAM, "parallel.pp=2"),
        (*PIPEDREAM, "parallel.pp=2", "parallel.layers_per_stage=[1, 3]"),
        {"parallel.layers_per_stage"},
    ),
    ((), ("train.batch_ramp=[[50, 32]]",), {"train.batch_ramp"}),
    ((), ("train.batch_ramp=[[99, 32]]",), {"train.batch_ramp"}),
    ((), (CHANGE,), {"data.changes"}),
    ((CHANGE,), (), {"data.changes"}),
    ((), ("data.changes=[{at = 800, drop = {wiki = [1, 2]}}]",), {"data.changes"}),
    ((), ("fsdp.grad_dtype=bfloat16",), {"fsdp.grad_dtype"}),
    ((), ("fsdp.reduce_dtype=bfloat16",), {"fsdp.reduce_dtype"}),
    ((), ("fsdp.cast_inputs=false",), {"fsdp.cast_inputs"}),
    ((), ("eval.batches=4",), {"eval.batches"}),
    (EXPERTS, (*EXPERTS, "train.micro_batch_size=2"), {"train.micro_batch_size"}),
]
NOT_NOTED = [
    ((), ("parallel.schedule=zb_h1", "parallel.pp=2")),
    (UNFLUSHED, (*UNFLUSHED, "parallel.pp=2")),  # a batch reads the version before the newest, at any pp
    ((), ("train.batch_ramp=[[0, 16]]",)),
    ((), ("train.batch_ramp=[[100, 32]]",)),  # behind the end
    ((CHANGE,), (CHANGE, "data.blend=['moved/wiki', 'moved/code']")),
    ((), ("train.micro_batch_size=2",)),
    (EXPERTS, (*EXPERTS, "train.recompute=full")),
    ((*EXPERTS, "model.router_aux_loss=0"), (*EXPERTS, "model.router_aux_loss=0", "train.micro_batch_size=2")),
    (("data.changes=[{at = 160, weights = [1, 9]}]",), ("data.changes=[{at = 160, weights = [1, 9]}]",)),
]


@pytest.mark.parametrize(("before", "after", "keys"), NOTED)
def test_a_resume_notes_what_trains_or_evaluates_otherwise(before, after, keys):
    old, new = config_with(*before), config_with(*after)
    resume_changes(old, new, step=50)
    assert noted_changes(old, new, step=50).keys() == keys


@pytest.mark.parametrize(("before", "after"), NOT_NOTED)
def test_a_resume_does_not_note_what_trains_alike(before, after):
    old, new = config_with(*before), config_with(*after)
    resume_changes(old, new, step=50)
    assert noted_changes(old, new, step=50) == {}


def test_every_key_of_a_free_table_is_noted_or_known_to_train_alike():
    noted = {key for *_, keys in NOTED for key in keys} | {"fsdp.main_dtype"}
    for table, keys in asdict(config_with()).items():
        if table in ALIKE:
            assert keys.keys() - ALIKE[table] == {key.partition(".")[2] for key in noted if key.startswith(f"{table}.")}


def test_a_note_says_what_was_and_what_is_by_the_names_of_datasets():
    after = ("train.batch_ramp=[[60, 32]]", "data.changes=[{at = 800, weights = [1, 9], drop = {'data/code' = [3]}}]")
    assert noted_changes(config_with(), config_with(*after), step=50) == {
        "train.batch_ramp": [[], [[60, 32]]],
        "data.changes": [[], [{"at": 800, "weights": [1.0, 9.0], "drop": {"code": [3]}}]],
    }


@pytest.mark.slow
def test_a_resumed_run_writes_that_its_schedule_its_batch_and_its_blend_are_others(tmp_path):
    begin = ("model.num_layers=1", "schedule.shape=constant", "train.clip_grad=0", "parallel.sharding=no_shard")
    train(tiny_config(tmp_path, *begin, "train.steps=2"))
    config = tiny_config(
        tmp_path, *begin, "train.steps=3", "parallel.schedule=pipedream_2bw", "train.batch_ramp=[[2, 16]]",
        "data.changes=[{at = 16, weights = [1, 9]}]",
    )  # fmt: skip
    train(config)
    [resume] = lines(config, "resume")
    assert resume["changed"] == {
        "parallel.schedule": ["one_f_one_b", "pipedream_2bw"],
        "train.batch_ramp": [[], [[2, 16]]],
        "data.changes": [[], [{"at": 16, "weights": [1.0, 9.0]}]],
    }
    assert len(losses(config)) == 3
