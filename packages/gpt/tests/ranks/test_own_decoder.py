"""examples/own_decoder.py: a user's own decoder at several layouts, saved and resumed at another."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
from gpt_helpers import tiny_config
from run_helpers import JOB_S, assert_same_tensors, final_tensors, losses, world_of
from torch.distributed import PrefixStore

import ranktest
import sixfold.blending  # noqa: F401 - a run imports it late; here the server of ranks has it loaded
from sixfold.gpt import TrainConfig
from sixfold.gpt.training.loop import train_in

EXAMPLE = Path(__file__).parents[2] / "examples/own_decoder.py"


def own_decoder():
    spec = importlib.util.spec_from_file_location("own_decoder", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def jobs(rank: int, ranks: int, texts: list[str]) -> None:
    """One rank of several runs, one after the other."""
    for number, text in enumerate(texts):
        world = world_of(rank, ranks)
        world = replace(world, store=world.store and PrefixStore(f"job-{number}", world.store))
        train_in(TrainConfig.from_text(text), world, own_decoder().provider)


LAYOUTS = (["parallel.pp=2"], ["parallel.dp=2"], ["parallel.pp=2", "parallel.schedule=zb_h1"])


@pytest.mark.slow
def test_the_decoder_of_the_example_trains_alike_at_every_layout_and_resumes_at_another(tmp_path):
    assert len(EXAMPLE.read_text().splitlines()) <= 90

    def config(run, *layout):
        return tiny_config(tmp_path, "schedule.shape=constant", *layout, run=run)

    alone, whole = config("alone"), config("whole", *LAYOUTS[0])
    others = [config(f"run{number}", *layout) for number, layout in enumerate(LAYOUTS[1:])]
    # Two updates as a pipeline, the rest as the pipeline again, and sharded.
    halves = [config(run, *LAYOUTS[0], "train.steps=2") for run in ("same", "other")]
    rests = [config("same", *LAYOUTS[0]), config("other", *LAYOUTS[1])]
    jobs(0, 1, [alone.to_toml()])
    texts = [one.to_toml() for one in (whole, *others, *halves, *rests)]
    ranktest.run_ranks(jobs, 2, texts, timeout=JOB_S)
    assert len({round(loss, 3) for loss in losses(alone)}) == 4, "weights that stay would hide a wrong gradient"
    for one in (whole, *others, rests[1]):
        assert losses(one) == pytest.approx(losses(alone), rel=1e-6)
    assert losses(rests[0]) == losses(whole)
    assert_same_tensors(final_tensors(rests[0]), final_tensors(whole))
