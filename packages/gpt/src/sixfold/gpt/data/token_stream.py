"""Which tokens a step trains on: positions of one blended order, cut into microbatches.

    config.data --> sixfold.blending --> TokenStream (this file) --> step.py
                                      `-> global_batches (whole batches, one process, no group)

The state of the data is one number, ``samples`` consumed. A step reads the positions of the order from there on,
permuted by a key of the first one (``data.deal``). Sample j of microbatch m on data-parallel rank d is number
``(m*dp + d) * micro_batch_size + j`` of them. So a change of layout or of the ramp repeats and skips nothing. Every
rank of a pipeline computes its microbatches itself from the order; only hidden states travel. Ranks of a
context-parallel group read the same samples, and each keeps its part of every row (sequence_parts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from sixfold.gpt.config.batch_schedule import batch_size, samples_before
from sixfold.gpt.data.blend_changes import (
    blend_changes,
    prefixes_to_open,
    prefixes_with_tokenizer,
    refuse_other_drops,
)
from sixfold.gpt.errors import ConfigError, FinalError
from sixfold.gpt.parallel.sequence_parts import WHOLE_ROWS, SequencePart, documents_here

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch
    import torch.distributed as dist

    from sixfold.blending import BlendedDataset, BlendedMegatronDatasetBuilder, GPTDataset
    from sixfold.gpt.config.train_config import TrainConfig
    from sixfold.gpt.data.host_to_device import CopyStreams, Transfer
    from sixfold.gpt.data.loss_by_dataset import SampleLosses
    from sixfold.gpt.data.own_data import Datasets as OwnDatasets
    from sixfold.gpt.data.own_data import OwnData
    from sixfold.gpt.parallel.mesh import RankMesh

    Valid = BlendedDataset | GPTDataset
    Datasets = tuple[BlendedDataset | OwnData, Mapping[str, Valid | OwnData]]  # train, validation sets by name

AHEAD = 8  # global batches whose ids are fetched before their turn, where they come from afar


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A whole global batch on the CPU.

    Attributes:
        tokens, labels: (B, S) int64.
        loss_mask: (B, S) float32, 0 where a target does not count.
        cu_seqlens: int32, document boundaries of the flattened batch, 0 ... B*S, every multiple of S present.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    cu_seqlens: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """What one forward takes: ``tokens`` (b, S / cp) int64 for stage 0, ``kwargs`` for the module of every local stage.

    Attributes:
        targets: unmasked targets here: the share of this microbatch in the count that divides the gradients.
        rows: its samples by dataset, where the data is a blend; they count what is here too.
        parcel: in which its tensors travel to the device.
    """

    tokens: torch.Tensor
    kwargs: dict[str, Any]
    targets: float
    rows: SampleLosses | None = None
    transfer: Transfer | None = None

    def arrive(self) -> None:
        """Before its tensors are read, on the thread that computes."""
        if self.transfer is not None:
            self.transfer.arrive()


def preflight(config: TrainConfig, datasets: OwnDatasets | None = None) -> None:
    """Refuse data that cannot be read before a rank is started: pairs and tokenizers. Imports no torch.

    Args:
        datasets: a user's own, in the place of pairs.
    Raises:
        IndexedDataError: a prefix is missing or damaged.
        ConfigError: a pair was prepared by another tokenizer than ``data.tokenizer``.
    """
    from sixfold.gpt.data.tokenizer import check_identity
    from sixfold.indexed_data import IndexedDataset

    if datasets is not None:
        from sixfold.gpt.data.own_data import check_own

        check_own(config, datasets)
        return
    blend_changes(config.data)  # reads files of documents
    prefixes = prefixes_to_open(config)
    for prefix in prefixes:
        IndexedDataset(prefix).close()
    check_identity(prefixes, config.data.tokenizer, config.data.eod_token)
    _check_end(config)


def _check_end(config: TrainConfig) -> None:
    """Refuse a run that is to know the end of a document by its id, and does not.

    Raises:
        ConfigError: the keys that say it.
    """
    data, eod = config.data, end_of_documents(config)
    if eod < 0 and data.eod_token:
        raise ConfigError(
            f"data.eod_token is {data.eod_token!r} and nothing names a tokenizer that has it: data.tokenizer is empty "
            f"and no pair of data.blend has a PREFIX.json; set data.tokenizer"
        )
    if eod < 0 and data.eod_mask_loss:
        raise ConfigError(
            "data.eod_mask_loss is true and nothing says which id ends a document: data.tokenizer is empty and no "
            "pair of data.blend has a PREFIX.json; set data.tokenizer"
        )
    if eod >= config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size is {config.model.vocab_size} and id {eod} ends a document of this tokenizer; "
            f"model.vocab_size is the tokenizer's, see what `sixfold prepare` printed"
        )


def end_of_documents(config: TrainConfig) -> int:
    """The id that ends a document of the run; -1 where nothing says it. Opens the tokenizer."""
    from sixfold.gpt.data.tokenizer import tokenizer_of

    data = config.data
    return tokenizer_of(prefixes_with_tokenizer(data), data.tokenizer, data.eod_token).eod


def dataset_builder(
    config: TrainConfig,
    group: dist.ProcessGroup | None = None,
    *,
    tell: bool = True,
    valid: str = "",
    state: dict[str, Any] | None = None,
) -> BlendedMegatronDatasetBuilder:
    """What `build_datasets` builds with; opens nothing.

    Args:
        group: all ranks: they compare what they opened, and each builds a share of an index.
        tell: whether this rank tells of datasets that are read very often; one of them is enough.
        valid: the name of a validation set, which alone is built; "": training data, and a set without a name.
        state: of the data, if the run goes on: it stands for datasets that left the blend and were deleted.
    """
    from sixfold.blending import BlendedMegatronDatasetBuilder, GPTDataset, GPTDatasetConfig
    from sixfold.gpt.data.tokenizer import tokenizer_of

    data = config.data
    # One prefix gets the weight 1, so that the part is a BlendedDataset whatever the number of prefixes.
    weights = list(data.weights) or ([1.0] if len(data.blend) == 1 else None)
    train_blend: Any = (list(data.blend), weights)
    # Named outright: what gpt always did, and what blending does of itself; checkpoints hold these names.
    names: dict[str | bytes | PathLike[str] | PathLike[bytes], str] = dict(
        zip(data.train_prefixes, data.names_of(data.train_prefixes), strict=True)
    )
    parts: dict[str, Any]
    changes = blend_changes(data)
    if data.valid:
        held_out = data.valid_sets.get(valid, ())
        if valid:
            train_blend, changes, names = None, [], {}
        names |= dict(zip(held_out, data.names_of(held_out), strict=True))
        parts = {"blend_per_split": [train_blend, (list(held_out), None) if held_out else None, None]}
    else:
        parts = {"blend": train_blend, "split": data.split}
    options = GPTDatasetConfig(
        random_seed=config.train.seed,
        sequence_length=data.seq_length,
        tokenizer=tokenizer_of(prefixes_with_tokenizer(data), data.tokenizer, data.eod_token),
        order=data.order,
        packing=data.packing,
        blend_unit=data.blend_unit,
        document_shuffle=data.document_shuffle,
        changes=changes,
        dataset_names=names,
        eod_mask_loss=data.eod_mask_loss,
        path_to_cache=data.cache_dir or None,
        create_cu_seqlens=True,
        max_epochs=(data.max_epochs or None) if tell else None,
        **parts,
    )
    sizes = [0 if valid else samples_before(config, config.train.steps), _evaluated(config), 0]
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, options, group=group, state=state)


def _evaluated(config: TrainConfig) -> int:
    """Samples of an evaluation, of each validation set."""
    return config.eval.batches * config.train.global_batch_size if config.eval.every else 0


def build_datasets(
    config: TrainConfig, builder: BlendedMegatronDatasetBuilder | None = None
) -> tuple[BlendedDataset, Valid | None]:
    """Open the blend and its validation part. The stateless order builds no index: it is computed from positions.

    Args:
        builder: of ``dataset_builder``; every rank of its group calls this.
    Returns:
        (train, valid); valid is None where the split leaves it nothing, and where sets have names (`build_valid`).
    """
    from sixfold.blending import BlendedDataset, BlendingError, GPTDataset

    data, size = config.data, samples_before(config, config.train.steps)
    builder = builder or dataset_builder(config)
    try:
        train, valid, _ = builder.build()
    except BlendingError as error:
        if data.valid or not config.eval.every or "the valid part" not in str(error):
            raise
        raise ConfigError(
            f"data.split is {data.split!r} and holds out whole documents: {error}. Name other data in data.valid, cut "
            f"a text into more documents (`sixfold prepare --documents paragraph`), or set eval.every = 0"
        ) from error
    if isinstance(train, GPTDataset):  # blending's, and Megatron's, way with one prefix beside others to validate
        train = BlendedDataset([train], [1.0], size, builder.config)
    if train is None:
        raise ConfigError(f"data.split is {data.split!r} and leaves no training data in {list(data.blend)}")
    assert isinstance(train, BlendedDataset), f"a weighted blend gave a {type(train).__name__}"
    _check_length(config, "train", train, size)
    return train, None if valid is None else _checked_valid(config, valid, "", builder)


def build_valid(config: TrainConfig, name: str, builder: BlendedMegatronDatasetBuilder | None = None) -> Valid:
    """Open a validation set that has a name. As `build_datasets`."""
    builder = builder or dataset_builder(config, valid=name)
    return _checked_valid(config, builder.build()[1], name, builder)


def _checked_valid(config: TrainConfig, valid: Any, name: str, builder: BlendedMegatronDatasetBuilder) -> Valid:
    from sixfold.blending import BlendedDataset, GPTDataset
    from sixfold.gpt.data.own_data import tell_of_repeats

    assert isinstance(valid, BlendedDataset | GPTDataset), f"validation is a {type(valid).__name__}"
    _check_length(config, f"valid {name}".strip(), valid, _evaluated(config))
    if config.eval.every and builder.config.max_epochs:  # of the one rank that tells
        tell_of_repeats(config, name, valid.epochs(_evaluated(config)))
    return valid


def _check_length(config: TrainConfig, what: str, part: Valid, size: int) -> None:
    if len(part) < size:
        raise ConfigError(
            f"data.order is {config.data.order!r} without weights, which gives the {len(part)} samples of the {what} "
            f"data once, and {size} are asked; give data.weights (and one prefix in data.valid)"
        )


def open_on_ranks(
    config: TrainConfig,
    mesh: RankMesh,
    own: OwnDatasets | None = None,
    saved: Callable[[], dict[str, Any] | None] = lambda: None,
) -> Datasets:
    """Opened by every rank for itself, in every order: ranks compare what they opened, and an index is built in shares.

    Args:
        saved: the state of the data in the checkpoint that the run goes on from; asked if a dataset was deleted.
    Raises:
        BlendingError: on all ranks: a pair does not open, or a rank has another copy of one, which would give it other
            samples under the same positions.
        TrainError: another rank did not come.
    """
    from sixfold.blending import BlendingError
    from sixfold.gpt.data import own_data
    from sixfold.gpt.parallel.agreement import all_or_raise, world_collective
    from sixfold.gpt.parallel.lost_ranks import is_lost_rank

    if own is not None:
        return own_data.open_on_ranks(config, own, mesh)

    def builder_here(valid: str) -> BlendedMegatronDatasetBuilder:
        every = {*config.data.train_prefixes, *config.data.valid_prefixes}
        state = None if every <= set(prefixes_to_open(config)) else saved()
        return dataset_builder(config, mesh.control, tell=mesh.rank == 0, valid=valid, state=state)

    def builder(valid: str = "") -> BlendedMegatronDatasetBuilder:
        return all_or_raise(mesh.control, mesh.size, lambda: builder_here(valid))

    with world_collective("the opening of the data by all ranks"):
        try:
            train, unnamed = build_datasets(config, builder())
            sets = {} if unnamed is None else {"": unnamed}
            for name in config.data.valid_sets:
                if name:
                    sets[name] = build_valid(config, name, builder(name))
            return train, sets
        except BlendingError as error:
            cause = error.__cause__
            if isinstance(cause, RuntimeError) and is_lost_rank(cause):
                raise cause from error  # no fault of the data: a run that is started anew goes on
            raise


def continue_data(train: BlendedDataset | OwnData, state: Mapping[str, Any], config: TrainConfig) -> None:
    """Refuse a saved state of the data whose past is not the one that ``train`` has. Moves nothing.

    Raises:
        ConfigError: documents were shuffled in another way, or others were taken down; names the key.
        BlendingError: anything else that fixed the samples given so far differs.
    """
    from sixfold.gpt.data.own_data import OwnData

    if isinstance(train, OwnData):
        train.load_state_dict(state)
        return
    if state.get("order") == "own":
        raise ConfigError(
            f"the run was trained on own datasets ({', '.join(state['datasets'])}) and cannot go on with token pairs: "
            f"give train() its datasets, or start a new run.dir"
        )
    if state.get("order") == "stateless":
        # 0.1.0, which does not tell, had blocks alone.
        was = {one["name"]: one.get("document_shuffle", "block") for one in state.get("datasets", {}).values()}
        now = {one.name: one.document_shuffle for one in train.datasets if not one.is_absent}
        other = [name for name in was if now.get(name, was[name]) != was[name]]
        if other:
            now_key = config.data.document_shuffle
            # Small datasets say "block" under every key, and "auto" says "block" of huge ones.
            then = "block" if set(was.values()) == {"block"} else "global" if now_key == "auto" else "auto"
            raise ConfigError(
                f"data.document_shuffle is {now_key!r}, which shuffles {other[0]} by {now[other[0]]!r}, and the run "
                f"has read it by {was[other[0]]!r}; data.document_shuffle = {then!r} goes on with it"
            )
    if "drops" in state:
        refuse_other_drops(state["drops"], train.state_dict(state["position"]).get("drops", []), config.data)
    train.load_state_dict(dict(state))


def epochs_of(train: BlendedDataset | OwnData, config: TrainConfig) -> dict[str, float]:
    """How often the whole run reads each dataset of the blend, by name."""
    times = train.epochs(samples_before(config, config.train.steps))
    return dict(zip(train.names, times.tolist(), strict=True))


def positions_in_documents(cu_seqlens: npt.NDArray[np.int32], seq_length: int) -> npt.NDArray[np.int64]:
    """(B, S) int64: how far each token is from the start of its document.

    Args:
        cu_seqlens: int32, boundaries of the flattened batch, first 0, last B*S.
    """
    starts = np.repeat(cu_seqlens[:-1].astype(np.int64), np.diff(cu_seqlens))
    return (np.arange(int(cu_seqlens[-1]), dtype=np.int64) - starts).reshape(-1, seq_length)


def _rows(
    batch: dict[str, npt.NDArray[Any]], targets: npt.NDArray[np.float64], transfer: Transfer
) -> SampleLosses | None:
    """Which dataset each sample of ``batch`` is of; None where the data does not tell."""
    from sixfold.gpt.data.loss_by_dataset import SampleLosses

    if "dataset_id" not in batch:
        return None
    return SampleLosses(dataset=transfer.put(batch["dataset_id"]), targets=transfer.put(targets))


class TokenStream:
    """Microbatches of one part of the data, by position. Holds no cursor: the position is always an argument."""

    def __init__(
        self,
        dataset: BlendedDataset | GPTDataset | OwnData,
        config: TrainConfig,
        *,
        part: SequencePart = WHOLE_ROWS,
        copies: CopyStreams | None = None,
    ) -> None:
        """
        Args:
            part: what of each row a microbatch has.
            copies: to the device of the microbatches; None leaves them where they were read.
        """
        self.dataset, self.part, self.copies = dataset, part, copies
        self.vocab_size = config.model.vocab_size
        self.seq_length = config.data.seq_length
        self.document_mask = config.data.document_mask
        self.has_dropout = config.train.hidden_dropout > 0 or config.train.embedding_dropout > 0
        self.permutes = config.data.dealt_as == "permuted"
        self._looks_ahead = bool(getattr(dataset, "looks_ahead", False))  # users' own have no such thing
        self._told = self._asked = 0  # samples that ids were fetched ahead of, and where the last batch began
        self.name = "data"

    def arrays(self, positions: Sequence[int]) -> dict[str, npt.NDArray[Any]]:
        """The batch at ``positions``, ids checked against the vocabulary.

        Raises:
            FinalError: an id >= vocab_size; names dataset, document, position in it and id.
        """
        batch = self.dataset.get_batch(positions)
        largest = max(int(batch["tokens"].max()), int(batch["labels"].max()))
        if largest >= self.vocab_size:
            self._refuse_ids(positions, batch)
        return batch

    def _refuse_ids(self, positions: Sequence[int], batch: dict[str, npt.NDArray[Any]]) -> None:
        """Name the first id of ``batch`` that lies outside the vocabulary, its dataset, document and place."""
        tokens, labels, most = batch["tokens"], batch["labels"], self.vocab_size - 1
        row = int(np.flatnonzero(np.maximum(tokens, labels).max(axis=1) > most)[0])
        are_next_tokens = np.array_equal(tokens[row, 1:], labels[row, :-1])  # a user's own dataset may have others
        what, ids = "token", np.append(tokens[row], labels[row, -1])
        if not are_next_tokens:
            what, ids = ("token", tokens[row]) if tokens[row].max() > most else ("label", labels[row])
        at = int(np.flatnonzero(ids > most)[0])
        found, why = int(ids[at]), self.dataset.why(positions[row])
        for r in why.ranges:
            if at < r.length:
                raise FinalError(
                    f"{why.dataset_name}: document {r.document}, {what} {r.offset + at} is id {found}; "
                    f"model.vocab_size is {self.vocab_size}, ids lie below it. Use the tokenizer that made the data"
                )
            at -= r.length
        raise FinalError(f"sample {positions[row]} holds id {found}; model.vocab_size is {self.vocab_size}")

    def microbatch(self, first: int, size: int) -> Microbatch:
        """The ``size`` samples from position ``first`` on: this rank's part of their rows, on its way to the device."""
        return self._microbatch(range(first, first + size))

    def _microbatch(self, samples: Sequence[int]) -> Microbatch:
        from sixfold.gpt.data.host_to_device import Transfer

        batch, size = self.arrays(samples), len(samples)
        transfer, cut = Transfer(self.copies), self.part.cut
        loss_mask = cut(batch["loss_mask"])
        kwargs: dict[str, Any] = {"labels": transfer.put(cut(batch["labels"])), "loss_mask": transfer.put(loss_mask)}
        if self.document_mask:
            cu_seqlens = batch["cu_seqlens"]
            positions = positions_in_documents(cu_seqlens, self.seq_length)
            kwargs["position_ids"] = transfer.put(cut(positions))
            # size + 1 boundaries are those of the rows alone.
            if self.part.size > 1 and len(cu_seqlens) > size + 1:
                kwargs["cu_seqlens"] = documents_here(cu_seqlens, size, self.part).to(transfer.put)
            else:
                kwargs["cu_seqlens"] = transfer.put(cu_seqlens)
        if self.has_dropout:
            kwargs["row_numbers"] = transfer.put(np.array(samples, dtype=np.int64))
        tokens = transfer.put(cut(batch["tokens"]))
        counted = loss_mask.sum(axis=1, dtype=np.float64)
        rows = _rows(batch, counted, transfer)
        transfer.send()
        return Microbatch(tokens=tokens, kwargs=kwargs, targets=float(counted.sum()), rows=rows, transfer=transfer)

    def step(self, samples: int, batch_size: int, micro: int, dp: int, dp_rank: int) -> list[Microbatch]:
        """This rank's microbatches of the global batch that starts at position ``samples``."""
        self._look_ahead(samples, batch_size, micro, dp, dp_rank)
        return [self._microbatch(some) for some in self._mine(samples, batch_size, micro, dp, dp_rank)]

    def _mine(self, samples: int, batch_size: int, micro: int, dp: int, dp_rank: int) -> list[Sequence[int]]:
        """This rank's positions of a global batch, by microbatch."""
        count, positions = batch_size // (micro * dp), self.dealt(samples, batch_size)
        begins = [(m * dp + dp_rank) * micro for m in range(count)]
        return [positions[begin : begin + micro] for begin in begins]

    def _look_ahead(self, samples: int, batch_size: int, micro: int, dp: int, dp_rank: int) -> None:
        """Have ids that come from afar, as from a URL, fetched for this batch and ``AHEAD`` more, each once."""
        if not self._looks_ahead:
            return
        dataset: Any = self.dataset
        if samples < self._asked:  # from the start again, as an evaluation
            self._told = 0
        self._asked, end = samples, samples + (AHEAD + 1) * batch_size
        for first in range(max(self._told, samples), end, batch_size):
            mine = self._mine(first, batch_size, micro, dp, dp_rank)
            with suppress(IndexError):  # behind the end of an order that has one
                dataset.look_ahead([position for some in mine for position in some])
        self._told = end

    def dealt(self, samples: int, batch_size: int) -> Sequence[int]:
        """The positions of a global batch as microbatches take them, the same on every rank and at any layout."""
        if not self.permutes:
            return range(samples, samples + batch_size)
        from sixfold.blending.order import deal

        dealt: list[int] = deal(samples, samples + batch_size, 0, 1).tolist()
        return dealt


def global_batches(config: TrainConfig, first_step: int = 0, *, datasets: OwnDatasets | None = None) -> Iterator[Batch]:
    """The whole batch of each step, in one process without a group. Each layout trains on the same samples.

    Rows are in the order in which their gradients are summed: that of positions, or as ``data.deal`` permutes them.

    Args:
        first_step: updates already done; the first batch is the one that update ``first_step`` trains on.
        datasets: as of ``train``.
    """
    import torch

    from sixfold.gpt.data.own_data import open_own

    train = build_datasets(config)[0] if datasets is None else open_own(config, datasets)[0]
    stream = TokenStream(train, config)
    samples = samples_before(config, first_step)
    for step in range(first_step, config.train.steps):
        size = batch_size(config, step)
        batch = stream.arrays(stream.dealt(samples, size))
        yield Batch(
            **{
                k: torch.from_numpy(np.ascontiguousarray(batch[k]))
                for k in ("tokens", "labels", "loss_mask", "cu_seqlens")
            }
        )
        samples += size
