"""One part of a build: some slices of text become one pair.

    Slices --> build_part (this file) --> FOLDER/part-00000.bin .idx .runs .json

It runs in the process of the build or in a worker. It depends on its arguments alone, so both make the same bytes. A
part is finished when its .json exists, which is written last.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sixfold.indexed_data.manifest import blocks_of
from sixfold.indexed_data.provenance import runs_of
from sixfold.indexed_data.reader import IndexedDataset
from sixfold.indexed_data.storage import map_file
from sixfold.indexed_data.text.document_ids import Batch, ids_of, is_bad_line, reason_against
from sixfold.indexed_data.text.finished_part import PartReport, count_bad_line, write_report, write_runs
from sixfold.indexed_data.text.inputs import Lines, Slice, documents
from sixfold.indexed_data.text.job import Job
from sixfold.indexed_data.text.tokenizer import Tokenizer
from sixfold.indexed_data.writer import IndexedDatasetBuilder

SAMPLE_CHARACTERS = 1 << 16  # of each finished part: a thousandth of what making it again would cost


def build_part(slices: Sequence[Slice], prefix: str, job: Job, tokenizer: Tokenizer) -> PartReport:
    """Write the pair ``prefix`` and its report, unless a bad line or id is fatal.

    Raises:
        IndexedDataError: a file cannot be read or written.
    """
    report = PartReport()
    with IndexedDatasetBuilder(prefix + ".bin", job.dtype, vocab_size=tokenizer.vocab_size) as builder:
        batch = Batch(job)
        for number, piece in enumerate(slices):
            lines = Lines(piece)
            for document in documents(lines, job.text):
                if document.text is None:
                    batch.flush(builder, tokenizer, report)  # whichever line comes first ends the part
                    if report.fatal is None:
                        count_bad_line(report, (number, document.line, document.reason), job)
                elif not document.text:
                    report.empty_documents += 1
                elif batch.add(document.text, (number, document.line)):
                    batch.flush(builder, tokenizer, report)
                if report.fatal is not None:
                    break
            report.lines.append(lines.count)
            if report.fatal is not None:
                break
        if report.fatal is None:
            batch.flush(builder, tokenizer, report)
        if report.fatal is not None:
            builder.abort()
            return report
    report.blocks = blocks_of(map_file(prefix + ".bin"))
    if job.provenance:
        write_runs(prefix, runs_of(batch.slices, batch.lines))
    write_report(prefix + ".json", report)
    return report


def encodes_alike(slices: Sequence[Slice], prefix: str, job: Job, tokenizer: Tokenizer) -> bool:
    """Whether the first documents of a finished part get the ids that it holds, as far as ``SAMPLE_CHARACTERS`` go.

    A fingerprint does not know the data files that a tokenizer reads by itself.
    """
    left = SAMPLE_CHARACTERS
    try:
        with IndexedDataset(prefix) as pair:
            texts = (document.text for piece in slices for document in documents(Lines(piece), job.text))
            number = 0
            for text in (text for text in texts if text):
                left -= len(text)
                if left < 0:
                    break
                try:
                    ids = ids_of(text, job, tokenizer)
                except Exception as error:
                    if is_bad_line(text, error):
                        continue
                    raise
                if reason_against(text, ids, job, tokenizer):
                    continue
                if not np.array_equal(np.asarray(ids), pair[number]):
                    return False
                number += 1
    except Exception:  # whatever the user's code raises; or the part is damaged
        return False
    return True
