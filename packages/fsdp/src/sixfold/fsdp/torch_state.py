"""State in the form of ``torch.distributed.checkpoint.state_dict``: DTensors under the module's own names.

    main weights, optimizer state --> get_... (this file) --> torch.distributed.checkpoint, FSDP2, DTensor tools
    what FSDP2 or get_... gave --> set_... --> main weights, optimizer state

The functions have the names and return values of torch's. So a program that saves FSDP2 models changes an import. Of
``StateDictOptions`` they take ``full_state_dict``, ``cpu_offload`` and ``broadcast_from_rank0``. All are collectives.
A DTensor is cut along dim 0 in even chunks, a main weight between any two elements. So these functions make copies, by
one gather per unit and key. ``state_records()`` gives aliases, without communication.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from sixfold.fsdp.buffers.flat_buffer import ParamAndGradBuffer
from sixfold.fsdp.buffers.flat_tensor import ParamRecord
from sixfold.fsdp.collectives.host_messages import exchange, exchange_text
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.state import full_state
from sixfold.fsdp.state.load_full_state import IncompatibleKeys
from sixfold.fsdp.wrapper.fully_sharded import FullyShardedDataParallel

Described = dict[str, dict[str, Any]]  # name -> {"group": number, "state": {key: what}}


def get_state_dict(
    model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer, *, options: StateDictOptions | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """``get_model_state_dict`` and ``get_optimizer_state_dict``."""
    return get_model_state_dict(model, options=options), get_optimizer_state_dict(model, optimizer, options=options)


def set_state_dict(
    model: FullyShardedDataParallel,
    optimizer: torch.optim.Optimizer,
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> None:
    """``set_model_state_dict``, then ``set_optimizer_state_dict``."""
    set_model_state_dict(model, model_state_dict, options=options)
    set_optimizer_state_dict(model, optimizer, optim_state_dict, options=options)


def get_model_state_dict(model: FullyShardedDataParallel, *, options: StateDictOptions | None = None) -> dict[str, Any]:
    """Main weights as DTensors (plain tensors where every rank holds all) and module buffers, as of an FSDP2 model.

    It takes memory for a shard of the model and one unit. The tensors are copies: load by ``set_model_state_dict``.

    Raises:
        FsdpError: a parameter is on a mesh of its own, or an option is not supported.
    """
    asked = _asked(options, "get_model_state_dict")
    if asked.full_state_dict:
        rank, device = (0, "cpu") if asked.cpu_offload else (None, None)
        return dict(model.full_state_dict(rank=rank, device=device))
    place = _Place(model)
    entries = full_state.entries(model.module, model._engine)
    cut: dict[Any, Any] = {}
    full_state.visit_whole(model._engine, lambda record, value: cut.__setitem__(record.parameter, place(record, value)))
    found = {
        name: cut[value]
        if isinstance(value, Tensor) and value in cut
        else value.detach().clone()
        if isinstance(value, Tensor)
        else value
        for name, value in entries.items()
    }
    return _moved(found, asked)


def set_model_state_dict(
    model: FullyShardedDataParallel, state: Mapping[str, Any], *, options: StateDictOptions | None = None
) -> IncompatibleKeys:
    """Load main weights and module buffers from ``state``, which is the same on all ranks.

    With ``broadcast_from_rank0`` the state of the first rank counts; that of others is ignored. With ``strict=False``
    names that are missing or unexpected are left out, and returned.

    Raises:
        FsdpError: as ``load_full_state_dict``, or an option is not supported.
    """
    asked = _asked(options, "set_model_state_dict", also="strict")
    several = asked.broadcast_from_rank0 and model._engine.ranks.size > 1
    given = None if several and model._engine.ranks.rank else dict(state)
    return model.load_full_state_dict(given, strict=asked.strict)


def get_optimizer_state_dict(
    model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer, *, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """``{"state": {name: {key: value}}, "param_groups": [...]}`` with parameters named, as of an FSDP2 model.

    If the optimizer took no step yet, its state is made first, as torch's function does. So you can load into it.

    Raises:
        FsdpError: a parameter is on a mesh of its own, a state is neither a number nor of its parameter's shape, or an
            option is not supported.
    """
    asked = _asked(options, "get_optimizer_state_dict")
    model._engine.before_save()
    wait = model._engine.faults.for_control(None, "check")
    if not any(row[0] for row in exchange(model._engine.control, [len(optimizer.state)], wait)):
        model.materialize_state(optimizer)
    place = _Place(model)
    described = _describe(model, optimizer)
    state: dict[str, dict[str, Any]] = {name: {} for name, one in described.items() if one["state"]}
    for name, one in described.items():
        for key, what in one["state"].items():
            if "cut" not in what:
                state[name][key] = _number(what)
    for unit in model._engine.units:
        for flat_buffer in unit.flat_buffers:
            for key, dtype in _cut_keys(flat_buffer, described):
                values = _gather_state(model, optimizer, flat_buffer, key, dtype)
                for record in flat_buffer.records:
                    if "cut" in described.get(record.name, {"state": {}})["state"].get(key, {}):
                        state[record.name][key] = place(record, values.full(record.name))
    order = {name: {key: state[name][key] for key in described[name]["state"]} for name in state}
    if asked.full_state_dict:
        order = {name: {key: _whole(key, value, model) for key, value in one.items()} for name, one in order.items()}
    if asked.full_state_dict and asked.cpu_offload and model._engine.ranks.rank:
        return {}
    kept = {name: _moved(one, asked) for name, one in order.items()}
    return {"state": kept, "param_groups": _groups(optimizer, described)}


def set_optimizer_state_dict(
    model: FullyShardedDataParallel,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Load every state tensor, number and option from ``state``, in place. State that is not there yet is made.

    Raises:
        FsdpError: names, shapes or groups are not the optimizer's; then nothing is loaded. Or an option is not
            supported, such as ``broadcast_from_rank0``: give the state on all ranks.
    """
    _asked(options, "set_optimizer_state_dict", but="broadcast_from_rank0")
    model.materialize_state(optimizer)
    described = _describe(model, optimizer)
    records = {record.name: record for record in model._engine.records.values()}
    _refuse_other(described, records, state)
    wanted = _groups(optimizer, described)
    given = [next(one for one in state["param_groups"] if set(one["params"]) == set(g["params"])) for g in wanted]
    for group, source in zip(optimizer.param_groups, given, strict=True):
        group.update({key: value for key, value in source.items() if key not in ("params", "param_names")})
    with torch.no_grad():
        for name in described:  # the same order on all ranks: DTensors are gathered
            record = records[name]
            mine = {} if record.main is None else optimizer.state.get(record.main, {})
            part = record.flat_buffer.weights.main.slice(name)
            for key, value in state["state"].get(name, {}).items():
                full = full_state.whole_dtensor(key, value, model._engine) if isinstance(value, DTensor) else value
                if key not in mine or part is None:
                    continue
                if isinstance(mine[key], Tensor) and "cut" in described[name]["state"][key]:
                    mine[key].view(-1).copy_(full.reshape(-1)[part.start : part.stop])
                elif isinstance(mine[key], Tensor):
                    mine[key].copy_(torch.as_tensor(full))
                else:
                    mine[key] = full.item() if isinstance(full, Tensor) else full


_TAKEN = ("full_state_dict", "cpu_offload", "broadcast_from_rank0")


def _asked(options: StateDictOptions | None, call: str, *, but: str = "", also: str = "") -> StateDictOptions:
    """Options that can be followed. Raises: FsdpError: another than ``_TAKEN`` is not at its default."""
    usual, asked = StateDictOptions(), options or StateDictOptions()
    for field in fields(usual):
        other = getattr(asked, field.name) != getattr(usual, field.name)
        if other and (field.name not in (*_TAKEN, also) or field.name == but):
            raise FsdpError(
                f"{call}: StateDictOptions.{field.name} is {getattr(asked, field.name)!r}; here it is "
                f"{getattr(usual, field.name)!r}. Change names, or leave out entries, in the dict itself"
            )
    return asked


def _whole(key: str, value: Any, model: FullyShardedDataParallel) -> Any:
    return full_state.whole_dtensor(key, value, model._engine) if isinstance(value, DTensor) else value


def _moved(found: dict[str, Any], asked: StateDictOptions) -> dict[str, Any]:
    if not asked.cpu_offload:
        return found
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in found.items()}


class _Place:
    """A whole tensor as this rank's even chunk of a DTensor; a plain copy where main weights are not cut."""

    def __init__(self, model: FullyShardedDataParallel) -> None:
        options, engine = model._options, model._engine
        for record in engine.records.values():
            if record.flat_buffer.ranks is not engine.ranks:
                raise FsdpError(
                    f"{record.name} is on a mesh of its own, whose ranks may hold other values under that name; use "
                    "state_records()",
                    unit=record.flat_buffer.unit,
                )
        self._mesh = options.mesh
        if self._mesh is None and options.group is not None:
            self._mesh = DeviceMesh.from_group(options.group, engine.units[0].device.type)

    def __call__(self, record: ParamRecord, value: Tensor) -> Tensor:
        ranks = record.flat_buffer.ranks.shard
        if record.flat_buffer.cut.parts == 1 or self._mesh is None:
            return value.clone()
        local, along = value, Shard(0)
        if value.dim():
            chunks = torch.chunk(value, ranks.size, dim=0)
            local = chunks[ranks.rank] if ranks.rank < len(chunks) else value[:0]
        placements = [Replicate()] * (self._mesh.ndim - 1) + [along if value.dim() else Replicate()]
        made: Tensor = DTensor.from_local(
            local.clone(), self._mesh, placements, run_check=False, shape=value.shape, stride=value.stride()
        )
        return made


def _describe(model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer) -> Described:
    """What the optimizer holds of every parameter, told by the first rank that holds a part of it."""
    engine = model._engine
    group_of = {id(main): at for at, group in enumerate(optimizer.param_groups) for main in group["params"]}
    given = {
        id(main): name
        for group in optimizer.param_groups
        for main, name in zip(group["params"], group.get("param_names", ()), strict=False)
    }
    own: Described = {}
    problem = ""
    for record in engine.records.values():
        part = record.flat_buffer.weights.main.slice(record.name)
        ranks = record.flat_buffer.ranks
        first = ranks.outer.rank == 0 if record.flat_buffer.cut.parts > 1 else ranks.rank == 0
        if not first or record.main is None or part is None or part.start or id(record.main) not in group_of:
            continue
        mine = optimizer.state.get(record.main, {})
        try:
            what = {key: _what(record, key, value) for key, value in mine.items()}
        except FsdpError as error:
            what, problem = {}, str(error)
        own[record.name] = {"group": group_of[id(record.main)], "state": what, "given": given.get(id(record.main))}
    wait = engine.faults.for_control(None, "check")
    texts = [json.loads(text) for text in exchange_text(engine.control, json.dumps([problem, own]), wait)]
    for rank, (said, _) in enumerate(texts):
        if said:
            raise FsdpError(said, ranks=(rank,))
    found: Described = {name: one for _, told in reversed(texts) for name, one in told.items()}
    return {record.name: found[record.name] for record in engine.records.values() if record.name in found}


def _what(record: ParamRecord, key: str, value: Any) -> dict[str, Any]:
    assert record.main is not None, f"{record.name} is not held here"
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if value.shape == record.main.shape:
            return {"cut": dtype}
        if value.numel() == 1:
            return {"value": value.item(), "dtype": dtype, "shape": list(value.shape)}
    elif value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise FsdpError(
        f"optimizer state {key!r} of {record.name} is neither a number nor of its parameter's shape, and has no "
        "DTensor form; save model.state_records(optimizer)",
        unit=record.flat_buffer.unit,
    )


def _number(what: Mapping[str, Any]) -> Any:
    if "dtype" not in what:
        return what["value"]
    return torch.full(what["shape"], what["value"], dtype=getattr(torch, what["dtype"]))


def _cut_keys(flat_buffer: ParamAndGradBuffer, described: Described) -> list[tuple[str, torch.dtype]]:
    """Keys of state that is cut like the parameters of ``flat_buffer``, in the same order on all ranks."""
    found = {
        (key, what["cut"])
        for record in flat_buffer.records
        for key, what in described.get(record.name, {"state": {}})["state"].items()
        if "cut" in what
    }
    return [(key, getattr(torch, dtype)) for key, dtype in sorted(found)]


def _gather_state(
    model: FullyShardedDataParallel,
    optimizer: torch.optim.Optimizer,
    flat_buffer: ParamAndGradBuffer,
    key: str,
    dtype: torch.dtype,
) -> Any:
    flat = torch.zeros(flat_buffer.cut.main_numel, dtype=dtype, device=flat_buffer.device)
    parts = flat_buffer.cut.view_of(flat)
    for record in flat_buffer.records:
        value = None if record.main is None else optimizer.state.get(record.main, {}).get(key)
        if isinstance(value, Tensor) and value.dtype == dtype:
            parts.local(record.name).copy_(value)
    return flat_buffer.cut.view_of(full_state.whole_of(flat_buffer, flat, model._engine))


def _groups(optimizer: torch.optim.Optimizer, described: Described) -> list[dict[str, Any]]:
    found = []
    for at, group in enumerate(optimizer.param_groups):
        names = [name for name, one in described.items() if one["group"] == at]
        made = {**group, "params": names}
        if "param_names" in group:  # as the optimizer was given them
            made["param_names"] = [described[name]["given"] for name in names]
        found.append(made)
    return found


def _refuse_other(described: Described, records: Mapping[str, ParamRecord], state: Mapping[str, Any]) -> None:
    own = {name for name, one in described.items() if one["state"]}
    theirs = {name for name, one in state["state"].items() if one}
    wrong = [f"missing: {name}" for name in own - theirs] + [f"unexpected: {name}" for name in theirs - own]
    for name in own & theirs:
        for key, what in described[name]["state"].items():
            value = state["state"][name].get(key, ...)
            if value is ...:
                wrong.append(f"missing: {key} of {name}")
            elif "cut" in what and tuple(getattr(value, "shape", ())) != tuple(records[name].spec.shape):
                given = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                wrong.append(f"{key} of {name} has {given}, {records[name].spec.shape} is kept")
    for at in {one["group"] for one in described.values()}:
        names = {name for name, one in described.items() if one["group"] == at}
        if not any(set(group["params"]) == names for group in state["param_groups"]):
            wrong.append(f"no group of the given state holds just the parameters of group {at}")
    if wrong:
        raise FsdpError(
            f"set_optimizer_state_dict: {_first(sorted(wrong))}; nothing was loaded. A state of an optimizer that took "
            "no step is empty: call model.materialize_state(optimizer) before it is saved",
            op="load",
        )


def _first(texts: Iterable[str], most: int = 5) -> str:
    found = list(texts)
    return "; ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")
