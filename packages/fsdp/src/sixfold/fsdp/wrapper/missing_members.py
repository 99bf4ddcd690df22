"""Members that torch's FSDP2 and FSDP1 have and this wrapper has not, and what does the same here.

fully_sharded.py's __getattr__ --> MEMBERS (this file) --> MissingError's text
"""

from __future__ import annotations

_NO_SYNC = "use `with model.no_sync():` or `with model.microbatch(last=False):`"
_BY_ORDER = "gathers follow the recorded order of uses, one unit ahead (BufferConfig.prefetch_bytes)"
_STATE = "use state_records(optimizer) (live aliases) and full_state_dict()"
_RESHARD = "choose by strategy ('optim_grads' keeps weights, 'optim_grads_params' frees them) or gathered_bytes"
_DIVISOR = "give grad_divisor when wrapping, or call divide_gradients(n)"
MEMBERS = {
    "set_requires_gradient_sync": _NO_SYNC,
    "set_requires_all_reduce": _NO_SYNC,
    "set_is_last_backward": "use `with model.microbatch(last=...):`",
    "unshard": "weights are gathered by the calls that use them; for pipelines stage_handle(child).unshard() is a hint",
    "reshard": "units are freed when their memory is needed; for pipelines stage_handle(child).reshard() is a hint",
    "set_reshard_after_forward": _RESHARD,
    "set_reshard_after_backward": _RESHARD,
    "set_unshard_in_backward": _RESHARD,
    "set_modules_to_forward_prefetch": _BY_ORDER,
    "set_modules_to_backward_prefetch": _BY_ORDER,
    "set_reduce_scatter_divide_factor": _DIVISOR,
    "set_gradient_divide_factor": _DIVISOR,
    "set_force_sum_reduction_for_comms": "sums are always plain sums, divided once afterwards",
    "set_all_reduce_hook": "finish_grad_sync() returns when main_parameters() hold final gradients: work on those",
    "set_custom_all_gather": "collectives are not replaceable; give another process_group",
    "set_custom_reduce_scatter": "give MixedPrecision(grad_sum='rank_order') or another process_group",
    "summon_full_params": "read weights with full_state_dict()",
    "state_dict_type": _STATE,
    "set_state_dict_type": _STATE,
    "get_state_dict_type": _STATE,
    "optim_state_dict": _STATE,
    "optim_state_dict_to_load": _STATE,
    "full_optim_state_dict": _STATE,
    "sharded_optim_state_dict": _STATE,
    "fsdp_modules": "unit names are model.units",
}

# Options of torch's wrappers, which fully_shard and FullyShardedDataParallel take under another name.
OPTIONS = {
    "reshard_after_forward": _RESHARD,
    "mp_policy": "use mixed_precision=MixedPrecision(param_dtype=...)",
    "offload_policy": "use buffers=BufferConfig(offload=True), which keeps optimizer state in host memory",
    "cpu_offload": "use buffers=BufferConfig(offload=True), which keeps optimizer state in host memory",
    "sharding_strategy": "use strategy, one of no_shard, optim, optim_grads, optim_grads_params",
    "auto_wrap_policy": "name the classes of the units: fsdp_unit_modules=['LlamaDecoderLayer']",
    "sync_module_states": "use initial='broadcast'",
    "param_init_fn": "use init_fn",
    "use_orig_params": "parameters are always the module's own; leave it out",
    "device_id": "move the module before it is wrapped; leave it out",
    "limit_all_gathers": _BY_ORDER,
    "forward_prefetch": _BY_ORDER,
    "backward_prefetch": _BY_ORDER,
    "ignored_params": "freeze them (requires_grad=False), or keep them outside the wrapped module",
    "ignored_modules": "freeze them (requires_grad=False), or keep them outside the wrapped module",
}


def module_member(name: str) -> str:
    """What to write for a member of the wrapped module that was looked for on the wrapper."""
    if name == "save_pretrained":
        return (
            "call net.save_pretrained(folder, state_dict=model.full_state_dict()), with net the wrapped module; on "
            "several ranks all call full_state_dict(), and one saves"
        )
    called = f"model.entry(model.module, method={name!r})(...)"
    return f"use model.module.{name}; a method that runs layers is called by {called}"
