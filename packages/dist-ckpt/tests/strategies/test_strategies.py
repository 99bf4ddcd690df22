"""Strategies: the registry, strategies of users, and that every composition of saving and loading is equivalent."""

import errno
import json
import os
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from dist_ckpt_helpers import flip_byte, one

from sixfold import dist_ckpt
from sixfold.dist_ckpt import (
    CheckpointError,
    CorruptError,
    MismatchError,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    ShardingError,
    StorageError,
    UnsafeError,
    strategies,
    tools,
)
from sixfold.dist_ckpt.strategies import base
from sixfold.dist_ckpt.strategies.common import TorchCommonLoadStrategy, TorchCommonSaveStrategy
from sixfold.dist_ckpt.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from sixfold.dist_ckpt.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy


class OneFilePerKey(base.SaveShardedStrategy):
    """A user's format: whole tensors only, each with torch.save; objects are left to the common strategy."""

    def __init__(self):
        super().__init__("one_file", 3)

    def owns_file(self, name):
        return name.endswith(".whole")

    def save(self, sharded_state_dict, checkpoint_dir):
        def walk(node):
            if isinstance(node, dict):
                for child in node.values():
                    walk(child)
            elif isinstance(node, ShardedTensor) and node.replica_id == 0:
                assert node.local_shape == node.global_shape
                torch.save(node.data.detach().clone(), Path(checkpoint_dir) / f"{node.key}.whole")
            else:
                assert isinstance(node, ShardedTensor)

        walk(sharded_state_dict)


class LoadOneFilePerKey(base.LoadShardedStrategy):
    def check_backend_compatibility(self, loaded_backend):
        if loaded_backend != "one_file":
            raise MismatchError(f"{loaded_backend} is no one_file")

    def check_version_compatibility(self, loaded_version):
        assert loaded_version == 3

    def load_tensors_metadata(self, checkpoint_dir):
        tensors = {path.stem: torch.load(path) for path in Path(checkpoint_dir).glob("*.whole")}
        return {key: one(key, tensor).without_data() for key, tensor in tensors.items()}

    def load(self, sharded_state_dict, checkpoint_dir):
        if isinstance(sharded_state_dict, dict):
            return {key: self.load(child, checkpoint_dir) for key, child in sharded_state_dict.items()}
        record = sharded_state_dict
        whole = torch.load(Path(checkpoint_dir) / f"{record.key}.whole")
        return whole[tuple(slice(o, o + n) for o, n in zip(record.global_offset, record.local_shape, strict=True))]


class Counting(base.SaveShardedStrategy):
    """A user's wrapper of the recommended format: it adds nothing but a count."""

    can_handle_sharded_objects = True

    def __init__(self, inner):
        super().__init__(inner.backend, inner.version)
        self.inner, self.calls = inner, 0

    def save(self, sharded_state_dict, checkpoint_dir):
        self.calls += 1
        self.inner.save(sharded_state_dict, checkpoint_dir)


class LoadCounting(base.LoadShardedStrategy):
    can_handle_sharded_objects = True

    def __init__(self, inner):
        self.inner, self.calls = inner, 0

    def check_backend_compatibility(self, loaded_backend):
        self.inner.check_backend_compatibility(loaded_backend)

    def check_version_compatibility(self, loaded_version):
        self.inner.check_version_compatibility(loaded_version)

    def load_tensors_metadata(self, checkpoint_dir):
        return self.inner.load_tensors_metadata(checkpoint_dir)

    def load_sharded_metadata(self, checkpoint_dir):
        return self.inner.load_sharded_metadata(checkpoint_dir)

    def load(self, sharded_state_dict, checkpoint_dir):
        self.calls += 1
        return self.inner.load(sharded_state_dict, checkpoint_dir)


class JsonCommon(base.SaveCommonStrategy):
    def __init__(self):
        super().__init__("json", 1)

    def save_common(self, common_state_dict, checkpoint_dir):
        (Path(checkpoint_dir) / "common.pt").write_text(json.dumps(common_state_dict))


class LoadJsonCommon(base.LoadCommonStrategy):
    def check_backend_compatibility(self, loaded_backend):
        assert loaded_backend == "json"

    def check_version_compatibility(self, loaded_version):
        assert loaded_version == 1

    def load_common(self, checkpoint_dir):
        return json.loads((Path(checkpoint_dir) / "common.pt").read_text())


@pytest.fixture
def registered(monkeypatch):
    """The user's formats in the registry, for this test."""
    monkeypatch.setattr(base, "_registered", dict(base._registered))
    strategies.register("save_sharded", "one_file", 3, OneFilePerKey())
    strategies.register(strategies.StrategyAction.LOAD_SHARDED, "one_file", 3, LoadOneFilePerKey())
    strategies.register("save_common", "json", 1, JsonCommon())
    strategies.register("load_common", "json", 1, LoadJsonCommon())


def state(fill):
    def halves(key, data, replica_id, flattened_range):
        return {"low": one(f"{key}.low", data[:2], replica_id=replica_id), "high": one(f"{key}.high", data[2:])}

    def tensor(*shape, dtype=torch.float32):
        count = torch.Size(shape).numel()
        return (torch.arange(count).view(shape) * (1 if fill else 0)).to(dtype)

    return {
        "model": {
            "w": one("w", tensor(4, 6)),
            "list": [one("a", tensor(3, dtype=torch.int64)), one("b", tensor(2, 2, dtype=torch.bfloat16))],
            "copy": one("w", tensor(4, 6), replica_id=1),
            "made": ShardedTensorFactory("f", tensor(5, 2), halves, lambda d: torch.cat([d["low"], d["high"]])),
        },
        "rng": [ShardedObject("rng", {"cell": i} if fill else None, (2,), (i,)) for i in range(2)],
        "here": dist_ckpt.LocalNonpersistentObject("mine"),
        "step": 7 if fill else 0,
        "args": {"names": ["x", "y"]} if fill else {},
    }


def assert_same(loaded, what=""):
    expected = state(True)
    assert torch.equal(loaded["model"]["w"], expected["model"]["w"].data), what
    assert torch.equal(loaded["model"]["copy"], expected["model"]["w"].data), what
    for got, wanted in zip(loaded["model"]["list"], expected["model"]["list"], strict=True):
        assert torch.equal(got, wanted.data), what
    assert torch.equal(loaded["model"]["made"], expected["model"]["made"].data), what
    assert loaded["rng"] == [{"cell": 0}, {"cell": 1}], what
    assert (loaded["here"], loaded["step"], loaded["args"]) == ("mine", 7, {"names": ["x", "y"]}), what


def compositions():
    savers = {
        "torch_dist": {
            "default": lambda: None,
            "tuple": lambda: ("torch_dist", 1),
            "object": lambda: TorchDistSaveShardedStrategy(),
            "one thread, no cache": lambda: TorchDistSaveShardedStrategy(thread_count=1, cached_metadata=False),
            "parallel": lambda: FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy()),
            "parallel, cached": lambda: FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), None, True),
            "user's wrapper": lambda: Counting(TorchDistSaveShardedStrategy()),
            "parallel user's": lambda: FullyParallelSaveStrategyWrapper(Counting(TorchDistSaveShardedStrategy())),
        },
        "zarr": {
            "tuple": lambda: ("zarr", 1),
            "parallel": lambda: FullyParallelSaveStrategyWrapper(base.get("save_sharded", "zarr", 1)),
        },
        "one_file": {
            "tuple": lambda: ("one_file", 3),
            "object": lambda: OneFilePerKey(),
            "parallel": lambda: FullyParallelSaveStrategyWrapper(OneFilePerKey()),
        },
    }
    loaders = {
        "torch_dist": {
            "default": lambda: None,
            "tuple": lambda: ("torch_dist", 1),
            "object": lambda: TorchDistLoadShardedStrategy(),
            "parallel": lambda: FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy()),
            "parallel, rounds": lambda: FullyParallelLoadStrategyWrapper(
                TorchDistLoadShardedStrategy(), None, True, "gather_rounds"
            ),
            "user's wrapper": lambda: LoadCounting(TorchDistLoadShardedStrategy()),
            "parallel user's": lambda: FullyParallelLoadStrategyWrapper(LoadCounting(TorchDistLoadShardedStrategy())),
        },
        "zarr": {
            "default": lambda: None,
            "tuple": lambda: ("zarr", 1),
            "parallel": lambda: FullyParallelLoadStrategyWrapper(base.get("load_sharded", "zarr", 1)),
        },
        "one_file": {
            "default": lambda: None,
            "object": lambda: LoadOneFilePerKey(),
            "parallel": lambda: FullyParallelLoadStrategyWrapper(LoadOneFilePerKey()),
        },
    }
    for backend in savers:
        for name, save in savers[backend].items():
            yield pytest.param(save, loaders[backend], id=f"{backend}: {name}")


@pytest.mark.filterwarnings("ignore:the zarr format")
@pytest.mark.parametrize(("save", "loaders"), list(compositions()))
@pytest.mark.slow
def test_every_composition_of_saving_and_loading_is_equivalent(tmp_path, registered, save, loaders):
    dist_ckpt.save(state(True), tmp_path / "c", save())
    for name, load in loaders.items():
        assert_same(dist_ckpt.load(state(False), tmp_path / "c", load()), name)


@pytest.mark.parametrize("sharded", [None, ("one_file", 3)])
def test_common_strategies_of_users_take_part(tmp_path, registered, sharded):
    saved = {"w": one("w", torch.ones(3)), "step": 4}
    dist_ckpt.save(saved, tmp_path / "c", sharded, ("json", 1), content_metadata={"v": 2})
    assert json.loads((tmp_path / "c" / "common.pt").read_text()) == {"step": 4, "content_metadata": {"v": 2}}
    loaded = dist_ckpt.load({"w": one("w", torch.zeros(3))}, tmp_path / "c", sharded, ("json", 1))
    assert loaded["w"].tolist() == [1.0, 1.0, 1.0]
    assert loaded["step"] == 4
    assert dist_ckpt.load_common_state_dict(tmp_path / "c")["step"] == 4


def test_a_strategy_that_wraps_ours_keeps_the_checksums(tmp_path):
    saver = Counting(TorchDistSaveShardedStrategy())
    dist_ckpt.save({"w": one("w", torch.ones(1000)), "step": 1}, tmp_path / "c", saver)
    assert saver.calls == 1
    files = {path.name for path in (tmp_path / "c").iterdir()} - {"integrity.json"}
    assert json.loads((tmp_path / "c" / "integrity.json").read_text())["files"].keys() == files
    for name in ("__0_0.distcp", "common.pt", "metadata.json"):
        data = (tmp_path / "c" / name).read_bytes()
        flip_byte(tmp_path / "c" / name, len(data) // 2)
        with pytest.raises(CorruptError, match=name):
            dist_ckpt.load_plain_tensors(tmp_path / "c")
            dist_ckpt.load_common_state_dict(tmp_path / "c")
        (tmp_path / "c" / name).write_bytes(data)
    dist_ckpt.load_plain_tensors(tmp_path / "c")


def test_listings_strict_modes_and_dtypes_work_for_strategies_of_users(tmp_path, registered):
    dist_ckpt.save({"w": one("w", torch.tensor([1.0, 1.1])), "o": ShardedObject("o", 1, (1,), (0,))},
                   tmp_path / "c", ("one_file", 3))  # fmt: skip
    assert dist_ckpt.load_tensors_metadata(tmp_path / "c")["w"].global_shape == (2,)
    assert sorted(dist_ckpt.load_sharded_metadata(tmp_path / "c")) == ["o/shard_0_1", "w"]
    assert dist_ckpt.load_plain_tensors(tmp_path / "c")["w"].tolist() == torch.tensor([1.0, 1.1]).tolist()
    asked = {"w": one("w", torch.zeros(2)), "x": one("x", torch.zeros(1))}
    with pytest.raises(MismatchError, match="x: asked for, not in the checkpoint"):
        dist_ckpt.load(asked, tmp_path / "c")
    loaded, missing, unexpected = dist_ckpt.load(asked, tmp_path / "c", strict="return_all")
    assert (sorted(loaded), missing, unexpected) == (["w"], {"o"}, {"x"})
    half = {"w": one("w", torch.zeros(2, dtype=torch.bfloat16))}
    with pytest.raises(MismatchError, match="survive"):
        dist_ckpt.load(half, tmp_path / "c")
    with pytest.warns(UserWarning, match="converted to another dtype in w"):
        cast = dist_ckpt.load(half, tmp_path / "c", dtype_policy="cast")["w"]
    assert torch.equal(cast, torch.tensor([1.0, 1.1]).bfloat16())
    with pytest.raises(MismatchError, match="'strict'"):
        dist_ckpt.load(half, tmp_path / "c", dtype_policy="strict")
    with pytest.raises(MismatchError, match=r"global shape \(3,\), stored is \(2,\)"):
        dist_ckpt.load({"w": one("w", torch.zeros(3))}, tmp_path / "c")


def test_a_full_disk_in_a_strategy_of_a_user_is_told_with_bytes(tmp_path, registered):
    class Full(OneFilePerKey):
        def save(self, sharded_state_dict, checkpoint_dir):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StorageError, match=r"ENOSPC.*needs \d+ bytes, \d+ are free"):
        dist_ckpt.save({"w": one("w", torch.ones(2))}, tmp_path / "c", Full())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("strategy", [("zarr", 1), TorchDistLoadShardedStrategy(), LoadOneFilePerKey()], ids=str)
@pytest.mark.filterwarnings("ignore:the zarr format")
def test_a_loading_strategy_of_another_backend_is_refused(tmp_path, registered, strategy):
    saver = ("torch_dist", 1) if isinstance(strategy, tuple | LoadOneFilePerKey) else ("zarr", 1)
    dist_ckpt.save({"w": one("w", torch.ones(2))}, tmp_path / "c", saver)
    with pytest.raises(MismatchError, match=r"backend is|is no one_file"):
        dist_ckpt.load({"w": one("w", torch.zeros(2))}, tmp_path / "c", strategy)


def test_records_and_common_data_share_dicts_in_strategies_of_users(tmp_path, registered):
    saved = {"model": {"w": one("w", torch.ones(2)), "step": 3, "list": [1, one("v", torch.ones(1))]}}
    dist_ckpt.save(saved, tmp_path / "c", ("one_file", 3))
    asked = {"model": {"w": one("w", torch.zeros(2)), "list": [0, one("v", torch.zeros(1))]}}
    loaded = dist_ckpt.load(asked, tmp_path / "c")
    assert loaded == {"model": {"w": loaded["model"]["w"], "step": 3, "list": [1, loaded["model"]["list"][1]]}}
    assert loaded["model"]["w"].tolist() == [1.0, 1.0]
    assert loaded["model"]["list"][1].tolist() == [1.0]


def test_safe_globals_reach_common_data_beside_strategies_of_users(tmp_path, registered):
    dist_ckpt.save({"w": one("w", torch.ones(2))}, tmp_path / "c", ("one_file", 3))
    torch.save({"made": Fraction(1, 3)}, tmp_path / "c" / "common.pt")
    asked = {"w": one("w", torch.zeros(2))}
    with pytest.raises(UnsafeError, match="Fraction"):
        dist_ckpt.load(asked, tmp_path / "c")
    assert dist_ckpt.load(asked, tmp_path / "c", safe_globals=[Fraction])["made"] == Fraction(1, 3)


def test_the_checks_and_the_commit_are_ours_for_strategies_of_users(tmp_path, registered):
    class Failing(OneFilePerKey):
        def save(self, sharded_state_dict, checkpoint_dir):
            super().save(sharded_state_dict, checkpoint_dir)
            raise RuntimeError("the store said no")

    dist_ckpt.save({"w": one("w", torch.ones(2))}, tmp_path / "c", OneFilePerKey())
    with pytest.raises(RuntimeError, match="the store said no"):
        dist_ckpt.save({"w": one("w", torch.zeros(2))}, tmp_path / "c", Failing())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]
    assert dist_ckpt.load_plain_tensors(tmp_path / "c")["w"].tolist() == [1.0, 1.0]
    hole = ShardedTensor("w", torch.ones(1), torch.float32, (1,), (2,), (0,), None)
    for state in ({"w": hole}, {"model": {"w": hole, "step": 3}, "list": [1, 2]}):
        with pytest.raises(ShardingError, match="no main replica"):
            dist_ckpt.save(state, tmp_path / "c", OneFilePerKey())
    (tmp_path / "c" / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match="notes"):
        dist_ckpt.save({"w": one("w", torch.ones(2))}, tmp_path / "c", OneFilePerKey())


@pytest.mark.parametrize(
    ("strategy", "kind", "message"),
    [
        (("hdf5", 1), MismatchError, r"unknown strategy \('hdf5', 1\) for save_sharded; there are .*'torch_dist', 1"),
        (("torch_dist", 2), MismatchError, r"\('torch_dist', 2\)"),
        (("torch_dist",), MismatchError, "tuple is"),
        ("torch_dist", CheckpointError, "no strategy for save_sharded"),
        (TorchDistLoadShardedStrategy(), CheckpointError, "no strategy for save_sharded"),
        (TorchCommonSaveStrategy(), CheckpointError, "no strategy for save_sharded"),
    ],
)
def test_what_is_no_strategy_is_refused_by_name(tmp_path, strategy, kind, message):
    with pytest.raises(kind, match=message):
        dist_ckpt.save({"w": one("w", torch.ones(2))}, tmp_path / "c", strategy)
    assert list(tmp_path.iterdir()) == []


def test_registering_the_wrong_kind_is_refused():
    with pytest.raises(CheckpointError, match="derive it from SaveShardedStrategy"):
        strategies.register("save_sharded", "x", 1, TorchCommonLoadStrategy())
    with pytest.raises(CheckpointError, match="action is 'save'"):
        strategies.register("save", "x", 1, OneFilePerKey())
    with pytest.raises(CheckpointError, match="exchange_algo"):
        FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), None, False, "smoke")
    with pytest.raises(CheckpointError, match="thread_count"):
        TorchDistSaveShardedStrategy(thread_count=0)


@pytest.mark.parametrize("kind", [base.SaveShardedStrategy, base.SaveCommonStrategy])
def test_the_four_bases_are_abstract(kind):
    with pytest.raises(TypeError, match="abstract"):
        kind("x", 1)
    for other in (base.LoadShardedStrategy, base.LoadCommonStrategy):
        with pytest.raises(TypeError, match="abstract"):
            other()


def test_objects_in_a_folder_that_may_not_be_looked_into_are_not_taken_for_none(tmp_path, monkeypatch):
    record = ShardedObject("secret/o", 1, (1,), (0,))
    TorchCommonSaveStrategy().save_sharded_objects({"o": record}, tmp_path)
    assert [*TorchCommonLoadStrategy().load_sharded_metadata(tmp_path)] == ["secret/o/shard_0_1"]
    real = os.scandir

    def refused(path="."):
        if Path(path).name == "secret":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(PermissionError):
        TorchCommonLoadStrategy().load_sharded_metadata(tmp_path)
    with pytest.raises(StorageError, match="Permission denied"):
        tools.verify(tmp_path)
