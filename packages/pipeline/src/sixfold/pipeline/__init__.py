"""Every pipeline schedule as a value, and one executor.

    schedules --> Program --> passes, verify, simulate, draw --> PipelineRunner

Everything up to ``Stage`` works without torch; ``Stage`` and the runner load it
when they are first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sixfold.pipeline import passes, schedules
from sixfold.pipeline.drawing.draw import draw
from sixfold.pipeline.errors import PipelineTimeout, ScheduleError
from sixfold.pipeline.plan.partition import partition
from sixfold.pipeline.plan.replan import Replan, replan
from sixfold.pipeline.plan.search import Plan, plan, plan_over
from sixfold.pipeline.plan.two_bw import LayerProfile, Plan2BW, plan_2bw
from sixfold.pipeline.program.action import Action, Kind
from sixfold.pipeline.program.program import Program, Weights
from sixfold.pipeline.proof.verify import Report, verify
from sixfold.pipeline.schedules import *  # noqa: F403 - whatever schedules there are; its stub names them
from sixfold.pipeline.simulation.costs import Costs
from sixfold.pipeline.simulation.simulate import Timeline, simulate

if TYPE_CHECKING:
    from sixfold.pipeline.cut_model.stages import stages_of_causal_lm, stages_of_sequential
    from sixfold.pipeline.executor.runner import PipelineRunner, StepResult
    from sixfold.pipeline.from_torch import TorchSchedule, program_of
    from sixfold.pipeline.split_backward.user_operators import defer_weight_grad, made_again
    from sixfold.pipeline.stage.auxiliary_loss import add_loss
    from sixfold.pipeline.stage.stage import Stage

__all__ = [
    "Action",
    "Costs",
    "Kind",
    "LayerProfile",
    "PipelineRunner",
    "PipelineTimeout",
    "Plan",
    "Plan2BW",
    "Program",
    "Replan",
    "Report",
    "ScheduleError",
    "Stage",
    "StepResult",
    "Timeline",
    "TorchSchedule",
    "Weights",
    "add_loss",
    "defer_weight_grad",
    "draw",
    "made_again",
    "partition",
    "passes",
    "plan",
    "plan_2bw",
    "plan_over",
    "program_of",
    "replan",
    "simulate",
    "stages_of_causal_lm",
    "stages_of_sequential",
    "verify",
    *schedules.__all__,
]

_NEED_TORCH = {
    "PipelineRunner": "executor.runner",
    "Stage": "stage.stage",
    "StepResult": "executor.runner",
    "TorchSchedule": "from_torch",
    "add_loss": "stage.auxiliary_loss",
    "defer_weight_grad": "split_backward.user_operators",
    "made_again": "split_backward.user_operators",
    "program_of": "from_torch",
    "stages_of_causal_lm": "cut_model.stages",
    "stages_of_sequential": "cut_model.stages",
}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    import_module(f"{__name__}.torch_private")  # refuses a torch that lacks what is used of it
    return getattr(import_module(f"{__name__}.{_NEED_TORCH[name]}"), name)
