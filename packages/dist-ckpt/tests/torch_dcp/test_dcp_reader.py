"""``dcp.Reader``: folders of torch's writer and of ours, read by torch's ``load`` as its own reader reads them."""

import gc
import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from dist_ckpt_dcp_helpers import blank, contents, dcp_load, dcp_save, entries, everything, places, quiet, same
from dist_ckpt_helpers import one
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, StorageReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from sixfold import dist_ckpt
from sixfold.dist_ckpt import MismatchError, dcp
from sixfold.dist_ckpt.formats import unpickle


@pytest.fixture(params=["ours", "torchs", "torchs, a file per item", "torchs, three threads"], scope="module")
def folder(request, tmp_path_factory):
    """A checkpoint of ``contents(1)``; read only."""
    path = tmp_path_factory.mktemp("reader") / "c"
    writer = {
        "ours": lambda: dcp.Writer(path),
        "torchs": lambda: torch_dcp.FileSystemWriter(path),
        "torchs, a file per item": lambda: torch_dcp.FileSystemWriter(path, single_file_per_rank=False),
        "torchs, three threads": lambda: torch_dcp.FileSystemWriter(path, thread_count=3),
    }[request.param]()
    dcp_save(contents(), writer)
    return path


def test_every_leaf_comes_back_into_the_tensors_that_were_given(folder):
    state = blank()
    mine = state["model"]["w"], state["model"]["turned"], state["model"]["layers"][0]["b"]
    dcp_load(state, dcp.Reader(folder))
    assert same(state, contents())
    assert mine[0] is state["model"]["w"]
    assert mine[1] is state["model"]["turned"]
    assert mine[2] is state["model"]["layers"][0]["b"]


def test_checkpoint_id_goes_before_the_readers_path_and_a_reader_serves_many_folders(folder, tmp_path):
    dcp_save(contents(3), torch_dcp.FileSystemWriter(tmp_path / "other"))
    reader = dcp.Reader(tmp_path / "nowhere")
    for path, value in ((folder, 1), (tmp_path / "other", 3), (str(folder), 1)):
        assert same(dcp_load(blank(), reader, checkpoint_id=path), contents(value))


def test_its_metadata_is_what_torchs_reader_gives(folder):
    reader = dcp.Reader(str(folder))
    assert isinstance(reader, StorageReader)
    ours, torchs = reader.read_metadata(), FileSystemReader(folder).read_metadata()
    assert isinstance(ours, torch_dcp.Metadata)
    assert entries(ours) == entries(torchs)
    assert ours.planner_data == torchs.planner_data
    assert places(ours) == places(torchs)


def test_its_metadata_is_pickled_as_torchs_is(folder):
    found = pickle.loads(pickle.dumps(dcp.Reader(folder).read_metadata()))
    torchs = FileSystemReader(folder).read_metadata()
    assert type(found.storage_data) is dict
    assert (places(found), found.planner_data) == (places(torchs), torchs.planner_data)


def test_a_load_decodes_the_planners_data_of_our_folders_only_for_who_asks(tmp_path, monkeypatch):
    decoded = []

    def noted(*arguments, plain=unpickle.loads, **options):
        decoded.append(len(arguments[0]))
        return plain(*arguments, **options)

    dcp_save(contents(), dcp.Writer(tmp_path / "c"))
    monkeypatch.setattr(unpickle, "loads", noted)
    dcp_load(blank(), dcp.Reader(tmp_path / "c"))
    assert not decoded
    assert dcp.Reader(tmp_path / "c").read_metadata().planner_data["lr"] == ("lr",)
    assert len(decoded) == 1


@pytest.fixture
def nothing_frozen():
    """As in a program that has not called ``gc.freeze``; these tests run in one that has."""
    had = gc.get_freeze_count()
    gc.unfreeze()
    yield
    gc.unfreeze()
    if had:
        gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_the_collector_skips_older_objects_while_a_load_goes_on_and_no_longer(folder):
    seen = []

    class Looking(torch_dcp.DefaultLoadPlanner):
        def create_local_plan(self):
            seen.append(gc.get_freeze_count() > 0)
            return super().create_local_plan()

        def commit_tensor(self, read_item, tensor):
            seen.append(gc.get_freeze_count() > 0)

    dcp_load(blank(), dcp.Reader(folder), planner=Looking())
    assert len(seen) > 2
    assert all(seen)
    assert gc.get_freeze_count() == 0
    reader = dcp.Reader(folder)
    with pytest.raises(CheckpointException):
        dcp_load({"extra": torch.zeros(2)}, reader)
    assert gc.get_freeze_count() > 0  # between torch's calls nobody hears of its error
    assert same(dcp_load(blank(), reader), contents())
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("nothing_frozen")
def test_what_a_program_has_frozen_stays_frozen(folder):
    gc.freeze()
    dcp_load(blank(), dcp.Reader(folder))
    assert gc.get_freeze_count() > 0


def test_a_whole_folder_loads_without_names(folder):
    assert same(everything(dcp.Reader(folder)), contents())  # the way of dcp_to_torch_save
    with quiet():
        found = _load_state_dict_from_keys({"model.layers", "step"}, storage_reader=dcp.Reader(folder))
    assert same(found, {"model": {"layers": contents()["model"]["layers"]}, "step": 1})


def test_less_than_was_saved_may_be_asked_for(folder):
    assert same(
        dcp_load({"model": {"w": torch.zeros(4, 6)}}, dcp.Reader(folder))["model"]["w"], contents()["model"]["w"]
    )
    assert dcp_load({"lr": 0.0}, dcp.Reader(folder)) == {"lr": 0.25}


def test_a_key_that_is_not_there_is_an_error_unless_a_partial_load_is_asked_for(folder):
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: extra\.bias"):
        dcp_load({"extra": {"bias": torch.zeros(2)}}, dcp.Reader(folder))
    state = {"extra": {"bias": torch.full((2,), 7.0)}, "model": {"w": torch.zeros(4, 6)}, "lr": 0.0}
    planner = torch_dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp_load(state, dcp.Reader(folder), planner=planner)
    assert state["extra"]["bias"].tolist() == [7.0, 7.0]
    assert torch.equal(state["model"]["w"], contents()["model"]["w"])
    assert state["lr"] == 0.25


def test_another_shape_is_the_error_that_torch_makes_of_it(folder):
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp_load({"model": {"w": torch.zeros(4, 5)}}, dcp.Reader(folder))


def test_another_dtype_is_converted_as_torch_does_where_no_value_is_lost(folder):
    for dtype in (torch.float64, torch.bfloat16):  # 0 to 23 survive both
        state = {"model": {"w": torch.zeros(4, 6, dtype=dtype)}}
        dcp_load(state, dcp.Reader(folder))
        assert torch.equal(state["model"]["w"], contents()["model"]["w"].to(dtype))


def test_targets_of_any_stride_are_filled_in_place(folder):
    wide = torch.full((8, 12), -1.0)
    state = {"model": {"w": wide[::2, 1::2], "turned": torch.zeros(3, 4).t()}}
    dcp_load(state, dcp.Reader(folder))
    assert torch.equal(wide[::2, 1::2], contents()["model"]["w"])
    assert (wide[1::2] == -1).all()
    assert (wide[:, 0::2] == -1).all()
    assert torch.equal(state["model"]["turned"], contents()["model"]["turned"])


def test_parameters_of_a_module_are_filled_though_they_need_gradients(tmp_path):
    saved = torch.nn.Linear(3, 2)
    dcp_save({"layer": saved.state_dict()}, torch_dcp.FileSystemWriter(tmp_path / "c"))
    layer = torch.nn.Linear(3, 2)
    dcp_load({"layer": layer.state_dict(keep_vars=True)}, dcp.Reader(tmp_path / "c"))
    assert torch.equal(layer.weight, saved.weight)
    assert layer.weight.requires_grad


def test_a_planner_that_transforms_what_it_reads_is_asked(folder):
    class Renaming(torch_dcp.DefaultLoadPlanner):
        """As a user's: it counts what was filled, and bytes go elsewhere."""

        def __init__(self):
            super().__init__()
            self.filled, self.bytes = [], {}

        def commit_tensor(self, read_item, tensor):
            self.filled.append((read_item.dest_index.fqn, tensor.sum().item()))

        def load_bytes(self, read_item, value):
            self.bytes[read_item.dest_index.fqn] = torch.load(value, weights_only=False)

    planner = Renaming()
    dcp_load({"model": {"w": torch.zeros(4, 6)}, "raw": None}, dcp.Reader(folder), planner=planner)
    assert planner.filled == [("model.w", 276.0)]
    assert planner.bytes == {"raw": b"\x00\xff" * 3}


def test_streams_come_back_at_their_start(folder):
    state = dcp_load({"stream": io.BytesIO()}, dcp.Reader(folder))
    assert state["stream"].read() == b"of a loader"


def test_the_packages_own_checkpoints_are_read(tmp_path):
    whole = torch.arange(24.0).view(4, 6)
    dist_ckpt.save({"w": one("model.w", whole), "step": 3}, tmp_path / "c")
    state = dcp_load({"model": {"w": torch.zeros(4, 6)}}, dcp.Reader(tmp_path / "c"))
    assert torch.equal(state["model"]["w"], whole)


def test_no_folder_is_an_error_that_names_it(tmp_path):
    with pytest.raises(MismatchError, match="nowhere"):
        dcp.Reader(tmp_path / "nowhere").read_metadata()
    with pytest.raises(CheckpointException, match="nowhere"):
        dcp_load({"w": torch.zeros(1)}, dcp.Reader(tmp_path / "nowhere"))


@pytest.mark.parametrize("options", [{"verify": "full"}, {"verify": "off"}, {"verify": "touched"}])
def test_verify_is_an_option_of_the_reader(folder, options):
    assert same(dcp_load(blank(), dcp.Reader(folder, **options)), contents())
