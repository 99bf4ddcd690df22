"""What code of megatron-core and of torch calls on our classes: calls that the peers' own tests and optimizers make."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import StorageMeta

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, ShardedObject, ShardedTensor, ShardedTensorFactory, ShardingError
from sixfold.dist_ckpt.dcp import Reader, Writer
from sixfold.dist_ckpt.mapping import ShardedBase
from sixfold.dist_ckpt.strategies.base import LoadShardedStrategy
from sixfold.dist_ckpt.strategies.fully_parallel import FullyParallelLoadStrategyWrapper


def factory(data):
    return ShardedTensorFactory("w", data, lambda *_: {}, lambda parts: parts)


RECORDS = {
    "tensor": lambda: ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, 1, 3)),
    "object": lambda: ShardedObject("o", {"a": 1}, (2,), (1,)),
    "factory": lambda: factory(torch.ones(2)),
}


# Megatron's distributed optimizer calls both on whatever stands in the model's sharded state dict.
@pytest.mark.parametrize("kind", RECORDS)
def test_every_record_checks_its_metadata_and_gives_a_copy_without_data(kind):
    record = RECORDS[kind]()
    assert isinstance(record, ShardedBase)
    assert record.validate_metadata_integrity() is None
    bare = record.without_data()
    assert bare.data is None
    assert record.data is not None
    assert (type(bare), bare.key, bare.replica_id) == (type(record), record.key, record.replica_id)


def test_an_object_that_was_moved_out_of_its_grid_is_found_by_the_check():
    record = RECORDS["object"]()
    record.global_offset = (2,)
    with pytest.raises(ShardingError, match="not in the grid"):
        record.validate_metadata_integrity()


@pytest.mark.parametrize(
    ("shape", "offsets", "prepended"),
    [((2, 5), ((0, 1, 3), (1, 3, 4)), 0), ((4,), ((0, 2, 8), (1, 1, 2)), 1), ((), (), 0)],
)
def test_chunk_grids_are_those_of_megatron_core(shape, offsets, prepended):
    peer = pytest.importorskip("megatron.core.dist_checkpointing.mapping", reason="megatron-core is the oracle")
    arguments = ("w", torch.ones(shape), *offsets)
    ours = ShardedTensor.from_rank_offsets(*arguments, prepend_axis_num=prepended)
    theirs = peer.ShardedTensor.from_rank_offsets(*arguments, prepend_axis_num=prepended)
    assert ours.local_chunk_offset_in_global() == theirs.local_chunk_offset_in_global()
    assert ours.max_allowed_chunks() == theirs.max_allowed_chunks()


def test_a_chunk_grid_without_a_regular_cut_is_an_error():
    record = ShardedTensor("w", torch.ones(2), torch.float32, (2,), (5,), (3,), None)
    for grid in (record.local_chunk_offset_in_global, record.max_allowed_chunks):
        with pytest.raises(ShardingError, match=r"w.*regular grid"):
            grid()


def test_missing_objects_come_back_by_the_key_that_the_user_gave(tmp_path):
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2)), "rng": ShardedObject("rng", 1, (1,), (0,))}
    dist_ckpt.save(state, tmp_path / "step", group=None)
    asked = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2)), "new": ShardedObject("new", None, (1,), (0,))}
    _, missing, unexpected = dist_ckpt.load(asked, tmp_path / "step", strict="return_all", group=None)
    assert (missing, unexpected) == ({"rng"}, {"new"})


def test_a_reader_tells_what_torch_stored_of_the_save(tmp_path):
    writer = dcp.FileSystemWriter(tmp_path / "theirs")
    dcp.save({"w": torch.ones(2)}, storage_writer=writer)
    theirs = dcp.FileSystemReader(tmp_path / "theirs").read_metadata().storage_meta
    reader = Reader(tmp_path / "theirs")
    ours = reader.read_metadata().storage_meta
    assert isinstance(ours, StorageMeta)
    assert ours.save_id == theirs.save_id
    assert ours.save_id is not None
    assert str(ours.checkpoint_id) == str(theirs.checkpoint_id)
    assert ours.load_id == reader.load_id


def test_a_reader_and_torchs_agree_on_what_a_writer_stored_of_the_save(tmp_path):
    writer = Writer(tmp_path / "ours")
    dcp.save({"w": torch.ones(2)}, storage_writer=writer)
    ours = Reader(tmp_path / "ours").read_metadata().storage_meta
    theirs = dcp.FileSystemReader(tmp_path / "ours").read_metadata().storage_meta
    assert ours.save_id == theirs.save_id is not None


def test_a_writer_that_may_not_overwrite_leaves_what_is_there(tmp_path):
    dcp.save({"w": torch.ones(2)}, storage_writer=Writer(tmp_path / "step", overwrite=False))
    with pytest.raises(dcp.CheckpointException, match=r"step|not empty"):
        dcp.save({"w": torch.zeros(2)}, storage_writer=Writer(tmp_path / "step", overwrite=False))
    found = {"w": torch.full((2,), 7.0)}
    dcp.load(found, storage_reader=Reader(tmp_path / "step"))
    assert torch.equal(found["w"], torch.ones(2))
    dcp.save({"w": torch.zeros(2)}, storage_writer=Writer(tmp_path / "step", overwrite=True))
    with pytest.raises(CheckpointError, match="overwrite"):
        Writer(tmp_path / "step", overwrite=False, if_exists="replace")


@pytest.mark.parametrize("cached", [True, False])
def test_a_writers_stage_keeps_its_memory_only_when_that_is_asked_for(tmp_path, cached):
    writer = Writer(tmp_path / "step", cache_staged_state_dict=cached)
    weight = torch.arange(4.0)
    first = writer.stage({"w": weight, "step": 1})["w"]
    before = first.data_ptr()
    weight += 1
    second = writer.stage({"w": weight, "step": 2})
    assert torch.equal(second["w"], weight)
    assert second["step"] == 2
    assert (second["w"].data_ptr() == before) == cached
    assert second["w"].data_ptr() != weight.data_ptr()


def test_a_reader_takes_a_number_of_threads(tmp_path):
    weight = torch.randn(64, 64)
    dcp.save({"w": weight}, storage_writer=Writer(tmp_path / "step"))
    for threads in (1, 4):
        found = {"w": torch.zeros(64, 64)}
        dcp.load(found, storage_reader=Reader(tmp_path / "step", thread_count=threads))
        assert torch.equal(found["w"], weight)
    with pytest.raises(CheckpointError, match="thread_count is 0"):
        Reader(tmp_path / "step", thread_count=0)


def test_a_url_of_a_protocol_that_nothing_opens_is_no_checkpoint_id(tmp_path):
    for side in (Reader, Writer):
        assert not side.validate_checkpoint_id("abc://x")
        assert side.validate_checkpoint_id(tmp_path / "run")
        assert side.validate_checkpoint_id(str(tmp_path / "run"))
        assert side.validate_checkpoint_id(f"file://{tmp_path}/run")


def test_a_url_that_fsspec_opens_is_a_checkpoint_id():
    pytest.importorskip("fsspec", reason="fsspec says which protocols there are")
    assert Writer.validate_checkpoint_id("memory://run/step-1")


class MainReplicas(LoadShardedStrategy):
    """A user's strategy that reads main replicas alone, as megatron-core's contract says, and notes what it got."""

    def __init__(self):
        self.asked = []

    def check_backend_compatibility(self, loaded_backend):
        pass

    def check_version_compatibility(self, loaded_version):
        pass

    @property
    def can_handle_sharded_objects(self):
        return True

    def load_tensors_metadata(self, checkpoint_dir):
        return dist_ckpt.load_tensors_metadata(checkpoint_dir)

    def load_sharded_metadata(self, checkpoint_dir):
        return dist_ckpt.load_sharded_metadata(checkpoint_dir)

    def load(self, sharded_state_dict, checkpoint_dir):
        def look(node):
            if isinstance(node, dict):
                for child in node.values():
                    look(child)
            else:
                self.asked.append((node.key, node.replica_id))

        look(sharded_state_dict)
        return dist_ckpt.load(sharded_state_dict, checkpoint_dir, group=None, validate_access_integrity=False)


def shared_load(rank, ranks, folder):
    def state(fill):
        made = {f"w{i}": torch.full((8,), float(i) * fill) for i in range(4)}
        found = {k: ShardedTensor.from_rank_offsets(k, t, replica_id=rank) for k, t in made.items()}
        return {**found, "rng": ShardedObject("rng", {"seed": 5} if fill else None, (1,), (0,), replica_id=rank)}

    dist_ckpt.save(state(1), folder)
    strategy = MainReplicas()
    loaded = dist_ckpt.load(state(0), folder, FullyParallelLoadStrategyWrapper(strategy))
    assert all(torch.equal(loaded[f"w{i}"], torch.full((8,), float(i))) for i in range(4))
    assert loaded["rng"] == {"seed": 5}
    plain = dist_ckpt.load_plain_tensors(folder)  # on all ranks at once, as megatron-core's tests call it
    assert sorted(plain) == ["w0", "w1", "w2", "w3"]
    return strategy.asked


@pytest.mark.slow
def test_a_users_strategy_is_asked_for_main_replicas_by_the_parallel_wrapper(tmp_path):
    asked = run_ranks(shared_load, 2, tmp_path / "step")
    assert all(replica in (0, (0,)) for of_rank in asked for _, replica in of_rank)
    tensors = [key for of_rank in asked for key, _ in of_rank if key.startswith("w")]
    assert sorted(tensors) == ["w0", "w1", "w2", "w3"]  # each on one rank
