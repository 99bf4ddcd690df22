"""Makes the golden folders of megatron-core 0.12.1: its flattened layout, and its zarr back end.

    python make_megatron_012.py     # four gloo processes on a CPU, a few seconds

Needs megatron-core 0.12.1, zarr 2.18 with numcodecs 0.13, tensorstore (for bfloat16) and torch on the
path; none of them is needed to read the folders. ``golden_tensors`` says what they hold.
"""

import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

HERE = Path(__file__).parent
TP, DP = 2, 2


def golden_tensors() -> dict[str, torch.Tensor]:
    """The global tensors of both folders."""
    return {
        "matrix": torch.arange(48, dtype=torch.float32).view(6, 8) / 4,  # cut on axis 1
        "cube": torch.arange(60, dtype=torch.float64).view(4, 3, 5),  # cut on axis 0
        "vector": torch.arange(10, dtype=torch.int64),
        "half": (torch.arange(24) / 8).bfloat16().view(4, 6),
    }


CUT_AXIS = {"matrix": 1, "cube": 0, "vector": 0, "half": 1}


def local_part(key: str, tp: int) -> torch.Tensor:
    return golden_tensors()[key].chunk(TP, CUT_AXIS[key])[tp].contiguous()


def flattened(library, rank: int):
    """Each part flattened and cut unevenly between the two data-parallel ranks."""
    tp, dp = rank % TP, rank // TP
    state = {}
    for key in golden_tensors():
        part = local_part(key, tp)
        place = part.numel() // 2 - 2
        span = slice(0, place) if dp == 0 else slice(place, part.numel())
        state[key] = library.ShardedTensor.from_rank_offsets_flat(
            key, part.reshape(-1)[span].clone(), tuple(part.shape), (CUT_AXIS[key], tp, TP), flattened_range=span
        )
    return state


def plain(library, rank: int):
    """The same tensors, each part on its first data-parallel rank; a layer axis and objects beside them."""
    tp, dp = rank % TP, rank // TP
    state = {
        key: library.ShardedTensor.from_rank_offsets(
            key, local_part(key, tp), (CUT_AXIS[key], tp, TP), replica_id=(0, 0, dp)
        )
        for key in golden_tensors()
    }
    state["layers"] = library.ShardedTensor.from_rank_offsets(
        "layers.w", torch.full((3,), float(rank)), (0, rank, TP * DP), prepend_axis_num=1
    )
    state["rng"] = library.ShardedObject("rng/state", {"rank": rank}, (TP * DP,), (rank,))
    return state


def rank_main(rank: int, store: str) -> None:
    import numpy
    import torch.distributed as dist

    numpy.product = numpy.prod  # megatron-core 0.12 calls it; numpy 2 dropped it
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.device_count = lambda: 1
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, TP * DP), rank=rank, world_size=TP * DP)
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from torch.distributed.checkpoint import filesystem

    # torch 2.7 and later want one more argument than megatron-core 0.12 gives.
    filesystem_async._write_item = partial(
        filesystem._write_item, serialization_format=filesystem.SerializationFormat.TORCH_SAVE
    )
    common = {"iteration": 12, "args": {"lr": 0.5, "sizes": [1, 2]}}
    for name, backend, layout in (
        ("megatron-0.12-flattened", "torch_dist", flattened),
        ("megatron-0.12-zarr", "zarr", plain),
    ):
        dist_checkpointing.save({**layout(dist_checkpointing, rank), **common}, str(HERE / name), (backend, 1))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    for name in ("megatron-0.12-flattened", "megatron-0.12-zarr"):
        shutil.rmtree(HERE / name, ignore_errors=True)
        (HERE / name).mkdir()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (str(Path(folder) / "store"),), nprocs=TP * DP)
    sys.exit(0)
