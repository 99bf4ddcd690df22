"""Which launcher started a process, read from its variables alone."""

import pytest
import torch

from sixfold.gpt import launch
from sixfold.gpt.errors import ConfigError

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_NODELIST": "gpu[01-08]",
    "SLURM_JOB_ID": "123456",
}


def without(environ, *names):
    return {k: v for k, v in environ.items() if k not in names}


def test_no_variables_mean_no_launcher():
    assert launch.detect({}) is None


@pytest.mark.parametrize("missing", sorted(TORCHRUN))
def test_torchrun_is_known_by_all_of_its_variables(missing):
    found = launch.detect(TORCHRUN)
    assert (found.launcher, found.rank, found.size, found.local_rank) == ("torchrun", 5, 8, 1)
    assert launch.detect(without(TORCHRUN, missing)) is None


def test_srun_meets_at_the_first_host_of_the_step_and_a_port_of_the_job():
    found = launch.detect(SRUN)
    assert (found.launcher, found.rank, found.size, found.local_rank) == ("srun", 9, 16, 1)
    assert found.url == "tcp://gpu07:23456"
    assert launch.detect(without(SRUN, "SLURM_STEP_NODELIST")).url == "tcp://gpu01:23456"
    assert launch.detect(SRUN | {"MASTER_PORT": "4000"}).url == "tcp://gpu07:4000"


def test_a_batch_script_alone_is_no_launcher():
    assert launch.detect({"SLURM_PROCID": "0", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "gpu01"}) is None


def test_torchrun_inside_a_slurm_step_is_torchrun():
    assert launch.detect(SRUN | TORCHRUN).launcher == "torchrun"


def test_our_own_ranks_know_their_store_and_do_not_listen_to_what_surrounds_them():
    own = {"SIXFOLD_RANK": "1", "SIXFOLD_RANKS": "2", "SIXFOLD_STORE": "/tmp/x/store"}
    found = launch.detect(SRUN | TORCHRUN | own)
    assert found == launch.Rendezvous(launcher="sixfold", rank=1, size=2, local_rank=1, url="file:///tmp/x/store")


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        (TORCHRUN | {"RANK": "first"}, "RANK is 'first'"),
        (TORCHRUN | {"RANK": "8"}, "rank 8 of 8"),
        (without(SRUN, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), "SLURM_JOB_NODELIST"),
        (SRUN | {"SLURM_STEP_NODELIST": "gpu[1-"}, "gpu[1-"),
    ],
)
def test_variables_that_cannot_be_are_a_config_error(environ, says):
    with pytest.raises(ConfigError) as error:
        launch.detect(environ)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("nodes", "hosts"),
    [
        ("login", ["login"]),
        ("a,b", ["a", "b"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
        ("r[1-2]n[3-4].x", ["r1n3.x", "r1n4.x", "r2n3.x", "r2n4.x"]),
        ("", []),
    ],
)
def test_node_lists_are_expanded_as_scontrol_does(nodes, hosts):
    assert launch.expand_hosts(nodes) == hosts


@pytest.mark.parametrize("nodes", ["gpu[3-1]", "gpu[a-b]", "gpu[]", "gpu[1-2"])
def test_a_broken_node_list_is_named(nodes):
    with pytest.raises(ConfigError, match="node list"):
        launch.expand_hosts(nodes)


def test_a_world_of_one_has_no_group_and_leaves_the_threads_of_its_user_alone():
    threads = torch.get_num_threads()
    world = launch.join(None, "cpu", 1.0)
    assert (world.rank, world.size, world.store, world.device.type) == (0, 1, None, "cpu")
    assert not torch.distributed.is_initialized()
    assert torch.get_num_threads() == threads
    launch.leave(world)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_a_config_error_that_says_what_to_set():
    with pytest.raises(ConfigError, match=r'run\.device is "cuda".*use "cpu"'):
        launch.join(None, "cuda")
    assert launch.pick_device("auto").type == "cpu"
