"""The name that megatron-core gives to ``optimizers.py`` (the reference guide says ``optimizers``).

optimizers.py --> optimizer.py (this file)
"""

from sixfold.dist_ckpt.optimizers import (
    get_optim_param_to_id_map,
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
)

__all__ = [
    "get_optim_param_to_id_map",
    "get_param_id_to_sharded_param_map",
    "make_sharded_optimizer_tensor",
    "optim_state_to_sharding_state",
]
