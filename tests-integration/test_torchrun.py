"""Jobs under a real torchrun. One costs seconds to start, so there are few; the packages' tests/ranks have the many."""

import time

import pytest
from torchrun_helpers import World, end_with_descendants, ended, run_torchrun, start_torchrun, world_for

SUM_OF_RANKS = """
import os, torch, torch.distributed as dist
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cpu:gloo,cuda:nccl")
total = torch.tensor([dist.get_rank() + 1], device="cuda")
dist.all_reduce(total)
if dist.get_rank() == 0:
    print("sum", total.item(), "of", dist.get_world_size())
dist.destroy_process_group()
"""

NO_END = """
import os, pathlib, time
pathlib.Path(f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
print("rank", os.environ["RANK"], "waits", flush=True)
time.sleep(600)
"""


def test_ranks_of_a_torchrun_job_reach_each_other_over_nccl(tmp_path):
    world = world_for(least_ranks=2)
    if world.device == "cpu":
        pytest.skip("two CUDA devices are needed; over gloo the ranks of test_training.py reach each other")
    (tmp_path / "job.py").write_text(SUM_OF_RANKS)
    output = run_torchrun(world, ["job.py"], folder=tmp_path).stdout
    assert f"sum {world.ranks * (world.ranks + 1) // 2} of {world.ranks}" in output


def test_a_job_past_its_deadline_fails_and_is_ended(tmp_path):
    (tmp_path / "job.py").write_text(NO_END)
    with pytest.raises(AssertionError, match=r"torchrun --nproc-per-node=2 job.py` did not end within 0.5 s"):
        run_torchrun(World(ranks=2, device="cpu"), ["job.py"], folder=tmp_path, timeout_s=0.5)


@pytest.mark.slow
def test_ending_a_job_leaves_no_rank_behind(tmp_path):
    (tmp_path / "job.py").write_text(NO_END)
    process = start_torchrun(World(ranks=2, device="cpu"), ["job.py"], folder=tmp_path)
    files = [tmp_path / f"pid-{rank}" for rank in range(2)]
    until = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < until and process.poll() is None, "the ranks did not start"
        time.sleep(0.1)
    end_with_descendants(process)
    assert all(ended(int(file.read_text())) for file in files)
