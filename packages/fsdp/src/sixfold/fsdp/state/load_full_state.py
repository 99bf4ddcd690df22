"""A whole state into the shards, tensor by tensor.

    dict or (name, tensor) pairs, on one rank or on all --> load (this file) --> main weights, module buffers

Beyond the shards a rank holds one tensor. Optimizer state is not touched, and no file format is known here: who reads
safetensors gives an iterator of its tensors.

[Note: told on all ranks] A rank that finds something wrong says so in the next message, and every rank raises the same
error. So nobody waits for a collective that will not come.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sixfold.fsdp.buffers.digest import tensor_digest
from sixfold.fsdp.buffers.flat_tensor import ParamRecord
from sixfold.fsdp.collectives.comm import Ranks
from sixfold.fsdp.collectives.host_messages import exchange, exchange_text
from sixfold.fsdp.engine.engine import Engine
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.faults.disagreement import odd_ranks
from sixfold.fsdp.state.full_state import entries, whole_dtensor

Source = Mapping[str, Any] | Iterable[tuple[str, Any]] | None

_SHOWN = 5  # names in one list of an error
_VALUE, _END, _PROBLEM, _OBJECT = range(4)
_NOTHING: Any = object()
_EXTRA = "_extra_state"  # what torch calls it in a state dict
_DTYPES = tuple(
    dict.fromkeys(one for one in (getattr(torch, name) for name in sorted(vars(torch))) if isinstance(one, torch.dtype))
)  # a dtype travels as its place in this list, the same for all ranks of one torch


class IncompatibleKeys(NamedTuple):
    """What ``strict=False`` left out, on all ranks alike where one gave the state. Named as torch names it."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass(frozen=True, eq=False)
class Target:
    """Names of one entry of the module's state dict and where its value goes: a parameter's main weight, a module
    buffer, or ``extra``, the module whose ``set_extra_state`` takes whatever ``get_extra_state`` gave."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    record: ParamRecord | None
    module_buffer: Tensor | None
    extra: nn.Module | None = None

    def write(self, value: Any) -> None:
        """Keep this rank's part of ``value``, which is whole."""
        if self.extra is not None:
            self.extra.set_extra_state(value)
        elif self.record is not None:
            self.record.flat_buffer.weights.write_main(self.record, value)
        elif self.module_buffer is not None:
            self.module_buffer.copy_(value)


@dataclass(frozen=True, eq=False, slots=True)
class _Load:
    """One call of ``load`` as this rank has it."""

    source: Source
    targets: Sequence[Target]
    expected: Mapping[str, tuple[int, Target]]  # by name: the target and its place
    engine: Engine
    wait: Callable[[Any], None]
    strict: bool = True
    loaded: set[int] = field(default_factory=set)  # places of targets that have their values
    left_out: IncompatibleKeys = field(default_factory=lambda: IncompatibleKeys([], []))


def targets_of(module: nn.Module, engine: Engine) -> list[Target]:
    """Every entry of ``module.state_dict()``: parameters unit by unit, then persistent module buffers and extra state.

    Raises:
        FsdpError: an entry that is none of these (a hook's product).
    """
    names: dict[Any, list[str]] = {}
    for name, value in entries(module, engine).items():
        names.setdefault(value if isinstance(value, Tensor) else name, []).append(name)
    own = set(module.buffers())
    extras = {f"{path}.{_EXTRA}" if path else _EXTRA: part for path, part in module.named_modules()}
    found = []
    for record in engine.records.values():
        if record.parameter in names:
            shape, dtype = tuple(record.spec.shape), record.flat_buffer.weights.main_dtype
            at = record.flat_buffer.device
            found.append(Target(tuple(names.pop(record.parameter)), shape, dtype, at, record, None))
    for value, given in names.items():
        extra = extras.get(given[0])
        if extra is not None and type(extra).set_extra_state is not nn.Module.set_extra_state:
            found.append(Target(tuple(given), (), torch.uint8, engine.units[0].device, None, None, extra))
            continue
        if value not in own:
            raise FsdpError(
                f"{given[0]} of the module's state dict is no parameter, module buffer or extra state (a state dict "
                "hook made it), and cannot be streamed; load parameters through state_records() and this by the module",
                op="load",
            )
        found.append(Target(tuple(given), tuple(value.shape), value.dtype, value.device, None, value))
    return found


def load(module: nn.Module, engine: Engine, source: Source, *, compare: bool, strict: bool = True) -> IncompatibleKeys:
    """Main weights and module buffers become those of ``source``; gathered copies are stale afterwards. Collective.

    One rank gives a source and the others None (its values are broadcast), or every rank gives one and reads for
    itself; ``compare`` then makes sure that all read the same. Without ``strict`` names that are missing or unexpected
    are left out, and returned.

    Raises:
        FsdpError: on all ranks alike. A dict is checked as a whole before the first value is written. Of other sources
            each tensor is checked before it is written, and the text says how much was loaded.
    """
    engine.faults.check()
    source = _pairs_of_file(source)
    engine.end_raised_step()
    if engine.in_call or engine.stepping:
        raise FsdpError("a state is loaded inside a forward or optimizer.step(); load it between steps", op="load")
    wait = engine.faults.for_control(None, "load")
    targets = targets_of(module, engine)
    expected = {name: (at, target) for at, target in enumerate(targets) for name in target.names}
    givers = [rank for rank, row in enumerate(exchange(engine.control, [int(source is not None)], wait)) if row[0]]
    shared = len(givers) == 1 < engine.ranks.size
    problem = _problem_of_givers(givers, targets, engine) or (
        None if source is None else _look(source, expected, strict)
    )
    _raise_alike(problem, engine, wait)
    engine.gathering.settle()
    job = _Load(source, targets, expected, engine, wait, strict)
    try:
        with torch.no_grad():
            if shared:
                _from_one(job, givers[0])
            else:
                _from_own(job, compare=compare)
    finally:
        engine.main_changed(frozen=True)
    if strict or not shared:
        return job.left_out
    texts = exchange_text(engine.control, json.dumps(job.left_out), wait)
    return IncompatibleKeys(*json.loads(texts[givers[0]]))


def _pairs_of_file(source: Source) -> Source:
    """An open file of safetensors has ``keys`` and ``get_tensor``, and is neither a mapping nor iterable."""
    read: Any = getattr(source, "get_tensor", None)
    if read is None or isinstance(source, Mapping):
        return source
    names: Any = source
    return ((name, read(name)) for name in names.keys())  # noqa: SIM118  no dict


def _problem_of_givers(givers: Sequence[int], targets: Sequence[Target], engine: Engine) -> str | None:
    size = engine.ranks.size
    if len(givers) not in (1, size):
        return f"ranks {list(givers)} of {size} give a state; give it on one rank, or on all"
    elsewhere = [one.names[0] for one in targets if one.record is not None and not _on_main(one, engine)]
    if len(givers) < size and elsewhere:
        return f"{elsewhere[0]} is on a mesh of its own, where ranks may hold other values; give a state on every rank"
    return None


def _on_main(target: Target, engine: Engine) -> bool:
    """A parameter of the main mesh."""
    return target.record is not None and target.record.flat_buffer.ranks is engine.ranks


def _look(
    source: Mapping[str, Any] | Iterable[Any], expected: Mapping[str, tuple[int, Target]], strict: bool
) -> str | None:
    """All that is wrong with a mapping, in one text: names, and of a dict shapes and dtypes too."""
    if not isinstance(source, Mapping):
        return None
    found = []
    if strict:
        found.append(_list("unexpected", [name for name in source if name not in expected]))
        targets = dict.fromkeys(target for _, target in expected.values())
        missing = [one.names[0] for one in targets if not any(name in source for name in one.names)]
        found.append(_list("missing", missing))
    if isinstance(source, dict):  # values that are here cost nothing to look at
        wrong = (_misfit(name, value, expected[name][1]) for name, value in source.items() if name in expected)
        found.append(_list("unfit", [one for one in wrong if one is not None]))
    texts = [one for one in found if one]
    return "; ".join(texts) if texts else None


def _list(what: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{what}: {', '.join(map(str, names[:_SHOWN]))}{more}" if names else ""


def _misfit(name: str, value: Any, target: Target) -> str | None:
    if target.extra is not None:
        return None
    if not isinstance(value, Tensor):
        return f"{name} is a {type(value).__name__}, no tensor"
    if tuple(value.shape) != target.shape:
        return f"{name} has shape {tuple(value.shape)} where {target.shape} is kept"
    if value.is_meta:
        return f"{name} is on the meta device and has no values"
    if _rounds(value.dtype, target.dtype):
        return f"{name} is {value.dtype} where {target.dtype} is kept, which would not hold it exactly (convert it)"
    return None


def _rounds(given: torch.dtype, kept: torch.dtype) -> bool:
    """Values of ``given`` are not all values of ``kept``."""
    if given == kept:
        return False
    if given.is_floating_point != kept.is_floating_point or given.is_complex != kept.is_complex or given == torch.bool:
        return True
    try:
        return torch.promote_types(given, kept) != kept
    except RuntimeError:  # float8 promotes to nothing
        return True


def _offers(job: _Load, *, gathers: bool) -> Iterator[tuple[int, Any]]:
    """Checked values, each with its target's number; of a mapping in the order of units.

    ``gathers``: DTensors are, which takes all ranks; False where one rank reads alone.

    Raises:
        FsdpError: at the first that does not fit, and at the end for those that did not come.
    """
    source, targets, expected, strict = job.source, job.targets, job.expected, job.strict
    assert source is not None, "who reads has a source"
    if isinstance(source, Mapping):
        pairs: Iterable[tuple[str, Any]] = (
            (name, source[name]) for target in targets for name in target.names if name in source
        )
        job.left_out.unexpected_keys.extend(name for name in source if name not in expected)
    else:
        pairs = source
    came: set[str] = set()
    digests: dict[int, int] = {}  # of tied tensors, which may come under each of their names
    for name, value in pairs:
        if name not in expected:
            if strict:
                raise FsdpError(f"unexpected: {name}")
            job.left_out.unexpected_keys.append(name)
            continue
        if name in came:
            raise FsdpError(f"{name} came twice")
        at, target = expected[name]
        misfit = _misfit(name, value, target)
        if misfit is not None:
            raise FsdpError(f"unfit: {misfit}")
        came.add(name)
        if target.extra is None and hasattr(value, "placements"):  # a DTensor
            if not gathers:
                raise FsdpError(f"{name} is a DTensor, of which one rank has a part; give the state on all ranks")
            value = whole_dtensor(name, value, job.engine)
        if target.extra is None and len(target.names) > 1:
            digest = _digest(value, target.dtype)
            if digests.setdefault(at, digest) != digest:
                raise FsdpError(f"{' and '.join(target.names)} are one tensor here, and came with different values")
            if sum(one in came for one in target.names) > 1:
                continue
        yield at, value
        del value  # the source may free it before it reads the next
    missing = [target.names[0] for target in targets if not any(name in came for name in target.names)]
    if missing and strict:
        raise FsdpError(_list("missing", missing))
    job.left_out.missing_keys.extend(missing)


def _from_one(job: _Load, giver: int) -> None:
    """One rank reads, all get each tensor and keep their part of it. [Note: told on all ranks]"""
    targets, engine, wait = job.targets, job.engine, job.wait
    offers = None if job.source is None else _offers(job, gathers=False)
    room: dict[torch.device, Tensor] = {}  # where others receive: one tensor's memory for all
    while True:
        row, value, error = [_END, 0, 0], _NOTHING, None
        if offers is not None:
            try:
                at, value = next(offers, (-1, _NOTHING))
                if value is not _NOTHING and targets[at].extra is not None:
                    row, text = [_OBJECT, at, 0], _packed(value)
                elif value is not _NOTHING:
                    row = [_VALUE, at, _DTYPES.index(value.dtype)]
            except Exception as raised:  # whatever the source does wrong is told to those who wait
                row, error = [_PROBLEM, 0, 0], raised
        kind, at, dtype = exchange(engine.control, row, wait)[giver]
        if kind == _PROBLEM:
            texts = exchange_text(engine.control, _said(error), wait)
            raise _failed(texts[giver], (giver,), len(job.loaded), len(targets)) from error
        if kind == _END:
            return
        target = targets[at]
        if kind == _OBJECT:
            packed = exchange_text(engine.control, text if offers is not None else "", wait)[giver]
            target.write(value if offers is not None else _unpacked(packed))
            job.loaded.add(at)
            continue
        if value is _NOTHING:
            value = _room_for(target, _DTYPES[dtype], targets, room)
        value = value.detach().to(target.device).resolve_conj().resolve_neg().contiguous()
        _broadcast(value, giver, engine.ranks, wait)
        target.write(value)
        job.loaded.add(at)


def _packed(value: Any) -> str:
    """Extra state is whatever a module gave: as torch saves it."""
    file = io.BytesIO()
    torch.save(value, file)
    return base64.b64encode(file.getvalue()).decode()


def _unpacked(text: str) -> Any:
    return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=False)  # of a rank of this job


def _room_for(
    target: Target, dtype: torch.dtype, targets: Sequence[Target], room: dict[torch.device, Tensor]
) -> Tensor:
    if target.device not in room:  # what comes is never wider than what is kept
        nbytes = max(math.prod(one.shape) * one.dtype.itemsize for one in targets if one.device == target.device)
        room[target.device] = torch.empty(nbytes, dtype=torch.uint8, device=target.device)
    numel = math.prod(target.shape)
    return room[target.device][: numel * dtype.itemsize].view(dtype).view(target.shape)


def _broadcast(value: Tensor, giver: int, ranks: Ranks, wait: Callable[[Any], None]) -> None:
    """``value`` of rank ``giver``, on every rank: along its own shard group, then over the replicas."""
    if not value.numel():
        return
    row, column = divmod(giver, ranks.shard.size)
    wait(ranks.shard.broadcast(value, column))
    wait(ranks.outer.broadcast(value, row))


def _from_own(job: _Load, *, compare: bool) -> None:
    """Every rank reads for itself; at the end all say whether it went well, and what they read."""
    assert job.source is not None, "every rank gives a source"
    targets, loaded, engine, wait = job.targets, job.loaded, job.engine, job.wait
    error: Exception | None = None
    # Of parameters of the main mesh: the same ones on all ranks. Others and module buffers may differ between ranks.
    several = compare and engine.ranks.size > 1
    digests = dict.fromkeys((at for at, one in enumerate(targets) if several and _on_main(one, engine)), 0)
    try:
        for at, value in _offers(job, gathers=True):
            target = targets[at]
            target.write(value)
            loaded.add(at)
            if at in digests:
                digests[at] = _digest(value, target.dtype)
            del value
    except Exception as raised:
        error = raised
    rows = exchange(engine.control, [int(error is not None), len(loaded), *digests.values()], wait)
    bad = tuple(rank for rank, row in enumerate(rows) if row[0])
    if bad:
        texts = exchange_text(engine.control, _said(error), wait)
        raise _failed(texts[bad[0]], bad, rows[bad[0]][1], len(targets)) from error
    for place, at in enumerate(digests, start=2):
        _, odd = odd_ranks([[row[place]] for row in rows])
        if odd:
            raise FsdpError(
                f"load_full_state_dict: values of {targets[at].names[0]} differ on rank {', '.join(map(str, odd))}; "
                "give the same state on all ranks, or on one. Each rank has loaded its own values: load again",
                op="load",
                ranks=odd,
            )


def _digest(value: Tensor, dtype: torch.dtype) -> int:
    """Of the values as ``dtype``; a piece at a time, because a digest takes many times the bytes of what it reads."""
    flat, total = value.detach().reshape(-1), 0
    for start in range(0, flat.numel(), 1 << 16):
        total = (total * 1_000_003 + tensor_digest(flat[start : start + (1 << 16)].to(dtype))) & ((1 << 63) - 1)
    return total


def _said(error: BaseException | None) -> str:
    if error is None:
        return ""
    return str(error) if isinstance(error, FsdpError) else f"its source raised {type(error).__name__}: {error}"


def _failed(text: str, ranks: tuple[int, ...], loaded: int, targets: int) -> FsdpError:
    if loaded:
        rest = f"{loaded} of {targets} tensors were loaded before, the others are as they were: load again"
    else:
        rest = "nothing was loaded"
    return FsdpError(f"load_full_state_dict: on rank {ranks[0]}: {text}. {rest}", op="load", ranks=ranks)


def _raise_alike(problem: str | None, engine: Engine, wait: Callable[[Any], None]) -> None:
    """If any rank has a problem, all raise the first. [Note: told on all ranks]"""
    rows = exchange(engine.control, [int(problem is not None)], wait)
    bad = tuple(rank for rank, row in enumerate(rows) if row[0])
    if bad:
        texts = exchange_text(engine.control, problem or "", wait)
        raise _failed(texts[bad[0]], bad, 0, 0)
