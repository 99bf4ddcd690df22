"""A finished run as a row of results.md.

    python benchmarks/cluster/row.py RUN_FOLDER

Reads the run's metrics.jsonl and config.toml. Steps up to the tenth are left out: they warm up.
"""

from __future__ import annotations

import json
import statistics
import sys
import tomllib
from pathlib import Path
from typing import Any

WARM_UP = 10


def row(run: Path) -> str:
    """The cells, as results.md has them: of the steps behind the warm-up the median."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    config: dict[str, Any] = tomllib.loads((run / "config.toml").read_text())
    [start, *_] = [line for line in lines if line["kind"] == "start"]
    steps = [line for line in lines if line["kind"] == "step" and line["step"] > WARM_UP]
    if not steps:
        raise SystemExit(f"{run} has no step behind the first {WARM_UP}; a row takes a run of more")
    middle = {key: statistics.median(line[key] for line in steps) for key in ("seconds", "tokens_per_second")}
    layout = " x ".join(f"{axis} {degree}" for axis, degree in start["layout"].items() if degree > 1) or "one rank"
    train = config["train"]
    mfu = [line["mfu"] for line in steps if line["mfu"] is not None]
    cells = [
        start["parameters"],
        start["world"],
        f"{layout}, {start['sharding']}, {start['schedule']}",
        f"{train['precision']}, recompute {train['recompute']}",
        train["global_batch_size"],
        f"{middle['seconds']:.3f}",
        f"{middle['tokens_per_second'] / start['world']:.0f}",
        f"{statistics.median(mfu):.1%}" if mfu else "",
        f"{max(line['memory_bytes'] for line in steps) / 2**30:.2f}",
        f"{steps[-1]['loss']:.4f}",
    ]
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    print(row(Path(sys.argv[1])))
