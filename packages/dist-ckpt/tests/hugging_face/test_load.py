"""Loads of one process: models of transformers and files of safetensors and torch into models; every damage is told."""

import json
import struct

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from dist_ckpt_helpers import one
from hugging_face_helpers import llama, logits, same
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from sixfold import dist_ckpt
from sixfold.dist_ckpt import (
    CheckpointError,
    CorruptError,
    MismatchError,
    ShardingError,
    UnsafeError,
    hugging_face,
    tools,
)
from sixfold.dist_ckpt.__main__ import main
from sixfold.dist_ckpt.hugging_face import KeyMap
from sixfold.dist_ckpt.stores import MemoryStore

safe = pytest.importorskip("safetensors.torch", reason="needs the extra safetensors")


def tensors():
    torch.manual_seed(0)
    return {"a.w": torch.randn(4, 3), "a.b": torch.randn(3).bfloat16(), "n": torch.arange(5), "s": torch.tensor(2.5)}


def zeros(state):
    return {key: torch.zeros_like(value) for key, value in state.items()}


@pytest.fixture
def folder(tmp_path):
    """Two files and an index."""
    hugging_face.export(tensors(), tmp_path / "m", max_shard_bytes=60)
    assert len(list((tmp_path / "m").iterdir())) == 3
    return tmp_path / "m"


def test_a_plain_state_dict_is_filled_in_place(folder):
    asked = zeros(tensors())
    found = hugging_face.load(asked, folder)
    assert same(found, tensors())
    assert same(asked, tensors())


def test_a_file_is_known_by_its_name_where_it_is_a_link_to_one_without_a_suffix(tmp_path):
    """The cache of the Hub: snapshots/HASH/model.safetensors leads to blobs/DIGEST."""
    hugging_face.export(tensors(), tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "0badc0de")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "0badc0de")
    for path in (tmp_path / "model.safetensors", str(tmp_path / "model.safetensors")):
        assert same(hugging_face.load(zeros(tensors()), path), tensors())


@pytest.mark.parametrize(("holds", "told"), [
    ("", "a model is a folder with"), ("pytorch_model.bin", "is a pickle"), ("snapshots", "the Hub's cache"),
])  # fmt: skip
def test_a_folder_without_safetensors_is_told_with_what_to_give(tmp_path, holds, told):
    if holds:
        (tmp_path / holds).mkdir() if holds == "snapshots" else (tmp_path / holds).touch()
    with pytest.raises(MismatchError, match=f"holds no \\*\\.safetensors; .*{told}"):
        hugging_face.load({"w": torch.zeros(3)}, tmp_path)


def test_a_base_model_is_filled_from_the_file_of_a_whole_one(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path / "m")
    base = type(model.model)(model.config)
    inside = KeyMap({"{*rest}": "model.{*rest}"})
    with pytest.raises(MismatchError, match=r"lm_head\.weight \(of the files\)"):
        hugging_face.load(base, tmp_path / "m", key_map=inside)
    hugging_face.load(base, tmp_path / "m", key_map=inside, strict="ignore_all")
    assert same(base.state_dict(), model.model.state_dict())


def test_one_file_loads_whatever_lies_beside_it(folder):
    safe.save_file({"n": torch.ones(5)}, folder / "other.safetensors")
    asked = hugging_face.load({"n": torch.zeros(5)}, folder / "other.safetensors")
    assert torch.equal(asked["n"], torch.ones(5))
    with pytest.raises(MismatchError, match=r"a\.w: in the checkpoint, asked for by no rank"):
        hugging_face.load({"n": torch.zeros(5, dtype=torch.int64)}, folder)


def test_a_store_gives_a_folder_too(folder):
    store = MemoryStore()
    store.files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert same(hugging_face.load(zeros(tensors()), store), tensors())


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_of_transformers_computes_the_same_after_a_load(tmp_path, tied):
    pytest.importorskip("transformers", reason="needs transformers, which is the oracle")
    saved, model = llama(tied=tied), llama(seed=1, tied=tied)
    saved.save_pretrained(tmp_path / "m")
    assert ("lm_head.weight" in safe.load_file(tmp_path / "m" / "model.safetensors")) is not tied
    assert hugging_face.load(model, tmp_path / "m") is model
    assert same(model.state_dict(), saved.state_dict())
    assert torch.equal(logits(model), logits(saved))


def test_a_head_that_is_not_tied_here_is_not_taken_from_the_embedding(tmp_path):
    pytest.importorskip("transformers", reason="needs transformers, which is the oracle")
    llama(tied=True).save_pretrained(tmp_path / "m")
    with pytest.raises(MismatchError, match=r"lm_head\.weight: asked for, not in the checkpoint"):
        hugging_face.load(llama(seed=1), tmp_path / "m")


def test_ties_are_found_whichever_name_is_stored(tmp_path):
    for stored in "abc":
        safe.save_file({stored: torch.ones(3)}, tmp_path / f"{stored}.safetensors")
        shared = torch.zeros(3)
        hugging_face.load({"a": shared, "b": shared, "c": shared.view(3)}, tmp_path / f"{stored}.safetensors")
        assert torch.equal(shared, torch.ones(3))


def test_two_values_for_one_tensor_are_an_error(tmp_path):
    safe.save_file({"a": torch.ones(3), "b": torch.zeros(3)}, tmp_path / "m.safetensors")
    shared = torch.zeros(3)
    with pytest.raises(MismatchError, match="two that differ"):
        hugging_face.load({"a": shared, "b": shared}, tmp_path / "m.safetensors")


def test_names_of_theirs_come_under_ours(folder):
    names = KeyMap({"net.{part}.{x}": "{part}.{x}", "numbers": "n", "scale": "s"})
    wanted = {"net.a.w": "a.w", "net.a.b": "a.b", "numbers": "n", "scale": "s"}
    found = hugging_face.load(
        {ours: torch.zeros_like(tensors()[theirs]) for ours, theirs in wanted.items()}, folder, key_map=names
    )
    assert same(found, {ours: tensors()[theirs] for ours, theirs in wanted.items()})
    some, few = (
        KeyMap({"net.{part}.{x}": "{part}.{x}"}),
        {"net.a.w": torch.zeros(4, 3), "net.a.b": torch.zeros(3).bfloat16()},
    )
    with pytest.raises(MismatchError, match=r"n \(of the files\): in the checkpoint, asked for by no rank"):
        hugging_face.load(few, folder, key_map=some)
    found = hugging_face.load(few, folder, key_map=some, strict="ignore_all")  # strict judges what no rule reaches
    assert torch.equal(found["net.a.w"], tensors()["a.w"])
    with pytest.raises(MismatchError, match=r"\{i\} stands on the left alone"):
        hugging_face.load({}, folder, key_map=KeyMap({"{i}.{part}.{x}": "{part}.{x}"}, others="keep"))
    with pytest.raises(CheckpointError, match="key_map is a dict"):
        hugging_face.load({}, folder, key_map={})


def test_names_and_shapes_that_differ_are_all_told(folder):
    asked = zeros(tensors())
    del asked["n"]
    with pytest.raises(MismatchError, match="n: in the checkpoint, asked for by no rank"):
        hugging_face.load(asked, folder)
    with pytest.raises(MismatchError, match="more: asked for, not in the checkpoint"):
        hugging_face.load({**zeros(tensors()), "more": torch.zeros(1)}, folder)
    with pytest.raises(MismatchError, match=r"a\.w: asked for global shape \(3, 4\), stored is \(4, 3\)"):
        hugging_face.load({**zeros(tensors()), "a.w": torch.zeros(3, 4)}, folder)
    assert not any(value.any() for value in asked.values())
    found, missing, unexpected = hugging_face.load({**asked, "more": torch.ones(1)}, folder, strict="return_all")
    assert (missing, unexpected) == ({"n"}, {"more"})
    assert torch.equal(found["a.w"], tensors()["a.w"])


def test_another_dtype_is_an_error_unless_it_is_asked_for(folder):
    asked = {**zeros(tensors()), "a.b": torch.zeros(3)}
    with pytest.raises(MismatchError, match=r"a\.b: asked for torch.float32, stored is torch.bfloat16"):
        hugging_face.load(asked, folder)
    assert torch.equal(hugging_face.load(asked, folder, dtype_policy="exact")["a.b"], tensors()["a.b"].float())
    narrow = {**zeros(tensors()), "a.w": torch.zeros(4, 3, dtype=torch.float16)}
    with pytest.raises(MismatchError, match=r"a\.w"):
        hugging_face.load(narrow, folder, dtype_policy="exact")
    with pytest.warns(UserWarning, match=r"a\.w"):
        hugging_face.load(narrow, folder, dtype_policy="cast")
    assert torch.equal(narrow["a.w"], tensors()["a.w"].half())


def test_a_model_without_memory_is_told_and_a_state_dict_of_it_gets_tensors(tmp_path):
    hugging_face.export(torch.nn.Linear(2, 3), tmp_path / "m")
    model = torch.nn.Linear(2, 3, device="meta")
    with pytest.raises(ShardingError, match="to_empty"):
        hugging_face.load(model, tmp_path / "m")
    model.load_state_dict(hugging_face.load(model.state_dict(), tmp_path / "m"), assign=True)
    assert not model.weight.is_meta


@pytest.mark.slow
def test_a_wrapped_model_has_the_names_of_the_one_inside(tmp_path):
    saved, model = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    hugging_face.export(torch.compile(saved), tmp_path / "m")
    assert set(safe.load_file(tmp_path / "m" / "model.safetensors")) == {"weight", "bias"}
    hugging_face.load(torch.compile(model), tmp_path / "m")
    assert same(dict(model.state_dict()), dict(saved.state_dict()))


def test_a_checkpoint_and_an_empty_folder_are_told_from_a_model(tmp_path):
    dist_ckpt.save({"w": torch.ones(1)}, tmp_path / "c")
    with pytest.raises(MismatchError, match=r"is a checkpoint and no folder of safetensors; sixfold\.dist_ckpt\.load"):
        hugging_face.load({"w": torch.zeros(1)}, tmp_path / "c")
    (tmp_path / "e").mkdir()
    for name in ("e", "absent", "absent.safetensors"):
        with pytest.raises(MismatchError, match=name):
            hugging_face.load({"w": torch.zeros(1)}, tmp_path / name)


@pytest.mark.parametrize("index", [None, {"a.w": 1, "a.b": 2, "n": 2, "s": 1}])
def test_what_torchs_writer_saves_from_one_process_loads(tmp_path, index):
    """Its files are marked as parts, also those of whole tensors."""
    writer = HuggingFaceStorageWriter(str(tmp_path / "m"), fqn_to_index_mapping=index)
    torch_dcp.save(tensors(), storage_writer=writer, no_dist=True)
    assert same(hugging_face.load(zeros(tensors()), tmp_path / "m"), tensors())


def parts_of(folder, parts):
    """Files as torch's writer makes them of parts of tensors, written by hand."""
    folder.mkdir()
    for number, found in enumerate(parts, 1):
        places = {key: {"saved_offsets": list(offset)} for key, (offset, _) in found.items()}
        name = f"shard-{number:05d}-model-00001-of-00001.safetensors"
        safe.save_file(
            {key: value.contiguous() for key, (_, value) in found.items()},
            folder / name,
            metadata={"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"},
        )
    return folder


WHOLE = torch.arange(30.0).view(5, 6)


def test_parts_of_tensors_are_put_together(tmp_path):
    halves = [
        {"w": ((0, 0), WHOLE[:3])},
        {"w": ((3, 0), WHOLE[3:]), "one": ((0,), torch.ones(2))},
        {"w": ((6, 0), WHOLE[:0])},
    ]
    folder = parts_of(tmp_path / "m", halves)
    columns = [dist_ckpt.ShardedTensor.from_rank_offsets("w", torch.zeros(5, 2), (1, i, 3)) for i in range(3)]
    found = hugging_face.load({"columns": columns, "one": torch.zeros(2)}, folder)
    assert torch.equal(torch.cat(found["columns"], 1), WHOLE)
    assert torch.equal(found["one"], torch.ones(2))
    assert tools.verify(folder)["ok"]
    tools.convert(folder, tmp_path / "c", to="torch_dist")
    assert tools.diff(folder, tmp_path / "c")["equal"]


def test_parts_that_leave_a_hole_overlap_or_differ_are_damage(tmp_path):
    cases = {
        "hole": ([{"w": ((0, 0), WHOLE[:2])}, {"w": ((3, 0), WHOLE[3:])}], CorruptError, "are in no chunk"),
        "overlap": ([{"w": ((0, 0), WHOLE[:4])}, {"w": ((3, 0), WHOLE[3:])}], CorruptError, "overlap; which one holds"),
        "dtype": ([{"w": ((0, 0), WHOLE[:3])}, {"w": ((3, 0), WHOLE[3:].half())}], CorruptError, "differ in dtype"),
        "dims": ([{"w": ((0, 0), WHOLE[:3])}, {"w": ((3,), WHOLE[3])}], CorruptError, "differ in dtype"),
        "last lost": ([{"w": ((0, 0), WHOLE[:3])}], MismatchError, r"stored is \(3, 6\)"),
    }
    for name, (parts, error, words) in cases.items():
        folder = parts_of(tmp_path / name, parts)
        with pytest.raises(error, match=words):
            hugging_face.load({"w": torch.zeros(5, 6)}, folder)


def edit_index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def header(path, change):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    content = json.loads(data[8 : 8 + length])
    change(content)
    text = json.dumps(content).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


FIRST, SECOND = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
DAMAGE = {
    "truncated": lambda f: (f / FIRST).write_bytes((f / FIRST).read_bytes()[:-1]),
    "longer": lambda f: (f / FIRST).write_bytes((f / FIRST).read_bytes() + b"\0"),
    "empty": lambda f: (f / FIRST).write_bytes(b""),
    "header alone": lambda f: (f / FIRST).write_bytes((f / FIRST).read_bytes()[:30]),
    "missing": lambda f: (f / SECOND).unlink(),
    "another file": lambda f: (f / SECOND).write_bytes((f / FIRST).read_bytes()),
    "a file that is a folder": lambda f: ((f / SECOND).unlink(), (f / SECOND).mkdir()),
    "an index of a file that is not there": lambda f: edit_index(f, lambda m: m.update({"n": "gone.safetensors"})),
    "an index of a tensor that is not there": lambda f: edit_index(f, lambda m: m.update({"x": FIRST})),
    "an index that swaps files": lambda f: edit_index(
        f, lambda m: m.update({k: FIRST if v == SECOND else SECOND for k, v in m.items()})
    ),
    "a name in two files": lambda f: safe.save_file({**safe.load_file(f / SECOND), "a.b": torch.ones(3)}, f / SECOND),
    "another dtype": lambda f: header(f / FIRST, lambda h: h["a.b"].update(dtype="I16")),
    "another length": lambda f: header(f / FIRST, lambda h: h["a.b"].update(shape=[2])),
    "another shape": lambda f: header(f / FIRST, lambda h: h["a.w"].update(shape=[3, 4])),
    "bytes of another": lambda f: header(f / FIRST, lambda h: h["a.b"].update(data_offsets=[0, 6])),
    "an index that leaves the folder": lambda f: edit_index(f, lambda m: m.update({"n": f"../m/{SECOND}"})),
    "an index that is none": lambda f: (f / "model.safetensors.index.json").write_text("{"),
    "no index": lambda f: (f / "model.safetensors.index.json").unlink(),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_every_damage_is_an_error_before_a_tensor_is_touched(folder, name):
    DAMAGE[name](folder)
    asked = zeros(tensors())
    with pytest.raises(CheckpointError) as found:
        hugging_face.load(asked, folder)
    assert isinstance(found.value, CorruptError | MismatchError | UnsafeError | dist_ckpt.StorageError)
    assert not any(value.any() for value in asked.values())


def test_a_tensor_that_the_index_forgets_is_stored_all_the_same(folder):
    """As transformers has it, which reads the whole of each file."""
    edit_index(folder, lambda places: places.pop("n"))
    assert same(hugging_face.load(zeros(tensors()), folder), tensors())


def test_a_model_becomes_a_checkpoint_and_comes_back(folder, tmp_path):
    names = KeyMap({"net.{*rest}": "{*rest}"})
    tools.convert(folder, tmp_path / "c", to="torch_dist", key_map=names, dtype=torch.float32)
    found = dist_ckpt.load_plain_tensors(tmp_path / "c")
    assert same(
        found, {f"net.{key}": value.float() if value.is_floating_point() else value for key, value in tensors().items()}
    )
    assert tools.verify(tmp_path / "c")["ok"]
    tools.convert(tmp_path / "c", tmp_path / "back", to="safetensors", key_map=names)
    wanted = {key: value.float() if key == "a.b" else value for key, value in tensors().items()}
    assert same(safe.load_file(tmp_path / "back" / "model.safetensors"), wanted)
    with pytest.raises(CheckpointError, match="key_map names tensors on the way"):
        tools.convert(tmp_path / "c", tmp_path / "d", to="torch_dist", key_map=names)
    with pytest.raises(CheckpointError, match="group is world and to is 'zarr'"):
        tools.convert(tmp_path / "c", tmp_path / "d", to="zarr", group="world")


@pytest.mark.slow
def test_the_command_renames_and_converts(folder, tmp_path, capsys):
    rules = ["--rename", "net.{*rest}=a.{*rest}", "--keep-others"]
    assert main(["convert", str(folder), str(tmp_path / "c"), "--to", "torch_dist", *rules]) == 0
    assert set(dist_ckpt.load_plain_tensors(tmp_path / "c")) == {"net.w", "net.b", "n", "s"}
    options = [*rules, "--dtype", "float16", "--max-shard-bytes", "30"]
    assert main(["convert", str(tmp_path / "c"), str(tmp_path / "s"), "--to", "safetensors", *options]) == 0
    asked = {key: value.half() if value.is_floating_point() else value for key, value in tensors().items()}
    assert same(hugging_face.load(zeros(asked), tmp_path / "s"), asked)
    assert main(["convert", str(folder), str(tmp_path / "x"), "--to", "torch_dist", "--rename", "a"]) == 2
    assert "--rename is 'a'; it is OURS=THEIRS" in capsys.readouterr().err
    assert main(["convert", str(folder), str(tmp_path / "x"), "--to", "torch_dist", *rules[:2]]) == 2
    assert "others='keep'" in capsys.readouterr().err


def test_records_are_filled(folder):
    rows = [dist_ckpt.ShardedTensor.from_rank_offsets("a.w", torch.zeros(2, 3), (0, i, 2)) for i in range(2)]
    state = {
        "rows": rows,
        "b": one("a.b", torch.zeros(3).bfloat16()),
        "n": torch.zeros(5, dtype=torch.int64),
        "s": torch.tensor(0.0),
    }
    found = hugging_face.load(state, folder)
    assert torch.equal(torch.cat(found["rows"]), tensors()["a.w"])
    assert found["s"] == 2.5


def test_what_is_no_tensor_stays_as_it_is(tmp_path):
    class Counted(torch.nn.Linear):
        seen = 7

        def get_extra_state(self):
            return {"seen": self.seen}

        def set_extra_state(self, state):
            self.seen = state["seen"]

    saved, model = Counted(2, 3), Counted(2, 3)
    model.seen = 9
    hugging_face.export(saved, tmp_path / "m")
    hugging_face.load(model, tmp_path / "m")
    assert model.seen == 9
    assert torch.equal(model.weight, saved.weight)
    found = hugging_face.load({"weight": torch.zeros(3, 2), "bias": torch.zeros(3), "step": 4, "n": {}}, tmp_path / "m")
    assert (found["step"], found["n"]) == (4, {})


def test_an_object_in_a_state_dict_loads_by_a_map_of_its_name(tmp_path):
    saved, model = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    names = KeyMap({"model.{*rest}": "{*rest}"})
    hugging_face.export({"model": saved, "step": 3}, tmp_path / "m", key_map=names)
    assert set(safe.load_file(tmp_path / "m" / "model.safetensors")) == {"weight", "bias"}
    hugging_face.load({"model": model}, tmp_path / "m", key_map=names)
    assert same(dict(model.state_dict()), dict(saved.state_dict()))


def test_a_file_that_is_replaced_meanwhile_is_told_and_one_beside_it_is_not(tmp_path):
    path = tmp_path / "m.safetensors"
    for name, error in (("other.txt", None), ("m.safetensors", "m.safetensors was replaced while it was read")):
        safe.save_file({"w": torch.ones(1 << 10)}, path)

        def write(*_, name=name):
            (tmp_path / "new").write_bytes(path.read_bytes())
            (tmp_path / "new").rename(tmp_path / name)

        asked = {"w": torch.zeros(1 << 10)}
        if error is None:
            assert hugging_face.load(asked, path, progress=write)["w"].all()
        else:
            with pytest.raises(dist_ckpt.StorageError, match=error):
                hugging_face.load(asked, path, progress=write)


def test_names_that_differ_are_returned_beside_the_module(tmp_path):
    saved, model = torch.nn.Linear(2, 3, bias=False), torch.nn.Linear(2, 3)
    hugging_face.export({**saved.state_dict(), "more": torch.ones(1)}, tmp_path / "m")
    assert hugging_face.load(model, tmp_path / "m", strict="return_all") == (model, {"more"}, {"bias"})
    assert torch.equal(model.weight, saved.weight)
