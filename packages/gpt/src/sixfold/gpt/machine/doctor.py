"""``sixfold doctor``: is this machine, or this allocation, fit to train, and how fast is it?

    local_checks.py + what ranks measure (rank_checks.py) --> findings, machine (this file)
                                          --> a line each, sixfold-machine.json --> sixfold plan --machine

No torch here: what is wrong with limits is told although ranks cannot be started. Under a launcher every rank examines
itself and rank 0 speaks; else ranks are started here. Every wait has a deadline.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from sixfold.gpt.errors import ConfigError, TrainError
from sixfold.gpt.launch.rendezvous import detect
from sixfold.gpt.launch.spawn import start_ranks
from sixfold.gpt.machine.local_checks import FAIL, OK, WARN, Finding, Options, Report, local_checks

_AFTER_REPORT_S = 10.0  # for the other ranks to end
_RANKS_REMEDY = "look at what stands above, and whether python -c 'import torch' works"


def examine_here(options: Options, ranks: int) -> Report:
    """Look at this machine, with ``ranks`` ranks that are started here."""
    findings = local_checks(options.folder)
    with tempfile.TemporaryDirectory(prefix="sixfold-doctor-") as folder:
        path = Path(folder) / "report.json"
        try:
            start_ranks(_rank_here, ranks, (options, str(path)), watch=_ends(path, 20 * options.timeout_s))
        except (TrainError, OSError) as error:
            if not path.exists():
                findings.append(Finding(FAIL, f"{ranks} ranks on this machine", _last_line(error), _RANKS_REMEDY))
        if path.exists():
            found = json.loads(path.read_text())
            return Report(findings=findings + [Finding(**one) for one in found["findings"]], machine=found["machine"])
    return Report(findings=findings, machine=None)


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def _ends(path: Path, seconds: float) -> Callable[[], None]:
    """Ends ranks that are still there a while after the report, or after all time for it."""
    ends: list[float] = [time.monotonic() + seconds]

    def watch() -> None:
        if path.exists():
            ends[0] = min(ends[0], time.monotonic() + _AFTER_REPORT_S)
        if time.monotonic() > ends[0]:
            raise TrainError(f"ranks have not ended within {seconds:g} s")

    return watch


def _rank_here(options: Options, path: str) -> int:
    """Body of a rank that was started here."""
    from sixfold.gpt.machine.rank_checks import examine_rank

    report = examine_rank(options)
    if report is not None:
        found = {"findings": [asdict(one) for one in report.findings], "machine": report.machine}
        half = Path(f"{path}.half")
        half.write_text(json.dumps(found))
        half.rename(path)
    return 0


def run(options: Options, *, ranks: int | None, out: str, as_object: bool) -> int:
    """What ``sixfold doctor`` does; its exit status."""
    _refuse_foreign(Path(out))
    if detect(os.environ) is None:
        report: Report | None = examine_here(options, ranks or _default_ranks())
    else:
        from sixfold.gpt.machine.rank_checks import examine_rank

        report = examine_rank(options, local=True)
    if report is None:  # another rank speaks
        return 0
    found = report.as_json()
    if report.machine is not None:
        Path(out).write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found) if as_object else _text(report, out))
    return 1 if report.failed else 0


def _refuse_foreign(out: Path) -> None:
    """Refuse to replace what doctor did not write, before minutes are spent."""
    try:
        found = json.loads(out.read_bytes())
    except FileNotFoundError:
        return
    except (OSError, ValueError):
        found = None
    if not (isinstance(found, dict) and {"findings", "machine"} <= found.keys()):
        raise ConfigError(f"{out} exists and doctor did not write it; choose another --out, or remove it")


def _default_ranks() -> int:
    """A rank for each GPU, else two: the least that has something to say to each other."""
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return gpus or 2


def _text(report: Report, out: str) -> str:
    lines: Sequence[str] = [str(one) for one in report.findings]
    counts = {level: sum(one.level == level for one in report.findings) for level in (OK, WARN, FAIL)}
    wrote = "" if report.machine is None else f"; sixfold plan CONFIG --machine {out}"
    return "\n".join([*lines, f"{counts[OK]} ok, {counts[WARN]} warn, {counts[FAIL]} fail{wrote}"])
