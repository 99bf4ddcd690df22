"""The gallery of schedules: one picture each, with the figures of its simulation.

sixfold.pipeline.schedules --> docs/gallery/*.svg, docs/gallery/README.md (this file)

python tools/pipeline_gallery.py --write     # make them anew
python tools/pipeline_gallery.py             # say which are not current, ending with 1
"""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path

from sixfold.pipeline import Costs, draw, schedules, simulate, verify

FOLDER = Path(__file__).parents[1] / "docs" / "gallery"
RANKS, MICROBATCHES = 4, 8
EXTRA = {"chunks": 2, "waves": 1, "steps": 2}  # where a schedule takes such an argument
HEAD = f"""# Gallery of schedules

Every schedule of `sixfold.pipeline` on {RANKS} ranks with {MICROBATCHES} microbatches, where F, I and W take the same
time and messages none. Darker boxes are later chunks of a rank; the number is the microbatch. Made by
`python tools/pipeline_gallery.py --write`.

| schedule | bubble over ideal | span over ideal | peak activations of the fullest rank | messages |
|---|---|---|---|---|
"""


def pages() -> dict[str, str]:
    """File name -> content, for every file of the gallery."""
    files, rows, sections = {}, [], []
    for schedule in schedules.registered():
        name, extra = schedule.name, {key: value for key, value in EXTRA.items() if key in schedule.arguments}
        program = schedule.make(RANKS, MICROBATCHES, **extra)
        timeline = simulate(program, Costs.per_rank(program))
        arguments = "".join(f", {key}={value}" for key, value in extra.items())
        files[f"{name}.svg"] = draw(timeline, format="svg")
        rows.append(
            f"| [{name}](#{name}) | {timeline.bubble_over_ideal:.4f} | {timeline.span_over_ideal:.4f} | "
            f"{max(timeline.peak_activations):g} | {verify(program).messages} |\n"
        )
        module = inspect.getmodule(schedule.make)
        summary = (inspect.getdoc(module) or "").split("\n\n")[0].replace("\n", " ")
        call = f"`{name}({RANKS}, {MICROBATCHES}{arguments})`"
        sections.append(f"\n## {name}\n\n{call} {summary}\n\n![{name}]({name}.svg)\n")
    files["README.md"] = HEAD + "".join(rows) + "".join(sections)
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    stale = []
    for name, content in pages().items():
        path = FOLDER / name
        if options.write:
            FOLDER.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        elif not path.exists() or path.read_text() != content:
            stale.append(name)
    if stale:
        print(f"not current: {', '.join(stale)}; run python tools/pipeline_gallery.py --write", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
