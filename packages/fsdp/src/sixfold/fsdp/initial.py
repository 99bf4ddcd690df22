"""Start values: ranks compared, each rank's shard kept, views handed out.

    module + buffers, meta.py --> agree, set_start_values (this file) --> a model ready for its first forward

One module at a time, so no rank ever holds more full parameters than one module owns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sixfold.fsdp.checks import odd_ranks, tensor_digest
from sixfold.fsdp.comm import Ranks
from sixfold.fsdp.control import Control, exchange, exchange_text, farewell
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.flat import ParamRecord
from sixfold.fsdp.meta import InitFn, Meta

WaitWork = Callable[[Any], None]


def agree(
    module: nn.Module, settings: Mapping[str, object], problem: FsdpError | None, control: Control, wait: WaitWork
) -> None:
    """All ranks wrap the same model with the same settings, and have the same ``problem`` or none.

    Raises:
        FsdpError: on all ranks: the first difference, both values, the ranks that differ from most.
    """
    lines = [f"error|{problem or 'none'}"]
    lines += [f"{name}|{_looks(p)}" for name, p in module.named_parameters()]
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
        f"ranks wrap different models: {name} is {value}, on rank {odd[0]} {said}; build the same model on all ranks",
        op="check",
        ranks=odd,
    )


def _looks(parameter: nn.Parameter) -> str:
    shape = "no shape" if is_lazy(parameter) else tuple(parameter.shape)
    return f"{shape} {parameter.dtype} requires_grad={parameter.requires_grad}"


def set_start_values(
    module: nn.Module,
    records: Mapping[nn.Parameter, ParamRecord],
    ranks: Ranks,
    control: Control,
    wait: WaitWork,
    *,
    device: torch.device,
    init_fn: InitFn | None,
    initial: str,
) -> None:
    """Materialise, compare or broadcast, keep the local part, and point ``parameter.data`` at gathered memory.

    Raises:
        FsdpError: a meta module cannot be initialised; ``initial="check"`` and values differ (on all ranks).
    """
    done: dict[nn.Parameter, int] = {}
    sent = initial == "broadcast" and ranks.size > 1
    for group in Meta(device, init_fn).together(module):
        for parameter in (one for part in group for one in part.parameters(recurse=False)):
            if parameter in done:
                continue
            record = records[parameter]
            value = _broadcast(parameter.data, ranks, wait) if sent else parameter.data
            done[parameter] = tensor_digest(value) if initial == "check" and ranks.size > 1 else 0
            record.buffer.weights.store_main(record, value)
            parameter.data = record.compute
            del value  # the next module is made before this name is given another tensor
        for buffer in (one for part in group for one in part.buffers(recurse=False)) if sent else ():
            buffer.copy_(_broadcast(buffer, ranks, wait))
    if initial == "check" and ranks.size > 1:
        _compare([(records[parameter].name, digest) for parameter, digest in done.items()], control, wait)


def _broadcast(value: Tensor, ranks: Ranks, wait: WaitWork) -> Tensor:
    """The value of the mesh's rank 0, on every rank."""
    sent = value.detach().clone().contiguous()
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
