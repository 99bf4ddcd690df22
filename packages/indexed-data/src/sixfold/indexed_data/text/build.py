"""A whole build: parts made side by side, joined in order, published at once.

    inputs --> cut --> parts.py in workers --> PREFIX.building/part-* --> join --> publish (this file)

Everything before ``publish`` lies in PREFIX.building, see the note in building_folder.py. The bytes do not depend on
the number of workers.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sixfold.indexed_data.atomic_files import publish
from sixfold.indexed_data.companions import ENDINGS as COMPANIONS
from sixfold.indexed_data.companions import refuse_foreign, replaced
from sixfold.indexed_data.errors import IndexedDataError
from sixfold.indexed_data.format import DType
from sixfold.indexed_data.paths import AnyPath, output_prefix
from sixfold.indexed_data.provenance import I64
from sixfold.indexed_data.text.building_folder import BadInput, building_folder, part_prefix
from sixfold.indexed_data.text.fingerprints import VARIES, fingerprint
from sixfold.indexed_data.text.finished_part import LISTED_ERRORS, PartReport, read_runs
from sixfold.indexed_data.text.input_hashes import input_hashes
from sixfold.indexed_data.text.inputs import Slice, Source, TextOptions, cut, sources_of
from sixfold.indexed_data.text.job import Job
from sixfold.indexed_data.text.parts import encodes_alike
from sixfold.indexed_data.text.tokenizer import Tokenizer
from sixfold.indexed_data.text.tokenizers import load_tokenizer
from sixfold.indexed_data.text.workers import part_name, refuse_bootstrap, run_parts
from sixfold.indexed_data.token_ids import whole_number
from sixfold.indexed_data.writer import IndexedDatasetBuilder

PART_BYTES = 64 * 2**20
TIMEOUT_S = 600.0
Parts = list[tuple[Slice, ...]]


class BuildNote(UserWarning):
    """``build`` did not do exactly what was asked, and says so. Also in ``BuildReport.notes``."""


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What ``build`` wrote; the fields are the keys of ``sixfold-data build --json``."""

    prefix: str
    documents: int
    sequences: int
    tokens: int
    dtype: str
    bin_bytes: int
    bad_lines: int
    empty_documents: int
    errors: tuple[str, ...]  # the first ten bad lines, as FILE:LINE: reason
    notes: tuple[str, ...]  # what was not done as asked: the warnings of the build
    seconds: float


def build(
    inputs: Sequence[AnyPath],
    output: AnyPath,
    *,
    tokenizer: str = "bytes",
    eod_token: str | None = None,
    format: str = "auto",
    json_key: str = "text",
    text_documents: str = "file",
    messages_key: str | None = None,
    append_eod: bool = True,
    special_tokens: str = "text",
    template: bool = False,
    dtype: str = "auto",
    workers: int = 1,
    on_error: str = "fail",
    provenance: bool = False,
    overwrite: bool = False,
    part_bytes: int = PART_BYTES,
    timeout_s: float = TIMEOUT_S,
    progress: Callable[[int, int], None] | None = None,
) -> BuildReport:
    """Tokenize text files into the pair ``output``. Documents keep the order of the files and of their lines.

    Args:
        inputs: text or jsonl files, plain, .gz or .zst; Parquet or Arrow tables; folders that ``datasets`` saved.
        output: path prefix of the pair, without extension.
        tokenizer, eod_token, special_tokens, template: see ``load_tokenizer``.
        format: ``jsonl`` (one object per line), ``text``, ``parquet``, ``arrow``, or ``auto``: by extension, where
            .jsonl, .ndjson, .jsonlines and .json are jsonl, .parquet, .arrow and .feather tables, and others text.
        json_key: where an object has its text; the column of a table.
        text_documents: what is a document of a text file: the ``file``, a ``paragraph`` or a ``line``.
        messages_key: where an object or a row has a conversation, a list of messages with ``role`` and ``content``, in
            place of a text. The tokenizer's chat template encodes it, and a loss mask is stored beside the pair.
        append_eod: end every document with the tokenizer's EOD, if it does not end so.
        dtype: ``auto`` (``DType.optimal_dtype`` of the vocabulary), ``uint16`` or ``int32``.
        workers: processes that tokenize. With more than one, the calling script needs ``if __name__ == "__main__":``.
        provenance: store the file and line of each document beside the pair, for ``IndexedDataset.provenance``.
        on_error: a bad line ends the build (``fail``) or is counted (``skip``).
        overwrite: replace an existing pair.
        part_bytes: text per part of the work.
        timeout_s: if no worker uses the processor for so long, the build ends with an error.
        progress: called with (parts done, parts in all).
    Raises:
        IndexedDataError: bad options, inputs or lines; a pair is there already; a worker died. No pair is left then.
    """
    started = time.perf_counter()
    names = [inputs] if isinstance(inputs, str | bytes | os.PathLike) else list(inputs)
    prefix = output_prefix(output)
    text = TextOptions(format=format, json_key=json_key, text_documents=text_documents, messages_key=messages_key)
    workers, part_bytes = whole_number("workers", workers), whole_number("part_bytes", part_bytes)
    refuse_bootstrap(workers)
    loaded = load_tokenizer(tokenizer, eod_token, special_tokens=special_tokens, template=template)
    job = Job(
        text=text,
        tokenizer=loaded.name,
        eod_token=eod_token,
        append_eod=append_eod,
        special_tokens=special_tokens,
        template=template,
        dtype=_stored_dtype(dtype, loaded),
        on_error=on_error,
        provenance=provenance,
        encoding=fingerprint(loaded),
    )
    if messages_key is not None and loaded.encode_chat is None:
        raise IndexedDataError(
            f"messages_key is {messages_key!r}, and tokenizer {tokenizer} has no chat template; give a FOLDER of "
            "transformers that has one, or an object with encode_chat(messages)"
        )
    if append_eod and loaded.eod is None:
        by_name, by_object = "name it with eod_token", "give what makes it an attribute eod, its id"
        remedy = by_object if ":" in loaded.name and not os.path.exists(loaded.name) else by_name
        raise IndexedDataError(f"{tokenizer} has no EOD to append; {remedy}, or pass append_eod=False")
    if workers < 1 or part_bytes < 1 or isinstance(timeout_s, str | bytes | bool) or not timeout_s > 0:
        sizes = f"workers is {workers}, part_bytes {part_bytes}, timeout_s {timeout_s}"
        raise IndexedDataError(f"{sizes}; the first two are >= 1, the last is > 0")
    if not names:
        raise IndexedDataError(f"{prefix}: no inputs; give at least one text, jsonl or table file")
    sources = sources_of(names, text)
    refuse_foreign(prefix, COMPANIONS)
    parts = cut(sources, job.text, part_bytes)

    def alike(number: int, folder: str) -> bool:
        return job.encoding.probe == VARIES or encodes_alike(parts[number], part_prefix(folder, number), job, loaded)

    with building_folder(prefix, _plan(sources, job, part_bytes), overwrite, alike) as (folder, dropped):
        notes = (*loaded.notes, *dropped)
        for note in notes:
            warnings.warn(note, BuildNote, stacklevel=2)
        with input_hashes(sources) as hashes:
            reports = _make_parts(run_parts(parts, folder, job, loaded, workers, timeout_s), parts, progress)
            _refuse_changed(sources, text)
            made_of = _made_of(sources, hashes(), reports, job, loaded)
        _join(folder, parts, reports, job, made_of, prefix)
    for note in (found := _found(reports, job)):
        warnings.warn(note, BuildNote, stacklevel=2)
    notes = (*notes, *found)
    return _summary(prefix, parts, reports, job, notes, time.perf_counter() - started)


def _found(reports: list[PartReport], job: Job) -> list[str]:
    """Notes on what the documents hold."""
    spelled, inside, uncounted = (
        sum(getattr(report, name) for report in reports) for name in ("spelled", "ended_inside", "uncounted")
    )
    notes = []
    if spelled and job.special_tokens == "text":
        notes.append(
            f"{spelled} documents spell a special token of {job.tokenizer}; it is stored as text, and "
            'special_tokens="ids" (--special-tokens ids) makes it the token'
        )
    if inside:
        notes.append(f"{inside} documents contain the EOD of {job.tokenizer}: readers end a document there")
    if uncounted:
        notes.append(
            f"{uncounted} conversations have no token that counts in the loss: none of their messages has the role "
            "assistant, or its answers are empty"
        )
    return notes


def _stored_dtype(dtype: str, tokenizer: Tokenizer) -> str:
    if dtype not in ("auto", "uint16", "int32"):
        raise IndexedDataError(f"dtype is {dtype!r}; it is auto, uint16 or int32")
    return np.dtype(DType.optimal_dtype(tokenizer.vocab_size)).name if dtype == "auto" else dtype


def _plan(sources: Sequence[Source], job: Job, part_bytes: int) -> dict[str, Any]:
    """What must be equal for finished parts of an earlier run to be of use."""
    job_fields = asdict(job)
    plan: dict[str, Any] = {"version": 3, "part_bytes": part_bytes, "encoding": job_fields.pop("encoding")}
    plan["inputs"] = [[os.path.abspath(source.path), *source.state] for source in sources]
    return {**plan, **job_fields}


def _refuse_changed(sources: Sequence[Source], options: TextOptions) -> None:
    """BadInput if an input is not what it was when the build began: parts of it were read then, and parts later."""
    for source in sources:
        try:
            same = Source.of(source.path, options) == source
        except IndexedDataError:
            same = False
        if not same:
            raise BadInput(f"{source.path}: changed while it was read; build again when nobody writes to it")


def _make_parts(
    running: Generator[PartReport, None, None], parts: Parts, progress: Callable[[int, int], None] | None
) -> list[PartReport]:
    """The reports of all parts; BadInput at the first line, in order, that cannot be used."""
    reports: list[PartReport] = []
    if progress is not None:
        progress(0, len(parts))
    try:
        with closing(running):  # no worker writes on after an error
            for report in running:
                reports.append(report)
                if report.fatal is not None:
                    offsets = _line_offsets(parts, reports)
                    raise BadInput(_place(parts, offsets, len(reports) - 1, report.fatal))
                if progress is not None:
                    progress(len(reports), len(parts))
    except KeyboardInterrupt as stop:
        unfinished = parts[min(len(reports), len(parts) - 1)]
        raise KeyboardInterrupt(part_name(unfinished)) from stop
    return reports


def _made_of(
    sources: Sequence[Source], hashes: Sequence[str], reports: Sequence[PartReport], job: Job, tokenizer: Tokenizer
) -> dict[str, Any]:
    """The record of this build in the manifest: all that decides its bytes."""
    inputs = [
        {"path": source.path, "bytes": source.size, "sha256": digest}
        for source, digest in zip(sources, hashes, strict=True)
    ]
    options = asdict(job)
    del options["encoding"], options["tokenizer"], options["provenance"]
    added = [int(i) for i in tokenizer.encode("")] if job.template else []
    return {
        "documents": sum(report.documents for report in reports),
        "bad_lines": sum(report.bad_lines for report in reports),
        "empty_documents": sum(report.empty_documents for report in reports),
        "tokenizer": {"name": job.tokenizer, **asdict(job.encoding)},
        "added_by_template": added,  # such as a BOS: the ids of an empty text
        "options": options,
        "inputs": inputs,
    }


def _join(
    folder: str, parts: Parts, reports: Sequence[PartReport], job: Job, made_of: dict[str, Any], prefix: str
) -> None:
    """Make one pair of the parts and give it its names."""
    whole = os.path.join(folder, "whole")
    try:
        with IndexedDatasetBuilder(whole + ".bin", job.dtype) as builder:
            for number, offsets in enumerate(_line_offsets(parts, reports)):
                part = part_prefix(folder, number)
                builder._add_index(part, _sources_of(part, parts[number], offsets) if job.provenance else None)
            blocks = [(nbytes, crc) for report in reports for nbytes, crc in report.blocks]
            builder._made_of = blocks, [made_of]
    except IndexedDataError as error:
        kept = "all parts are kept: run the same command again"
        raise IndexedDataError(f"{prefix}: the parts cannot be joined: {error}; {kept}") from error
    made = {ending: whole + ending for ending in COMPANIONS if os.path.exists(whole + ending)}
    try:
        publish(whole + ".bin", prefix + ".bin", whole + ".idx", prefix + ".idx", replaced(prefix, made))
    except OSError as error:
        raise IndexedDataError(f"{prefix}: the pair cannot be named: {error.strerror}") from error


def _sources_of(part: str, slices: Sequence[Slice], offsets: Sequence[int]) -> tuple[I64, list[str]]:
    """The runs of a part's documents with lines of the files, not of the slices; and the file of each slice."""
    runs = read_runs(part)
    runs[:, 2] += np.asarray(offsets, np.int64)[runs[:, 1]]
    return runs, [piece.path for piece in slices]


def _line_offsets(parts: Parts, reports: Sequence[PartReport]) -> list[list[int]]:
    """Of each slice of each part that has a report: how many lines of its file lie before it."""
    found, before = [], 0
    for slices, report in zip(parts, reports, strict=False):
        offsets = []
        for number, piece in enumerate(slices):
            before = before if piece.begin else 0
            offsets.append(before)
            before += report.lines[number] if number < len(report.lines) else 0
        found.append(offsets)
    return found


def _place(parts: Parts, offsets: Sequence[Sequence[int]], number: int, place: tuple[int, int, str]) -> str:
    """A place in part ``number`` as FILE:LINE: reason; lines are counted from where the file begins."""
    within, line, reason = place
    return f"{parts[number][within].path}:{offsets[number][within] + line}: {reason}"


def _summary(
    prefix: str, parts: Parts, reports: list[PartReport], job: Job, notes: tuple[str, ...], seconds: float
) -> BuildReport:
    places = [(number, place) for number, report in enumerate(reports) for place in report.bad]
    offsets = _line_offsets(parts, reports)
    tokens = sum(report.tokens for report in reports)
    return BuildReport(
        prefix=prefix,
        documents=sum(report.documents for report in reports),
        sequences=sum(report.sequences for report in reports),
        tokens=tokens,
        dtype=job.dtype,
        bin_bytes=tokens * np.dtype(job.dtype).itemsize,
        bad_lines=sum(report.bad_lines for report in reports),
        empty_documents=sum(report.empty_documents for report in reports),
        errors=tuple(_place(parts, offsets, number, place) for number, place in places[:LISTED_ERRORS]),
        notes=notes,
        seconds=seconds,
    )
