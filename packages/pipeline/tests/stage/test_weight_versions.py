"""Versions of one stage's weights, driven by the lists of a program and by nothing else."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from pipeline_helpers import layers, square_loss
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from version_helpers import OPTIMIZERS, delayed, made_batches, reads_of, same_weights, stashed

from sixfold.pipeline import Program, ScheduleError, Stage, one_f_one_b, pipedream, pipedream_2bw
from sixfold.pipeline.passes import optimizer_step
from sixfold.pipeline.program.program import Weights
from sixfold.pipeline.proof.endless import endless
from sixfold.pipeline.stage.weight_versions import Versions


class Drive:
    """Runs steps of an endless program on all stages, each action as soon as its input is there."""

    def __init__(self, program: Program, modules: list[nn.Module], make: Any, handles: Any = None) -> None:
        found = endless(program)
        assert found is not None
        self.found, self.modules = found, modules
        stages = [Stage(module, s, data_parallel=handles and handles[s]) for s, module in enumerate(modules)]
        for stage in stages:
            stage.optimizer = make(list(stage.module.parameters()))
        self.versions = [Versions(stage, program.weights) for stage in stages]
        self.inputs: dict[tuple[int, int], Tensor] = {}
        self.outputs: dict[tuple[int, int], Tensor] = {}
        self.done: set[tuple[int, int]] = set()  # backwards
        self.batches: list[Any] = []

    def step(self, t: int, batch: Any) -> list[Tensor]:
        self.batches.append(batch)
        self.losses: list[Tensor] = []
        for versions in self.versions:
            versions.begin(t)
        self.run(self.found.step(t))
        return self.losses

    def run(self, rows: Any) -> None:
        left = [[a for a in row if a.kind in ("F", "B", "STEP", "REDUCE_GRAD")] for row in rows]
        while any(left):
            for row in left:
                while row and self.ready(row[0]):
                    self.act(row.pop(0))

    def ready(self, a: Any) -> bool:
        if a.kind == "F":
            return a.stage == 0 or (a.stage - 1, a.microbatch) in self.outputs
        if a.kind == "B":
            return a.stage == len(self.modules) - 1 or (a.stage + 1, a.microbatch) in self.done
        return True

    def act(self, a: Any) -> None:
        versions = self.versions[a.stage]
        if a.kind == "F":
            versions.forward(lambda k: self.forward(a.stage, k))(a.microbatch)
        elif a.kind == "B":
            versions.last(lambda k: self.backward(a.stage, k))(a.microbatch)
        elif a.kind == "STEP":
            versions.step()
        else:
            versions.collect()

    def forward(self, s: int, k: int) -> None:
        t, j = divmod(k, self.found.batch)
        inputs = self.batches[t][0][j] if s == 0 else self.outputs[s - 1, k].detach().requires_grad_()
        self.inputs[s, k], self.outputs[s, k] = inputs, self.modules[s](inputs)
        if s == len(self.modules) - 1:
            loss = square_loss(self.outputs[s, k], self.batches[t][1][j])
            self.losses.append(loss.detach())
            self.outputs[s, k] = loss / self.found.batch

    def backward(self, s: int, k: int) -> None:
        self.done.add((s, k))
        output = self.outputs.pop((s, k))
        output.backward(None if output.dim() == 0 else self.inputs.pop((s + 1, k)).grad)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 1), (3, 3), (4, 3)])
@pytest.mark.slow
def test_2bw_is_the_delayed_recurrence_bit_for_bit(p, m, optimizer):
    modules, oracle, batches = layers(p), layers(p), made_batches(5, m)
    drive = Drive(pipedream_2bw(p, m), modules, OPTIMIZERS[optimizer])
    losses = [drive.step(t, batch) for t, batch in enumerate(batches)]
    drive.run(drive.found.tail(5))
    expected = delayed(oracle, batches, OPTIMIZERS[optimizer])
    assert losses == expected
    assert same_weights(modules, oracle)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "program",
    [pipedream(1, 2), pipedream(4, 5), optimizer_step(one_f_one_b(4, 9), when="pipedream", steps=3)],
    ids=["1", "4", "4 in batches of 3"],
)
@pytest.mark.slow
def test_pipedream_reads_at_a_backward_what_it_read_at_its_forward(program, optimizer):
    p = program.stages
    modules, oracle = layers(p), layers(p)
    drive = Drive(program, modules, OPTIMIZERS[optimizer])
    batches = made_batches(6, drive.found.batch)
    losses = [drive.step(t, batch) for t, batch in enumerate(batches)]
    drive.run(drive.found.tail(6))
    assert losses == stashed(oracle, batches, OPTIMIZERS[optimizer], reads_of(drive.found.unrolled(6)))
    assert same_weights(modules, oracle)


def storages(versions: Versions) -> set[int]:
    """Of the weights of one parameter, those that something still holds."""
    state = versions.state()
    return {tensors["0.weight"].data_ptr() for tensors in (state["newest"], *state["older"].values())}


def test_two_storages_live_with_2bw_and_the_parameters_are_the_newest():
    modules = layers(3)
    drive = Drive(pipedream_2bw(3, 4), modules, OPTIMIZERS["sgd"])
    made: list[weakref.ref] = []
    for t, batch in enumerate(made_batches(5, 4)):
        before = [module[0].weight for module in modules]
        drive.step(t, batch)
        assert all(module[0].weight is old for module, old in zip(modules, before, strict=True))
        for s, versions in enumerate(drive.versions):
            ours = modules[s][0].weight
            assert versions.made == (t if s < 2 else t + 1)
            assert len(storages(versions)) == (1 if versions.made == 0 else 2)
            assert ours.data_ptr() in storages(versions)
            made += [weakref.ref(v.leaves["0.weight"]) for v in versions._older.values()]
    alive = {id(leaf) for ref in made if (leaf := ref()) is not None}
    assert len(alive) == 3  # one older version per stage


def test_pipedream_keeps_as_many_versions_as_the_program_says():
    drive = Drive(pipedream(3, 6), layers(3), OPTIMIZERS["adamw"])
    for t, batch in enumerate(made_batches(6, 1)):
        drive.step(t, batch)
    assert [len(storages(versions)) for versions in drive.versions] == [3, 2, 1]


class Frozen(nn.Module):
    """A frozen and a shared parameter, a buffer, and a checkpointed part."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.other.weight = self.one.weight
        self.other.bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(checkpoint(lambda h: self.other(self.one(h).tanh()), hidden, use_reentrant=False))


def test_shared_frozen_and_checkpointed_parameters_and_buffers():
    torch.manual_seed(0)
    modules = [Frozen() for _ in range(3)]
    oracle = copy.deepcopy(modules)

    def trained(parameters):
        return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=0.01)

    drive, batches = Drive(pipedream_2bw(3, 2), modules, trained), made_batches(4, 2)
    frozen = [module.other.bias.data_ptr() for module in modules]
    for t, batch in enumerate(batches):
        drive.step(t, batch)
    drive.run(drive.found.tail(4))
    delayed(oracle, batches, trained)
    assert [module.other.bias.data_ptr() for module in modules] == frozen
    for ours, theirs in zip(modules, oracle, strict=True):  # the oracle's buffers move in its copies
        assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


class Recurrent(nn.Module):
    """Keeps its parameters in a list beside their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.lstm(hidden)[0]


def test_modules_that_keep_their_parameters_elsewhere_too():
    torch.manual_seed(0)
    modules = [Recurrent() for _ in range(2)]
    oracle = copy.deepcopy(modules)
    drive, batches = Drive(pipedream_2bw(2, 2), modules, OPTIMIZERS["sgd"]), made_batches(4, 2)
    losses = [drive.step(t, batch) for t, batch in enumerate(batches)]
    drive.run(drive.found.tail(4))
    assert losses == delayed(oracle, batches, OPTIMIZERS["sgd"])
    assert same_weights(modules, oracle)


def test_a_data_parallel_that_accumulates_gets_every_gradient_for_its_parameter():
    class Handle:
        def __init__(self) -> None:
            self.got: list[tuple[nn.Parameter, Tensor]] = []

        def accumulate(self, parameter: nn.Parameter, gradient: Tensor) -> None:
            self.got.append((parameter, gradient))

    modules, handles = layers(2), [Handle(), Handle()]
    drive = Drive(pipedream_2bw(2, 2), modules, lambda p: torch.optim.SGD(p, lr=0.0), handles)
    for t, batch in enumerate(made_batches(3, 2)):
        drive.step(t, batch)
    plain = layers(2)
    for (inputs, targets), _ in zip(made_batches(3, 2), range(2), strict=False):
        for x, y in zip(inputs, targets, strict=True):
            (square_loss(plain[1](plain[0](x)), y) / 2).backward()
    got = handles[0].got[: 2 * 2 * 2]  # two batches of two microbatches, weight and bias
    assert [p is q for p, _ in got for q in [modules[0][0].weight]] == [True, False] * 4
    total = sum(g for p, g in got if p is modules[0][0].weight)
    assert torch.allclose(total, plain[0][0].weight.grad)
    assert all(p.grad is None for module in modules for p in module.parameters())


def test_weights_that_somebody_else_changes_in_flight_are_refused_and_drained_ones_taken():
    def halve(drive):
        with torch.no_grad():
            drive.modules[0][0].weight.mul_(0.5)

    batches = made_batches(4, 1)
    drive = Drive(pipedream(2, 3), layers(2), OPTIMIZERS["sgd"])
    drive.step(0, batches[0])
    halve(drive)
    with pytest.raises(ScheduleError, match=r"stage 0: 0\.weight was written, .*drain"):
        drive.step(1, batches[1])
    drive = Drive(pipedream(2, 3), layers(2), OPTIMIZERS["sgd"])
    drive.step(0, batches[0])
    drive.run(drive.found.tail(1))
    halve(drive)
    drive.versions[0].begin(1)
    double = Drive(pipedream_2bw(2, 1), layers(2), OPTIMIZERS["sgd"])
    halve(double)
    double.step(0, batches[0])
    double.run(double.found.tail(1))
    halve(double)
    with pytest.raises(ScheduleError, match=r"stage 0: 0\.weight was written, .*new runner"):
        double.versions[0].begin(1)


def test_what_versions_cannot_do_is_refused_by_name():
    module = layers(1)[0]
    handle = type("Sharded", (), {"call": lambda self, x: module(x)})()
    with pytest.raises(ScheduleError, match="stage 1: data_parallel is a Sharded whose call runs the module"):
        Versions(Stage(module, 1, data_parallel=handle), Weights.TWO_BW)
    hooked = layers(1)[0]
    hooked[0].bias.register_hook(lambda g: g)
    with pytest.raises(ScheduleError, match=r"stage 0: 0\.bias has a gradient hook"):
        Drive(pipedream_2bw(1, 2), [hooked], OPTIMIZERS["sgd"]).step(0, made_batches(1, 2)[0])
    foreign = layers(1)[0]
    foreign[0].bias.grad = torch.ones(8)
    with pytest.raises(ScheduleError, match=r"stage 0: 0\.bias has a gradient that this runner did not make"):
        Drive(pipedream_2bw(1, 2), [foreign], OPTIMIZERS["sgd"]).step(0, made_batches(1, 2)[0])
