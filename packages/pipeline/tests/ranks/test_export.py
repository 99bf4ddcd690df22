"""PyTorch's unmodified runtime executes our exports, with the gradients of a single process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pipeline_helpers import WIDTH, batch, equal_bits, gradients, layers, plain_loop, square_loss
from schedule_helpers import FLUSH

from ranktest import run_ranks
from sixfold.pipeline.passes import lower, unshard

M = 4  # a power of two: dividing each loss by it, or the sum of gradients, are the same bits
SOME = {
    2: [("interleaved", "compute_comms"), ("zb_v", "compute_only")],
    4: [("dualpipe_v", "compute_comms")],
}


def run_exports(rank: int, ranks: int, exports: list[tuple[str, str]], folder: str) -> None:
    """Run each (schedule, form) and compare the gradients of the local stages with the plain loop's."""
    stages_ = pytest.importorskip("torch.distributed.pipelining", reason="torch's runtime is what reads the export")
    runtimes = pytest.importorskip("torch.distributed.pipelining.schedules", reason="as above")
    inputs, targets = batch(2 * M)
    for name, form in exports:
        program = FLUSH[name](ranks, M)
        oracle, modules = layers(program.stages), layers(program.stages)
        plain_loop(oracle, list(inputs.tensor_split(M)), list(targets.tensor_split(M)))
        file = Path(folder) / f"{name}.{form}.{rank}.csv"
        exported = program if form == "compute_only" else lower(unshard(program))
        file.write_text(exported.to_csv(), newline="")
        examples = [torch.zeros(2, WIDTH, requires_grad=s > 0) for s in range(program.stages + 1)]
        stages = [
            stages_.PipelineStage(
                modules[s],
                s,
                program.stages,
                torch.device("cpu"),
                input_args=(examples[s],),
                output_args=(examples[s + 1],),
            )
            for s in program.stages_of(rank)
        ]
        runtime = runtimes._PipelineScheduleRuntime(stages, M, square_loss)
        runtime._load_csv(str(file), format=form)
        losses: list[torch.Tensor] = []
        runtime.step(
            *([inputs] if 0 in program.stages_of(rank) else []),
            target=targets if program.placement[-1] == rank else None,
            losses=losses,
        )
        for s in program.stages_of(rank):
            assert equal_bits(gradients(modules[s]), gradients(oracle[s])), f"{name}, {form}: stage {s} differs"
    dist.barrier()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.slow
def test_pytorchs_runtime_executes_our_exports_with_the_gradients_of_one_process(ranks, tmp_path, pytestconfig):
    exports = [(name, form) for name in FLUSH for form in ("compute_only", "compute_comms")]
    if not pytestconfig.getoption("--all-exports", False):
        exports = SOME[ranks]
    run_ranks(run_exports, ranks, exports, str(tmp_path), timeout=120)
