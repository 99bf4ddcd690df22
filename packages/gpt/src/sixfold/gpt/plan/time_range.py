"""How far a planned time is right: the range in which published runs of the same kind lay.

    published_runs.py: published / planned of each row --> RANGES (this file) --> plan.py: a range of seconds

The numbers are quantiles of those errors, rounded outwards to a hundredth; a test works them out again. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sixfold.gpt.config.train_config import TrainConfig
    from sixfold.gpt.machine.devices import Device

QUANTILES = (0.1, 0.9)  # four runs of five lie between


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeRange:
    """Published over planned tokens per second.

    Attributes:
        low, high: the planned speed times these.
        source: what the two come from, in words.
    """

    low: float
    high: float
    source: str


# Compiled operators are at best like Megatron-Core's fused ones: the rows of both.
RANGES = {
    "eager": TimeRange(low=0.77, high=1.06, source="27 published runs of torch without a compiler"),
    "compiled": TimeRange(low=0.80, high=1.11, source="9 published runs with compiled or fused operators"),
    "other device": TimeRange(low=0.73, high=1.12, source="all published runs, none of them on this device"),
    "measured machine": TimeRange(low=0.6, high=1.05, source="an estimate: no published run has doctor's rates"),
}
SEEN = ("a100", "h100")  # devices with published runs


def time_range_of(config: TrainConfig, device: Device) -> TimeRange:
    """The range for a run of ``config`` on ``device``."""
    name = device.name.partition(" ")[0]
    if device.measured:
        return RANGES["measured machine"]
    if name not in SEEN:
        return RANGES["other device"]
    return RANGES["compiled" if config.train.compile else "eager"]
