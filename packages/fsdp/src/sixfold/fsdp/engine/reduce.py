"""The reduction of gradients: when it begins, on which stream, and who waits for it.

    microbatch(), no_sync(), stage handles --> ReducePolicy (this file) --> engine.py: after which backward
    engine.py --> Reduction --> GradReducePipeline (this file) --> gradient_sums.py

Reduction owns the pool of slots; buffers/gradients.py and reduction_paths.py say what lies where.

[Note: order of a sum] Autograd's gradient is added to a local sum in main_dtype. The sum is cast to reduce_dtype and
added over the shard ranks, then in main_dtype over the replicas. It is divided once, by a true division. Only then it
is added to ``main.grad``. With ``grad_sum="tree"`` the division comes behind all additions: [Note: sums of a tree].
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from sixfold.fsdp.buffers.flat_buffer import ParamAndGradBuffer
from sixfold.fsdp.buffers.flat_tensor import ParamRecord
from sixfold.fsdp.buffers.gradients import Gradients, Taken
from sixfold.fsdp.buffers.reduction_sizes import ReductionPath, State
from sixfold.fsdp.buffers.stored_bytes import MIXED_NUMEL, NORM_BYTES
from sixfold.fsdp.buffers.temporary_memory import TemporaryBucketAllocator
from sixfold.fsdp.buffers.unit import Unit
from sixfold.fsdp.collectives.gradient_sums import Finish, RankOrderSum
from sixfold.fsdp.collectives.streams import SideStream
from sixfold.fsdp.config import MixedPrecision
from sixfold.fsdp.engine.rank_agreement import UsedParameters
from sixfold.fsdp.engine.reduction_paths import ReductionPaths, Sections
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.faults.deadlines import Wait


class StageState:
    """What the engine knows of a stage of a driven program.

    ``fused``: the program says that its backwards are whole (B); else they are split (I, W), and the gradients that W
    makes come through ``accumulate``.
    """

    def __init__(self, name: str, units: Sequence[Unit], fused: bool) -> None:
        self.name = name
        self.units = tuple(units)
        self.fused = fused
        self.last = False  # its last backward of this step runs
        self.done = False  # its reduce_grad was called in this step
        self.microbatch = 0  # whose backward runs, or runs next
        self.told = False  # by before_backward
        self.root: Unit | None = None  # the root unit, if its parameters are this stage's alone
        self.over: set[int] = set()  # microbatches of this step whose backward is over
        self.early: dict[int, list[tuple[ParamRecord, Tensor]]] = {}  # by microbatch: what came before its W

    @property
    def closed(self) -> int:
        """Microbatches below it are over when this one is."""
        return next(at for at in count() if at not in self.over and at != self.microbatch)


class ReducePolicy:
    """What users and programs said of micro-batches, and what follows for a unit.

    Args:
        grad_reduce: of driven programs, ``"auto"``, ``"last"`` or ``"microbatch"``.
        shards_grads: local sums of the size of a unit do not stay until the last micro-batch.
        tree: each micro-batch is reduced, and is a leaf of a tree. [Note: a tree with missing leaves]

    Attributes:
        no_sync_depth, last_microbatch: what the user's contexts say.
        stages: of a driven program.
        driven: the forward that runs, or ran last, was called through a stage handle.
        each_microbatch: a driven program reduces in every backward.
        batch, backwards: since when leaves are counted, and how many backwards (not driven) ended since.
    """

    def __init__(self, grad_reduce: str, *, shards_grads: bool, tree: bool = False) -> None:
        self._grad_reduce = grad_reduce
        self.tree = tree
        self.batch = self.backwards = 0
        self._shards_grads = shards_grads
        self.no_sync_depth = 0
        self.last_microbatch = True
        self.stages: list[StageState] = []
        self.driven = False
        self.each_microbatch = False

    @property
    def alone(self) -> bool:
        """A single stage: the root unit's gradients are its own."""
        return len(self.stages) == 1

    @property
    def final(self) -> bool:
        """A backward that ends now makes main gradients final."""
        return self.last_microbatch and not self.no_sync_depth

    def reducing(self, units: Sequence[Unit]) -> frozenset[int]:
        """Numbers of those of ``units`` whose gradients are to be reduced in the backward that begins now."""
        if not self.driven:
            now = self.tree or (not self.no_sync_depth and (self._shards_grads or self.last_microbatch))
            return frozenset(unit.index for unit in units if now)
        if self.each_microbatch:
            return frozenset(unit.index for unit in units if unit.index or self.alone)
        if self.tree:  # when W has run
            return frozenset()
        stages = {unit.index: unit.stage for unit in units}
        return frozenset(at for at, one in stages.items() if isinstance(one, StageState) and one.last and one.fused)

    def left_over(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """Those of ``units`` that a backward reduces at its end, if it reduces them and did not see them done."""
        if self.each_microbatch or not self.driven:
            return units
        return units[:1] if self.alone else ()

    # ---- driven programs (seams: "The program drives the sharding")

    def add_stage(self, stage: StageState) -> None:
        """A stage handle was made; a second one of a stage takes the place of the first.

        Raises:
            FsdpError: its backwards are split, and ``grad_reduce`` is ``"microbatch"``.
        """
        if self._grad_reduce == "microbatch" and not stage.fused:
            raise FsdpError(
                f"stage {stage.name!r} has split backwards (fused=False), and grad_reduce is 'microbatch', which "
                "reduces at the end of whole ones; use grad_reduce='auto' or 'last'",
                op="reduce",
            )
        self.stages = [*(one for one in self.stages if one.name != stage.name), stage]
        for unit in stage.units:
            unit.stage = stage
        whole = self.alone and stage.fused and self._shards_grads
        self.each_microbatch = self._grad_reduce == "microbatch" or (self._grad_reduce == "auto" and whole)
        if self.tree:
            self.each_microbatch = all(one.fused for one in self.stages)

    @property
    def all_done(self) -> bool:
        """Every stage reduced what it has: the root unit makes no more gradients either."""
        return all(one.done for one in self.stages)

    def end_step(self) -> None:
        """What stages said of this step is over, also where it was given up before their last backward."""
        for stage in self.stages:
            stage.last = stage.done = False
            stage.microbatch = 0
            stage.over.clear()
            stage.early.clear()
        if self.driven:
            self.new_batch()

    # ---- leaves of a tree

    def new_batch(self) -> None:
        """The next micro-batch is the first of a batch."""
        self.batch += 1
        self.backwards = 0

    def keep(self, unit: Unit, record: ParamRecord, gradient: Tensor) -> None:
        """An I made ``gradient`` itself: it belongs to its micro-batch, whose W comes after those of others."""
        stage = self._stage_of(unit)
        assert stage is not None, f"{record.name} lies in no stage"
        if not stage.told:
            raise FsdpError(
                f"stage {stage.name!r} has split backwards, grad_sum is 'tree', and nobody told of which micro-batch "
                "this backward is; call before_backward(microbatch) of the stage handle before each",
                op="reduce",
            )
        stage.early.setdefault(stage.microbatch, []).append((record, gradient))

    def end_microbatch(self, stage: StageState, microbatch: int) -> list[tuple[ParamRecord, Tensor]]:
        """What came of ``microbatch`` before its W."""
        if self.each_microbatch and stage.microbatch != microbatch:
            raise FsdpError(
                f"stage {stage.name!r}: the backward of micro-batch {microbatch} was taken for that of "
                f"{stage.microbatch}; call before_backward(microbatch) of the stage handle before each",
                op="reduce",
            )
        stage.microbatch = microbatch
        return stage.early.pop(microbatch, [])

    def leaf_of(self, unit: Unit) -> tuple[int, int, int]:
        """(batch, micro-batch, how many are over by it) of a reduction of ``unit`` that begins now."""
        stage = self._stage_of(unit) if self.driven else None
        if stage is not None:
            return self.batch, stage.microbatch, stage.closed
        return self.batch, self.backwards, self.backwards + 1

    def _stage_of(self, unit: Unit) -> StageState | None:
        if isinstance(unit.stage, StageState):
            return unit.stage
        return next((stage for stage in self.stages if stage.root is unit), None)

    @property
    def over(self) -> int:
        """So many micro-batches are over: all, where a program has ended."""
        return 1 << 62 if self.driven else self.backwards


@dataclass(slots=True, eq=False)
class _Piece:
    """One collective of a flat buffer's reduction, on its way: columns ``[start, stop)``.

    Attributes:
        taken: the local gradients that it sends.
        finish: waits for the sum over shards and returns it.
        from_replicas: memory for the sum over replicas.
        holder: of a slot that is given back once it has landed, or None.
    """

    flat_buffer: ParamAndGradBuffer
    taken: Taken
    start: int
    stop: int
    finish: Finish
    from_replicas: Tensor
    holder: str | None


@dataclass(slots=True, eq=False)
class _Flight:
    """The reduction of a unit, on its way.

    Attributes:
        pieces: that have not landed.
        taken: what it took of each of the unit's flat buffers.
        slots: that its pieces read.
        event: after the last of them on the reduce stream, where all are enqueued at once.
    """

    unit: str
    pieces: deque[_Piece] = field(default_factory=deque)
    taken: list[tuple[Gradients, Taken]] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    event: Any = None


class GradReducePipeline:
    """Reductions in flight, first in first out. Knows no module, no memory and no slot.

    Args:
        units: names.
        start: starts a unit's reduction and returns what finishes it.

    Attributes:
        watch: told each move and its unit, or None: "put" before, "reduce" after it was sent, "drain" when it is done.
    """

    def __init__(self, units: Collection[str], start: Callable[[str], Callable[[], None]]) -> None:
        self.watch: Callable[[str, str], None] | None = None
        self._start = start
        self._units = frozenset(units)
        self._flying: dict[str, Callable[[], None]] = {}  # the oldest first
        self._histories: dict[str, deque[str]] = {unit: deque(maxlen=12) for unit in units}

    def __len__(self) -> int:
        return len(self._flying)

    def flying(self, unit: str) -> bool:
        """``unit`` has a reduction that is not finished."""
        return unit in self._flying

    def put(self, unit: str) -> None:
        """Start the reduction of ``unit``; illegal while one of it is in flight."""
        if unit not in self._units:
            raise FsdpError(f"put({unit!r}): there is no such unit", unit=unit, op="reduce")
        if unit in self._flying:
            raise FsdpError(
                f"put({unit!r}) while its reduction is in flight; drain it first. History: "
                f"{', '.join(self._histories[unit])}",
                unit=unit,
                op="reduce",
            )
        self._histories[unit].append("put")
        watch = self.watch
        if watch is not None:
            watch("put", unit)
        self._flying[unit] = self._start(unit)
        if watch is not None:
            watch("reduce", unit)

    def drain(self, limit: int) -> None:
        """Finish the oldest until at most ``limit`` (>= 0) are in flight."""
        if limit < 0:
            raise FsdpError(f"drain({limit}): the limit is >= 0", op="reduce")
        while len(self._flying) > limit:
            unit = next(iter(self._flying))
            finish = self._flying.pop(unit)
            self._histories[unit].append("drain")
            finish()
            if self.watch is not None:
                self.watch("drain", unit)

    def abandon(self) -> None:
        """No reduction counts as in flight, in whatever state an exception left it."""
        self._flying.clear()

    def finish(self) -> None:
        """Finish all."""
        self.drain(0)


class Reduction:
    """Local gradients of units and their reductions.

    Args:
        paths, pool: how each flat buffer's gradients get to their reduction, and the slots for it.
        at_once: a Work's wait() stops a stream and not the host, so a unit's whole reduction is enqueued when its
            backward is done; else the host waits, as late as it may. [Note: who waits for a reduction]
        own_meshes: ranks hold different flat buffers (experts on meshes of their own), and so run out of slots at
            different moments: a piece whose sum takes two collectives is finished before the next one starts.

    Attributes:
        wide: the scratch of mixed additions, or None.

    [Note: who waits for a reduction] The reduce stream follows the compute stream whenever it takes something over.
    The compute stream waits for a reduction only when it needs what that one reads or writes. That is a slot to sum
    in, the memory of the same unit, or main gradients. So there is no moment at which each waits for the other, and
    the reduction of a unit runs beside the backward of the next ones. Gradients that autograd made are kept until the
    compute stream has waited, so its allocator cannot hand their memory out while the reduce stream reads it.
    """

    def __init__(
        self,
        units: Collection[Unit],
        *,
        precision: MixedPrecision,
        paths: ReductionPaths,
        pool: TemporaryBucketAllocator,
        stream: SideStream,
        wait: Wait,
        at_once: bool,
        own_meshes: bool = False,
        divisor: float,
        device: torch.device,
        used: UsedParameters,
    ) -> None:
        self._by_name = {unit.name: unit for unit in units}
        main, reduce = precision.main_dtype, precision.reduce_dtype or precision.main_dtype
        self._reduce_is_main = main == reduce
        self.tree = precision.grad_sum == "tree"
        self._leaf = (0, 0, 1)
        self.paths, self.pool = paths, pool
        self._slots = len(pool.slot_bytes)
        self._nothing = torch.zeros(0, dtype=main, device=device)
        self._sections: dict[tuple[ParamAndGradBuffer, bool, int, int], Sections] = {}
        self._flying_bytes = dict.fromkeys(self._by_name, 0)
        self._reads: dict[int, Any] = {}  # slot -> event after what the reduce stream last did there
        self._side = stream
        self._waits = {name: partial(wait, unit=name, op="reduce") for name in self._by_name}
        self._at_once = at_once
        self.own_meshes = own_meshes
        self._used = used
        kinds = {record.dtype for unit in units for flat_buffer in unit.trained for record in flat_buffer.records}
        mixed = device.type == "cpu" and len(kinds | {main, reduce, precision.grad_dtype or main}) > 1
        self.wide = torch.zeros(MIXED_NUMEL, dtype=main, device=device) if mixed else None
        # A tensor on the device: CUDA multiplies by the reciprocal of a host number.
        self._divisor = None if divisor == 1.0 else torch.tensor(divisor, dtype=main, device=device)
        self.pipeline = GradReducePipeline(self._by_name, self._start)
        self.reductions = 0
        self._device = device
        self._spare: Tensor | None = None

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the scratch of mixed additions, and of the norm's."""
        return sum(one.nbytes for one in (self.wide, self._spare) if one is not None)

    def spare(self) -> Tensor:
        """Bytes for who needs some between steps and finds no slot; made once."""
        if self._spare is None:
            self._spare = torch.empty(NORM_BYTES, dtype=torch.uint8, device=self._device)
        return self._spare

    def flying_bytes(self, unit: str) -> int:
        """Bytes of sums that the last reduction of ``unit`` took: whole ones, or the pieces in flight."""
        return self._flying_bytes[unit]

    # ---- local gradients

    def acquire(self, flat_buffer: ParamAndGradBuffer, pooled: bool) -> None:
        """Room for ``flat_buffer``'s local gradients; ``pooled``: the reduction follows in the same backward."""
        unit = self._by_name[flat_buffer.unit]
        while self.pipeline.flying(unit.name):
            self.pipeline.drain(len(self.pipeline) - 1)
        kind = self.paths.as_made[flat_buffer] if pooled else State.OWN
        if kind is State.HELD:
            flat_buffer.gradients.hold()
            return
        slot = self._free_slot(unit.name) if kind is State.SLOT else None
        if slot is None:  # also when units that are not done hold the whole pool
            flat_buffer.gradients.sum_in_own()
            return
        if slot in self._reads:
            self._side.join(self._reads.pop(slot))
        flat_buffer.gradients.sum_in(self.pool.memory(slot))

    def _free_slot(self, owner: str) -> int | None:
        """A slot for ``owner``; reductions in flight are finished for it, the oldest first."""
        slot = self.pool.allocate(owner, 0)
        while slot is None and len(self.pipeline):
            self.pipeline.drain(len(self.pipeline) - 1)
            slot = self.pool.allocate(owner, 0)
        return slot

    def _slot_for_piece(self, owner: str, mine: deque[_Piece]) -> int:
        """A slot for a piece of a reduction whose earlier pieces are ``mine``."""
        slot = self._free_slot(owner)
        while slot is None and mine:
            with self._side.inside:
                self._land(mine.popleft())
            slot = self.pool.allocate(owner, 0)
        if slot is None:  # units that are not done sum in all of them: one goes on elsewhere
            for unit in self._by_name.values():
                for flat_buffer in unit.trained:
                    if slot is None and flat_buffer.gradients.state is State.SLOT:
                        flat_buffer.gradients.leave_slot()
                        self.pool.free(unit.name)
                        slot = self.pool.allocate(owner, 0)
        assert slot is not None, f"no slot is free for {owner}: {self.pool.slot_bytes}"
        return slot

    def _free(self, owner: str) -> None:
        if owner in self.pool.holders:
            self.pool.free(owner)

    def not_finite(self, unit: Unit) -> int:
        """The place of the first local gradient that is not finite among all of ``unit``, or -1. Reads the device: for
        ``checks="unit"`` only."""
        gradients = [one for flat_buffer in unit.trained for one in flat_buffer.gradients.delivered()]
        bad = (at for at, one in enumerate(gradients) if one is not None and not bool(torch.isfinite(one).all()))
        return next(bad, -1)

    def discard(self, records: Set[ParamRecord]) -> None:
        """Forget what was delivered of ``records``; what is in flight is finished first, and lands."""
        self.pipeline.finish()
        self._used.forget(records)
        for record in records:
            record.flat_buffer.gradients.forget(record)
        for unit in self._by_name.values():
            self.drop(unit, records)

    def drop(self, unit: Unit, records: Set[ParamRecord]) -> None:
        """No sum of ``unit`` is wanted of flat buffers whose ``records`` are all forgotten."""
        for flat_buffer in unit.trained:
            if flat_buffer.gradients.state is not State.IDLE and records >= set(flat_buffer.records):
                if flat_buffer.gradients.state is State.SLOT:
                    self.pool.free(unit.name)
                flat_buffer.gradients.drop()

    def release_own_sums(self) -> None:
        """Give back the full-size sums of all units but the root: from now on they take turns in the pool."""
        self.pipeline.finish()
        for unit in self._by_name.values():
            for flat_buffer in unit.trained if unit.index else ():
                if flat_buffer.gradients.state is State.IDLE:
                    flat_buffer.gradients.release_own()

    def finish(self, over: int) -> None:
        """Wait for all; main gradients are then what all reductions brought. ``over``: `ReducePolicy.over`."""
        self.pipeline.finish()
        if self.tree:
            for unit in self._by_name.values():
                for flat_buffer in unit.trained:
                    gather = self.paths.gatherer(flat_buffer, self._waits[unit.name])
                    flat_buffer.gradients.show(over, self._divisor, gather)

    # ---- reductions

    def put(self, unit: Unit, leaf: tuple[int, int, int]) -> None:
        """Reduce what ``unit`` has locally (zeros, if other ranks have something); ``leaf``: `ReducePolicy.leaf_of`."""
        self._leaf = leaf
        while self.pipeline.flying(unit.name):
            self.pipeline.drain(len(self.pipeline) - 1)
        for flat_buffer in unit.trained:
            if flat_buffer.gradients.state is State.IDLE and flat_buffer.ranks.size > 1:
                self.acquire(flat_buffer, pooled=True)
        states = {flat_buffer.gradients.state for flat_buffer in unit.trained}
        if State.HELD in states:
            self.pipeline.drain(self._slots - 1)  # autograd's memory of few units is kept, not of all
        if states - {State.IDLE}:
            self.pipeline.put(unit.name)

    def _start(self, name: str) -> Callable[[], None]:
        self.reductions += 1
        self._flying_bytes[name] = 0
        flight = _Flight(name)
        for at, flat_buffer in enumerate(self._by_name[name].trained):
            if flat_buffer.gradients.state is not State.IDLE:
                flight.taken.append((flat_buffer.gradients, self._start_pieces(flat_buffer, f"{name} {at}", flight)))
        if self._at_once:
            with self._side.inside:
                self._finish_pieces(flight)
                flight.event = self._side.mark()
            self._reads.update(dict.fromkeys(flight.slots, flight.event))
        return partial(self._finish, flight)

    def _finish(self, flight: _Flight) -> None:
        if self._at_once:
            self._side.join(flight.event)
        else:
            with self._side.joined:
                self._finish_pieces(flight)
        if self._reads:
            self._reads = {slot: last for slot, last in self._reads.items() if last is not flight.event}
        for gradients, taken in flight.taken:
            gradients.landed(taken)
        self._free(flight.unit)

    def _finish_pieces(self, flight: _Flight) -> None:
        while flight.pieces:
            self._land(flight.pieces.popleft())

    def _start_pieces(self, flat_buffer: ParamAndGradBuffer, owner: str, flight: _Flight) -> Taken:
        """Start one collective for each piece of ``flat_buffer``, as far as there are slots."""
        gradients = flat_buffer.gradients
        kind = gradients.state
        path = self.paths.of[flat_buffer, kind]
        taken = gradients.take(fill_zeros=flat_buffer.ranks.size > 1, leaf=self._leaf)
        taken.round = self._used.round
        self._used.took(flat_buffer, taken.mine)
        pieces = min(len(path.pieces), self._slots)
        self._flying_bytes[flat_buffer.unit] += pieces * path.nbytes[0] if kind is State.HELD else gradients.sum_bytes
        for at, piece in enumerate(path.pieces):
            slot, holder = None, f"{owner} {at}"
            if kind is State.SLOT:
                slot = self.pool.holders[flat_buffer.unit]
            elif path.slot_bytes:
                slot = self._slot_for_piece(holder, flight.pieces)
                flight.slots.append(slot)
            with self._side.inside:
                flight.pieces.append(self._start_piece(flat_buffer, path, taken, piece, slot, holder))
                if self.own_meshes and self._takes_two(flat_buffer):
                    self._finish_pieces(flight)
        return taken

    def _takes_two(self, flat_buffer: ParamAndGradBuffer) -> bool:
        """Finishing a sum of ``flat_buffer`` starts another collective."""
        whole = flat_buffer.cut.parts == 1 and isinstance(self.paths.sums[flat_buffer.ranks.shard], RankOrderSum)
        return whole or flat_buffer.ranks.outer.size > 1

    def _sections_of(
        self, flat_buffer: ParamAndGradBuffer, path: ReductionPath, start: int, stop: int, slot: int
    ) -> Sections:
        key = flat_buffer, path.kind is State.OWN, start, slot
        if key not in self._sections:
            self._sections[key] = self.paths.sections(path, flat_buffer, start, stop, self.pool.memory(slot))
        return self._sections[key]

    def _start_piece(
        self,
        flat_buffer: ParamAndGradBuffer,
        path: ReductionPath,
        taken: Taken,
        piece: tuple[int, int],
        slot: int | None,
        owner: str,
    ) -> _Piece:
        """[Note: order of a sum]"""
        ranks, gradients, (start, stop) = flat_buffer.ranks, flat_buffer.gradients, piece
        memory = None if slot is None else self._sections_of(flat_buffer, path, start, stop, slot)
        if path.staged:
            assert memory is not None, f"{owner}: what travels has no slot"
            sent = memory.sent
            gradients.stage(taken, start, stop, sent)
        else:
            assert taken.sums is not None, f"{owner}: nothing was summed"
            sent = taken.sums.flat
        result = gradients.result_place(taken, start, stop)
        if result is None:
            assert memory is not None, f"{owner}: a result has no place"
            result = sent.view(ranks.shard.size, -1)[ranks.shard.rank] if self._reduce_is_main else memory.result
        scratch = (self._nothing, self._nothing) if memory is None else (memory.received, memory.from_replicas)
        landing, shard_sum = self.paths.landing(flat_buffer, start, stop), self.paths.sums[ranks.shard]
        result = result[: stop - start][landing[0] - start : landing[1] - start]
        whole = flat_buffer.all_reduced and landing == piece
        start_sum = shard_sum.all_reduce if whole else shard_sum.reduce_scatter
        finish = start_sum(ranks.shard, sent, result, scratch[0], self.wide)
        holder = None if path.kind is State.SLOT else owner
        return _Piece(flat_buffer, taken, *landing, finish, scratch[1], holder)

    def _land(self, piece: _Piece) -> None:
        """Finish its sum, and make it main gradients. [Note: order of a sum]"""
        flat_buffer = piece.flat_buffer
        outer = flat_buffer.ranks.outer
        wait = self._waits[flat_buffer.unit]
        total = piece.finish(wait)
        if outer.size > 1:  # in main_dtype, never rounded between
            total = self.paths.sums[outer].all_reduce(outer, total, total, piece.from_replicas, self.wide)(wait)
        if self._divisor is not None and not self.tree:
            total.div_(self._divisor)
        flat_buffer.gradients.land(piece.taken, total, piece.start, piece.stop, self.wide)
        if piece.holder is not None:
            self._free(piece.holder)
