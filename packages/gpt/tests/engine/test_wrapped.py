"""An error inside a pipeline is judged and told by what a stage raised, not by the ScheduleError around it."""

import errno

import pytest
import torch
from gpt_helpers import tiny_config
from torch import nn

from sixfold.dist_ckpt import MismatchError, StorageError, UnsafeError
from sixfold.fsdp.errors import FsdpError
from sixfold.gpt import ConfigError, TrainError, train
from sixfold.gpt.commands import train as train_verb
from sixfold.gpt.errors import FinalError
from sixfold.gpt.launch.spawn import Failure, StopRequests, _outcome, _Rank, is_final, text_of
from sixfold.gpt.model.decoder import Block
from sixfold.indexed_data import IndexedDataError
from sixfold.pipeline import PipelineRunner, PipelineTimeout, ScheduleError, Stage, schedules


class Failing(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        raise self.error


def wrapped(error):
    """``error`` of a forward, as a pipeline's runner raises it."""
    runner = PipelineRunner(schedules.gpipe(1, 1), [Stage(Failing(error), 0)], loss_fn=nn.functional.mse_loss)
    with pytest.raises(ScheduleError) as found:
        runner.step(torch.zeros(1, 1), torch.zeros(1, 1))
    assert found.value is not error
    return found.value


FINAL = [
    FinalError("the disk is full"),
    ConfigError("a wrong key"),
    IndexedDataError("no such pair"),
    ScheduleError("a rule of a stage"),
    StorageError("disk full", errno.ENOSPC),
    OSError(errno.ENOSPC, "disk full"),
]
PASSING = [
    RuntimeError("CUDA error: uncorrectable ECC error"),
    FsdpError("rank 1 lives but did not come"),
    TrainError("another rank died"),
    ValueError("of nobody's package"),
]


@pytest.mark.parametrize("error", FINAL + PASSING, ids=lambda error: type(error).__name__)
def test_a_wrapped_error_is_final_where_what_the_stage_raised_is(error):
    assert is_final(wrapped(error)) is (error in FINAL)


def test_a_message_that_did_not_come_is_never_final():
    assert not is_final(PipelineTimeout("rank 0 waits at 0RECV_B0 for rank 1"))
    assert not is_final(wrapped(PipelineTimeout("rank 0 waits at 0RECV_B0 for rank 1")))
    assert is_final(ScheduleError("rank 0 [3] 0F1: it comes twice"))


@pytest.mark.parametrize("error", [MismatchError("no such key"), UnsafeError("os.system")])
def test_a_checkpoint_that_is_another_or_unsafe_is_so_at_the_next_start(error):
    assert is_final(error)


def outcome_of(*failures):
    ranks = [_Rank(rank=f.rank, process=None, channel=None, failure=f) for f in failures]
    with pytest.raises(train_verb.RankError) as found:
        _outcome(ranks, StopRequests(), [])
    return found.value


def test_a_killed_rank_is_lost_whatever_its_peers_say_of_it():
    killed = Failure(rank=1, time=2.0, text="rank 1 was killed by SIGKILL", killed_by=9)
    peer = Failure(rank=0, time=1.0, text="rank 0: no answer", final=True)
    assert not outcome_of(peer, killed).final
    assert outcome_of(peer).final
    aborted = Failure(rank=1, time=2.0, text="rank 1 was killed by SIGABRT", killed_by=6)
    assert outcome_of(peer, aborted).final, "torch aborts a process whose peers are gone"


def test_a_fault_of_a_stages_code_is_told_with_where_it_is():
    text = text_of(wrapped(KeyError("attention_mask")), rank=1, ranks=2)
    assert text.startswith("rank 1: rank 0 failed at [0/3] 0F0: KeyError: 'attention_mask'\nTraceback"), text
    assert "test_wrapped.py" in text and text.endswith("KeyError: 'attention_mask'")
    assert text_of(wrapped(FsdpError("no answer")), rank=1, ranks=2).count("\n") == 0
    assert text_of(PipelineTimeout("no answer"), rank=1, ranks=2) == "rank 1: no answer"


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_memory_that_runs_out_in_a_layer_says_what_to_change(tmp_path, monkeypatch, where):
    forward = Block.forward

    def too_much(*_):
        torch.empty(2**50)

    def greedy(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        too_much() if where == "forward" else out.register_hook(too_much)
        return out

    monkeypatch.setattr(Block, "forward", greedy)
    with pytest.raises(FinalError, match=r"rank 0: memory ran out: \d+ bytes .*train\.micro_batch_size"):
        train(tiny_config(tmp_path, "train.steps=1"))
