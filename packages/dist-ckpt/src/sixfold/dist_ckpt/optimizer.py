"""The name that megatron-core gives to ``optimizers.py`` (the reference guide says ``optimizers``).

optimizers.py --> optimizer.py (this file)
"""

from sixfold.dist_ckpt.optimizers import KEEP_VARS_HINT as KEEP_VARS_HINT
from sixfold.dist_ckpt.optimizers import get_optim_param_to_id_map as get_optim_param_to_id_map
from sixfold.dist_ckpt.optimizers import get_param_id_to_sharded_param_map as get_param_id_to_sharded_param_map
from sixfold.dist_ckpt.optimizers import make_sharded_optimizer_tensor as make_sharded_optimizer_tensor
from sixfold.dist_ckpt.optimizers import optim_state_to_sharding_state as optim_state_to_sharding_state
