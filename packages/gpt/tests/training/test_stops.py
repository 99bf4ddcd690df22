"""When a run that is asked to stop saves, and what evaluation it then owes."""

import faulthandler
import os
import signal
import tempfile
import threading

import pytest
from gpt_helpers import tiny_config
from run_helpers import lines, losses

from sixfold.gpt import TrainError, train
from sixfold.gpt.launch import stop_signals
from sixfold.gpt.training import loop

EVALUATED = ("train.steps=3", "eval.every=1", "eval.batches=3")


@pytest.fixture
def asked_at(monkeypatch):
    """SIGTERM at the ``n``-th of the calls named: "step" of training, "batch" of evaluation."""

    def install(where, number):
        calls = {"step": 0, "batch": 0}
        step, any_rank = loop.train_step, loop.any_rank

        def note(kind):
            calls[kind] += 1
            if (kind, calls[kind]) == (where, number):
                os.kill(os.getpid(), signal.SIGTERM)

        def stepping(*args, **options):
            note("step")
            return step(*args, **options)

        def asking(control, mine):
            note("batch")
            return any_rank(control, mine)

        monkeypatch.setattr(loop, "train_step", stepping)
        monkeypatch.setattr(loop, "any_rank", asking)
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
@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_data_thread_that_hangs_ends_the_run_at_its_deadline(tmp_path, monkeypatch):
    config = tiny_config(tmp_path)
    free, reading, result = threading.Event(), loop.TokenStream.step, loop.Prefetch.result
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
    monkeypatch.setattr(loop.Prefetch, "result", soon)
    with pytest.raises(TrainError, match=r"step 3: rank 0 did not read its data within 120 s"):
        train(config)
    free.set()
    assert limits == [120.0] * 3
    assert [entry["step"] for entry in lines(config, "step")] == [1, 2]


@pytest.mark.slow
def test_data_read_for_a_plan_has_the_deadline_too_and_is_read_once(tmp_path, monkeypatch):
    free, reading, result, read = threading.Event(), loop.TokenStream.step, loop.Prefetch.result, []
    monkeypatch.setattr(loop, "CLOSE_S", 0.1)
    monkeypatch.setattr(loop, "plan_run", lambda run: run.coming_batch())
    monkeypatch.setattr(
        loop.TokenStream, "step", lambda self, at, *args: (read.append(at), reading(self, at, *args))[1]
    )
    config = tiny_config(tmp_path, "parallel.schedule=plan", "train.steps=2", run="healthy")
    train(config)
    assert read == [0, 8]
    monkeypatch.setattr(loop.TokenStream, "step", lambda *_: free.wait(60))
    monkeypatch.setattr(loop.Prefetch, "result", lambda self, seconds: result(self, seconds / 1000))
    with pytest.raises(TrainError, match=r"step 1: rank 0 did not read its data within 120 s"):
        train(tiny_config(tmp_path, "parallel.schedule=plan"))
    free.set()


def test_a_signal_later_than_the_same_moment_ends_the_process_at_once_with_a_status_that_is_not_saved(monkeypatch):
    ended = []
    monkeypatch.setattr(stop_signals.os, "_exit", ended.append)
    flag = stop_signals.StopFlag()
    flag.arm()
    try:
        flag._on_signal(signal.SIGTERM, None)
        flag._on_signal(signal.SIGTERM, None)
        assert flag.asked and not ended
        monkeypatch.setattr(stop_signals, "SAME_S", -1.0)
        flag._on_signal(signal.SIGTERM, None)
        assert ended == [137], "143 says that the run is saved"
    finally:
        flag.disarm()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


PHASES = {"first step": ("train_step", 1, 1), "a step": ("train_step", 2, 2), "a save": ("checkpoint.save", 1, 2),
          "an evaluation": ("evaluate", 1, 2)}  # fmt: skip
OF = {
    "one SIGTERM": [signal.SIGTERM], "two SIGTERMs": [signal.SIGTERM] * 2, "three SIGTERMs": [signal.SIGTERM] * 3,
    "a hang-up": [signal.SIGHUP], "a cluster's USR1 and USR2": [signal.SIGUSR1, signal.SIGUSR2],
    "Ctrl-C": [signal.SIGINT], "a double Ctrl-C": [signal.SIGINT] * 2,
    "a hang-up and SIGTERM": [signal.SIGHUP, signal.SIGTERM],
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("signals", OF)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.slow
def test_signals_of_one_moment_in_any_phase_end_in_a_saved_step(tmp_path, monkeypatch, phase, signals):
    config = tiny_config(tmp_path, "model.num_layers=1", "train.steps=4", "checkpoint.every=2", "eval.every=2")
    place, number, last = PHASES[phase]
    owner, name = (loop.training_state, "save") if place == "checkpoint.save" else (loop, place)
    function, calls = getattr(owner, name), []

    def signalled(*args, **options):
        calls.append(place)
        if len(calls) == number:
            for one in OF[signals]:
                os.kill(os.getpid(), one)
        return function(*args, **options)

    monkeypatch.setattr(owner, name, signalled)
    if signal.SIGINT in OF[signals]:  # the script that called train ends, too
        with pytest.raises(KeyboardInterrupt, match="which is saved"):
            train(config)
    else:
        assert train(config).reason == "sigterm"
    [end] = lines(config, "end")
    # Asked within the save or the evaluation of a step: that step is the last, or the one that follows it.
    assert end["reason"] == "sigterm" and end["step"] in (last, last + 1)
    assert [entry["step"] for entry in lines(config, "save")][-1] == end["step"]
    given_back = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    assert [signal.getsignal(one) for one in given_back] == [signal.SIG_DFL] * 4
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_a_hang_up_that_nohup_ignores_and_a_callers_own_ctrl_c_stay_as_they_are(tmp_path):
    mine = []
    before = [signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.signal(signal.SIGINT, lambda *_: mine.append(1))]
    flag = stop_signals.StopFlag()
    try:
        flag.arm()
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGINT)
        flag.disarm()
        assert mine == [1] and not flag.asked
    finally:
        signal.signal(signal.SIGHUP, before[0])
        signal.signal(signal.SIGINT, before[1])


def test_what_faulthandler_has_registered_stays():
    """People have it print all stacks at SIGUSR1; Python's own table of handlers does not know of it."""
    flag = stop_signals.StopFlag()
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        try:
            flag.arm()
            os.kill(os.getpid(), signal.SIGUSR1)
            file.seek(0)
            assert "most recent call first" in file.read() and not flag.asked
        finally:
            flag.disarm()
            faulthandler.unregister(signal.SIGUSR1)
    flag.arm()
    os.kill(os.getpid(), signal.SIGUSR1)
    flag.disarm()
    assert flag.asked


@pytest.mark.parametrize(("minutes", "saves"), [("1e-9", [1, 2, 3]), ("0", [3])])
def test_a_run_saves_by_time_from_its_first_step_on(tmp_path, minutes, saves):
    config = tiny_config(tmp_path, "model.num_layers=1", "train.steps=3", f"checkpoint.every_minutes={minutes}")
    train(config)
    assert [entry["step"] for entry in lines(config, "save")] == saves


@pytest.mark.slow
def test_minutes_count_from_the_newest_save_of_any_kind(tmp_path, monkeypatch):
    config = tiny_config(tmp_path, "model.num_layers=1", "train.steps=9", "checkpoint.every=3")
    assert config.checkpoint.every_minutes > 0, "a run that says nothing of saves saves by time"
    now, step = [0.0], loop.train_step

    class Clock:
        monotonic = staticmethod(lambda: now[0])

    def stepping(*args, **options):
        now[0] += 60 * config.checkpoint.every_minutes / 2  # two steps are as long as the time
        return step(*args, **options)

    monkeypatch.setattr(loop, "train_step", stepping)
    monkeypatch.setattr(loop, "time", Clock)
    train(config)
    # Due is asked before the step: three steps are never over without a save, and the time is over after two.
    assert [entry["step"] for entry in lines(config, "save")] == [3, 6, 9]
    other = tiny_config(tmp_path, "model.num_layers=1", "train.steps=9", run="other")
    train(other)
    assert [entry["step"] for entry in lines(other, "save")] == [3, 6, 9]
