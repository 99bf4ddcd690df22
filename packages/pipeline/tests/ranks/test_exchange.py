"""What travels between ranks: shapes that change, tuples, empty stages, other programs, both scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_helpers import batch, equal_bits, gradients, layers, plain_loop, square_loss
from torch import Tensor, nn

from ranktest import run_ranks
from sixfold.pipeline import PipelineRunner, ScheduleError, Stage, gpipe, interleaved, looped_bfs, one_f_one_b
from sixfold.pipeline.passes import lower
from sixfold.pipeline.transport.devices import HostMemoryReceive, wants_host_memory


def two_stages(rank: int, modules: list[nn.Module], **options: Any) -> PipelineRunner:
    """A runner of 1F1B with m = 3 on two ranks."""
    return PipelineRunner(
        one_f_one_b(2, 3), [Stage(modules[rank], rank)], dist.group.WORLD, square_loss, timeout_s=10, **options
    )


def cut(rows: list[int], seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Microbatches of these sizes."""
    inputs, targets = batch(sum(rows), seed)
    return list(inputs.split(rows)), list(targets.split(rows))


def change_shapes(rank: int, ranks: int, edges: str | None) -> None:
    """Uneven microbatches, new shapes with every step, an evaluation between, and other programs."""
    modules, oracle = layers(2), layers(2)
    runner = two_stages(rank, modules, edges=edges)
    for seed, rows in enumerate([[3, 1, 2], [3, 1, 2], [5, 5, 1], [2, 2, 2], [2, 2, 4]]):
        inputs, targets = cut(rows, seed)
        runner.step(inputs, targets)
        plain_loop(oracle, inputs, targets)
        losses = runner.evaluate(*cut([seed + 1, 2, 3], 50)).losses
        assert len(losses) == (3 if rank == 1 else 0)
    for m in (5, 2, 5):
        inputs, targets = batch(10, m)
        runner.step(inputs, targets, program=lower(gpipe(2, m)))
        plain_loop(oracle, list(inputs.tensor_split(m)), list(targets.tensor_split(m)))
    outputs = runner.forward(batch(6)[0]).outputs
    assert len(outputs) == (3 if rank == 1 else 0)
    assert equal_bits(gradients(modules[rank]), gradients(oracle[rank]))


@pytest.mark.parametrize("edges", ["groups", "one", "host", None])
@pytest.mark.slow
def test_shapes_and_programs_may_change_from_step_to_step(edges):
    run_ranks(change_shapes, 2, edges)


class Doubles(nn.Module):
    """Returns twice the rows when told so by a keyword, which stage 0's inputs do not show."""

    def forward(self, x: Tensor, *, double: bool = False) -> Tensor:
        return torch.cat([x, x]) if double else x


def surprise(rank: int, ranks: int, dynamic: bool, edges: str | None) -> list[str]:
    """Change the output of stage 0: of the first microbatch (announced), then of the last only."""
    modules: list[nn.Module] = [Doubles(), layers(1)[0]]
    runner = PipelineRunner(
        one_f_one_b(2, 3),
        [Stage(_Quiet(modules[1]) if rank else modules[0], rank)],
        dist.group.WORLD,
        lambda output, _: output.sum(),
        timeout_s=5,
        dynamic_shapes=dynamic,
        edges=edges,
    )
    seen = []
    for doubles in ([0, 0, 0], [1, 1, 1], [1, 1, 1], [1, 1, 0]):
        try:
            runner.step(batch(6)[0], kwargs=[{"double": bool(double)} for double in doubles])
            seen.append("fine")
        except ScheduleError as error:
            seen.append(str(error))
        dist.barrier()  # nothing is trained on rank 0, which would fail and leave while rank 1 is steps behind
    return seen


class _Quiet(nn.Module):
    """Ignores keywords."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return self.module(x)


@pytest.mark.parametrize("edges", ["groups", "one", None])
@pytest.mark.slow
def test_a_changed_first_output_is_announced_and_a_later_one_is_refused_on_edges_of_every_sort(edges):
    sender, receiver = run_ranks(surprise, 2, False, edges)
    assert sender[:3] == receiver[:3] == ["fine"] * 3
    assert "0SEND_F2: stage 0 made torch.float32 (2, 8) of microbatch 2" in sender[3]
    assert "in the step before torch.float32 (4, 8); make the runner with dynamic_shapes=True" in sender[3]
    assert receiver[3].startswith("rank 0 failed at [") and "in the step before" in receiver[3]


@pytest.mark.parametrize("edges", ["groups", None])
def test_with_dynamic_shapes_any_output_may_change(edges):
    assert run_ranks(surprise, 2, True, edges) == [["fine"] * 4] * 2


class Pair(nn.Module):
    """Takes and returns bfloat16 hidden states and indices."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, dtype=torch.bfloat16)

    def forward(self, hidden: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(hidden)[index], index


def pairs(rank: int, ranks: int, edges: str | None) -> None:
    """Pairs over three ranks, the middle one with an empty stage."""
    torch.manual_seed(0)
    modules: list[nn.Module | None] = [Pair(), None, Pair()]
    parts = [(torch.randn(4, 8, dtype=torch.bfloat16), torch.tensor([2, 0, 3, 1])) for _ in range(3)]
    runner = PipelineRunner(
        one_f_one_b(3, 3),
        [Stage(modules[rank], rank)],
        dist.group.WORLD,
        lambda out, _: out[0].float().sum(),
        scale="sum",
        timeout_s=10,
        edges=edges,
    )
    for _ in range(2):
        runner.step(parts)
    torch.manual_seed(0)
    oracle = [Pair(), None, Pair()]
    for _ in range(2):
        for part in parts:
            oracle[2](*oracle[0](*part))[0].float().sum().backward()
    if modules[rank] is not None:
        assert equal_bits(gradients(modules[rank]), gradients(oracle[rank]))


@pytest.mark.parametrize("edges", ["groups", None])
@pytest.mark.slow
def test_tuples_bfloat16_integers_and_an_empty_stage_travel(edges):
    run_ranks(pairs, 3, edges)


def lazily_conjugated(rank: int, ranks: int, edges: str | None) -> list[float]:
    """Losses where the first output is a conjugate and the second the negative of what lies in memory."""

    class First(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            lazy = torch.complex(x, x).conj()
            return lazy, lazy.imag

    class Second(nn.Module):
        def forward(self, lazy: Tensor, negative: Tensor) -> Tensor:
            return lazy.imag * 3 + negative

    runner = PipelineRunner(
        gpipe(2, 2),
        [Stage((First(), Second())[rank], rank)],
        dist.group.WORLD,
        lambda output, _: output.sum(),
        timeout_s=10,
        edges=edges,
    )
    return [float(loss) for loss in runner.evaluate(torch.ones(2, 3)).losses]


@pytest.mark.parametrize("edges", ["groups", None])
def test_a_tensor_that_is_conjugated_or_negated_in_name_only_arrives_so(edges):
    assert run_ranks(lazily_conjugated, 2, edges)[1] == [-12.0, -12.0]


def by_token(rank: int, ranks: int) -> None:
    """Sums and counts: the total reaches every rank."""
    program = interleaved(2, 4, 2)
    modules, oracle = layers(4), layers(4)
    inputs, targets = batch(8)
    PipelineRunner(
        program,
        [Stage(modules[s], s) for s in program.stages_of(rank)],
        dist.group.WORLD,
        lambda o, t: (((o - t) ** 2).sum(), torch.tensor(o.numel())),
        scale="token",
        timeout_s=10,
    ).step(inputs, targets)
    for x, y in zip(inputs.tensor_split(4), targets.tensor_split(4), strict=True):
        for module in oracle:
            x = module(x)
        ((x - y) ** 2).sum().backward()
    for s in program.stages_of(rank):
        assert equal_bits(gradients(modules[s]), [g.div(64.0) for g in gradients(oracle[s]) if g is not None])


def test_gradients_are_divided_once_by_the_tokens_of_all_microbatches():
    run_ranks(by_token, 2)


def one_group_for_all(rank: int, ranks: int) -> None:
    """All edges on the given group itself."""
    modules, oracle = layers(2), layers(2)
    made: list[tuple[int, int]] = []

    def edges(source: int, destination: int) -> dist.ProcessGroup:
        made.append((source, destination))
        return dist.group.WORLD

    inputs, targets = batch(9)
    two_stages(rank, modules, edges=edges).step(inputs, targets)
    plain_loop(oracle, list(inputs.tensor_split(3)), list(targets.tensor_split(3)))
    assert made == [(0, 1), (1, 0)]
    assert equal_bits(gradients(modules[rank]), gradients(oracle[rank]))


def test_the_groups_of_edges_may_be_given():
    run_ranks(one_group_for_all, 2)


def over_host_memory(rank: int, ranks: int) -> tuple[int, bool, bool]:
    """How many messages came by a copy; whether gloo's group wants one, for a device and for a CPU."""
    modules, oracle = layers(2), layers(2)
    wait, landed = HostMemoryReceive.wait, []

    def counted(landing: HostMemoryReceive, *limit: Any) -> None:
        wait(landing, *limit)
        assert landing._buffer.data_ptr() != landing._host.data_ptr()
        landed.append(landing)

    HostMemoryReceive.wait = counted  # type: ignore[method-assign]
    inputs, targets = batch(9)
    two_stages(rank, modules, edges="host").step(inputs, targets)
    plain_loop(oracle, list(inputs.tensor_split(3)), list(targets.tensor_split(3)))
    assert equal_bits(gradients(modules[rank]), gradients(oracle[rank]))
    return len(landed), *(wants_host_memory(dist.group.WORLD, torch.device(kind)) for kind in ("cuda", "cpu"))


def test_over_host_memory_each_message_is_copied_to_its_device():
    assert run_ranks(over_host_memory, 2) == [(3, True, False)] * 2


def in_a_subgroup(rank: int, ranks: int) -> None:
    """Two pipelines side by side, after the ranks made different numbers of groups."""
    if rank in (1, 2):
        dist.new_group([1, 2], use_local_synchronization=True)
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[rank % 2]
    modules, oracle = layers(2), layers(2)
    inputs, targets = batch(9, rank % 2)
    runner = PipelineRunner(one_f_one_b(2, 3), [Stage(modules[rank // 2], rank // 2)], mine, square_loss, timeout_s=10)
    again = PipelineRunner(one_f_one_b(2, 3), [Stage(modules[rank // 2], rank // 2)], mine, square_loss, timeout_s=10)
    for each in (runner, again, runner):
        each.step(inputs, targets)
        plain_loop(oracle, list(inputs.tensor_split(3)), list(targets.tensor_split(3)))
    assert equal_bits(gradients(modules[rank // 2]), gradients(oracle[rank // 2]))


@pytest.mark.slow
def test_pipelines_run_side_by_side_in_subgroups_and_two_runners_share_a_group():
    run_ranks(in_a_subgroup, 4)


def run_ahead(rank: int, ranks: int, edges: str | None, dynamic: bool) -> None:
    """Many microbatches are sent before the first is used, both ways."""
    program = looped_bfs(2, 24, 2)
    modules, oracle = layers(4), layers(4)
    inputs, targets = (list(t.split(1)) for t in batch(24))
    runner = PipelineRunner(
        program,
        [Stage(modules[s], s) for s in program.stages_of(rank)],
        dist.group.WORLD,
        square_loss,
        timeout_s=10,
        edges=edges,
        dynamic_shapes=dynamic,
        lookahead=0,
    )
    for _ in range(2):
        runner.step(inputs, targets)
        plain_loop(oracle, inputs, targets)
    for s in program.stages_of(rank):
        assert equal_bits(gradients(modules[s]), gradients(oracle[s]))


@pytest.mark.parametrize(("edges", "dynamic"), [("groups", False), ("groups", True), (None, False)])
@pytest.mark.slow
def test_ranks_that_send_much_before_they_use_what_they_get_do_not_block_each_other(edges, dynamic):
    run_ranks(run_ahead, 2, edges, dynamic)


def evaluate_under_inference_mode_then_step(rank: int, ranks: int, edges: str | None) -> list[Tensor | None]:
    module = layers(ranks)[rank]
    runner = PipelineRunner(one_f_one_b(ranks, 4), Stage(module, rank), dist.group.WORLD, square_loss, edges=edges)
    with torch.inference_mode():
        runner.evaluate(*batch(8))
    for _ in range(2):
        runner.step(*batch(8))
    return gradients(module)


@pytest.mark.parametrize("edges", ["groups", None])
def test_an_evaluation_under_inference_mode_leaves_nothing_to_a_step(edges):
    plain = layers(2)
    for _ in range(2):
        plain_loop(plain, *(list(torch.tensor_split(part, 4)) for part in batch(8)))
    found = run_ranks(evaluate_under_inference_mode_then_step, 2, edges)
    assert all(equal_bits(mine, gradients(module)) for mine, module in zip(found, plain, strict=True))


def small_numbers(rank: int, ranks: int, edges: str | None, name: str) -> list[float]:
    """A type of few bits, from one rank to the next."""
    dtype = getattr(torch, name)

    class Casts(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return (x, x.to(dtype)) if rank == 0 else x

    class Reads(nn.Module):
        def forward(self, x: Tensor, small: Tensor) -> Tensor:
            assert small.dtype is dtype
            return small.float()

    stage = Stage(Casts() if rank == 0 else Reads(), rank)
    runner = PipelineRunner(one_f_one_b(ranks, 2), stage, dist.group.WORLD, edges=edges)
    return [
        value
        for output in runner.forward(torch.arange(8.0).reshape(4, 2)).outputs
        for value in output.flatten().tolist()
    ]


@pytest.mark.parametrize("edges", ["groups", None])
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "uint16"])
@pytest.mark.slow
def test_types_of_few_bits_travel(edges, name):
    expected = torch.arange(8.0).to(getattr(torch, name)).float().tolist()
    assert run_ranks(small_numbers, 2, edges, name)[1] == expected
