"""Plans: schedules found by search, layers cut into stages, PipeDream-2BW's width and depth."""

from sixfold.pipeline.plan.partition import partition
from sixfold.pipeline.plan.search import Plan, plan, plan_over
from sixfold.pipeline.plan.two_bw import LayerProfile, Plan2BW, plan_2bw

__all__ = ["LayerProfile", "Plan", "Plan2BW", "partition", "plan", "plan_2bw", "plan_over"]
