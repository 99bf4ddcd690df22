"""SIGTERM at any instant after the first step: in a step, a save, an evaluation, between them.

An instant is a call of a function of sixfold after the first step, counted by a profile function; the signal comes in
its first moment. Whatever the instant: the step at hand is done and saved, the end says so, and the run that goes on is
bitwise the run that nobody stopped.
"""

import os
import random
import signal
import sys
from pathlib import Path

import pytest
from gpt_helpers import tiny_config
from run_helpers import assert_same_tensors, final_tensors, lines, losses

from sixfold.dist_ckpt import retention
from sixfold.gpt import train
from sixfold.gpt.launch import stop_signals

SMALL = (
    "model.num_layers=1", "train.steps=3", "train.global_batch_size=2", "checkpoint.every=2", "eval.every=1",
    "eval.batches=2",
)  # fmt: skip


class Instants:
    """Counts the calls of sixfold's functions from the first step to the last; SIGTERM at the call ``at``."""

    def __init__(self, monkeypatch, at=-1):
        self.calls, self.where = 0, ""
        arm, disarm = stop_signals.StopFlag.arm, stop_signals.StopFlag.disarm

        def look(frame, event, argument):
            if event == "call" and "/sixfold/" in frame.f_code.co_filename:
                self.calls += 1
                if self.calls == at:
                    self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"
                    os.kill(os.getpid(), signal.SIGTERM)

        def armed(flag):
            arm(flag)
            if sys.getprofile() is None:
                sys.setprofile(look)

        def disarmed(flag):
            sys.setprofile(None)
            disarm(flag)

        monkeypatch.setattr(stop_signals.StopFlag, "arm", armed)
        monkeypatch.setattr(stop_signals.StopFlag, "disarm", disarmed)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody stops, and how many instants it has."""
    config = tiny_config(tmp_path_factory.mktemp("whole"), *SMALL)
    with pytest.MonkeyPatch.context() as patch:
        instants = Instants(patch)
        train(config)
    return config, instants.calls


def evaluations(config):
    return [(entry["step"], entry["loss"]) for entry in lines(config, "eval")]


@pytest.mark.slow
def test_sigterm_at_any_instant_saves_the_step_at_hand_and_loses_nothing(whole, tmp_path, monkeypatch, request):
    config, calls = whole
    assert calls > 1000, "the instants are in all packages"
    draw, count, late = random.Random(0), request.config.getoption("--instants"), 0
    for number in range(count):
        at = 1 + int((number + draw.random()) * (calls - 1) / count)
        asked = tiny_config(tmp_path, *SMALL, run=f"at-{at}")
        with monkeypatch.context() as patch:
            instants = Instants(patch, at)
            result = train(asked)
        where = f"at call {at} of {calls}, {instants.where}"
        root = Path(asked.run.dir) / "checkpoints"
        if not instants.where:  # a run makes fewer calls than the first one of a process, which imports and caches
            assert result.reason == "finished" and instants.calls < at, f"no call {at} of {instants.calls}"
            late += 1
            continue
        assert retention.latest(root) == retention.step_path(root, result.step), where
        [end] = lines(asked, "end")
        assert (end["step"], end["reason"]) == (result.step, result.reason), where
        assert result.reason == "sigterm" or result.step == 3, where
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, where
        assert train(asked).reason == "finished", where
        assert losses(asked) == losses(config), where
        assert evaluations(asked) == evaluations(config), where
        assert_same_tensors(final_tensors(asked), final_tensors(config))
    assert late <= count // 10, f"{late} of {count} instants lay behind the end of their run"
