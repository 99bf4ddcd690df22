"""Train, measure, fit, plan, and go on with the better program: stages of uneven costs on several ranks.

    python measure_plan_run.py                                     # ranks are threads of this process
    torchrun --nproc-per-node 4 measure_plan_run.py                # ranks are processes

Each stage sleeps for the time of its forward, input gradient and weight gradient, which needs no core: a laptop shows
the bubble that GPUs would have. Every schedule of the package trains a few steps; then zb_v's timeline is measured,
costs are fitted to it, a program is planned for them and trained with from the next step on. Bubbles are of the best
step, over the mean work of a rank, so that schedules which place the stages differently compare.
"""

import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from sixfold.pipeline import Costs, PipelineRunner, Stage, defer_weight_grad, draw, replan, schedules, simulate
from sixfold.pipeline.transport import threads


class Sleep(torch.autograd.Function):
    """Takes ``forward_s`` in the forward, and ``backward_s`` in the backward if its input wants a gradient."""

    @staticmethod
    def forward(ctx, x, forward_s, backward_s):
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.backward_s)
        return gradient, None, None


class Layer(torch.nn.Module):
    """One stage: a number to train, and the three times."""

    def __init__(self, forward_s, input_s, weight_s):
        super().__init__()
        self.times = forward_s, input_s, weight_s
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        x = Sleep.apply(x, *self.times[:2])

        def weight_gradient(gradient):  # called by W, or by B
            time.sleep(self.times[2])
            return ((gradient * x.detach()).sum(),)

        return defer_weight_grad((self.weight,), weight_gradient, x * self.weight.detach())


def layers(ranks, unit_s):
    """F, I and W of two layers per rank: a cheap embedding, whose input needs no gradient, and an expensive head."""
    costs = [(0.6, 0.0, 0.9), *[(1.0, 1.3, 0.7)] * (2 * ranks - 2), (1.5, 1.8, 1.2)]
    return [tuple(unit_s * time for time in row) for row in costs]


def stages_of(program, rank, ranks, unit_s):
    """The rank's stages; where a program has one stage per rank, each is two layers."""
    each = layers(ranks, unit_s)
    parts = len(each) // program.stages
    return [
        Stage(torch.nn.Sequential(*(Layer(*times) for times in each[parts * s : parts * (s + 1)])), s)
        for s in program.stages_of(rank)
    ]


def train(rank, ranks, group, options):
    """All of it, on one rank; rank 0 prints."""
    work_s = options.microbatches * sum(map(sum, layers(ranks, options.unit_s))) / ranks
    x, target = torch.randn(options.microbatches, 4), torch.zeros(options.microbatches, 4)
    bubbles = {}

    def measured(name, runner, program=None):
        """Train some steps, note the best bubble; the timeline of the best step, on rank 0."""
        runner.step(x, target, program=program)
        found = [runner.gather_timeline(runner.step(x, target, program=program)) for _ in range(options.steps)]
        if rank > 0:
            return None
        best = min(found, key=lambda timeline: timeline.makespan)
        bubbles[name] = best.makespan / work_s - 1
        print(f"{name:24s} {1e3 * best.makespan:7.1f} ms {bubbles[name]:7.3f}", flush=True)
        return best

    def runner_of(program):
        stages = stages_of(program, rank, ranks, options.unit_s)
        return PipelineRunner(program, stages, group, torch.nn.functional.mse_loss, profile=True, timeout_s=60)

    if rank == 0:
        print(f"{ranks} ranks, {options.microbatches} microbatches: best of {options.steps} steps, measured bubble")
    for schedule in schedules.registered():
        chunks = schedule.chunks or 2
        if schedule.flushed and schedule.name != "naive":
            measured(schedule.name, runner_of(schedule.with_chunks(ranks, options.microbatches, chunks)))

    program = schedules.by_name("zb_v").make(ranks, options.microbatches)
    runner = runner_of(program)
    timeline, found = measured("zb_v, measured again", runner), None
    if rank == 0:
        costs = Costs.fit(timeline)
        found = replan(program, costs, memory_cap=1.25 * ranks, time_limit_s=options.plan_s)
        print(f"fitted: F {[f'{1e3 * s:.1f}' for s in costs.forward]} ms; planned in {options.plan_s:g} s")
    agreed = runner.agree(None if found is None else found.program, source=0)
    timeline = measured("planned", runner, agreed)
    if rank == 0:
        print(draw(simulate(agreed, costs), beside=timeline))
        best = min(set(bubbles) - {"planned"}, key=bubbles.get)
        print(f"planned: bubble {bubbles['planned']:.3f}; the best schedule shipped, {best}, {bubbles[best]:.3f}")


def main():
    """As threads, or as torchrun's processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4, help="threads; torchrun says how many processes")
    parser.add_argument("--microbatches", type=int, default=6)
    parser.add_argument("--unit-s", type=float, default=0.003, help="seconds of a usual forward of one layer")
    parser.add_argument("--steps", type=int, default=2, help="of which the best counts")
    parser.add_argument("--plan-s", type=float, default=1.0, help="seconds to plan")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        train(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, options)
        dist.destroy_process_group()
        return
    groups = threads(options.ranks)
    with ThreadPoolExecutor(options.ranks) as pool:
        list(pool.map(lambda rank: train(rank, options.ranks, groups[rank], options), range(options.ranks)))


if __name__ == "__main__":
    main()
