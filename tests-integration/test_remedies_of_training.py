"""Remedies of gpt's errors: a configuration that is refused is changed as the text of the refusal says, and is taken.

Where the text names a key and a value, they are read out of it (config_remedies.py). Other words are followed by hand.
"""

import random
import re
from pathlib import Path

import pytest
from config_remedies import MINIMAL, Remedy, changed, overrides_of, refusal, remedies_in, toml_of
from remedy_helpers import entry_says, follow, said_by

from sixfold.gpt.config.train_config import TrainConfig

DIVIDES = "a degree does not divide what it splits"
LENGTH = "a degree does not divide the length of a row"
EXPERTS = "model.num_experts = 4"
VERSIONS = "a key does not go with versions of weights"
WHOLE = "parallel.schedule = 'pipedream_2bw'; parallel.sharding = 'no_shard'; train.clip_grad = 0.0"
ATTENTION = "the sizes of attention do not fit each other"
INDEX = "an order with an index cannot change"
PIPELINE = "a key of [pipeline] that the schedule does not read"
STAGES = "the schedule takes another number of stages on a rank"
FLOAT8 = "what float8 products need"
SHAPE = "a key of [schedule] that the shape does not read"
CHANGES = "data.changes = [{at = 32, weights = [1, 2]}]"
GROUPS = "the groups of experts do not fit the experts"
LATENT = "the widths of latent attention do not fit each other"
LORA = "what adapters do not go with"
TREE = "what a tree of gradients is not combined with"
NO_EFFECT = "a key of the model that another key leaves without effect"

# Heading of the entry, what is refused. The text names at least one remedy with its value.
NAMED = [
    (DIVIDES, "parallel.tp = 3"),
    (DIVIDES, "parallel.tp = 4; model.num_query_groups = 2"),
    (DIVIDES, "parallel.tp = 4; model.ffn_hidden_size = 90"),
    (DIVIDES, f"{EXPERTS}; parallel.ep = 3; parallel.dp = 3; train.global_batch_size = 12"),
    (LENGTH, "data.seq_length = 30; parallel.cp = 4"),
    (LENGTH, "data.seq_length = 30; parallel.tp = 4"),
    (LENGTH, "data.seq_length = 30; parallel.tp = 4; parallel.cp = 3"),
    ("parallel.ep splits no experts, or does not divide the ranks", "parallel.ep = 4"),
    ("parallel.ep splits no experts, or does not divide the ranks", f"{EXPERTS}; parallel.ep = 4; parallel.dp = 2"),
    ("parallel.dp_replicate does not divide parallel.dp", "parallel.dp = 4; parallel.dp_replicate = 3"),
    ("Muon beside tensor parallelism", "parallel.tp = 2; optimizer.name = 'muon'"),
    ("Muon beside fsdp.offload", "fsdp.offload = true; optimizer.name = 'muon'"),
    ("a key of an exchange that this layout does not have", "parallel.cp_comm_type = 'p2p'"),
    ("a key of an exchange that this layout does not have", "parallel.tp_overlap = true"),
    (
        "train.compile beside full recomputation on tp or cp ranks",
        "train.compile = true; train.recompute = 'full'; parallel.cp = 2",
    ),
    ("dropout in compiled layers", "train.hidden_dropout = 0.1; train.compile = true"),
    ("dropout in compiled layers", "train.embedding_dropout = 0.1; train.compile = true"),
    ("an average of weights in a narrow dtype", "optimizer.ema_decay = 0.9; fsdp.main_dtype = 'bfloat16'"),
    (FLOAT8, "train.float8_products = true; train.precision = 'fp32'"),
    (FLOAT8, "train.float8_products = true; run.device = 'cpu'"),
    (FLOAT8, "train.float8_products = true; data.seq_length = 30; train.micro_batch_size = 4"),
    (FLOAT8, "train.float8_products = true; data.seq_length = 42; parallel.cp = 3; train.micro_batch_size = 2"),
    (FLOAT8, "train.float8_products = true; lora.rank = 4"),
    ("activations of a CPU cannot be offloaded", "train.offload_activations = true; run.device = 'cpu'"),
    ("a memory snapshot on a CPU, or of a rank that is not there", "log.memory_steps = [1]; run.device = 'cpu'"),
    (VERSIONS, "parallel.schedule = 'pipedream_2bw'; train.clip_grad = 0.0"),
    (VERSIONS, "parallel.schedule = 'pipedream_2bw'; parallel.sharding = 'no_shard'"),
    (VERSIONS, f"{WHOLE}; train.compile = true"),
    (VERSIONS, f"{WHOLE}; train.frozen = ['embedding']"),
    (VERSIONS, f"{WHOLE}; parallel.pp = 2"),
    (VERSIONS, f"{WHOLE}; train.precision = 'fp8'"),
    (VERSIONS, f"{WHOLE}; pipeline.edges = 'one'"),
    (VERSIONS, f"{WHOLE}; fsdp.checks = 'off'; fsdp.reduce_dtype = 'bfloat16'"),
    (VERSIONS, f"{WHOLE}; {EXPERTS}"),
    (
        "weight versions need another number of microbatches",
        f"{WHOLE}; parallel.pp = 4; parallel.dp = 1; model.tie_embeddings = false; train.global_batch_size = 8",
    ),
    (
        "weight versions need another number of microbatches",
        "parallel.schedule = 'pipedream'; parallel.sharding = 'no_shard'; train.clip_grad = 0.0",
    ),
    (TREE, "parallel.grad_sum = 'tree'; parallel.dp = 6; train.global_batch_size = 96"),
    (TREE, "parallel.grad_sum = 'tree'; fsdp.main_dtype = 'bfloat16'"),
    (TREE, "parallel.grad_sum = 'tree'; fsdp.grad_reduce = 'last'"),
    (TREE, "parallel.grad_sum = 'tree'; fsdp.reduce_dtype = 'bfloat16'"),
    ("the global batch is no multiple of microbatches", "parallel.dp = 3"),
    ("the global batch is no multiple of microbatches", "train.batch_ramp = [[2, 6]]"),
    (STAGES, "parallel.schedule = 'zb_v'"),
    (STAGES, "parallel.stages_per_rank = 2"),
    (STAGES, "parallel.schedule = 'hanayo'"),
    (PIPELINE, "pipeline.waves = 1"),
    (PIPELINE, "pipeline.group = 2"),
    (PIPELINE, "pipeline.memory_cap = 1.0"),
    (
        "pipeline.group is smaller than parallel.pp",
        "parallel.schedule = 'interleaved'; parallel.pp = 4; parallel.stages_per_rank = 2; pipeline.group = 2; "
        "model.num_layers = 8",
    ),
    (
        "the search of a plan outlasts run.timeout_seconds",
        "parallel.schedule = 'plan'; parallel.pp = 2; run.timeout_seconds = 4",
    ),
    (SHAPE, "schedule.decay_steps = 10"),
    (SHAPE, "schedule.decay_tokens = 5120"),
    (SHAPE, "schedule.decay = 'cosine'"),
    (SHAPE, "schedule.shape = 'constant'; schedule.min_lr_ratio = 0.2"),
    (
        "warm-up and decay are longer than the run",
        "schedule.shape = 'wsd'; schedule.warmup_steps = 95; schedule.decay_steps = 10",
    ),
    (INDEX, f"data.order = 'megatron'; {CHANGES}"),
    (INDEX, "data.order = 'megatron'; data.document_shuffle = 'block'"),
    (INDEX, "data.order = 'megatron'; data.packing = 'best_fit'"),
    (INDEX, "data.order = 'megatron'; data.deal = 'permuted'"),
    ("data.changes changes inside a step", "data.changes = [{at = 30, weights = [1, 2]}]"),
    (ATTENTION, "model.num_query_groups = 3"),
    (ATTENTION, "model.hidden_size = 66"),
    (ATTENTION, "model.head_dim = 15"),
    (NO_EFFECT, "model.qk_norm_over = 'projection'"),
    (NO_EFFECT, "model.qk_norm_over = 'projection'; model.qk_norm = true; model.zero_centered_norm = true"),
    (LATENT, "model.q_lora_rank = 48"),
    (LATENT, "model.kv_lora_rank = 16; model.qk_nope_head_dim = 1; model.qk_rope_head_dim = 2; model.v_head_dim = 1"),
    (
        LATENT,
        "model.kv_lora_rank = 16; model.qk_nope_head_dim = 8; model.qk_rope_head_dim = 8; model.v_head_dim = 8; "
        "model.qk_norm = true",
    ),
    (GROUPS, f"{EXPERTS}; model.scoring_func = 'sigmoid'"),
    (GROUPS, f"{EXPERTS}; model.n_group = 3"),
    (GROUPS, f"{EXPERTS}; model.n_group = 2; model.topk_group = 1; model.experts_per_token = 3"),
    ("a key of experts in a dense model", "model.moe_ffn_hidden_size = 64"),
    ("keys of experts contradict each other", f"{EXPERTS}; model.experts_per_token = 6"),
    ("keys of experts contradict each other", f"{EXPERTS}; model.dense_layers = 4"),
    (NO_EFFECT, f"{EXPERTS}; model.hidden_act = 'gelu_pytorch_tanh'"),
    ("a word is none of those that the key takes", "train.precision = 'fp7'"),
    ("a word is none of those that the key takes", "optimizer.name = 'adam'"),
    ("a number is outside of what its key may hold", "train.steps = -1"),
    ("a number is outside of what its key may hold", "train.micro_batch_size = 0"),
    ("train.global_batch_size is no batch of the ramp", "train.batch_ramp = [[0, 4], [2, 8]]"),
    ("optimizer.ema_warmup without an average", "optimizer.ema_warmup = false"),
    ("a key of adapters without adapters", "lora.targets = ['q']"),
    (LORA, "lora.rank = 4; optimizer.name = 'muon'"),
    (LORA, "lora.rank = 4; train.frozen = ['embedding']"),
    (LORA, "lora.rank = 4; lora.dropout = 0.1"),
    (LORA, "lora.rank = 4; train.precision = 'fp8'"),
    (LORA, f"lora.rank = 4; {EXPERTS}"),
]


@pytest.mark.parametrize(("heading", "words"), NAMED)
def test_each_value_that_a_refusal_names_is_taken(heading, words):
    keys = overrides_of(words)
    said = refusal(keys)
    assert entry_says("gpt", heading, said), said
    remedies = remedies_in(said)
    assert any(remedy.works for remedy in remedies) or said.endswith(("takes several", "; it is >= 0", "; it is >= 1"))
    for remedy in remedies:
        after = refusal(changed(keys, remedy))
        if remedy.works:
            assert not after, f"{said}\n{remedy}\n{after}"
        else:
            assert after != said and leads_on(changed(keys, remedy)), f"{said}\n{remedy}\n{after}"


def leads_on(keys, world=0, most=16):
    """Whether following the first remedy of each refusal comes to a configuration that is taken."""
    for _ in range(most):
        said = refusal(keys, world)
        if not said:
            return True
        remedies = remedies_in(said)
        if not remedies:
            return False
        keys = changed(keys, remedies[0])
    return False


# Heading, what is refused, and what the text says in other words than a key with its value.
DESCRIBED = [
    ("a path begins with a tilde", "run.dir = '~/runs/a'", "run.dir = '/home/me/runs/a'"),
    ("a path is a URL", "run.dir = 's3://bucket/run'", "run.dir = '/mnt/bucket/run'"),
    ("run.dir is empty", "run.dir = ''", "run.dir = 'runs/name'"),
    ("a value is of another type than its key", "optimizer.lr = 'fast'", "optimizer.lr = 1e-3"),
    ("a value is of another type than its key", "log.timeline_steps = 10", "log.timeline_steps = [10]"),
    ("a key is none of its table", "train.batch_size = 8", "train.batch_size = None; train.global_batch_size = 8"),
    ("an entry of a list has a key that it does not know", "data.changes = [{att = 32, weights = [1, 2]}]", CHANGES),
    ("a run does not support a value", "train.cuda_graphs = true", "train.cuda_graphs = None; train.compile = true"),
    (
        "a run does not support a value",
        "train.attention_dropout = 0.1",
        "train.attention_dropout = None; train.hidden_dropout = 0.1",
    ),
    ("a run does not support a value", "fsdp.user_buffers = 'require'", "fsdp.user_buffers = 'auto'"),
    ("a run does not support a value", "fsdp.nccl_min_ctas = 4", "fsdp.nccl_min_ctas = None"),
    ("data.blend is empty", "data.blend = []", "data.blend = ['data/wiki']"),
    (
        "data.weights or data.names has not one entry for each dataset",
        "data.weights = [1, 2, 3]",
        "data.weights = [1, 2]",
    ),
    (
        "data.weights or data.names has not one entry for each dataset",
        "data.names = ['wiki']",
        "data.names = ['wiki', 'code']",
    ),
    ("all weights of a blend are 0", "data.weights = [0.0, 0]", "data.weights = [3, 0]"),
    (
        "two datasets have one name",
        "data.blend = ['a/train', 'b/train']",
        "data.names = ['wiki', 'code']",
    ),
    ("data.split is not three shares", "data.split = '0,1'", "data.split = '98,2,0'"),
    ("data.split is not three shares", "data.split = '98,2'", "data.split = '1,0,0'"),
    ("data.split beside data.valid", "data.split = '90,10,0'; data.valid = ['v']", "data.split = None"),
    ("data.split beside data.valid", "data.split = '90,10,0'; data.valid = ['v']", "data.valid = None"),
    (
        "a validation set without a name or a prefix",
        "data.valid = {wiki = []}",
        "data.valid = {wiki = 'data/wiki-valid', code = ['data/python-valid', 'data/rust-valid']}",
    ),
    (
        "train.batch_ramp does not ascend",
        "train.batch_ramp = [[5000, 1024], [1000, 512]]",
        "train.batch_ramp = [[1000, 512], [5000, 1024]]",
    ),
    (
        "train.global_batch_size is no batch of the ramp",
        "train.batch_ramp = [[0, 4], [2, 8]]",
        "train.batch_ramp = [[0, 4], [2, 8], [50, 16]]",
    ),
    ("optimizer.ema_warmup without an average", "optimizer.ema_warmup = false", "optimizer.ema_decay = 0.999"),
    ("an entry of data.changes changes nothing", "data.changes = [{at = 32000}]", CHANGES.replace("32", "32000")),
    (
        "an entry of data.changes changes nothing",
        "data.changes = [{at = 32000}]",
        "data.changes = [{at = 32000, drop = {wiki = [17]}}]",
    ),
    (
        "data.changes drops documents of a dataset that training does not read",
        "data.changes = [{at = 32, drop = {wikki = [3]}}]",
        "data.changes = [{at = 32, drop = {wiki = [3]}}]",
    ),
    (
        "data.changes does not ascend",
        "data.changes = [{at = 64, weights = [1, 2]}, {at = 32, weights = [2, 1]}]",
        "data.changes = [{at = 32, weights = [2, 1]}, {at = 64, weights = [1, 2]}]",
    ),
    (
        "an entry of data.changes has not one weight for each dataset",
        "data.changes = [{at = 32, weights = [1]}]",
        "data.changes = [{at = 32, weights = [1, 0]}]",
    ),
    ("a pattern of train.frozen means nothing", "train.frozen = ['layers.4']", "train.frozen = ['layers.0-3']"),
    ("a pattern of train.frozen means nothing", "train.frozen = ['layer']", "train.frozen = ['layers.*.ffn']"),
    ("everything is frozen", "train.frozen = ['embedding', 'layers', 'norm']", "train.frozen = ['embedding']"),
    ("a key of adapters without adapters", "lora.targets = ['q']", "lora.rank = 8"),
    ("targets of adapters", "lora.rank = 4; lora.targets = []", "lora.targets = ['q', 'v']"),
    ("targets of adapters", "lora.rank = 4; lora.targets = ['q', 'q']", "lora.targets = None"),
    (LORA, f"lora.rank = 4; {EXPERTS}", "lora.targets = ['q', 'k', 'v', 'out']"),
    (
        "layers_per_stage does not fit the model",
        "parallel.layers_per_stage = [1, 2]; parallel.pp = 2",
        "parallel.layers_per_stage = [1, 3]",
    ),
    (
        "layers_per_stage does not fit the model",
        "parallel.layers_per_stage = [1, 1, 2]; parallel.pp = 2",
        "parallel.layers_per_stage = None",
    ),
    (
        "model.rope_scaling is of no known type",
        "model.rope_scaling = {rope_type = 'llama3', factor = 8.0}",
        "model.rope_scaling = {rope_type = 'llama3', factor = 8.0, low_freq_factor = 1.0, high_freq_factor = 4.0, "
        "original_max_position_embeddings = 8192}",
    ),
    (
        "sliding windows and types of layers do not fit each other",
        "model.layer_types = ['sliding_attention']; model.sliding_window = 8",
        "model.layer_types = ['sliding_attention', 'full_attention', 'sliding_attention', 'full_attention']",
    ),
    (
        NO_EFFECT,
        "model.rope_local_base_freq = 1e4",
        "model.sliding_window = 8",
    ),
    (LATENT, "model.q_lora_rank = 48", "model.q_lora_rank = None"),
    (
        LATENT,
        "model.kv_lora_rank = 16",
        "model.qk_nope_head_dim = 2; model.qk_rope_head_dim = 2; model.v_head_dim = 1",
    ),
    ("a key of experts in a dense model", "model.moe_ffn_hidden_size = 64", "model.num_experts = 4"),
    (
        "keys of experts contradict each other",
        f"{EXPERTS}; model.shared_expert_gate = true",
        "model.shared_ffn_hidden_size = 64",
    ),
    ("a length in tokens and in steps", "train.tokens = 1000", "train.tokens = None"),
    ("a length in tokens and in steps", "schedule.warmup_tokens = 1000; schedule.warmup_steps = 9",
     "schedule.warmup_steps = None"),
]  # fmt: skip


@pytest.mark.parametrize(("heading", "words", "remedy"), DESCRIBED)
def test_what_a_refusal_describes_is_taken(heading, words, remedy):
    keys = overrides_of(words)
    said = refusal(keys)
    assert entry_says("gpt", heading, said), said
    assert not refusal(changed(keys, Remedy(overrides_of(remedy))))


WORLDS = [
    (12, "parallel.pp = 2; parallel.tp = 4; model.num_layers = 8"),
    (12, "parallel.pp = 2; parallel.tp = 4; parallel.dp = 1"),
    (3, "parallel.cp = 2"),
    (1, "parallel.pp = 2"),
]


@pytest.mark.parametrize(("world", "words"), WORLDS)
def test_a_world_that_a_layout_names_can_run_it(world, words):
    keys = overrides_of(words)
    said = refusal(keys, world)
    assert entry_says("gpt", "the world is of another size than the layout", said), said
    for named in re.findall(r"\d+", re.search(r"a world of (.*?) works?", said)[1]):
        assert not refusal(keys, int(named)), f"{said}\n{named}"
    [other] = remedies_in(said.replace("a world of", "leave world")) if ", or parallel" in said else [None]
    assert other is None or leads_on(changed(keys, other), world), said


def taken(text, *overrides, preset=None, folder=None):
    """A configuration of TOML text, or of a file in ``folder``."""
    if folder is None:
        return TrainConfig.from_text(text, overrides)
    (folder / "run.toml").write_text(text)
    return TrainConfig.from_toml(folder / "run.toml", overrides, preset=preset or "")


def a_key_of_no_table(folder):
    text = toml_of(MINIMAL).replace("steps = 100\n", "")
    said = said_by(lambda: taken("steps = 10\n" + text))
    yield lambda: taken("steps = 10\n" + text)
    named = re.search(r"the nearest key is (.*)", said)[1].split(" or ")
    yield lambda: "train.steps" in named and taken(text.replace("[train]", "[train]\nsteps = 10")).train.steps == 10


def a_table_that_is_not_there(folder):
    text = toml_of(MINIMAL).replace("[train]", "[trian]")
    said = said_by(lambda: taken(text))
    yield lambda: taken(text)
    yield lambda: taken(text.replace("[trian]", re.search(r"nearest is (\[\w+\])", said)[1])).train.steps == 100


def a_key_of_its_table(folder):
    text = toml_of(MINIMAL).replace("global_batch_size", "batch_size")
    said = said_by(lambda: taken(text))
    yield lambda: taken(text)
    table, key = re.search(r"nearest is (\w+)\.(\w+)", said).groups()
    yield lambda: table == "train" and taken(text.replace("\nbatch_size", f"\n{key}")).train.global_batch_size == 16


def an_override_without_a_value(folder):
    text = toml_of(MINIMAL)
    said = said_by(lambda: taken(text, "optimizer.lr"))
    yield lambda: taken(text, "optimizer.lr")
    yield lambda: taken(text, re.search(r"as in (.*)", said)[1], 'data.blend=["a", "b"]').data.blend == ("a", "b")


def a_text_without_quotes(folder):
    text = toml_of(MINIMAL)
    yield lambda: taken(text + "\n[checkpoint]\nresume = never\n")
    yield lambda: taken(text + '\n[checkpoint]\nresume = "never"\n').checkpoint.resume == "never"


def an_empty_file(folder):
    yield lambda: taken("", folder=folder)
    text = taken(toml_of(MINIMAL)).to_toml()  # what --print-config prints
    yield lambda: taken(text, folder=folder) == taken(toml_of(MINIMAL))


def a_file_that_is_not_there(folder):
    taken(toml_of(MINIMAL), folder=folder)
    yield lambda: TrainConfig.from_toml("run.toml")
    yield lambda: TrainConfig.from_toml((folder / "run.toml").absolute())


def a_key_that_is_missing(folder):
    text = toml_of(MINIMAL).replace("vocab_size = 257", "")
    said = said_by(lambda: taken(text))
    yield lambda: taken(text)
    yield lambda: taken(text, re.search(r"or (\S+=)VALUE", said)[1] + "257").model.vocab_size == 257


def a_model_that_the_import_has(folder):
    run = folder / "imported"
    run.mkdir()
    model, text = toml_of({key: value for key, value in MINIMAL.items() if key.startswith("model")}), toml_of(MINIMAL)
    (run / "config.toml").write_text(model)
    rest = text.replace(model.strip(), "").replace("runs/tiny", str(run))
    said = said_by(lambda: taken(rest))
    yield lambda: taken(rest)
    copied = Path(re.search(r"copy the table \[model\] of (\S+) into", said)[1]).read_text()
    yield lambda: taken(copied + rest).model.num_layers == 4


def a_preset_that_does_not_exist(folder):
    rest = toml_of({key: value for key, value in MINIMAL.items() if not key.startswith("model")})
    said = said_by(lambda: taken(rest, preset="llama3-8b", folder=folder))
    yield lambda: taken(rest, preset="llama3-8b", folder=folder)
    near, every = re.search(r"; (\S+) works. There are (.*)", said).groups()
    yield lambda: all(taken(rest, preset=name, folder=folder) for name in [near, *every.split(", ")])


def a_configuration_that_includes(folder):
    (folder / "shared").mkdir()
    (folder / "runs").mkdir()
    (folder / "shared/base.toml").write_text(toml_of(MINIMAL))
    (folder / "runs/run.toml").write_text('include = ["base.toml"]\n')
    yield lambda: TrainConfig.from_toml(folder / "runs/run.toml")
    (folder / "runs/run.toml").write_text('include = ["../shared/base.toml"]\n[train]\nsteps = 7\n')
    yield lambda: TrainConfig.from_toml(folder / "runs/run.toml").train.steps == 7


TEXTS = [
    ("a key is in no table", a_key_of_no_table),
    ("a table that the configuration does not have", a_table_that_is_not_there),
    ("a key is none of its table", a_key_of_its_table),
    ("an override is not section.key=value", an_override_without_a_value),
    ("not TOML", a_text_without_quotes),
    ("an empty configuration", an_empty_file),
    ("the configuration cannot be read", a_file_that_is_not_there),
    ("a key without default is missing", a_key_that_is_missing),
    ("the configuration has no model, but the import has", a_model_that_the_import_has),
    ("no configuration, or a preset that does not exist", a_preset_that_does_not_exist),
    ("a configuration that includes another", a_configuration_that_includes),
]


@pytest.mark.parametrize(("heading", "case"), TEXTS)
def test_the_remedy_of_an_error_of_a_text_gives_what_it_promises(heading, case, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    follow("gpt", heading, case(tmp_path))


POOL = {
    "parallel.pp": [2, 3, 4],
    "parallel.tp": [2, 3, 4, 8],
    "parallel.cp": [2, 3],
    "parallel.dp": [1, 2, 3, 4, 6],
    "parallel.ep": [2, 3, 4],
    "parallel.dp_replicate": [2, 3],
    "parallel.schedule": ["gpipe", "interleaved", "zb_v", "hanayo", "plan", "pipedream", "pipedream_2bw", "1F1B"],
    "parallel.stages_per_rank": [2, 4],
    "parallel.sharding": ["no_shard", "optim"],
    "parallel.sequence": [False],
    "parallel.tp_overlap": [True],
    "parallel.grad_sum": ["tree", "rank_order"],
    "pipeline.group": [2, 5],
    "pipeline.waves": [1, 2],
    "pipeline.plan_seconds": [700],
    "pipeline.edges": ["one"],
    "fsdp.offload": [True],
    "fsdp.main_dtype": ["bfloat16"],
    "fsdp.grad_reduce": ["last", "microbatch"],
    "fsdp.gathered_bytes": ["all", 1000],
    "train.compile": [True],
    "train.recompute": ["full", "selective"],
    "train.precision": ["fp8", "fp32"],
    "train.float8_products": [True],
    "train.offload_activations": [True],
    "train.hidden_dropout": [0.1],
    "train.frozen": [["embedding"]],
    "train.global_batch_size": [8, 10, 24, 48],
    "train.micro_batch_size": [1, 2, 3],
    "train.batch_ramp": [[[0, 4], [2, 8]], [[10, 32]]],
    "train.steps": [50, 0],
    "optimizer.name": ["muon"],
    "optimizer.ema_decay": [0.9],
    "optimizer.ema_warmup": [False],
    "run.device": ["cpu", "cuda"],
    "log.memory_steps": [[1]],
    "log.digest_every": [1],
    "schedule.shape": ["wsd", "constant"],
    "schedule.decay_steps": [10, 80],
    "schedule.warmup_steps": [30, 95],
    "schedule.decay": ["cosine"],
    "schedule.decay_tokens": [5120, 99999999],
    "data.order": ["megatron", "apportioned"],
    "data.document_shuffle": ["block"],
    "data.deal": ["permuted"],
    "data.packing": ["best_fit"],
    "data.seq_length": [30, 36, 24],
    "data.changes": [[{"at": 32, "weights": [1, 2]}], [{"at": 30, "drop": {"wiki": [3]}}]],
    "model.num_query_groups": [1, 2, 3],
    "model.hidden_size": [66, 96],
    "model.head_dim": [15, 32],
    "model.num_attention_heads": [6, 8],
    "model.qk_norm_over": ["projection"],
    "model.zero_centered_norm": [True],
    "model.kv_lora_rank": [16],
    "model.num_experts": [4, 6, 8],
    "model.experts_per_token": [6, 3],
    "model.n_group": [2, 3],
    "model.topk_group": [2],
    "model.scoring_func": ["sigmoid"],
    "model.dense_layers": [1, 4],
    "model.hidden_act": ["gelu_pytorch_tanh"],
    "model.tie_embeddings": [False],
    "lora.rank": [8],
    "lora.targets": [["q"], ["up"]],
    "lora.dropout": [0.1],
    "model.sliding_window": [8],
}


@pytest.mark.parametrize("seed", range(30))
def test_following_refusals_of_any_keys_comes_to_a_configuration_that_is_taken(seed):
    rng = random.Random(seed)
    for _ in range(10):
        keys = {key: rng.choice(POOL[key]) for key in rng.sample(sorted(POOL), rng.randint(2, 6))}
        said = refusal(keys)
        if not said or said.endswith("the two have to agree: leave one out"):
            continue
        assert remedies_in(said), said
        for remedy in remedies_in(said):
            after = changed(keys, remedy)
            assert refusal(after) != said, f"{keys}\n{said}\n{remedy}"
            assert leads_on(after), f"{keys}\n{said}\n{remedy}"
