"""Write one golden drawing per schedule beside this file: its lists, then the same to scale.

    python packages/pipeline/tests/golden/make_drawings.py

Look at each with your own eyes before you commit it; that is what the drawings are for.
"""

from pathlib import Path

from sixfold.pipeline import Costs, draw, schedules, simulate

FOLDER = Path(__file__).parent / "drawings"
RANKS, MICROBATCHES = 4, 6


def drawing(name: str) -> str:
    """The schedule's lists, and its timeline at F = I = W = 1 per rank with hops of a quarter."""
    program = getattr(schedules, name)(RANKS, MICROBATCHES)
    return f"{draw(program)}\n{draw(simulate(program, Costs.per_rank(program, hop=0.25)))}"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in schedules.__all__:
        (FOLDER / f"{each}.txt").write_text(drawing(each))
