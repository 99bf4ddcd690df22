"""FullyShardedDataParallel: the parts put together, and the members that users and pipelines call.

setup/options.py --> setup/build.py --> engine/engine.py --> FullyShardedDataParallel (this file) --> the user
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Never

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh

from sixfold.fsdp.buffers.flat_buffer import Granularity
from sixfold.fsdp.config import BufferConfig, MixedPrecision, ShardingStrategy
from sixfold.fsdp.engine.reduce import StageState
from sixfold.fsdp.errors import FsdpError, MissingError
from sixfold.fsdp.hooks import forward_backward, global_hooks, state_dict_hooks
from sixfold.fsdp.optimizers import gradient_norms, initial_state, sharded_optimizer
from sixfold.fsdp.placement.residency import Action
from sixfold.fsdp.report import memory_timeline as memory
from sixfold.fsdp.report import model_report
from sixfold.fsdp.setup import build, start_values
from sixfold.fsdp.setup.meta_device import InitFn
from sixfold.fsdp.setup.options import Options
from sixfold.fsdp.setup.torch_options import check_kinds, refuse_unknown
from sixfold.fsdp.setup.unit_selection import Selector
from sixfold.fsdp.state import full_state, records
from sixfold.fsdp.state import load_full_state as streamed
from sixfold.fsdp.state.records import StateRecord
from sixfold.fsdp.wrapper.missing_members import MEMBERS, module_member
from sixfold.fsdp.wrapper.pipeline_stage import StageHandle


class FullyShardedDataParallel(nn.Module):
    """Data parallelism with main weights, gradients and parameters split by ``strategy``.

    The wrapped module's ``Parameter`` objects keep identity and shape. Their values are there while their unit's call
    runs. At other times a read, a write or a copy raises FsdpError, unless the values are there anyway. A function of
    ``torch.jit.script`` is not checked: give it no weight from outside its unit. Read weights by ``full_state_dict`` or
    ``state_records``. Gradients lie on ``main_parameters()``. They are final when backward returns; under
    ``microbatch(last=False)`` and ``no_sync`` they are final after ``finish_grad_sync``. Clip with ``clip_grad_norm_``
    of this object. ``requires_grad`` may change to False and back after wrapping, on all ranks alike, which nobody
    checks. A parameter that was frozen when it was wrapped stays frozen. Keep this object: without it the module cannot
    run. ``fully_shard`` keeps it as long as the module lives.

    Args:
        module: any module; parameters may be on the meta device.
        mesh, process_group: give at most one. Neither means all ranks, or one process where torch.distributed is not
            initialised. ``process_group=None`` always means one process. A 2-D mesh is (replicate, shard).
        strategy: ``no_shard``, ``optim``, ``optim_grads`` or ``optim_grads_params``.
        fsdp_unit_modules: classes, class names or modules to gather and free together.
        root_units: True makes a unit of a large module outside them, such as an embedding or a head. It is large if
            its own bytes are more than those of the smallest named unit. ``report()`` lists such units. Their weights
            are there in their own call only. False: the root unit keeps them gathered.
        granularity: ``(name, parameter) -> "element" | "row" | "tensor" | int``: where a shard may cut it.
        mesh_for: ``name -> DeviceMesh | None``: a 1-D mesh inside the main one for a parameter that fewer ranks share,
            such as an expert. None means the main mesh.
        grad_divisor: what sums of gradients are divided by. None: the ranks of the main mesh. 1.0 keeps sums.
        grad_reduce: ``"auto"``, ``"last"`` or ``"microbatch"``: when a pipeline's program (``stage_handle``) reduces.
        init_fn: ``(module name, module)`` fills a module that was on the meta device.
        initial: whether weights and module buffers start equal on all ranks: ``"check"`` compares them, ``"broadcast"``
            sends the first rank's, ``"trust"`` does neither.
        checks: ``"off"``, ``"order"`` (one digest per step) or ``"unit"``. ``"unit"`` exchanges before each collective;
            it is a debug mode that reads device values. All three exchange which parameters got a gradient.
        fault_store: where the ranks that are left find out which rank is lost. None: the store of the given group.
        timeout_s: longest wait for one collective.
        busy_timeout_s: longest wait for a rank that gives signs of life (it saves, evaluates, reads data). It needs a
            store; every real group has one. A line on stdout names the rank after 10 s. The longer of this and
            ``timeout_s`` holds.
        first_step_timeout_s: longest wait in the first step, where ranks compile. The longer one holds there too.
    Raises:
        FsdpError: an argument breaks its rule, or is of torch's wrappers; on all ranks, if models or start values
            differ between ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        *positional: Never,
        mesh: DeviceMesh | None = None,
        process_group: dist.ProcessGroup | str | None = "world",
        strategy: ShardingStrategy | str = "optim_grads_params",
        fsdp_unit_modules: Sequence[Selector] = (),
        root_units: bool = True,
        mixed_precision: MixedPrecision = MixedPrecision(),  # noqa: B008  frozen
        buffers: BufferConfig = BufferConfig(),  # noqa: B008  frozen
        granularity: Granularity | None = None,
        mesh_for: Callable[[str], DeviceMesh | None] | None = None,
        grad_divisor: float | None = None,
        grad_reduce: str = "auto",
        init_fn: InitFn | None = None,
        initial: str = "check",
        checks: str = "order",
        fault_store: Store | None = None,
        timeout_s: float = 60.0,
        busy_timeout_s: float = 600.0,
        first_step_timeout_s: float = 600.0,
        **others: Never,
    ) -> None:
        given = {**locals()}
        refuse_unknown(positional, others, Options.names())
        check_kinds(module, given)
        options = Options.of(given)
        super().__init__()
        made = build.build(module, options)
        self.module = module
        self._options = options
        self._engine = engine = made.engine
        self._fp8 = made.fp8
        self._communicators = made.communicators
        self._optimizers = sharded_optimizer.Attached(offload=buffers.offload)
        self._cast_to = mixed_precision.param_dtype if mixed_precision.cast_inputs else None
        own = forward_backward.install(engine, module, self._cast_to) + state_dict_hooks.install(engine, module)
        self._everywhere = global_hooks.install(engine, module, self._optimizers.sharded)
        self._end = weakref.finalize(self, build.close, engine, [*own, *self._everywhere])
        self._tidy = build.tidy_with(self, engine)

    # ---- running

    @property
    def units(self) -> tuple[str, ...]:
        """Unit names; the root unit is ``""``."""
        return tuple(unit.name for unit in self._engine.units)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward with the root unit gathered and floating inputs cast."""
        return self._run(self.module, args, kwargs, None)

    def _run(
        self, child: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], stage: StageState | None
    ) -> Any:
        return forward_backward.run_root(self._engine, child, args, kwargs, self._cast_to, stage)

    def entry(self, child: nn.Module, *, method: str | None = None) -> Callable[..., Any]:
        """A callable that runs ``child`` (the wrapped module or one inside it) as if it were the root.

        Args:
            method: a method to run in place of the call: ``entry(net, method="generate")``. The root unit's weights
                are gathered for it, and those of other units when it calls their modules. If it runs without
                gradients, call it under ``with torch.no_grad():``. Otherwise its uses count as a training step's.
        Raises:
            FsdpError: ``child`` is not inside the wrapped module, or has no such method.
        """
        self._path(child)
        run: Any = child if method is None else getattr(child, method, None)
        if not callable(run):
            raise FsdpError(f"entry: {type(child).__name__} has no method {method!r}")
        return lambda *args, **kwargs: self._run(run, args, kwargs, None)

    def stage_handle(self, child: nn.Module, *, fused: bool) -> StageHandle:
        """The ``data_parallel`` object of a pipeline stage that runs ``child``.

        Args:
            fused: True if every backward of the stage in the program is whole (B). False if some are split (I, W):
                ``accumulate`` takes what W makes, and gradients are reduced once per step, after the last backward.
        Raises:
            FsdpError: split backwards with ``grad_reduce="microbatch"``; a merged unit lies on two stages; a parameter
                of several stages with ``grad_sum="tree"``.
        """
        inside = set(child.modules())
        units = [unit for unit in self._engine.units if unit.index and not inside.isdisjoint(unit.modules)]
        for unit in units:
            if not inside.issuperset(unit.modules):
                raise FsdpError(
                    f"stage {self._path(child)!r} holds a part of the merged unit {unit.name!r}; use "
                    "BufferConfig(merge_bytes=None)",
                    unit=unit.name,
                )
        stage = StageState(self._path(child), units, fused)
        self._engine.reduce_policy.add_stage(stage)
        if self._engine.reduce_policy.tree:
            self._find_root_stage(stage, child)
        return StageHandle(self._engine, stage, lambda args, kwargs, which: self._run(child, args, kwargs, which))

    def _find_root_stage(self, stage: StageState, child: nn.Module) -> None:
        """The root unit's gradients of a microbatch are whole when ``stage`` has run its backward, or it is refused."""
        root = self._engine.units[0]
        here = {id(parameter) for parameter in child.parameters()}
        names = [record.name for flat_buffer in root.trained for record in flat_buffer.records]
        inside = [id(record.parameter) in here for flat_buffer in root.trained for record in flat_buffer.records]
        stages = [one for one in self._engine.reduce_policy.stages if one.root is root and one is not stage]
        if names and all(inside):
            stage.root = root
        if any(inside) and (stages or not all(inside)):
            raise FsdpError(
                f"{names[inside.index(True)]} is of no single stage, and grad_sum='tree' reduces a stage's "
                "gradients after each micro-batch; give each stage its own copy, or use grad_sum='rank_order'",
                unit=root.name,
                op="reduce",
            )

    def _path(self, child: nn.Module) -> str:
        for name, found in self.module.named_modules():
            if found is child:
                return str(name)
        raise FsdpError(f"{type(child).__name__} is not inside the wrapped {type(self.module).__name__}")

    def use_plan(self, actions: Sequence[Action]) -> None:
        """Follow the gathers and frees of ``residency.plan``, from the next step on.

        It needs an integer ``gathered_bytes``, and the same plan on all ranks. The root unit always stays; its actions
        have no effect. If a step uses other units than the plan, each unit is gathered at its use until the step ends.
        The next step follows the plan again. Units of several sizes may need the same addresses; one is then gathered
        once more. ``report()["plan"]`` counts both.

        Raises:
            FsdpError: ``gathered_bytes`` is ``"double"`` or ``"all"``; an action is illegal where it stands, names no
                unit, or passes the budget.
        """
        self._engine.faults.check()
        self._engine.gathering.use_plan(actions)

    @contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        """A hint around forward and backward: ``last=False`` postpones the reduction of ``no_shard`` and ``optim``.

        ``optim_grads`` and ``optim_grads_params`` reduce each microbatch. So they add in another order than those two,
        and last bits differ. Under ``no_sync`` all four add in one order.
        """
        engine = self._engine
        before, engine.reduce_policy.last_microbatch = engine.reduce_policy.last_microbatch, last
        try:
            yield
        finally:
            engine.reduce_policy.last_microbatch = before

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside reduce nothing: gradients accumulate in full size on each rank."""
        self._engine.reduce_policy.no_sync_depth += 1
        try:
            yield
        finally:
            self._engine.reduce_policy.no_sync_depth -= 1

    # ---- gradients

    def check(self) -> None:
        """Raise if a fault ended this model, such as a missed deadline. On CUDA no wait raises by itself.

        ``finish_grad_sync``, ``optimizer.step()`` and all that reads main weights call it. Call it yourself after the
        host has read a device value of the step (norm, loss) and before you use that value. Then nothing that came too
        late is used.
        """
        self._engine.check()

    @property
    def waited_s(self) -> float:
        """Seconds for which this host has waited for other ranks so far. Waits of a device are not in it."""
        return self._engine.faults.waited_s

    def finish_grad_sync(self) -> None:
        """Reduce what is local and wait; ``main.grad`` is final after it."""
        self._engine.finish_grad_sync()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients to a total norm of at most ``max_norm``; return the norm before, fp32, same on all ranks.

        Squares are added in float64, in another order than torch's function. So last bits of scaled gradients differ.
        With ``grad_sum="tree"`` the norm has the same bits for any strategy and number of ranks.

        Raises:
            FsdpError: ``norm_type`` is not 2.
        """
        if norm_type != 2:
            raise FsdpError(
                f"clip_grad_norm_: norm_type is {norm_type}; it is 2. Compute another norm over main_parameters() and "
                "all ranks, and call scale_gradients(factor)"
            )
        total = self.grad_square_sum().sqrt().to(torch.float32)
        coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        self.scale_gradients(coefficient)
        return total

    def grad_square_sum(
        self,
        include: Callable[[str], bool] = lambda name: True,
        beyond: Callable[[Tensor, dist.ReduceOp.RedOpType], None] | None = None,
    ) -> Tensor:
        """Float64 scalar: squares of main gradients of the included names, each element once, over the main mesh.

        With ``grad_sum="tree"`` its bits do not depend on shards, ranks or order. It is within 2**-40 of the sum for
        up to 2**36 elements. An infinite gradient makes it infinite, a NaN makes it NaN.

        Args:
            beyond: if other ranks hold other parts of the model (stages of a pipeline, tensor parallelism).
                ``beyond(tensor, op)`` makes a tensor its sum or maximum over those ranks, in place. The result then
                counts their gradients too.
        """
        self.finish_grad_sync()
        exact = self._options.mixed_precision.grad_sum == "tree"
        return gradient_norms.square_sum(self._engine, include, beyond, exact=exact)

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply all main gradients."""
        self.finish_grad_sync()
        gradient_norms.scale(self._engine, factor)

    def divide_gradients(self, count: float | Tensor) -> None:
        """Divide all main gradients: one true division each."""
        self.finish_grad_sync()
        gradient_norms.divide(self._engine, count)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Main gradients to None (or zero); local sums that were not reduced are dropped."""
        self._engine.discard_local()
        for _, main in self.main_parameters():
            if set_to_none:
                main.grad = None
            elif main.grad is not None:
                main.grad.zero_()

    def broadcast_buffers(self) -> None:
        """Collective: module buffers become those of the main mesh's first rank, in place.

        Without it BatchNorm's statistics are those of each rank's own batches. DDP does this before each forward. Here
        call it once before an evaluation or a checkpoint.
        """
        self._engine.faults.check()
        wait = self._engine.faults.for_control(None, "load")
        start_values.broadcast_module_buffers(self.module, self._engine.ranks, wait)

    # ---- main weights and state

    def main_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """``(full name, main parameter)`` of all that this rank holds; frozen ones have ``requires_grad`` False."""
        for record in self._engine.records.values():
            if record.main is not None:
                yield record.name, record.main

    def refresh(self) -> None:
        """Gather main weights anew in the next call, because they were written from outside.

        It is needed where only some ranks wrote. Where every rank wrote, the next call sees it by itself. Three kinds
        of writes are not seen: through numpy, through a ``.data`` that was taken before the last call, and through the
        ``.data`` of a view (``main.view(-1).data``).
        """
        self._engine.faults.check()
        self._engine.end_raised_step()
        self._engine.main_parameters.adopt()
        self._engine.main_changed(frozen=True)

    def materialize_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer's state tensors as its first step would (zero), without a step."""
        initial_state.materialize(optimizer, self._engine.records, self._optimizers)

    def state_records(self, optimizer: torch.optim.Optimizer | None = None) -> list[StateRecord]:
        """Live aliases of everything to save that lies here. No communication."""
        self._engine.faults.check()
        self._engine.main_parameters.adopt()
        return records.state_records(self._engine.units, optimizer)

    def full_state_dict(
        self, *, rank: int | None = None, device: torch.device | str | None = None
    ) -> dict[str, Tensor]:
        """Collective: main weights in full shapes, and module buffers, under the module's own names.

        On every rank, or on ``rank`` alone (an empty dict on the others); on ``device``, or where the weights are.
        """
        where = None if device is None else torch.device(device)
        return full_state.full_state_dict(self.module, self._engine, rank, where)

    def stream_full_state(self, consume: Callable[[str, Tensor], None] | None) -> None:
        """Collective: ``consume(name, tensor)`` for all that ``full_state_dict`` holds, one unit in memory at a time.

        The tensor is a view that is gone when ``consume`` returns. A rank that wants nothing gives None. If a consumer
        raises, this raises on all ranks.
        """
        full_state.stream_full_state(self.module, self._engine, consume)

    def load_full_state_dict(self, source: streamed.Source, *, strict: bool = True) -> streamed.IncompatibleKeys:
        """Collective: main weights and module buffers become those of ``source``, under names of ``full_state_dict``.

        Args:
            source: a dict (or another mapping, read one name at a time), an open safetensors file, or an iterable of
                ``(name, tensor)`` in any order. If one rank gives it and the others None, each tensor is broadcast.
                If every rank gives it, nothing is sent; a check compares what they read, unless ``initial="trust"``.
                A tied tensor comes under one of its names or under all. A narrower dtype is widened. Each tensor must
                come within ``timeout_s``.
            strict: False leaves out names that are missing or unexpected.
        Returns:
            ``missing_keys`` and ``unexpected_keys``, as torch's; both empty where ``strict``.
        Raises:
            FsdpError: on all ranks alike: missing, unexpected or doubled names, a shape that is not the parameter's, a
                dtype that the kept one cannot hold exactly, a source that raised. A dict is checked whole before
                anything is loaded. Of other sources each tensor is checked before it is loaded; the error says how
                many were loaded before.
        Memory: the shards and one tensor. Optimizer state is not touched.
        """
        compare = self._options.initial != "trust"
        return streamed.load(self.module, self._engine, source, compare=compare, strict=strict)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """``full_state_dict()`` in one process. On several ranks an error, as each rank holds only a part."""
        if self._engine.ranks.size > 1:
            raise FsdpError(
                f"state_dict() on one of {self._engine.ranks.size} ranks would hold a part of the weights; use "
                "state_records() (live aliases, no communication) or full_state_dict() (collective)"
            )
        full = self.full_state_dict()
        destination, prefix = kwargs.get("destination"), kwargs.get("prefix", "")
        if destination is None:
            destination = {}
        destination.update({prefix + name: value for name, value in full.items()})
        return destination

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Always an error: ``load_full_state_dict`` loads all, ``state_records()`` and ``refresh()`` a part."""
        raise FsdpError(
            "load_state_dict() would fill gathered copies; call load_full_state_dict() on all ranks, or copy a part "
            "into state_records() and call refresh()"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        raise FsdpError(
            "to(), cuda(), half() ... would move parameters out of their flat buffers; convert before wrapping"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise FsdpError(forward_backward.COPY)

    def __getattr__(self, name: str) -> Any:
        instead = MEMBERS.get(name)
        if instead is not None:
            raise MissingError(f"FullyShardedDataParallel has no {name}, which torch's has; {instead}")
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self._modules.get("module")
            if module is None or name.startswith("_") or not hasattr(module, name):
                raise
        raise MissingError(
            f"FullyShardedDataParallel has no {name}, the wrapped {type(module).__name__} has; {module_member(name)}"
        )

    def report(self) -> dict[str, Any]:
        """What lies in memory and what moved. No communication, no read of a device value.

        Bytes are this rank's; ``*`` stands for names, ``[]`` for entries of a list. Counts are since the wrap.

        | key | unit | what |
        |---|---|---|
        | ``strategy`` ``grad_sum`` ``prefetch`` | text | as chosen |
        | ``ranks.shard`` ``ranks.replicate`` | ranks | of the main mesh |
        | ``own_meshes.*`` | ranks | that share a parameter beside the main mesh (``mesh_for``), by its name |
        | ``units.*.parameters`` | elements | of the unit, all ranks together |
        | ``units.*.gathered_bytes`` | bytes | of the whole unit where it is gathered, copies and padding included |
        | ``units.*.wire_bytes`` | bytes | that one gather fills |
        | ``units.*.padding_bytes`` | bytes | of ``layout`` that hold no element, all ranks together |
        | ``units.*.range`` | bytes | first byte and length in the arena; None: memory of its own |
        | ``units.*.layout`` | text | by flat buffer: where each tensor lies and is cut |
        | ``root.units_made`` | names | of units that no selector named (``root_units``) |
        | ``root.tied.*.gathered_bytes`` ``root.tied.*.local_gradient_bytes`` | bytes | what a tied parameter costs |
        | ``whole_tensors[].ranks`` | ranks | of a mesh whose ranks own tensors as a whole |
        | ``whole_tensors[].most_bytes`` ``whole_tensors[].even_bytes`` | bytes | of one rank: most, and the mean |
        | ``whole_tensors[].imbalance`` | ratio | of the two |
        | ``bytes.main_weights`` ``bytes.main_gradients`` | bytes | that optimizers update and read, where not below |
        | ``bytes.gather_source`` | bytes | main weights once more, as they travel |
        | ``bytes.kept_gathered`` ``bytes.gather_arena`` | bytes | gathered weights that stay; that take turns |
        | ``bytes.local_gradients`` | bytes | sums of full size that one flat buffer has for itself |
        | ``bytes.reduce_buffers`` ``bytes.reduce_scratch`` | bytes | slots of sums; of mixed additions and norms |
        | ``bytes.fp8_scratch`` ``bytes.fp8_transposed`` | bytes | amaxes, scales and scratch; transposed copies |
        | ``bytes.offload_slots`` | bytes | on the device for optimizer state of the host; with ``offload`` only |
        | ``fp8.tensors`` ``fp8.scale_reductions`` ``fp8.transposes_made`` | count | |
        | ``fp8.matmul`` ``fp8.transposes_alive`` | text | what layers multiply; units that have transposed copies |
        | ``gathers`` ``reductions`` | count | of units; of several small ones where one message brings them |
        | ``plan.order`` | text | ``"fixed"``, ``"recorded"`` or ``"given"`` (``use_plan``) |
        | ``plan.budget_bytes`` | bytes | an integer ``gathered_bytes``; None without |
        | ``plan.arena_bytes`` ``plan.arena_used_bytes`` | bytes | the arena; up to the end of its last range |
        | ``plan.peak_bytes`` | bytes | gathered at once, at most so far |
        | ``plan.padding_bytes`` | bytes | of all units |
        | ``plan.gathers_done`` | count | gathers into the arena in the last step; None in the first |
        | ``plan.gathers`` ``plan.gathered_bytes`` | count, bytes | as planned; this and the rest with a budget |
        | ``plan.gathers_in_ranges`` | count | if no unit could wait elsewhere in the arena |
        | ``plan.copies_done`` | count | of units between places of the arena in the last step |
        | ``plan.gathers_not_ahead`` | count | that can begin only when the unit is used |
        | ``plan.least_gathers`` ``plan.least_gathered_bytes`` | count, bytes | what bytes alone allow |
        | ``plan.least_is_proven`` | bool | no plan gathers less |
        | ``plan.steps_off_plan`` | count | steps that left a given plan |
        | ``bucket_bytes`` | bytes | of the largest piece that is reduced at once, all ranks together |
        | ``communicators`` ``user_buffers`` | text | what they are; the path taken, and why no better one |
        | ``muon[].matrices`` ``muon[].exchanges`` | count | in pieces; all-to-alls of a step |
        | ``muon[].ranks`` | ranks | that share the iterations |
        | ``muon[].sent_bytes`` | bytes | of a step, all ranks together |
        | ``muon[].imbalance`` | ratio | work of the busiest rank over the mean |
        | ``offload[].host_bytes`` ``offload[].device_bytes`` | bytes | of one optimizer's state; of its slots |
        """
        stated = model_report.report(self._engine, self._options, self._fp8, self._communicators)
        return self._optimizers.add_to(stated)

    @contextmanager
    def memory(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[memory.Recording]:
        """Record what this rank holds while the block runs, usually a step; then ``print(it)`` or ``it.svg()``.

        It has every byte of this package by purpose. At each gather, reduction and free it has what is in flight and
        what is there. The optimizer's state counts if you give it. Not in it: activations, autograd's gradients before
        they are added, temporaries of layers and optimizers, the back end's own memory. No communication.
        """
        with memory.recording(self._engine, lambda: self.report()["bytes"], optimizer) as recorded:
            yield recorded

    # ---- for fully_shard_optimizer

    def _shard_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return sharded_optimizer.shard_optimizer(optimizer, self._engine, self._engine.records, self._optimizers)


def fully_shard(module: nn.Module, *positional: Never, **options: Any) -> FullyShardedDataParallel:
    """``FullyShardedDataParallel(module, **options)``, for as long as ``module`` lives.

    ``module(x)`` works like the returned object's call. You need not keep that object. Call this once for the whole
    model and name the units by ``fsdp_unit_modules``. torch's function of this name is called once per unit.
    """
    model = FullyShardedDataParallel(module, *positional, **options)
    model._end.detach()
    model._tidy.detach()
    build.end_with(module, model._engine, model._everywhere)
    return model


def fully_shard_optimizer(optimizer: torch.optim.Optimizer, model: FullyShardedDataParallel) -> torch.optim.Optimizer:
    """Make ``optimizer`` (over the module's own parameters, without state) update ``model``'s main parameters.

    The same object is returned. Its groups, with their options, now hold what this rank owns. ``step()`` first
    finishes gradient sync. Afterwards the next calls gather the new weights. ``zero_grad()`` also drops gradients that
    were not reduced yet, so call it on all ranks. Several optimizers may share a model. With ``torch.optim.Muon``, a
    matrix that lies in pieces is whole at one rank during its iteration. That takes two all-to-alls for each shape in a
    step, so all ranks must step.

    Raises:
        FsdpError: the optimizer has state, or a parameter that is not of this model.
    """
    if not isinstance(model, FullyShardedDataParallel):
        raise FsdpError(
            f"fully_shard_optimizer is given a {type(optimizer).__name__} and a {type(model).__name__}; it takes the "
            "optimizer, then what fully_shard returned"
        )
    return model._shard_optimizer(optimizer)
