"""The oracle of ``verify``: a machine that runs a program one action at a time; a message needs both ends.

And that of ``simulate``: times that are raised until none is too early.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from sixfold.pipeline import Action, Costs, Kind, Program, ScheduleError, verify
from sixfold.pipeline.passes import recompute

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
    again = Counter(a for _, a in parts if a.kind is Kind.RECOMPUTE)
    if any(count > 1 or a.microbatch not in range(m) for a, count in again.items()):
        return False
    computed: dict[tuple[int, int | None], list[str]] = {(s, k): [] for s in range(n) for k in range(m)}
    for _, a in parts:
        if a.kind in _COMPUTE:
            computed.setdefault((a.stage, a.microbatch), []).append(a.kind.value)
    return all(sorted(kinds) in (["B", "F"], ["F", "I", "W"]) for kinds in computed.values())


def _gets_through(program: Program) -> bool:
    n, at = program.stages, program.placement
    kept = _COMPUTE | _MESSAGES | {Kind.RECOMPUTE}
    lists = [[e for e in row if e.parts or e.kind in kept] for row in program.ranks]
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
            if head.kind is Kind.RECOMPUTE:  # of a forward that was, before what needs it
                own = (head.stage, head.microbatch)
                if (Kind.F, *own) in done and (Kind.B, *own) not in done and (Kind.I, *own) not in done:
                    row.pop(0)
                    moved = True
                continue
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
        gathered, old = 0, False
        slotted = any(a.kind is Kind.UNSHARD for a in mine)
        for a in mine:
            gathered += (a.kind is Kind.UNSHARD) - (a.kind is Kind.RESHARD)
            old = gathered > 0 and (old or a.kind is Kind.STEP)  # what was gathered is of before a STEP
            if gathered < 0 or (
                ((slotted and not gathered) or old) and (a.kind in _COMPUTE or a.kind is Kind.RECOMPUTE)
            ):
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


def random_program(rng: random.Random) -> Program:
    """A valid program: ranks take any action that can run, some backwards are split, neighbours may be overlapped."""
    stages, m = rng.randint(1, 5), rng.randint(1, 4)
    ranks = rng.randint(1, stages)
    placement = [*range(ranks), *(rng.randrange(ranks) for _ in range(stages - ranks))]
    rng.shuffle(placement)
    split = {(s, k): rng.random() < 0.5 for s in range(stages) for k in range(m)}
    todo = {Action(s, Kind.F, k) for s in range(stages) for k in range(m)}
    todo |= {Action(s, Kind.B, k) for (s, k), halves in split.items() if not halves}
    todo |= {Action(s, kind, k) for (s, k), halves in split.items() if halves for kind in (Kind.I, Kind.W)}
    done: set[Action] = set()

    def ready(action: Action) -> bool:
        s, k = action.stage, action.microbatch
        if action.kind is Kind.F:
            return s == 0 or Action(s - 1, Kind.F, k) in done
        if action.kind is Kind.W:
            return Action(s, Kind.I, k) in done
        above = s + 1 == stages or Action(s + 1, Kind.B, k) in done or Action(s + 1, Kind.I, k) in done
        return above and Action(s, Kind.F, k) in done

    rows: list[list[Action]] = [[] for _ in range(ranks)]
    while todo:
        action = rng.choice(sorted((a for a in todo if ready(a)), key=str))
        todo.remove(action)
        done.add(action)
        rows[placement[action.stage]].append(action)
    program = Program(tuple(map(tuple, rows)), m, tuple(placement))
    for _ in range(rng.choice((0, 0, 4, 12))):  # overlap neighbours wherever the proof allows it
        rank = rng.randrange(ranks)
        row = list(program.ranks[rank])
        if len(row) < 2:
            continue
        at = rng.randrange(len(row) - 1)
        row[at : at + 2] = [Action.overlap(*row[at].each(), *row[at + 1].each())]
        merged = Program((*program.ranks[:rank], tuple(row), *program.ranks[rank + 1 :]), m, program.placement)
        try:
            verify(merged)
        except ScheduleError:
            continue
        program = merged
    return recompute(program) if rng.random() < 0.3 and "OVERLAP" not in str(program) else program


def raised_times(program: Program, costs: Costs) -> dict[str, tuple[float, float]]:
    """Start and end of each part of each entry: all begin at 0 and are raised while one begins before it can.

    With ``overlap`` other than 1 the parts of an overlap have the times of the whole.
    """
    blocks = costs.overlap != 1
    hop = costs.hop if callable(costs.hop) else (lambda a, b: costs.hop[a][b] if costs.hop != 0 else 0.0)
    if isinstance(costs.hop, float):
        hop = lambda a, b: costs.hop  # noqa: E731
    price = {"F": costs.forward, "RECOMPUTE": costs.forward, "I": costs.backward_input, "W": costs.backward_weight}
    price |= {"STEP": costs.step, "UNSHARD": costs.unshard, "REDUCE_GRAD": costs.reduce}
    price["B"] = [i + w for i, w in zip(costs.backward_input, costs.backward_weight, strict=True)]

    def lasts(a: Action) -> float:
        row = price.get(a.kind.value)
        return row[a.stage] if row else 0.0

    nodes: list[tuple[int, tuple[Action, ...], float]] = []  # rank, actions, time
    for rank, row in enumerate(program.ranks):
        for entry in row:
            if entry.parts and blocks:
                nodes.append((rank, entry.parts, costs.overlap * sum(map(lasts, entry.parts))))
            else:
                nodes += [(rank, (part,), lasts(part)) for part in entry.each()]
    at = {(a.kind, a.stage, a.microbatch): n for n, (_, parts, _) in enumerate(nodes) for a in parts}
    start = [0.0] * len(nodes)
    moved = True
    while moved:
        moved = False
        for n, (rank, parts, _) in enumerate(nodes):
            earliest = start[n - 1] + nodes[n - 1][2] if n and nodes[n - 1][0] == rank else 0.0
            for a in parts:
                ahead = {Kind.F: -1, Kind.B: 1, Kind.I: 1}.get(a.kind, 0)
                if not ahead or not 0 <= a.stage + ahead < program.stages:
                    continue
                for kind in (Kind.F,) if ahead < 0 else (Kind.B, Kind.I):
                    maker = at.get((kind, a.stage + ahead, a.microbatch))
                    if maker is not None and maker != n:
                        source = nodes[maker][0]
                        earliest = max(
                            earliest, start[maker] + nodes[maker][2] + (hop(source, rank) if source != rank else 0.0)
                        )
            if earliest > start[n]:
                start[n], moved = earliest, True
    return {str(a): (start[n], start[n] + nodes[n][2]) for n, (_, parts, _) in enumerate(nodes) for a in parts}


def most_at_once(program: Program) -> tuple[list[int], list[int]]:
    """Per rank the most outputs, and the most received tensors, from the first and last place at which each is held."""
    at, outputs, received = program.placement, [], []
    lowered = "SEND" in str(program)
    for rank, row in enumerate(program.ranks):
        flat = [a for entry in row for a in entry.each()]
        place = {(a.kind.value, a.stage, a.microbatch): i for i, a in enumerate(flat)}
        held, got = [], []
        for s, k in ((a.stage, a.microbatch) for a in flat if a.kind is Kind.F):
            made = place["F", s, k]
            done = place.get(("B", s, k), place.get(("I", s, k)))
            far = s + 1 < program.stages and at[s + 1] != rank
            if again := place.get(("RECOMPUTE", s, k)):
                held.append((again, done))
                if s + 1 < program.stages and not far:
                    done = place.get(("B", s + 1, k), place.get(("I", s + 1, k)))
                else:
                    done = place["SEND_F", s, k] if far and lowered else made
            held.append((made, done))
            done = place.get(("B", s, k), place.get(("I", s, k)))
            if s and at[s - 1] != rank:
                got.append((place.get(("RECV_F", s, k), made), done))
            if far:
                got.append((place.get(("RECV_B", s, k), done), done))
        for spans, most in ((held, outputs), (got, received)):
            most.append(max((sum(a <= i <= b for a, b in spans) for i in range(len(flat))), default=0))
    return outputs, received
