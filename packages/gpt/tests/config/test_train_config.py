"""TOML and overrides to a checked configuration and back."""

import dataclasses
import subprocess
import sys
import tomllib

import pytest
from config_helpers import MINIMAL, config_with, without, words_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sixfold.gpt.config.train_config import DataConfig, GPTConfig, TrainConfig
from sixfold.gpt.errors import ConfigError

# The documented defaults, written down apart from the code. Keys without default are in REQUIRED.
DEFAULTS = """
[model]
vocab_multiple = 128
rope_theta = 10000.0
rope_scaling = {}
norm_eps = 1e-5
tie_embeddings = true
qk_norm = false
qkv_bias = false
init_std = 0.02
sliding_window = 0
layer_types = []
rope_local_base_freq = 0.0
qk_norm_over = "head"
norm_position = "pre"
zero_centered_norm = false
hidden_act = "silu"
scale_embeddings = false
query_pre_attn_scalar = 0.0
attn_logit_softcapping = 0.0
final_logit_softcapping = 0.0
q_lora_rank = 0
kv_lora_rank = 0
qk_nope_head_dim = 0
qk_rope_head_dim = 0
v_head_dim = 0
rope_interleave = false
num_experts = 0
experts_per_token = 2
router_aux_loss = 0.01
moe_ffn_hidden_size = 0
shared_ffn_hidden_size = 0
shared_expert_gate = false
norm_topk_prob = true
dense_layers = 0
scoring_func = "softmax"
n_group = 1
topk_group = 1
routed_scaling_factor = 1.0
expert_bias = false
expert_bias_update_rate = 0.001
num_query_groups = 4
head_dim = 16

[data]
weights = []
valid = []
names = []
changes = []
eod_mask_loss = false
split = "98,2,0"
order = "stateless"
packing = "concatenate"
deal = "auto"
blend_unit = "rows"
document_shuffle = "auto"
max_epochs = 4.0
document_mask = true
cache_dir = ""
tokenizer = ""
eod_token = ""

[parallel]
pp = 1
cp = 1
tp = 1
ep = 1
dp = 0
dp_replicate = 1
sequence = true
tp_overlap = false
cp_comm_type = "all_gather"
schedule = "one_f_one_b"
stages_per_rank = 1
layers_per_stage = []
sharding = "optim_grads_params"

[pipeline]
waves = 0
steps = 2
group = 0
lookahead = 2
dynamic_shapes = false
edges = "auto"
memory_cap = 0.0
plan_steps = 2
plan_seconds = 5.0

[fsdp]
main_dtype = "float32"
grad_sum = "backend"
cast_inputs = true
reduce_buffers = 2
align_bytes = 128
user_buffers = "auto"
offload = false
grad_reduce = "auto"
checks = "order"

[train]
batch_ramp = []
seed = 1234
precision = "bf16"
deterministic = false
compile = false
float8_products = false
offload_activations = false
cuda_graphs = false
recompute = "none"
clip_grad = 1.0
z_loss = 0.0
label_smoothing = 0.0
hidden_dropout = 0.0
embedding_dropout = 0.0
attention_dropout = 0.0
frozen = []
tokens = 0

[lora]
rank = 0
alpha = 16.0
targets = ["q", "k", "v", "out", "gate", "up", "down"]
dropout = 0.0

[optimizer]
name = "adamw"
beta1 = 0.9
beta2 = 0.95
eps = 1e-8
weight_decay = 0.1
ema_decay = 0.0
ema_warmup = true

[schedule]
shape = "cosine"
warmup_steps = 0
decay_steps = 0
warmup_tokens = 0
decay_tokens = 0
decay = "linear"
min_lr_ratio = 0.1

[checkpoint]
every = 0
every_minutes = 30.0
keep = 2
keep_every = 0
background = true
save_initial = false
init_from = ""
resume = "auto"

[eval]
every = 0
batches = 8

[log]
every = 1
tensorboard = false
wandb = ""
profile_steps = []
memory_steps = []
memory_ranks = [0]
straggler_every = 100
straggler_factor = 2.0
timeline_steps = []
digest_every = 0

[elastic]
spares = 1
attempts = 3
hung_after_seconds = 10.0
replace = true
dp = []
memory_every = 1
memory_lazy = false
memory_folder = "/dev/shm"
memory_replicas = 1
compare_replicas_every = 0

[run]
device = "auto"
timeout_seconds = 600.0
"""
ABSENT = {
    "parallel": {"grad_sum"},
    "fsdp": {
        "reduce_dtype",
        "grad_dtype",
        "prefetch_bytes",
        "bucket_bytes",
        "gathered_bytes",
        "nccl_min_ctas",
        "nccl_max_ctas",
    },
}
REQUIRED = {
    "model": {"num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "vocab_size"},
    "data": {"blend", "seq_length"},
    "train": {"steps", "global_batch_size", "micro_batch_size"},
    "optimizer": {"lr"},
    "run": {"dir"},
}


def test_every_key_of_the_contract_exists_with_its_default():
    found, expected = dataclasses.asdict(config_with()), tomllib.loads(DEFAULTS)
    assert list(found) == list(expected)
    for table, keys in expected.items():
        absent = ABSENT.get(table, set())
        assert set(found[table]) == set(keys) | absent | REQUIRED.get(table, set())
        assert {key: value for key, value in found[table].items() if key in absent} == dict.fromkeys(absent)
        for key, value in keys.items():
            assert found[table][key] == (tuple(value) if isinstance(value, list) else value), f"{table}.{key}"


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model.tie_embeddings=false", "model.num_query_groups=2", "data.weights=[0.25, 0.75]", "train.clip_grad=0"),
        ("train.batch_ramp=[[3, 8], [10, 32]]", "fsdp.reduce_dtype=bfloat16", "fsdp.prefetch_bytes=0"),
        (r'run.dir="a\"b\\c\u007f é"', "data.split=90,5,5", "optimizer.eps=1e-20", "parallel.layers_per_stage=[4]"),
        (
            "model.rope_scaling={rope_type='llama3', factor=8, low_freq_factor=1, high_freq_factor=4, "
            "original_max_position_embeddings=8192}",
        ),
    ],
)
def test_to_toml_reads_back_as_the_same_configuration(overrides, tmp_path):
    config = config_with(*overrides)
    path = tmp_path / "config.toml"
    path.write_text(config.to_toml(), encoding="utf-8")
    assert TrainConfig.from_toml(path) == config
    assert TrainConfig.from_toml(path).to_toml() == config.to_toml()


@settings(max_examples=40, deadline=None)
@given(name=st.text(min_size=1).filter(str.isprintable) | st.characters(codec="utf-8"), lr=st.floats(0, 1e300))
@pytest.mark.slow
def test_any_text_and_number_survives_to_toml(name, lr):
    assume("://" not in name and not name.startswith("~"))  # refused in run.dir
    config = config_with()
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, tokenizer=name),
        optimizer=dataclasses.replace(config.optimizer, lr=lr),
    )
    assert TrainConfig.from_text(config.to_toml()) == config


def test_an_override_is_toml_or_else_a_text():
    config = config_with(
        "optimizer.lr=2e-4", "run.dir=runs/other", "train.steps=7", "data.blend=['x']", "fsdp.gathered_bytes=all",
        "data.cache_dir=2026", "optimizer.weight_decay=0",
    )  # fmt: skip
    assert (config.optimizer.lr, config.run.dir, config.train.steps, config.data.blend) == (
        2e-4,
        "runs/other",
        7,
        ("x",),
    )
    assert config.fsdp.gathered_bytes == "all"
    assert config.data.cache_dir == "2026"
    assert isinstance(config.optimizer.weight_decay, float)


def test_a_configuration_is_read_without_importing_torch(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(MINIMAL)
    code = (
        "import sys; from sixfold.gpt import TrainConfig; from sixfold.gpt.config.train_config import check_world\n"
        f"print(check_world(TrainConfig.from_toml({str(path)!r}), 2).dp, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["2", "False"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "optimizer.learning_rate=1",
            "optimizer.learning_rate is not a key of [optimizer]; the nearest is optimizer.lr",
        ),
        ("train.lr=1", "train.lr is not a key of [train]; the nearest is optimizer.lr"),
        ("train.batch_size=1", "train.batch_size is not a key of [train]; the nearest is train.global_batch_size"),
        ("train.stpes=1", "train.stpes is not a key of [train]; the nearest is train.steps"),
        ("optimiser.lr=1", "[optimiser] is not a table of the configuration; the nearest is [optimizer]"),
        ("train.precision=bf15", "train.precision is 'bf15'; it is one of bf16, fp32, fp8; the nearest is bf16"),
        ("parallel.schedule=1f1b", "parallel.schedule is '1f1b'; it is one of dualpipe_v, eager_one_f_one_b"),
        ("train.steps=10.5", "train.steps is 10.5 (float); it is a whole number"),
        ("train.steps=true", "train.steps is True (bool); it is a whole number"),
        ("train.deterministic=1", "train.deterministic is 1 (int); it is true or false"),
        ("optimizer.lr=fast", "optimizer.lr is 'fast' (str); it is a number"),
        ("optimizer.lr=nan", "optimizer.lr is nan; it is finite"),
        ("optimizer.lr=-1", "optimizer.lr is -1.0; it is >= 0"),
        ("optimizer.beta2=1", "optimizer.beta2 is 1.0; it is < 1"),
        ("optimizer.eps=0", "optimizer.eps is 0.0; it is > 0"),
        ("train.micro_batch_size=0", "train.micro_batch_size is 0; it is >= 1"),
        ("data.blend=data/wiki", "data.blend is 'data/wiki' (str); it is a list"),
        ("data.blend=[]", "data.blend is []"),
        ("data.blend=[1]", "data.blend[0] is 1 (int); it is a text"),
        ("data.weights=[1]", "data.weights has 1 entries and data.blend 2"),
        ("data.weights=[0, 0]", "at least one weight is > 0"),
        ("data.blend=['a/wiki', 'b/wiki']", "two datasets are called 'wiki'; tell them apart by data.names"),
        ("data.split=98,2", "data.split is '98,2'; it is three numbers"),
        ("data.split=0,1,1", "data.split is '0,1,1'; it is three numbers"),
        ("train.batch_ramp=[[1, 4, 4]]", "train.batch_ramp[0] is [1, 4, 4]; it is a list of 2 entries"),
        ("train.batch_ramp=[[5, 4], [3, 8]]", "train.batch_ramp starts at steps [5, 3]; they ascend"),
        ("model.hidden_size=66", "model.hidden_size is 66 and model.num_attention_heads 4"),
        ("model.num_query_groups=3", "groups divide heads: 2 works"),
        ("model.head_dim=15", "model.head_dim is 15; rotary positions need it even: 16 works"),
        ("model.rope_scaling={rope_type='dynamic'}", "rope_type = \"llama3\" with factor, high_freq_factor"),
        ("model.rope_scaling={rope_type='yarn', factor=8}", "missing: ['original_max_position_embeddings']"),
        ("model.rope_scaling={rope_type='linear', factor=2, beta_fast=1}", "not keys of linear: ['beta_fast']"),
        ("model.rope_scaling={rope_type='linear', factor=true}", "model.rope_scaling.factor is True; it is a number"),
        ("model.layer_types=['full_attention']", "model.layer_types has 1 entries and model.num_layers is"),
        ("model.rope_local_base_freq=5", "model.rope_local_base_freq is 5.0 and model.sliding_window 0"),
        ("model.qk_norm_over=projection", "model.qk_norm_over is 'projection' and model.qk_norm false"),
        ("model.layer_types=['local']", "it is one of full_attention, sliding_attention"),
        ("model.rope_scaling={rope_type='llama3', factor=8}", "missing: ['high_freq_factor'"),
        ("run.dir=", "run.dir is empty"),
        ("train.steps", "'train.steps' is not section.key=value"),
        ("steps=3", "'steps=3' is not section.key=value"),
    ],
)  # fmt: skip
def test_a_bad_key_or_value_is_one_error_that_says_what_works(override, expected):
    with pytest.raises(ConfigError) as error:
        config_with(override)
    assert expected in words_of(error)


@pytest.mark.parametrize("key", sorted(f"{table}.{key}" for table, keys in REQUIRED.items() for key in keys))
def test_a_missing_key_without_default_is_named(key):
    with pytest.raises(ConfigError, match=f"{key} is not given"):
        config_with(text=without(key.partition(".")[2]))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "No such file"),
        (b"[model\n", "not TOML"),
        (b"\xff", "not UTF-8"),
        (b"steps = 3\n", "steps = 3 is in no table; the nearest key is"),
        (b"train = 3\n", "it is a table: write [train]"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(content, expected, tmp_path):
    path = tmp_path / "tiny.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        TrainConfig.from_toml(path)
    assert expected in words_of(error)


def test_parameters_and_flops_are_the_sums_over_a_model_written_out():
    # Llama 3.2 1B: its published number of parameters, and the sum over its matrices.
    config = GPTConfig(
        num_layers=16, hidden_size=2048, num_attention_heads=32, num_query_groups=8, ffn_hidden_size=8192,
        vocab_size=128256, tie_embeddings=True,
    )  # fmt: skip
    assert config.num_parameters == 1_235_814_400
    matmul = 16 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192) + 128256 * 2048
    assert config.flops_per_token(4096) == 6 * matmul + 12 * 16 * 2048 * 4096
    assert config.padded_vocab_size == 128256
    assert dataclasses.replace(config, vocab_size=257).padded_vocab_size == 384


def test_parameters_of_a_mixture_count_all_experts_and_operations_those_of_a_token():
    # Qwen3-30B-A3B and Qwen1.5-MoE-A2.7B, as their config.json say: 30.5 and 14.3 billion, 3.3 and 2.7 active.
    qwen3 = GPTConfig(
        num_layers=48, hidden_size=2048, num_attention_heads=32, num_query_groups=4, head_dim=128, vocab_size=151936,
        ffn_hidden_size=6144, qk_norm=True, tie_embeddings=False, num_experts=128, experts_per_token=8,
        moe_ffn_hidden_size=768,
    )  # fmt: skip
    assert qwen3.num_parameters == 30_532_122_624
    attention = 2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128
    active = 48 * (attention + 128 * 2048 + 8 * 3 * 2048 * 768) + 151936 * 2048
    assert qwen3.flops_per_token(4096) == 6 * active + 12 * 48 * 32 * 128 * 4096
    qwen2 = GPTConfig(
        num_layers=24, hidden_size=2048, num_attention_heads=16, vocab_size=151936, ffn_hidden_size=5632,
        qkv_bias=True, tie_embeddings=False, num_experts=60, experts_per_token=4, moe_ffn_hidden_size=1408,
        shared_ffn_hidden_size=5632, shared_expert_gate=True, norm_topk_prob=False,
    )  # fmt: skip
    assert qwen2.num_parameters == 14_315_784_192
    first_dense = dataclasses.replace(qwen3, dense_layers=1)
    moe, dense = 128 * 2048 + 128 * 3 * 2048 * 768, 3 * 2048 * 6144
    assert qwen3.num_parameters - first_dense.num_parameters == moe - dense
    assert (first_dense.has_experts(0), first_dense.has_experts(1)) == (False, True)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_experts": 4, "experts_per_token": 5}, "different experts: model.experts_per_token = 4 works"),
        ({"num_experts": 4, "dense_layers": 2}, "no layer has experts: model.dense_layers = 1 works"),
        ({"num_experts": 4, "shared_expert_gate": True}, "so there is no shared expert"),
        *(
            ({key: value}, f"model.{key} is {str(value).lower()} and model.num_experts 0")
            for key, value in {
                "experts_per_token": 3, "router_aux_loss": 0.1, "moe_ffn_hidden_size": 8, "shared_ffn_hidden_size": 8,
                "shared_expert_gate": True, "norm_topk_prob": False, "dense_layers": 1,
            }.items()
        ),
    ],
)  # fmt: skip
def test_keys_of_experts_that_cannot_work_or_do_nothing_are_refused(fields, expected):
    with pytest.raises(ConfigError) as error:
        GPTConfig(
            num_layers=2, hidden_size=16, num_attention_heads=2, ffn_hidden_size=24, vocab_size=10, **fields
        )  # fmt: skip
    assert expected in words_of(error)


def test_dataset_names_do_not_depend_on_the_folder():
    assert DataConfig(blend=("/a/b/wiki", "code"), seq_length=8).dataset_names == ("wiki", "code")
    assert DataConfig(blend=("/a/wiki", "/b/wiki"), names=("en", "de"), seq_length=8).dataset_names == ("en", "de")
