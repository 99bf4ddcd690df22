"""Members that torch's FSDP2 and FSDP1 have and this wrapper has not, and what does the same here.

fully_sharded.py's __getattr__ --> MEMBERS (this file) --> MissingError's text
"""

from __future__ import annotations

from sixfold.fsdp.setup.torch_options import BY_ORDER, DIVISOR, RESHARD, STATE

_NO_SYNC = "use `with model.no_sync():` or `with model.microbatch(last=False):`"
MEMBERS = {
    "set_requires_gradient_sync": _NO_SYNC,
    "set_requires_all_reduce": _NO_SYNC,
    "set_is_last_backward": "use `with model.microbatch(last=...):`",
    "unshard": "weights are gathered by the calls that use them; for pipelines stage_handle(child).unshard() is a hint",
    "reshard": "units are freed when their memory is needed; for pipelines stage_handle(child).reshard() is a hint",
    "set_reshard_after_forward": RESHARD,
    "set_reshard_after_backward": RESHARD,
    "set_unshard_in_backward": RESHARD,
    "set_modules_to_forward_prefetch": BY_ORDER,
    "set_modules_to_backward_prefetch": BY_ORDER,
    "set_reduce_scatter_divide_factor": DIVISOR,
    "set_gradient_divide_factor": DIVISOR,
    "set_force_sum_reduction_for_comms": "sums are always plain sums, divided once afterwards",
    "set_all_reduce_hook": "finish_grad_sync() returns when main_parameters() hold final gradients: work on those",
    "set_custom_all_gather": "collectives are not replaceable; give another process_group",
    "set_custom_reduce_scatter": "give MixedPrecision(grad_sum='rank_order') or another process_group",
    "summon_full_params": "read weights with full_state_dict()",
    "state_dict_type": STATE,
    "set_state_dict_type": STATE,
    "get_state_dict_type": STATE,
    "optim_state_dict": STATE,
    "optim_state_dict_to_load": STATE,
    "full_optim_state_dict": STATE,
    "sharded_optim_state_dict": STATE,
    "fsdp_modules": "unit names are model.units",
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
