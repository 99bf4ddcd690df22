"""One part of a build: some slices of text become one pair.

    Slices --> build_part (this file) --> FOLDER/part-00000.bin .idx .json

It runs in the process of the build or in a worker. It depends on its arguments alone, so both make the same bytes. A
part is finished when its .json exists, which is written last.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from sixfold.indexed_data.errors import IndexedDataError
from sixfold.indexed_data.reader import IndexedDataset
from sixfold.indexed_data.text.fingerprints import Fingerprint
from sixfold.indexed_data.text.inputs import Lines, Slice, TextOptions, documents
from sixfold.indexed_data.text.tokenizers import Tokenizer
from sixfold.indexed_data.writer import IndexedDatasetBuilder

LISTED_ERRORS = 10
SAMPLE_CHARACTERS = 1 << 16  # of each finished part: a thousandth of what making it again would cost


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What decides the bytes of a build, besides its inputs."""

    text: TextOptions
    tokenizer: str
    eod_token: str | None
    append_eod: bool
    special_tokens: str
    template: bool
    dtype: str
    on_error: str
    encoding: Fingerprint

    def __post_init__(self) -> None:
        if self.on_error not in ("fail", "skip"):
            raise IndexedDataError(f"on_error is {self.on_error!r}; it is fail or skip")


@dataclass(slots=True)
class PartReport:
    """What became of a part. A place is (slice, line in it, reason)."""

    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    empty_documents: int = 0
    spelled: int = 0  # documents whose text spells a special token
    ended_inside: int = 0  # documents with the EOD before their end
    bad_lines: int = 0
    bad: list[tuple[int, int, str]] = field(default_factory=list)  # the first LISTED_ERRORS places
    lines: list[int] = field(default_factory=list)  # of each slice, so that the next part can count on
    fatal: tuple[int, int, str] | None = None  # where the part was given up; it then wrote nothing


def build_part(slices: Sequence[Slice], prefix: str, job: Job, tokenizer: Tokenizer) -> PartReport:
    """Write the pair ``prefix`` and its report, unless a bad line or id is fatal.

    Raises:
        IndexedDataError: a file cannot be read or written.
    """
    report = PartReport()
    with IndexedDatasetBuilder(prefix + ".bin", job.dtype, vocab_size=tokenizer.vocab_size) as builder:
        for number, piece in enumerate(slices):
            lines = Lines(piece)
            for document in documents(lines, job.text):
                if document.text is None:
                    _count_bad(report, (number, document.line, document.reason), job)
                elif not document.text:
                    report.empty_documents += 1
                else:
                    _add(builder, tokenizer, document.text, job, report, (number, document.line))
                if report.fatal is not None:
                    builder.abort()
                    return report
            report.lines.append(lines.count)
    _write_report(prefix + ".json", report)
    return report


def encodes_alike(slices: Sequence[Slice], prefix: str, job: Job, tokenizer: Tokenizer) -> bool:
    """Whether the first documents of a finished part get the ids that it holds, as far as ``SAMPLE_CHARACTERS`` go.

    A fingerprint does not know the data files that a tokenizer reads by itself.
    """
    left = SAMPLE_CHARACTERS
    try:
        with IndexedDataset(prefix) as pair:
            texts = (document.text for piece in slices for document in documents(Lines(piece), job.text))
            for number, text in enumerate(filter(None, texts)):
                left -= len(text)
                if left < 0:
                    break
                if not np.array_equal(np.asarray(_encoded(text, job, tokenizer)), pair[number]):
                    return False
    except Exception:  # whatever the user's code raises; or the part is damaged
        return False
    return True


def read_report(prefix: str) -> PartReport | None:
    """The report of a finished part, or None if it is not finished."""
    import json  # only here: reading pairs should not load it

    if not all(os.path.exists(prefix + end) for end in (".bin", ".idx", ".json")):
        return None
    try:
        with open(prefix + ".json", encoding="utf-8") as file:
            return PartReport(**json.load(file))
    except (OSError, ValueError, TypeError):  # cut when the machine went down: the part is made again
        return None


def _count_bad(report: PartReport, place: tuple[int, int, str], job: Job) -> None:
    if job.on_error == "fail":
        report.fatal = place
    report.bad_lines += 1
    if len(report.bad) < LISTED_ERRORS:
        report.bad.append(place)


def _add(
    builder: IndexedDatasetBuilder, tokenizer: Tokenizer, text: str, job: Job, report: PartReport, at: tuple[int, int]
) -> None:
    try:
        ids = _encoded(text, job, tokenizer)
    except Exception as error:  # a tokenizer is anybody's code, and the line says more than its traceback
        report.fatal = (*at, f"tokenizer {tokenizer.name} failed: {type(error).__name__}: {error}")
        return
    if tokenizer.special_texts and any(token in text for token in tokenizer.special_texts):
        report.spelled += 1
    if tokenizer.may_spell_eod and tokenizer.eod is not None and _has_inside(ids, tokenizer.eod, job):
        if job.special_tokens == "text":
            _count_bad(report, (*at, _eod_inside(tokenizer, job)), job)
            return
        report.ended_inside += 1
    try:
        builder.add_document(ids)
    except IndexedDataError as error:
        if error.__cause__ is not None and isinstance(error.__cause__, OSError):
            raise
        report.fatal = (*at, f"tokenizer {tokenizer.name} gave {error}")
        return
    report.documents += 1
    report.sequences += 1
    report.tokens += len(ids)


def _has_inside(ids: Any, eod: int, job: Job) -> bool:
    """Whether a document's ids have the EOD where it is not the end that was appended."""
    if isinstance(ids, np.ndarray):
        found = np.flatnonzero(ids == eod)
        return found.size > 0 and (not job.append_eod or int(found[0]) != ids.size - 1)
    if isinstance(ids, list | tuple):
        return eod in ids and (not job.append_eod or ids.index(eod) != len(ids) - 1)
    return False


def _eod_inside(tokenizer: Tokenizer, job: Job) -> str:
    by, remedy = "", "mark it as special in the tokenizer"
    if job.template:  # a text begins with the token that ends it, as GPT-2's
        by, remedy = ", or adds it by its template", f"leave the template out, {remedy}"
    return (
        f"tokenizer {tokenizer.name} makes its EOD, {tokenizer.eod}, of this text{by}, which would end the document "
        f'there; {remedy}, or take its ids as they are: special_tokens="ids" (--special-tokens ids)'
    )


def _encoded(text: str, job: Job, tokenizer: Tokenizer) -> Any:
    ids = tokenizer.encode(text)
    return _with_end(ids, tokenizer.eod) if job.append_eod else ids


def _with_end(ids: Any, eod: int | None) -> Any:
    assert eod is not None, "build refuses to append an EOD that the tokenizer does not have"
    if isinstance(ids, str | bytes):
        return ids  # text, which the builder refuses: its letters are no ids
    if not isinstance(ids, np.ndarray):
        return ids if isinstance(ids, list) and ids and ids[-1] == eod else [*ids, eod]
    if ids.size == 0:
        return [eod]
    if ids.ndim == 1 and ids.dtype.kind in "iu" and ids[-1] == eod:
        return ids  # the tokenizer has ended it, and a second end would be an empty document
    # Joined to an integer, a mask or another thing that the builder refuses would become integers too.
    return np.concatenate((ids, _end_for(ids.dtype, eod))) if ids.dtype.kind in "iuO" else ids


@lru_cache(maxsize=8)
def _end_for(dtype: np.dtype[Any], eod: int) -> npt.NDArray[Any]:
    """The end as one id. Not simply of ``dtype``: a tokenizer of bytes may give uint8 and end with 256."""
    return np.array([eod], np.result_type(dtype, np.min_scalar_type(eod)))


def _write_report(path: str, report: PartReport) -> None:
    import json  # only here: reading pairs should not load it

    temporary = path + ".tmp"  # in the folder of a build, which is locked
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(asdict(report), file)
    os.replace(temporary, path)
