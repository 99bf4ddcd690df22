"""The entries of data.changes as blending takes them, and which pairs a run still needs.

    config.data --> blend_changes, prefixes_to_open (this file) --> token_stream.py

Documents that are taken down are numbers in the configuration, or in a text file with one number a line. A dataset that
left the blend may be deleted: what the checkpoint says of it is then enough.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sixfold.gpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from sixfold.blending import BlendChange
    from sixfold.gpt.config.train_config import DataChange, DataConfig, TrainConfig


def blend_changes(data: DataConfig) -> list[BlendChange]:
    """The changes of a run. Reads the files of documents that they name.

    Raises:
        ConfigError: such a file cannot be read, or holds something else than numbers of documents.
    """
    from sixfold.blending import BlendChange

    return [
        BlendChange(
            at=change.at,
            blend=(list(data.blend_at(n)), list(change.weights) or None) if change.blend or change.weights else None,
            drop=_dropped(data, n, change) or None,
        )
        for n, change in enumerate(data.changes)
    ]


def _dropped(
    data: DataConfig, number: int, change: DataChange
) -> dict[str | bytes | PathLike[str] | PathLike[bytes], Sequence[int]]:
    """Documents by prefix. A key of the configuration is a prefix, or the name of a dataset."""
    prefixes = data.train_prefixes
    by_name = dict(zip(data.names_of(prefixes), prefixes, strict=True))
    return {
        key if key in prefixes else by_name[key]: _numbers(f"data.changes[{number}].drop.{key}", ids)
        if isinstance(ids, str)
        else list(ids)
        for key, ids in change.drop.items()
    }


def refuse_other_drops(was: Sequence[Sequence[Any]], now: Sequence[Sequence[Any]], data: DataConfig) -> None:
    """Refuse lists of documents that differ from those that the run has taken down before its checkpoint.

    Args:
        was, now: ``drops`` of the saved state and of the new one: (position, dataset, count of documents, digest) each.
    Raises:
        ConfigError: the key whose list or file has changed, and how many it named.
    """
    saved = {(at, name): (count, digest) for at, name, count, digest in was}
    for at, name, count, digest in now:
        count_then, digest_then = saved.get((at, name), (count, digest))
        if (count_then, digest_then) == (count, digest):
            continue
        number = next(n for n, change in enumerate(data.changes) if change.at == at)
        key = next(one for one in data.changes[number].drop if name in (one, *data.names_of([one])))
        given = data.changes[number].drop[key]
        file = f" (the file {given})" if isinstance(given, str) else ""
        others = ", others" if count_then == count else ""
        raise ConfigError(
            f"data.changes[{number}].drop.{key}{file} names {count} documents, and the run has taken down {count_then}"
            f"{others}, from position {at} on. Name those again; a further change with a later position takes down more"
        )


def _numbers(what: str, path: str) -> list[int]:
    """The numbers in the file ``path`` of the key ``what``."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"{what} is {path!r}, which cannot be read ({why}); it is a list of numbers of documents, or a text file "
            "with one on each line"
        ) from error
    wrong = next((line for line in lines if not (line.isascii() and line.isdecimal())), None)
    if wrong is not None:
        raise ConfigError(
            f"{what}: {path} has {wrong!r}; it has the number of a document on each line, as `why` prints them"
        )
    if not lines:
        raise ConfigError(f"{what}: {path} has no number of a document; write one on each line")
    return [int(line) for line in lines]


def prefixes_to_open(config: TrainConfig) -> tuple[str, ...]:
    """Every prefix of a run but those that left the blend and were deleted; for URLs the store is asked.

    Raises:
        ConfigError: validation reads a part of a deleted one.
    """
    from sixfold.indexed_data import IndexedDataset

    data = config.data
    unread = [prefix for prefix in data.retired_prefixes if prefix not in data.valid_prefixes]
    gone = [prefix for prefix in unread if not IndexedDataset.exists(prefix)]
    if gone and config.eval.every and not data.valid and set(gone) & set(data.blend):
        raise ConfigError(
            f"{gone[0]}.idx and .bin are not there: training reads it no more, and validation reads a part of it "
            f"(data.split {data.split}); bring the pair back, or set eval.every = 0"
        )
    return tuple(prefix for prefix in (*data.train_prefixes, *data.valid_prefixes) if prefix not in gone)


def prefixes_with_tokenizer(data: DataConfig) -> tuple[str, ...]:
    """Prefixes whose PREFIX.json may say which tokenizer made the data.

    Those of the first blend; if one of them was deleted, all that the run has read.
    """
    from sixfold.indexed_data import IndexedDataset

    deleted = [p for p in data.blend if p in data.retired_prefixes and not IndexedDataset.exists(p)]
    return data.train_prefixes if deleted else data.blend
