"""Optimizers: optimizer state described by the records of the model's parameters.

    model's sharded state dict + optimizer's parameters --> get_param_id_to_sharded_param_map (this file)
    optimizer.state_dict() + that map --> optim_state_to_sharding_state (this file) --> records for save and load

State that is shaped like its parameter is cut like its parameter, so that no layout is written twice. Counters and
other values without a shape are ShardedObjects, one for each parameter, so that they belong to it at any layout. The
names are megatron-core's (``dist_checkpointing/optimizer.py``).
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch

from sixfold.dist_ckpt.errors import ShardingError
from sixfold.dist_ckpt.state import factory, tree
from sixfold.dist_ckpt.state.factory import ShardedTensorFactory
from sixfold.dist_ckpt.state.records import LocalNonpersistentObject, ShardedObject, ShardedTensor, data_shape
from sixfold.dist_ckpt.state.tensor_memory import is_dtensor, local_of

ModelRecord = ShardedTensor | ShardedTensorFactory

#: What megatron-core's own optimizers end their errors with.
KEEP_VARS_HINT = (
    " Make the model's state dict with keep_vars=True, and wrap transformed parameters in a ShardedTensorFactory."
)


def get_optim_param_to_id_map(optim_params_iter: Iterable[torch.Tensor]) -> dict[int, int]:
    """``id(parameter)`` -> its number in the optimizer, for parameters in the optimizer's order."""
    numbers: dict[int, int] = {}
    for number, parameter in enumerate(optim_params_iter):
        numbers.setdefault(id(_local(parameter)), number)
    return numbers


def get_param_id_to_sharded_param_map(
    model_sharded_state_dict: Mapping[Any, Any], optim_params_iter: Iterable[torch.Tensor]
) -> dict[int, ModelRecord]:
    """Number of a parameter in the optimizer -> the model's record of it.

    A record belongs to a parameter if its ``data`` is that very object, or the local tensor of that very DTensor. So
    make the model's state dict with ``keep_vars=True``, and use factories for transformed parameters.

    Args:
        model_sharded_state_dict: any structure of records and DTensors (FSDP2's ``state_dict(keep_vars=True)``); other
            leaves are passed over.
        optim_params_iter: the optimizer's parameters in its own order.
    Returns:
        The map. Empty maps are warned of.
    """
    numbers = get_optim_param_to_id_map(optim_params_iter)
    found: dict[int, ModelRecord] = {}
    for path, leaf in tree.leaves(tree.checked(model_sharded_state_dict)):
        if isinstance(leaf, ShardedTensor | ShardedTensorFactory) and leaf.data is not None:
            number = numbers.get(id(_local(leaf.data)))
        else:
            number = numbers.get(id(local_of(leaf))) if is_dtensor(leaf) else None
        if number is not None:
            found[number] = ShardedTensor.from_dtensor(tree.key_text(path), leaf) if is_dtensor(leaf) else leaf
    if not found:
        warnings.warn(
            f"no record of the model holds a parameter of the optimizer.{KEEP_VARS_HINT}",
            stacklevel=2,
        )
    return found


def make_sharded_optimizer_tensor(model_param: ModelRecord, optim_param: torch.Tensor, prefix: str) -> ModelRecord:
    """The record of a state tensor: the parameter's record, or its factory, with another key and other data.

    Args:
        model_param: the parameter's record.
        optim_param: state of the parameter's local shape; its dtype may differ. Of a DTensor a load gives a DTensor.
        prefix: the key becomes ``<prefix>.<model key>``.
    Raises:
        ShardingError: another shape than the parameter's.
    """
    key, data = f"{prefix}.{model_param.key}", _local(optim_param)
    if isinstance(model_param, ShardedTensorFactory):
        if model_param.data is not None and data.shape != model_param.data.shape:
            raise _unlike(key, data, tuple(model_param.data.shape))
        return replace(model_param, key=key, data=data)
    if tuple(data.shape) != (shape := data_shape(model_param)):
        raise _unlike(key, data, shape)
    record = replace(model_param, key=key, data=data, dtype=data.dtype)
    if not is_dtensor(optim_param):
        return record
    whole = optim_param.detach()
    return ShardedTensorFactory(key, whole, lambda *_: record, lambda _: whole, model_param.replica_id)


def _unlike(key: str, data: torch.Tensor, shape: tuple[int, ...]) -> ShardingError:
    state = key.removeprefix("optimizer.state.").partition(".")[0]
    return ShardingError(
        f"{key}: the state has shape {tuple(data.shape)}, its parameter {shape}; state is cut like its parameter. "
        f"Name {state!r} in exclude_keys and save it as common data or as a ShardedObject"
    )


def optim_state_to_sharding_state(
    optim_state_dict: dict[str, Any],
    id_to_sharded_param_map: Mapping[int, ModelRecord],
    exclude_keys: Collection[str] = (),
) -> None:
    """Turn an optimizer's state dict into a sharded one, in place.

    ``state`` becomes records with keys ``optimizer.state.<state>.<model key>``; values that are no tensors, such as a
    counter or None, become ShardedObjects under such keys. ``param_groups`` is copied, its
    ``params`` wrapped as LocalNonpersistentObject: numbers of parameters belong to a layout.

    Args:
        optim_state_dict: what ``torch.optim.Optimizer.state_dict`` gives.
        id_to_sharded_param_map: from ``get_param_id_to_sharded_param_map``.
        exclude_keys: names of state that is left out, such as a 0-dim tensor ``step``.
    Raises:
        ShardingError: state of a parameter without a record, or shaped unlike its parameter; nothing is changed then.
    """
    sharded: dict[Any, dict[str, Any]] = {}
    for number, states in optim_state_dict["state"].items():
        if number not in id_to_sharded_param_map:
            raise ShardingError(
                f"parameter {number} of the optimizer has no record in the model's sharded state dict; make that with "
                "keep_vars=True and with every parameter of the optimizer"
            )
        record = id_to_sharded_param_map[number]
        sharded[number] = {
            name: _described(record, value, f"optimizer.state.{name}")
            for name, value in states.items()
            if name not in exclude_keys
        }
    groups = deepcopy(optim_state_dict["param_groups"])
    for group in groups:
        group["params"] = LocalNonpersistentObject(group["params"])
    optim_state_dict["param_groups"], optim_state_dict["state"] = groups, sharded


def _described(record: ModelRecord, value: Any, prefix: str) -> Any:
    """A state value: tensors by the parameter's record, dicts and lists by their parts, all else as objects."""
    if isinstance(value, torch.Tensor):
        return make_sharded_optimizer_tensor(record, value, prefix)
    if tree.is_branch(value):
        parts = ((name, _described(record, part, f"{prefix}.{name}")) for name, part in tree.children(value))
        return tree.rebuilt(value, parts)
    return ShardedObject(f"{prefix}.{record.key}", value, (1,), (0,), _place(record))


def _place(record: ModelRecord) -> tuple[int, ...]:
    """All zeros where the written copy of the parameter's first element is: a replica id for all of it."""
    if isinstance(record, ShardedTensorFactory):
        expanded, _ = factory.expand({"": record})
        own = [leaf for _, leaf in tree.leaves(expanded) if isinstance(leaf, ShardedTensor)]
        return min(map(_place, own), default=(1,))
    replica = record.replica_id if isinstance(record.replica_id, tuple) else (record.replica_id,)
    flat = record.flattened_range
    is_empty = any(record.global_shape) and not any(record.pieces())
    return (*record.global_offset, 0 if flat is None else flat.start, int(is_empty), *replica)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return local_of(tensor) if is_dtensor(tensor) else tensor  # type: ignore[arg-type]
