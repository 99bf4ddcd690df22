"""Stores, for callers: the place of one checkpoint's bytes (a folder, a URL, memory, one of a user's own).

place --> store_at --> Store; they lie in storage/, and ``ByPointer`` is what a store of one's own derives from
"""

from sixfold.dist_ckpt.storage.by_pointer import ByPointer
from sixfold.dist_ckpt.storage.frame_file import PartFile, Sink
from sixfold.dist_ckpt.storage.local import LocalStore, store_at
from sixfold.dist_ckpt.storage.memory import MemoryStore
from sixfold.dist_ckpt.storage.store import Part, Save, Store
from sixfold.dist_ckpt.storage.url import UrlStore

__all__ = [
    "ByPointer",
    "LocalStore",
    "MemoryStore",
    "Part",
    "PartFile",
    "Save",
    "Sink",
    "Store",
    "UrlStore",
    "store_at",
]
