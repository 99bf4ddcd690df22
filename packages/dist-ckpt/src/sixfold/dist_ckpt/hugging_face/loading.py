"""Loading of a model of Hugging Face into what all ranks hold, each rank its bytes of the files.

    folder or file + KeyMap --> a manifest with our names (this file) --> load of the package --> tensors of each rank

A load like any other, but for names, and stricter: a model is whole, and of the dtype that is asked for, or an error.

[Note: tied weights have one name there] transformers writes a head that is tied to its embedding under one name. A
name that is not stored stands for the stored one with which it is tied on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sixfold.dist_ckpt.checkpoint import opening, safetensors_folder
from sixfold.dist_ckpt.checkpoint.opening import Checkpoint
from sixfold.dist_ckpt.collectives.exchange import Exchange, Group, errors_to_all
from sixfold.dist_ckpt.errors import CheckpointError, MismatchError
from sixfold.dist_ckpt.formats.safetensors import SUFFIX
from sixfold.dist_ckpt.hugging_face.key_map import KeyMap
from sixfold.dist_ckpt.hugging_face.tied_names import Ties, state_of, tied
from sixfold.dist_ckpt.progress import Progress
from sixfold.dist_ckpt.save_load.host_view import HostView
from sixfold.dist_ckpt.save_load.loading import Load, LoadRequest
from sixfold.dist_ckpt.save_load.requested_keys import StrictHandling, parse_strict
from sixfold.dist_ckpt.state import factory, tree
from sixfold.dist_ckpt.state.records import LocalNonpersistentObject, ShardedBase
from sixfold.dist_ckpt.state.stateful import is_stateful
from sixfold.dist_ckpt.state.tensor_memory import check_readable
from sixfold.dist_ckpt.storage.local import store_at
from sixfold.dist_ckpt.storage.store import Store
from sixfold.dist_ckpt.strategies.base import LoadEngine


def load(
    target: torch.nn.Module | Mapping[Any, Any],
    path: str | Path | Store,
    *,
    key_map: KeyMap | None = None,
    dtype_policy: str = "strict",
    strict: StrictHandling | str = StrictHandling.RAISE_ALL,
    group: Group = "world",
    timeout_s: float = 600.0,
    progress: Progress | None = None,
) -> Any:
    """Load the safetensors of a model into a module or a state dict, however that is cut; each rank reads its part.

    Collective over ``group``. The tensors are filled in place. After an error their content is undefined.

    Args:
        target: a module, or a state dict as ``load`` of the package takes it: FSDP2, tensor parallel, records, plain.
            Its tensors are filled; all else in it stays as it is.
        path: a folder with one file or with an index, or with files that torch's ``HuggingFaceStorageWriter`` made of
            parts of tensors; or one file. A folder may be a URL or a store.
        key_map: names in the files by names in the state dict, as for ``export``; None takes them as they are.
        dtype_policy: "strict": another dtype than the stored one is an error. "exact" converts if each value survives
            the way there and back. "cast" converts and warns once.
        strict: what to do with names that one side alone has; all are errors by default. See ``StrictHandling``.
        group, timeout_s, progress: as in ``load`` of the package.
    Returns:
        The module, or the state dict with the tensors; for ``return_*`` modes a tuple with the missing and the
        unexpected names, as ``load`` of the package gives it.
    Raises:
        MismatchError: names, shapes or dtypes differ; ``key_map`` does not fit; no safetensors are there.
        CorruptError: a damaged or missing file, an index that does not fit the files. UnsafeError, StorageError,
        LostPeerError. Each is raised on all ranks.
    """
    with errors_to_all(group, timeout_s):
        if key_map is not None and not isinstance(key_map, KeyMap):
            raise CheckpointError(f"key_map is a {type(key_map).__name__}; it is a hugging_face.KeyMap")
        store = store_at(path, timeout_s / 2)
        # As it is given: in the cache of the Hub it is a link to a file without a suffix.
        named = str(path if isinstance(path, str | Path) else store.name)
        file = store.local_folder if store.local_folder is not None and named.endswith(SUFFIX) else None
        file = file if file is not None and file.is_file() else None
        state = _tensors_alone(state_of(target))
        request = LoadRequest(
            state=state,
            store=store,
            strict=parse_strict(strict),
            group=group,
            dtype_policy=dtype_policy,
            timeout_s=timeout_s,
            progress=progress,
        )
    exchange = Exchange(group, timeout_s)

    def expanded() -> Any:
        if isinstance(target, torch.nn.Module):  # which a new tensor in the result is no help to
            for name, leaf in state.items():
                if isinstance(leaf, torch.Tensor):
                    check_readable(name, getattr(leaf, "_local_tensor", leaf))
        return factory.expand(tree.checked(state), exchange.rank, exchange.ranks)[0]

    _, ties = tied(exchange, expanded)
    result = _ModelLoad(request, key_map, ties, file).run()
    if not isinstance(target, torch.nn.Module):
        return result
    return (target, *result[1:]) if request.strict.returns else target


def _tensors_alone(state: Any) -> dict[Any, Any]:
    """The state dict with all else, such as the extra state of a module, as what stays as it is."""

    def change(_: tree.KeyPath, leaf: Any) -> Any:
        is_asked = isinstance(leaf, torch.Tensor | ShardedBase | LocalNonpersistentObject) or is_stateful(leaf)
        return leaf if is_asked else LocalNonpersistentObject(leaf)

    found = tree.mapped(tree.checked(state), change, same=tree.BRANCHES)
    return {} if found is tree.GONE else found


class _ModelLoad(Load):
    """A load of a folder of safetensors under our names."""

    def __init__(self, asked: LoadRequest, key_map: KeyMap | None, ties: Ties, file: Path | None) -> None:
        super().__init__(asked, LoadEngine())
        self._key_map, self._ties, self._file = key_map, ties, file

    def opened(self, view: HostView) -> tuple[Checkpoint, dict[Any, Any], bool]:
        if self._file is not None:
            checkpoint = opening.open_safetensors(self._file)
        else:
            if view.mirror is None:
                _check_holds_some(view.folder, view.store.name)
            checkpoint = view.opened(self.asked.verify)
            if not safetensors_folder.is_one(checkpoint.folder):
                raise MismatchError(
                    f"{view.store.name} is a checkpoint and no folder of safetensors; sixfold.dist_ckpt.load reads it"
                )
        manifest = checkpoint.manifest
        tensors = dict(manifest.tensors)
        if self._key_map is not None:
            names = self._key_map.ours(tensors, unreached=True)
            tensors = {names[name]: stored for name, stored in tensors.items()}
        # [Note: tied weights have one name there]
        for name, first in self._ties.items():
            if name in tensors:
                tensors.setdefault(first, tensors[name])
        for name, first in self._ties.items():
            if first in tensors:
                tensors.setdefault(name, tensors[first])
        return replace(checkpoint, manifest=replace(manifest, tensors=tensors)), {}, True


def _check_holds_some(folder: Path, name: str) -> None:
    """MismatchError for a folder that is there and holds nothing to load."""
    found = {path.name for path in folder.iterdir()} if folder.is_dir() else {"metadata.json"}  # which opening names
    if found & {"metadata.json", ".metadata"} or any(one.endswith((SUFFIX, f"{SUFFIX}.index.json")) for one in found):
        return
    hint = "a model is a folder with model.safetensors, or with an index"
    if "snapshots" in found:
        hint = "it is the Hub's cache of a model: give the folder snapshots/... in it, as snapshot_download returns it"
    elif "pytorch_model.bin" in found or "pytorch_model.bin.index.json" in found:
        hint = "its pytorch_model.bin is a pickle: open it with transformers, and save_pretrained writes safetensors"
    raise MismatchError(f"{name} holds no *.safetensors; {hint}")
