"""``dcp.Writer`` and ``dcp.Reader``: forms of values, planners of users, folders of others, what a writer keeps."""

import collections
import gc
import pickle
import re
import struct
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from dist_ckpt_dcp_helpers import Meddling, contents, dcp_load, dcp_save, everything, quiet, same
from dist_ckpt_helpers import names, one
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType
from torch.testing._internal.two_tensor import TwoTensor

from sixfold import dist_ckpt
from sixfold.dist_ckpt import (
    CheckpointError,
    CorruptError,
    LocalNonpersistentObject,
    MismatchError,
    PerRank,
    ShardedObject,
    ShardingError,
    dcp,
)
from sixfold.dist_ckpt.plans import plan
from sixfold.dist_ckpt.save_load import reader as engine
from sixfold.dist_ckpt.stores import MemoryStore

GOLDEN = Path(__file__).parents[1] / "golden"


def test_values_that_torch_pickles_unreadably_are_saved_so_that_both_read_them(tmp_path):
    state = {"left": (collections.deque([1, 2], 5),), "seen": (collections.defaultdict(list, {"a": [1]}),)}
    dcp_save(state, dcp.Writer(tmp_path / "c"))
    for reader in (FileSystemReader, dcp.Reader):
        found = dcp_load(dict.fromkeys(state), reader(tmp_path / "c"))
        assert found == state
        assert found["left"][0].maxlen == 5
        assert found["seen"][0].default_factory is list


def test_a_writer_takes_the_arguments_of_torchs_writer_by_name(tmp_path):
    given = {"single_file_per_rank": False, "sync_files": False, "thread_count": 1, "per_thread_copy_ahead": 1}
    state = {"w": torch.arange(6.0), "lr": 0.5}
    dcp_save(state, FileSystemWriter(tmp_path / "theirs", **given))
    dcp_save(state, dcp.Writer(tmp_path / "ours", **given))
    for place in ("theirs", "ours"):
        assert same(everything(dcp.Reader(tmp_path / place)), everything(FileSystemReader(tmp_path / "theirs")))


def test_a_class_that_the_reader_must_be_told_of_is_warned_of_at_save(tmp_path):
    with pytest.warns(UserWarning, match=r"Fraction.*safe_globals"):
        torch_dcp.save({"of": fractions_half()}, storage_writer=dcp.Writer(tmp_path / "c"))
    assert everything(FileSystemReader(tmp_path / "c")) == {"of": fractions_half()}


OF_OURS = {
    "PerRank": lambda: PerRank([1, 2]),
    "ShardedTensor": lambda: one("w", torch.ones(2)),
    "ShardedObject": lambda: ShardedObject("o", 1, (1,), (0,)),
    "LocalNonpersistentObject": lambda: LocalNonpersistentObject(1),
}


@pytest.mark.parametrize("kind", OF_OURS)
@pytest.mark.parametrize("deep", [False, True])
def test_what_only_our_own_save_knows_is_refused_through_torchs_calls(tmp_path, kind, deep):
    """It was pickled as it is, of one rank, with a warning; no load took it back."""
    value = OF_OURS[kind]()
    with pytest.raises(CheckpointException) as told:
        dcp_save({"own": [1, {"x": value}] if deep else value}, dcp.Writer(tmp_path / "c"))
    (error,) = [error for error, _ in told.value.failures.values()]
    assert isinstance(error, ShardingError)
    assert re.match(rf"own.*: a {kind} is for sixfold\.dist_ckpt\.save", str(error))
    assert not (tmp_path / "c").exists()


def fractions_half():
    from fractions import Fraction

    return Fraction(1, 2)


def test_sparse_tensors_are_refused_as_torch_refuses_them(tmp_path):
    for writer in (FileSystemWriter, dcp.Writer):
        with pytest.raises(CheckpointException, match=r"(?i)sparse"):
            dcp_save({"s": torch.eye(3).to_sparse()}, writer(tmp_path / "c"))


def test_subclasses_go_through_torchs_own_form_and_copy(tmp_path):
    value = TwoTensor(torch.arange(6.0).view(2, 3), torch.ones(2, 3))  # computes its values from two tensors
    with torch.serialization.safe_globals([TwoTensor, torch.device]):
        dcp_save({"s": value}, dcp.Writer(tmp_path / "c"))
        for reader in (FileSystemReader, dcp.Reader):
            target = TwoTensor(torch.zeros(2, 3), torch.zeros(2, 3))
            found = dcp_load({"s": target}, reader(tmp_path / "c"))["s"]
            assert found is target
            assert torch.equal(found.a, value.a)
            assert torch.equal(found.b, value.b)


def test_a_planner_that_gives_another_dtype_than_it_planned_is_refused(tmp_path):
    class Halving(torch_dcp.DefaultSavePlanner):
        def resolve_data(self, write_item):
            return super().resolve_data(write_item).half()

    with pytest.raises(CheckpointException, match=r"w: the planner gives torch\.float16") as caught:
        dcp_save({"w": torch.ones(2)}, dcp.Writer(tmp_path / "c"), planner=Halving())
    assert isinstance(caught.value.failures[0][0], ShardingError)
    assert names(tmp_path) == []


def test_what_a_failed_save_wrote_is_gone_at_once(tmp_path):
    def broken():
        raise OSError(5, "the card is on fire")

    writer = dcp.Writer(tmp_path / "c")
    with pytest.raises(CheckpointException):
        dcp_save(contents(), writer, planner=Meddling(broken, 5))
    assert names(tmp_path) == []


def test_what_a_writer_began_goes_with_it(tmp_path):
    writer, planner = dcp.Writer(tmp_path / "c"), torch_dcp.DefaultSavePlanner()
    planner.set_up_planner({"w": torch.ones(2)}, is_coordinator=True)
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    writer.prepare_global_plan([planner.create_local_plan()])
    assert len(names(tmp_path)) == 1
    del writer
    gc.collect()
    assert names(tmp_path) == []


def test_files_that_a_trainer_owns_go_with_the_checkpoint_that_is_replaced(tmp_path):
    for step in (1, 2):
        dcp_save(contents(step), dcp.Writer(tmp_path / "c", owns=["meta.pt"]))
        assert "meta.pt" not in names(tmp_path / "c")  # none of another checkpoint
        (tmp_path / "c" / "meta.pt").write_bytes(b"of Lightning")
    with pytest.raises(CheckpointException, match=r"meta\.pt"):
        dcp_save(contents(3), dcp.Writer(tmp_path / "c"))
    assert everything(dcp.Reader(tmp_path / "c"))["step"] == 2


def test_megatrons_flattened_layout_loads_by_its_true_shapes():
    listed = dist_ckpt.load_plain_tensors(GOLDEN / "megatron-0.12-flattened")
    state = {key: torch.zeros_like(tensor) for key, tensor in listed.items()}
    found = dcp_load(state, dcp.Reader(GOLDEN / "megatron-0.12-flattened"), planner=flat_planner())
    assert same(found, listed)


def test_a_zarr_folder_loads_too():
    listed = dist_ckpt.load_plain_tensors(GOLDEN / "megatron-0.12-zarr")
    state = {key: torch.zeros_like(tensor) for key, tensor in listed.items()}
    assert same(dcp_load(state, dcp.Reader(GOLDEN / "megatron-0.12-zarr"), planner=flat_planner()), listed)


def flat_planner():
    return torch_dcp.DefaultLoadPlanner(flatten_state_dict=False)


def test_a_hole_is_told_and_what_is_not_asked_for_may_have_one(tmp_path):
    half = {"w": one("w", torch.ones(4)), "v": one("v", torch.ones(4))}
    dist_ckpt.save(half, tmp_path / "c")
    metadata = FileSystemReader(tmp_path / "c").read_metadata()
    metadata.state_dict_metadata["w"].size = torch.Size([6])
    for name in ("metadata.json", "common.pt", "integrity.json"):
        (tmp_path / "c" / name).unlink()
    del metadata.sixfold_save_id
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointException, match="w: 2 of its elements are in no chunk") as caught:
        dcp_load({"w": torch.zeros(6)}, dcp.Reader(tmp_path / "c"))
    assert isinstance(caught.value.failures[0][0], CorruptError)
    assert dcp_load({"v": torch.zeros(4)}, dcp.Reader(tmp_path / "c"))["v"].sum() == 4


@pytest.mark.parametrize("starts", [(0, 1), (0, 4, 4)])
def test_an_overlap_hides_no_hole_and_is_told(tmp_path, starts):
    """Chunks of four elements of eight: as many as are wanted, or more of them, and [5:8) in none, or [4:8) in two."""
    dcp_save({"w": torch.arange(8.0)}, FileSystemWriter(tmp_path / "c"))
    metadata = FileSystemReader(tmp_path / "c").read_metadata()
    (info,) = metadata.storage_data.values()
    chunks = [ChunkStorageMetadata(torch.Size([start]), torch.Size([4])) for start in starts]
    metadata.state_dict_metadata["w"].chunks, metadata.storage_data = chunks, {}
    for n, chunk in enumerate(chunks):
        name = f"__{n}_0.distcp"
        torch.save(torch.arange(4.0) + chunk.offsets[0], tmp_path / "c" / name)
        size = (tmp_path / "c" / name).stat().st_size
        metadata.storage_data[MetadataIndex("w", chunk.offsets, n)] = type(info)(name, 0, size)
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointException, match=r"w\[.*\]: chunks of the checkpoint overlap") as caught:
        dcp_load({"w": torch.full((8,), -7.0)}, dcp.Reader(tmp_path / "c"))
    assert isinstance(caught.value.failures[0][0], CorruptError)
    with pytest.raises(CorruptError, match=r"w\[:\]: chunks of the checkpoint overlap"):
        dist_ckpt.load({"w": one("w", torch.full((8,), -7.0))}, tmp_path / "c")


def test_paths_of_a_planner_that_stand_for_endless_lists_are_refused(tmp_path):
    dcp_save({"w": torch.ones(2)}, FileSystemWriter(tmp_path / "c"))
    metadata = FileSystemReader(tmp_path / "c").read_metadata()
    metadata.planner_data = {"w": ("w", 10**12)}
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptError, match="planner_data"):
        dcp.Reader(tmp_path / "c").read_metadata()
    metadata.planner_data = {"w": metadata.storage_meta}
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.warns(UserWarning, match="StorageMeta"):
        assert dcp.Reader(tmp_path / "c").read_metadata().planner_data is None


@pytest.mark.parametrize(("policy", "dtype", "fits"), [("cast", torch.int32, True), ("exact", torch.int32, False)])
def test_dtypes_are_converted_by_the_readers_policy(tmp_path, policy, dtype, fits):
    dcp_save({"w": torch.tensor([1.0, 2.5])}, dcp.Writer(tmp_path / "c"))
    state, reader = {"w": torch.zeros(2, dtype=dtype)}, dcp.Reader(tmp_path / "c", dtype_policy=policy)
    if not fits:
        with pytest.raises(CheckpointException, match=r"2\.5"):
            dcp_load(state, reader)
        return
    with pytest.warns(UserWarning, match="converted to another dtype in w"):
        torch_dcp.load(state, storage_reader=reader)
    assert state["w"].tolist() == [1, 2]
    with pytest.raises(CheckpointException, match="stored is"):
        dcp_load({"w": torch.zeros(2, dtype=dtype)}, dcp.Reader(tmp_path / "c", dtype_policy="strict"))


def test_each_byte_is_read_once_and_none_that_is_not_asked_for(tmp_path, monkeypatch):
    state = {f"w{n}": torch.full((512, 512), float(n)) for n in range(8)}  # of 1 MiB each
    dcp_save(state, FileSystemWriter(tmp_path / "c"))
    runs = []
    real = engine.Reader._read
    monkeypatch.setattr(engine.Reader, "_read", lambda self, file, run: (runs.append(run), real(self, file, run))[1])
    found = dcp_load({"w3": torch.zeros(512, 512)}, dcp.Reader(tmp_path / "c"))
    assert found["w3"].unique().tolist() == [3.0]
    assert (1 << 20) - (1 << 16) < sum(run.stop - run.start for run in runs) <= 1 << 20


def test_functions_of_the_door_are_torchs_with_ours_put_in(tmp_path):
    with quiet():
        dcp.save(contents(), checkpoint_id=tmp_path / "a")
        dcp.async_save(contents(2), checkpoint_id=str(tmp_path / "b")).result(30)
        dcp.save(contents(3), checkpoint_id=tmp_path / "t", storage_writer=FileSystemWriter("unused"))
        found = {"step": 0}
        dcp.load(found, checkpoint_id=tmp_path / "b")
    assert found == {"step": 2}
    assert [(tmp_path / name / "integrity.json").exists() for name in "abt"] == [True, True, False]


@pytest.mark.parametrize("options", [{"if_exists": "maybe"}, {"thread_count": 0}])
def test_a_writer_refuses_options_that_cannot_work(options):
    with pytest.raises(CheckpointError, match=next(iter(options))):
        dcp.Writer("c", **options)


@pytest.mark.parametrize("options", [{"verify": "maybe"}, {"dtype_policy": "maybe"}])
def test_a_reader_refuses_options_that_cannot_work(options):
    with pytest.raises(CheckpointError, match="maybe"):
        dcp.Reader("c", **options)


def test_calls_out_of_turn_are_told_so(tmp_path):
    with pytest.raises(CheckpointError, match="read_metadata"):
        dcp.Reader(tmp_path).set_up_storage_reader(None, True)
    with pytest.raises(CheckpointError, match="write_data"):
        dcp.Writer(tmp_path).finish(None, [])
    with pytest.raises(CheckpointException, match="name a folder"):
        dcp_save({"w": torch.ones(1)}, dcp.Writer(""))


def test_bytes_of_a_key_that_is_not_stored_are_told_of(tmp_path):
    dcp_save({"w": torch.ones(1)}, dcp.Writer(tmp_path / "c"))
    reader = dcp.Reader(tmp_path / "c")
    with warnings.catch_warnings():
        reader.set_up_storage_reader(reader.read_metadata(), True)
    index = torch_dcp.metadata.MetadataIndex("gone")
    size = torch.Size([0])
    item = torch_dcp.ReadItem(torch_dcp.planner.LoadItemType.BYTE_IO, index, size, index, size, size)
    with pytest.raises(MismatchError, match="gone"):
        reader.prepare_local_plan(torch_dcp.LoadPlan([item]))


def test_a_load_plans_its_reads_once(tmp_path, monkeypatch):
    dcp_save({"w": torch.ones(4), "step": 3}, dcp.Writer(tmp_path / "c"))
    made, real = [], plan.plan_load
    monkeypatch.setattr(plan, "plan_load", lambda *args, **options: made.append(1) or real(*args, **options))
    assert dcp_load({"w": torch.zeros(4), "step": 0}, dcp.Reader(tmp_path / "c"))["w"].tolist() == [1, 1, 1, 1]
    assert made == [1]


class Behind(torch_dcp.DefaultLoadPlanner):
    """Names places inside chunks, as torch's planners do not: the last three elements of four."""

    def create_local_plan(self):
        made = super().create_local_plan()
        there, count = MetadataIndex("w", torch.Size([1])), torch.Size([3])
        return replace(made, items=[replace(item, storage_index=there, lengths=count) for item in made.items])


def test_what_a_planner_reads_from_within_a_chunk_is_hashed_too(tmp_path):
    dcp_save({"w": torch.arange(4.0)}, dcp.Writer(tmp_path / "c"))
    assert dcp_load({"w": torch.zeros(4)}, dcp.Reader(tmp_path / "c"), planner=Behind())["w"].tolist() == [1, 2, 3, 0]
    path = tmp_path / "c" / "__0_0.distcp"
    data = path.read_bytes()
    path.write_bytes(data.replace(struct.pack("<4f", 0, 1, 2, 3), struct.pack("<4f", 1, 2, 3, 4)))
    assert path.read_bytes() != data
    with pytest.raises(CheckpointException) as caught:
        dcp_load({"w": torch.zeros(4)}, dcp.Reader(tmp_path / "c"), planner=Behind())
    assert isinstance(caught.value.failures[0][0], CorruptError)


def test_a_tensor_of_another_shape_than_its_item_is_a_sharding_error(tmp_path):
    class Narrow(torch_dcp.DefaultLoadPlanner):
        def transform_tensor(self, read_item, tensor):
            return tensor[:2]

    dcp_save({"w": torch.arange(4.0)}, dcp.Writer(tmp_path / "c"))
    with pytest.raises(CheckpointException) as caught:
        dcp_load({"w": torch.zeros(4)}, dcp.Reader(tmp_path / "c"), planner=Narrow())
    assert isinstance(caught.value.failures[0][0], ShardingError)


class ManyStreams(MemoryStore):
    """Takes several files at once, as a URL does."""

    streams = 3


def test_a_store_that_takes_several_files_gets_them_and_a_planner_that_fails_leaves_none(monkeypatch):
    monkeypatch.setattr(plan, "_LEAST_FILE_BYTES", 10_000)
    store = ManyStreams()
    dcp_save(contents(), dcp.Writer(store))
    parts = [name for name in store.files if name.endswith(".distcp")]
    assert len(parts) == 3
    assert same(everything(dcp.Reader(store)), contents())

    def broken():
        raise ConnectionError("as of a network, but the planner's own")  # no store may ask again for it

    before = dict(store.files)
    with pytest.raises(CheckpointException, match="the planner's own") as caught:
        dcp_save(contents(2), dcp.Writer(store), planner=Meddling(broken, 3))
    assert type(caught.value.failures[0][0]) is ConnectionError
    assert store.files == before
    dcp_save(contents(3), dcp.Writer(store))
    assert everything(dcp.Reader(store))["step"] == 3
    assert not set(parts) & store.files.keys()  # what it replaced is gone


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"type": LoadItemType.TENSOR}, r"n: the planner asks for a chunk at \(\), which"),
        (
            {"dest_offsets": torch.Size([2]), "storage_offsets": torch.Size([2]), "lengths": torch.Size([3])},
            r"w: the planner asks for .* of shape \(4,\)",
        ),
    ],
)
def test_an_item_of_what_is_not_there_is_told_before_the_planner_stumbles_over_it(tmp_path, wrong, what):
    class Wrong(torch_dcp.DefaultLoadPlanner):
        def create_local_plan(self):
            plan = super().create_local_plan()
            plan.items = [replace(item, **wrong) if item.storage_index.fqn == what[0] else item for item in plan.items]
            return plan

    dcp_save({"w": torch.arange(4.0), "n": 3}, dcp.Writer(tmp_path / "c"))
    with pytest.raises(CheckpointException, match=what) as caught:
        dcp_load({"w": torch.zeros(4), "n": 0}, dcp.Reader(tmp_path / "c"), planner=Wrong())
    assert type(caught.value.failures[0][0]) is MismatchError
