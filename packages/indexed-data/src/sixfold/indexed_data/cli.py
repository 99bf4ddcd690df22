"""The command ``sixfold-data``: build, info, show, verify, merge, filter.

    argv --> main (this file) --> the package's functions --> text or one JSON object on stdout

Exit codes: 0 done, 1 wrong data or a missing file (message on stderr), 2 wrong usage, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from sixfold.indexed_data.errors import IndexedDataError
from sixfold.indexed_data.filtering import filter_pair
from sixfold.indexed_data.merging import merge
from sixfold.indexed_data.reader import IndexedDataset
from sixfold.indexed_data.text.build import BuildNote, build
from sixfold.indexed_data.text.inputs import FORMATS, TEXT_DOCUMENTS
from sixfold.indexed_data.text.tokenizers import SPECIAL_TOKENS, decode_ids, load_tokenizer
from sixfold.indexed_data.verifying import verify

_TOKENIZERS = "bytes (default), FILE.json, FILE.model, FOLDER or MODULE:CALLABLE"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: ``sys.argv``) and give back the exit code."""
    try:
        options = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed help or its complaint
        return stop.code if isinstance(stop.code, int) else 2
    commands = {"build": _build, "info": _info, "show": _show, "verify": _verify, "merge": _merge, "filter": _filter}
    try:
        return commands[options.command](options)
    except (IndexedDataError, IndexError, OSError) as error:
        if options.json:
            print(json.dumps({"error": {"type": type(error).__name__, "message": str(error)}}))
        print(f"sixfold-data: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        at = f" at {stop}" if stop.args else ""
        more = "; run the same command again to continue from the finished parts" if options.command == "build" else ""
        print(f"sixfold-data: interrupted{at}{more}", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sixfold-data", description="Token data in .bin/.idx pairs.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = commands.add_parser("build", help="tokenize text, JSON lines or tables into a pair")
    command.add_argument(
        "inputs", nargs="+", metavar="INPUT", help="text or JSON lines, also .gz or .zst; Parquet, Arrow"
    )
    command.add_argument(
        "--output", required=True, metavar="PREFIX", help="path of the pair to write, without extension"
    )
    command.add_argument("--tokenizer", default="bytes", help=_TOKENIZERS)
    command.add_argument("--eod-token", metavar="TEXT", help="for a file or folder: the token that ends a document")
    command.add_argument(
        "--format", choices=FORMATS, default="auto", help="of the inputs; auto (default) goes by the file name"
    )
    command.add_argument(
        "--json-key",
        default="text",
        help="field or column that holds the text (default: text)",
    )
    command.add_argument(
        "--messages-key", metavar="KEY",
        help="field that holds a conversation, for the tokenizer's chat template; stores a loss mask",
    )  # fmt: skip
    command.add_argument(
        "--text-documents",
        choices=TEXT_DOCUMENTS,
        default="file",
        help="what one document of a text file is (default: file)",
    )
    command.add_argument(
        "--special-tokens", choices=SPECIAL_TOKENS, default="text",
        help="how a text that spells a special token is stored: as text (default), or as the token's id",
    )  # fmt: skip
    command.add_argument(
        "--template", action="store_true", help="add what the tokenizer's template adds, such as a BOS token"
    )
    command.add_argument(
        "--append-eod", action=argparse.BooleanOptionalAction, default=True, help="end each document (default: yes)"
    )
    command.add_argument(
        "--dtype", choices=("auto", "uint16", "int32"), default="auto", help="of the ids; auto: by the vocabulary"
    )
    command.add_argument("--workers", type=_positive, default=1, metavar="N", help="processes (default: 1)")
    command.add_argument(
        "--on-error", choices=("fail", "skip"), default="fail", help="stop at a bad line (default), or skip it"
    )
    command.add_argument(
        "--provenance", action="store_true", help="store the file and line of each document beside the pair"
    )
    command.add_argument("--overwrite", action="store_true", help="replace an existing pair")
    command.add_argument("--quiet", action="store_true", help="no progress bar, no summary")
    _add_common(command)

    command = commands.add_parser("info", help="counts and sizes of a pair")
    command.add_argument("prefix", metavar="PREFIX", help="path of the pair, without extension")
    _add_common(command, multimodal=True)

    command = commands.add_parser("show", help="ids, and text, of one sequence")
    command.add_argument("prefix", metavar="PREFIX", help="path of the pair, without extension")
    command.add_argument("index", type=int, metavar="INDEX", help="number of the sequence, from 0 on")
    command.add_argument("--offset", type=int, default=0, help="first token to show (default: 0)")
    command.add_argument("--length", type=int, help="tokens to show (default: all that follow)")
    command.add_argument("--tokenizer", help="decode with it, as build's")
    _add_common(command)

    command = commands.add_parser("verify", help="check the rules of a pair's index, and its size")
    command.add_argument("prefix", metavar="PREFIX", help="path of the pair, without extension")
    command.add_argument("--vocab-size", type=_positive, metavar="N", help="also check that every id is below N")
    _add_common(command, multimodal=True)

    command = commands.add_parser("filter", help="leave documents out of a pair: a view, without a copy")
    command.add_argument("prefix", metavar="PREFIX", help="path of the pair, without extension")
    command.add_argument(
        "--dedup", "--filter", dest="lists", nargs="+", required=True, metavar="LIST",
        help="what to leave out: a folder of datatrove's .remove or .c4_dup files, or numbers of documents in a .txt",
    )  # fmt: skip
    command.add_argument("--tasks", type=_positive, help="of datatrove; default: one for each file")
    command.add_argument(
        "--files", nargs="+", metavar="FILE",
        help="what datatrove read, in its order, as build was given it (default: the pair's inputs, sorted)",
    )  # fmt: skip
    command.add_argument("--output", required=True, metavar="VIEW")
    command.add_argument("--overwrite", action="store_true", help="replace an existing view")
    _add_common(command)

    command = commands.add_parser("merge", help="join pairs end to end")
    command.add_argument("inputs", nargs="+", metavar="PREFIX", help="pairs, in the order of the output")
    command.add_argument("--output", required=True, metavar="PREFIX")
    command.add_argument("--overwrite", action="store_true", help="replace an existing pair")
    _add_common(command, multimodal=True)
    return parser


def _add_common(command: argparse.ArgumentParser, multimodal: bool = False) -> None:
    command.add_argument("--json", action="store_true", help="one JSON object on stdout")
    if multimodal:
        command.add_argument("--multimodal", action="store_true", help="the pair stores a mode with each sequence")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not >= 1")
    return value


def _build(options: argparse.Namespace) -> int:
    bar = sys.stderr.isatty() and not options.quiet
    with warnings.catch_warnings():
        warnings.simplefilter("always", BuildNote)
        warnings.showwarning = partial(_show_warning, warnings.showwarning)
        report = build(
            options.inputs,
            options.output,
            tokenizer=options.tokenizer,
            eod_token=options.eod_token,
            format=options.format,
            json_key=options.json_key,
            text_documents=options.text_documents,
            messages_key=options.messages_key,
            append_eod=options.append_eod,
            special_tokens=options.special_tokens,
            template=options.template,
            dtype=options.dtype,
            workers=options.workers,
            on_error=options.on_error,
            provenance=options.provenance,
            overwrite=options.overwrite,
            progress=_draw_progress if bar else None,
        )
    summary = (
        f"{report.prefix}: {report.documents} documents, {report.tokens} tokens of {report.dtype} "
        f"in {report.seconds:.1f} s; {report.bad_lines} bad lines, {report.empty_documents} empty documents"
    )
    _print(options, asdict(report), "" if options.quiet else "\n".join([summary, *report.errors]))
    return 0


def _show_warning(
    show: Callable[..., None], message: Warning | str, category: type[Warning], *place: Any, **more: Any
) -> None:
    """A note of the build as a line of the command, without the line of code that warns; others as they are."""
    if issubclass(category, BuildNote):
        print(f"sixfold-data: note: {message}", file=sys.stderr)
    else:
        show(message, category, *place, **more)


def _info(options: argparse.Namespace) -> int:
    with IndexedDataset(options.prefix, options.multimodal) as dataset:
        lengths_S = dataset.sequence_lengths
        shape: dict[str, Any] = dict.fromkeys(("min", "max", "mean", "median"))
        if len(lengths_S):
            shape = {
                "min": int(lengths_S.min()),
                "max": int(lengths_S.max()),
                "mean": float(lengths_S.mean()),
                "median": float(np.median(lengths_S)),
            }
        report = {
            "prefix": dataset.path_prefix,
            "documents": len(dataset.document_indices) - 1,
            "sequences": len(dataset),
            "tokens": int(lengths_S.sum(dtype=np.int64)),
            "dtype": dataset.dtype.name,
            "bin_bytes": _bin_bytes(dataset),
            "idx_bytes": os.path.getsize(dataset.base.path_prefix + ".idx"),
            "trailing_bytes": dataset.trailing_bytes,
            "sequence_length": shape,
        }
    _print(options, report, "\n".join(f"{key}: {value}" for key, value in report.items()))
    return 0


def _bin_bytes(dataset: IndexedDataset) -> int:
    return 0 if dataset.tokens is None else dataset.tokens.nbytes


def _show(options: argparse.Namespace) -> int:
    with IndexedDataset(options.prefix) as dataset:
        ids = dataset.get(options.index, options.offset, options.length).tolist()
        length = int(dataset.sequence_lengths[options.index])
    text = decode_ids(load_tokenizer(options.tokenizer), ids) if options.tokenizer else None
    report = {
        "prefix": options.prefix,
        "sequence": options.index,
        "length": length,
        "offset": options.offset,
        "tokens": ids,
        "text": text,
    }
    _print(options, report, " ".join(map(str, ids)) if text is None else text)
    return 0


def _verify(options: argparse.Namespace) -> int:
    report = verify(options.prefix, multimodal=options.multimodal, vocab_size=options.vocab_size)
    found = "ok" if report.ok else f"{len(report.problems)} broken rule{'s' * (len(report.problems) > 1)}"
    counts = f"{report.documents} documents, {report.sequences} sequences, {report.tokens} tokens"
    _print(
        options,
        {"prefix": options.prefix, **asdict(report)},
        "\n".join([f"{options.prefix}: {found}; {counts}", *(f"note: {note}" for note in report.notes)]),
    )
    for problem in report.problems:
        print(f"sixfold-data: {problem}", file=sys.stderr)
    return 0 if report.ok else 1


def _merge(options: argparse.Namespace) -> int:
    merge(options.inputs, options.output, multimodal=options.multimodal, overwrite=options.overwrite)
    with IndexedDataset(options.output, options.multimodal) as dataset:
        report = {
            "output": options.output,
            "inputs": options.inputs,
            "documents": len(dataset.document_indices) - 1,
            "sequences": len(dataset),
            "tokens": _bin_bytes(dataset) // dataset.dtype.itemsize,
        }
    counts = f"{report['documents']} documents, {report['tokens']} tokens"
    _print(options, report, f"{options.output}: {counts} from {len(options.inputs)} pairs")
    return 0


def _filter(options: argparse.Namespace) -> int:
    report = filter_pair(
        options.prefix,
        options.output,
        lists=options.lists,
        tasks=options.tasks,
        files=options.files,
        overwrite=options.overwrite,
    )
    counts = f"{report.documents} documents kept, {report.dropped} dropped, {report.tokens} tokens"
    _print(options, asdict(report), f"{report.output}: a view of {report.pair}; {counts}")
    return 0


def _print(options: argparse.Namespace, report: dict[str, Any], text: str) -> None:
    line = json.dumps(report) if options.json else text
    if line:  # a name that is no UTF-8, or a terminal that is not, ends no command
        encoding = sys.stdout.encoding or "utf-8"
        try:
            print(line.encode(encoding, "backslashreplace").decode(encoding), flush=True)
        except BrokenPipeError:  # the reader, such as head, has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _draw_progress(done: int, total: int) -> None:
    width = 30
    full = width * done // max(1, total)
    end = "\n" if done == total else ""
    print(f"\r[{'#' * full}{'.' * (width - full)}] {done}/{total} parts", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
