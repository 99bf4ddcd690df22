"""Exports of one process: what safetensors, torch and transformers read of them, and what is refused."""

import errno
import json

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from dist_ckpt_helpers import Cut, flat_shards
from hugging_face_helpers import llama, logits
from torch.distributed.checkpoint import HuggingFaceStorageReader

from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, MismatchError, ShardingError, StorageError, hugging_face, tools
from sixfold.dist_ckpt.hugging_face import KeyMap, exporting

safe = pytest.importorskip("safetensors.torch", reason="needs the extra safetensors")


def tensors():
    torch.manual_seed(0)
    return {
        "b.w": torch.randn(8, 6),
        "b.half": torch.randn(5).half(),
        "a.ids": torch.arange(7),
        "a.flag": torch.tensor(True),
        "a.eight": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "a.none": torch.zeros(0, 3),
        "a.byte": torch.arange(3, dtype=torch.uint8),
        "c.wide": torch.randn(3, 5).double(),
    }


FLOATS = ("b.w", "b.half", "c.wide", "a.none")


def bits(state):
    return {
        key: (value.dtype, tuple(value.shape), value.reshape(-1).view(torch.uint8).tolist())
        for key, value in state.items()
    }


def read(folder):
    """All that the library reads of a folder."""
    return {key: value for path in folder.glob("*.safetensors") for key, value in safe.load_file(path).items()}


@pytest.fixture(autouse=True, params=[64, 1 << 26], ids=["many batches", "one batch"])
def batch(request, monkeypatch):
    monkeypatch.setattr(exporting, "BATCH_BYTES", request.param)


@pytest.mark.parametrize("most", [1, 100, None])
def test_every_value_is_read_back_by_the_library(tmp_path, most):
    found = hugging_face.export(tensors(), tmp_path / "m", max_shard_bytes=most)
    assert bits(read(tmp_path / "m")) == bits(tensors())
    assert found["tensors"] == 8
    assert found["nbytes"] == sum(tensor.nbytes for tensor in tensors().values())
    assert found["files"] == sorted(path.name for path in (tmp_path / "m").iterdir())
    assert len(found["files"]) == {1: 8 + 1, 100: 3 + 1, None: 1}[most]


def test_no_file_is_larger_than_asked_and_the_index_names_each_tensor_once(tmp_path):
    hugging_face.export(tensors(), tmp_path / "m", max_shard_bytes=200)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    sizes = {}
    for key, name in index["weight_map"].items():
        sizes[name] = sizes.get(name, 0) + safe.load_file(tmp_path / "m" / name)[key].nbytes
    assert set(index["weight_map"]) == set(tensors())
    assert max(sizes.values()) <= 200
    assert index["metadata"]["total_size"] == sum(sizes.values())
    names = sorted(path.name for path in (tmp_path / "m").glob("*.safetensors"))
    assert names == sorted(sizes) == [f"model-{i + 1:05d}-of-{len(names):05d}.safetensors" for i in range(len(names))]


def test_an_export_from_memory_and_one_from_a_checkpoint_are_the_same_bytes(tmp_path):
    dist_ckpt.save(tensors(), tmp_path / "c")
    options = {"max_shard_bytes": 150, "dtype": torch.bfloat16, "key_map": KeyMap({"{x}.{*rest}": "m.{x}.{*rest}"})}
    tools.convert(tmp_path / "c", tmp_path / "one", to="safetensors", **options)
    hugging_face.export(tensors(), tmp_path / "other", **options)
    one_way, other = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("one", "other"))
    assert one_way == other


def test_shards_of_one_process_are_put_together(tmp_path):
    whole, cut = tensors()["b.w"], Cut(1, 2, (0, 5, 5, 24))
    columns = [
        dist_ckpt.ShardedTensor.from_rank_offsets("columns", part.contiguous(), (1, i, 3))
        for i, part in enumerate(whole.chunk(3, dim=1))
    ]
    stacked = dist_ckpt.ShardedTensor.from_rank_offsets("stacked", whole, (0, 0, 1), prepend_axis_num=1)
    state = {"f": flat_shards("flat", whole, cut, fill=True), "c": columns, "s": stacked}
    hugging_face.export(state, tmp_path / "m")
    assert bits(read(tmp_path / "m")) == bits({"flat": whole, "columns": whole, "stacked": whole[None]})


def test_torchs_reader_reads_it(tmp_path):
    hugging_face.export(tensors(), tmp_path / "m", max_shard_bytes=200)
    found = {key: torch.zeros_like(value) for key, value in tensors().items()}
    torch_dcp.load(found, storage_reader=HuggingFaceStorageReader(str(tmp_path / "m")), no_dist=True)
    assert bits(found) == bits(tensors())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_dtype_is_given_to_floating_point_numbers_alone(tmp_path, dtype):
    hugging_face.export(tensors(), tmp_path / "m", dtype=dtype)
    wanted = {key: value.to(dtype) if key in FLOATS else value for key, value in tensors().items()}
    assert bits(read(tmp_path / "m")) == bits(wanted)


def test_a_value_that_a_dtype_makes_infinite_is_an_error_and_infinity_is_none(tmp_path):
    state = {"w": torch.tensor([1.0, -70000.0])}
    with pytest.raises(MismatchError, match=r"w: 70000 is finite in torch.float32 and infinite in torch.float16"):
        hugging_face.export(state, tmp_path / "m", dtype=torch.float16)
    dist_ckpt.save(state, tmp_path / "c")
    with pytest.raises(MismatchError, match="w: 70000 is finite"):
        tools.convert(tmp_path / "c", tmp_path / "m", to="safetensors", dtype=torch.float16)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    hugging_face.export({"w": torch.tensor([torch.inf, torch.nan])}, tmp_path / "m", dtype=torch.float16)
    assert read(tmp_path / "m")["w"].isinf().tolist() == [True, False]


def test_names_are_renamed_filtered_and_never_lost(tmp_path):
    state = {"model": {"w": torch.ones(2), "layers": [torch.ones(1), torch.zeros(3)]}, "step": 7, "opt": torch.ones(9)}
    strip = KeyMap({"model.{*rest}": "{*rest}"})
    hugging_face.export(state, tmp_path / "m", key_map=strip, keys="model.*")
    assert sorted(read(tmp_path / "m")) == ["layers.0", "layers.1", "w"]
    with pytest.raises(MismatchError, match=r"no rule of the KeyMap fits a name of ours.*\n  opt$"):
        hugging_face.export(state, tmp_path / "n", key_map=strip)
    with pytest.raises(MismatchError, match=r"opt: model\.w and opt both become it"):
        hugging_face.export(state, tmp_path / "n", key_map=KeyMap({"model.{x}": "opt"}, others="keep"))
    with pytest.raises(MismatchError, match="no tensor of the state dict has a name that fits keys"):
        hugging_face.export(state, tmp_path / "n", keys="modle.*")
    assert not (tmp_path / "n").exists()


def test_tied_weights_are_written_once_under_the_first_name(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers, which is the oracle")
    model = llama(tied=True)
    found = hugging_face.export(model, tmp_path / "m", extras=[model.config])
    assert found["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
    model.save_pretrained(tmp_path / "theirs")
    assert bits(read(tmp_path / "m")) == bits(read(tmp_path / "theirs"))
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "m", attn_implementation="eager")
    assert torch.equal(logits(again), logits(model))


def test_the_configuration_beside_converted_weights_names_their_dtype(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers, which is the oracle")
    llama().save_pretrained(tmp_path / "theirs")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32)
    hugging_face.export(model, tmp_path / "m", dtype=torch.bfloat16, extras=[model.config])
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="auto")
    assert again.dtype == torch.bfloat16


def mixed(model):
    model.model.bfloat16()
    return model


CONFIGURED = {
    "as it is": lambda model: model,
    "in bfloat16, and made in float32": lambda model: model.bfloat16(),
    "mixed": lambda model: mixed(model),
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "its base model": lambda model: model.model,
}


@pytest.mark.parametrize("made", CONFIGURED)
def test_the_configuration_says_what_save_pretrained_says(tmp_path, made):
    transformers = pytest.importorskip("transformers", reason="needs transformers, which is the oracle")
    model = llama()
    model.config.dtype, model.config.architectures = "float32", ["Other"]
    model = CONFIGURED[made](model)
    hugging_face.export(model, tmp_path / "m", extras=[model.config])
    getattr(model, "_orig_mod", model).save_pretrained(tmp_path / "theirs")
    ours, theirs = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("m", "theirs"))
    assert ours["architectures"] == theirs["architectures"]
    assert ours["dtype"] == ("bfloat16" if made == "mixed" else theirs["dtype"])
    again = getattr(transformers, ours["architectures"][0]).from_pretrained(tmp_path / "m")
    assert str(again.dtype) == f"torch.{ours['dtype']}"


def test_a_configuration_of_a_state_dict_keeps_its_class_and_one_of_others_its_bytes(tmp_path):
    pytest.importorskip("transformers", reason="needs transformers, which is the oracle")
    model = llama().bfloat16()
    model.config.architectures = ["LlamaForCausalLM"]
    hugging_face.export(model.state_dict(), tmp_path / "m", extras=[model.config])
    config = json.loads((tmp_path / "m/config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "bfloat16"

    class Own:
        def save_pretrained(self, folder):
            (folder / "config.json").write_text('{"layers":  2}')

    hugging_face.export({"w": torch.ones(2)}, tmp_path / "n", extras=[Own()])
    assert (tmp_path / "n/config.json").read_text() == '{"layers":  2}'


def test_views_that_are_no_ties_are_written_each(tmp_path):
    base = torch.arange(12.0).view(3, 4)
    state = {
        "all": base,
        "rows": base[:2],
        "turned": base.T,
        "again": base,
        "flat": base.view(-1),
        "other": base.clone(),
    }
    found = hugging_face.export(state, tmp_path / "m")
    assert found["tied"] == {"again": "all"}
    assert bits(read(tmp_path / "m")) == bits(
        {key: value.contiguous() for key, value in state.items() if key != "again"}
    )


def test_what_else_belongs_to_a_model_lies_there_when_the_folder_appears(tmp_path):
    class Tokenizer:
        def save_pretrained(self, folder):
            assert not (tmp_path / "m").exists()
            (folder / "tokenizer.json").write_text("{}")

    hugging_face.export(tensors(), tmp_path / "m", extras=[Tokenizer()])
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == ["model.safetensors", "tokenizer.json"]


def test_an_extra_that_fails_or_writes_over_a_file_leaves_nothing(tmp_path):
    class Bad:
        def save_pretrained(self, folder):
            raise ValueError("no tokenizer")

    class Worse:
        def save_pretrained(self, folder):
            (folder / "model.safetensors").write_bytes(b"")

    with pytest.raises(ValueError, match="no tokenizer"):
        hugging_face.export(tensors(), tmp_path / "m", extras=[Bad()])
    with pytest.raises(CheckpointError, match=r"extras have changed model\.safetensors"):
        hugging_face.export(tensors(), tmp_path / "m", extras=[Worse()])
    with pytest.raises(CheckpointError, match="extras hold a dict"):
        hugging_face.export(tensors(), tmp_path / "m", extras=[{}])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_anything_is_not_touched(tmp_path):
    (tmp_path / "m").mkdir()
    hugging_face.export(tensors(), tmp_path / "m")  # an empty one will do
    before = {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()}
    for name in ("m", "notes"):
        if name == "notes":
            (tmp_path / name).mkdir()
            (tmp_path / name / "diary.txt").write_text("mine")
        with pytest.raises(StorageError, match="is not empty"):
            hugging_face.export({"w": torch.ones(1)}, tmp_path / name)
    assert {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()} == before
    assert (tmp_path / "notes" / "diary.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "notes"]


class Place(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2, device="meta")


REFUSED = {
    "sparse": ({"w": torch.eye(2).to_sparse()}, ShardingError, "w: data is torch.sparse_coo"),
    "meta": (Place(), ShardingError, r"linear\.\w+: data is on the meta device"),
    "a tuple of tensors": (
        {"w": torch.ones(1), "t": (torch.ones(1),)},
        CheckpointError,
        "t is a tuple that holds tensors",
    ),
    "two of one name": (
        {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}},
        CheckpointError,
        r"a\.b: two tensors of the state dict have this name",
    ),
    "a name of the format": ({"__metadata__": torch.ones(1)}, CheckpointError, "knows no tensor of this name"),
    "a dtype": (
        {"w": torch.ones(1, dtype=torch.complex128)},
        CheckpointError,
        r"w: safetensors knows no torch.complex128",
    ),
    "a hole": (
        {"w": dist_ckpt.ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, 0, 2))},
        ShardingError,
        "saved by no main replica",
    ),
    "no state": (3, ShardingError, "the state dict is a int"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_format_has_no_form_for_is_refused_by_name(tmp_path, name):
    state, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        hugging_face.export(state, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": torch.int8}, "dtype is torch.int8; an export converts to one of"),
        ({"dtype": torch.float8_e5m2}, "an export converts to"),
        ({"key_map": {"a": "b"}}, "key_map is a dict; it is a hugging_face.KeyMap"),
        ({"max_shard_bytes": 0}, "max_shard_bytes is 0"),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path, options, words):
    with pytest.raises(CheckpointError, match=words):
        hugging_face.export(tensors(), tmp_path / "m", **options)
    with pytest.raises(CheckpointError, match="written into a local folder"):
        hugging_face.export(tensors(), "s3://bucket/m")
    assert list(tmp_path.iterdir()) == []


def test_progress_counts_the_bytes_that_are_written(tmp_path):
    seen = []
    nbytes = sum(tensor.nbytes for tensor in tensors().values())
    hugging_face.export(tensors(), tmp_path / "m", progress=lambda done, total: seen.append((done, total)))
    assert seen[0] == (0, nbytes)
    assert seen[-1] == (nbytes, nbytes)
    assert seen == sorted(set(seen))


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(writer, part):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sixfold.dist_ckpt.hugging_face.model_files.FilesWriter.add", full)
    with pytest.raises(StorageError, match="ENOSPC"):
        hugging_face.export(tensors(), tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_empty_says_that_no_export_replaces_anything(tmp_path):
    hugging_face.export({"w": torch.ones(2)}, tmp_path / "m", group=None)
    with pytest.raises(StorageError, match=r"is not empty .* An export writes into none that has files"):
        hugging_face.export({"w": torch.ones(2)}, tmp_path / "m", group=None)
