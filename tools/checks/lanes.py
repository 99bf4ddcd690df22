"""Sessions beside each other: each a nox of its own, in lanes that take the next turn as they come free.

turns_of_ci --> lanes --> run_in_lane: session by session (this file) --> .nox/ci/<session>.log
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from checks.commands import AFTER_ISOLATION
from checks.places import CORES_FOR_ALL, LOGS, PACKAGES, ROOT, SESSION_DEADLINE_S, TURNS, tests_of


def turns_of_ci() -> list[list[list[str]]]:
    """What follows ``nox -s``, in turns of one lane: those that take longest first, so that the lanes end together.

    The tests of a package run alone where it is installed alone; what was skipped there, or looked for a module that
    is not there, follows in the shared venv. Without the file, because isolation broke early, all of them do. Those of
    several ranks run in the same process, but of the two packages with most of them beside all that in another lane.
    """
    by_files = sorted(PACKAGES, key=lambda name: -len(list(tests_of(name).rglob("test_*.py"))))
    large, others = by_files[:2], by_files[2:]
    apart = [[[f"isolation({name})"], [f"tests({name})", "--", AFTER_ISOLATION]] for name in large]
    together = [[[f"isolation({name})"], [f"rest({name})", "--", AFTER_ISOLATION]] for name in others]
    first, second, *rest_of_them = together  # the first begins without the shared venv, while it is installed
    # Seconds of a run in which all of them were beside others: 395 and 371, then 340 and 267, ranks 227 and 96, 177.
    longest = [second, *reversed(apart), *([[f"ranks({name})"]] for name in large), [["integration"]]]
    return [first, *longest, *reversed(rest_of_them), [["types"]], [["ranks(ranktest)"]], [["lint"]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A command, and where its output goes until it has ended."""

    name: str
    command: tuple[str, ...]
    logs: Path
    variables: Mapping[str, str] = field(default_factory=dict)  # beside those of this process
    success: tuple[int, ...] = (0,)


def session_step(arguments: Sequence[str], turn: str = "") -> Step:
    """One session in a nox of its own: what follows ``nox -s``; of its slow tests the part ``turn``, as 2/4, or all."""
    nox = (sys.executable, "-m", "nox", "--noxfile", str(ROOT / "noxfile.py"), "--session")
    return Step(name=arguments[0], command=(*nox, *arguments), logs=LOGS, variables={"SIXFOLD_TURN": turn})


def turn_of_ci(cores: int, head: str | None = None) -> str:
    """Which part of the slow tests ci runs at a commit (its id; without one, that of ROOT): "" is all of them.

    By the commit, so that a failure comes again where it came, and another part is run after each change.
    """
    if cores >= CORES_FOR_ALL:
        return ""
    if head is None:
        asked = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
        )
        head = asked.stdout.strip()
    return f"{int(head[:8] or '0', 16) % TURNS}/{TURNS}"


def run_turns(turns: Iterable[Iterable[Step]], lanes: int) -> list[str]:
    """Turn by turn as lanes come free; the names of the steps that failed."""
    with ThreadPoolExecutor(lanes) as pool:
        running = [pool.submit(run_in_lane, turn) for turn in turns]
        return [name for done in as_completed(running) for name in done.result()]


def run_in_lane(turn: Iterable[Step]) -> list[str]:
    """Steps one after the other, whatever the first comes to: the names of those that failed."""
    failed = []
    for step in turn:
        status, seconds, log = run_step(step)
        print(f"{log.read_text(errors='replace')}\n==> {step.name}: status {status} after {seconds:.0f} s", flush=True)
        if status not in step.success:
            failed.append(step.name)
    return failed


def run_step(step: Step) -> tuple[int, float, Path]:
    """One step: its status, seconds, and the file with its output."""
    step.logs.mkdir(parents=True, exist_ok=True)
    log, start = step.logs / f"{step.name}.log", time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            step.command,
            cwd=ROOT,
            env={**os.environ, **step.variables},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(SESSION_DEADLINE_S)
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL
            out.write(f"\nkilled: still running after {SESSION_DEADLINE_S:.0f} s\n".encode())
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what a step may have left behind
            process.wait()
    return status, time.monotonic() - start, log
