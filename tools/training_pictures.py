"""Pictures of training: one step of a run, the gathers of a step, a checkpoint at two layouts.

sixfold.gpt, sixfold.pipeline, sixfold.fsdp, sixfold.dist_ckpt --> docs/assets/*.svg (this file)

python tools/training_pictures.py --write     # draw them again
python tools/training_pictures.py             # name those that are out of date, and end with 1
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from data_pictures import CELL, COLOURS, ROW, box, run, svg, words

from sixfold.dist_ckpt import ShardedTensor
from sixfold.fsdp import residency
from sixfold.gpt import stage_layers
from sixfold.gpt.data.token_stream import TokenStream
from sixfold.pipeline import Costs, one_f_one_b, simulate

GREY = "#d0d4da"


class Positions(TokenStream):
    """The positions that a rank reads, in place of their tokens."""

    def __init__(self) -> None:
        """Without data; dealt as in a new run."""
        self.permutes, self._looks_ahead = True, False

    def _microbatch(self, samples: Any) -> Any:
        return samples


def step() -> str:
    """One step of four ranks, pp 2 x dp 2: positions to microbatches, the program, the update."""
    dp, micro, batch = 2, 2, 12
    mine = [[[*part] for part in Positions().step(0, batch, micro, dp, d)] for d in range(dp)]
    owner = {position: (d, m) for d in range(dp) for m, part in enumerate(mine[d]) for position in part}
    program = one_f_one_b(ranks=2, microbatches=len(mine[0]))
    events = simulate(program, Costs.per_rank(program, forward=1.0, backward_input=1.0, backward_weight=1.0)).events
    end = round(max(event[3] for event in events))
    layers = stage_layers(8, 2)
    left, y, drawn = 190, 6, []
    drawn.append(words(8, y, "samples of one update"))
    drawn += [box(left + p * CELL, y, p, COLOURS[owner[p][0]]) for p in range(batch)]
    for d in range(dp):
        y += ROW + 16
        starts = "; ".join(f"{part[0]}, {part[1]}" for part in mine[d])
        drawn.append(words(left, y, f"data rank {d} takes microbatches of positions {starts}"))
        for stage in range(2):
            y += ROW
            first, last = layers[stage][0], layers[stage][-1]
            drawn.append(words(8, y, f"rank {2 * d + stage}: layers {first} to {last}"))
            for rank, action, begin, finish in events:
                if rank == stage:
                    text = f"{action.kind.value}{action.microbatch}"
                    colour = COLOURS[d] if action.kind.value == "F" else COLOURS[2 + d]
                    drawn.append(box(left + round(begin) * CELL, y, text, colour, round(finish - begin)))
            after = left + end * CELL
            drawn.append(box(after, y, "sum", GREY, 2))
            drawn.append(box(after + 2 * CELL, y, "AdamW", GREY, 2))
            drawn.append(box(after + 4 * CELL, y, "save", GREY, 2))
    y += ROW + 12
    drawn.append(
        words(left, y, "Samples are positions of the blend. F: forward of a microbatch. B: backward.", quiet=True)
    )
    y += ROW - 4
    drawn.append(
        words(left, y, "sum: gradients over the data ranks. AdamW, save: each rank its shard of the stage.", quiet=True)
    )
    return svg(left + (end + 6) * CELL + 8, y + ROW + 4, drawn, "One step of a run on four ranks")


def gathers() -> str:
    """Which units' weights are gathered when, under a budget of two units."""
    walk = [*"ABCD", *"DCBA"]
    solution = residency.solve(walk, dict.fromkeys("ABCD", 100), budget_bytes=200)
    left, y, drawn = 130, 6, []
    drawn.append(words(left, y, "forward"))
    drawn.append(words(left + 8 * CELL, y, "backward"))
    drawn.append(words(left - 8, y, "weights of", quiet=True, anchor="end"))
    held: dict[str, bool] = {}
    cells: dict[tuple[str, int], str] = {}
    column = 0
    for action in solution.actions:
        if action.kind == "gather":
            held[action.unit] = True
        elif action.kind == "free":
            del held[action.unit]
        else:
            for unit, is_new in held.items():
                used = unit == action.unit
                cells[unit, column] = "gather" if is_new else "use" if used else ""
                held[unit] = False
            column += 1
    for unit in "ABCD":
        y += ROW
        drawn.append(words(left - 8, y, f"unit {unit}", anchor="end"))
        for at in range(len(walk)):
            text = cells.get((unit, at))
            if text is not None:
                colour = COLOURS[1] if text == "gather" else COLOURS[0] if text else GREY
                drawn.append(box(left + 2 * at * CELL, y, text, colour, 2))
    y += ROW + 8
    said = f"Memory for two units: {solution.gathers} gathers instead of {len(walk)}. Grey: still in memory."
    drawn.append(words(left, y, said, quiet=True))
    return svg(left + 2 * len(walk) * CELL + 8, y + ROW + 4, drawn, "Gathers of a forward and a backward")


def reshard() -> str:
    """A matrix that two ranks save by rows and four load by columns."""
    shape, savers, loaders = (4, 8), 2, 4
    saved = [
        ShardedTensor.from_rank_offsets("w", torch.zeros(shape[0] // savers, shape[1]), (0, rank, savers))
        for rank in range(savers)
    ]
    loaded = [
        ShardedTensor.from_rank_offsets("w", torch.zeros(shape[0], shape[1] // loaders), (1, rank, loaders))
        for rank in range(loaders)
    ]

    def cells(shards: list[ShardedTensor]) -> dict[tuple[int, int], int]:
        found = {}
        for rank, shard in enumerate(shards):
            (top, at), (height, width) = shard.global_offset, shard.local_shape
            found |= {(row, col): rank for row in range(top, top + height) for col in range(at, at + width)}
        return found

    by_saver, by_loader = cells(saved), cells(loaded)
    left, right, top = 8, 8 + 11 * CELL, 6 + ROW
    drawn = [words(left, 6, f"saved by {savers} ranks, by rows"), words(right, 6, f"loaded by {loaders}, by columns")]
    for (row, col), rank in by_saver.items():
        drawn.append(box(left + col * CELL, top + row * ROW, rank, COLOURS[rank]))
    for (row, col), rank in by_loader.items():
        gap = 8 * rank
        drawn.append(box(right + col * CELL + gap, top + row * ROW, by_saver[row, col], COLOURS[by_saver[row, col]]))
    y = top + shape[0] * ROW + 4
    for rank in range(loaders):
        drawn.append(words(right + rank * (2 * CELL + 8), y, f"rank {rank}"))
    drawn.append(words(left, y, "number and colour: who saved it", quiet=True))
    return svg(right + shape[1] * CELL + 40, y + ROW + 4, drawn, "A matrix saved by two ranks and loaded by four")


def pictures() -> dict[str, str]:
    """File name -> content."""
    return {"gpt-step.svg": step(), "fsdp-gathers.svg": gathers(), "dist-ckpt-reshard.svg": reshard()}


if __name__ == "__main__":
    sys.exit(run("training_pictures.py", __doc__, pictures))
