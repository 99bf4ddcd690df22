"""torch's profiler of a run, on request.

a step of log.profile_steps --> profiled (this file) --> RUN/profile/step-N-rank-R.json.gz, for Perfetto
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def profiled(run_dir: str | Path, steps: Sequence[int], step: int, rank: int) -> Iterator[None]:
    """Run the body, under torch's profiler if ``step`` is among ``steps``, and write this rank's trace."""
    if step not in steps:
        yield
        return
    from torch.profiler import profile

    path = Path(run_dir) / "profile" / f"step-{step:08d}-rank-{rank}.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    with profile() as trace:  # every activity that the device has
        yield
    trace.export_chrome_trace(str(path))
