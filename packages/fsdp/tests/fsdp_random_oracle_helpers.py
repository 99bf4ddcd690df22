"""A random program on plain modules in one process, all ranks one after the other: what each rank must have seen.

    Program, what ranks saw --> Oracle (this file) --> what differs

Sums are written by hand from the specification: local fp32 sums, cast, ranks 0, 1, 2 ... from left to right inside
each group, groups after that, one true division, add. Imports nothing of sixfold.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from fsdp_random_helpers import PRECISIONS, Program
from fsdp_random_net_helpers import Boom, Net, batch, drive, make_net, make_optimizers
from torch import Tensor, nn

Seen = tuple[Any, ...]  # what a rank saw: its kind, then values
Sums = dict[str, Tensor]


class Oracle:
    """All ranks of ``program``; ``seen`` is what each rank saw, and is compared on the way."""

    def __init__(self, program: Program, seen: list[list[Seen]]) -> None:
        self.program = program
        self.low = PRECISIONS[program.precision].get("param_dtype")
        self.rest = PRECISIONS[program.precision].get("grad_dtype", torch.float32)
        self.ranks = range(program.ranks)
        self.mains = [_in_dtype(make_net(program, rank), torch.float32) for rank in self.ranks]
        self.computes = [_in_dtype(make_net(program, rank), self.low) for rank in self.ranks]
        self.optimizers = [make_optimizers(program.optimizer, net) for net in self.mains]
        self.names = [{id(p): name for name, p in net.named_parameters()} for net in self.computes]
        for rank, net in enumerate(self.computes):
            for parameter in net.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(partial(self._harvest, rank))
        self.pending: list[Sums] = [{} for _ in self.ranks]
        self.seen = [iter(one) for one in seen]
        self.problems: list[str] = []
        self.at = ""
        self.sharding = program.sharding

    @property
    def shards_grads(self) -> bool:
        return self.sharding.strategy in ("optim_grads", "optim_grads_params")

    # ---- the program

    def run(self) -> list[str]:
        """What differs, in order; nothing is what a test wants."""
        for number, step in enumerate(self.program.steps):
            for op in step:
                self.at = f"step {number} {op}"
                getattr(self, "do_" + op[0].replace(" ", "_"))(*op[1:])
                if self.problems:
                    return self.problems
        return self.problems

    def look(self, kind: str) -> list[Any]:
        """What the ranks saw next."""
        found = []
        for rank in self.ranks:
            one = next(self.seen[rank], ("nothing",))
            assert one[0] == kind, f"rank {rank} saw {one[0]}, the program says {kind} at {self.at}"
            found.append(one[1])
        return found

    def compare(self, what: str, right: Tensor, found: Tensor) -> None:
        if right.shape != found.shape or right.dtype != found.dtype or not _same(right, found):
            self.problems.append(f"{self.at}: {what}: {_show(right)} is right, found {_show(found)}")

    def do_order(self, order: tuple[int, ...]) -> None:
        for net in self.computes:
            net.stages[0].order = list(order)

    def do_frozen(self, name: str, on: bool) -> None:
        for nets in (self.mains, self.computes):
            for net in nets:
                if name in self._trained():
                    net.get_parameter(name).requires_grad_(on)

    def _trained(self) -> set[str]:
        """Names that were trained when the model was wrapped."""
        return {name for name, p in make_net(self.program, 0).named_parameters() if p.requires_grad}

    def do_materialize(self) -> None:
        """Changes nothing."""

    def do_finish(self) -> None:
        self._reduce()

    # ---- forward and backward

    def _refresh(self, rank: int) -> None:
        with torch.no_grad():
            pairs = zip(self.mains[rank].named_parameters(), self.computes[rank].parameters(), strict=True)
            for (name, high), low in pairs:
                low.copy_(_through_fp8(high, self._amax(name, rank)) if name in self.program.fp8 else high)

    def _amax(self, name: str, rank: int) -> Tensor:
        main = self.mains[rank].get_parameter(name).detach()
        return main.abs().max() if main.numel() else torch.zeros(())

    def _loss(self, rank: int, key: int) -> Tensor:
        tokens = batch(self.program, key, rank)
        return self.computes[rank](tokens)

    def _backward(self, rank: int, loss: Tensor, **options: Any) -> None:
        loss.backward(**options)

    def _harvest(self, rank: int, parameter: Tensor) -> None:
        """Autograd delivered a gradient: more than once in a backward through reentrant checkpoints."""
        if parameter.grad is not None:  # None: the layer put it aside
            self._add(rank, parameter, parameter.grad)
            parameter.grad = None

    def _add(self, rank: int, parameter: Tensor, gradient: Tensor) -> None:
        name, wide, sums = self.names[rank][id(parameter)], gradient.detach().float(), self.pending[rank]
        sums[name] = sums[name] + wide if name in sums else wide.clone()

    def do_micro(self, key: int, kind: str, hint: str | None) -> None:
        postponed = hint == "no_sync" or (hint == "not last" and not self.shards_grads)
        rounds = {
            "two": [(0,), (1,)],
            "two reversed": [(1,), (0,)],
            "joint": [(0, 1)],
            "retain": [(0,), (0,)],
            "drop": [],
        }
        many = 2 if kind in ("two", "two reversed", "joint") else 1
        right: list[list[Tensor]] = [[] for _ in self.ranks]
        losses: list[list[Tensor]] = []
        for rank in self.ranks:
            self._refresh(rank)
            losses.append([self._loss(rank, 1000 * i + key) for i in range(many)])
            right[rank] += [one.detach() for one in losses[rank]]
            if kind == "eval between":
                with torch.no_grad():
                    right[rank].append(self._loss(rank, 500 + key))
        for which in rounds.get(kind, [(0,)]):
            for rank in self.ranks:
                self._backward(rank, sum(losses[rank][i] for i in which), retain_graph=kind == "retain")
            if not postponed:
                self._reduce()
        for rank, found in enumerate(self.look("losses")):
            for at, (one, other) in enumerate(zip(right[rank], found, strict=True)):
                self.compare(f"loss {at} of rank {rank}", one, other)

    def do_boom(self, key: int, place: int, where: str, hint: str | None) -> None:
        """A step that is given up: zero_grad follows."""
        for rank in self.ranks:
            self._refresh(rank)
            stage = self.computes[rank].stages[0]
            stage.boom = (place, where)
            try:
                self._loss(rank, key).backward()
            except Boom:
                pass
            stage.boom = None

    def do_eval(self, key: int) -> None:
        found = self.look("eval")
        for rank in self.ranks:
            self._refresh(rank)
            with torch.no_grad():
                self.compare(f"loss of rank {rank}", self._loss(rank, key), found[rank])

    def do_driven(self, actions: tuple[tuple[str, int, int], ...]) -> None:
        """Each rank's stages by themselves: nothing travels between ranks."""
        stages, split = len(self.program.net.cuts), self.program.net.split
        finished = any(kind == "G" for kind, _, _ in actions)
        each = not split and stages == 1 and self.shards_grads and self.sharding.grad_reduce == "auto"
        gives = [drive(self.computes[rank], self.program, rank, actions, _Plain(self, rank)) for rank in self.ranks]
        for rank in self.ranks:
            self._refresh(rank)
        for moves in zip(*gives, strict=True):  # all ranks do an action before any does the next
            if each and moves[0] == "B":
                self._reduce()
        if finished:
            self._reduce()

    # ---- gradients

    def groups(self, name: str, rank: int) -> list[list[int]]:
        """Who shares a parameter with ``rank``: sums inside groups, then over them."""
        net, everyone = self.program.net, list(self.ranks)
        if net.experts and ".expert." in name:
            return [[one for one in everyone if net.experts[one] == net.experts[rank]]]
        replicas = max(self.program.replicas, 1)
        width = len(everyone) // replicas
        return [everyone[start : start + width] for start in range(0, len(everyone), width)]

    def _reduce(self) -> None:
        wire = PRECISIONS[self.program.precision].get("reduce_dtype") or torch.float32
        given, self.pending = self.pending, [{} for _ in self.ranks]
        for rank, net in enumerate(self.mains):
            for name, main in net.named_parameters():
                groups = self.groups(name, rank)
                if not any(name in given[one] for group in groups for one in group):
                    continue
                total: Tensor | None = None
                for group in groups:
                    wires = [given[one].get(name, torch.zeros_like(main)).to(wire) for one in group]
                    if self.program.grad_sum == "rank_order":
                        wires = [one.float() for one in wires]
                    inner = wires[0].clone()
                    for other in wires[1:]:
                        inner += other
                    total = inner.float() if total is None else total + inner.float()
                assert total is not None, f"nobody shares {name}"
                divisor = self.program.divisor or self.program.ranks
                total = total / torch.tensor(float(divisor))
                main.grad = (total if main.grad is None else main.grad + total).to(self.rest).float()

    def do_grads(self) -> None:
        """Pieces that ranks hold; a name without gradient here has none there."""
        self._reduce()
        for rank, pieces in enumerate(self.look("grads")):
            for name, start, flat in pieces:
                right = self.mains[rank].get_parameter(name).grad
                if flat is None:
                    if right is not None:
                        self.problems.append(f"{self.at}: {name} has no gradient on rank {rank}")
                elif right is None:
                    self.problems.append(f"{self.at}: {name} has {_show(flat)} on rank {rank} and should have none")
                else:
                    self.compare(
                        f"gradient of {name} on rank {rank}", right.reshape(-1)[start : start + len(flat)], flat
                    )

    def _square(self, prefix: str) -> Tensor:
        """Each element once: experts by their groups."""
        total = torch.zeros((), dtype=torch.float64)
        for rank, net in enumerate(self.mains):
            for name, main in net.named_parameters():
                first = min(one for group in self.groups(name, rank) for one in group)
                if name.startswith(prefix) and main.grad is not None and rank == first:
                    total = total + main.grad.double().square().sum()
        return total

    def do_square(self, prefix: str) -> None:
        self._reduce()
        right = self._square(prefix)
        for rank, found in enumerate(self.look("square")):
            if not torch.allclose(right, found, rtol=1e-12, atol=0):
                self.problems.append(f"{self.at}: squares are {float(right)}, rank {rank} has {float(found)}")

    def do_clip(self, largest: float) -> None:
        self._reduce()
        norm = self._square("").sqrt().float()
        for rank, found in enumerate(self.look("norm")):
            if abs(float(norm) - float(found)) > 1e-6 * float(norm):
                self.problems.append(f"{self.at}: the norm is {float(norm)}, rank {rank} has {float(found)}")
            norm = found  # float64 sums of other layouts may round apart, once in a million
        coefficient = torch.clamp(largest / (norm + 1e-6), max=1.0)
        self._for_gradients(lambda gradient: gradient.mul_(coefficient))

    def _for_gradients(self, change: Any) -> None:
        for net in self.mains:
            for main in net.parameters():
                if main.grad is not None:
                    change(main.grad)

    def do_scale(self, factor: float) -> None:
        self._reduce()
        self._for_gradients(lambda gradient: gradient.mul_(torch.tensor(factor)))

    def do_divide(self, count: float) -> None:
        self._reduce()
        self._for_gradients(lambda gradient: gradient.div_(torch.tensor(count)))

    def do_zero(self, to_none: bool) -> None:
        self.pending = [{} for _ in self.ranks]
        for optimizers in self.optimizers:
            for optimizer in optimizers:
                optimizer.zero_grad(to_none)

    # ---- steps and state

    def do_step(self) -> None:
        for optimizers in self.optimizers:
            for optimizer in optimizers:
                optimizer.step()

    def do_closure(self, key: int) -> None:
        """The first optimizer steps with a closure, then all others step."""
        for rank in self.ranks:
            self.optimizers[rank][0].zero_grad()
        first = {id(p) for group in self.optimizers[0][0].param_groups for p in group["params"]}
        known = {name for name, p in self.mains[0].named_parameters() if id(p) in first}
        for rank in self.ranks:
            self.pending[rank] = {name: g for name, g in self.pending[rank].items() if name not in known}
            self._refresh(rank)
        right = []
        for rank in self.ranks:
            loss = self._loss(rank, key)
            self._backward(rank, loss)
            right.append(loss.detach())
        self._reduce()
        for rank, found in enumerate(self.look("closure")):
            self.compare(f"loss of rank {rank}", right[rank], found)
        self.do_grads()
        self.do_step()

    def do_lr(self, number: int, rate: float) -> None:
        for optimizers in self.optimizers:
            groups = optimizers[0].param_groups
            groups[number % len(groups)]["lr"] = rate

    def do_roundtrip(self) -> None:
        """Changes nothing."""

    def do_report(self) -> None:
        for found in self.look("report"):
            self.problems += [f"{self.at}: {one}" for one in found]

    def do_reshard(self, seed: int, how: str) -> None:
        self.sharding = self.look("reshard")[0]  # rounds of reductions follow it

    def _entries(self, rank: int) -> dict[str, Tensor]:
        return dict(self.mains[rank].state_dict())

    def do_full(self) -> None:
        for rank, found in enumerate(self.look("full")):
            right = self._entries(rank)
            if list(right) != list(found):
                self.problems.append(f"{self.at}: names {list(right)} are right, found {list(found)}")
            for name in right.keys() & found.keys():
                self.compare(f"{name} on rank {rank}", right[name], found[name])

    def do_stream(self) -> None:
        for rank, found in enumerate(self.look("stream")):
            right = self._entries(rank)
            if set(right) != set(found):
                self.problems.append(f"{self.at}: names {sorted(right)} are right, found {sorted(found)}")
            for name in right.keys() & found.keys():
                self.compare(f"{name} on rank {rank}", right[name], found[name])

    def do_torch_state(self) -> None:
        for rank, found in enumerate(self.look("torch state")):
            right: dict[str, Tensor] = dict(self._entries(rank))
            for optimizer in self.optimizers[rank]:
                right.update(self._state_of(rank, optimizer))
            for name in right.keys() & found.keys():
                self.compare(f"{name} on rank {rank}", right[name], found[name])
            left = {name for name in right.keys() - found.keys() if right[name].numel()}
            if left and found:
                self.problems.append(f"{self.at}: {sorted(left)[:4]} are not there on rank {rank}")

    def _state_of(self, rank: int, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        names = {id(p): name for name, p in self.mains[rank].named_parameters()}
        return {
            f"{names[id(p)]}.{key}": value
            for p, state in optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }

    def do_state(self) -> None:
        """Records: every element lies in just one with replica 0, and has the right bits in all."""
        covered: dict[tuple[Any, str, str], Tensor] = {}
        for rank, records in enumerate(self.look("state")):
            right = {f"{name}.param": p.detach() for name, p in self.mains[rank].named_parameters()}
            for optimizer in self.optimizers[rank]:
                right.update(self._state_of(rank, optimizer))
            for name, key, shape, start, stop, flat, replica in records:
                whole = right.get(f"{name}.{key}")
                if whole is None:
                    if flat.abs().max():
                        self.problems.append(f"{self.at}: {name}.{key} should not be there")
                    continue
                if tuple(whole.shape) != tuple(shape):
                    self.problems.append(f"{self.at}: {name}.{key} is said to be {shape}")
                    continue
                self.compare(f"{key} of {name} on rank {rank}", whole.reshape(-1)[start:stop], flat)
                group = min(one for each in self.groups(name, rank) for one in each)
                count = covered.setdefault((group, name, key), torch.zeros(whole.numel(), dtype=torch.int64))
                count[start:stop] += replica == 0
        for (_, name, key), count in covered.items():
            if count.numel() and not bool((count == 1).all()):
                self.problems.append(f"{self.at}: elements of {name}.{key} lie in {count.tolist()} records to save")

    def do_load(self, how: str, giver: int) -> None:
        for rank in self.ranks:
            with torch.no_grad():
                for value in (*self.mains[rank].parameters(), *self.mains[rank].buffers()):
                    value.mul_(0.9)
                for value in self.computes[rank].buffers():
                    value.mul_(0.9)

    def do_write(self, name: str) -> None:
        for rank in self.ranks:
            with torch.no_grad():
                self.mains[rank].get_parameter(name).mul_(1.1)


def _in_dtype(net: Net, dtype: torch.dtype | None) -> Net:
    """Its parameters; buffers keep their dtype."""
    for parameter in net.parameters():
        parameter.data = parameter.data.to(dtype or parameter.dtype)
    return net


class _Plain:
    """The calls of stage handles on a plain module."""

    def __init__(self, oracle: Oracle, rank: int) -> None:
        self.oracle, self.rank = oracle, rank
        self.net = oracle.computes[rank]

    def call(self, stage: int, *args: Tensor) -> Tensor:
        return self.net.stages[stage](*args)

    def accumulate(self, stage: int, parameter: nn.Parameter, gradient: Tensor) -> None:
        self.oracle._add(self.rank, parameter, gradient)

    def hint(self, kind: str, stage: int) -> None:
        """Nothing to gather, to free or to reduce."""

    def last(self, stage: int) -> None:
        """Nothing overlaps."""

    def done(self, stage: int, microbatch: int) -> None:
        """Summed already."""


def _through_fp8(main: Tensor, amax: Tensor) -> Tensor:
    """What a layer reads of a quantised weight: ``q * scale`` with one scale for the whole tensor."""
    scale = amax / torch.full_like(amax, 448.0)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (main / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def _same(left: Tensor, right: Tensor) -> bool:
    """Bits, but for the sign of zero."""
    return torch.equal(left, right) or bool(((left == right) | (left.isnan() & right.isnan())).all())


def _show(value: Tensor) -> str:
    return f"{value.dtype} {tuple(value.shape)} {value.reshape(-1)[:4].tolist()}"
