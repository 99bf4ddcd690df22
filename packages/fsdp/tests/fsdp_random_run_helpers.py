"""A random program on the sharded model: what one rank sees of it.

    Program --> run, a generator that stops between operations (this file) --> list of what was seen
                                                                           --> fsdp_random_oracle_helpers.py

Several programs may be run at once in a process, one operation of each in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from fsdp_random_helpers import PRECISIONS, Program, Sharding, draw_sharding
from fsdp_random_net_helpers import Block, Boom, Stage, batch, drive, make_net, make_optimizers
from fsdp_random_oracle_helpers import Seen
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from sixfold.fsdp import (
    BufferConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    fully_shard,
    fully_shard_optimizer,
    torch_state,
)

UNITS = {"Block": Block, "Embedding": nn.Embedding, "Linear": nn.Linear, "Stage": Stage}


class Meshes:
    """Meshes of a job, made once: the world, replicas by shards, and those of experts."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self._grids: dict[int, DeviceMesh] = {}
        self._experts: dict[tuple[int, ...], DeviceMesh] = {}

    def grid(self, replicas: int) -> DeviceMesh:
        if replicas not in self._grids:
            ranks = torch.arange(self.ranks).view(replicas, -1)
            self._grids[replicas] = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))
        return self._grids[replicas]

    def experts(self, experts: tuple[int, ...]) -> DeviceMesh:
        if experts not in self._experts:
            made = {
                e: DeviceMesh("cpu", [r for r, one in enumerate(experts) if one == e]) for e in sorted(set(experts))
            }
            self._experts[experts] = made[experts[self.rank]]
        return self._experts[experts]


class Running:
    """The sharded side of one program on one rank."""

    def __init__(self, program: Program, rank: int, meshes: Meshes | None) -> None:
        self.program, self.rank, self.meshes = program, rank, meshes
        self.seen: list[Seen] = []
        self.trained = {name for name, p in make_net(program, rank).named_parameters() if p.requires_grad}
        self.start(program.sharding, 0)

    def start(self, sharding: Sharding, seed: int) -> None:
        program = self.program
        self.sharding = sharding
        self.net = make_net(program, self.rank, seed)
        if sharding.initial == "broadcast" and self.rank:
            with torch.no_grad():
                for name, parameter in self.net.named_parameters():
                    if ".expert." not in name:
                        parameter.add_(1.0)
        optimizers = make_optimizers(program.optimizer, self.net) if sharding.grains % 2 else None
        self.model = self.wrap(self.net, sharding)
        self.optimizers = optimizers or make_optimizers(program.optimizer, self.net)
        for one in self.optimizers:
            fully_shard_optimizer(one, self.model)
        fused = not program.net.split
        cuts = program.net.cuts
        driven = any(op[0] == "driven" for step in program.steps for op in step)
        self.handles = [self.model.stage_handle(one, fused=fused) for one in self.net.stages] if driven else []
        assert len(cuts) == len(self.net.stages)

    def wrap(self, net: nn.Module, sharding: Sharding, *, probe: bool = False) -> FullyShardedDataParallel:
        program = self.program
        found = [UNITS[one] for one in sharding.units if any(isinstance(m, UNITS[one]) for m in net.modules())]
        gathered: str | int = sharding.gathered
        if isinstance(gathered, int):
            gathered = "double" if probe else self.budget(sharding)
        options: dict[str, Any] = {}
        if self.meshes is None:
            options["process_group"] = None
        elif program.replicas:
            options["mesh"] = self.meshes.grid(program.replicas)
        else:
            options["process_group"] = dist.group.WORLD
        if program.net.experts:
            assert self.meshes is not None
            mesh = self.meshes.experts(program.net.experts)
            options["mesh_for"] = lambda name: mesh if ".expert." in name else None
        grains = {name: Random(f"{sharding.grains} {name}") for name, _ in net.named_parameters()}
        make: Any = fully_shard if sharding.bare else FullyShardedDataParallel
        return make(
            net,
            **options,
            strategy=sharding.strategy,
            fsdp_unit_modules=found,
            root_units=sharding.root_units,
            mixed_precision=MixedPrecision(
                **PRECISIONS[program.precision],
                grad_sum=program.grad_sum,
                fp8=(lambda name: name in program.fp8) if program.fp8 else None,
            ),
            buffers=BufferConfig(
                gathered_bytes=gathered,
                prefetch_bytes=sharding.prefetch,
                reduce_buffers=sharding.reduce_buffers,
                bucket_bytes=sharding.bucket,
                merge_bytes=None if program.net.experts else sharding.merge,
                share_communicator=sharding.share,
                offload=sharding.offload,
                align_bytes=sharding.align,
            ),
            granularity=lambda name, p: (
                grains[name].choice(["element", "row", "tensor", 4]) if sharding.grains else "element"
            ),
            grad_divisor=program.divisor,
            grad_reduce=sharding.grad_reduce,
            initial=sharding.initial,
            checks=sharding.checks,
            timeout_s=30.0,
        )

    def budget(self, sharding: Sharding) -> int:
        net = make_net(self.program, self.rank)
        probe = self.wrap(net, sharding, probe=True)
        root, *sizes = (unit["gathered_bytes"] for unit in probe.report()["units"].values())
        least = root + 4 * max(sizes, default=0)  # a unit, two around it, the next
        assert isinstance(sharding.gathered, int)
        mine = max(int(least + sharding.gathered / 100 * max(0, root + sum(sizes) - least)), 1)
        budgets = [mine] * self.program.ranks
        if self.program.net.experts:  # of other sizes and places: the same number on all ranks
            dist.all_gather_object(budgets, mine)
        return max(budgets)

    # ---- the program

    def run(self) -> Iterator[None]:
        for number, step in enumerate(self.program.steps):
            for op in step:
                try:
                    getattr(self, "do_" + op[0].replace(" ", "_"))(*op[1:])
                except Exception as error:
                    raise AssertionError(f"rank {self.rank} step {number} {op} of\n{self.program}") from error
                yield

    def loss(self, key: int) -> Tensor:
        call = self.net if self.sharding.bare else self.model
        return call(batch(self.program, key, self.rank))

    def do_order(self, order: tuple[int, ...]) -> None:
        self.net.stages[0].order = list(order)

    def do_frozen(self, name: str, on: bool) -> None:
        if name in self.trained:
            dict(self.net.named_parameters())[name].requires_grad_(on)

    def do_materialize(self) -> None:
        for one in self.optimizers:
            self.model.materialize_state(one)

    def do_finish(self) -> None:
        self.model.finish_grad_sync()

    def _hint(self, hint: str | None) -> Any:
        if hint is None:
            return nullcontext()
        return self.model.no_sync() if hint == "no_sync" else self.model.microbatch(last=hint == "last")

    def do_micro(self, key: int, kind: str, hint: str | None) -> None:
        seen: list[Tensor] = []
        with self._hint(hint):
            losses = [self.loss(1000 * i + key) for i in range(2 if kind in ("two", "two reversed", "joint") else 1)]
            seen += [one.detach().clone() for one in losses]
            if kind == "eval between":
                with torch.no_grad():
                    seen.append(self.loss(500 + key).clone())
            if kind == "joint":
                (losses[0] + losses[1]).backward()
            elif kind == "retain":
                losses[0].backward(retain_graph=True)
                losses[0].backward()
            elif kind != "drop":
                for one in reversed(losses) if kind == "two reversed" else losses:
                    one.backward()
        self.seen.append(("losses", seen))

    def do_boom(self, key: int, place: int, where: str, hint: str | None) -> None:
        stage = self.net.stages[0]
        stage.boom = (place, where)
        with self._hint(hint):
            try:
                self.loss(key).backward()
            except Boom:
                pass
        stage.boom = None

    def do_eval(self, key: int) -> None:
        with torch.no_grad():
            self.seen.append(("eval", self.loss(key).clone()))

    def do_driven(self, actions: tuple[tuple[str, int, int], ...]) -> None:
        for kind in drive(self.net, self.program, self.rank, actions, _Handles(self.handles)):
            del kind
        if any(kind == "G" for kind, _, _ in actions):
            self.model.finish_grad_sync()

    def do_grads(self) -> None:
        self.model.finish_grad_sync()
        starts = {(r.name): r.start for r in self.model.state_records() if r.key == "param"}
        pieces = [
            (name, starts[name], None if p.grad is None else p.grad.detach().float().reshape(-1).clone())
            for name, p in self.model.main_parameters()
            if name in starts and name in self.trained
        ]
        self.seen.append(("grads", pieces))

    def do_square(self, prefix: str) -> None:
        self.seen.append(("square", self.model.grad_square_sum(lambda name: name.startswith(prefix)).clone()))

    def do_clip(self, largest: float) -> None:
        self.seen.append(("norm", self.model.clip_grad_norm_(largest).clone()))

    def do_scale(self, factor: float) -> None:
        self.model.scale_gradients(factor)

    def do_divide(self, count: float) -> None:
        self.model.divide_gradients(count)

    def do_zero(self, to_none: bool) -> None:
        for one in self.optimizers:
            one.zero_grad(to_none)

    def do_step(self) -> None:
        for one in self.optimizers:
            one.step()

    def do_closure(self, key: int) -> None:
        first = self.optimizers[0]

        def closure() -> Tensor:
            first.zero_grad()
            loss = self.loss(key)
            loss.backward()
            self.seen.append(("closure", loss.detach().clone()))
            self.do_grads()
            return loss

        first.step(closure)
        for one in self.optimizers[1:]:
            one.step()

    def do_lr(self, number: int, rate: float) -> None:
        groups = self.optimizers[0].param_groups
        groups[number % len(groups)]["lr"] = rate

    def do_roundtrip(self) -> None:
        for one in self.optimizers:
            one.load_state_dict(one.state_dict())

    # ---- state

    def do_full(self) -> None:
        self.seen.append(("full", {name: value.clone() for name, value in self.model.full_state_dict().items()}))

    def do_stream(self) -> None:
        found: dict[str, Tensor] = {}
        self.model.stream_full_state(lambda name, value: found.__setitem__(name, value.clone()))
        self.seen.append(("stream", found))

    def do_state(self) -> None:
        records = []
        for at, one in enumerate(self.optimizers):
            records += [
                (r.name, r.key, r.global_shape, r.start, r.stop, r.tensor.clone(), r.replica)
                for r in self.model.state_records(one)
                if at == 0 or r.key != "param"
            ]
        self.seen.append(("state", records))

    def do_torch_state(self) -> None:
        if self.program.net.experts or any(p.numel() == 0 for p in self.net.parameters()):
            self.seen.append(("torch state", {}))  # refused; and a DTensor of no elements has no owner
            return
        found = dict(torch_state.get_model_state_dict(self.model))
        for one in self.optimizers:
            state = torch_state.get_optimizer_state_dict(self.model, one)["state"]
            found.update({f"{name}.{key}": value for name, keys in state.items() for key, value in keys.items()})
        whole = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in found.items()}
        self.seen.append(("torch state", {n: v.clone() for n, v in whole.items() if isinstance(v, Tensor)}))

    def do_load(self, how: str, giver: int) -> None:
        given: Any = {name: value * 0.9 for name, value in self.model.full_state_dict().items()}
        if self.program.net.experts:
            how = how.replace(" one", "").replace("one", "dict")
        if how.startswith("pairs"):
            names = list(given)
            Random(giver).shuffle(names)
            given = iter([(name, given[name]) for name in names])
        if how.endswith("one") and self.rank != giver:
            given = None
        self.model.load_full_state_dict(given)

    def do_write(self, name: str) -> None:
        with torch.no_grad():
            for record in self.model.state_records():
                if record.name == name:
                    record.tensor.mul_(1.1)
        self.model.refresh()

    def do_report(self) -> None:
        problems: list[str] = []
        self.model.report()
        self.seen.append(("report", problems))

    def do_reshard(self, seed: int, how: str) -> None:
        """Another model with other options goes on with weights and optimizer state of this one."""
        driven = "driven" if self.handles else None
        sharding = draw_sharding(Random(seed), driven, self.program.optimizer)
        self.seen.append(("reshard", sharding))
        if self.program.net.experts or any(p.numel() == 0 for p in self.net.parameters()):
            how = "records"
        frozen = {name: p.requires_grad for name, p in self.net.named_parameters()}
        order = list(self.net.stages[0].order)
        weights = self.model.full_state_dict() if how == "records" else torch_state.get_model_state_dict(self.model)
        old, optimizers, groups = self.model, self.optimizers, [one.param_groups for one in self.optimizers]
        states = [
            whole_state(self, old, one) if how == "records" else torch_state.get_optimizer_state_dict(old, one)
            for one in optimizers
        ]
        self.start(sharding, seed)
        if how == "records":
            self.model.load_full_state_dict(weights)
        else:
            torch_state.set_model_state_dict(self.model, weights)
        for one, state, before in zip(self.optimizers, states, groups, strict=True):
            if how == "records":
                load_whole_state(self, one, state)
                for group, source in zip(one.param_groups, before, strict=True):
                    group.update({key: value for key, value in source.items() if key != "params"})
            else:
                torch_state.set_optimizer_state_dict(self.model, one, with_all(self, one, state))
        self.net.stages[0].order = order
        for name, parameter in self.net.named_parameters():
            if parameter.requires_grad != frozen[name]:
                parameter.requires_grad_(frozen[name])


# ---- optimizer state, moved by records


def with_all(running: Running, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """What was not stepped yet has no state there: it keeps what the first step would make."""
    running.model.materialize_state(optimizer)
    fresh = torch_state.get_optimizer_state_dict(running.model, optimizer)
    return {**state, "state": {**fresh["state"], **state["state"]}}


def whole_state(running: Running, model: Any, optimizer: torch.optim.Optimizer) -> dict[tuple[str, str], Tensor]:
    """State of all ranks that share each parameter, put together from records; scalars as they are."""
    mine = [
        (r.name, r.key, r.global_shape, r.start, r.stop, r.tensor.clone())
        for r in model.state_records(optimizer)
        if r.key != "param"
    ]
    scalars = {
        (name, key): value.clone()
        for name, main in model.main_parameters()
        for key, value in optimizer.state.get(main, {}).items()
        if isinstance(value, Tensor) and value.dim() == 0 and key == "step"
    }
    given: list[Any] = [None] * running.program.ranks
    if running.meshes is None:
        given = [(mine, scalars)]
    else:
        dist.all_gather_object(given, (mine, scalars))
    experts = running.program.net.experts
    found: dict[tuple[str, str], Tensor] = {}
    for rank, (records, numbers) in enumerate(given):
        for name, key, shape, start, stop, flat in records:
            if not experts or ".expert." not in name or experts[rank] == experts[running.rank]:
                whole = found.setdefault((name, key), torch.zeros(shape, dtype=flat.dtype))
                whole.view(-1)[start:stop] = flat
        for place, value in numbers.items():
            if not experts or ".expert." not in place[0] or experts[rank] == experts[running.rank]:
                found[place] = value
    return found


def load_whole_state(running: Running, optimizer: torch.optim.Optimizer, state: dict[tuple[str, str], Tensor]) -> None:
    running.model.materialize_state(optimizer)
    for record in running.model.state_records(optimizer):
        if (record.name, record.key) in state:
            record.tensor.copy_(state[record.name, record.key].view(-1)[record.start : record.stop])
    for name, main in running.model.main_parameters():
        for key in optimizer.state.get(main, {}):
            if key == "step" and (name, key) in state:
                optimizer.state[main][key].copy_(state[name, key])


class _Handles:
    """Stage handles by number."""

    def __init__(self, handles: list[Any]) -> None:
        self.handles = handles

    def call(self, stage: int, *args: Tensor) -> Tensor:
        return self.handles[stage].call(*args)

    def accumulate(self, stage: int, parameter: nn.Parameter, gradient: Tensor) -> None:
        self.handles[stage].accumulate(parameter, gradient)

    def hint(self, kind: str, stage: int) -> None:
        {"U": self.handles[stage].unshard, "R": self.handles[stage].reshard, "G": self.handles[stage].reduce_grad}[
            kind
        ]()

    def last(self, stage: int) -> None:
        self.handles[stage].before_last_backward()

    def done(self, stage: int, microbatch: int) -> None:
        self.handles[stage].after_backward(microbatch)


def run_programs(rank: int, ranks: int, programs: list[Program]) -> list[list[Seen]]:
    """What this rank sees of programs; two at a time are in the process, one operation of each in turn."""
    torch.set_num_threads(1)
    meshes = Meshes(rank, ranks) if ranks > 1 else None
    seen: list[list[Seen]] = []
    for first in range(0, len(programs), 2):
        both = [Running(one, rank, meshes) for one in programs[first : first + 2]]
        going = [one.run() for one in both]
        while going:
            going = [one for one in going if next(one, "end") != "end"]
        seen += [one.seen for one in both]
    return seen
