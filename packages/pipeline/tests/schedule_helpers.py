"""Every schedule by name, for tests that hold for all of them."""

from __future__ import annotations

from collections.abc import Callable

from sixfold.pipeline import (
    Program,
    dualpipe_v,
    eager_one_f_one_b,
    gpipe,
    hanayo,
    interleaved,
    looped_bfs,
    naive,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zb_v,
)

Make = Callable[[int, int], Program]

FLUSH: dict[str, Make] = {
    "naive": naive,
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "eager_one_f_one_b": eager_one_f_one_b,
    "interleaved": interleaved,
    "interleaved of 3 chunks": lambda p, m: interleaved(p, m, 3),
    "looped_bfs": looped_bfs,
    "looped_bfs of 3 chunks": lambda p, m: looped_bfs(p, m, 3),
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zb_v": zb_v,
    "hanayo": hanayo,
    "hanayo of 2 waves": lambda p, m: hanayo(p, m, 2),
    "dualpipe_v": dualpipe_v,
    "v_half": v_half,
    "v_min": v_min,
}
# 2BW refuses fewer microbatches per step than ranks - 1.
ASYNCHRONOUS: dict[str, Make] = {
    "pipedream": pipedream,
    "pipedream_2bw": lambda p, m: pipedream_2bw(p, max(m, p - 1)),
    "pipedream_2bw of 3 steps": lambda p, m: pipedream_2bw(p, max(m, p - 1), steps=3),
}
SCHEDULES = FLUSH | ASYNCHRONOUS
FUSED = [name for name in FLUSH if not name.startswith(("zb_", "v_", "dualpipe"))]  # no I and W, no overlap
