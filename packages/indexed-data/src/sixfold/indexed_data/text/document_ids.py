"""Texts become the ids of documents, a batch at a time, each with its EOD appended.

texts --> Batch (this file): tokenizer, EOD --> IndexedDatasetBuilder; counts --> PartReport
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from sixfold.indexed_data.errors import IndexedDataError
from sixfold.indexed_data.text.finished_part import PartReport, count_bad_line
from sixfold.indexed_data.text.job import Job
from sixfold.indexed_data.text.tokenizer import Messages, Tokenizer
from sixfold.indexed_data.writer import IndexedDatasetBuilder

BATCH_CHARACTERS, BATCH_TEXTS = 1 << 20, 1024  # enough for the threads of a tokenizer, and small beside a part


Value = str | Messages


class Batch:
    """Texts that are encoded together, each with its place (slice, line in it)."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.slices, self.lines = array("q"), array("q")  # of the documents that were appended
        self._values: list[Value] = []
        self._places: list[tuple[int, int]] = []
        self._characters = 0

    def add(self, value: Value, at: tuple[int, int]) -> bool:
        """Take a text along; whether the batch is full now."""
        self._values.append(value)
        self._places.append(at)
        self._characters += len(value)
        return self._characters >= BATCH_CHARACTERS or len(self._values) >= BATCH_TEXTS

    def flush(self, builder: IndexedDatasetBuilder, tokenizer: Tokenizer, report: PartReport) -> None:
        """Encode and append them in order, or say in the report at which of them it ended, and why."""
        values, places = self._values, self._places
        self._values, self._places, self._characters = [], [], 0
        for value, at, ids in zip(values, places, _encoded(values, tokenizer), strict=True):
            if isinstance(ids, Exception):  # a tokenizer is anybody's code, and the line says more than its traceback
                place = (*at, f"tokenizer {tokenizer.name} failed: {type(ids).__name__}: {ids}")
                if is_bad_line(value, ids):
                    count_bad_line(report, place, self._job)
                else:
                    report.fatal = place
            else:
                _append(builder, tokenizer, value, ids, self._job, report, at)
            if report.fatal is not None:
                return
            if report.documents > len(self.lines):
                self.slices.append(at[0])
                self.lines.append(at[1])


def is_bad_line(value: Value, error: Exception) -> bool:
    """Whether what a tokenizer raised is of this line alone: a chat template refuses some conversations.

    What is missing or not made is missing for every line: to skip them all would give an empty pair.
    """
    return not isinstance(value, str) and not isinstance(error, ImportError | NotImplementedError | AttributeError)


def _encoded(values: list[Value], tokenizer: Tokenizer) -> list[Any]:
    """The ids of each text, or what its tokenizer raised. A batch that fails is encoded text by text."""
    if tokenizer.encode_batch is not None and values and isinstance(values[0], str):
        with suppress(Exception):
            found = list(tokenizer.encode_batch(values))  # type: ignore[arg-type]  # one kind in a build
            if len(found) == len(values):
                return found
    return [_encoded_alone(value, tokenizer) for value in values]


def _encoded_alone(value: Value, tokenizer: Tokenizer) -> Any:
    try:
        return _encode(value, tokenizer)
    except Exception as error:
        return error


def _encode(value: Value, tokenizer: Tokenizer) -> Any:
    """The ids of a text; of messages (ids, loss mask)."""
    if isinstance(value, str):
        return tokenizer.encode(value)
    assert tokenizer.encode_chat is not None, "build refuses conversations for a tokenizer without a template"
    return tokenizer.encode_chat(value) if value.tools is None else tokenizer.encode_chat(value, tools=value.tools)


def _append(
    builder: IndexedDatasetBuilder,
    tokenizer: Tokenizer,
    value: Value,
    encoded: Any,
    job: Job,
    report: PartReport,
    at: tuple[int, int],
) -> None:
    try:
        ids, mask = _with_mask(encoded, value, job, tokenizer)
    except Exception as error:  # ids are anybody's objects
        report.fatal = (*at, f"tokenizer {tokenizer.name} failed: {type(error).__name__}: {error}")
        return
    if reason := reason_against(value, ids, job, tokenizer):
        count_bad_line(report, (*at, reason), job)
        return
    report.spelled += bool(_spelled(value, tokenizer))
    if _may_end_inside(ids, job, tokenizer):
        if job.special_tokens == "text" and job.append_eod:
            report.fatal = (*at, _eod_of_turns_reason(tokenizer))  # every line is so
            return
        report.ended_inside += 1
    try:
        builder.add_document(ids, loss_mask=mask)
    except IndexedDataError as error:
        if error.__cause__ is not None and isinstance(error.__cause__, OSError):
            raise
        report.fatal = (*at, f"tokenizer {tokenizer.name} gave {error}")
        return
    report.uncounted += mask is not None and not any(mask)
    report.documents += 1
    report.sequences += 1
    report.tokens += len(ids)


def reason_against(value: Value, ids: Any, job: Job, tokenizer: Tokenizer) -> str:
    """Why a text or a conversation with these ids is a bad line; nothing if it is none."""
    if job.special_tokens != "text":
        return ""
    if not isinstance(value, str):
        return _spelled_reason(spelled[0]) if (spelled := _spelled(value, tokenizer)) else ""
    return _eod_inside_reason(tokenizer, job) if _may_end_inside(ids, job, tokenizer) else ""


def _spelled(value: Value, tokenizer: Tokenizer) -> list[str]:
    """The special tokens that a text or a conversation spells."""
    texts = [value] if isinstance(value, str) else [*_strings([*value, value.tools])]
    return [token for token in tokenizer.special_texts if any(token in text for text in texts)]


def _may_end_inside(ids: Any, job: Job, tokenizer: Tokenizer) -> bool:
    return tokenizer.may_spell_eod and tokenizer.eod is not None and _has_eod_inside(ids, tokenizer.eod, job)


def _with_mask(encoded: Any, value: Value, job: Job, tokenizer: Tokenizer) -> tuple[Any, Any]:
    """The ids of a document with its end, and its loss mask if it is a conversation.

    An EOD that is appended counts if what it ends does.
    """
    if isinstance(value, str):
        return with_end(encoded, job, tokenizer), None
    given, mask = encoded
    ids = with_end(given, job, tokenizer)
    if len(mask) != len(given):
        raise ValueError(f"encode_chat gave {len(mask)} values of a mask for {len(given)} ids")
    return ids, [*mask, *([bool(mask[-1]) if len(mask) else False] * (len(ids) - len(given)))]


def _strings(value: Any) -> Iterator[str]:
    """All texts of a JSON value, names of fields too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, inside in value.items():
            yield str(name)
            yield from _strings(inside)
    elif isinstance(value, list):
        for inside in value:
            yield from _strings(inside)


def _eod_of_turns_reason(tokenizer: Tokenizer) -> str:
    return (
        f"the chat template ends turns with the EOD of {tokenizer.name}, {tokenizer.eod}, so that readers would end a "
        "document at each turn; name another token: eod_token=... (--eod-token), or pass append_eod=False "
        "(--no-append-eod) and give readers the eod -1"
    )


def _spelled_reason(token: str) -> str:
    return (
        f"a message spells the special token {token}, which the chat template makes the token; take it out, or take "
        'such tokens as they are: special_tokens="ids" (--special-tokens ids)'
    )


def _has_eod_inside(ids: Any, eod: int, job: Job) -> bool:
    """Whether a document's ids have the EOD where it is not the end that was appended."""
    if isinstance(ids, np.ndarray):
        found = np.flatnonzero(ids == eod)
        return found.size > 0 and (not job.append_eod or int(found[0]) != ids.size - 1)
    if isinstance(ids, list | tuple):
        return eod in ids and (not job.append_eod or ids.index(eod) != len(ids) - 1)
    return False


def _eod_inside_reason(tokenizer: Tokenizer, job: Job) -> str:
    by, remedy = "", "mark it as special in the tokenizer"
    if job.template:  # a text begins with the token that ends it, as GPT-2's
        by, remedy = ", or adds it by its template", f"leave the template out, {remedy}"
    return (
        f"tokenizer {tokenizer.name} makes its EOD, {tokenizer.eod}, of this text{by}, which would end the document "
        f'there; {remedy}, or take its ids as they are: special_tokens="ids" (--special-tokens ids)'
    )


def ids_of(value: Value, job: Job, tokenizer: Tokenizer) -> Any:
    """The ids of a document, with the EOD at its end if the job appends it."""
    return _with_mask(_encode(value, tokenizer), value, job, tokenizer)[0]


def with_end(ids: Any, job: Job, tokenizer: Tokenizer) -> Any:
    """What a tokenizer gave, with the EOD at its end if the job appends it."""
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
