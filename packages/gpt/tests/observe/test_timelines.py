"""Timelines and losses by dataset: what is read, and what is refused."""

import pytest
import torch
from gpt_helpers import tiny_config

from sixfold.gpt import train
from sixfold.gpt.data.loss_by_dataset import SampleLosses, mean_by_dataset, sums_by_dataset, token_loss
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.observe.curves import scalars
from sixfold.gpt.observe.metrics import describe
from sixfold.gpt.observe.timeline import TimelineWriter, read_timeline, show
from sixfold.pipeline import Action, PipelineRunner, one_f_one_b
from sixfold.pipeline.simulation.simulate import measured


def rows(*datasets, targets=4.0):
    return SampleLosses(
        dataset=torch.tensor(datasets), targets=torch.full((len(datasets),), targets, dtype=torch.float64)
    )


def test_the_loss_and_its_gradient_are_those_of_the_plain_sum():
    losses = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).exp().requires_grad_()
    assert torch.equal(token_loss(losses, rows(0, 1, 0)), losses.sum())
    token_loss(losses, rows(0, 1, 0)).backward()
    assert torch.equal(losses.grad, torch.ones(3, 4))


def test_a_microbatch_that_is_computed_again_counts_once():
    one = rows(0, 1)
    for _ in range(2):  # as RECOMPUTE does
        token_loss(torch.tensor([[1.0, 1.0], [3.0, 3.0]]), one)
    assert mean_by_dataset(sums_by_dataset([one], 3, torch.device("cpu")).tolist()) == {0: 0.5, 1: 1.5}, (
        "of 2 and 6 nats over 4 targets each; dataset 2 gave nothing"
    )


def test_losses_that_are_not_per_token_are_not_shared_out():
    one = rows(0, 1)
    assert float(token_loss(torch.tensor([1.0, 2.0, 3.0]), one)) == 6.0
    assert one.nats is None and not sums_by_dataset([one, None], 2, torch.device("cpu")).any()


def test_a_timeline_that_no_costs_fit_and_one_that_cannot_be_written_end_no_run_and_are_told_once(tmp_path, capsys):
    program = one_f_one_b(2, 2)
    forwards = measured([(0, Action.parse("0F0"), 0.0, 1.0), (1, Action.parse("1F0"), 1.0, 2.0)])
    keeper = TimelineWriter(tmp_path)
    for step in (1, 2):
        line = keeper.keep(step, program, forwards)
        assert line["bubble_on_paper"] is None and line["bubble"] == pytest.approx(1.0) and line["seconds"] == 2.0
        assert line["trace"] == str(tmp_path / "timeline" / f"step-0000000{step}.json")
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and told[0].startswith("sixfold: the timeline of step 1 has no bubble on paper: ")
    assert describe({"kind": "timeline", "step": 1} | line).startswith("step 1  bubble 1.000, on paper unknown; ")
    assert scalars({"kind": "timeline"} | line) == {"pipeline/bubble": 1.0}
    (tmp_path / "full").write_text("no folder")
    assert TimelineWriter(tmp_path / "full").keep(1, program, forwards) is None
    assert "the timeline of step 1 is not kept: " in capsys.readouterr().err


@pytest.mark.slow
def test_only_the_steps_that_are_asked_for_are_timed(tmp_path, monkeypatch):
    config, events = tiny_config(tmp_path, "train.steps=3", "log.timeline_steps=[2]", "eval.every=3"), []
    for name in ("step", "evaluate"):
        call = getattr(PipelineRunner, name)

        def seen(*args, call=call, **options):
            result = call(*args, **options)
            events.append(bool(result.events))
            return result

        monkeypatch.setattr(PipelineRunner, name, seen)
    train(config)
    assert events[:3] == [False, True, False] and len(events) > 3 and not any(events[3:])
    assert read_timeline(config.run.dir)[0] == 2


def test_a_run_without_timelines_and_a_step_without_one_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no timeline; train with log\.timeline_steps"):
        read_timeline(tmp_path)
    (tmp_path / "timeline").mkdir()
    (tmp_path / "timeline" / "step-00000004.json").write_text("{")
    (tmp_path / "timeline" / "step-00000004.txt").write_text("0: 0F0 0B0")
    with pytest.raises(ConfigError, match=r"step 5 of .* was not timed; timed were 4"):
        read_timeline(tmp_path, 5)
    with pytest.raises(ConfigError, match=r"timeline of step 4 .* cannot be read: "):
        read_timeline(tmp_path)
    with pytest.raises(ConfigError, match=r"--out is 'a\.pdf'; a timeline ends in"):
        show(tmp_path, "a.pdf")
