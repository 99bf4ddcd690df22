"""The usual ways to save, natively, by the manager and by torch's calls, between 1, 2 and 4 ranks, bit for bit.

A run trains, saves by each door and by torch itself, and trains on. A new run at the same or another number of ranks
loads: it has what the first one had, and then trains as one that torch loaded, to the bit. torch's own reader finds the
weights and buffers in what the native save and the door wrote.

What the issue's findings ask for is held here, if not by a test of its own:

| finding | test |
|---|---|
| C3 exports have plain tensors | test_in_place: listed_and_exported; here: an_export |
| C4 a load fills in place whatever was saved | test_in_place: filled_in_place, loads_into_fsdp2 |
| C5, C18 moments of a new optimizer | test_half_loads, test_whole_objects, test_objects_on_meshes; here |
| C6 places that read alike | test_differing_values: would_be_lost; test_plain_tensors_ranks: read_alike |
| C8 values of each rank | test_differing_values; here: accelerate, loaders |
| C10 a run that goes back | test_rollback, test_manager |
| C11 any layout from any other | test_in_place, test_plain_tensors_ranks, test_objects_on_meshes |
| C12 an ordinary DCP folder | here: torch's reader and ours of what was saved natively |
| C13 memory of a plain save | test_memory: plain_state; blocked time: benchmarks/compare_objects.py |
| C14 as many DTensors on both sides | benchmarks/compare_dcp_door.py |
| C16 raise_all minds plain keys | test_half_loads, test_plain_tensors: strict_modes |
"""

import itertools
import traceback

import pytest
import torch
import torch.distributed as dist
from forked_worker import fork_workers
from saved_forms_helpers import wrong
from usual_ways_helpers import DOORS, WAYS, load_by, model_by, save_by, train, whole

from ranktest import run_ranks
from sixfold.dist_ckpt import tools

pytest.importorskip("numpy", reason="torch sends objects between ranks by numpy")
WORLDS = [1, 2, 4]


def save_all(rank, ranks, name, folder):
    """By every door; what the run has, and what it has two steps later."""
    fork_workers()
    way, run = WAYS[name], WAYS[name].made(ranks, 0)
    train(run, 3)
    for door in DOORS:
        save_by(way, DOORS[door], run, folder / door)
    own = [None] * ranks
    dist.all_gather_object(own, {"own": run.own(), "loader": run.loader.state_dict()})
    now = whole(run)
    train(run, 2)
    then = whole(run)
    if rank == 0:
        torch.save({"now": now, "then": then, "own": own}, folder / "expected.pt")


def load_all(rank, ranks, name, folder, saved_by):
    """What went wrong, by door."""
    way, found, told = WAYS[name], {}, {}
    expected = torch.load(folder / "expected.pt", weights_only=False)
    for door in DOORS:
        run = way.made(ranks, 1)
        try:
            load_by(way, DOORS[door], run, folder / door, saved_by)
        except Exception:
            told[door] = [traceback.format_exc()]
            continue
        told[door] = wrong(whole(run), expected["now"]) + wrong_own(way, run, expected["own"], saved_by)
        train(run, 2)
        found[door] = whole(run)
        told[door] += [
            f"then {path}" for path in wrong(found[door], expected["then"] if ranks == saved_by else found["torch"])
        ]
    for door, reader in itertools.product(["native", "door"], ["torch", "door"]):
        found = model_by(reader, way, way.made(ranks, 2), folder / door)
        told[f"{reader}'s reader of {door}"] = wrong(found, expected["now"]["model"])
    return {door: paths for door, paths in told.items() if paths}


def wrong_own(way, run, own, saved_by):
    """Values of each rank: this rank's, or at another number of ranks all of them, in the order of the ranks."""
    if not way.has_own:
        return []
    names = ["own", "loader"] if "loader" in way.states.__name__ else ["own"]
    if saved_by != dist.get_world_size():
        return wrong(run.of_others, {name: [values[name] for values in own] for name in names})
    found = {"own": run.own(), "loader": run.loader.state_dict()}
    return [path for name in names for path in wrong(found[name], own[dist.get_rank()][name])]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a way at a number of ranks; made once."""
    folders = {}

    def save(name, ranks):
        if (name, ranks) not in folders:
            folders[name, ranks] = tmp_path_factory.mktemp("saved")
            run_ranks(save_all, ranks, name, folders[name, ranks])
        return folders[name, ranks]

    return save


@pytest.mark.parametrize("after", WORLDS)
@pytest.mark.parametrize("before", WORLDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled
@pytest.mark.slow
def test_what_was_saved_comes_back_bit_for_bit_by_every_door(saved, way, before, after):
    assert run_ranks(load_all, after, way, saved(way, before), before) == [{}] * after


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled(3)
@pytest.mark.slow
def test_an_export_has_the_weights_and_buffers_of_every_way(saved, tmp_path, way):
    safetensors = pytest.importorskip("safetensors.torch", reason="needs the extra safetensors")
    folder = saved(way, 2)
    expected = torch.load(folder / "expected.pt", weights_only=False)["now"]["model"]
    source = folder / "native" / ("pytorch_model_fsdp_0" if WAYS[way].is_set else "c")
    tools.convert(source, tmp_path / "s", to="safetensors")
    exported = safetensors.load_file(tmp_path / "s" / "model.safetensors")
    start = {"lightning": "state_dict.", "ddp": "model.module."}.get(way, "model.")
    start = f"app.{start}" if way.startswith("app") else start
    found = {name.removeprefix(start): value for name, value in exported.items() if name.startswith(start)}
    assert wrong(found, expected) == []
