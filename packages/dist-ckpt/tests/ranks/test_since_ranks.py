"""Saves with ``since`` on several ranks: frozen parts of FSDP2 and DDP models, and other numbers of ranks."""

import random

import pytest
import torch
import torch.distributed as dist
from dist_ckpt_helpers import flip_byte, one
from plain_tensors_helpers import assert_same, by_torch
from since_helpers import data_files, lora, new_bytes, shared, train, used_shares
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import CorruptError, ShardedTensor, ShardingError, tools


def sharded_lora(ranks, seed=0):
    model, _ = lora(layers=2, seed=seed)
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def whole(model):
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def train_and_save(rank, ranks, folder, first, since):
    """Three steps; the whole model after the last. Begins from ``since`` if there is one."""
    model, optimizer = sharded_lora(ranks)
    if since is not None:
        dist_ckpt.load({"model": model}, since)
    torch.manual_seed(0)
    for step in range(first, first + 3):
        train(model, optimizer)
        dist_ckpt.save({"model": model, "optimizer": optimizer}, folder / str(step), since=since)
        since = folder / str(step)
    return whole(model)


@pytest.mark.slow
def test_fsdp2_adapters_saved_by_four_ranks_and_gone_on_with_by_two(tmp_path):
    expected = run_ranks(train_and_save, 4, tmp_path, 0, None, timeout=120)[0]
    assert_same({name.removeprefix("model."): value for name, value in model_of(tmp_path / "2").items()}, expected)
    assert new_bytes(tmp_path / "2", tmp_path / "1") < new_bytes(tmp_path / "0") / 2
    expected = run_ranks(train_and_save, 2, tmp_path, 3, tmp_path / "2", timeout=120)[0]
    for step in range(6):
        assert tools.verify(tmp_path / str(step))["ok"]
        assert min(used_shares(tmp_path / str(step)).values()) >= 0.49
    assert_same({name.removeprefix("model."): value for name, value in model_of(tmp_path / "5").items()}, expected)
    assert new_bytes(tmp_path / "5", tmp_path / "4") < new_bytes(tmp_path / "0") / 2, "linked at the new number too"


def model_of(folder):
    return {name: value for name, value in by_torch(folder).items() if name.startswith("model.")}


def save_replicas(rank, ranks, folder, first, since):
    """DDP: every rank has all of it, and each tensor is written by one of them."""
    model, optimizer = lora(layers=3)
    model = DistributedDataParallel(model)
    for step in range(first, first + 3):
        dist_ckpt.save({"model": model, "optimizer": optimizer}, folder / str(step), since=since)
        since = folder / str(step)
        train(model.module, optimizer)
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), 0)
        for state in optimizer.state.values():
            for value in state.values():
                dist.broadcast(value, 0)
    return True


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (2, 2)])
@pytest.mark.slow
def test_replicas_saved_at_one_number_of_ranks_are_linked_or_written_at_another(tmp_path, before, after):
    run_ranks(save_replicas, before, tmp_path, 0, None, timeout=120)
    run_ranks(save_replicas, after, tmp_path, 3, tmp_path / "2", timeout=120)
    frozen, _ = lora(layers=3)
    for step in range(6):
        found = model_of(tmp_path / str(step))
        for name, value in frozen.state_dict().items():
            assert ".base." not in name or torch.equal(found[f"model.{name}"], value)
        assert tools.verify(tmp_path / str(step))["ok"]
        assert min(used_shares(tmp_path / str(step)).values()) >= 0.49
    size = sum(p.nbytes for p in frozen.parameters() if not p.requires_grad)
    wrote = [new_bytes(tmp_path / str(step), tmp_path / str(step - 1)) for step in (2, 5)]
    assert max(wrote) < size, "once both have written as they are now, what is frozen is linked"


def save_while_one_rank_links_nothing(rank, ranks, folder):
    """One rank cannot link, as if the folder had gone when it looked: it writes what the others link."""
    values = {f"t{i}": torch.full((40, 100), float(i)) for i in range(8)}
    dist_ckpt.save(values, folder / "0")
    if rank == 1:
        from sixfold.dist_ckpt.save_load import unchanged

        def gone(path):
            raise FileNotFoundError(path)

        unchanged.open_checkpoint = gone
    dist_ckpt.save(values, folder / "1", since=folder / "0")
    return True


def test_ranks_that_find_the_older_folder_and_ranks_that_do_not_make_one_whole_save(tmp_path):
    run_ranks(save_while_one_rank_links_nothing, 2, tmp_path)
    assert_same(by_torch(tmp_path / "1"), by_torch(tmp_path / "0"))
    assert tools.verify(tmp_path / "1")["ok"]
    assert len(shared(tmp_path / "1", tmp_path / "0")) == 1


def save_with_two_sinces(rank, ranks, folder):
    for step in "01":
        dist_ckpt.save({"t": torch.zeros(9)}, folder / step)
    with pytest.raises(ShardingError, match="since differs between ranks") as told:
        dist_ckpt.save({"t": torch.zeros(9)}, folder / "2", since=folder / str(rank))
    return str(told.value)


def test_ranks_with_different_sinces_are_told_on_all(tmp_path):
    texts = run_ranks(save_with_two_sinces, 2, tmp_path)
    assert texts[0] == texts[1] and not (tmp_path / "2").exists()


def save_in_background(rank, ranks, folder):
    frozen = ShardedTensor.from_rank_offsets("f", torch.arange(30_000.0) + rank, (0, rank, ranks))
    for step in range(3):
        trained = ShardedTensor.from_rank_offsets("w", torch.full((500,), float(step)), (0, rank, ranks))
        since = folder / str(step - 1) if step else None
        dist_ckpt.async_save({"f": frozen, "w": trained}, folder / str(step), since=since, timeout_s=60).wait()
    return True


@pytest.mark.slow
def test_background_saves_of_two_ranks_link_and_damage_of_any_linked_byte_is_found(tmp_path, corruptions):
    run_ranks(save_in_background, 2, tmp_path, timeout=120)
    folders = [tmp_path / str(step) for step in range(3)]
    linked = shared(folders[2], folders[0])
    assert len(linked) == 2 and new_bytes(folders[2], folders[1]) < 20_000
    draw, asked = random.Random(3), {"f": one("f", torch.zeros(60_000)), "w": one("w", torch.zeros(1_000))}
    for _ in range(max(200, corruptions)):
        path = draw.choice(sorted(path for path in folders[2].iterdir() if path.stat().st_size))
        place = draw.randrange(path.stat().st_size)
        flip_byte(path, place)
        hurt = folders if path.name in linked else folders[2:]
        for folder in folders:
            assert tools.verify(folder)["ok"] == (folder not in hurt), f"{path.name} at {place}"
        with pytest.raises(CorruptError):
            dist_ckpt.load(asked, folders[2], group=None, verify="full")
        flip_byte(path, place)
    dist_ckpt.load(asked, folders[2], group=None, verify="full")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen, self.head = nn.Linear(200, 200).requires_grad_(False), nn.Linear(200, 3)


def save_wrapped(rank, ranks, folder):
    """The fully parallel wrapper cuts replicas in its own way, the same each time."""
    from sixfold.dist_ckpt.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    from sixfold.dist_ckpt.strategies.torch import TorchDistSaveShardedStrategy

    torch.manual_seed(0)
    values = {name: value.detach() for name, value in Net().state_dict().items()}
    for step in range(3):
        values["head.weight"] = values["head.weight"] + 1
        records = {
            name: ShardedTensor.from_rank_offsets(name, value, replica_id=rank) for name, value in values.items()
        }
        wrapper = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy())
        dist_ckpt.save(records, folder / str(step), wrapper, since=folder / str(step - 1) if step else None)
    return True


def test_shares_of_the_fully_parallel_wrapper_are_linked(tmp_path):
    run_ranks(save_wrapped, 2, tmp_path)
    assert new_bytes(tmp_path / "2", tmp_path / "1") < 10_000 < 200 * 200
    assert torch.equal(by_torch(tmp_path / "2")["frozen.weight"], by_torch(tmp_path / "0")["frozen.weight"])
    assert data_files(tmp_path / "2") and tools.verify(tmp_path / "2")["ok"]
