"""Whole tensors out of the shards of all ranks, one unit in memory at a time.

    main weights, module buffers --> stream_full_state, full_state_dict (this file) --> a consumer, torch_state.py
    a DTensor --> whole_dtensor (this file) --> load_full_state.py, torch_state.py

Everything here is collective, and every wait has the model's deadline. No file format is known here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sixfold.fsdp.buffers.flat_buffer import ParamAndGradBuffer
from sixfold.fsdp.buffers.flat_tensor import ParamRecord
from sixfold.fsdp.collectives.host_messages import exchange
from sixfold.fsdp.engine.engine import Engine
from sixfold.fsdp.errors import FsdpError

Consumer = Callable[[str, Tensor], None]


def visit_whole(engine: Engine, visit: Callable[[ParamRecord, Tensor], None]) -> None:
    """Collective: ``visit(record, whole main weight)`` for all; a view that the next unit overwrites."""
    engine.before_save()
    engine.main_parameters.adopt()
    flat_buffers = [one for unit in engine.units for one in unit.flat_buffers]
    cut = [_whole_bytes(one) for one in flat_buffers if one.cut.parts > 1]
    room = torch.empty(max(cut, default=0), dtype=torch.uint8, device=engine.units[0].device)
    for one in flat_buffers:
        whole = one.cut.view_of(whole_of(one, one.weights.main.flat.detach(), engine, room))
        for record in one.records:
            visit(record, whole.full(record.name))


def _whole_bytes(of: ParamAndGradBuffer) -> int:
    return of.cut.parts * of.cut.shard_numel * of.weights.main_dtype.itemsize


def whole_of(of: ParamAndGradBuffer, flat: Tensor, engine: Engine, room: Tensor | None = None) -> Tensor:
    """Collective: the shards ``flat`` of all ranks one after the other, in ``room`` (bytes) or in new memory."""
    if of.cut.parts == 1:
        return flat
    numel = of.cut.parts * of.cut.shard_numel
    if room is None:
        room = torch.empty(numel * flat.dtype.itemsize, dtype=torch.uint8, device=of.device)
    full = room[: numel * flat.dtype.itemsize].view(flat.dtype)
    engine.faults.wait(of.ranks.shard.all_gather(full, flat.to(full.device)), of.unit, "gather")
    return full


def stream_full_state(module: nn.Module, engine: Engine, consume: Consumer | None) -> None:
    """``consume(name, tensor)`` for everything of the module's state dict, unit by unit. Collective.

    The tensor is a view that is gone when ``consume`` returns. Ranks that want nothing give None. Module buffers come
    last.

    Raises:
        FsdpError: on the ranks where nothing went wrong, when another rank's consumer raised; there its own error.
    """
    engine.faults.check()
    names: dict[Any, list[str]] = {}
    rest: list[tuple[str, Any]] = []
    for name, value in entries(module, engine).items():
        if isinstance(value, nn.Parameter) and value in engine.records:
            names.setdefault(value, []).append(name)
        else:
            rest.append((name, value))
    error: Exception | None = None

    def give(name: str, value: Any) -> None:
        nonlocal error
        try:
            if consume is not None and error is None:
                consume(name, value)
        except Exception as raised:
            error = raised

    def give_all(record: ParamRecord, value: Tensor) -> None:
        for name in names.get(record.parameter, ()):
            give(name, value)

    visit_whole(engine, give_all)
    for name, value in rest:
        give(name, value.detach() if isinstance(value, Tensor) else value)
    wait = engine.faults.for_control(None, "load")
    rows = exchange(engine.control, [int(error is not None)], wait)
    if error is not None:
        raise error
    bad = tuple(rank for rank, row in enumerate(rows) if row[0])
    if bad:
        raise FsdpError(
            f"stream_full_state: the consumer on rank {bad[0]} raised, so its copy is incomplete; see its own error",
            op="gather",
            ranks=bad,
        )


def full_state_dict(
    module: nn.Module, engine: Engine, rank: int | None, device: torch.device | None
) -> dict[str, Tensor]:
    """Main weights in full shapes and persistent module buffers, in the state dict's order; tied names share a tensor.

    Collective. ``rank``: the only one that keeps it (the others get an empty dict); ``device``: where copies lie.
    """
    if rank is not None and not 0 <= rank < engine.ranks.size:
        raise FsdpError(f"rank is {rank}; this model has ranks 0 to {engine.ranks.size - 1}")
    engine.faults.check()
    found = entries(module, engine)  # on all ranks: where it raises, it does so on all
    kept = rank is None or rank == engine.ranks.rank

    def copy(value: Tensor) -> Tensor:
        return torch.empty_like(value, device=device or value.device, requires_grad=False).copy_(value.detach())

    copies: dict[nn.Parameter, Tensor] = {}

    def keep(record: ParamRecord, value: Tensor) -> None:
        if kept:
            copies[record.parameter] = copy(value)

    visit_whole(engine, keep)
    return {
        name: copies[value] if isinstance(value, nn.Parameter) and value in copies else _plain(value, copy)
        for name, value in (found.items() if kept else ())
    }


def _plain(value: Any, copy: Callable[[Tensor], Tensor]) -> Any:
    return copy(value) if isinstance(value, Tensor) else value


def entries(module: nn.Module, engine: Engine) -> dict[str, Any]:
    """The module's own state dict: its Parameter objects and module buffers, of which nothing is read.

    Raises:
        FsdpError: a hook reads a weight, which is not here, to make an entry out of it.
    """
    before, engine.state_dict_asked = engine.state_dict_asked, "names"
    try:
        return dict(module.state_dict(keep_vars=True))
    except FsdpError as error:
        if error.op != "read":
            raise
        what = str(error).partition(";")[0]
        raise FsdpError(
            f"{what}: a state dict hook, or a _save_to_state_dict of a module's class, makes an entry out of it. "
            "Remove the hook, and make that entry out of the weight in full_state_dict()",
            unit=error.unit,
            op="read",
        ) from error
    finally:
        engine.state_dict_asked = before


def whole_dtensor(name: str, value: Any, engine: Engine) -> Tensor:
    """Collective: the whole of a DTensor, gathered with a deadline (``full_tensor()`` has none of ours).

    Raises:
        FsdpError: it is cut otherwise than along dim 0 over this model's shard group.
    """
    *outer, last = value.placements
    local, ranks = value.to_local().detach(), engine.ranks.shard
    if all(one.is_replicate() for one in value.placements):
        whole: Tensor = local
        return whole
    fits = all(one.is_replicate() for one in outer) and last.is_shard(0)
    if not fits or value.device_mesh.size(-1) != ranks.size or value.device_mesh.get_local_rank(-1) != ranks.rank:
        raise FsdpError(
            f"{name} is a DTensor placed {value.placements} on {value.device_mesh}; give one that is cut along dim 0 "
            "over this model's shard group, or a plain tensor"
        )
    rows = -(-value.shape[0] // ranks.size)  # of a chunk; the last ones hold less
    mine = local.new_zeros((rows, *value.shape[1:]))
    mine[: local.shape[0]].copy_(local)
    full: Tensor = local.new_empty((ranks.size * rows, *value.shape[1:]))
    engine.faults.wait(ranks.all_gather(full.view(-1), mine.view(-1)), None, "load")
    return full[: value.shape[0]]
