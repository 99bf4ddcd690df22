"""Arguments that users of torch.save, torch DCP and lightning write: each is one error that names ours.

save, load, async_save --> errors.py's ``naming`` with the words of ARGUMENTS (this file) --> CheckpointError

``dcp.py`` is the door for code that keeps torch's arguments.
"""

from __future__ import annotations

_ALWAYS = "it is always so; leave it out"
_DOOR = "sixfold.dist_ckpt.dcp.save and dcp.load take it, as torch's do; here give checkpoint_dir"
_FOLDER = "give checkpoint_dir"
_STATE = "give sharded_state_dict"
_WORKER = "async_save copies in the call and writes in a process of its own; leave it out"
ARGUMENTS = {
    "async_checkpointer_type": _WORKER,
    "async_stager": _WORKER,
    "async_strategy": _WORKER,
    "block_on_staging": "use async_save(lazy=True), which returns before the copy is made",
    "cache_staged_state_dict": _WORKER,
    "checkpoint_id": _FOLDER,
    "f": _FOLDER,
    "map_location": "tensors of the state dict are filled on their device; leave it out",
    "no_dist": "give group=None, which is one process",
    "obj": _STATE,
    "overwrite": "give if_exists='replace' or 'error'",
    "path": _FOLDER,
    "per_thread_copy_ahead": _ALWAYS,
    "pickle_module": "nothing is unpickled but what torch allows and safe_globals names; leave it out",
    "planner": _DOOR,
    "process_group": "give group",
    "single_file_per_rank": _ALWAYS,
    "state_dict": _STATE,
    "storage_reader": _DOOR,
    "storage_writer": _DOOR,
    "sync_files": _ALWAYS,
    "thread_count": "threads are as many as gain time; leave it out",
    "timeout": "give timeout_s, in seconds",
    "use_collectives": "ranks agree by one exchange of small messages; leave it out",
    "weights_only": "nothing is unpickled but what torch allows and safe_globals names; leave it out",
}
