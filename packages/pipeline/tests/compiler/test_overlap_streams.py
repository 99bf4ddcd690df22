"""Overlaps on two streams: which part runs where, what orders them, and the bits; with a stream that takes notes."""

from __future__ import annotations

import gc
import weakref

import pytest
from pipeline_helpers import batch, equal_bits, gradients, layers, plain_loop, square_loss
from thread_helpers import on_threads, values_or_raise
from torch import nn

from sixfold.pipeline import Action, Kind, PipelineRunner, Program, ScheduleError, Stage, dualpipe_v
from sixfold.pipeline.compiler import compile as compiling
from sixfold.pipeline.compiler.overlap_streams import on_the_side
from sixfold.pipeline.passes import lower, merge_backward, split_backward


class Noting:
    """A side stream that runs things at once, and writes down what a device would be told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.where = "main"

    def fork(self) -> None:
        self.notes.append("fork")

    def run(self, call) -> object:
        self.where = "side"
        try:
            return call()
        finally:
            self.where = "main"

    def join(self) -> None:
        self.notes.append("join")


class Told(nn.Module):
    """A stage that writes down where its forwards and backwards run."""

    def __init__(self, module: nn.Module, index: int, side: Noting) -> None:
        super().__init__()
        self.module, self.index, self.side = module, index, side

    def forward(self, x, *, k: int):
        self.note(f"{self.index}F{k}")
        y = self.module(x)
        y.register_hook(lambda _: self.note(f"{self.index}B{k}"))
        return y

    def note(self, what: str) -> None:
        self.side.notes.append(f"{what} {self.side.where}")


PROGRAMS = [dualpipe_v(2, 6), split_backward(dualpipe_v(2, 6)), dualpipe_v(3, 8)]


def step(transport, program: Program, sides: list[Noting]) -> tuple[list[str], dict[int, list]]:
    side, modules = sides[transport.rank], layers(program.stages)
    mine = program.stages_of(transport.rank)
    stages = [Stage(Told(modules[s], s, side), s) for s in mine]
    runner = PipelineRunner(program, stages, transport, square_loss, timeout_s=20, overlap="streams")
    m = program.microbatches
    runner.step(*batch(2 * m), kwargs=[{"k": k} for k in range(m)])
    return side.notes, {s: gradients(modules[s]) for s in mine}


@pytest.mark.parametrize("program", PROGRAMS, ids=["B", "I and W", "3 ranks"])
def test_both_parts_begin_behind_one_fork_and_meet_at_one_join(program, monkeypatch):
    ranks = len(program.ranks)
    sides = [Noting() for _ in range(ranks)]
    monkeypatch.setattr(compiling, "side_of", lambda wiring: sides[wiring.rank])
    found = values_or_raise(on_threads(ranks, step, program, sides))
    for actions, (notes, _) in zip(program.ranks, found, strict=True):
        words = " ".join(notes).replace(" main", "").replace(" side", "").split()
        wanted = []
        for entry in actions:
            parts = [str(p).replace("I", "B") for p in entry.each() if p.kind is not Kind.W]
            wanted += ["fork", *parts, "join"] if entry.parts else parts
        assert words == wanted
        blocks = [text.split("join")[0].split() for text in " ".join(notes).split("fork")[1:]]
        assert [sorted(block[1::2]) for block in blocks] == [["main", "side"]] * len(blocks)
        assert "side" not in " ".join(text.split("join")[-1] for text in " ".join(notes).split("fork"))
    oracle, (x, y) = layers(program.stages), batch(2 * program.microbatches)
    m = program.microbatches
    plain_loop(oracle, list(x.tensor_split(m)), list(y.tensor_split(m)))
    got = {stage: made for _, mine in found for stage, made in mine.items()}
    assert all(equal_bits(got[s], gradients(oracle[s])) for s in range(program.stages))


@pytest.mark.parametrize(
    "program", [dualpipe_v(4, 12), merge_backward(dualpipe_v(2, 9)), split_backward(dualpipe_v(4, 9))]
)
def test_a_backward_is_on_the_stream_of_its_forward_and_never_on_that_of_the_forward_beside_it(program):
    for actions in program.ranks:
        aside, stream, pairs = on_the_side(actions), {}, 0
        for entry in actions:
            for part in entry.each():
                where = part in aside.get(entry, ())
                if part.kind is Kind.F:
                    stream[part.stage, part.microbatch] = where
                elif entry.parts:
                    assert where == stream[part.stage, part.microbatch]
            if entry in aside:
                pairs += 1
                assert 0 < len(aside[entry]) < len(entry.parts)
        assert pairs == sum(1 for entry in actions if entry.parts)


def test_overlaps_of_other_parts_run_in_order():
    row = [Action.parse(text) for text in ("0F0", "(0F1;0F2)OVERLAP_F_B", "(0F3;0I0;0W1)OVERLAP_F_B")]
    assert on_the_side(row) == {}


def test_what_a_part_takes_is_held_until_the_streams_have_met(monkeypatch):
    program, side = lower(dualpipe_v(1, 4)), Noting()
    monkeypatch.setattr(compiling, "side_of", lambda wiring: side)
    alive: list[int] = []
    seen: dict[int, weakref.ref] = {}

    class Looks(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x, *, k: int):
            seen[k] = weakref.ref(x)
            return self.module(x)

    join = side.join

    def joined() -> None:
        gc.collect()
        alive.append(sum(ref() is not None for ref in seen.values()))
        join()

    side.join = joined
    modules = [Looks(module) for module in layers(2)]
    runner = PipelineRunner(
        program, [Stage(m, i) for i, m in enumerate(modules)], loss_fn=square_loss, overlap="streams"
    )
    pairs = sum(1 for _, _, action in program.entries() if action.parts)
    runner.step(*batch(8), kwargs=[{"k": k} for k in range(4)])
    assert pairs and len(alive) == pairs
    assert min(alive) >= 2  # of the forward, and of the backward that has ended


class Shards:
    """A data_parallel that gathers."""

    def unshard(self) -> None: ...

    def reshard(self) -> None: ...

    def before_last_backward(self) -> None: ...

    def reduce_grad(self) -> None: ...


def test_what_counts_on_one_stream_is_refused_by_name():
    modules = layers(4)
    with pytest.raises(ScheduleError, match="overlap is 'both'; it is 'order' or 'streams'"):
        PipelineRunner(dualpipe_v(2, 4), [Stage(m, i) for i, m in enumerate(modules)], overlap="both")
    stages = [Stage(m, i, data_parallel=Shards()) for i, m in enumerate(modules)]
    runner = PipelineRunner(dualpipe_v(2, 4), stages, loss_fn=square_loss, overlap="streams")
    with pytest.raises(ScheduleError, match=r"has data_parallel, .*make the runner with overlap='order'"):
        runner.step(*batch(8))


def test_on_cpu_streams_change_nothing():
    program, (x, y) = dualpipe_v(2, 6), batch(12)
    ours, oracle = layers(4), layers(4)
    stages = [Stage(m, i) for i, m in enumerate(ours)]
    losses = PipelineRunner(program, stages, loss_fn=square_loss, overlap="streams", profile=True).step(x, y).losses
    assert losses == plain_loop(oracle, list(x.tensor_split(6)), list(y.tensor_split(6)))
    assert all(equal_bits(gradients(a), gradients(b)) for a, b in zip(ours, oracle, strict=True))
