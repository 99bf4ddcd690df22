"""What the reference slides leave out of the cost model: the public names of cost/terms.py."""

from sixfold.fsdp.cost.terms import (
    NVLINK_BANDWIDTH,
    Cluster,
    Model,
    Pass,
    Run,
    backward,
    exposed_s,
    forward,
    groups,
    memory,
    replicate_s,
    traffic,
    transfer_s,
)

__all__ = [
    "NVLINK_BANDWIDTH",
    "Cluster",
    "Model",
    "Pass",
    "Run",
    "backward",
    "exposed_s",
    "forward",
    "groups",
    "memory",
    "replicate_s",
    "traffic",
    "transfer_s",
]
