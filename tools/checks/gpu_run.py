"""`nox -s gpu`: the groups one after the other, each ended by its time, and the page of results after each.

    gpu_groups.py --> run_gpu (this file) --> .nox/gpu/<group>.log, .json --> gpu_page.py --> benchmarks/results/

The page is there from the start and says of each group that it was not run: whatever ends the session, what is
written is true.
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from checks.gpu_groups import GROUPS, LEAST_S, Group, ends_of
from checks.gpu_page import Outcome, page, slug
from checks.places import ROOT

FOLDER = ROOT / ".nox" / "gpu"
RESULTS = ROOT / "benchmarks" / "results"
PROBE_S = 60
PROBE = """
import importlib.util, json, os, platform, torch
found = {"devices": torch.cuda.device_count() if torch.cuda.is_available() else 0}
if found["devices"]:
    one = torch.cuda.get_device_properties(0)
    found |= {"device": one.name, "gib": one.total_memory / 2**30, "capability": f"{one.major}.{one.minor}"}
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
ao = importlib.util.find_spec("torchao")
if ao is not None:
    import importlib.metadata
    ao = importlib.metadata.version("torchao")
print(json.dumps(found | {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__,
    "cuda": torch.version.cuda, "torchao": ao or "none"}))
"""

Run = Callable[[Group, Sequence[str], float], Outcome]


def machine_of(python: str, variables: Mapping[str, str]) -> dict[str, Any]:
    """What the page says of the machine; ``devices`` is 0 where torch sees no GPU.

    Raises:
        RuntimeError: this Python cannot load torch.
    """
    asked = subprocess.run(
        [python, "-c", PROBE], env={**os.environ, **variables}, capture_output=True, text=True, check=False,
        timeout=PROBE_S,
    )  # fmt: skip
    if asked.returncode:
        raise RuntimeError(f"{python} cannot load torch: {last_line(asked.stderr)}")
    found: dict[str, Any] = json.loads(asked.stdout.splitlines()[-1])
    return found | {"commit": _git("rev-parse", "--short", "HEAD") or "unknown", "changed": bool(_git("status", "-s"))}


def run_gpu(
    python: str,
    variables: Mapping[str, str],
    of_pytest: Sequence[str],
    machine: Mapping[str, Any],
    *,
    command: str,
    date: str,
    results: Path = RESULTS,
    groups: Sequence[Group] = GROUPS,
    run: Run | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Path, list[str]]:
    """Run the groups; the page, which is a new file, and the names of groups of which not all passed.

    Args:
        of_pytest: the user's arguments; with any the benchmarks, which do not take them, are not run.
        command: what the user wrote.
    """
    path = new_file(results, f"{date}-gpu-{slug(machine['device'])}")
    start = clock()
    outcomes = [Outcome(group=group, why="not reached") for group in groups]
    variables = {**variables, "PYTHONPATH": os.pathsep.join([str(ROOT / "tools"), variables.get("PYTHONPATH", "")])}
    run = run or (lambda group, words, limit_s: run_group(group, words, limit_s, variables))
    path.write_text(page(date, machine, command, outcomes))
    for place, (group, end) in enumerate(zip(groups, ends_of(groups), strict=True)):
        left = end - (clock() - start)
        if group.benchmark and of_pytest:
            outcome = Outcome(group=group, why=f"pytest was given {' '.join(of_pytest)}")
        elif left < LEAST_S:
            outcome = Outcome(group=group, why=f"{max(left, 0):.0f} s were left")
        else:
            outcome = run(group, group.command(python, out_of(group), of_pytest), left)
        outcomes[place] = outcome
        path.write_text(page(date, machine, command, outcomes))
    meant = [one for one in outcomes if not (of_pytest and one.group.benchmark)]
    return path, [one.group.name for one in meant if not one.green]


def run_group(group: Group, words: Sequence[str], limit_s: float, variables: Mapping[str, str]) -> Outcome:
    """One process, ended with all that it started when its time is over; its output is shown as it comes."""
    out, log = out_of(group), out_of(group).with_suffix(".log")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    start, stopped = time.monotonic(), False
    print(f"==> {group.name}, {limit_s:.0f} s at most: {group.by_hand()}", flush=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, cwd=ROOT, env={**os.environ, **variables}, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            stopped = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what it left behind
            process.wait()
    text = log.read_text(errors="replace")
    print(text, flush=True)
    written = out.read_text() if out.exists() else ""
    seconds = time.monotonic() - start
    common: dict[str, Any] = {"group": group, "status": process.returncode, "seconds": seconds, "stopped": stopped}
    if group.benchmark:
        return Outcome(**common, why=last_line(text), figures=json.loads(written or "{}"))
    return Outcome(**common, why=last_line(text), records=whole_lines(written))


def whole_lines(text: str) -> list[dict[str, Any]]:
    """The JSON objects of whole lines: the last may have been cut."""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def out_of(group: Group) -> Path:
    return FOLDER / f"{slug(group.name)}.json"


def new_file(folder: Path, stem: str) -> Path:
    """An empty file that was not there: nothing is written over."""
    for number in itertools.count(1):
        path = folder / (f"{stem}.md" if number == 1 else f"{stem}-{number}.md")
        with contextlib.suppress(FileExistsError):
            path.open("x").close()
            return path
    raise AssertionError("numbers do not end")


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def _git(*words: str) -> str:
    asked = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=PROBE_S)
    return asked.stdout.strip()
