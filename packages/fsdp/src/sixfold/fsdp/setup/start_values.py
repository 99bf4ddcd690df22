"""Start values: ranks compared, each rank's shard kept, views handed out.

    module, meta_device.py --> agree, set_start_values (this file) --> a model ready for its first forward

One module at a time, so no rank ever holds more full parameters than one module owns.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sixfold.fsdp.buffers.digest import tensor_digest
from sixfold.fsdp.buffers.flat_tensor import ParamRecord
from sixfold.fsdp.collectives.comm import Ranks
from sixfold.fsdp.collectives.host_messages import Control, exchange, exchange_text, farewell
from sixfold.fsdp.collectives.own_meshes import Meshes
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.faults.disagreement import odd_ranks
from sixfold.fsdp.setup.meta_device import InitFn, Meta

WaitWork = Callable[[Any], None]


def agree(
    module: nn.Module,
    settings: Mapping[str, object],
    problem: FsdpError | None,
    meshes: Meshes,
    control: Control,
    wait: WaitWork,
) -> None:
    """All ranks wrap the same model with the same settings, and have the same ``problem`` or none.

    Parameters on a mesh of their own are those of its ranks: see ``agree_on_meshes``.

    Raises:
        FsdpError: on all ranks: the first difference, both values, the ranks that differ from most.
    """
    lines = [f"error|{problem or 'none'}"]
    lines += [f"{name}|{_looks(p)}" for name, p in module.named_parameters() if name not in meshes.own]
    lines += [f"{name}|{value}" for name, value in settings.items()]
    text = "\n".join(lines)
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
    rows = exchange(control, [digest], wait)
    _, odd = odd_ranks(rows)
    if not odd:
        if problem is not None:
            farewell(control, wait)
        return
    texts = [one.split("\n") for one in exchange_text(control, text, wait)]
    farewell(control, wait)
    usual = texts[next(rank for rank in range(len(rows)) if rank not in odd)]
    other = texts[odd[0]]
    both = zip([*usual, "(nothing)|nothing"], [*other, "(nothing)|nothing"], strict=False)
    mine, theirs = next((a, b) for a, b in both if a != b)
    name, _, value = mine.partition("|")
    other_name, _, other_value = theirs.partition("|")
    said = other_value if name == other_name else f"{other_name} {other_value}"
    raise FsdpError(
        f"ranks wrap different models: {name} is {value}, on rank {odd[0]} {said}. Build the same model on all ranks",
        op="check",
        ranks=odd,
    )


def agree_on_meshes(module: nn.Module, meshes: Meshes, control: Control, wait: WaitWork) -> bool:
    """The ranks of a mesh have the same parameters on it. Returns whether any rank has a mesh beside the main one.

    Raises:
        FsdpError: on all ranks: the first parameter that differs, the mesh, the ranks of it that differ from most.
    """
    own = meshes.own
    mine = [(name, own[name].place, _looks(p)) for name, p in module.named_parameters() if name in own]
    return _compare_on_meshes(
        mine,
        control,
        wait,
        "ranks {place} share a mesh and wrap different models on it: {name} {value} on most, {other} on rank {odd}; "
        "build the same modules on all ranks of a mesh",
    )


def _compare_on_meshes(
    mine: Sequence[tuple[str, Sequence[int], str]], control: Control, wait: WaitWork, message: str
) -> bool:
    """(name, positions of its mesh, value): every rank of a mesh says the same of it, in the same order."""
    text = "\n".join(f"{','.join(map(str, place))}|{name}|{value}" for name, place, value in mine)
    said = [_by_mesh(one) for one in exchange_text(control, text, wait)]
    for place in dict.fromkeys(place for one in said for place in one):
        lists = [said[rank].get(place, []) for rank in place]
        for at in range(max(map(len, lists))):
            lines = [one[at] if at < len(one) else ("nothing", "") for one in lists]
            (name, value), odd = odd_ranks(lines)
            if odd:
                farewell(control, wait)
                at_fault = tuple(place[one] for one in odd)
                other, ranks = " ".join(lines[odd[0]]), ", ".join(map(str, at_fault))
                text = message.format(name=name, value=value, other=other, place=list(place), odd=ranks)
                raise FsdpError(text, op="check", ranks=at_fault)
    return any(said)


def _by_mesh(text: str) -> dict[tuple[int, ...], list[tuple[str, str]]]:
    found: dict[tuple[int, ...], list[tuple[str, str]]] = {}
    for line in text.splitlines():
        place, name, value = line.split("|", 2)
        found.setdefault(tuple(map(int, place.split(","))), []).append((name, value))
    return found


def _looks(parameter: nn.Parameter) -> str:
    shape = "no shape" if is_lazy(parameter) else tuple(parameter.shape)
    return f"{shape} {parameter.dtype} requires_grad={parameter.requires_grad}"


def set_start_values(
    module: nn.Module,
    records: Mapping[nn.Parameter, ParamRecord],
    ranks: Ranks,
    meshes: Meshes,
    control: Control,
    wait: WaitWork,
    *,
    device: torch.device,
    init_fn: InitFn | None,
    initial: str,
    own_meshes: bool,
) -> None:
    """Materialise, compare or broadcast, keep the local part, and point ``parameter.data`` at gathered memory.

    ``own_meshes``: some rank has parameters on a mesh of their own.

    Raises:
        FsdpError: a meta module cannot be initialised; ``initial="check"`` and values differ (on all ranks).
    """
    done: dict[nn.Parameter, int] = {}
    kept: dict[Tensor, int] = {}  # module buffers
    sent = initial == "broadcast" and ranks.size > 1
    for group in Meta(device, init_fn).groups(module):
        for parameter in (one for part in group for one in part.parameters(recurse=False)):
            if parameter in done:
                continue
            record = records[parameter]
            value = _broadcast(parameter.data, record.flat_buffer.ranks, wait) if sent else parameter.data
            done[parameter] = tensor_digest(value) if initial == "check" and ranks.size > 1 else 0
            record.flat_buffer.weights.write_main(record, value)
            parameter.data = record.compute
            del value  # the next module is made before this name is given another tensor
        for module_buffer in (one for part in group for one in part.buffers(recurse=False)):
            if sent:
                module_buffer.copy_(_broadcast(module_buffer, ranks, wait))
            elif initial == "check" and ranks.size > 1:
                kept[module_buffer] = tensor_digest(module_buffer)
    if initial == "check" and ranks.size > 1:
        found = {records[parameter].name: digest for parameter, digest in done.items()}
        _compare([(name, digest) for name, digest in found.items() if name not in meshes.own], control, wait)
        names = {one: name for name, one in module.named_buffers()}
        apart = {name.rpartition(".")[0] for name in meshes.own}  # experts: other modules on other ranks
        digests = [(names[one], digest) for one, digest in kept.items() if names[one].rpartition(".")[0] not in apart]
        if not own_meshes:
            _compare_module_buffers(module, digests, control, wait)
        if own_meshes:
            _compare_on_meshes(
                [(name, meshes.own[name].place, f"{found[name]:x}") for name in found if name in meshes.own],
                control,
                wait,
                "start values of {name} differ on rank {odd} from those of its mesh, ranks {place}; seed all ranks "
                'of a mesh alike, or use initial="broadcast"',
            )


def _compare_module_buffers(
    module: nn.Module, digests: list[tuple[str, int]], control: Control, wait: WaitWork
) -> None:
    """The same module buffers with the same values on all ranks; a running statistic that will part is warned of."""
    text = " ".join(f"{name}:{digest:x}" for name, digest in digests)
    mine = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
    _, odd = odd_ranks(exchange(control, [mine], wait))
    if odd:
        said = [one.split() for one in exchange_text(control, text, wait)]
        farewell(control, wait)
        usual = said[next(rank for rank in range(len(said)) if rank not in odd)]
        differ = [a.rpartition(":")[0] for a, b in zip(usual, said[odd[0]], strict=False) if a != b]
        raise FsdpError(
            f"the module buffer {differ[0] if differ else 'list'} differs on rank {', '.join(map(str, odd))} at the "
            'start; seed all ranks alike, or use initial="broadcast". Where ranks are meant to differ use '
            'initial="trust"',
            op="check",
            ranks=odd,
        )


def warn_of_statistics(module: nn.Module) -> None:
    """BatchNorm in training keeps the statistics of this rank's batches."""
    for name, part in module.named_modules():
        own = isinstance(part, nn.modules.batchnorm._BatchNorm) and not isinstance(part, nn.SyncBatchNorm)
        if own and part.track_running_stats and part.training:
            warnings.warn(
                f"{name or type(part).__name__} keeps running statistics of each rank's own batches. Call "
                "model.broadcast_buffers() before an evaluation or a checkpoint (DDP does so before each forward), or "
                "use torch.nn.SyncBatchNorm",
                stacklevel=4,
            )
            return


def broadcast_module_buffers(module: nn.Module, ranks: Ranks, wait: WaitWork) -> None:
    """Module buffers of the mesh's rank 0, on every rank."""
    for module_buffer in module.buffers():
        module_buffer.copy_(_broadcast(module_buffer, ranks, wait))


def _broadcast(value: Tensor, ranks: Ranks, wait: WaitWork) -> Tensor:
    """The value of the mesh's rank 0, on every rank."""
    sent = value.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    wait(ranks.shard.broadcast(sent))
    wait(ranks.outer.broadcast(sent))
    return sent


def _compare(digests: list[tuple[str, int]], control: Control, wait: WaitWork) -> None:
    if not digests:
        return
    rows = exchange(control, [digest for _, digest in digests], wait)
    for at, (name, _) in enumerate(digests):
        _, odd = odd_ranks([[row[at]] for row in rows])
        if odd:
            farewell(control, wait)
            raise FsdpError(
                f"start values of {name} differ on rank {', '.join(map(str, odd))}; seed all ranks alike, or use "
                'initial="broadcast"',
                op="check",
                ranks=odd,
            )
