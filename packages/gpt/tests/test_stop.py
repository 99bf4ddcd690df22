"""When a run that is asked to stop saves, and what evaluation it then owes."""

import os
import signal
import threading

import pytest
from gpt_helpers import tiny_config
from run_helpers import lines, losses

from sixfold.gpt import TrainError, loop, stop, train

EVALUATED = ("train.steps=3", "eval.every=1", "eval.batches=3")


@pytest.fixture
def asked_at(monkeypatch):
    """SIGTERM at the ``n``-th of the calls named: "step" of training, "batch" of evaluation."""

    def install(where, number):
        calls = {"step": 0, "batch": 0}
        step, any_of = loop.train_step, loop.any_of

        def note(kind):
            calls[kind] += 1
            if (kind, calls[kind]) == (where, number):
                os.kill(os.getpid(), signal.SIGTERM)

        def stepping(*args, **options):
            note("step")
            return step(*args, **options)

        def asking(control, mine):
            note("batch")
            return any_of(control, mine)

        monkeypatch.setattr(loop, "train_step", stepping)
        monkeypatch.setattr(loop, "any_of", asking)
        return calls

    yield install
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of three steps that nobody stops: its losses, and (step, loss) of its evaluations."""
    config = tiny_config(tmp_path_factory.mktemp("whole"), *EVALUATED)
    train(config)
    return losses(config), evaluations(config)


def evaluations(config):
    return [(entry["step"], entry["loss"]) for entry in lines(config, "eval")]


@pytest.mark.parametrize(("where", "number", "batches"), [("step", 2, 4), ("batch", 5, 6)])
def test_sigterm_saves_at_once_and_the_next_start_evaluates_what_was_left_out(
    tmp_path, asked_at, monkeypatch, whole, where, number, batches
):
    config = tiny_config(tmp_path, *EVALUATED)
    calls = asked_at(where, number)
    result = train(config)
    assert (result.reason, result.step, calls["batch"]) == ("sigterm", 2, batches)
    assert [entry["step"] for entry in lines(config, "save")] == [2]
    assert [entry["step"] for entry in lines(config, "eval")] == [1]
    monkeypatch.undo()
    assert train(config).reason == "finished"
    assert (losses(config), evaluations(config)) == whole


def test_an_evaluation_that_is_there_is_not_repeated_at_the_next_start(tmp_path):
    train(tiny_config(tmp_path, *EVALUATED))
    config = tiny_config(tmp_path, *EVALUATED, "train.steps=4")
    train(config)
    assert [entry["step"] for entry in lines(config, "eval")] == [1, 2, 3, 4]


def test_a_step_is_saved_before_it_is_evaluated(tmp_path, monkeypatch):
    config = tiny_config(tmp_path, *EVALUATED, "checkpoint.every=1")

    def die(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "evaluate", die)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    assert [entry["step"] for entry in lines(config, "save")] == [1]


def test_a_data_thread_that_hangs_ends_the_run_at_its_deadline(tmp_path, monkeypatch):
    config = tiny_config(tmp_path)
    free, reading, result = threading.Event(), loop.TokenStream.step, loop.Ahead.result
    hangs, limits = threading.Event(), []
    monkeypatch.setattr(loop, "CLOSE_S", 0.1)

    def hanging(self, samples, *args):
        if samples == 16:
            hangs.set()
            free.wait()
        return reading(self, samples, *args)

    def soon(self, seconds):  # a deadline that healthy reads of a busy machine meet, and that is not waited for
        limits.append(seconds)
        return result(self, 0.2 if hangs.is_set() else seconds)

    monkeypatch.setattr(loop.TokenStream, "step", hanging)
    monkeypatch.setattr(loop.Ahead, "result", soon)
    with pytest.raises(TrainError, match=r"step 2: rank 0 did not read its data within 120 s"):
        train(config)
    free.set()
    assert limits == [120.0] * 3
    assert [entry["step"] for entry in lines(config, "step")] == [1, 2]


def test_data_read_for_a_plan_has_the_deadline_too_and_is_read_once(tmp_path, monkeypatch):
    free, reading, result, read = threading.Event(), loop.TokenStream.step, loop.Ahead.result, []
    monkeypatch.setattr(loop, "CLOSE_S", 0.1)
    monkeypatch.setattr(loop, "plan_run", lambda run: run.coming_batch())
    monkeypatch.setattr(
        loop.TokenStream, "step", lambda self, at, *args: (read.append(at), reading(self, at, *args))[1]
    )
    config = tiny_config(tmp_path, "parallel.schedule=plan", "train.steps=2", run="healthy")
    train(config)
    assert read == [0, 8]
    monkeypatch.setattr(loop.TokenStream, "step", lambda *_: free.wait(60))
    monkeypatch.setattr(loop.Ahead, "result", lambda self, seconds: result(self, seconds / 1000))
    with pytest.raises(TrainError, match=r"step 0: rank 0 did not read its data within 120 s"):
        train(tiny_config(tmp_path, "parallel.schedule=plan"))
    free.set()


def test_two_signals_of_one_moment_are_one_and_a_further_one_ends_at_once(monkeypatch):
    killed = []
    monkeypatch.setattr(stop.os, "kill", lambda pid, number: killed.append((pid, number)))
    flag = stop.StopFlag()
    flag.arm()
    try:
        flag._on_signal(signal.SIGTERM, None)
        flag._on_signal(signal.SIGTERM, None)
        assert flag.asked and not killed
        monkeypatch.setattr(flag, "SAME_S", -1.0)
        flag._on_signal(signal.SIGTERM, None)
        assert killed == [(os.getpid(), signal.SIGTERM)]
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "the signal that it sends again must end it"
    finally:
        flag.disarm()
