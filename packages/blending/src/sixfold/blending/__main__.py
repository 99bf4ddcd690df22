"""``python -m sixfold.blending``: the order of a config, explained and drawn in a shell.

    CONFIG.json --> builder --> why(POSITION), locate(positions), packing_costs --> text or JSON (this file)

``why CONFIG.json POSITION`` prints the documents and bytes of one sample. ``draw CONFIG.json`` prints which dataset
gives which position of training. ``packing CONFIG.json`` prints what each way to fill rows costs. The file has the
fields of ``GPTDatasetConfig`` with ``sizes``, and ``tokenizer`` as an object of ids. Exit codes: 0 done; 1 one line on
stderr says what does not fit; 2 a wrong command line.
"""

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from types import SimpleNamespace
from typing import Any

import numpy as np

from sixfold.blending.builder.builder import BlendedMegatronDatasetBuilder
from sixfold.blending.config.config import BlendChange, GPTDatasetConfig
from sixfold.blending.config.splits import Split
from sixfold.blending.dataset.base import MegatronDataset
from sixfold.blending.dataset.blended import BlendedDataset
from sixfold.blending.dataset.gpt import GPTDataset
from sixfold.blending.dataset.provenance import TokenRange, Why
from sixfold.blending.errors import BlendingError
from sixfold.blending.numbers.checks import whole_number
from sixfold.blending.numbers.permutation import permute
from sixfold.blending.samples.packing_costs import packing_costs

_TOKENIZER = ("eod", "pad", "vocab_size")
_REQUIRED = frozenset({"random_seed", "sequence_length", "sizes"})
_PER_LINE = 8


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: ``sys.argv``) and give back the exit code."""
    try:
        options = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed help or its complaint
        return stop.code if isinstance(stop.code, int) else 2
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # they are for who trains
            lines: Iterable[str] = _COMMANDS[options.command](options)
        for line in lines:
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    # BlendingError and the errors of sources are ValueErrors; JSON and text that do not decode too.
    except (ValueError, IndexError, OSError) as error:
        print(f"sixfold.blending: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sixfold.blending", description="Show where the samples of a blend come from."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    why = commands.add_parser("why", help="documents and bytes of one sample")
    why.add_argument("config", metavar="CONFIG.json", help="fields of GPTDatasetConfig, sizes and tokenizer")
    why.add_argument("position", type=int, metavar="POSITION", help="number of the sample, from 0 on")
    why.add_argument("--token", type=int, metavar="K", help="only the range and the byte of its token K")
    why.add_argument("--split", choices=[split.name for split in Split], default="train", help="default: train")
    why.add_argument("--json", action="store_true", help="one JSON object")
    drawing = commands.add_parser("draw", help="dataset and sample of each position of training")
    drawing.add_argument("config", metavar="CONFIG.json", help="fields of GPTDatasetConfig, sizes and tokenizer")
    drawing.add_argument("--begin", type=int, default=0, metavar="N", help="first position (default: 0)")
    drawing.add_argument("--count", type=int, default=64, metavar="N", help="how many positions (default: 64)")
    packing = commands.add_parser("packing", help="rows, padding and cuts of each way to fill rows")
    packing.add_argument("config", metavar="CONFIG.json", help="fields of GPTDatasetConfig, sizes and tokenizer")
    packing.add_argument("--split", choices=[split.name for split in Split], default="train", help="default: train")
    packing.add_argument("--documents", type=int, default=100_000, metavar="N", help="of a dataset (default: 100000)")
    packing.add_argument("--json", action="store_true", help="one JSON object")
    return parser


def stream(path: str, split: Split) -> MegatronDataset | BlendedDataset:
    """One part of what the config file ``path`` says, built.

    Raises:
        BlendingError: a field that is wrong, or a part that is absent or several datasets.
        OSError, ValueError: a file that does not open or decode.
    """
    config, sizes = read_config(path)
    part = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[split.value]
    if part is None:
        raise BlendingError(
            f"{path}: there is no {split.name} part; give it a size, and a share of the split or a blend"
        )
    if isinstance(part, list):
        raise BlendingError(
            f"{path}: {split.name} is {len(part)} datasets of their own (multiple_validation_sets), and a position "
            "does not say which; leave all but one out of the file"
        )
    return part


def read_config(path: str) -> tuple[GPTDatasetConfig, Sequence[int | None]]:
    """The config of a JSON file, and its sizes.

    Raises:
        BlendingError: a field that is missing, unknown or wrong.
        OSError, ValueError: a file that does not open or decode.
    """
    with open(path, encoding="utf-8") as file:
        try:
            said = json.load(file)
        except ValueError as error:
            raise BlendingError(f"{path} is no JSON: {error}") from None
    if not isinstance(said, dict):
        raise BlendingError(f"{path} holds a {type(said).__name__}; it is an object of config fields")
    known = {field.name for field in fields(GPTDatasetConfig) if field.init}
    unknown, missing = sorted(said.keys() - known - {"sizes"}), sorted(_REQUIRED - said.keys())
    if unknown:
        raise BlendingError(f"{path} has the field {unknown[0]!r}; fields are {', '.join(sorted(known))} and sizes")
    if missing:
        raise BlendingError(f"{path} has no {missing[0]!r}; it needs {', '.join(sorted(_REQUIRED))}")
    sizes = said.pop("sizes")
    if not isinstance(sizes, list):
        raise BlendingError(f"{path}: sizes is {sizes!r}; it is three counts >= 0 or null: train, valid, test")
    said["tokenizer"] = _tokenizer(path, said.get("tokenizer"))
    try:
        said["changes"] = [BlendChange(**change) for change in said.get("changes") or ()]
        return GPTDatasetConfig(**said), sizes
    except (TypeError, AttributeError) as error:  # a list where a number belongs, and the like
        raise BlendingError(f"{path}: a field is of another type than in GPTDatasetConfig: {error}") from None


def _tokenizer(path: str, said: Any) -> Any:
    """Special ids by name; its ``unique_identifiers``, part of cache names, are the object unless it says others."""
    if said is None:
        return None
    rule = f"it is an object with any of {', '.join(_TOKENIZER)} (ids) and unique_identifiers"
    if not isinstance(said, dict) or not said.keys() <= {*_TOKENIZER, "unique_identifiers"}:
        raise BlendingError(f"{path}: tokenizer is {said!r}; {rule}")
    ids = {name: said[name] for name in _TOKENIZER if said.get(name) is not None}
    for name, value in ids.items():
        whole_number(f"{path}: tokenizer.{name}", value, 0)
    return SimpleNamespace(**ids, unique_identifiers=said.get("unique_identifiers", ids))


def explain(options: argparse.Namespace) -> str:
    """What ``why`` prints, without the last line break."""
    why = stream(options.config, Split[options.split]).why(options.position)
    if options.token is None:
        return json.dumps(asdict(why)) if options.json else str(why)
    part, byte = token_of(why, options.token)
    if options.json:
        return json.dumps({"position": why.position, "token": options.token, "range": asdict(part), "byte": byte})
    where = "" if byte is None else f", byte {byte}"
    return f"position {why.position} token {options.token}: dataset {why.dataset_id} ({why.dataset_name}) {part}{where}"


def token_of(why: Why, token: int) -> tuple[TokenRange, int | None]:
    """The range that gives token ``token`` of a sample, and the token's first byte in the file, None without a file.

    Raises:
        BlendingError: the sample has no such token; padding is none.
    """
    before = 0
    for part in why.ranges:
        if 0 <= token - before < part.length:
            if part.byte_begin is None or part.byte_end is None:
                return part, None
            return part, part.byte_begin + (token - before) * ((part.byte_end - part.byte_begin) // part.length)
        before += part.length
    raise BlendingError(
        f"position {why.position} has tokens 0..{before - 1} without padding; token {token} is none of them"
    )


def packings(options: argparse.Namespace) -> Iterator[str]:
    """Lines that ``packing`` prints: of each dataset, some of its documents in an order of their own."""
    most = whole_number("--documents", options.documents, 1)
    part, found = stream(options.config, Split[options.split]), {}
    for dataset in part.datasets if isinstance(part, BlendedDataset) else [part]:
        documents = min(most, len(dataset.part))
        members = permute(0, len(dataset.part), np.arange(documents))
        lengths = dataset.part.lengths(dataset.part.ids(members))
        found[dataset.name] = packing_costs(lengths, dataset.config.sequence_length)
        if not options.json:
            whole = "all" if documents == len(dataset.part) else f"{documents} of {len(dataset.part)}"
            yield f"{dataset.name}: {whole} documents, {int(lengths.sum())} tokens"
            yield from (f"  {cost}" for cost in found[dataset.name])
    if options.json:
        yield json.dumps({name: [asdict(cost) for cost in costs] for name, costs in found.items()})


def drawn(options: argparse.Namespace) -> Iterator[str]:
    """Lines that ``draw`` prints."""
    return draw(stream(options.config, Split.train), options.begin, options.count)


def draw(part: MegatronDataset | BlendedDataset, begin: int, count: int) -> Iterator[str]:
    """Lines of text, one per dataset and then ``dataset.sample`` of each position.

    The line of a dataset says how many of these positions it has, and how often it is read up to their end.

    Raises:
        BlendingError: ``begin`` or ``count`` is no count, or the stream ends before ``begin``.
    """
    whole_number("--begin", begin, 0)
    end = begin + whole_number("--count", count, 1)
    last = part.schedule.end if isinstance(part, BlendedDataset) else part._end
    if last is not None and begin >= last:
        raise BlendingError(
            f"--begin is {begin}; the stream has {f'positions 0..{last - 1}' if last else 'no samples'}"
        )
    end = end if last is None else min(end, last)
    names = part.names if isinstance(part, BlendedDataset) else [part.name]
    given = (part.counts(end) - part.counts(begin)).tolist() if isinstance(part, BlendedDataset) else [end - begin]
    epochs = part.epochs(end).tolist()
    for number, (name, some, read) in enumerate(zip(names, given, epochs, strict=True)):
        yield f"dataset {number} ({name}): {some} of {end - begin}; {read:.4g} epochs in 0..{end - 1}"
    width = len(str(end - 1))
    for first in range(begin, end, _PER_LINE):
        positions = np.arange(first, min(first + _PER_LINE, end))
        dataset_B, sample_B = part.locate(positions) if isinstance(part, BlendedDataset) else (positions * 0, positions)
        pairs = zip(dataset_B.tolist(), sample_B.tolist(), strict=True)
        yield f"{first:>{width}}: " + " ".join(f"{dataset}.{sample}" for dataset, sample in pairs)


_COMMANDS: dict[str, Callable[[argparse.Namespace], Iterable[str]]] = {
    "why": lambda options: [explain(options)],
    "draw": drawn,
    "packing": packings,
}

if __name__ == "__main__":
    sys.exit(main())
