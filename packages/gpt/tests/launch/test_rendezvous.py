"""Which launcher started a process, read from its variables alone."""

import os

import pytest
import torch
from gpt_helpers import tiny_config

from sixfold.gpt import train
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.launch import rendezvous

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
    assert rendezvous.detect({}) is None


@pytest.mark.parametrize("missing", sorted(TORCHRUN))
def test_torchrun_is_known_by_all_of_its_variables(missing):
    found = rendezvous.detect(TORCHRUN)
    assert (found.launcher, found.rank, found.size, found.local_rank) == ("torchrun", 5, 8, 1)
    if missing in ("RANK", "WORLD_SIZE"):
        assert rendezvous.detect(without(TORCHRUN, missing)) is None


POD = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}


def test_a_pytorchjob_is_known_by_its_variables_without_a_local_rank():
    found = rendezvous.detect(POD | {"PET_NNODES": "8", "PET_NODE_RANK": "5", "PET_NPROC_PER_NODE": "1"})
    assert found == rendezvous.Rendezvous(
        launcher="pytorchjob", rank=5, size=8, local_rank=0, url="tcp://job-master-0:23456"
    )
    assert rendezvous.detect(POD | {"RANK": "0", "WORLD_SIZE": "1"}) is None, "a job of one pod trains alone"


def test_torchrun_inside_a_pytorchjob_is_torchrun():
    found = rendezvous.detect(POD | {"RANK": "43", "WORLD_SIZE": "64", "LOCAL_RANK": "3", "PET_NPROC_PER_NODE": "8"})
    assert (found.launcher, found.rank, found.size, found.local_rank) == ("torchrun", 43, 64, 3)


def test_a_pod_for_several_processes_that_runs_one_is_refused_with_torchrun():
    with pytest.raises(ConfigError, match=r"PET_NPROC_PER_NODE is 8, which torchrun reads: .*torchrun -m sixfold\.gpt"):
        rendezvous.detect(POD | {"PET_NPROC_PER_NODE": "8"})
    assert rendezvous.device_index(rendezvous.detect(POD), 1) == 0
    with pytest.raises(ConfigError, match=r"rank 5 is the only process of its pod .* sees 8 GPUs; .*nproc-per-node=8"):
        rendezvous.device_index(rendezvous.detect(POD), 8)


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_a_rank_of_several_that_lacks_a_variable_is_refused_and_does_not_train_alone(missing):
    with pytest.raises(ConfigError, match=rf"RANK is 5 and WORLD_SIZE 8, and {missing} is not set"):
        rendezvous.detect(without(TORCHRUN, missing))
    assert rendezvous.detect(without(TORCHRUN, missing) | {"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert rendezvous.detect(SRUN | without(TORCHRUN, missing)).launcher == "srun"


@pytest.mark.parametrize(
    "environ",
    [
        {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"},
        {"PMI_SIZE": "4", "PMI_RANK": "3"},
    ],
)
def test_mpirun_is_refused_rather_than_taken_for_as_many_runs_in_one_folder(environ):
    with pytest.raises(ConfigError, match=r"mpirun .* 4 processes .* torchrun, srun"):
        rendezvous.detect(environ)
    assert rendezvous.detect({name: "1" for name in environ if "RANK" not in name}) is None
    assert rendezvous.detect(environ | TORCHRUN).launcher == "torchrun"
    srun = SRUN | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}
    assert rendezvous.detect(environ | srun).launcher == "srun", "srun --mpi sets them too"
    with pytest.raises(ConfigError, match="mpirun"):
        rendezvous.detect(
            environ | srun | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}
        )  # its daemons, one a node


def test_a_step_of_one_task_is_a_shell_and_starts_its_own_ranks():
    assert rendezvous.detect(SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None


ON_NODE = SRUN | {"SLURM_LOCALID": "3", "SLURM_GPUS_ON_NODE": "4"}


@pytest.mark.parametrize(
    ("environ", "visible", "index"),
    [
        # torchrun, and our own ranks: all devices are visible to each.
        (TORCHRUN, 8, 1),
        (TORCHRUN | {"LOCAL_RANK": "7"}, 8, 7),
        # A wrapper below torchrun that shows each rank one device; two ranks on one device are told apart in join.
        (TORCHRUN | {"CUDA_VISIBLE_DEVICES": "1"}, 1, 0),
        # srun --gpus-per-node=4, or --gres=gpu:4: every task sees all four.
        (ON_NODE, 4, 3),
        (ON_NODE | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 4, 3),
        # srun --gpus-per-task=1, --gpu-bind=single:1, --gpu-bind=map_gpu:0,1,2,3, --gpu-bind=closest: one each.
        (ON_NODE | {"SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0"}, 1, 0),
        (ON_NODE | {"CUDA_VISIBLE_DEVICES": "3"}, 1, 0),
        (without(ON_NODE, "SLURM_GPUS_ON_NODE") | {"CUDA_VISIBLE_DEVICES": "3"}, 1, 0),
        # srun --gpus-per-task=2 with two tasks on a node of four: each has two of its own.
        (ON_NODE | {"SLURM_LOCALID": "1", "SLURM_GPUS_PER_TASK": "2", "CUDA_VISIBLE_DEVICES": "2,3"}, 2, 0),
        (ON_NODE | {"SLURM_LOCALID": "1", "CUDA_VISIBLE_DEVICES": "2,3"}, 2, 0),
        # srun --gpus-per-task=1 --gpu-bind=none: binding is switched off, every task sees all.
        (ON_NODE | {"SLURM_GPUS_PER_TASK": "1"}, 4, 3),
        (ON_NODE | {"SLURM_GPUS_PER_TASK": "volta:1", "SLURM_LOCALID": "2"}, 4, 2),
        # One task on the node, with all of its devices; a node list of types.
        (ON_NODE | {"SLURM_LOCALID": "0", "SLURM_GPUS_PER_TASK": "volta:3,kepler:1"}, 4, 0),
        # Who says nothing of the node: what was asked for is a task's own.
        (without(ON_NODE, "SLURM_GPUS_ON_NODE") | {"SLURM_GPUS_PER_TASK": "a100:2"}, 2, 0),
        # A batch script's own CUDA_VISIBLE_DEVICES, the same two devices for both tasks: not fewer than the node has.
        (ON_NODE | {"SLURM_LOCALID": "1", "SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1"}, 2, 1),
    ],
)
def test_the_device_of_a_rank_by_what_its_launcher_shows_it(environ, visible, index):
    assert rendezvous.device_index(rendezvous.detect(environ), visible) == index


@pytest.mark.parametrize(
    ("environ", "visible"),
    [
        (TORCHRUN | {"LOCAL_RANK": "4"}, 4),
        (ON_NODE | {"SLURM_GPUS_ON_NODE": "2"}, 2),
        ({"SIXFOLD_RANK": "1", "SIXFOLD_RANKS": "2", "SIXFOLD_STORE": "/tmp/x"}, 1),
    ],
)
def test_more_ranks_than_devices_are_refused(environ, visible):
    with pytest.raises(ConfigError, match=rf"needs a GPU of its own; this machine shows {visible}"):
        rendezvous.device_index(rendezvous.detect(environ), visible)


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([("a", "cuda", "u0"), ("a", "cuda", "u0")], r"ranks 0 and 1 are both on GPU u0 of a"),
        ([("a", "cuda", "u0"), ("b", "cpu", "")], r"rank 0 computes on cuda and rank 1 on cpu"),
    ],
)
def test_two_ranks_on_one_gpu_and_mixed_devices_are_refused(places, words):
    with pytest.raises(ConfigError, match=words):
        rendezvous.check_places(places)


def test_ranks_on_devices_of_their_own_are_not():
    rendezvous.check_places([("a", "cuda", "u0"), ("a", "cuda", "u1"), ("b", "cuda", "u0")])
    rendezvous.check_places([("a", "cpu", ""), ("a", "cpu", "")])


def test_srun_meets_at_the_first_host_of_the_step_and_a_port_of_the_job():
    found = rendezvous.detect(SRUN)
    assert (found.launcher, found.rank, found.size, found.local_rank) == ("srun", 9, 16, 1)
    assert found.url == "tcp://gpu07:23456"
    assert rendezvous.detect(without(SRUN, "SLURM_STEP_NODELIST")).url == "tcp://gpu01:23456"
    assert rendezvous.detect(SRUN | {"MASTER_PORT": "4000"}).url == "tcp://gpu07:4000"


def test_two_steps_of_a_job_on_one_host_and_the_next_job_meet_at_ports_of_their_own():
    places = [SRUN | {"SLURM_STEP_ID": str(step)} for step in range(8)]
    places.append(SRUN | {"SLURM_JOB_ID": str(int(SRUN["SLURM_JOB_ID"]) + 1), "SLURM_STEP_ID": "0"})
    assert len({rendezvous.detect(place).url for place in places}) == 9
    assert rendezvous.detect(places[0]).url == rendezvous.detect(SRUN).url


def test_a_batch_script_alone_is_no_launcher():
    assert rendezvous.detect({"SLURM_PROCID": "0", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "gpu01"}) is None


def test_torchrun_inside_a_slurm_step_is_torchrun():
    assert rendezvous.detect(SRUN | TORCHRUN).launcher == "torchrun"


def test_our_own_ranks_know_their_store_and_do_not_listen_to_what_surrounds_them():
    own = {"SIXFOLD_RANK": "1", "SIXFOLD_RANKS": "2", "SIXFOLD_STORE": "/tmp/x/store"}
    found = rendezvous.detect(SRUN | TORCHRUN | own)
    assert found == rendezvous.Rendezvous(launcher="sixfold", rank=1, size=2, local_rank=1, url="file:///tmp/x/store")


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
        rendezvous.detect(environ)
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
    assert rendezvous.expand_hosts(nodes) == hosts


@pytest.mark.parametrize("nodes", ["gpu[3-1]", "gpu[a-b]", "gpu[]", "gpu[1-2"])
def test_a_broken_node_list_is_named(nodes):
    with pytest.raises(ConfigError, match="node list"):
        rendezvous.expand_hosts(nodes)


@pytest.mark.parametrize(("own", "found"), [({}, ":4096:8"), ({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, ":16:8")])
def test_deterministic_runs_have_a_workspace_of_cublas_before_cuda_is_used(tmp_path, monkeypatch, own, found):
    seen = []

    def join(*args, **options):
        seen.append((os.environ.get("CUBLAS_WORKSPACE_CONFIG"), torch.are_deterministic_algorithms_enabled()))
        raise InterruptedError

    monkeypatch.setattr(os, "environ", dict(own))
    monkeypatch.setattr(rendezvous, "join", join)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        for option in ("false", "true"):
            with pytest.raises(InterruptedError):
                train(tiny_config(tmp_path, f"train.deterministic={option}"))
    finally:
        torch.use_deterministic_algorithms(before)
    assert seen == [(own.get("CUBLAS_WORKSPACE_CONFIG"), before), (found, True)]


def test_a_world_of_one_has_no_group_and_leaves_the_threads_of_its_user_alone():
    threads = torch.get_num_threads()
    world = rendezvous.join(None, "cpu", 1.0)
    assert (world.rank, world.size, world.store, world.device.type) == (0, 1, None, "cpu")
    assert not torch.distributed.is_initialized()
    assert torch.get_num_threads() == threads
    rendezvous.leave(world)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_a_config_error_that_says_what_to_set():
    with pytest.raises(ConfigError, match=r'run\.device is "cuda".*use "cpu"'):
        rendezvous.join(None, "cuda")
    assert rendezvous.pick_device("auto").type == "cpu"
