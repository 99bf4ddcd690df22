"""Optimizers over main parameters.

    torch.optim --> fully_shard_optimizer (this file) --> engine/engine.py's step events

Only optimizer hooks and ``param_groups``: the optimizer stays the user's object, of any class.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sixfold.fsdp.buffers.flat_buffer import ParamAndGradBuffer
from sixfold.fsdp.buffers.flat_tensor import ParamRecord
from sixfold.fsdp.buffers.layout import Slice
from sixfold.fsdp.collectives.comm import Comm, LocalComm
from sixfold.fsdp.collectives.streams import make_stream
from sixfold.fsdp.engine.engine import Engine
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.hooks.global_hooks import refuse_changed_parameters
from sixfold.fsdp.optimizers import chunked_step, state_offload
from sixfold.fsdp.optimizers.muon import PieceMuon
from sixfold.fsdp.optimizers.state_offload import HostState
from sixfold.fsdp.torch_private import functions_of

# By class name, because most live in other distributions; all torch.optim classes not named here are elementwise.
_WHOLE_TENSORS = frozenset({"Adafactor", "Muon", "Shampoo", "SOAP", "Lamb", "LAMB", "Lars", "LARS"})
_ALL_AT_ONCE = frozenset({"LBFGS"})
_SPARSE = frozenset({"SparseAdam"})
_FUSED_NUMEL = 16  # elements of a vector of torch's fused steps on a CPU, at most. [Note: fused steps and cuts]
_STAMP = "sixfold.fsdp"  # the key in an optimizer's state dict that says whose part of the state it is
_DCP = "torch.distributed.checkpoint.state_dict"


class Attached:
    """What a model keeps of its optimizers; as long as they live."""

    def __init__(self, *, offload: bool) -> None:
        self.offload = offload
        self.materializing: set[int] = set()  # ids of optimizers whose state is being made, without a step
        self.sharded: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.muons: weakref.WeakSet[PieceMuon] = weakref.WeakSet()
        self.hosts: weakref.WeakSet[HostState] = weakref.WeakSet()

    def add_to(self, report: dict[str, Any]) -> dict[str, Any]:
        """``model.report()`` with what optimizers own and move."""
        report["muon"] = [one.report() for one in self.muons]
        report["offload"] = [{"host_bytes": one.host_bytes, "device_bytes": one.device_bytes} for one in self.hosts]
        if self.offload:
            report["bytes"]["offload_slots"] = sum(one.device_bytes for one in self.hosts)
        return report

    def made(self, optimizer: torch.optim.Optimizer, main: nn.Parameter) -> None:
        """State of ``main`` was made."""
        for host in self.hosts:
            if host.owned_by(optimizer):
                host.keep([main])


def shard_optimizer(
    optimizer: torch.optim.Optimizer,
    engine: Engine,
    records: Mapping[nn.Parameter, ParamRecord],
    attached: Attached,
) -> torch.optim.Optimizer:
    """Put main parameters in ``optimizer``'s groups and tell the engine of its steps.

    Raises:
        FsdpError: the optimizer has state, or is sharded already, or has a parameter that is not of this model, or
            needs more of a tensor than lies here.
    """
    if optimizer.state and not _untouched(optimizer):
        raise FsdpError(
            f"{type(optimizer).__name__} has state for {len(optimizer.state)} parameters; fully_shard_optimizer takes "
            "a fresh one. Load state through state_records after it"
        )
    if optimizer in attached.sharded:
        raise FsdpError(f"{type(optimizer).__name__} is sharded already; call fully_shard_optimizer once for each")
    of_main = {record.main: record for record in records.values() if record.main is not None}
    groups, names_held = [], []
    covered: list[nn.Parameter] = []
    numbered: list[tuple[int, ParamRecord]] = []
    given_mains = False
    for number, group in enumerate(optimizer.param_groups):
        held, held_at = [], []
        for at, parameter in enumerate(group["params"]):
            record = of_main.get(parameter) or records.get(parameter)
            if record is None:
                raise FsdpError(f"the optimizer's parameter of shape {tuple(parameter.shape)} is not of this model")
            covered.append(record.parameter)
            numbered.append((number, record))
            given_mains = given_mains or parameter is record.main
            if record.main is not None:
                held.append(record.main)
                held_at.append(at)
        groups.append(held)
        names_held.append([group["param_names"][at] for at in held_at] if "param_names" in group else [])
    pieces = _pieces_for_muon(optimizer, numbered, given_mains)
    exchanged = {record for _, record in pieces}
    _refuse_unfit(
        optimizer, [record for _, record in numbered], exchanged=exchanged, own_meshes=engine.reduction.own_meshes
    )
    if engine.reduction.tree and engine.units[0].device.type == "cpu":
        _refuse_fused_over_cuts(optimizer, [record for _, record in numbered])
    if attached.offload:
        state_offload.refuse_unfit(optimizer, in_pieces=bool(pieces))
    _move_first_state(optimizer, records)
    for group, held, held_names in zip(optimizer.param_groups, groups, names_held, strict=True):
        group["params"][:] = held  # in place: LBFGS keeps the list
        if "param_names" in group:
            group["param_names"] = held_names
    if pieces:
        attached.muons.update(_exchange_pieces(optimizer, engine, pieces, attached.materializing))
    # Main parameters differ from rank to rank and tell nothing of the rest; what is forgotten must be the same on all.
    _discard_with_zero_grad(optimizer, engine, list(records) if given_mains else covered)
    _stamp_state_dicts(optimizer, engine, records)
    if any(record.flat_buffer.cut.parts > 1 for record in records.values()):
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # GradScaler then says that it is there
    names = {id(record.main): record.name for record in records.values() if record.main is not None}
    marked = attached.materializing
    widens = _step_in_chunks(optimizer, engine, attached, in_pieces=bool(pieces))
    before = partial(_before_step, optimizer, engine, names, widens=widens)
    optimizer.register_step_pre_hook(lambda *_: _unless_materializing(marked, optimizer, before))
    optimizer.register_step_post_hook(lambda *_: _unless_materializing(marked, optimizer, engine.after_step))
    attached.sharded.add(optimizer)
    engine.optimizers.add(optimizer)
    return optimizer


def _step_in_chunks(optimizer: torch.optim.Optimizer, engine: Engine, attached: Attached, *, in_pieces: bool) -> bool:
    """A step of ``optimizer`` goes by flat buffer where that saves memory; returns whether it widens gradients."""
    chunks: dict[ParamAndGradBuffer, list[nn.Parameter]] = {}
    for record in engine.numbered:
        if record.flat_buffer.trainable and record.main is not None:  # all: groups may be added
            chunks.setdefault(record.flat_buffer, []).append(record.main)
    visitors: list[chunked_step.Visitor] = []
    device, number, marked = engine.units[0].device, id(optimizer), attached.materializing
    if attached.offload:
        pinned = device.type == "cuda"
        host = HostState(optimizer, [*chunks.values()], device=device, stream=make_stream(device), pinned=pinned)
        optimizer.register_load_state_dict_post_hook(lambda _: host.keep_all())
        attached.hosts.add(host)
        visitors.append(host)
    mains = [one.gradients.main for one in chunks]
    alone = chunked_step.steps_alone(optimizer) and chunked_step.replaced_step(optimizer) is None
    widens = any(one.narrow_at_rest for one in mains) and not in_pieces and alone
    if widens:
        visitors.append(chunked_step.Widened(mains))
    if visitors:
        chunked_step.install(optimizer, [*chunks.values()], visitors, plain=lambda: number in marked)
    return widens


def _untouched(optimizer: torch.optim.Optimizer) -> bool:
    """Its state was made by the constructor (Adagrad): no step was taken."""
    return all("step" in state and float(state["step"]) == 0.0 for state in optimizer.state.values())


def _move_first_state(optimizer: torch.optim.Optimizer, records: Mapping[nn.Parameter, ParamRecord]) -> None:
    """State of a constructor: this rank's part of each tensor, under the main parameter and in its dtype."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            record = records.get(parameter)
            if record is None or parameter not in optimizer.state:
                continue
            state = optimizer.state.pop(parameter)
            part = record.flat_buffer.weights.main.slice(record.name)
            if record.main is not None and part is not None:
                optimizer.state[record.main] = {
                    key: _part_of_first(value, record.main, part, group)
                    if isinstance(value, Tensor) and value.shape == parameter.shape and key != "step"
                    else value
                    for key, value in state.items()
                }


def _part_of_first(value: Tensor, main: nn.Parameter, part: Slice, group: Mapping[str, Any]) -> Tensor:
    """A constructor that saw compute weights made it in their dtype: Adagrad's sums in bfloat16 would stop growing."""
    found = value.reshape(-1)[part.start : part.stop].to(main.dtype, copy=True).view(main.shape)
    if value.dtype != main.dtype and "initial_accumulator_value" in group:  # which bfloat16 may not hold
        found.fill_(group["initial_accumulator_value"])
    return found


def _pieces_for_muon(
    optimizer: torch.optim.Optimizer, numbered: Sequence[tuple[int, ParamRecord]], given_mains: bool
) -> list[tuple[int, ParamRecord]]:
    """Matrices of torch's own Muon that lie in pieces, with the number of their group; the same on all ranks."""
    if type(optimizer) is not getattr(torch.optim, "Muon", None):
        return []
    pieces = [(number, record) for number, record in numbered if not record.whole_on_one_rank]
    if pieces and given_mains:
        raise FsdpError(
            f"Muon is given main parameters, and {pieces[0][1].name} lies in pieces; ranks that hold none of it would "
            "not step with the others. Build it on the module's own parameters",
            unit=pieces[0][1].flat_buffer.unit,
        )
    return pieces


def _exchange_pieces(
    optimizer: torch.optim.Optimizer, engine: Engine, pieces: Sequence[tuple[int, ParamRecord]], marked: set[int]
) -> list[PieceMuon]:
    """Muon steps on matrices in pieces too: before torch's own step looks at its first group.

    That is inside ``step()`` after a closure and before anything is changed; torch's own code then finds the matrices
    that are whole here.
    """
    local = LocalComm()
    by_comm: dict[Comm, list[tuple[int, ParamRecord]]] = {}
    for number, record in pieces:
        comm = record.flat_buffer.ranks.shard if record.flat_buffer.cut.parts > 1 else local
        by_comm.setdefault(comm, []).append((number, record))
    steps = [
        PieceMuon(optimizer, members, comm, lambda work: engine.faults.wait(work, None, "step"))
        # The main mesh first: where ranks list their experts in other places, all still meet in one order.
        for comm, members in sorted(by_comm.items(), key=lambda one: one[0] is not engine.ranks.shard)
    ]
    mains = {id(record.main) for _, record in pieces if record.main is not None}
    plain = optimizer._init_group  # type: ignore[attr-defined]

    def _init_group(group: dict[str, Any], params: list[Any], grads: list[Any], momenta: list[Any]) -> Any:
        if id(optimizer) in marked:
            return plain(group, params, grads, momenta)
        if group is optimizer.param_groups[0]:
            for one in steps:
                one.step()
        everything = group["params"]
        group["params"] = [parameter for parameter in everything if id(parameter) not in mains]
        try:
            return plain(group, params, grads, momenta)
        finally:
            group["params"] = everything

    optimizer._init_group = _init_group  # type: ignore[attr-defined]
    return steps


def _refuse_unfit(
    optimizer: torch.optim.Optimizer,
    records: Sequence[ParamRecord],
    *,
    exchanged: Collection[ParamRecord],
    own_meshes: bool,
) -> None:
    """Optimizers whose update of one element needs others must have these here. The same answer on all ranks."""
    names = {one.__name__ for one in type(optimizer).__mro__}
    what = type(optimizer).__name__
    if names & _SPARSE:
        raise FsdpError(f"{what} steps on sparse gradients, and local sums are dense; use torch.optim.Adam or AdamW")
    if names & _ALL_AT_ONCE and any(record.flat_buffer.cut.parts > 1 for record in records):
        raise FsdpError(
            f"{what} takes products over all parameters at once, and this rank holds a shard of them; use "
            "strategy='no_shard', where every rank holds all"
        )
    if names & _ALL_AT_ONCE and own_meshes:
        raise FsdpError(
            f"{what} takes products over all parameters at once, and parameters on meshes of their own (mesh_for) "
            "differ between ranks; use an elementwise optimizer"
        )
    if names & _WHOLE_TENSORS:
        for record in records:
            if not record.whole_on_one_rank and record not in exchanged:
                raise FsdpError(
                    f"{what} updates {record.name} {record.spec.shape} as a whole tensor, and on this rank it is "
                    f"{'cut between ranks' if record.flat_buffer.cut.layout.is_cut(record.name) else 'flat'}; wrap "
                    "with granularity=lambda name, parameter: 'tensor' (or for the parameters of this optimizer alone)",
                    unit=record.flat_buffer.unit,
                )


def _refuse_fused_over_cuts(optimizer: torch.optim.Optimizer, records: Sequence[ParamRecord]) -> None:
    """[Note: fused steps and cuts] torch's fused steps on a CPU (Adam, AdamW, SGD with momentum) fuse a product and a
    sum in whole vectors, and not in what is left at a tensor's end. So last bits of moments depend on where a tensor is
    cut, unless a cut is at a multiple of a vector. Steps with ``foreach`` and with a loop give the same bits anyway.
    """
    if not any(group.get("fused") for group in optimizer.param_groups):
        return
    for record in records:
        for _, start, _ in record.flat_buffer.cut.layout.parts(record.name):
            if start % _FUSED_NUMEL:
                raise FsdpError(
                    f"{type(optimizer).__name__} has fused=True on a CPU, grad_sum is 'tree', and {record.name} is cut "
                    f"at element {start}: torch's fused step rounds the last {start % _FUSED_NUMEL} elements before a "
                    f"cut in another way, so bits depend on it; cut at multiples of {_FUSED_NUMEL} elements, as "
                    "BufferConfig(align_bytes=128) does, or use fused=False",
                    unit=record.flat_buffer.unit,
                )


def _before_step(optimizer: torch.optim.Optimizer, engine: Engine, names: Mapping[int, str], *, widens: bool) -> None:
    """Refuse what would train wrongly, then let the engine finish gradient sync; ``widens``: chunk by chunk."""
    sharded = (engine.shards_optimizer or engine.reduction.own_meshes) and engine.ranks.size > 1
    if sharded and vars(optimizer).pop("found_inf", None) is not None:
        vars(optimizer).pop("grad_scale", None)
        raise FsdpError(
            "a GradScaler steps this optimizer: it looks for infinities in this rank's shard only, so ranks would skip "
            "different steps; use bfloat16, which needs no scaler, or strategy='no_shard'"
        )
    for group in optimizer.param_groups:
        for main in group["params"]:
            if id(main) not in names:
                raise FsdpError(
                    f"the optimizer's parameter of shape {tuple(main.shape)} is not of this model: its group was added "
                    "after fully_shard_optimizer. Nothing sums its gradient over ranks; use another optimizer for it"
                )
    if not optimizer.state and functions_of(_DCP):
        raise FsdpError(_DCP_INSTEAD)
    refuse_changed_parameters(engine)
    engine.before_step(widen=not widens)


_DCP_INSTEAD = (
    "torch.distributed.checkpoint.state_dict asks for the optimizer's state, and looks for the module's own parameters "
    "in it; sixfold.fsdp.torch_state has functions of the same names and results, and model.state_records(optimizer) "
    "has live aliases"
)


def _stamp_state_dicts(
    optimizer: torch.optim.Optimizer, engine: Engine, records: Mapping[nn.Parameter, ParamRecord]
) -> None:
    """``optimizer.state_dict()`` is this rank's part, and is loaded where it was saved or nowhere."""
    of_main = {id(record.main): record for record in records.values() if record.main is not None}

    def stamp(of: torch.optim.Optimizer) -> dict[str, Any]:
        held = [of_main[id(main)] for group in of.param_groups for main in group["params"] if id(main) in of_main]
        parts = [(record.name, record.flat_buffer.weights.main.slice(record.name)) for record in held]
        text = "\n".join(f"{name} {part}" for name, part in parts)
        return {
            "rank": engine.ranks.rank, "ranks": engine.ranks.size, "parts": hashlib.sha256(text.encode()).hexdigest()
        }  # fmt: skip

    def saving(of: torch.optim.Optimizer) -> None:
        if functions_of(_DCP):
            raise FsdpError(_DCP_INSTEAD)

    def saved(of: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        state[_STAMP] = stamp(of)

    def loading(of: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        found, mine = state.get(_STAMP), stamp(of)
        if found != mine:
            was = "of an optimizer that was not sharded" if found is None else _where(found)
            raise FsdpError(
                f"load_state_dict: the state is {was}, and this is {_where(mine)}: its tensors are other parts of the "
                "parameters. Load through model.materialize_state(optimizer) and model.state_records(optimizer)"
            )
        return {key: value for key, value in state.items() if key != _STAMP}

    optimizer.register_state_dict_pre_hook(saving)
    optimizer.register_state_dict_post_hook(saved)
    optimizer.register_load_state_dict_pre_hook(loading)


def _where(stamp: Mapping[str, Any]) -> str:
    return f"rank {stamp['rank']} of {stamp['ranks']} (parts {stamp['parts'][:8]})"


def _discard_with_zero_grad(
    optimizer: torch.optim.Optimizer, engine: Engine, parameters: Sequence[nn.Parameter]
) -> None:
    """``optimizer.zero_grad()`` forgets what still waits for its reduction, as plain torch forgets ``p.grad``.

    Else a step that was given up (``zero_grad()`` without ``step()``) would leak into the next one's gradients. torch
    has no hook for it, so the method is replaced on the object, as learning rate schedulers replace ``step``.
    """
    plain = optimizer.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        engine.discard_local(parameters)
        plain(set_to_none)

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]


def _unless_materializing(marked: set[int], optimizer: torch.optim.Optimizer, event: Any) -> None:
    if id(optimizer) not in marked:
        event()
