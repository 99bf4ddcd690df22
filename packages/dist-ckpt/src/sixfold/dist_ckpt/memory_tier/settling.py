"""What became of a snapshot: the reports of all ranks, and what the first rank makes of them.

    tier.py, on each rank --> Report --> error_of (this file), on the first rank --> Verdict --> tier.py, on each rank

Pure: no files, no ranks, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sixfold.dist_ckpt.collectives import consistency
from sixfold.dist_ckpt.errors import CheckpointError, MismatchError
from sixfold.dist_ckpt.memory_tier.generations import Generation


class Report(NamedTuple):
    """How a rank's part of the last snapshot ended, and what this rank calls."""

    call: dict[str, object]
    generation: Generation | None  # None: this rank has begun none
    error: BaseException | None
    unreplicated: BaseException | None
    crcs: bytes | None
    is_draining: bool
    drain_error: BaseException | None


class Verdict(NamedTuple):
    """What the first rank makes of all reports."""

    error: CheckpointError | None
    unreplicated: CheckpointError | None
    drains: bool
    drain_error: CheckpointError | None


def error_of(reports: Sequence[Report], last_step: int, crc_names: tuple[str, ...]) -> CheckpointError | None:
    """Why the last snapshot is not whole; None if it is, or there was none.

    Args:
        last_step: of that one. crc_names: tensors that all ranks have whole, of which each reports the CRC-32.
    Raises:
        MismatchError: ranks make different calls. CheckpointError: steps do not grow.
    """
    first = reports[0].call
    for rank, report in enumerate(reports):
        if report.call != first:
            own, other = (" of step ".join(map(str, call.values())) for call in (first, report.call))
            raise MismatchError(
                f"rank 0 calls {own} of a memory tier, and rank {rank} {other}; all ranks make the same calls"
            )
    step = first.get("step")
    if isinstance(step, int) and step <= last_step:
        raise CheckpointError(
            f"step {step} is saved after step {last_step}; steps grow. A run that goes back calls restore()"
        )
    if (error := first_of(report.error for report in reports)) is not None:
        return error
    if len({report.generation for report in reports}) > 1:
        without = [rank for rank, report in enumerate(reports) if report.generation is None]
        return CheckpointError(f"ranks {without} have begun no snapshot, and the others have; save it again")
    crcs = [report.crcs for report in reports if report.crcs is not None]
    try:
        consistency.check_crcs(crc_names, crcs if len(crcs) == len(reports) else [])
    except CheckpointError as differ:
        return differ
    return None


def first_of(errors: Iterable[BaseException | None]) -> CheckpointError | None:
    """That of the lowest rank."""
    error = next((error for error in errors if error is not None), None)
    if error is None or isinstance(error, CheckpointError):
        return error
    return CheckpointError(f"{type(error).__name__}: {error}")
