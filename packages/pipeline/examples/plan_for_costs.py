"""Plan for measured times and a memory cap: the last of four stages has an expensive head."""

from sixfold.pipeline import Costs, ScheduleError, draw, interleaved, plan, simulate, zb_v

costs = Costs(
    forward=[1.0, 1.0, 1.0, 1.6],
    backward_input=[1.6, 1.6, 1.6, 2.2],
    backward_weight=[0.6, 0.6, 0.6, 1.0],
    hop=0.1,
    activation=[1.0] * 4,
)
found = plan(costs, ranks=2, microbatches=4, memory_cap=5, time_limit_s=1.0)
print(draw(found.timeline))
print(f"stages on ranks {found.program.placement}, makespan {found.timeline.makespan:.1f}")
print(f"no schedule takes less than {found.lower_bound:.1f}: at most {100 * found.gap:.1f} % could be won")
for known in (interleaved(2, 4), zb_v(2, 4)):
    print(f"{known.name} takes {simulate(known, costs).makespan:.1f}")
try:
    plan(costs, ranks=2, microbatches=4, memory_cap=1)
except ScheduleError as error:
    print(error)
