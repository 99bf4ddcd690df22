"""The oracle of ``verify``: a machine that runs a program one action at a time; a message needs both ends."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from sixfold.pipeline import Action, Kind, Program

_PAIRS = {Kind.SEND_F: (Kind.RECV_F, 1), Kind.SEND_B: (Kind.RECV_B, -1)}
_MESSAGES = {Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B}
_UNNUMBERED = {Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD}
_BACKWARD = {Kind.B, Kind.I, Kind.W}
_COMPUTE = _BACKWARD | {Kind.F}


def is_right(program: Program) -> bool:
    """Whether ``program`` computes each gradient once, gets through, and keeps the rules of slots and steps."""
    return _has_every_action_once(program) and _gets_through(program) and _slots_are_right(program)


def _parts(program: Program) -> list[tuple[int, Action]]:
    return [(rank, part) for rank, row in enumerate(program.ranks) for entry in row for part in entry.each()]


def _has_every_action_once(program: Program) -> bool:
    n, m, at = program.stages, program.microbatches, program.placement
    parts = _parts(program)
    if any(not 0 <= a.stage < n or at[a.stage] != rank for rank, a in parts):
        return False
    if any(a.microbatch is not None for _, a in parts if a.kind in _UNNUMBERED):
        return False
    messages = Counter(a for _, a in parts if a.kind in _MESSAGES)
    wanted: Counter[Action] = Counter()
    for s in range(n - 1):
        if at[s] != at[s + 1]:
            for k in range(m):
                wanted.update([Action(s, Kind.SEND_F, k), Action(s + 1, Kind.RECV_F, k)])
                wanted.update([Action(s + 1, Kind.SEND_B, k), Action(s, Kind.RECV_B, k)])
    if messages and messages != wanted:
        return False
    computed: dict[tuple[int, int | None], list[str]] = {(s, k): [] for s in range(n) for k in range(m)}
    for _, a in parts:
        if a.kind in _COMPUTE:
            computed.setdefault((a.stage, a.microbatch), []).append(a.kind.value)
    return all(sorted(kinds) in (["B", "F"], ["F", "I", "W"]) for kinds in computed.values())


def _gets_through(program: Program) -> bool:
    n, at = program.stages, program.placement
    lists = [[e for e in row if e.parts or e.kind in _COMPUTE or e.kind in _MESSAGES] for row in program.ranks]
    lowered = any(a.kind in _PAIRS for _, a in _parts(program))
    there = {
        (Kind.F, 0, k) for k in range(program.microbatches)
    }  # inputs that a stage has: (F or B, stage, microbatch)
    there |= {(Kind.B, n - 1, k) for k in range(program.microbatches)}
    done: set[tuple[str, int, int | None]] = set()
    moved = True
    while moved:
        moved = False
        for row in lists:
            if not row:
                continue
            head = row[0]
            if head.parts or head.kind in _COMPUTE:
                # Parts take what earlier parts of their stage made, and nothing of another stage.
                if not all(_can_run(a, there, done | _results(head.parts[:i])) for i, a in enumerate(head.each())):
                    continue
                for a in head.each():
                    done.add((a.kind, a.stage, a.microbatch))
                    if a.kind is Kind.W:
                        continue
                    what, to = (Kind.F, a.stage + 1) if a.kind is Kind.F else (Kind.B, a.stage - 1)
                    done.add((what, a.stage, a.microbatch))
                    if 0 <= to < n and (at[to] == at[a.stage] or not lowered):
                        there.add((what, to, a.microbatch))
                row.pop(0)
                moved = True
            elif head.kind in _PAIRS:
                kind, ahead = _PAIRS[head.kind]
                made = Kind.F if ahead == 1 else Kind.B
                peer = lists[at[head.stage + ahead]]
                met = peer and peer[0] == Action(head.stage + ahead, kind, head.microbatch)
                if met and (made, head.stage, head.microbatch) in done:
                    there.add((made, head.stage + ahead, head.microbatch))
                    row.pop(0)
                    peer.pop(0)
                    moved = True
    return not any(lists)


def _results(parts: tuple[Action, ...]) -> set:
    return {(a.kind, a.stage, a.microbatch) for a in parts}


def _can_run(a: Action, there: set, done: set) -> bool:
    own = (a.stage, a.microbatch)
    if a.kind is Kind.F:
        return (Kind.F, *own) in there
    if a.kind is Kind.W:
        return (Kind.I, *own) in done
    return (Kind.B, *own) in there and (Kind.F, *own) in done


def _slots_are_right(program: Program) -> bool:
    for stage, rank in enumerate(program.placement):
        mine = [a for entry in program.ranks[rank] for a in entry.each() if a.stage == stage]
        gathered = 0
        slotted = any(a.kind is Kind.UNSHARD for a in mine)
        for a in mine:
            gathered += (a.kind is Kind.UNSHARD) - (a.kind is Kind.RESHARD)
            if gathered < 0 or (slotted and not gathered and a.kind in _COMPUTE):
                return False
        if gathered:
            return False
        steps = [a.microbatch for a in mine if a.kind is Kind.STEP]
        most = max(sum(a.kind is Kind.STEP and a.stage == s for _, a in _parts(program)) for s in range(program.stages))
        if steps != list(range(most)) or (most and program.microbatches % most):
            return False
        if not _weights_are_there(mine, most, program):
            return False
        if not _batches_are_right([a for a in mine if a.kind not in (Kind.UNSHARD, Kind.RESHARD)], most, program):
            return False
    return True


def _weights_are_there(mine: list[Action], steps: int, program: Program) -> bool:
    """Run one stage with its versions in a list: each forward finds the version that it reads."""
    if program.weights == "pipedream" or not steps:
        return program.weights == "flushed" or steps > 0
    versions, size = ["W0"], program.microbatches // steps
    for a in mine:
        if a.kind is Kind.STEP:
            versions.append(f"W{len(versions)}")
        elif a.kind is Kind.F:
            batch = a.microbatch // size
            read = f"W{batch}" if program.weights == "flushed" else f"W{max(batch - 1, 0)}"
            if read not in versions:
                return False
    return True


def _batches_are_right(mine: list[Action], steps: int, program: Program) -> bool:
    """Between two STEPs of a stage: the backwards of one batch, and behind them at most one reduction."""
    batches: list[list[Action]] = [[]]
    for a in mine:
        if a.kind is Kind.STEP:
            batches.append([])
        elif a.kind in _BACKWARD or a.kind is Kind.REDUCE_GRAD:
            batches[-1].append(a)
    if steps and batches.pop():
        return False
    size = program.microbatches // len(batches)
    for t, batch in enumerate(batches):
        numbers = {a.microbatch for a in batch if a.kind is not Kind.REDUCE_GRAD}
        if not numbers <= set(range(t * size, (t + 1) * size)):
            return False
        reductions = [i for i, a in enumerate(batch) if a.kind is Kind.REDUCE_GRAD]
        if len(reductions) > 1 or (reductions and reductions[0] != len(batch) - 1):
            return False
    return True


def mutate(program: Program, rng: random.Random) -> tuple[str, Program]:
    """One way to break a program: its name, and the program with one action of one rank changed so."""
    rows = [list(row) for row in program.ranks]
    rank = rng.choice([r for r, row in enumerate(rows) if len(row) > 1])
    row = rows[rank]
    i, j = rng.sample(range(len(row)), 2)
    what = rng.choice(["delete", "duplicate", "swap", "move", "foreign rank", "foreign number"])
    if what == "delete":
        del row[i]
    elif what == "duplicate":
        row.insert(j, row[i])
    elif what == "swap":
        row[i], row[j] = row[j], row[i]
    elif what == "move":
        row.insert(j, row.pop(i))
    elif what == "foreign rank":
        other = rows[rng.randrange(len(rows))]
        other.insert(rng.randint(0, len(other)), row.pop(i))
    else:
        a = rng.choice(tuple(row[i].each()))
        number = (a.microbatch or 0) + rng.choice([-1, 1, program.microbatches])
        row[i] = (
            replace(a, microbatch=number) if rng.random() < 0.5 else replace(a, stage=rng.randint(-1, program.stages))
        )
    return what, replace(program, ranks=tuple(map(tuple, rows)))
