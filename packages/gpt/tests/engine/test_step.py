"""What stands between a step's messages and its optimizer."""

import pytest
import torch
from gpt_helpers import tiny_config

from sixfold.gpt import train
from sixfold.pipeline import PipelineRunner, PipelineTimeout


@pytest.mark.slow
def test_a_message_that_missed_its_deadline_is_told_before_the_optimizer_steps(tmp_path, monkeypatch):
    told = []

    def check(runner):
        told.append("check")
        if told.count("check") == 2:
            raise PipelineTimeout("rank 0 waits at [9/12] 0RECV_B1 for rank 1")

    step = torch.optim.AdamW.step
    monkeypatch.setattr(PipelineRunner, "check", check)
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda *args, **kwargs: (told.append("step"), step(*args, **kwargs))[1]
    )
    with pytest.raises(Exception, match="0RECV_B1"):
        train(tiny_config(tmp_path, "train.steps=3"))
    assert told == ["check", "step", "check"]
