"""Every schedule by name, for tests that hold for all of them: those that are registered, and more stages of some."""

from __future__ import annotations

from collections.abc import Callable

from sixfold.pipeline import Program, hanayo, interleaved, looped_bfs, pipedream_2bw, schedules

Make = Callable[[int, int], Program]

FLUSH: dict[str, Make] = {entry.name: entry.make for entry in schedules.registered() if entry.flushed} | {
    "interleaved of 3 chunks": lambda p, m: interleaved(p, m, 3),
    "looped_bfs of 3 chunks": lambda p, m: looped_bfs(p, m, 3),
    "hanayo of 2 waves": lambda p, m: hanayo(p, m, 2),
}
# 2BW refuses fewer microbatches per step than ranks - 1.
ASYNCHRONOUS: dict[str, Make] = {entry.name: entry.make for entry in schedules.registered() if not entry.flushed} | {
    "pipedream_2bw": lambda p, m: pipedream_2bw(p, max(m, p - 1)),
    "pipedream_2bw of 3 steps": lambda p, m: pipedream_2bw(p, max(m, p - 1), steps=3),
}
SCHEDULES = FLUSH | ASYNCHRONOUS
# No I and W, no overlap.
FUSED = [name for name in FLUSH if not schedules.by_name(name.partition(" ")[0]).split]
