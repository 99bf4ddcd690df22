"""Pictures of token data: the two files of a pair, and the order of a blend, each drawn from what the packages compute.

sixfold.indexed_data, sixfold.blending --> docs/assets/indexed-data-pair.svg, docs/assets/blending-order.svg (this file)

python tools/data_pictures.py --write     # draw them again
python tools/data_pictures.py             # name those that are out of date, and end with 1
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from sixfold.blending import BlendChange, BlendedDataset, GPTDataset, GPTDatasetConfig, Split
from sixfold.blending.source import ListSource
from sixfold.indexed_data import IndexedDataset, IndexedDatasetBuilder

FOLDER = Path(__file__).parents[1] / "docs" / "assets"
CELL, ROW = 30, 24  # width and height of a box
# Fills are readable under black text, so one set serves both backgrounds; the other colours follow the reader's.
COLOURS = ("#8ab8f0", "#f6c177", "#9fd8a4", "#d5b3e8")
STYLE = """<style>
text { fill: #1f2328; } .quiet { fill: #59636e; } .in { fill: #1f2328; text-anchor: middle; }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3; } .quiet { fill: #9198a1; } .in { fill: #1f2328; } }
</style>"""


def svg(width: int, height: int, parts: list[str], title: str) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12" role="img">\n<title>{title}</title>\n{STYLE}\n'
    )
    return head + "\n".join(parts) + "\n</svg>\n"


def box(x: int, y: int, text: object, colour: str, cells: int = 1) -> str:
    middle = x + cells * CELL // 2
    return (
        f'<rect x="{x}" y="{y}" width="{cells * CELL - 2}" height="{ROW - 2}" rx="2" fill="{colour}"/>'
        f'<text class="in" x="{middle - 1}" y="{y + 15}">{text}</text>'
    )


def words(x: int, y: int, text: str, *, quiet: bool = False, anchor: str = "start") -> str:
    kind = ' class="quiet"' if quiet else ""
    return f'<text{kind} x="{x}" y="{y + 15}" text-anchor="{anchor}">{text}</text>'


def pair() -> str:
    """Three documents as a pair holds them; the numbers are read from the files."""
    documents = [[[83, 104, 97, 108, 108]], [[73, 32, 99], [111, 109]], [[112, 97, 114]]]
    with tempfile.TemporaryDirectory() as folder:
        with IndexedDatasetBuilder(f"{folder}/verses.bin", np.uint16) as builder:
            for sequences in documents:
                builder.add_document(
                    [one for sequence in sequences for one in sequence], lengths=[len(one) for one in sequences]
                )
        dataset = IndexedDataset(f"{folder}/verses")
        owner_S = np.repeat(np.arange(len(documents)), np.diff(dataset.document_indices)).tolist()
        ids, lengths = dataset.tokens, dataset.sequence_lengths.tolist()
        rows: list[tuple[str, list[int], Sequence[int | None], str]] = [
            ("sequence lengths", lengths, owner_S, "tokens of each sequence"),
            ("sequence pointers", dataset.sequence_pointers.tolist(), owner_S, "first byte of each sequence in .bin"),
            (
                "document indices",
                dataset.document_indices.tolist(),
                [0, 1, 2, None],
                "first sequence of each document, then the end",
            ),
        ]
    left, parts, y = 170, [], 6
    parts += [words(left, y, "document 0", quiet=True), words(left + 5 * CELL, y, "document 1", quiet=True)]
    parts += [words(left + 10 * CELL, y, "document 2", quiet=True)]
    y += ROW
    parts.append(words(8, y, "verses.bin: token ids"))
    assert ids is not None, "the pair is mapped"
    owner_N = np.repeat(owner_S, lengths).tolist()
    parts += [box(left + i * CELL, y, one, COLOURS[owner_N[i]]) for i, one in enumerate(ids.tolist())]
    y += 2 * ROW
    parts += [words(8, y, "verses.idx: header"), box(left, y, "MMIDIDX, version, dtype, counts", "#d0d4da", 8)]
    for name, numbers, owners, meaning in rows:
        y += ROW
        parts.append(words(26, y, name))
        for i, (number, owner) in enumerate(zip(numbers, owners, strict=True)):
            parts.append(box(left + i * CELL, y, number, "#d0d4da" if owner is None else COLOURS[owner]))
        parts.append(words(left + 5 * CELL, y, meaning, quiet=True))
    return svg(left + 13 * CELL + 8, y + ROW + 8, parts, "The two files of a pair: token ids, and where they begin")


def order() -> str:
    """Which dataset gives which position, before and after a change of the blend."""
    names, at, across = ("wiki", "code", "math"), 48, 24
    first, second = (0.5, 0.3, 0.2), (0.25, 0.75)
    change = BlendChange(at=at, blend=(["wiki", "math"], list(second)))
    config = GPTDatasetConfig(random_seed=1, sequence_length=8, changes=[change])
    parts_of = [GPTDataset(ListSource([[1] * 9] * 400), name, range(400), 0, Split.train, config) for name in names]
    blend = BlendedDataset(parts_of, list(first), 2 * at, config)
    dataset_P = blend.locate(np.arange(2 * at))[0].tolist()
    left, y, drawn = 92, 6, []
    for i, name in enumerate(names):
        drawn.append(box(left + i * 3 * CELL, y, name, COLOURS[i], 2))
    drawn.append(words(left + 10 * CELL, y, "one box per position: the dataset of its sample", quiet=True))
    for begin, weights in ((0, "wiki 0.5, code 0.3, math 0.2"), (at, f"from position {at} on: wiki 0.25, math 0.75")):
        counts = (blend.counts(begin + at) - blend.counts(begin)).tolist()
        given = ", ".join(f"{name} {count}" for name, count in zip(names, counts, strict=True))
        y += ROW + 14
        drawn.append(words(left, y, f"{weights}. Samples of these {at}: {given}"))
        for row in range(begin, begin + at, across):
            y += ROW
            drawn.append(words(left - 8, y, f"{row} to {row + across - 1}", quiet=True, anchor="end"))
            for i, dataset in enumerate(dataset_P[row : row + across]):
                drawn.append(box(left + i * CELL, y, names[dataset][0], COLOURS[dataset]))
    return svg(left + across * CELL + 8, y + ROW + 8, drawn, "The order of a blend, before and after a change")


def pictures() -> dict[str, str]:
    """File name -> content."""
    return {"indexed-data-pair.svg": pair(), "blending-order.svg": order()}


def run(program: str, description: str | None, pictures: Callable[[], dict[str, str]]) -> int:
    """The command of a program that draws: it writes its pictures, or names those that are out of date."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    stale = []
    for name, content in pictures().items():
        path = FOLDER / name
        if options.write:
            path.write_text(content)
        elif not path.is_file() or path.read_text() != content:
            stale.append(name)
    if stale:
        print(f"out of date: {', '.join(stale)}; run python tools/{program} --write", file=sys.stderr)
    return bool(stale)


if __name__ == "__main__":
    sys.exit(run("data_pictures.py", __doc__, pictures))
