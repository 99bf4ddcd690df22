"""Background saves: the trainer stops for a copy of its tensors, a process of its own writes them.

saver.py: agree, copy into arena.py --> Job --> _worker.py --> files
lazy_copy.py, fence.py: a copy made beside the trainer
trainer and worker: worker_process.py, watched by worker_watch.py; worker and worker: lost_ranks.py

From outside: arena, fence, handle, lost_ranks, status_and_heartbeats, saver, worker_process.
"""

from sixfold.dist_ckpt.background.saver import AsyncSave, AsyncSaver, async_save, prepare_async_save

__all__ = ["AsyncSave", "AsyncSaver", "async_save", "prepare_async_save"]
