"""The page of results of `nox -s gpu`, from what its groups wrote. Text only: no device, no clock, no file.

machine, Outcome of each group --> page (this file) --> benchmarks/results/<date>-gpu-<device>.md
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from checks.gpu_groups import TOTAL_S, Group

LONGEST = 300  # columns of what a failure says
COLUMNS = ("group", "what it tells", "passed", "failed", "skipped", "not run", "seconds")
Figures = Mapping[
    str, Mapping[str, float | str]
]  # case --> name of a figure --> value; "error" or "left out": why none


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of a group.

    Attributes:
        status: of its process; None: not begun.
        stopped: its time was over.
        why: not begun because of this; or the last line of a process that failed.
        records: of its tests, as gpu_records.py writes them.
        figures: of a benchmark.
    """

    group: Group
    status: int | None = None
    seconds: float = 0.0
    stopped: bool = False
    why: str = ""
    records: Sequence[Mapping[str, Any]] = ()
    figures: Figures = field(default_factory=dict)

    @property
    def tests(self) -> dict[str, tuple[str, str]]:
        """Node --> "passed", "skipped", "failed", "lost" (its process ended in it) or "not run", and why."""
        found: dict[str, tuple[str, str]] = {}
        for record in self.records:
            for node in record.get("collected", ()):
                found[node] = ("not run", "")
            if "begun" in record:
                found[record["begun"]] = ("lost", "")
            elif "node" in record and found.get(record["node"], ("", ""))[0] != "failed":
                found[record["node"]] = (record["outcome"], record["why"])
        return found

    @property
    def green(self) -> bool:
        """All of it ran, nothing failed, and not all was skipped."""
        of_tests = {outcome for outcome, _ in self.tests.values()}
        some = self.measured > 0 if self.group.benchmark else "passed" in of_tests
        whole = of_tests <= {"passed", "skipped"} and not any("error" in values for values in self.figures.values())
        return self.status == 0 and not self.stopped and some and whole

    @property
    def measured(self) -> int:
        """Cases of a benchmark that have figures."""
        return sum(not {"error", "left out"} & values.keys() for values in self.figures.values())


def slug(device: str) -> str:
    """A device's name as a part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def page(date: str, machine: Mapping[str, Any], command: str, outcomes: Sequence[Outcome]) -> str:
    """Markdown, in the order of the groups."""
    lines = [f"# One GPU, {date}: {machine['device']}", "", *_machine(machine), "", f"    {command}", ""]
    lines += [f"The groups in the order in which they ran, {TOTAL_S} s at most in all.", ""]
    lines += [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += map(_row, outcomes)
    for title, found in (("Failed", _failed(outcomes)), ("Skipped", _skipped(outcomes)), ("Not run", _left(outcomes))):
        if found:
            lines += ["", f"## {title}", "", *found]
    for one in outcomes:
        if one.figures:
            lines += ["", f"## {one.group.name}", "", f"    {one.group.by_hand()}", "", *_table(one.figures)]
    return "\n".join(lines) + "\n"


def _machine(machine: Mapping[str, Any]) -> list[str]:
    changed = ", with changes that are not committed" if machine["changed"] else ""
    return [
        "- {devices} x {device}, {gib:.0f} GiB, compute capability {capability}; {cores} cores".format_map(machine),
        "- Python {python}, torch {torch}, CUDA {cuda}, NCCL {nccl}, torchao {torchao}".format_map(machine),
        f"- commit {machine['commit']}{changed}",
    ]


def _row(one: Outcome) -> str:
    counts = Counter(outcome for outcome, _ in one.tests.values())
    if one.status is None:
        cells = ["", "", "", "all", ""]
    elif one.group.benchmark:
        cells = [f"{one.measured} of {len(one.figures)} cases", _fault(one), "", "", f"{one.seconds:.0f}"]
    else:
        failed = counts["failed"] + counts["lost"]
        cells = [f"{counts['passed']}", f"{failed or _fault(one)}", f"{counts['skipped'] or ''}"]
        cells += [f"{counts['not run'] or ''}", f"{one.seconds:.0f}"]
    return f"| {' | '.join([one.group.name, one.group.tells, *cells])} |"


def _fault(one: Outcome) -> str:
    """Of a process without a test that says it."""
    if one.stopped:
        return "stopped"
    return f"status {one.status}" if one.status else ""


def _failed(outcomes: Sequence[Outcome]) -> list[str]:
    found = []
    for one in outcomes:
        if one.status is None:
            continue
        for node, (outcome, why) in one.tests.items():
            if outcome == "failed":
                found.append(f"- `{node}`: {_short(why)}")
            elif outcome == "lost":
                ended = f"its time was over after {one.seconds:.0f} s" if one.stopped else f"status {one.status}"
                found.append(f"- `{node}`: the process ended in it: {ended}")
        told = any(outcome in ("failed", "lost") for outcome, _ in one.tests.values())
        if one.status and not told and not one.stopped:
            found.append(f"- {one.group.name}: status {one.status}: {_short(one.why)}")
    return found


def _skipped(outcomes: Sequence[Outcome]) -> list[str]:
    reasons = Counter(why for one in outcomes for outcome, why in one.tests.values() if outcome == "skipped")
    return [f"- {count}: {_short(why)}" for why, count in reasons.items()]


def _left(outcomes: Sequence[Outcome]) -> list[str]:
    found = []
    for one in outcomes:
        left = sum(outcome == "not run" for outcome, _ in one.tests.values())
        if one.status is None:
            found.append(f"- {one.group.name}: {one.why}: `{one.group.by_hand()}`")
        elif one.stopped or left:
            why = f"stopped after {one.seconds:.0f} s" if one.stopped else f"its process ended with status {one.status}"
            what = f"{left} tests" if left else "what follows in it"
            found.append(f"- {one.group.name}: {what}: {why}: `{one.group.by_hand()}`")
    return found


def _table(figures: Figures) -> list[str]:
    names = list(dict.fromkeys(name for values in figures.values() for name in values))
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for case, values in figures.items():
        cells = [_cell(values.get(name, "")) for name in names]
        lines.append(f"| {' | '.join([case, *cells])} |")
    return lines


def _cell(value: float | str) -> str:
    if isinstance(value, str):
        return _short(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _short(text: str) -> str:
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} ..."
