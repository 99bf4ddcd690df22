"""A rank's stages under fsdp: what the configuration's keys say to it.

container, mesh, config --> wrapped (this file) --> FullyShardedDataParallel --> rank_model.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sixfold.fsdp import BufferConfig, FsdpError, FullyShardedDataParallel, MixedPrecision
from sixfold.gpt.engine.optimizer import is_quantized
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.parallel.weight_sharding import is_expert

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

    from sixfold.gpt.config.train_config import TrainConfig
    from sixfold.gpt.launch.rendezvous import World
    from sixfold.gpt.parallel.mesh import RankMesh


TIED = "embedding.weight"
TIED_COPY = "tied_head.weight"  # of a stage that has both ends


def canonical(name: str) -> str:
    """``1.layers.3.ffn.up.weight`` in the rank's container -> ``layers.3.ffn.up.weight``."""
    inside = name.partition(".")[2]
    return TIED if inside == TIED_COPY else inside


def has_budget(config: TrainConfig) -> bool:
    """Weights come and go within a number of bytes."""
    return isinstance(config.fsdp.gathered_bytes, int) and config.parallel.sharding == "optim_grads_params"


def wrapped(
    config: TrainConfig, mesh: RankMesh, world: World, container: nn.ModuleDict, units: list[Any], *, own: bool
) -> FullyShardedDataParallel:
    """The rank's stages under fsdp. ``own``: they are GPTModels, whose weights are filled in afterwards.

    Raises:
        ConfigError: fsdp.gathered_bytes is less than must be here at once.
    """
    try:
        with world.device:  # where fsdp makes what was on meta
            return FullyShardedDataParallel(
                container,
                process_group=mesh.data if mesh.hybrid is None else None,
                mesh=mesh.hybrid,
                mesh_for=_experts_mesh(mesh),
                strategy=config.parallel.sharding,
                fsdp_unit_modules=units,
                root_units=False,
                mixed_precision=_mixed_precision(config),
                buffers=BufferConfig(**config.fsdp.buffers()),
                grad_divisor=1.0,
                grad_reduce=config.fsdp.grad_reduce,
                init_fn=_leave_empty if own else None,
                initial="trust" if own else "check",
                checks=config.fsdp.checks,
                fault_store=world.store,
                timeout_s=config.run.timeout_seconds,
                busy_timeout_s=config.run.timeout_seconds,
            )
    except FsdpError as error:
        if str(error).startswith("gathered_bytes is "):
            raise ConfigError(f"fsdp.{error}") from error
        raise


def _experts_mesh(mesh: RankMesh) -> Callable[[str], DeviceMesh | None] | None:
    """Experts on the ranks that share them; None where all ranks share all weights."""
    own = mesh.expert_data
    return None if own is None else lambda name: own if is_expert(name) else None


def _mixed_precision(config: TrainConfig) -> MixedPrecision:
    dtypes = {k: getattr(torch, v) for k, v in config.fsdp.dtypes().items()}
    compute = None if config.train.precision == "fp32" else torch.bfloat16
    fp8 = (lambda name: is_quantized(canonical(name))) if config.train.precision == "fp8" else None
    return MixedPrecision(
        param_dtype=compute, grad_sum=config.grad_sum, cast_inputs=config.fsdp.cast_inputs, fp8=fp8, **dtypes
    )


def _leave_empty(name: str, module: nn.Module) -> None:
    """For fsdp: the shards are filled after it has cut them, see ``draw_start_values``."""
