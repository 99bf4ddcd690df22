"""Write what follows from the schedules there are: one golden drawing each beside this file, and their names as types.

    python packages/pipeline/tests/golden/make_drawings.py

A drawing is a schedule's lists, then the same to scale. Look at each with your own eyes before you commit it; that is
what the drawings are for. ``schedules/__init__.pyi`` tells type checkers what ``schedules/__init__.py`` finds.
"""

from pathlib import Path

from sixfold.pipeline import Costs, draw, schedules, simulate

FOLDER = Path(__file__).parent / "drawings"
STUB = Path(schedules.__file__).with_suffix(".pyi")
RANKS, MICROBATCHES = 4, 6


def drawing(name: str) -> str:
    """The schedule's lists, and its timeline at F = I = W = 1 per rank with hops of a quarter."""
    program = getattr(schedules, name)(RANKS, MICROBATCHES)
    return f"{draw(program)}\n{draw(simulate(program, Costs.per_rank(program, hop=0.25)))}"


def stub() -> str:
    """The types of ``schedules``: each function from its file, and what finds them."""
    imports = [f"from sixfold.pipeline.schedules.{name} import {name} as {name}\n" for name in schedules.__all__]
    names = "".join(f'    "{name}",\n' for name in schedules.__all__)
    imports.append("from sixfold.pipeline.schedules.registry import Schedule as Schedule\n")
    return (
        f"# Written by tests/golden/make_drawings.py.\n\n{''.join(sorted(imports))}\n__all__ = [\n{names}]\n\n"
        "def registered() -> tuple[Schedule, ...]: ...\n"
        "def find(name: str) -> Schedule | None: ...\n"
        "def by_name(name: str) -> Schedule: ...\n"
    )


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    STUB.write_text(stub())
    for each in schedules.__all__:
        (FOLDER / f"{each}.txt").write_text(drawing(each))
