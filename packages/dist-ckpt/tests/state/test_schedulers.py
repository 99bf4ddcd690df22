"""A scheduler gets the state of its own kind, or an error that names both kinds; nothing is loaded then."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim import lr_scheduler

from sixfold import dist_ckpt
from sixfold.dist_ckpt.state.schedulers import _KINDS

KINDS = {
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o), lr_scheduler.StepLR(o, 2)]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "LinearLR": lr_scheduler.LinearLR,
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [3]),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1.0, 10),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.LinearLR(o), lr_scheduler.StepLR(o, 2)], [2]),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
}


def made(kind):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    return optimizer, KINDS[kind](optimizer)


def plain(state):
    return {name: value for name, value in state.items() if name != "_schedulers"}


@pytest.mark.parametrize("now", KINDS)
def test_a_scheduler_takes_its_own_kind_and_refuses_all_others(now, tmp_path):
    for then in KINDS:
        optimizer, schedule = made(then)
        optimizer.step()
        schedule.step(*([1.0] if then == "ReduceLROnPlateau" else []))
        dist_ckpt.save({"schedule": schedule}, tmp_path / then)
        _, own = made(now)
        before = copy.deepcopy(plain(own.state_dict()))
        if then == now:
            dist_ckpt.load({"schedule": own}, tmp_path / then)
            assert plain(own.state_dict()) == plain(schedule.state_dict())
            continue
        with pytest.raises(dist_ckpt.MismatchError, match=rf"^schedule is a {now}, and a {then}.* was saved, with \w+"):
            dist_ckpt.load({"schedule": own}, tmp_path / then)
        assert plain(own.state_dict()) == before


def test_every_kind_of_torchs_is_known():
    names = {name for name, one in vars(lr_scheduler).items() if isinstance(one, type) and name.endswith("LR")}
    known = {name for text in _KINDS for name in text.split(" or a ")}
    assert names - {"LRScheduler", "_LRScheduler"} <= known


def test_a_scheduler_inside_another_is_looked_at_too(tmp_path):
    def sequence(kind):
        optimizer, _ = made("LinearLR")
        return lr_scheduler.SequentialLR(optimizer, [KINDS[kind](optimizer), KINDS["LinearLR"](optimizer)], [2])

    dist_ckpt.save({"schedule": sequence("StepLR")}, tmp_path / "c")
    dist_ckpt.load({"schedule": sequence("StepLR")}, tmp_path / "c")
    with pytest.raises(
        dist_ckpt.MismatchError, match=r"schedule\._schedulers\.0 is a LambdaLR, and a StepLR was saved"
    ):
        dist_ckpt.load({"schedule": sequence("LambdaLR")}, tmp_path / "c")


def test_a_class_of_a_user_may_have_gained_an_argument(tmp_path):
    class Warm(lr_scheduler.LambdaLR):
        def __init__(self, optimizer, **more):
            vars(self).update(more)
            super().__init__(optimizer, lambda epoch: 1.0)

    def optimizer():
        return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)

    dist_ckpt.save({"schedule": Warm(optimizer())}, tmp_path / "c")
    later = Warm(optimizer(), gamma=0.5)
    dist_ckpt.load({"schedule": later}, tmp_path / "c")
    assert later.gamma == 0.5
    dist_ckpt.save({"schedule": made("OneCycleLR")[1]}, tmp_path / "d")
    with pytest.raises(dist_ckpt.MismatchError, match="is a Warm, and a OneCycleLR was saved"):
        dist_ckpt.load({"schedule": later}, tmp_path / "d")
