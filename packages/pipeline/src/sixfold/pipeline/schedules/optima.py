"""Orders of a V that no pattern gives, found once by ``plan`` and written down.

    ranks, microbatches, cap --> Program (this file) --> v_min

A rank's order is a word: F, I, W are of its first chunk, f, i, w of its second, each in ascending microbatch order.
``plan`` at F = I = W finds as good ones in seconds, which a test does on demand; no shorter one is known.
"""

from __future__ import annotations

from sixfold.pipeline.program.placement import vee
from sixfold.pipeline.program.program import Program
from sixfold.pipeline.schedules.phases import numbered

__all__ = ["OPTIMA", "optimum"]

# (ranks, microbatches) -> microbatches of memory, the order of each rank
OPTIMA: dict[tuple[int, int], tuple[float, tuple[str, ...]]] = {
    (4, 8): (
        2.5,
        (
            "FFFFfiwfiwfiwFIWfiwFIWfiwFIWfiwFIWfiwIWfiwIWIWIW",
            "FFFffiwFiwfIWiwFfIWiwFfIWiwFfIWiwFfIWiwfIWiwIWIW",
            "FFFffiwifIwFWifIwFWifIwFWifIwFWifIwFWifIwWiIwIWW",
            "FfFfFiwfIWiwFfIWiwFfIWiwFfIWiwFfIWiwFfIWiwIWiIwW",
        ),
    ),
}


def optimum(ranks: int, microbatches: int, memory_cap: float, name: str) -> Program | None:
    """The order that is written down for these sizes, if ``memory_cap`` holds it."""
    cap, words = OPTIMA.get((ranks, microbatches), (0.0, ()))
    if not words or memory_cap < cap:
        return None
    rows = (
        numbered([f"{letter.upper()}{int(letter.islower())}" for letter in word], (r, 2 * ranks - 1 - r), microbatches)
        for r, word in enumerate(words)
    )
    return Program(tuple(rows), microbatches, vee(ranks), name)
