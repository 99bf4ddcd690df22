"""Runs on several nodes that lose ranks, nodes and their leader: the commands of users, here all on one machine."""

import os
import random
import signal
import time
from contextlib import contextmanager, suppress

import pytest
from kept_alive_helpers import assert_same_run, pids, run_kept_alive
from nodes_helpers import Nodes, nodes_config
from run_helpers import lines


@contextmanager
def run_of(folder, count, *overrides):
    """A run of two ranks on as many nodes, which the test stops; its bits are those of one that nothing happened to."""
    keys = ("parallel.dp=2", *overrides)
    config = nodes_config(folder, *keys, "train.steps=100000")
    nodes = Nodes(folder, config, count, ranks=1)
    try:
        nodes.start()
        yield nodes
    finally:
        nodes.kill()
    [end] = lines(config, "end")
    assert end["reason"] == "sigterm" and end["step"] == lines(config, "save")[-1]["step"]
    unbroken = nodes_config(folder, *keys, f"train.steps={end['step']}", run="unbroken")
    run_kept_alive(unbroken, 2)
    assert_same_run(config, unbroken)


def rank_of(nodes, node):
    """The process of a rank of a node."""
    own = nodes.processes(node)
    return next(pid for pid in pids(nodes.config)[-1] if pid in own)


def recoveries(nodes):
    return lines(nodes.config, "recovery")


@pytest.mark.slow
def test_a_run_of_two_nodes_loses_a_rank_a_node_and_its_leader_and_gets_both_nodes_back(tmp_path):
    with run_of(tmp_path, 2) as nodes:
        nodes.wait_for_step(4)
        leads = nodes.leader()
        follows = 1 - leads
        os.kill(rank_of(nodes, follows), signal.SIGKILL)
        nodes.wait_for(1, "recovery")
        survivor = pids(nodes.config)[0][leads]
        assert pids(nodes.config)[1][leads] == survivor, "the other rank stays in its process"
        nodes.wait_for_step(recoveries(nodes)[-1]["step"] + 3)
        nodes.signal_node(follows, signal.SIGKILL)
        nodes.wait_for(2, "recovery")
        assert pids(nodes.config)[2] == [survivor]
        nodes.start(follows)
        nodes.wait_for(3, "recovery")
        assert len(pids(nodes.config)[3]) == 2 and pids(nodes.config)[3][leads] == survivor, "nobody else is restarted"
        nodes.wait_for_step(recoveries(nodes)[-1]["step"] + 3)
        nodes.signal_node(leads, signal.SIGKILL)
        nodes.wait_for(4, "recovery")
        assert nodes.leader() == follows
        assert pids(nodes.config)[4] == [pids(nodes.config)[3][follows]], "the other rank goes on in its process"
        nodes.start(leads)
        nodes.wait_for(5, "recovery")
        nodes.wait_for_step(recoveries(nodes)[-1]["step"] + 2)
        nodes.stop()
    assert [one["world"] for one in lines(nodes.config, "start")] == [2, 2, 1, 2, 1, 2]
    assert [one["generation"] for one in recoveries(nodes)] == [2, 3, 4, 5, 6]
    assert {one["source"] for one in recoveries(nodes)} == {"memory"}, "a copy of each snapshot is on the other node"
    told = nodes.told()
    assert list((tmp_path / "memory").iterdir()) == [], "nothing is left in memory, on any node"
    assert f"rank {follows} was lost with node {follows}: " in told
    assert f"node {follows} has joined; generation 4 goes on with 2 ranks" in told
    assert f"rank {leads} was lost with node {leads}; generation 5 goes on with 1 rank" in told


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("led", [False, True])
@pytest.mark.parametrize("count", [2, 3])
def test_a_node_that_is_stopped_is_lost_and_joins_when_it_wakes_also_if_it_led(tmp_path, count, led):
    with run_of(tmp_path, count) as nodes:
        nodes.wait_for_step(4)
        leads = nodes.leader()
        node = leads if led else next(one for one in (0, 1) if one != leads)  # those two have the ranks
        nodes.signal_node(node, signal.SIGSTOP)
        if rank_is_there := node < 2:
            nodes.wait_for(1, "recovery")
        nodes.wait_for_step(max(one["step"] for one in lines(nodes.config, "step")) + 5)
        nodes.signal_node(node, signal.SIGCONT)
        if count == 2:
            nodes.wait_for(2, "recovery")
        else:
            time.sleep(1)
        nodes.wait_for_step(max(one["step"] for one in lines(nodes.config, "step")) + 3)
        nodes.stop()
    worlds = [one["world"] for one in lines(nodes.config, "start")]
    assert worlds[:3] == ([2, 1, 2] if count == 2 else [2, 2] if rank_is_there else [2]), "the third node waited"
    if led:
        assert f"this is of term 1, in which node {node} led the run, and term 2 has begun" in nodes.told()


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("moment", ["it forms the next generation", "a node joins"])
def test_a_leader_that_dies_at_the_worst_moment_is_followed(tmp_path, moment):
    with run_of(tmp_path, 2) as nodes:
        nodes.wait_for_step(4)
        leads = nodes.leader()
        follows, leader = 1 - leads, nodes.output(leads)
        if moment == "a node joins":
            nodes.signal_node(follows, signal.SIGKILL)
            nodes.wait_for(1, "recovery")
            nodes.start(follows)
            awaited = f"node {follows} at"
        else:
            os.kill(rank_of(nodes, follows), signal.SIGKILL)
            awaited = "goes on"
        deadline = time.monotonic() + 90
        while awaited not in leader.read_text():
            assert time.monotonic() < deadline, nodes.told()
            time.sleep(0.001)
        nodes.commands[leads].kill()
        generations = len(lines(nodes.config, "start"))
        deadline = time.monotonic() + 90
        while nodes.leader() != follows or len(lines(nodes.config, "start")) == generations:
            assert time.monotonic() < deadline, nodes.told()
            time.sleep(0.1)
        nodes.wait_for_step(max(one["step"] for one in lines(nodes.config, "step")) + 3)
        nodes.stop(follows)
    assert nodes.leader() == follows and lines(nodes.config, "start")[-1]["world"] == 1


def strike(nodes, chance):
    """One of what can happen to a node or a rank; what is lost is started anew."""
    node, kind = chance.randrange(nodes.count), chance.choice(["rank", "supervisor", "node", "stopped node"])
    if kind == "rank":
        with suppress(StopIteration, ProcessLookupError):
            os.kill(rank_of(nodes, node), signal.SIGKILL)
    elif kind == "supervisor":
        nodes.commands[node].kill()
        nodes.commands[node].wait(30)
        time.sleep(chance.random())
        nodes.signal_node(node, signal.SIGKILL)
        nodes.start(node)
    elif kind == "node":
        nodes.signal_node(node, signal.SIGKILL)
        time.sleep(chance.random() * 3)
        nodes.start(node)
    else:
        nodes.signal_node(node, signal.SIGSTOP)
        time.sleep(chance.random() * 8)
        nodes.signal_node(node, signal.SIGCONT)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_random_losses_at_random_instants_change_no_bit(tmp_path, seed):
    chance = random.Random(seed)
    with run_of(tmp_path, 3, "elastic.attempts=20", "checkpoint.every=20") as nodes:
        nodes.wait_for_step(2)
        for _ in range(6):
            time.sleep(chance.random() * 4)
            strike(nodes, chance)
        deadline = time.monotonic() + 120
        while lines(nodes.config, "start")[-1]["world"] < 2:
            assert time.monotonic() < deadline, f"two of three nodes have come back\n{nodes.told()}"
            time.sleep(0.1)
        nodes.wait_for_step(max(one["step"] for one in lines(nodes.config, "step")) + 5)
        nodes.stop()


@pytest.mark.slow
def test_a_node_that_was_started_otherwise_is_refused_and_the_run_goes_on(tmp_path):
    with run_of(tmp_path, 2) as nodes:
        nodes.wait_for_step(2)
        nodes.signal_node(1, signal.SIGKILL)
        nodes.wait_for(1, "recovery")
        nodes.options = ("train.steps=100001",)
        nodes.start(1)
        nodes.end(1, status=2)
        nodes.stop(0)
    assert "node 1 was started with another configuration, list of nodes, number of ranks or release" in nodes.told()
