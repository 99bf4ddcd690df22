"""The page's questions, answered by sixfold.pipeline.

    Request --> schedule, plan or the reader's program --> verify, simulate, draw (this file) --> JSON of the page

Every number, picture, proof and error text is the package's own. One function per question: ``menu``, ``answer``,
``table`` and ``export``; ``reply`` takes the page's JSON to one of them and its result, or the error's text, back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from inspect import getdoc, getmodule
from typing import Any

from explorer.examples import EXAMPLES
from explorer.marked import draw_marked, rows_of_csv
from explorer.request import ACTIONS, CSV, LIMITS, OWN, PLAN, Request
from explorer.words import words
from sixfold.pipeline import (
    Costs,
    Plan,
    Program,
    ScheduleError,
    Timeline,
    draw,
    passes,
    plan,
    schedules,
    simulate,
    verify,
)
from sixfold.pipeline.simulation.memory import with_rounding

__all__ = ["answer", "export", "menu", "reply", "table"]

_SEARCH_S = 2.0
_FIGURES = ("makespan", "ideal", "bubble_over_ideal", "bubble_over_total", "span_over_ideal")
_EXTRA = ("chunks", "waves", "steps")
_GROUPS = ("Backward whole", "Backward split in I and W", "No flush between batches")


def reply(question: str) -> str:
    """``{"ask": name, "request": {...}, ...}`` -> ``{"answer": ...}`` or ``{"refused": ...}``, both as JSON."""
    asked = json.loads(question)
    try:
        return json.dumps({"answer": _QUESTIONS[asked["ask"]](asked)}, allow_nan=False)
    except ScheduleError as error:
        return json.dumps({"refused": _refusal(error)})


def menu() -> dict[str, Any]:
    """What the page's controls offer: the schedules with what they take, the bounds, the values to begin with."""
    entries = [
        {
            "name": schedule.name,
            "label": schedule.name,
            "group": _group(schedule),
            "takes": [name for name in _EXTRA if name in schedule.arguments],
            "summary": (getdoc(getmodule(schedule.make)) or "").split("\n\n")[0].replace("\n", " "),
        }
        for schedule in schedules.registered()
    ]
    entries.sort(key=lambda entry: _GROUPS.index(entry["group"]))
    search = f"The best order that {_SEARCH_S:g} s of search find for these costs under the cap."
    own = "A program of yours: PyTorch's CSV, or this package's text."
    more = [(PLAN, "search one for these costs", ["chunks"], search), (OWN, "a program of my own", [], own)]
    entries += [
        {"name": name, "label": label, "group": "Other", "takes": takes, "summary": summary}
        for name, label, takes, summary in more
    ]
    limits = {**LIMITS, "actions": ACTIONS, "csv": CSV}
    return {"schedules": entries, "limits": limits, "start": asdict(Request()), "examples": EXAMPLES}


def _group(schedule: schedules.Schedule) -> str:
    return _GROUPS[2 if not schedule.flushed else int(schedule.split)]


def answer(request: Request) -> dict[str, Any]:
    """Everything the page shows for ``request``.

    A program that is wrong has only its ``verdict``, with the counter-example; one that goes over the memory cap has
    that verdict, and its picture and figures too.

    Raises:
        ScheduleError: the request makes no program.
    """
    if request.schedule == OWN and not request.program.strip():
        raise ScheduleError("the program is empty; paste PyTorch's CSV (a line per rank, cells joined by commas)")
    try:
        program, costs, found = _program(request)
    except ScheduleError as error:
        if request.schedule != OWN or error.rank is None:
            raise
        # Not a program at all: the cell that is none, among those that were pasted.
        rows = [] if _is_text(request.program) else rows_of_csv(request.program)
        return {"verdict": _wrong(rows, error)}
    try:
        report = verify(program)
    except ScheduleError as error:
        return {"verdict": _wrong(_cells(program), error), "text": str(program)}
    timeline = simulate(program, costs)
    return {
        "name": program.name or request.schedule,
        "command": _command(request),
        "figures": {name: getattr(timeline, name) for name in _FIGURES},
        "messages": report.messages,
        "stages": program.stages,
        "actions": sum(map(len, program.ranks)),
        "ranks": _ranks(timeline, request),
        "search": None if found is None else {"lower_bound": found.lower_bound, "gap": found.gap},
        "svg": draw(timeline, format="svg"),
        "words": words(program, costs, timeline),
        "text": str(program),
        "verdict": _capped(program, request, costs),
    }


def table(request: Request) -> list[dict[str, Any]]:
    """A row for every schedule at the sizes and costs of ``request``; what a schedule refuses is its own row."""
    rows: list[dict[str, Any]] = []
    for schedule in schedules.registered():
        try:
            program = _made(schedule, request)
            timeline = simulate(program, Costs.per_rank(program, *_times(request)))
        except ScheduleError as error:
            rows.append({"name": schedule.name, "refused": str(error)})
            continue
        most = max(timeline.peak_activations)
        rows.append(
            {
                "name": schedule.name,
                "bubble": timeline.bubble_over_ideal,
                "peak": most,
                "versions": max(timeline.weight_versions),
                "messages": verify(program).messages,
                "fits": request.memory_cap is None or most <= with_rounding(request.memory_cap),
            }
        )
    return rows


def export(request: Request, form: str) -> dict[str, str]:
    """A file of the program: its name and content."""
    program, costs, _ = _program(request)
    verify(program)
    name = request.schedule
    if form == "csv":
        return {"file": f"{name}.csv", "content": program.to_csv()}
    if form == "lowered":
        return {"file": f"{name}_comms.csv", "content": passes.lower(program).to_csv()}
    if form == "text":
        return {"file": f"{name}.txt", "content": str(program)}
    if form == "svg":
        return {"file": f"{name}.svg", "content": draw(simulate(program, costs), format="svg")}
    if form == "trace":
        return {"file": f"{name}.trace.json", "content": draw(simulate(program, costs), format="trace")}
    raise ScheduleError(f"form is {form!r}; it is csv, lowered, text, svg or trace")


_QUESTIONS: Mapping[str, Callable[[dict[str, Any]], Any]] = {
    "menu": lambda asked: menu(),
    "answer": lambda asked: answer(Request.read(asked["request"])),
    "table": lambda asked: table(Request.read(asked["request"])),
    "export": lambda asked: export(Request.read(asked["request"]), asked["form"]),
}


# ---- programs and costs


def _program(request: Request) -> tuple[Program, Costs, Plan | None]:
    found = None
    if request.schedule == PLAN:
        found = _searched(request)
        program = found.program
    elif request.schedule == OWN:
        program = (Program.parse if _is_text(request.program) else Program.from_csv)(request.program)
    else:
        program = _made(schedules.by_name(request.schedule), request)
    if (actions := sum(map(len, program.ranks))) > ACTIONS:
        rule = f"this page draws {ACTIONS}; `sixfold-pipeline draw` draws any"
        raise ScheduleError(f"the program has {actions} actions; {rule}")
    return program, Costs.per_rank(program, *_times(request)), found


def _made(schedule: schedules.Schedule, request: Request) -> Program:
    extra = {name: getattr(request, name) for name in _EXTRA if name in schedule.arguments}
    return schedule.make(request.ranks, request.microbatches, **extra)


def _searched(request: Request) -> Plan:
    stages, share = request.ranks * request.chunks, 1 / request.chunks
    *times, hop = _times(request)
    forward, gradient, weight = ([time * share] * stages for time in times)
    costs = Costs(forward, gradient, weight, hop, activation=[share] * stages)
    return plan(
        costs,
        ranks=request.ranks,
        microbatches=request.microbatches,
        memory_cap=request.memory_cap,
        time_limit_s=_SEARCH_S,
    )


def _times(request: Request) -> tuple[float, float, float, float]:
    return request.forward, request.backward_input, request.backward_weight, request.hop


def _is_text(program: str) -> bool:
    """Whether it is this package's text, which alone has colons, after each rank."""
    return ":" in program


# ---- what is said of them


def _ranks(timeline: Timeline, request: Request) -> list[dict[str, Any]]:
    busy = [0.0] * len(timeline.peak_activations)
    for rank, _, start, end in timeline.events:
        busy[rank] += end - start
    cap = request.memory_cap
    return [
        {
            "peak": peak,
            "over": cap is not None and peak > with_rounding(cap),
            "versions": timeline.weight_versions[rank],
            "outputs": timeline.peak_outputs[rank],
            "idle": 1 - busy[rank] / timeline.makespan,
        }
        for rank, peak in enumerate(timeline.peak_activations)
    ]


def _capped(program: Program, request: Request, costs: Costs) -> dict[str, Any]:
    """The verdict on a program that is right but for, perhaps, the memory it holds."""
    try:
        verify(program, memory_cap=request.memory_cap, costs=costs)
    except ScheduleError as error:
        return _wrong(_cells(program), error)
    return {"valid": True}


def _wrong(rows: list[list[str]], error: ScheduleError) -> dict[str, Any]:
    return {"valid": False, **_refusal(error), "svg": draw_marked(rows, error)}


def _cells(program: Program) -> list[list[str]]:
    return [[str(action) for action in row] for row in program.ranks]


def _refusal(error: ScheduleError) -> dict[str, Any]:
    """As ``sixfold-pipeline verify --json`` says it."""
    return {
        "error": str(error),
        "type": type(error).__name__,
        "rank": error.rank,
        "position": error.position,
        "action": None if error.action is None else str(error.action),
        "cycle": [[rank, position, str(action)] for rank, position, action in error.cycle],
    }


def _command(request: Request) -> str:
    """The command that gives the same figures."""
    words = ["sixfold-pipeline", "plan" if request.schedule == PLAN else "simulate"]
    if request.schedule == OWN:
        words.append("FILE" if _is_text(request.program) else "FILE.csv")
    else:
        if request.schedule == PLAN:
            takes = ["chunks"]
        else:
            takes = [name for name in _EXTRA if name in schedules.by_name(request.schedule).arguments]
            words.append(request.schedule)
        words += [f"--{name} {getattr(request, name)}" for name in ("ranks", "microbatches", *takes)]
    start = Request()
    for name in ("forward", "backward_input", "backward_weight", "hop"):
        if (value := getattr(request, name)) != getattr(start, name):
            words.append(f"--{name.replace('_', '-')} {value:g}")
    if request.schedule == PLAN:
        words += [] if request.memory_cap is None else [f"--memory-cap {request.memory_cap:g}"]
        words.append(f"--time-limit {_SEARCH_S:g}")
    return " ".join(words)
