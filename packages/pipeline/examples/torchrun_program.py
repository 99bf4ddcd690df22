"""A model cut into stages over ranks: `torchrun --nproc-per-node 2 torchrun_program.py`; alone, in one process."""

import os

import torch
import torch.distributed as dist

from sixfold.pipeline import PipelineRunner, interleaved, stages_of_sequential

M, CHUNKS, WIDTH = 4, 2, 16


def main():
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)  # all ranks make the same model, and keep their stages of it
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    program = interleaved(max(2, ranks), M, CHUNKS)
    stages = stages_of_sequential(model, program.stages)
    mine = [stages[index] for index in program.stages_of(rank)] if ranks > 1 else stages
    group = dist.group.WORLD if ranks > 1 else None
    runner = PipelineRunner(program, mine, group, torch.nn.functional.mse_loss)
    optimizer = torch.optim.AdamW([p for stage in mine for p in stage.parameters()], lr=1e-2)
    print(f"rank {rank} has stages {[stage.index for stage in mine]} of {program.placement}")
    for step in range(10):
        torch.manual_seed(step)  # the first rank uses the inputs, the last one the targets
        x = torch.randn(2 * M, WIDTH)
        losses = runner.step(x, x.flip(1)).losses
        runner.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            print(f"step {step} loss {torch.stack(losses).mean():.4f}")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
