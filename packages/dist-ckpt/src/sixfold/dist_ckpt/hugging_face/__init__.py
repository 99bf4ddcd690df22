"""Models of Hugging Face, from all ranks and to all ranks: ``export`` and ``load``, and a ``KeyMap`` for their names.

From outside: key_map, model_files.
"""

from sixfold.dist_ckpt.hugging_face.exporting import export
from sixfold.dist_ckpt.hugging_face.key_map import KeyMap
from sixfold.dist_ckpt.hugging_face.loading import load

__all__ = ["KeyMap", "export", "load"]
