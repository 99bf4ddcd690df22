"""A managed run of several ranks: FSDP2 and AdamW, stopped and restored at another world, the same decisions on all."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, CheckpointManager


def made(ranks):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def trained(rank, ranks, folder, last):
    """Train to step ``last`` from wherever the run is; the loss of each step, and how it began."""
    model, optimizer = made(ranks)
    manager = CheckpointManager(folder, every=2, keep_last=2, keep_every=6, best="loss")
    weights, moments = get_state_dict(model, optimizer)
    restored = manager.restore({"model": weights, "optim": moments})
    if restored is not None:
        loaded = restored.state
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
    losses, begin = {}, 0 if restored is None else restored.step
    for step in range(begin + 1, last + 1):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()  # the same batch on all ranks: the same gradients at any world
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.item()
        weights, moments = get_state_dict(model, optimizer)
        manager.save(step, {"model": weights, "optim": moments}, {"loss": loss})
    manager.close()
    return begin, losses, manager.steps(), manager.best()


@pytest.mark.slow
def test_a_run_goes_on_at_another_number_of_ranks_as_if_it_had_not_stopped(tmp_path):
    whole = run_ranks(trained, 2, tmp_path / "whole", 10, timeout=60)
    assert whole[0] == whole[1]
    first = run_ranks(trained, 2, tmp_path / "run", 5, timeout=60)
    then = run_ranks(trained, 1, tmp_path / "run", 7, timeout=60)
    last = run_ranks(trained, 2, tmp_path / "run", 10, timeout=60)
    assert [part[0][0] for part in (first, then, last)] == [0, 4, 6]
    losses = first[0][1] | then[0][1] | last[0][1]
    assert losses == pytest.approx(whole[0][1], rel=1e-5)
    best = min((loss, -step) for step, loss in whole[0][1].items() if step % 2 == 0)
    assert last[0][2] == sorted({6, 8, 10, -best[1]}) and last[0][3] == -best[1]


class Ended:
    """A background save that failed on rank 1 alone, as where a progress function of one rank raises."""

    def __init__(self, rank):
        self.rank = rank

    def wait(self):
        if self.rank:
            raise CheckpointError("a save that failed on rank 1")


def differs(rank, ranks, folder, what):
    manager = CheckpointManager(folder, background=False, timeout_s=20)
    manager.save(1, {"weight": torch.ones(2)}, {"loss": 0.5})
    with pytest.raises(CheckpointError) as error:
        if what == "metrics":
            manager.save(2, {"weight": torch.ones(2)}, {"loss": float(rank)})
        elif what == "no number":
            manager.save(2, {"weight": torch.ones(2)}, {"loss": "low" if rank else 0.5})
        elif what == "step of a rank":
            manager.save(2 + rank, {"weight": torch.ones(2)})
        elif what == "step to restore":
            manager.restore({"weight": torch.ones(2)}, step=1 + rank)
        elif what == "step to go back to":
            manager.discard_after(rank)
        elif what == "no step on one":
            manager.save(1.5 if rank else 2, {"weight": torch.ones(2)})
        elif what == "end of a save":
            manager._flight = Ended(rank)
            manager.wait()
        elif what == "call":
            manager.restore({"weight": torch.ones(2)}) if rank else manager.discard_after(1)
        elif what == "background":
            other = CheckpointManager(folder, background=bool(rank), timeout_s=20)
            other.save(2, {"weight": torch.ones(2)})
        elif what == "force":
            CheckpointManager(folder, every=5, timeout_s=20).save(3, {"weight": torch.ones(2)}, force=not rank)
        elif what == "every":
            CheckpointManager(folder, every=2 + rank, timeout_s=20).save(3, {"weight": torch.ones(2)})
        elif what == "a later step of one":
            later = CheckpointManager(folder, every=5, background=False, timeout_s=20)
            for step in (2, 3, 4) if rank else (2, 3):
                later.save(step, {"weight": torch.ones(2)})
            later.save(5, {"weight": torch.ones(2)})
        elif what == "a later step before the end":
            later = CheckpointManager(folder, every=5, timeout_s=20)
            later.save(2, {"weight": torch.ones(2)})
            later.save(3, {"weight": torch.ones(2)}, force=not rank)
            later.close()
        elif what == "another call":
            manager.restore({"weight": torch.ones(2)}) if not rank else dist_ckpt.load(
                {}, folder / "step-00000001", timeout_s=20
            )
        else:
            manager.restore({"weight": torch.ones(2)}, step=9)
    dist.barrier()
    return str(error.value), manager.steps()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("metrics", "metrics: {'loss': 0.0} on rank 0 and {'loss': 1.0} on rank 1"),
        ("no number", "metrics['loss'] is 'low'"),
        ("step", "no whole checkpoint of step 9; it has step 1"),
        ("step of a rank", "step: 2 on rank 0 and 3 on rank 1"),
        ("step to restore", "step: 1 on rank 0 and 2 on rank 1"),
        ("step to go back to", "step: 0 on rank 0 and 1 on rank 1"),
        ("no step on one", "step is 1.5; it is an integer >= 0"),
        ("call", "call: discard_after on rank 0 and restore on rank 1"),
        ("end of a save", "a save that failed on rank 1"),
        ("force", "call: save on rank 0 and no save on rank 1"),
        ("every", "call: no save on rank 0 and save on rank 1"),
        ("another call", "on rank 0 and None on rank 1"),
        ("a later step of one", "saved nothing: 2 to step 3 on rank 0 and 3 to step 4 on rank 1"),
        ("a later step before the end", "call: save on rank 0 and close on rank 1"),
        ("background", "background: False on rank 0 and True on rank 1"),
    ],
)
def test_what_one_rank_gives_otherwise_is_one_error_on_all(tmp_path, what, words):
    found = run_ranks(differs, 2, tmp_path, what, timeout=60)
    assert found[0] == found[1] and words in found[0][0] and found[0][1] == [1]
