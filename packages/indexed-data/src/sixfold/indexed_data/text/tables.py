"""Parquet and Arrow tables: the groups of rows that one can be cut at, and the texts of a column.

    path --> table_pieces --> groups of rows --> table_rows (this file) --> inputs.py

Needs pyarrow, the extra ``parquet``. A group is a row group of Parquet or a record batch of an Arrow file. An Arrow
stream, as ``datasets`` saves it, is one piece: nothing in it says where its batches begin.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from sixfold.indexed_data.errors import IndexedDataError
from sixfold.indexed_data.extras import extra

_ROWS = 1024  # per step: texts of a few MiB
_ARROW_FILE = b"ARROW1"


def saved_dataset_files(folder: str) -> list[str] | None:
    """The tables of a folder that ``Dataset.save_to_disk`` wrote, in order; None for another folder.

    Raises:
        IndexedDataError: it holds several splits, or its list cannot be read.
    """
    import json  # only here: reading pairs should not load it

    def listed(name: str) -> Any:
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            return json.load(file)

    there = set(os.listdir(folder))
    try:
        if "dataset_dict.json" in there:
            splits = [os.path.join(folder, name) for name in listed("dataset_dict.json")["splits"]]
        elif "state.json" in there:
            state, splits = listed("state.json"), []
            files = [os.path.join(folder, each["filename"]) for each in state["_data_files"]]
        else:
            return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IndexedDataError(f"{folder}: its list of files cannot be read: {error}; save it again") from error
    if splits:
        raise IndexedDataError(f"{folder}: is a folder of several splits; give those to build: {', '.join(splits)}")
    indices = state.get("_indices_data_files") or state.get("_indices_files")
    if indices:
        raise IndexedDataError(
            f"{folder}: its rows are picked by a list of indices, which is not read; save it after flatten_indices()"
        )
    return files


def table_pieces(path: str, kind: str, column: str, size: int, part_bytes: int) -> Iterator[tuple[int, int, int]]:
    """(first group, last + 1, about how many bytes of text) of pieces of at most ``part_bytes``, or of one group.

    Raises:
        IndexedDataError: no whole table, or it has no such column.
    """
    table = _Parquet(path, column) if kind == "parquet" else _Arrow(path, column, size)
    begin = nbytes = 0
    for group, more in enumerate(table.group_bytes()):
        if group > begin and nbytes + more > part_bytes:
            yield begin, group, nbytes
            begin, nbytes = group, 0
        nbytes += more
    yield begin, table.groups, nbytes


def refuse_tools(path: str, kind: str, column: str) -> None:
    """IndexedDataError for a table of conversations with a column of tools: rows are read of one column."""
    if column in (_Parquet(path, None) if kind == "parquet" else _Arrow(path, None)).names:
        raise IndexedDataError(
            f"{path}: has a column {column!r}, which a chat template would write and which is not read of tables; give "
            "these conversations as JSON lines, or give the column another name"
        )


def table_rows(path: str, kind: str, begin: int, end: int, column: str) -> Iterator[Any]:
    """What each row of these groups has in ``column``: a str, None, or bytes where the text is no UTF-8."""
    table = _Parquet(path, column) if kind == "parquet" else _Arrow(path, column)
    for values in table.columns(begin, end):
        try:
            yield from values.to_pylist()
        except UnicodeDecodeError:  # one of them
            yield from (_text_or_bytes(value) for value in values)


def _text_or_bytes(value: Any) -> str | bytes | None:
    try:
        text: str | None = value.as_py()
        return text
    except UnicodeDecodeError:
        data: bytes = value.as_buffer().to_pybytes()
        return data


class _Parquet:
    """A Parquet file by its row groups."""

    def __init__(self, path: str, column: str | None) -> None:
        pyarrow, parquet = _pyarrow(path), extra("pyarrow.parquet", path)
        try:
            self._file = parquet.ParquetFile(path, memory_map=True, pre_buffer=False)
        except (pyarrow.ArrowException, OSError) as error:
            raise IndexedDataError(f"{path}: cannot be read: {error}") from error
        self.names: list[str] = self._file.schema_arrow.names
        if column is not None:
            _check_column(path, self._file.schema_arrow, column)
        self._pyarrow, self._path, self._column = pyarrow, path, column
        self.groups: int = self._file.metadata.num_row_groups

    def group_bytes(self) -> Iterator[int]:
        metadata = self._file.metadata
        for group in range(self.groups):
            columns = [metadata.row_group(group).column(i) for i in range(metadata.num_columns)]
            root = self._column
            yield sum(each.total_uncompressed_size for each in columns if each.path_in_schema.split(".")[0] == root)

    def columns(self, begin: int, end: int) -> Iterator[Any]:
        groups = list(range(begin, end))
        try:
            for batch in self._file.iter_batches(_ROWS, groups, [self._column], use_threads=False):
                yield batch.column(self._column)  # a struct with such a field comes too: a.b
        except self._pyarrow.ArrowException as error:
            raise IndexedDataError(f"{self._path}: cannot be read: {error}") from error


class _Arrow:
    """An Arrow file by its record batches, or an Arrow stream as a whole."""

    def __init__(self, path: str, column: str | None, size: int = 0) -> None:
        pyarrow = _pyarrow(path)
        ipc = extra("pyarrow.ipc", path)
        try:
            self._source = pyarrow.memory_map(path)
            self._is_file = self._source.read(len(_ARROW_FILE)) == _ARROW_FILE
            self._source.seek(0)
            self._reader = (ipc.open_file if self._is_file else ipc.open_stream)(self._source)
        except (pyarrow.ArrowException, OSError) as error:
            raise IndexedDataError(f"{path}: cannot be read: {error}") from error
        self.names: list[str] = self._reader.schema.names
        if column is not None:
            _check_column(path, self._reader.schema, column)
        self._pyarrow, self._path, self._column, self._size = pyarrow, path, column, size
        self.groups: int = self._reader.num_record_batches if self._is_file else 1

    def group_bytes(self) -> Iterator[int]:
        yield from [self._size // max(1, self.groups)] * self.groups

    def columns(self, begin: int, end: int) -> Iterator[Any]:
        batches = map(self._reader.get_batch, range(begin, end)) if self._is_file else self._reader
        try:
            for batch in batches:
                values = batch.column(self._column)
                for row in range(0, len(values), _ROWS):
                    yield values.slice(row, _ROWS)
        except (self._pyarrow.ArrowException, OSError) as error:
            raise IndexedDataError(f"{self._path}: cannot be read: {error}") from error


def _pyarrow(path: str) -> Any:
    return extra("pyarrow", f"{path}: reading a table")


def _check_column(path: str, schema: Any, column: str) -> None:
    if column not in schema.names:
        raise IndexedDataError(
            f"{path}: has no column {column!r}, its columns are {', '.join(schema.names)}; name the one of the text "
            "with json_key (--json-key)"
        )
    if schema.names.count(column) > 1:
        raise IndexedDataError(
            f"{path}: has {schema.names.count(column)} columns {column!r}; give those that are not the text other names"
        )
    kind = str(schema.field(column).type)
    if "string" not in kind and kind != "null":  # of a table without a text; messages have strings inside
        raise IndexedDataError(f"{path}: column {column!r} is of type {kind}; a text column has strings")
