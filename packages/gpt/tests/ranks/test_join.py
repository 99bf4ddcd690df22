"""Joining and leaving the default process group by every kind of rendezvous."""

import socket
import time

import pytest
import torch
import torch.distributed as dist

from ranktest import run_ranks
from sixfold.gpt.errors import ConfigError, TrainError
from sixfold.gpt.launch import rendezvous as launch


def rendezvous(rank, ranks, launcher, where):
    if launcher == "srun":
        slurm = {"SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": ranks, "SLURM_STEP_NODELIST": "localhost"}
        return launch.detect({k: str(v) for k, v in slurm.items()} | {"MASTER_PORT": where})
    if launcher == "pytorchjob":
        pod = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": where}
        return launch.detect(pod)
    return launch.detect({"SIXFOLD_RANK": str(rank), "SIXFOLD_RANKS": str(ranks), "SIXFOLD_STORE": where})


def join_sum_leave(rank, ranks, launcher, where):
    dist.destroy_process_group()  # ranktest's own
    world = launch.join(rendezvous(rank, ranks, launcher, where), "cpu", 20.0)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    world.store.set(f"said-{rank}", "so")
    world.store.get(f"said-{(rank + 1) % ranks}")
    threads = torch.get_num_threads()
    launch.leave(world)
    return world.rank, world.size, world.device.type, total.item(), threads, dist.is_initialized()


@pytest.mark.parametrize("launcher", ["sixfold", "srun", "pytorchjob"])
def test_ranks_meet_have_a_store_and_leave(tmp_path, launcher):
    with socket.create_server(("localhost", 0)) as free:
        where = str(tmp_path / "store") if launcher == "sixfold" else str(free.getsockname()[1])
    found = run_ranks(join_sum_leave, 2, launcher, where)
    assert found == [(0, 2, "cpu", 3.0, 1, False), (1, 2, "cpu", 3.0, 1, False)]


def wait_in_vain(rank, ranks, where):
    dist.destroy_process_group()
    began = time.monotonic()
    with pytest.raises(TrainError) as error:
        launch.join(rendezvous(0, 2, "sixfold", where), "cpu", 0.3)
    return str(error.value), time.monotonic() - began


def test_a_rank_that_does_not_come_is_an_error_within_the_deadline(tmp_path):
    [(text, seconds)] = run_ranks(wait_in_vain, 1, str(tmp_path / "store"))
    assert "rank 0 of 2 (sixfold" in text and "did not meet the others within 0.3 s" in text
    assert seconds < 10


def fail_after_joining(rank, ranks, where):
    dist.destroy_process_group()
    world = launch.join(rendezvous(rank, ranks, "sixfold", where), "cpu", 20.0)
    began = time.monotonic()
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        launch.leave(world)
    return dist.is_initialized(), time.monotonic() - began < 1


def test_a_failed_rank_keeps_its_connections_and_waits_for_nobody(tmp_path):
    assert run_ranks(fail_after_joining, 2, str(tmp_path / "store")) == [(True, True), (True, True)]


def on_one_gpu(rank, ranks, launcher, where):
    dist.destroy_process_group()
    launch.check_places = lambda places: (_ for _ in ()).throw(ConfigError(f"both on GPU 0: {len(places)} places"))
    with pytest.raises(ConfigError) as error:
        launch.join(rendezvous(rank, ranks, launcher, where), "cpu", 20.0)
    return str(error.value)


def test_devices_that_do_not_go_together_are_refused_on_all_ranks(tmp_path):
    with socket.create_server(("localhost", 0)) as free:
        where = str(free.getsockname()[1])
    assert run_ranks(on_one_gpu, 2, "srun", where) == ["both on GPU 0: 2 places"] * 2
