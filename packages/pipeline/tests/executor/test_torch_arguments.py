"""Arguments of torch.distributed.pipelining given to this package's classes are one error each that names ours."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed.pipelining as pipelining
from torch import nn

from sixfold.pipeline import PipelineRunner, ScheduleError, Stage
from sixfold.pipeline.schedules import one_f_one_b
from sixfold.pipeline.torch_arguments import RUNNER, STAGE, STEP


def names(call):
    return inspect.signature(call).parameters.keys() - {"self", "args", "kwargs"}


def runner(**given):
    return PipelineRunner(one_f_one_b(1, 2), Stage(nn.Linear(2, 2), 0), None, lambda out, y: (out - y).sum(), **given)


def test_every_argument_of_torchs_schedules_is_told_what_to_write():
    theirs = names(pipelining.Schedule1F1B) | names(pipelining.ScheduleInterleaved1F1B)
    assert theirs - names(PipelineRunner) <= RUNNER.keys()
    for name in RUNNER:
        with pytest.raises(ScheduleError, match=rf"^{name} is no argument of PipelineRunner; \w+"):
            runner(**{name: None})


def test_every_argument_of_torchs_stage_is_told_what_to_write():
    assert names(pipelining.PipelineStage) - names(Stage) <= STAGE.keys()
    for name in STAGE:
        with pytest.raises(ScheduleError, match=rf"^{name} is no argument of Stage; \w+"):
            Stage(nn.Linear(2, 2), 0, **{name: None})


def test_torchs_own_call_of_a_stage_is_told_what_to_write():
    with pytest.raises(ScheduleError, match="Stage is given 2, 'cpu' without a name; it takes module and index so"):
        Stage(nn.Linear(2, 2), 0, 2, "cpu")
    with pytest.raises(ScheduleError, match="submodule is no argument of Stage; give module"):
        Stage(submodule=nn.Linear(2, 2), stage_index=0)


@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_every_argument_of_torchs_step_is_told_what_to_write(call):
    run = runner()
    assert names(pipelining.Schedule1F1B.step) - names(PipelineRunner.step) <= STEP.keys()
    for name in STEP:
        with pytest.raises(ScheduleError, match=rf"^{name} is no argument of PipelineRunner.{call}; \w+"):
            getattr(run, call)(torch.ones(4, 2), **{name: None})
    assert len(getattr(run, call)(torch.ones(4, 2), torch.zeros(4, 2), keep_outputs=True).outputs) == 2
