"""Attention of one layer over two context-parallel ranks, both ways, beside one process with the whole rows.

    python packages/gpt/benchmarks/bench_context.py [--row 4096] [--repeats 5]

Two rows in float32, 8 query heads on 2 key heads of 64, documents of a thousand tokens or none. A line per way: seconds
of a forward and backward (the median; of the slower rank), and the elements that autograd keeps between them. A quiet
machine of two cores; a thread per process. About a minute.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist

import ranktest
from sixfold.gpt.config.train_config import GPTConfig
from sixfold.gpt.model.attention import plan_rows
from sixfold.gpt.parallel.axes import Axes, Axis

CONFIG = GPTConfig(
    num_layers=1, hidden_size=512, num_attention_heads=8, num_query_groups=2, ffn_hidden_size=64, vocab_size=16
)


def measured(rank: int, ranks: int, comm: str, row: int, packed: bool, repeats: int) -> tuple[float, int]:
    """Seconds of a forward and backward on this rank, and elements kept."""
    torch.set_num_threads(1)
    axes = Axes(cp=Axis(rank, ranks, dist.group.WORLD), cp_comm_type=comm) if ranks > 1 else Axes()
    b, s = 2, row // ranks
    cu = torch.arange(0, b * row + 1, 1024 if packed else row, dtype=torch.int32)
    rows = plan_rows(CONFIG, torch.zeros(b, s, 512), position_ids=None, cu_seqlens=cu, axes=axes)
    leaves = [torch.randn(b, s, heads, 64, requires_grad=True) for heads in (8, 2, 2)]
    seconds, kept = [], {}
    for _ in range(repeats + 1):
        if ranks > 1:
            dist.barrier()
        start = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (kept.__setitem__(t.untyped_storage().data_ptr(), t.numel()), t)[1], lambda t: t
        ):
            out = rows.attend(*leaves)
        out.sum().backward()
        seconds.append(time.perf_counter() - start)
        total = sum(kept.values())
        kept.clear()
    return statistics.median(seconds[1:]), total


def main() -> None:
    import bench_context  # ranks find a function by the name of its module, which is not that of a script

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--row", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    for packed in (False, True):
        for ranks, comm in ((1, "all_gather"), (2, "all_gather"), (2, "p2p")):
            found = ranktest.run_ranks(
                bench_context.measured, ranks, comm, given.row, packed, given.repeats, timeout=600
            )
            way = comm if ranks > 1 else "one process"
            seconds, kept = max(one for one, _ in found), max(one for _, one in found)
            print(f"{'documents' if packed else 'rows':9} {way:11} {seconds:8.3f} s {kept:12,} elements kept on a rank")


if __name__ == "__main__":
    main()
