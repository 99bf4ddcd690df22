"""Models of transformers out of any layout and into any layout; transformers, safetensors and torch are the oracles."""

import errno
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from dist_ckpt_helpers import peak_growth_mib
from hugging_face_helpers import CUTS, llama, logits, same, sharded, whole_of
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import LostPeerError, MismatchError, ShardedTensor, hugging_face, tools
from sixfold.dist_ckpt.hugging_face import KeyMap, exporting, model_files

transformers = pytest.importorskip("transformers", reason="needs transformers, which is the oracle")
safe = pytest.importorskip("safetensors.torch", reason="needs the extra safetensors")

RANKS_IMPORT = ("transformers.models.llama.modeling_llama", "safetensors.torch")


def export(rank, ranks, folder, cut, options):
    model = llama(tied=options.pop("tied", False))
    return hugging_face.export(CUTS[cut](model, ranks), folder, extras=[model.config], **options)


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
def test_transformers_computes_the_same_from_what_two_ranks_have_exported(tmp_path, cut):
    found = run_ranks(export, 2, tmp_path / "m", cut, {"max_shard_bytes": 6000})
    assert found[0] == found[1]
    assert len(found[0]["files"]) > 3
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "m", attn_implementation="eager")
    assert same(read.state_dict(), llama().state_dict())
    assert torch.equal(logits(read), logits(llama()))
    config = json.loads((tmp_path / "m/config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "float32"), "FSDP2 renames the class"


def load(rank, ranks, folder, cut):
    model = CUTS[cut](llama(seed=1), ranks)
    assert hugging_face.load(model, folder) is model
    return whole_of(model)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("cut", CUTS)
def test_a_model_that_transformers_saved_loads_at_any_layout(tmp_path, cut, ranks):
    llama().save_pretrained(tmp_path / "m", max_shard_size="6KB")
    assert (tmp_path / "m" / "model.safetensors.index.json").exists()
    for found in run_ranks(load, ranks, tmp_path / "m", cut):
        assert same(found, llama().state_dict())


def export_small(rank, ranks, folder, make, options):
    exporting.BATCH_BYTES = 100  # many steps
    return hugging_face.export(make(rank, ranks), folder, **options)


def whole_state():
    torch.manual_seed(0)
    return {"a": torch.randn(7, 6), "b": torch.randn(5), "c": torch.arange(9), "d": torch.randn(3, 4, 2).double()}


def plain(rank, ranks):
    return whole_state()


def dtensors(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    places = {"a": [Shard(1)], "b": [Shard(0)], "c": [Replicate()], "d": [Shard(0)]}  # none of them even
    return {key: distribute_tensor(value, mesh, places[key]) for key, value in whole_state().items()}


def stages(rank, ranks):
    return {key: value for at, (key, value) in enumerate(whole_state().items()) if at % ranks == rank}


def flat_records(rank, ranks):
    found = {}
    for key, value in whole_state().items():
        start, stop = (value.numel() * at // ranks for at in (rank, rank + 1))
        found[key] = ShardedTensor.from_rank_offsets_flat(
            key, value.reshape(-1)[start:stop].clone(), tuple(value.shape), flattened_range=slice(start, stop)
        )
    return found


MAKERS = [plain, dtensors, stages, flat_records]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("make", MAKERS)
def test_no_layout_and_no_number_of_ranks_changes_a_byte(tmp_path, make, ranks):
    options = {"max_shard_bytes": 100, "dtype": torch.bfloat16, "key_map": KeyMap({"{x}": "model.{x}"})}
    hugging_face.export(whole_state(), tmp_path / "one", group=None, **options)
    run_ranks(export_small, ranks, tmp_path / "many", make, options)
    assert files_of(tmp_path / "many") == files_of(tmp_path / "one")
    assert len(files_of(tmp_path / "one")) == 4
    read = {k: v for path in (tmp_path / "many").glob("*.safetensors") for k, v in safe.load_file(path).items()}
    wanted = {f"model.{k}": v.bfloat16() if v.is_floating_point() else v for k, v in whole_state().items()}
    assert same(read, wanted)


def own_of(value):
    """What this rank holds."""
    return value.data if isinstance(value, ShardedTensor) else getattr(value, "_local_tensor", value)


def load_as(rank, ranks, folder, make, options):
    state = make(rank, ranks)
    for value in state.values():
        own_of(value).zero_()
    hugging_face.load(state, folder, **options)
    for key, value in make(rank, ranks).items():
        assert torch.equal(own_of(state[key]), own_of(value)), key


@pytest.mark.parametrize("make", MAKERS)
def test_every_layout_loads_under_its_own_names(tmp_path, make):
    names = KeyMap({"{x}": "model.{x}"})
    hugging_face.export(whole_state(), tmp_path / "m", key_map=names, max_shard_bytes=200, group=None)
    run_ranks(load_as, 2, tmp_path / "m", make, {"key_map": names})


def opened_files(rank, ranks, folder):
    opened, real = [], Path.open

    def spy(path, mode="r", *rest, **options):
        if mode == "xb":
            opened.append(path.name)
        return real(path, mode, *rest, **options)

    Path.open = spy
    hugging_face.export(whole_state(), folder, max_shard_bytes=150)
    return opened


def test_each_rank_writes_files_of_its_own(tmp_path):
    assert run_ranks(opened_files, 2, tmp_path / "m") == [
        ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model.safetensors.index.json"],
        ["model-00003-of-00003.safetensors"],
    ]


def tied_export(rank, ranks, folder):
    model = sharded(llama(tied=True), ranks)
    return hugging_face.export(model, folder, extras=[model.config], dtype=torch.bfloat16)


def tied_load(rank, ranks, folder):
    model = sharded(llama(seed=1, tied=True).bfloat16(), ranks)
    hugging_face.load(model, folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return whole_of(model)


@pytest.mark.slow
def test_tied_weights_of_fsdp2_go_out_and_come_in_as_bfloat16(tmp_path):
    (found, _) = run_ranks(tied_export, 2, tmp_path / "m")
    assert found["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.bfloat16)
    wanted = llama(tied=True).bfloat16().state_dict()
    assert same(read.state_dict(), wanted)
    for loaded in run_ranks(tied_load, 4, tmp_path / "m"):
        assert same(loaded, wanted)


def some_without_elements(rank, ranks, folder, load):
    """Of two rows FSDP2 gives the last two of four ranks none; which are tied on the others all the same."""
    mesh = init_device_mesh("cpu", (ranks,))
    row = distribute_tensor(torch.arange(6.0).view(2, 3), mesh, [Shard(0)])
    state = {"a": row, "b": row}
    if not load:
        return hugging_face.export(state, folder)["tied"]
    row.to_local().zero_()
    hugging_face.load(state, folder)
    return row.full_tensor().tolist()


@pytest.mark.slow
def test_ranks_without_elements_of_tied_weights_agree_with_the_others(tmp_path):
    assert run_ranks(some_without_elements, 4, tmp_path / "m", False) == [{"b": "a"}] * 4
    found = run_ranks(some_without_elements, 4, tmp_path / "m", True)
    assert found == [[[0, 1, 2], [3, 4, 5]]] * 4


def tied_on_one(rank, ranks, folder):
    mesh = init_device_mesh("cpu", (ranks,))
    one, other = (distribute_tensor(torch.ones(4), mesh, [Shard(0)]) for _ in range(2))
    return hugging_face.export({"a": one, "b": one if rank else other}, folder)["tied"]


def test_names_that_are_tied_on_one_rank_alone_are_both_written(tmp_path):
    assert run_ranks(tied_on_one, 2, tmp_path / "m") == [{}, {}]
    assert set(safe.load_file(tmp_path / "m" / "model.safetensors")) == {"a", "b"}


def by_torch(rank, ranks, folder, write):
    state = dtensors(rank, ranks)
    if write:
        torch_dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
        return
    for value in state.values():
        value.to_local().zero_()
    torch_dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)))
    assert same({key: value.full_tensor() for key, value in state.items()}, whole_state())


def test_torchs_reader_reads_an_export_into_other_ranks(tmp_path):
    run_ranks(export_small, 3, tmp_path / "m", dtensors, {"max_shard_bytes": 150})
    run_ranks(by_torch, 2, tmp_path / "m", False)


@pytest.mark.slow
@pytest.mark.parametrize("make", [plain, dtensors])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_torchs_writer_saves_by_parts_loads_at_any_number_of_ranks(tmp_path, make, ranks):
    run_ranks(by_torch, 2, tmp_path / "m", True)
    assert len(files_of(tmp_path / "m")) == 2
    run_ranks(load_as, ranks, tmp_path / "m", make, {})


def convert(rank, ranks, source, folder):
    options = {"max_shard_bytes": 150, "dtype": torch.float16}
    return tools.convert(source, folder, to="safetensors", group="world", **options)


def test_ranks_convert_a_checkpoint_together_as_one_does(tmp_path):
    dist_ckpt.save(whole_state(), tmp_path / "c")
    found = run_ranks(convert, 2, tmp_path / "c", tmp_path / "m")
    assert found[0] == found[1]
    alone = tools.convert(tmp_path / "c", tmp_path / "one", to="safetensors", max_shard_bytes=150, dtype=torch.float16)
    assert found[0] == {**alone, "dst": str(tmp_path / "m")}
    assert files_of(tmp_path / "m") == files_of(tmp_path / "one")


def failing(rank, ranks, folder, what):
    state, options = dtensors(rank, ranks), {}
    exporting.BATCH_BYTES = 100
    if rank == 1 and what == "disk":

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        model_files.FilesWriter.add = full
    if rank == 1 and what == "value":
        state["b"].to_local().fill_(1e30)
        options["dtype"] = torch.float16
    if rank == 0 and what == "value":
        options["dtype"] = torch.float16
    if rank == 1 and what == "state":
        state["b"] = torch.zeros(2).to_sparse()
    if rank == 1 and what == "folder":
        folder = folder.with_name("other")
    if rank == 1 and what == "option":
        options["dtype"] = torch.int8
    start = time.monotonic()
    try:
        hugging_face.export(state, folder, max_shard_bytes=150, timeout_s=60, **options)
    except dist_ckpt.CheckpointError as error:
        return type(error).__name__, str(error), time.monotonic() - start < 10
    return None


FAILURES = {
    "disk": ("StorageError", "ENOSPC"),
    "value": ("MismatchError", "b: 1e+30 is finite"),
    "state": ("ShardingError", "b: data is torch.sparse_coo"),
    "folder": ("ShardingError", "the ranks save into different folders"),
    "option": ("CheckpointError", "dtype is torch.int8"),
}


@pytest.mark.parametrize("what", FAILURES)
def test_what_fails_on_one_rank_fails_on_all_at_once_and_leaves_nothing(tmp_path, what):
    found = run_ranks(failing, 2, tmp_path / "m", what)
    kind, words = FAILURES[what]
    assert found[0] == found[1]
    assert found[0][0] == kind and words in found[0][1] and found[0][2]
    assert list(tmp_path.iterdir()) == []


def dying(rank, ranks, folder):
    exporting.BATCH_BYTES = 100
    if rank == 1:
        real, calls = exporting._Transfer._packed, []

        def packed(*given):
            calls.append(1)
            if len(calls) > 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*given)

        exporting._Transfer._packed = packed
    start = time.monotonic()
    with pytest.raises(LostPeerError, match="rank 1"):
        hugging_face.export(dtensors(rank, ranks), folder, max_shard_bytes=150, timeout_s=60)
    return time.monotonic() - start


def test_a_rank_that_dies_is_told_in_seconds_and_leaves_no_folder(tmp_path):
    found = run_ranks(dying, 2, tmp_path / "m", allow_exit={1})
    assert found[0] < 10
    assert list(tmp_path.iterdir()) == []


def killed(rank, ranks, folder, stop):
    """Ends at the given step: a file begun, the index, the rename."""
    calls = []

    def counted(function):
        def call(*given, **options):
            calls.append(1)
            if len(calls) > stop:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*given, **options)

        return call

    model_files.FilesWriter._next = counted(model_files.FilesWriter._next)
    model_files.write_file = counted(model_files.write_file)
    model_files.LocalStore.publish = counted(model_files.LocalStore.publish)
    hugging_face.export({f"w{i}": torch.full((4,), float(i)) for i in range(3)}, folder, max_shard_bytes=16)
    return len(calls)


@pytest.mark.slow
def test_a_kill_between_files_leaves_no_folder_and_the_next_export_cleans_up(tmp_path):
    for stop in range(6):
        run_ranks(killed, 1, tmp_path / "m", stop, allow_exit={0})
        assert not (tmp_path / "m").exists()
    assert len(list(tmp_path.iterdir())) == 6  # of the killed ones
    assert run_ranks(killed, 1, tmp_path / "m", 6) == [6]
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert len(files_of(tmp_path / "m")) == 4


def two_axes(rank, ranks):
    mesh = init_device_mesh("cpu", (2, ranks // 2))
    places = {
        "a": [Shard(0), Shard(1)],
        "b": [Replicate(), Shard(0)],
        "c": [Shard(0), Shard(0)],
        "d": [Shard(2), Replicate()],
    }
    whole = whole_state() | {"c": torch.arange(8)}
    return {key: distribute_tensor(value, mesh, places[key]) for key, value in whole.items()}


def test_shards_and_replicas_of_two_mesh_axes_go_out_and_come_in(tmp_path):
    run_ranks(export_small, 4, tmp_path / "m", two_axes, {"max_shard_bytes": 100})
    read = {k: v for path in (tmp_path / "m").glob("*.safetensors") for k, v in safe.load_file(path).items()}
    assert same(read, whole_state() | {"c": torch.arange(8)})
    run_ranks(load_as, 4, tmp_path / "m", two_axes, {})


def differing(rank, ranks, folder):
    with pytest.raises(dist_ckpt.ShardingError, match="w"):
        hugging_face.export({"w": torch.full((3,), float(rank))}, folder)


def test_copies_that_differ_between_ranks_are_an_error(tmp_path):
    run_ranks(differing, 2, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def mismatched(rank, ranks, folder):
    state = dtensors(rank, ranks)
    if rank == 1:
        state["more"] = torch.zeros(1)
    with pytest.raises(MismatchError, match="more: asked for, not in the checkpoint"):
        hugging_face.load(state, folder)


def test_a_name_that_one_rank_asks_for_alone_is_an_error_on_all(tmp_path):
    hugging_face.export(whole_state(), tmp_path / "m", group=None)
    run_ranks(mismatched, 2, tmp_path / "m")


def bytes_read(rank, ranks, folder):
    def so_far():
        return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["rchar"])

    state = {"big": distribute_tensor(torch.zeros(1 << 20), init_device_mesh("cpu", (ranks,)), [Shard(0)])}
    before = so_far()
    hugging_face.load(state, folder)
    return so_far() - before


def test_each_rank_reads_its_own_bytes_alone(tmp_path):
    hugging_face.export({"big": torch.ones(1 << 20)}, tmp_path / "m", group=None)
    for nbytes in run_ranks(bytes_read, 2, tmp_path / "m"):
        assert 2 << 20 <= nbytes < (2 << 20) * 1.2


BATCH_MIB, MODEL_MIB = 1, 64


def growth(rank, ranks, folder):
    exporting.BATCH_BYTES = BATCH_MIB << 20
    mesh = init_device_mesh("cpu", (ranks,))
    state = {f"w{i}": distribute_tensor(torch.randn(1 << 11, 1 << 9), mesh, [Shard(1)]) for i in range(MODEL_MIB // 4)}
    out = peak_growth_mib(
        lambda: hugging_face.export(state, folder, max_shard_bytes=(MODEL_MIB // 4) << 20, dtype=torch.bfloat16)
    )
    loaded = {key: torch.zeros_like(value, dtype=torch.bfloat16) for key, value in state.items()}
    return out, peak_growth_mib(lambda: hugging_face.load(loaded, folder))


@pytest.mark.slow
def test_no_rank_holds_more_than_some_batches_whatever_the_model_is(tmp_path):
    for out, back in run_ranks(growth, 2, tmp_path / "m"):
        assert out < 12 * BATCH_MIB  # packed for both writers, received, put together, and written
        assert back < MODEL_MIB // 4


def told_what_differs(rank, ranks, folder):
    dtype = [torch.bfloat16, None][rank]
    with pytest.raises(MismatchError, match=r"dtype of an export is torch.bfloat16 on rank 0 and None on rank 1"):
        hugging_face.export({"w": torch.ones(4)}, folder, dtype=dtype)


def test_ranks_that_ask_for_other_files_are_told_what_differs(tmp_path):
    run_ranks(told_what_differs, 2, tmp_path / "m")
    assert not (tmp_path / "m").exists()
