"""Options that users of other wrappers write, and values of theirs: each is one error that names ours.

wrapper/fully_sharded.py's keywords --> refuse_unknown, check_kinds (this file) --> FsdpError, or options.py goes on

Options of torch's FSDP1, FSDP2 and DDP, of accelerate and of megatron-fsdp. None is taken under its foreign name:
what it means here would not always be what it means there.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from enum import Enum

import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh

from sixfold.fsdp.config import BufferConfig, MixedPrecision
from sixfold.fsdp.errors import FsdpError

BY_ORDER = "gathers follow the recorded order of uses, one unit ahead (BufferConfig.prefetch_bytes)"
DIVISOR = "give grad_divisor when wrapping, or call divide_gradients(n)"
RESHARD = "choose by strategy ('optim_grads' keeps weights, 'optim_grads_params' frees them) or gathered_bytes"
STATE = "use state_records(optimizer) (live aliases) and full_state_dict()"
_BUCKETS = "use buffers=BufferConfig(bucket_bytes=...)"
_CUT = "cut the mesh: mesh=mesh['replicate', 'shard']"
_FROZEN = "freeze them (requires_grad=False), or keep them outside the wrapped module"
_MOVED = "move the module before it is wrapped; leave it out"
_OFFLOAD = "use buffers=BufferConfig(offload=True), which keeps optimizer state in host memory"
_PRECISION = "use mixed_precision=MixedPrecision(param_dtype=...)"
_STRATEGY = "use strategy, one of no_shard, optim, optim_grads, optim_grads_params"
_UNITS = "name the classes of the units: fsdp_unit_modules=['LlamaDecoderLayer']"
_UNUSED = "parameters that a step does not use are found by themselves; leave it out"
OPTIONS = {
    "activation_checkpointing": "call torch.utils.checkpoint in the module's own forward; leave it out",
    "auto_wrap_policy": _UNITS,
    "backward_prefetch": BY_ORDER,
    "broadcast_buffers": "call model.broadcast_buffers() before an evaluation or a checkpoint",
    "bucket_cap_mb": _BUCKETS,
    "cpu_offload": _OFFLOAD,
    "cpu_ram_efficient_loading": "use initial='broadcast', or load_full_state_dict() on all ranks",
    "device": _MOVED,
    "device_id": _MOVED,
    "device_ids": _MOVED,
    "device_mesh": "use mesh, 1-D (shard) or 2-D (replicate, shard)",
    "dp_mesh_dims": _CUT,
    "dp_outer_dim": _CUT,
    "dp_shard_dim": _CUT,
    "find_unused_parameters": _UNUSED,
    "forward_prefetch": BY_ORDER,
    "gradient_as_bucket_view": "gradients always lie in the buffers that are reduced; leave it out",
    "ignored_modules": _FROZEN,
    "ignored_params": _FROZEN,
    "ignored_states": _FROZEN,
    "init_model_with_meta_device": "make the module under torch.device('meta') and give init_fn",
    "init_sync": "use initial='broadcast'",
    "limit_all_gathers": BY_ORDER,
    "min_num_params": _UNITS,
    "mixed_precision_policy": _PRECISION,
    "mp_policy": _PRECISION,
    "offload_policy": _OFFLOAD,
    "optim_state_dict_config": STATE,
    "output_device": _MOVED,
    "param_init_fn": "use init_fn",
    "reshard_after_forward": RESHARD,
    "shard_placement_fn": "use granularity, a function of name and parameter that says where a shard may cut it",
    "sharding_strategy": _STRATEGY,
    "skip_all_reduce_unused_params": _UNUSED,
    "state_dict_config": STATE,
    "state_dict_type": STATE,
    "static_graph": _UNUSED,
    "sync_module_states": "use initial='broadcast'",
    "timeout": "use timeout_s, in seconds",
    "transformer_cls_names_to_wrap": _UNITS,
    "use_orig_params": "parameters are always the module's own; leave it out",
    "zero_dp_strategy": _STRATEGY,
}
# Members of torch's ShardingStrategy of FSDP1; what is hybrid there is a mesh here.
_STRATEGIES = {
    "FULL_SHARD": "strategy='optim_grads_params'",
    "SHARD_GRAD_OP": "strategy='optim_grads'",
    "NO_SHARD": "strategy='no_shard'",
    "HYBRID_SHARD": "strategy='optim_grads_params' and a 2-D mesh (replicate, shard)",
    "_HYBRID_SHARD_ZERO2": "strategy='optim_grads' and a 2-D mesh (replicate, shard)",
}
_TIMES = ("timeout_s", "busy_timeout_s", "first_step_timeout_s")
_NUMBER = ((int, float), "a number")
_FUNCTION = (object, "a function or None")
# By option: types of its values, and what it is told to be. A function is told by ``callable``.
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "process_group": ((dist.ProcessGroup, str, type(None)), "a ProcessGroup, None for one process, or 'world'"),
    "mesh": ((DeviceMesh, type(None)), "a DeviceMesh, 1-D (shard) or 2-D (replicate, shard), or None"),
    "mixed_precision": (MixedPrecision, "sixfold.fsdp.MixedPrecision(param_dtype=..., reduce_dtype=...)"),
    "buffers": (BufferConfig, "sixfold.fsdp.BufferConfig(...)"),
    "granularity": _FUNCTION,
    "mesh_for": _FUNCTION,
    "init_fn": _FUNCTION,
    "grad_divisor": ((int, float, type(None)), "a number, or None for the ranks of the mesh"),
    "fault_store": ((Store, type(None)), "a store of torch.distributed, or None for that of the group"),
    **dict.fromkeys(_TIMES, _NUMBER),
}


def refuse_unknown(positional: Sequence[object], others: Mapping[str, object], known: Iterable[str]) -> None:
    """No value is given without a name, and none under a name that is not in ``known``.

    Raises:
        FsdpError: one is; the text says what to write.
    """
    if positional:
        shown = ", ".join(type(one).__name__ for one in positional)
        raise FsdpError(f"{shown} is given without a name after the module; write process_group=..., or mesh=...")
    for name, value in others.items():
        near = get_close_matches(name, list(known), 1)
        instead = OPTIONS.get(name) or (f"is {near[0]} meant?" if near else "leave it out")
        if instead is _UNITS and policy_classes(value):
            instead = f"write fsdp_unit_modules={policy_classes(value)}"
        if instead is _STRATEGY and isinstance(value, Enum) and value.name in _STRATEGIES:
            instead = f"write {_STRATEGIES[value.name]}"
        raise FsdpError(f"{name} is no option of sixfold.fsdp; {instead}")


def check_kinds(module: object, options: Mapping[str, object]) -> None:
    """Values of other packages, and slips such as a text for a number, end here and not in the midst of a wrap.

    Raises:
        FsdpError: the module is no module, or an option is of another type than it has to be.
    """
    if not isinstance(module, nn.Module):
        raise FsdpError(f"a {type(module).__name__} is wrapped; an nn.Module is: one call for the whole model")
    strategy, units = options["strategy"], options["fsdp_unit_modules"]
    if isinstance(strategy, Enum) and strategy.name in _STRATEGIES:
        raise FsdpError(f"strategy is {strategy}, which is torch's; write {_STRATEGIES[strategy.name]}")
    if not isinstance(units, (Iterable, type)):
        classes = policy_classes(units) or "[...]"
        raise FsdpError(f"fsdp_unit_modules is a {type(units).__name__}; it is a list: write {classes}")
    for name, (kinds, told) in _KINDS.items():
        value = options[name]
        fits = value is None or callable(value) if (kinds, told) == _FUNCTION else isinstance(value, kinds)
        if not fits or isinstance(value, bool):
            kind = f"{type(value).__module__}.{type(value).__name__}"
            raise FsdpError(f"{name} is {reprlib.repr(value)}, a {kind}; it is {told}")


def policy_classes(policy: object) -> list[str]:
    """Names of the classes that one of FSDP1's policies wraps, or that accelerate names; [] if it cannot be told."""
    keywords = getattr(policy, "keywords", {})  # of functools.partial(transformer_auto_wrap_policy, ...)
    found = keywords.get("transformer_layer_cls") or keywords.get("module_classes") or ()
    # ModuleWrapPolicy has no public name for them; without it the remedy is the general one.
    found = found or getattr(policy, "_module_classes", ()) or (policy if isinstance(policy, (list, tuple)) else ())
    return sorted(one if isinstance(one, str) else one.__name__ for one in found if isinstance(one, (str, type)))
