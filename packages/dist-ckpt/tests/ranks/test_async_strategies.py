"""Strategies of users that save in the background, on two ranks: values of the call, one commit, errors on both."""

import pytest
import torch
import torch.distributed as dist

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, ShardedTensor, tools
from sixfold.dist_ckpt.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from sixfold.dist_ckpt.strategies.base import AsyncSaveShardedStrategy
from sixfold.dist_ckpt.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from sixfold.dist_ckpt.strategies.torch import TorchDistSaveShardedStrategy


class Wrapping(AsyncSaveShardedStrategy):
    """A user's strategy around the built-in one, whose format it writes."""

    def __init__(self, strategy):
        super().__init__("torch_dist", 1)
        self.strategy = strategy

    @property
    def can_handle_sharded_objects(self):
        return True

    def owns_file(self, name):
        return self.strategy.owns_file(name)

    def async_save(self, sharded_state_dict, checkpoint_dir):
        return self.strategy.async_save(sharded_state_dict, checkpoint_dir)


class Failing(Wrapping):
    def async_save(self, sharded_state_dict, checkpoint_dir):
        def write():
            raise LookupError("no room")

        return AsyncRequest(write if dist.get_rank() else None, (), [])


def both(rank, ranks, folder):
    w, twice = torch.full((3,), rank + 1.0), torch.arange(4.0)
    state = {
        "w": ShardedTensor.from_rank_offsets("w", w, (0, rank, ranks)),
        "twice": ShardedTensor.from_rank_offsets("twice", twice, replica_id=rank),
        "it": 7,
    }
    strategies = (
        Wrapping(TorchDistSaveShardedStrategy()),
        Wrapping(FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy())),
    )
    queue, found = AsyncCallsQueue(), []
    for number, strategy in enumerate(strategies):
        w.fill_(rank + 1.0)
        twice.copy_(torch.arange(4.0))
        request = dist_ckpt.save(state, folder / str(number), strategy, async_sharded_save=True)
        w.zero_()
        twice.zero_()
        assert not (folder / str(number)).exists()
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
        found.append(dist_ckpt.load(state, folder / str(number)))
        found[-1] = [found[-1]["w"].tolist(), found[-1]["twice"].tolist(), found[-1]["it"]]
    request = dist_ckpt.save(state, folder / "0", Failing(TorchDistSaveShardedStrategy()), async_sharded_save=True)
    queue.schedule_async_request(request)
    try:
        queue.maybe_finalize_async_calls(blocking=True)
    except CheckpointError as error:
        found.append(str(error))
    return found


@pytest.mark.slow
def test_users_async_strategies_commit_once_on_two_ranks(tmp_path):
    results = run_ranks(both, 2, tmp_path)
    for rank, (one, other, text) in enumerate(results):
        assert one == other == [[rank + 1.0] * 3, [0.0, 1.0, 2.0, 3.0], 7]
        assert "no room" in text
    assert results[0][2] == results[1][2]
    for name in ("0", "1"):
        assert tools.verify(tmp_path / name)["problems"] == []
    assert dist_ckpt.load_common_state_dict(tmp_path / "0") == {"it": 7}  # the older one stays
