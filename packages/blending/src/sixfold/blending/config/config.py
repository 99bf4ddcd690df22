"""What the user says about a blend, checked when it is said.

    user --> config (this file) --> builder/builder.py, blend/schedule.py, batches/gpt_arrays.py

Field names and meanings are megatron-core's (``blended_megatron_dataset_config.py``,
``gpt_dataset.py``); ``order``, ``changes``, ``dataset_names`` and the cu_seqlens fields are Sixfold's.
"""

import logging
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sixfold.blending.config.order_names import CONCATENATED, order_named
from sixfold.blending.config.prefixes import (
    Prefix,
    base_name,
    canonical_path,
    current_folder,
    located,
    names_apart,
    same_file,
    text_of,
)
from sixfold.blending.config.splits import Bookends, Split, parse_split, split_matrix
from sixfold.blending.errors import BlendingError
from sixfold.blending.numbers.checks import first_repeated, plain, whole_number
from sixfold.blending.numbers.weights import exact_weights, refuse_too_many_datasets, refuse_weights

if TYPE_CHECKING:
    from sixfold.blending.orders.interface import Order

Blend = tuple[Sequence[Prefix], Sequence[float] | None]
SHUFFLES = ("auto", "global", "block")
BLEND_UNITS = ("rows", "tokens")
_MOST_LISTED = 8  # names that a message lists
_WITHOUT_EFFECT = (
    "fast_cache_load", "defer_npy_index_mmap", "object_storage_cache_path", "data_parallel_size",
    "sequence_parallel_size", "sequences_per_dataset", "context_parallel_size",
)  # fmt: skip
_OF_EOD = (
    "reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_cu_seqlens", "create_document_ids",
)  # fmt: skip
_logger = logging.getLogger("sixfold.blending")


class _SplitOfMock(str):
    """The split of a config without a blend, which nobody gave."""

    __slots__ = ()


@dataclass(frozen=True)
class BlendChange:
    """Another blend, another sequence length, or fewer documents, from position ``at`` of training on.

    Attributes:
        at: a position, >= 0.
        blend: (prefixes, weights or None). A dataset with weight 0, or not named, leaves. None keeps the blend.
        sequence_length: tokens per sample from here on. None keeps it.
        drop: numbers of documents by prefix. Their places stay and are padding without loss, so nothing else moves.
    """

    at: int
    blend: Blend | None = None
    sequence_length: int | None = None
    drop: Mapping[Prefix, Sequence[int]] | None = None


@dataclass(frozen=True, kw_only=True)
class BlendedMegatronDatasetConfig:
    """What every kind of sample needs to know.

    Raises:
        BlendingError: when it is made, for whatever cannot work.
    """

    random_seed: int
    sequence_length: int  # tokens per sample
    blend: Blend | None = None  # (prefixes, weights); weights None: in proportion to the tokens
    blend_per_split: Sequence[Blend | None] | None = None  # one blend each for train, valid, test
    split: str | None = None  # "98,2,0", with blend
    split_matrix: list[Bookends | None] | None = field(init=False, default=None)  # made from split
    multiple_validation_sets: bool | None = None  # the valid entry is a list, one dataset each
    full_validation: bool | None = None  # with multiple sets: each is one epoch, its size is None
    num_dataset_builder_threads: int = 1  # threads that open prefixes and build indices
    path_to_cache: str | None = None  # None: PREFIX/cache; the stateless order has no files
    mmap_bin_files: bool = True
    tokenizer: Any = None  # an object with eod and, if it likes, pad, eos, special_tokens_dict
    mid_level_dataset_surplus: float = 0.005  # built beyond what a blend needs; the stateless order never runs out
    allow_ambiguous_pad_tokens: bool = False
    order: str = "stateless"
    packing: str = CONCATENATED  # "best_fit": rows of whole documents, of the stateless order
    blend_unit: str = "rows"  # what weights count where documents are packed: "rows", or "tokens" without padding
    document_shuffle: str = "auto"  # of the stateless order: "global", "block" or, by size, one of them
    max_epochs: float | None = 4  # of training: a dataset read more often is warned about; None: no limit
    max_epochs_error: bool = False  # raise BlendingError instead of the warning
    changes: Sequence[BlendChange] = ()
    dataset_names: Mapping[Prefix, str] | None = None  # prefix --> name in the keys; default: its base name
    prefix_folder: str | None = None  # of relative paths; None: the current folder when the config is made
    mock: bool = field(init=False, default=False)  # there is no blend: MockGPTDataset makes its data up
    fast_cache_load: bool = False  # of the peer; a cache that is vouched for is mapped without being read anyway
    defer_npy_index_mmap: bool = False  # of the peer; a map costs microseconds and no descriptor

    def __post_init__(self) -> None:
        self._set("prefix_folder", current_folder() if self.prefix_folder is None else text_of(self.prefix_folder))
        if isinstance(self.split, _SplitOfMock) and (self.blend is not None or any(self.blend_per_split or ())):
            self._set("split", None)  # ``dataclasses.replace`` brings it along from a config that had no blend
        self._set("sequence_length", whole_number("sequence_length", self.sequence_length, 1))
        threads = whole_number("num_dataset_builder_threads", self.num_dataset_builder_threads, 1)
        self._set("num_dataset_builder_threads", threads)
        if not isinstance(self.random_seed, int | np.integer) or isinstance(self.random_seed, bool):
            raise BlendingError(f"random_seed is {self.random_seed!r}; it is a whole number")
        for name in ("random_seed", "max_epochs", "mid_level_dataset_surplus"):
            self._set(name, plain(getattr(self, name)))  # of numpy they are no JSON
        _refuse_max_epochs(self.max_epochs)
        self._check_order()
        if self.blend is not None and self.blend_per_split is not None:
            raise BlendingError("both blend and blend_per_split are given; give one of them")
        if self.blend is not None:
            if self.split is None:
                raise BlendingError('blend is given without split; say which part is for what, such as "98,2,0"')
            self._check_blend("blend", self.blend)
        if self.blend_per_split is not None:
            self._check_blend_per_split(self.blend_per_split)
        if self.blend is None and not any(self.blend_per_split or ()):
            object.__setattr__(self, "mock", True)
            if self.split is None:
                self._set("split", _SplitOfMock("1,1,1"))  # as the peer
        if self.split is not None:
            self._set("split_matrix", split_matrix(parse_split(self.split)))
        self._set("changes", tuple(self.changes))
        self._check_changes()
        self._copy_what_callers_hold()
        self._check_names()
        self.ordering.warn(self)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _copy_what_callers_hold(self) -> None:
        """Copies of what the caller can change later, in plain types: lists, numpy's numbers."""
        if self.blend is not None:
            self._set("blend", _copied(self.blend))
        if self.blend_per_split is not None:
            self._set("blend_per_split", [None if blend is None else _copied(blend) for blend in self.blend_per_split])
        changes = [
            BlendChange(
                int(change.at),
                None if change.blend is None else _copied(change.blend),
                None if change.sequence_length is None else int(change.sequence_length),
                None
                if change.drop is None
                else {text_of(key): sorted(map(int, ids)) for key, ids in change.drop.items()},
            )
            for change in self.changes
        ]
        self._set("changes", tuple(changes))

    def _check_order(self) -> None:
        self._set("_ordering", order_named(self.order, self.packing))
        if self.blend_unit not in BLEND_UNITS:
            raise BlendingError(f'blend_unit is {self.blend_unit!r}; it is one of "rows", "tokens"')
        if self.document_shuffle not in SHUFFLES:
            raise BlendingError(
                f'document_shuffle is {self.document_shuffle!r}; it is one of "auto", "global", "block"'
            )
        self.ordering.check(self)

    def _check_blend(self, what: str, blend: Blend) -> None:
        check_blend(what, blend, self.place_of, as_peer=not self.ordering.by_name)
        if self.ordering.indexed:
            refuse_too_many_datasets(len(blend[0]))

    def _check_blend_per_split(self, blends: Sequence[Blend | None]) -> None:
        if self.split is not None:
            raise BlendingError("both split and blend_per_split are given; with a blend per split there is no split")
        if len(blends) != len(Split):
            raise BlendingError(f"blend_per_split has {len(blends)} entries; it has three: train, valid, test")
        for split, blend in zip(Split, blends, strict=True):
            if blend is not None:
                self._check_blend(f"blend_per_split[{split.value}] ({split.name})", blend)

    def _check_changes(self) -> None:
        for number, change in enumerate(self.changes):
            if not isinstance(change, BlendChange):
                raise BlendingError(f"changes[{number}] is {change!r}; it is a BlendChange(at, blend, sequence_length)")
            whole_number(f"changes[{number}].at", change.at, 0)
            if change.blend is None and change.sequence_length is None and not change.drop:
                raise BlendingError(
                    f"changes[{number}] at {change.at} changes nothing; give blend, sequence_length or drop"
                )
            for prefix, ids in (change.drop or {}).items():
                for place, id_ in enumerate(ids):
                    whole_number(f"changes[{number}].drop[{text_of(prefix)!r}][{place}]", id_, 0)
            if change.blend is not None:
                self._check_blend(f"changes[{number}].blend", change.blend)
            if change.sequence_length is not None:
                whole_number(f"changes[{number}].sequence_length", change.sequence_length, 1)
        for earlier, later in pairwise(self.changes):
            if earlier.at >= later.at:
                raise BlendingError(f"changes at {earlier.at} and {later.at} are out of order; sort changes by at")

    def _check_names(self) -> None:
        names = dict((self.dataset_names or {}).items())
        if self.dataset_names is not None:
            self._set("dataset_names", names)
        object.__setattr__(self, "_named", {self.place_of(prefix): name for prefix, name in names.items()})
        for prefix, name in names.items():
            if not isinstance(name, str) or "\x1f" in name:
                rule = "it is a name, a text without the control character 0x1f"
                raise BlendingError(f"dataset_names[{text_of(prefix)!r}] is {name!r}; {rule}")
        prefixes = dict.fromkeys(prefix for split in Split for prefix in self.prefixes_of(split))
        if not self.mock:  # without a blend the datasets are made by the caller, under any paths
            self._refuse_names_of_no_prefix(prefixes)
        if not self.ordering.by_name:
            return
        for split in Split:
            self._refuse_equal_names(self.prefixes_of(split))

    def _refuse_names_of_no_prefix(self, prefixes: Mapping[str, None]) -> None:
        """A name that no dataset has would do nothing."""
        places = {self.place_of(prefix) for prefix in prefixes}
        by_base_name = {base_name(prefix): prefix for prefix in prefixes}
        for key in self.dataset_names or {}:
            if self.place_of(key) in places:
                continue
            prefix = by_base_name.get(text_of(key))
            if prefix is not None:
                raise BlendingError(
                    f"dataset_names has {text_of(key)!r}, the base name of the prefix {prefix!r}; its keys are prefixes"
                )
            some = ", ".join(map(repr, list(prefixes)[:_MOST_LISTED])) + " ..." * (len(prefixes) > _MOST_LISTED)
            raise BlendingError(
                f"dataset_names has {text_of(key)!r}, which is no prefix of this config and would name nothing; the "
                f"prefixes are {some}"
            )

    def _refuse_equal_names(self, prefixes: Sequence[str]) -> None:
        names: dict[str, str] = {}
        for prefix in prefixes:
            name = self.name_of(prefix)
            if "\x1f" in name:
                raise BlendingError(
                    f"the dataset name {name!r} has the control character 0x1f; give it another by dataset_names"
                )
            other = names.setdefault(name, prefix)
            if other != prefix:
                alike = names_apart(each for each in prefixes if self.name_of(each) == name)
                remedy = f"name them apart by dataset_names={alike}"
                if same_file(self.path_of(other), self.path_of(prefix)):
                    remedy = "they are one file: give it one entry with the sum of the weights"
                raise BlendingError(f"{other!r} and {prefix!r} are both named {name!r}; {remedy}")

    @property
    def ordering(self) -> "Order":
        """The object of the order; see ``orders/interface.py``."""
        found: Order = self.__dict__["_ordering"]
        return found

    def blend_of(self, split: Split) -> Blend | None:
        """The blend that ``split`` starts with."""
        return self.blend if self.blend_per_split is None else self.blend_per_split[split.value]

    def changes_of(self, split: Split) -> Sequence[BlendChange]:
        """The changes that ``split`` goes through: training alone has a running position."""
        return self.changes if split is Split.train else ()

    def prefixes_of(self, split: Split) -> list[str]:
        """Prefixes of the blend of ``split``, then those that its changes add: dataset_id counts them.

        Each place once, as it is written first.
        """
        blends = [self.blend_of(split), *(change.blend for change in self.changes_of(split))]
        found: dict[str, str] = {}
        for blend in blends:
            for prefix in () if blend is None else blend[0]:
                found.setdefault(self.place_of(prefix), text_of(prefix))
        return list(found.values())

    def place_of(self, prefix: Prefix) -> str:
        """One text for every way to write the path of a dataset; see ``prefixes.canonical_path``."""
        return canonical_path(prefix, self.prefix_folder or "")

    def path_of(self, prefix: Prefix) -> str:
        """The path by which it is opened, whatever the current folder is now."""
        return located(text_of(prefix), self.prefix_folder or "")

    @property
    def cache_folder(self) -> str | None:
        """``path_to_cache`` as it is found from the current folder."""
        return located(self.path_to_cache, self.prefix_folder or "") if self.path_to_cache else None

    def name_of(self, prefix: Prefix) -> str:
        """The name of a prefix in the keys of the order: of ``dataset_names``, else its base name."""
        named: dict[str, str] = self.__dict__["_named"]
        name = named.get(self.place_of(prefix))
        return base_name(prefix) if name is None else name


@dataclass(frozen=True, kw_only=True)
class GPTDatasetConfig(BlendedMegatronDatasetConfig):
    """How token ids become a GPT's inputs."""

    reset_position_ids: bool = False  # positions restart after each EOD
    reset_attention_mask: bool = False  # the dense mask has blocks between EODs
    eod_mask_loss: bool = False  # no loss where the input is EOD
    create_attention_mask: bool = False  # dense (1, S, S), True = hidden; the peer's default is True
    create_cu_seqlens: bool = False  # int32, where documents begin
    create_document_ids: bool = False  # int32 (S,), running number of the document
    drop_last_partial_validation_sequence: bool = True  # of one epoch
    add_extra_token_to_sequence: bool = True  # the label of the last token is a token too
    token_dtype: npt.DTypeLike = np.int64
    # Of the peer, without effect here: the .idx says what sequences_per_dataset does, and ranks are the loader's.
    object_storage_cache_path: str | None = None
    data_parallel_size: int = 1
    sequence_parallel_size: int = 0
    hybrid_context_parallel: bool = False  # True is refused
    sequences_per_dataset: Mapping[str, Any] | None = None
    context_parallel_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_fields_of_megatron()
        try:
            signed = np.dtype(self.token_dtype).kind == "i"  # padding is -1 before it becomes 0
        except TypeError:
            signed = False
        if not signed:
            raise BlendingError(f"token_dtype is {self.token_dtype!r}; it is a signed integer type, such as np.int64")
        self._check_eod()

    def _check_fields_of_megatron(self) -> None:
        """Take what needs nothing here, with a line for who debugs; refuse what would make other samples.

        Raises:
            BlendingError: a size that is none, or hybrid_context_parallel.
        """
        self._set("data_parallel_size", whole_number("data_parallel_size", self.data_parallel_size, 1))
        self._set("sequence_parallel_size", whole_number("sequence_parallel_size", self.sequence_parallel_size, 0))
        if self.context_parallel_size is not None:
            whole_number("context_parallel_size", self.context_parallel_size, 1)
        if self.hybrid_context_parallel:
            raise BlendingError(
                "hybrid_context_parallel is True, and cuts samples of several lengths for groups of ranks; here all "
                "samples of a batch have one sequence_length: leave it out, and cut a batch at its cu_seqlens "
                "(create_cu_seqlens)"
            )
        for name in _WITHOUT_EFFECT:
            value = getattr(self, name)
            if value != type(self).__dataclass_fields__[name].default:
                _logger.debug("%s=%r is taken and has no effect here", name, value)

    @property
    def options_of_eod(self) -> list[str]:
        """The options that are set and need to know where documents end."""
        return [option for option in _OF_EOD if getattr(self, option)]

    def _check_eod(self) -> None:
        for option in self.options_of_eod:
            if special_token(self.tokenizer, "eod") is None:
                raise BlendingError(
                    f"{option} needs to know the end-of-document token; give a tokenizer with eod, such as "
                    "types.SimpleNamespace(eod=50256) with the id of your data"
                )


def _refuse_max_epochs(max_epochs: Any) -> None:
    """BlendingError for a limit that is none."""
    number = (
        max_epochs
        if isinstance(max_epochs, int | float | np.integer | np.floating) and not isinstance(max_epochs, bool)
        else 0
    )
    if max_epochs is not None and not (isfinite(number) and number > 0):
        raise BlendingError(f"max_epochs is {max_epochs!r}; it is a number > 0, or None for no limit")


def special_token(tokenizer: Any, name: str) -> int | None:
    """A special token's id, None if the tokenizer has none of that name."""
    try:
        token = getattr(tokenizer, name, None)
    except NotImplementedError:  # megatron-core's tokenizer base raises it for names not filled in
        return None
    if token is None:
        return None
    try:
        if isinstance(token, bool):
            raise TypeError
        return operator.index(token)
    except TypeError:
        if callable(token):  # the pad() of a Hugging Face tokenizer, whose repr is a page
            raise BlendingError(
                f"tokenizer.{name} is a method; it must be an int, the id of a token. For a Hugging Face tokenizer "
                "pass types.SimpleNamespace(eod=tokenizer.eos_token_id, vocab_size=len(tokenizer))"
            ) from None
        raise BlendingError(f"tokenizer.{name} is {token!r}; it must be an int, the id of a token") from None


def _copied(blend: Blend) -> Blend:
    """A checked blend in lists of its own, its prefixes as text."""
    prefixes, weights = blend
    return [text_of(prefix) for prefix in prefixes], None if weights is None else [plain(weight) for weight in weights]


def check_blend(what: str, blend: Blend, place_of: Callable[[Prefix], str], *, as_peer: bool = False) -> None:
    """Refuse a blend that cannot work; ``what`` names it in the message.

    ``as_peer``: as megatron-core, a prefix twice is taken (with a warning), and weight 0 is not.
    """
    rule = f"{what} is {blend!r}; it is a pair (list of prefixes, list of weights or None)"
    if not isinstance(blend, Sequence) or len(blend) != 2 or isinstance(blend[0], str):
        raise BlendingError(rule)
    try:
        prefixes, weights = [text_of(prefix) for prefix in blend[0]], None if blend[1] is None else list(blend[1])
    except TypeError:
        raise BlendingError(rule) from None
    if not prefixes:
        raise BlendingError(f"{what} has no dataset; it has at least one prefix")
    twice = first_repeated(prefixes, key=None if as_peer else place_of)
    if twice is not None:
        problem = f"{what} has {twice!r} more than once; give it one entry with the sum of the weights"
        if not as_peer:
            raise BlendingError(problem)
        warnings.warn(f"{problem}: now its samples repeat", stacklevel=2)
    if weights is None:
        return
    if len(weights) != len(prefixes):
        raise BlendingError(f"{what} has {len(prefixes)} prefixes and {len(weights)} weights; give one weight for each")
    try:
        refuse_weights(weights) if as_peer else exact_weights(weights)
    except BlendingError as error:
        raise BlendingError(f"{what}: {error}") from None
