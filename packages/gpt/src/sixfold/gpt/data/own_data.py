"""A user's own datasets in the place of token pairs: any map-style torch Dataset, in an order that is computed.

    datasets, weights, seed --> position -> (dataset, epoch, item) --> rows --> OwnData (this file) --> token_stream.py

It has the interface of a blend of sixfold.blending, and the same promises. Nothing is built and no cursor is kept. A
position gives the same sample on every layout, on every rank and after a restart. Datasets take turns by blending's
quota tree; within a dataset each epoch is a keyed permutation of its items, another one each time.

[Note: what an item is] It is ``seq_length + 1`` ids: tokens are all but the last, labels all but the first. Or it is a
dict with ``tokens`` and ``labels`` of ``seq_length`` ids. The dict may have ``loss_mask`` (0 where a target does not
count, else 1) and ``documents`` (numbers that change where another document begins). An item is a pure function of its
number: it is read on a thread, by every rank that needs it, in any order.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sixfold.gpt.config.batch_schedule import samples_before
from sixfold.gpt.errors import ConfigError, FinalError
from sixfold.gpt.parallel.agreement import all_or_raise, gather_objects

if TYPE_CHECKING:
    import numpy.typing as npt

    from sixfold.blending import Why
    from sixfold.gpt.config.train_config import TrainConfig
    from sixfold.gpt.parallel.mesh import RankMesh


class MapDataset(Protocol):
    """What ``torch.utils.data.Dataset`` of map style offers; see [Note: what an item is]."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


Datasets = Mapping[str, MapDataset]


def check_own(config: TrainConfig, datasets: Datasets) -> None:
    """Refuse what own datasets do not go with.

    Raises:
        ConfigError: an entry of data.blend or data.valid is no name of ``datasets`` or the reverse, a dataset is
            empty or cannot be asked for items by number, or a key of [data] that is of token pairs alone is set.
    """
    data, named = config.data, (*config.data.blend, *config.data.valid_prefixes)
    unknown = [name for name in named if name not in datasets] + [name for name in datasets if name not in named]
    if unknown:
        raise ConfigError(
            f"datasets are {list(datasets)}, data.blend {list(data.blend)} and data.valid {list(data.valid_prefixes)}. "
            f"Both have the same names, and {unknown[0]!r} is missing in one. A run reads token files or your "
            f"datasets, not both"
        )
    for name, dataset in datasets.items():
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise ConfigError(
                f"dataset {name!r} is a {type(dataset).__name__} without len() or [i]. Give a map-style dataset: a run "
                f"cannot resume in an iterable one"
            )
        if len(dataset) < 1:
            raise ConfigError(f"dataset {name!r} has {len(dataset)} items; it has at least one")
    for key, value, plain in (
        ("data.names", list(data.names), []),  # own datasets have those of data.blend
        ("data.order", data.order, "stateless"),
        ("data.packing", data.packing, "concatenate"),
        ("data.blend_unit", data.blend_unit, "rows"),
        ("data.document_shuffle", data.document_shuffle, "auto"),
        ("data.changes", list(data.changes), []),
        ("data.eod_mask_loss", data.eod_mask_loss, False),
        ("data.split", data.split, type(data).split),
        ("data.cache_dir", data.cache_dir, ""),
    ):
        if value != plain:
            raise ConfigError(
                f"{key} is {value!r}, which is of token pairs and not of own datasets: leave it {plain!r}"
            )


def open_own(config: TrainConfig, datasets: Datasets, *, tell: bool = True) -> tuple[OwnData, dict[str, OwnData]]:
    """Training data, and the validation sets by name.

    Args:
        tell: warn of datasets that training reads more often than data.max_epochs, and an evaluation more than once.
    """
    check_own(config, datasets)
    data = config.data
    train = OwnData({name: datasets[name] for name in data.blend}, data.weights, config, "train")
    if tell and data.max_epochs:
        for name, times in zip(
            train.names, train.epochs(samples_before(config, config.train.steps)).tolist(), strict=True
        ):
            if times > data.max_epochs:
                warnings.warn(
                    f"training reads {name} {times:.1f} times; data.max_epochs is {data.max_epochs:g}", stacklevel=2
                )
    sets = {}
    for name, named in data.valid_sets.items():
        sets[name] = OwnData({one: datasets[one] for one in named}, (), config, "valid")
        if tell and data.max_epochs and config.eval.every:
            tell_of_repeats(config, name, sets[name].epochs(config.eval.batches * config.train.global_batch_size))
    return train, sets


def tell_of_repeats(config: TrainConfig, name: str, epochs_D: npt.NDArray[np.float64]) -> None:
    """Warn of an evaluation that reads samples of validation set ``name`` more than once; ``epochs_D``: how often."""
    batches, rows, most = config.eval.batches, config.train.global_batch_size, float(epochs_D.max())
    if most <= 1:
        return
    once = int(batches / most)
    remedy = f"eval.batches = {once} reads it once" if once else "one batch is more than it has: give data.valid more"
    warnings.warn(
        f"an evaluation of eval.batches = {batches} batches of {rows} samples reads validation data "
        f"{name and f'of {name!r} '}{most:.3g} times; "
        f"{remedy}",
        stacklevel=3,
    )


def open_on_ranks(config: TrainConfig, datasets: Datasets, mesh: RankMesh) -> tuple[OwnData, dict[str, OwnData]]:
    """``open_own`` on every rank, which all must have been given the same.

    Raises:
        ConfigError: on all ranks: another number of items on one of them.
    """
    opened = all_or_raise(mesh.control, mesh.size, lambda: open_own(config, datasets, tell=mesh.rank == 0))
    train, sets = opened
    parts = [part.state_dict(0)["datasets"] for part in (train, *sets.values())]
    told = gather_objects(mesh.control, mesh.size, parts)
    odd = next((rank for rank, one in enumerate(told) if one != told[0]), None)
    if odd is not None:
        raise ConfigError(f"datasets are {told[0]} on rank 0 and {told[odd]} on rank {odd}; give all ranks the same")
    return opened


class OwnData:
    """Samples by position; see the module.

    Attributes:
        names: of the datasets, in the order of data.blend.
    """

    def __init__(self, datasets: Datasets, weights: tuple[float, ...], config: TrainConfig, part: str) -> None:
        from sixfold.blending.numbers.permutation import order_key
        from sixfold.blending.order import QuotaTree

        self.names = list(datasets)
        self._datasets = list(datasets.values())
        self._sizes = [len(dataset) for dataset in self._datasets]
        self._weights = list(weights) or [float(size) for size in self._sizes]
        self._tree = QuotaTree(self._weights)
        self._seed, self._part, self._width = config.train.seed, part, config.data.seq_length
        self._key = order_key

    def __len__(self) -> int:
        return 2**40  # an endless stream, as blending's

    def locate(self, positions: npt.ArrayLike) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(dataset, sample of that dataset) of each position; a sample counts through all epochs."""
        return self._tree.locate(np.asarray(positions, dtype=np.int64))

    def item(self, dataset: int, sample: int) -> int:
        """Which item of its dataset a sample is: every item once per epoch, in another order each time."""
        from sixfold.blending.order import permute

        epoch, place = divmod(sample, self._sizes[dataset])
        key = self._key("own", self._seed, self.names[dataset], self._part, epoch)
        return int(permute(key, self._sizes[dataset], place))

    def get_batch(self, positions: Sequence[int]) -> dict[str, npt.NDArray[Any]]:
        """tokens, labels (B, S) int64, loss_mask (B, S) float32, cu_seqlens int32, dataset_id (B,) int64.

        Raises:
            FinalError: an item is not what the note says, or raises; names dataset and number.
        """
        dataset_B, sample_B = self.locate(positions)
        rows = [
            self._row(dataset, self.item(dataset, sample))
            for dataset, sample in zip(dataset_B.tolist(), sample_B.tolist(), strict=True)
        ]
        begins = np.concatenate([row["begins"] for row in rows])
        return {
            **{name: np.stack([row[name] for row in rows]) for name in ("tokens", "labels", "loss_mask")},
            "cu_seqlens": np.append(np.flatnonzero(begins), begins.size).astype(np.int32),
            "dataset_id": dataset_B,
        }

    def _row(self, dataset: int, number: int) -> dict[str, npt.NDArray[Any]]:
        where = f"{self.names[dataset]}[{number}]"
        try:
            found = self._datasets[dataset][number]
        except Exception as error:
            raise FinalError(f"{where} raised {type(error).__name__}: {error}") from error
        if not isinstance(found, Mapping):
            ids = _ids(where, found, self._width + 1, f"data.seq_length + 1 = {self._width + 1}")
            found = {"tokens": ids[:-1], "labels": ids[1:]}
        strange = set(found) - {"tokens", "labels", "loss_mask", "documents"}
        if strange or not {"tokens", "labels"} <= set(found):
            raise FinalError(f"{where} has {sorted(found)}; it has tokens, labels, and maybe loss_mask and documents")
        rule = f"data.seq_length = {self._width}"
        row = {name: _ids(f"{where}[{name!r}]", found[name], self._width, rule) for name in ("tokens", "labels")}
        mask = np.asarray(found.get("loss_mask", np.ones(self._width)), dtype=np.float32)
        if mask.shape != (self._width,):
            raise FinalError(f"{where}['loss_mask'] is of shape {mask.shape}; it is one row of {rule} numbers 0 or 1")
        if (odd := mask[(mask != 0) & (mask != 1)]).size:  # nan too; a weight would count as a whole target
            raise FinalError(
                f"{where}['loss_mask'] has {odd[0]:g}; it is 0 (does not count) or 1: for more of some rows, mix "
                f"datasets by data.weights"
            )
        begins = np.zeros(self._width, dtype=np.bool_)
        begins[0] = True
        if "documents" in found:
            documents = _ids(f"{where}['documents']", found["documents"], self._width, rule)
            begins[1:] = documents[1:] != documents[:-1]
        return {**row, "loss_mask": mask, "begins": begins}

    def why(self, n: int) -> Why:
        """The item that position ``n`` is."""
        from sixfold.blending import TokenRange, Why

        dataset, sample = (int(one[0]) for one in self.locate([n]))
        size = self._sizes[dataset]
        item = TokenRange(sample // size, self.item(dataset, sample), 0, self._width + 1, None, None, None)
        return Why(n, dataset, self.names[dataset], sample, (item,), sample / size)

    def epochs(self, n: int) -> npt.NDArray[np.float64]:
        """How often the first ``n`` positions read each dataset."""
        return self._tree.counts(n) / np.array(self._sizes, dtype=np.float64)

    def state_dict(self, position: int) -> dict[str, Any]:
        """What a checkpoint keeps: what the order is a function of."""
        shares = [str(Fraction(weight)) for weight in self._weights]
        datasets = [  # their order is part of the samples' order
            {"name": name, "items": size, "weight": share}
            for name, size, share in zip(self.names, self._sizes, shares, strict=True)
        ]
        return {"order": "own", "position": position, "seed": self._seed, "datasets": datasets, "version": 1}

    def load_state_dict(self, state: Mapping[str, Any]) -> int:
        """The position of a saved state.

        Raises:
            ConfigError: it is of other data: what it was and what it is.
        """
        if state.get("order") != "own":
            raise ConfigError(
                "the run was trained on token pairs and cannot go on with own datasets: start a new run.dir"
            )
        now = self.state_dict(int(state["position"]))
        if dict(state) != now:
            key = next(key for key in now if now[key] != state.get(key))
            raise ConfigError(
                f"the run was trained on own datasets with {key} {state.get(key)!r}, and now it is {now[key]!r}: their "
                f"order would be another; put back what was, or start a new run.dir"
            )
        return int(state["position"])


def _ids(where: str, value: Any, width: int, rule: str) -> npt.NDArray[np.int64]:
    """A row of whole numbers >= 0, of a tensor, an array or a list."""
    array = np.asarray(value)
    if array.shape != (width,):
        raise FinalError(f"{where} is of shape {array.shape}; it is one row of {rule} ids")
    if array.dtype.kind not in "iu":
        raise FinalError(f"{where} is of {array.dtype}; ids are whole numbers")
    if array.size and int(array.min()) < 0:
        raise FinalError(f"{where} has the id {int(array.min())}; ids are >= 0, and loss_mask says what does not count")
    return array.astype(np.int64)
