"""The compatibility matrix: {megatron-core, DCP, ours} x {save, load} x world sizes x entities, bit for bit.

    DIST_CKPT_MATRIX_WORLDS=1,2,4,8 pytest packages/dist-ckpt/tests/ranks/test_matrix.py    # all of it, minutes

By default saved by two ranks and loaded by one and two; megatron-core in one process only, since importing it
takes seconds.
Every writer saves plainly and, where it can, fully parallel and asynchronously.
"""

import importlib.util
import json
import os
import warnings

import pytest
import torch
from dist_ckpt_helpers import Cut, expected_values, flat_shards

from ranktest import run_ranks
from sixfold import dist_ckpt

WORLDS = [int(part) for part in os.environ.get("DIST_CKPT_MATRIX_WORLDS", "").split(",") if part]
FULL = bool(WORLDS)
HAS_MEGATRON = all(importlib.util.find_spec(name) for name in ("megatron", "psutil"))
PAIRS = [(a, b) for a in WORLDS for b in WORLDS] if FULL else [(2, 1), (2, 2)]
CELLS = 8
SHAPES = {
    "columns": ((16, 24), torch.float32),
    "rows": ((16, 3), torch.bfloat16),
    "tied": ((7,), torch.float64),
    "layers": ((CELLS, 3), torch.float32),  # one layer each, on a prepended axis
    "irregular": ((17, 5), torch.int64),
    "flat": ((8, 16), torch.float32),
    "made.low": ((2, 5), torch.float32),
    "made.high": ((3, 5), torch.float32),
}
COMMON = {"step": 7, "args": {"lr": 0.5, "names": ["x", {3: None}]}}


def whole(key):
    shape, dtype = SHAPES[key]
    return (torch.arange(torch.Size(shape).numel()).view(shape) * 3 + len(key)).to(dtype)


def bounds(ranks):
    return [0, *(17 * r // ranks + (r % 2 if r < ranks else 0) for r in range(1, ranks)), 17]


def state(library, rank, ranks, fill):
    """What a rank holds, in the words of megatron-core's guide: ``library`` is theirs or ours."""

    def data(tensor):
        return tensor.clone().contiguous() if fill else torch.zeros_like(tensor).contiguous()

    def on_grid(key, axis):
        return library.ShardedTensor.from_rank_offsets(
            key, data(whole(key).chunk(ranks, axis)[rank]), (axis, rank, ranks)
        )

    def halves(key, tensor, replica_id, flattened_range):
        return {
            name: library.ShardedTensor.from_rank_offsets(f"{key}.{name}", part.contiguous(), replica_id=replica_id)
            for name, part in (("low", tensor[:2]), ("high", tensor[2:]))
        }

    mine = range(rank * CELLS // ranks, (rank + 1) * CELLS // ranks)
    low, high = bounds(ranks)[rank : rank + 2]
    irregular = data(whole("irregular")[low:high])
    made = torch.cat([whole("made.low"), whole("made.high")])
    flat = on_grid("flat", 1)
    if library is dist_ckpt:
        part = whole("flat").chunk(ranks, 1)[rank]
        cut = Cut(1, ranks, (0, part.numel() // 3, part.numel()))
        flat = flat_shards("flat", whole("flat"), cut, fill=fill)[2 * rank : 2 * rank + 2]
    return {
        "model": {"columns": on_grid("columns", 1), "rows": on_grid("rows", 0), "flat": flat},
        "tied": library.ShardedTensor.from_rank_offsets("tied", data(whole("tied")), replica_id=(0, 0, rank)),
        "layers": [
            library.ShardedTensor.from_rank_offsets(
                "layers", data(whole("layers")[i]), (0, i, CELLS), prepend_axis_num=1
            )
            for i in mine
        ],
        "irregular": library.ShardedTensor(
            "irregular", irregular, torch.int64, tuple(irregular.shape), (17, 5), (low, 0), None
        ),
        "made": library.mapping.ShardedTensorFactory(
            "made", data(made), halves, lambda d: torch.cat([d["low"], d["high"]]), rank
        ),
        "objects": [library.ShardedObject("objects", {"cell": i} if fill else None, (CELLS,), (i,)) for i in mine],
        **(COMMON if fill else {}),
    }


def check(loaded, library, rank, ranks):
    assert torch.equal(loaded["model"]["columns"], whole("columns").chunk(ranks, 1)[rank])
    assert torch.equal(loaded["model"]["rows"], whole("rows").chunk(ranks, 0)[rank])
    part = whole("flat").chunk(ranks, 1)[rank]
    if library is dist_ckpt:
        cut = Cut(1, ranks, (0, part.numel() // 3, part.numel()))
        expected = expected_values(whole("flat"), cut)[2 * rank : 2 * rank + 2]
        assert all(torch.equal(a, b) for a, b in zip(loaded["model"]["flat"], expected, strict=True))
    else:
        assert torch.equal(loaded["model"]["flat"], part)
    assert torch.equal(loaded["tied"], whole("tied"))
    mine = range(rank * CELLS // ranks, (rank + 1) * CELLS // ranks)
    assert all(torch.equal(got, whole("layers")[i]) for got, i in zip(loaded["layers"], mine, strict=True))
    low, high = bounds(ranks)[rank : rank + 2]
    assert torch.equal(loaded["irregular"], whole("irregular")[low:high])
    assert torch.equal(loaded["made"], torch.cat([whole("made.low"), whole("made.high")]))
    assert list(loaded["objects"]) == [{"cell": i} for i in mine]
    assert {key: loaded[key] for key in COMMON} == COMMON


def megatron():
    """megatron-core on a CPU: its CUDA calls become no-ops in this process."""
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.device_count = lambda: 1
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    warnings.simplefilter("ignore")
    from megatron.core import dist_checkpointing

    return dist_checkpointing


def save_ours(rank, ranks, folder):
    from sixfold.dist_ckpt.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    from sixfold.dist_ckpt.strategies.torch import TorchDistSaveShardedStrategy

    dist_ckpt.save(state(dist_ckpt, rank, ranks, True), folder / "ours-plain")
    dist_ckpt.save(state(dist_ckpt, rank, ranks, True), folder / "ours-since", since=folder / "ours-plain")
    for path in (folder / "ours-plain").glob("*.distcp"):
        assert path.samefile(folder / "ours-since" / path.name), "nothing has changed"
    parallel = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy())
    dist_ckpt.save(state(dist_ckpt, rank, ranks, True), folder / "ours-parallel", parallel)
    if FULL:
        dist_ckpt.async_save(state(dist_ckpt, rank, ranks, True), folder / "ours-async").wait(300.0)


def save_megatron(rank, ranks, folder):
    theirs = megatron()
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    for name in ("plain", "parallel", "async"):
        (folder / f"megatron-{name}").mkdir(exist_ok=True, parents=True)
    theirs.save(state(theirs, rank, ranks, True), str(folder / "megatron-plain"))
    parallel = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1))
    theirs.save(state(theirs, rank, ranks, True), str(folder / "megatron-parallel"), parallel)
    request = theirs.save(state(theirs, rank, ranks, True), str(folder / "megatron-async"), async_sharded_save=True)
    request.execute_sync()


def dtensors(ranks, fill):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (ranks,))
    placed = {"columns": Shard(1), "rows": Shard(0), "irregular": Shard(0), "tied": Replicate(), "flat": Shard(1)}
    made = {k: distribute_tensor(whole(k) if fill else whole(k) * 0, mesh, [p]) for k, p in placed.items()}
    plain = {k: whole(k) if fill else whole(k) * 0 for k in SHAPES if k not in placed}
    return made | plain


def save_dcp(rank, ranks, folder):
    import torch.distributed.checkpoint as dcp

    warnings.simplefilter("ignore")
    dcp.save(dtensors(ranks, True), checkpoint_id=str(folder / "dcp-plain"))
    dcp.async_save(dtensors(ranks, True), checkpoint_id=str(folder / "dcp-async")).result()


def load_ours(rank, ranks, folder):
    from sixfold.dist_ckpt.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
    from sixfold.dist_ckpt.strategies.torch import TorchDistLoadShardedStrategy

    parallel = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy())
    for path in sorted(folder.iterdir()):
        if path.name.startswith("dcp"):
            load_ours_from_dcp(ranks, path)
            continue
        for strategy in (None, parallel):
            loaded = dist_ckpt.load(state(dist_ckpt, rank, ranks, False), path, strategy, strict="raise_all")
            check(loaded, dist_ckpt, rank, ranks)


def load_ours_from_dcp(ranks, path):
    asked = dtensors(ranks, False)
    records = {}
    for key, value in asked.items():
        if hasattr(value, "device_mesh"):
            records[key] = dist_ckpt.ShardedTensor.from_dtensor(key, value)
        else:
            rank = torch.distributed.get_rank()
            records[key] = dist_ckpt.ShardedTensor.from_rank_offsets(key, value, replica_id=rank)
    dist_ckpt.load(records, path, strict="raise_all")
    expect_dtensors(asked)


def expect_dtensors(asked):
    for key, value in asked.items():
        got = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert torch.equal(got, whole(key)), key


def load_dcp(rank, ranks, folder):
    import torch.distributed.checkpoint as dcp

    warnings.simplefilter("ignore")
    for path in sorted(folder.iterdir()):
        asked = dtensors(ranks, False)
        if not path.name.startswith("dcp"):
            asked["objects/shard_3_8"] = None
        dcp.load(asked, checkpoint_id=str(path))
        if not path.name.startswith("dcp"):
            assert asked.pop("objects/shard_3_8") == [{"cell": 3}]  # both libraries store a list of one
        expect_dtensors(asked)


def load_megatron(rank, ranks, folder):
    theirs = megatron()
    for path in sorted(folder.iterdir()):
        asked = state(theirs, rank, ranks, False)
        if not path.name.startswith("dcp"):
            check(theirs.load(asked, str(path)), theirs, rank, ranks)
            continue
        # A bare DCP folder: megatron-core wants two more files beside it, and knows tensors only.
        if rank == 0 and not (path / "metadata.json").exists():
            torch.save(dict(COMMON), path / "common.pt")
            (path / "metadata.json").write_text(json.dumps(json.loads(CONFIG)))
        torch.distributed.barrier()
        asked.pop("objects")
        loaded = theirs.load(asked, str(path))
        check({**loaded, "objects": [{"cell": i} for i in objects_of(rank, ranks)]}, theirs, rank, ranks)


CONFIG = (
    '{"sharded_backend": "torch_dist", "sharded_backend_version": 1, '
    '"common_backend": "torch", "common_backend_version": 1}'
)


def objects_of(rank, ranks):
    return range(rank * CELLS // ranks, (rank + 1) * CELLS // ranks)


def save_all(rank, ranks, folder, with_megatron):
    save_ours(rank, ranks, folder)
    save_dcp(rank, ranks, folder)
    if with_megatron:
        save_megatron(rank, ranks, folder)
    return sorted(path.name for path in folder.iterdir())


def load_all(rank, ranks, folder, with_megatron):
    load_ours(rank, ranks, folder)
    load_dcp(rank, ranks, folder)
    if with_megatron:
        load_megatron(rank, ranks, folder)
    return True


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """World size -> the folder with everything that world has saved."""
    folders = {}

    def save(ranks, with_megatron):
        if ranks not in folders:
            folder = tmp_path_factory.mktemp(f"world{ranks}") / "c"
            folder.mkdir()
            names = run_ranks(save_all, ranks, folder, with_megatron, timeout=600.0)[0]
            assert {"ours-plain", "ours-parallel", "dcp-plain", "dcp-async"} <= set(names)
            folders[ranks] = folder
        return folders[ranks]

    return save


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("before", "after"), PAIRS)
@pytest.mark.slow
def test_what_one_library_saves_every_library_loads(saved, before, after):
    with_megatron = FULL and HAS_MEGATRON
    folder = saved(before, with_megatron)
    assert run_ranks(load_all, after, folder, with_megatron, timeout=600.0) == [True] * after


@pytest.mark.skipif(not HAS_MEGATRON, reason="needs megatron-core (and the psutil it does not declare), a peer")
@pytest.mark.slow
def test_megatron_core_both_ways_in_one_rank(saved):
    folder = saved(1, True)
    assert {"megatron-plain", "megatron-parallel", "megatron-async"} <= {path.name for path in folder.iterdir()}
    assert run_ranks(load_all, 1, folder, True, timeout=600.0) == [True]


def megatron_beside_plain(rank, ranks, folder):
    """What megatron-core loads of a save that has plain tensors, large and small, beside records."""
    theirs, found = megatron(), {}
    for name in ("default", "megatron"):
        asked = {"w": theirs.mapping.ShardedTensor.from_rank_offsets("w", torch.zeros(5))}
        loaded = theirs.load(asked, str(folder / name))
        found[name] = {
            key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in loaded.items()
        }
    return found


@pytest.mark.skipif(not HAS_MEGATRON, reason="needs megatron-core (and the psutil it does not declare), a peer")
@pytest.mark.slow
def test_megatron_core_loads_records_beside_plain_tensors(tmp_path):
    state = {
        "w": dist_ckpt.ShardedTensor.from_rank_offsets("w", torch.arange(5.0)),
        "few": torch.arange(3),
        "model": {"large": torch.arange(20_000)},
        "step": 7,
    }
    for name in ("default", "megatron"):
        dist_ckpt.save(state, tmp_path / name, group=None, megatron=name == "megatron")
    (found,) = run_ranks(megatron_beside_plain, 1, tmp_path, timeout=120.0)
    for loaded in found.values():
        assert (loaded["w"], loaded["few"], loaded["step"]) == ([0, 1, 2, 3, 4], [0, 1, 2], 7)
    assert torch.equal(found["megatron"]["model"]["large"], torch.arange(20_000))
