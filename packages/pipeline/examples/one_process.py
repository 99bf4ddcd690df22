"""Four stages in one process: a schedule, its picture in time, and three training steps."""

import torch

from sixfold.pipeline import Costs, PipelineRunner, Stage, draw, interleaved, simulate, verify

program = interleaved(ranks=2, microbatches=5, chunks=2)
verify(program)
print(draw(simulate(program, Costs.per_rank(program))))

modules = [torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()) for _ in range(program.stages)]
runner = PipelineRunner(program, [Stage(m, i) for i, m in enumerate(modules)], loss_fn=torch.nn.functional.mse_loss)
optimizer = torch.optim.SGD((p for m in modules for p in m.parameters()), lr=0.5)
x = torch.randn(20, 16)
for step in range(3):
    optimizer.zero_grad()
    losses = runner.step(x, x.tanh()).losses
    optimizer.step()
    print(f"step {step}: loss {torch.stack(losses).mean():.4f}")
