"""Which errors of a rank are another rank's fault: that one is replaced."""

import pytest

from sixfold.dist_ckpt import LostPeerError
from sixfold.gpt.elastic.member import blames_a_peer
from sixfold.gpt.errors import TrainError
from sixfold.pipeline import ScheduleError


def heard():
    error = ScheduleError("rank 3 failed at [1/9] 1F0: DeviceLost: the device is gone", rank=1)
    error.of_peer = True
    return error


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("error", [heard(), LostPeerError("rank 1 is silent")], ids=["pipeline", "dist_ckpt"])
def test_what_a_rank_heard_of_another_one_is_not_its_own(error, wrapped):
    if wrapped:
        whole = TrainError("step 3 failed")
        whole.__cause__ = error
        error = whole
    assert blames_a_peer(error)


def test_what_its_own_stage_raised_is():
    own = ScheduleError("rank 3 failed at [1/9] 1F0: DeviceLost: the device is gone", rank=1)
    own.__cause__ = RuntimeError("the device is gone")
    assert not blames_a_peer(own)
