"""The process that keeps a run alive on one machine: it leads, and it has the members.

    train.py --> keep_alive (this file) --> Leader: what comes next --> Processes: who does it

For several machines there is nodes.py.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from sixfold.gpt.elastic.heartbeat import Slots
from sixfold.gpt.elastic.leader import Leader
from sixfold.gpt.elastic.meeting import Files
from sixfold.gpt.elastic.member import Prepare, Target
from sixfold.gpt.elastic.next_generation import Course
from sixfold.gpt.elastic.processes import Processes
from sixfold.gpt.launch.spawn import RankError, stop_requests, warm_up

POLL_S = 0.1


def keep_alive(
    target: Target,
    ranks: int,
    args: tuple[Any, ...] = (),
    *,
    prepare: Prepare | None = None,
    spares: int,
    attempts: int,
    hung_after_s: float,
    sizes: tuple[int, ...] = (),
    replaces: bool = True,
    asked_ranks: Callable[[], int | None] = lambda: None,
    watch: Callable[[], None] | None = None,
    tell: Callable[[str], None] | None = None,
) -> int:
    """Run ``target(generation, heartbeat, *args)`` in ``ranks`` processes; go on when one is lost.

    A member that is lost is replaced by one of ``spares``, or a new process; all the others drop what they have and
    call ``target`` again, in the same processes. Signals that ask for a stop are forwarded as `start_ranks` does.

    Args:
        target: module-level function; returns 0, or 143 if it was asked to stop and has saved.
        prepare: module-level function; each process calls ``prepare(*args)`` before all else, spares too.
        attempts: recoveries in a row without a step that was not done before.
        hung_after_s: how long a process may be stopped, and a step be behind; see heartbeat.py.
        sizes, replaces: numbers of ranks that a generation may have, and whether lost ones are replaced by new
            processes; see [Note: fewer and more ranks].
        asked_ranks: the one of ``sizes`` that was asked for since the last call, or None.
        watch: called here about ten times a second. tell: is given a line for each event.
    Returns:
        0 if every rank finished, 143 if they were asked to stop and every step that they did is saved.
    Raises:
        RankError: the run was given up; the text is the cause.
    """
    with tempfile.TemporaryDirectory(prefix="sixfold-") as folder, stop_requests() as stop:
        warm_up()
        slots = Slots(Path(folder) / "heartbeats")
        processes = Processes(slots=slots, target=target, args=args, prepare=prepare, hung_after_s=hung_after_s)
        leader = Leader(
            course=Course(ranks=ranks, spares=spares, attempts=attempts, sizes=sizes or (ranks,), replaces=replaces),
            nodes={0: processes},
            meetings=Files(Path(folder)),
            hung_after_s=hung_after_s,
            asked_ranks=asked_ranks,
            tell=tell or (lambda text: None),
        )
        try:
            leader.begin()
            while leader.end is None:
                wait(processes.handles(), timeout=POLL_S)
                leader.look(time.monotonic(), stop.asked)
                if watch is not None:
                    watch()
        finally:
            processes.close(at_once=leader.end is None or leader.end.at_once)
            slots.close()
        if leader.end.failure is not None:
            raise RankError(leader.end.failure)
        return leader.end.status
