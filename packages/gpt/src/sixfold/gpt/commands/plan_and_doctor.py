"""The verbs that need no run: ``plan`` and ``doctor``. They are parsed here; what they do is elsewhere.

    cli.py --> add_verbs (this file) --> report.py, doctor.py, measured_run.py

Imports nothing of them until one is asked for.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from sixfold.gpt.commands.arguments import above_zero, add_configuration, at_least_one, configuration, seconds, share

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]


def add_verbs(verbs: Verbs) -> None:
    """``plan`` and ``doctor`` to the parser of the command."""
    plan = verbs.add_parser(
        "plan", help="estimate memory, traffic and time of a layout; needs no GPU, no ranks, no torch"
    )
    add_configuration(plan)
    plan.add_argument(
        "--world", type=at_least_one, metavar="N", help="number of ranks (default: product of the degrees)"
    )
    plan.add_argument(
        "--memory-gb", type=above_zero, metavar="G", help="memory of a rank in 10^9 bytes (default: the device's)"
    )
    plan.add_argument(
        "--tflops", type=above_zero, metavar="F", help="TFLOP/s that matrix products achieve (default: the device's)"
    )
    plan.add_argument("--gbps", type=above_zero, metavar="B", help="Gbit/s of the network per device")
    plan.add_argument("--device", metavar="NAME", help="a100, h100, h200, b200 or cpu (default: by run.device)")
    plan.add_argument("--machine", metavar="FILE", help="plan for the machine that `sixfold doctor` measured into FILE")
    plan.add_argument("--search", action="store_true", help="list the layouts of so many ranks that fit, best first")
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    _add_failures(plan)
    plan.set_defaults(run=_plan)

    doctor = verbs.add_parser("doctor", help="check and measure this machine, or an allocation under torchrun or srun")
    doctor.add_argument(
        "--ranks", type=at_least_one, metavar="N", help="ranks to start on this machine (default: one per GPU, else 2)"
    )
    doctor.add_argument("--dir", default=".", metavar="FOLDER", help="folder of runs, to check (%(default)s)")
    doctor.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    doctor.add_argument(
        "--timeout", type=above_zero, default=30.0, metavar="S", help="longest wait for another rank (%(default)s)"
    )
    doctor.add_argument(
        "--run",
        type=Path,
        dest="run_dir",
        metavar="RUN",
        help="measure a run folder instead: seconds of steps, saves and recoveries, for `sixfold plan --mtbf-hours`",
    )
    doctor.add_argument(
        "--out",
        default="sixfold-machine.json",
        metavar="FILE",
        help="results, for `sixfold plan --machine` (%(default)s)",
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.set_defaults(run=_doctor)


_COSTS = {
    "snapshot": "added to each step by its snapshot in memory",
    "save": "for which a checkpoint blocks training",
    "written": "from a checkpoint's begin until it is whole",
    "detect": "from a failure until it is seen",
    "recover": "from then until the next step begins",
    "restart": "the same, where the state comes from a checkpoint (default: --recover-seconds)",
}


def _add_failures(plan: argparse.ArgumentParser) -> None:
    group = plan.add_argument_group("failures", "the share of time in which steps are done that stay, and best saves")
    rate = group.add_mutually_exclusive_group()
    rate.add_argument("--mtbf-hours", type=above_zero, metavar="H", help="mean time between failures of the whole job")
    rate.add_argument("--rank-mtbf-hours", type=above_zero, metavar="H", help="the same of one rank")
    group.add_argument("--step-seconds", type=above_zero, metavar="S", help="of a step (default: as planned)")
    for name, what in _COSTS.items():
        group.add_argument(f"--{name}-seconds", type=seconds, metavar="S", help=f"seconds {what}")
    group.add_argument(
        "--from-checkpoint", type=share, metavar="P", help="share of failures that memory cannot mend, 0 to 1"
    )


def _plan(args: argparse.Namespace) -> int:
    from sixfold.gpt.plan.failure_report import FailureFlags
    from sixfold.gpt.plan.layout import PlannedConfig
    from sixfold.gpt.plan.report import run

    failures = FailureFlags(**{field.name: getattr(args, field.name) for field in fields(FailureFlags)})
    print(
        run(
            configuration(args, PlannedConfig),
            world=args.world,
            memory_gb=args.memory_gb,
            tflops=args.tflops,
            gbps=args.gbps,
            device=args.device,
            machine=args.machine,
            failures=failures if failures.asks else None,
            look_further=args.search,
            as_object=args.json,
        )
    )
    return 0


def _doctor(args: argparse.Namespace) -> int:
    if args.run_dir is not None:
        from sixfold.gpt.commands import measured_run

        return measured_run.run(args.run_dir, as_object=args.json)
    from sixfold.gpt.machine.doctor import run
    from sixfold.gpt.machine.local_checks import Options

    options = Options(folder=args.dir, device=args.device, timeout_s=args.timeout)
    return run(options, ranks=args.ranks, out=args.out, as_object=args.json)
