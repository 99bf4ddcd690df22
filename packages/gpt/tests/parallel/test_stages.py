"""Layers to stages."""

from types import SimpleNamespace

import pytest
import torch
from config_helpers import config_with
from hypothesis import given
from hypothesis import strategies as st

from sixfold.gpt.engine import rank_model as build
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.parallel.stages import stage_layers


@given(layers=st.integers(0, 60), stages=st.integers(1, 20))
def test_every_layer_lies_on_exactly_one_stage_in_order(layers, stages):
    cut = stage_layers(layers, stages)
    assert len(cut) == stages
    assert [layer for stage in cut for layer in stage] == list(range(layers))
    counts = [len(stage) for stage in cut]
    assert max(counts) - min(counts) <= 1
    assert counts[0] == min(counts)


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [(8, 4, [2, 2, 2, 2]), (9, 4, [2, 3, 2, 2]), (11, 4, [2, 3, 3, 3]), (2, 4, [0, 1, 1, 0]), (30, 4, [7, 8, 8, 7])],
)
def test_the_remainder_goes_to_the_stages_after_the_first(layers, stages, counts):
    assert [len(stage) for stage in stage_layers(layers, stages)] == counts


def test_counts_may_be_given():
    assert stage_layers(5, 3, [0, 4, 1]) == [range(0), range(4), range(4, 5)]


@pytest.mark.parametrize(
    ("layers", "stages", "given_counts"), [(5, 3, [2, 2]), (5, 2, [2, 2]), (5, 2, [6, -1]), (5, 0, ()), (-1, 1, ())]
)
def test_counts_that_do_not_fit_are_refused(layers, stages, given_counts):
    with pytest.raises(ConfigError):
        stage_layers(layers, stages, given_counts)


@pytest.mark.parametrize(
    ("overrides", "edges", "shapes"),
    [((), None, False), (("pipeline.edges=one", "pipeline.dynamic_shapes=announced"), "one", "announced")],
)
def test_what_messages_travel_over_is_handed_to_the_pipeline(monkeypatch, overrides, edges, shapes):
    told: dict[str, object] = {}
    monkeypatch.setattr(build.pipeline, "PipelineRunner", lambda *_, **options: told.update(options))
    mesh, world = SimpleNamespace(pipeline=None), SimpleNamespace(device=torch.device("cpu"), store=None)
    build._runner(config_with("parallel.pp=2", *overrides), mesh, world, None, [])
    assert (told["edges"], told["dynamic_shapes"]) == (edges, shapes)
