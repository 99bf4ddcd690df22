"""The command ``sixfold-ckpt``, also ``python -m sixfold.dist_ckpt``.

    arguments --> tools/commands.py --> text or JSON, exit status (this file)

Exit status: 0 fine; 1 ``verify`` found problems, ``diff`` differences; 2 the command could not do its work; 130 it was
interrupted. A key may hold anything: what a terminal would act on is shown as an escape.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from sixfold.dist_ckpt import tools
from sixfold.dist_ckpt.errors import CheckpointError, typed
from sixfold.dist_ckpt.hugging_face import KeyMap

Found = dict[str, Any]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = vars(_parser().parse_args(arguments))
    verb, as_json, show = options.pop("verb"), options.pop("json"), _Bar() if _has_terminal() else None
    try:
        given = _converting(options) if verb == "convert" else options
        found = typed(lambda: getattr(tools, verb)(**given, **({"progress": show} if verb in _LONG else {})))
    except CheckpointError as error:
        return _failed(error)
    except KeyboardInterrupt:
        return 130
    finally:
        if show is not None:
            show.clear()
    text = _json(found) if as_json else _printable("\n".join(_TEXTS[verb](found, options)))
    try:
        typed(lambda: _write(text))
    except CheckpointError as error:  # a full disk: status 1 would say that the checkpoint is damaged or differs
        return _failed(error)
    return int(not found.get("ok", found.get("equal", True)))


def _converting(options: dict[str, Any]) -> dict[str, Any]:
    """Options of the command as arguments of ``tools.convert``."""
    given = dict(options)
    rules, others = given.pop("rename"), "keep" if given.pop("keep_others") else "error"
    for rule in rules:
        if rule.count("=") != 1:
            raise CheckpointError(f"--rename is {rule!r}; it is OURS=THEIRS")
    key_map = KeyMap([tuple(rule.split("=")) for rule in rules], others=others) if rules else None
    return given | {"dtype": _DTYPES.get(given["dtype"]), "key_map": key_map}


def _has_terminal() -> bool:
    """Whether there is one for a bar. A process without a standard error, as by ``2>&-``, has None for it."""
    return sys.stderr is not None and sys.stderr.isatty()


def _failed(error: CheckpointError) -> int:
    if sys.stderr is not None:  # print would take standard output instead, which is for what was found
        print(f"sixfold-ckpt: {type(error).__name__}: {_printable(str(error))}", file=sys.stderr)
    return 2


def _write(text: str) -> None:
    try:
        print(text, flush=True)
    except OSError as error:
        # Python would write the rest when it ends, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # who reads has seen enough
            raise


def _printable(text: str) -> str:
    """The same with escapes for control characters, and for halves of characters, which no encoding has."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _json(found: Found) -> str:
    """JSON has no infinity, which is how far NaN is from a number: null."""
    for entry in found.get("different", ()):
        entry["max_abs"] = None if entry["max_abs"] == math.inf else entry["max_abs"]
    return json.dumps(found, indent=2, allow_nan=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sixfold-ckpt", description="Look at, check, convert and compare checkpoints."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="verb")

    def command(name: str, text: str, *places: str) -> argparse.ArgumentParser:
        """Arguments are called as those of the function in ``tools``."""
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("--json", action="store_true", help="print one JSON object")
        for place in places:
            sub.add_argument(place)
        if name not in ("metadata", "verify", "consolidate"):
            sub.add_argument("--keys", default="*", metavar="GLOB", help="only these tensors and objects")
        return sub

    command("inspect", "What a checkpoint holds.", "path")
    command("metadata", "Write the .metadata of a checkpoint that was saved without it.", "path")
    sub = command("verify", "Check every byte and report all damage.", "path")
    sub.add_argument("--quick", action="store_true", help="sizes and metadata only")
    sub = command("convert", "Write a checkpoint in another format.", "src")
    sub.add_argument("dst", help="a folder that does not exist or is empty")
    sub.add_argument("--to", required=True, choices=("torch_dist", "zarr", "safetensors"))
    sub.add_argument("--max-shard-bytes", type=int, metavar="N", help="safetensors: several files of at most N bytes")
    sub.add_argument("--dtype", choices=sorted(_DTYPES), help="floating-point numbers become such")
    sub.add_argument(
        "--rename",
        action="append",
        default=[],
        metavar="OURS=THEIRS",
        help="safetensors, there or back: a rule for names, such as 'model.{*rest}={*rest}'; give each by its own",
    )
    sub.add_argument("--keep-others", action="store_true", help="keep a name that no rule fits; else it is an error")
    text = "Write a checkpoint anew in its place, so that it shares no file with others."
    for writes in (sub, command("consolidate", text, "path")):
        writes.add_argument("--compress", choices=("zstd",), help="tensors of torch_dist compressed; else plain")
    sub = command("diff", "Compare two checkpoints by value, whatever their layouts.", "a", "b")
    sub.add_argument("--rtol", type=float, default=0.0, help="|a - b| <= RTOL * |b| counts as equal (default 0)")
    return parser


class _Bar:
    """Progress on a terminal, drawn at most ten times a second."""

    def __init__(self) -> None:
        self._drawn = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._drawn > 0.1:
            self._drawn = now
            share = done / total if total else 1.0
            filled = "#" * int(30 * share)
            print(f"\r[{filled:<30}] {share:4.0%} of {_size(total)}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Leave an empty line behind."""
        if self._drawn:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _size(nbytes: int) -> str:
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def _count(number: int | None, thing: str) -> str:
    return "" if number is None else f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _table(cells: Iterable[Sequence[str]]) -> list[str]:
    rows = list(cells)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _metadata(found: Found, options: Found) -> list[str]:
    what = f"written, {_size(found['nbytes'])}" if found["written"] else "there already"
    return [f"{found['path']}: .metadata {what}"]


def _inspect(found: Found, options: Found) -> list[str]:
    checked = "checksums for every byte" if found["integrity"] else "no checksums of its own"
    checked += f", compressed by {found['compress']}" if found["compress"] else ""
    plain = ", plain DCP" if found["backend"] == "torch_dist" else ""
    backend = f"{found['backend']} {found['version']}" if found["version"] else f"{found['backend']}{plain}"
    saved = f", save {found['save_id']}" if found["save_id"] else ""
    lines = [f"{found['path']}: {backend}{saved}, {checked}"]
    lines.append(f"{_count(len(found['tensors']), 'tensor')}, {_size(found['nbytes'])}")
    lines += _table(
        (t["key"], t["dtype"], str(tuple(t["shape"])), _size(t["nbytes"]), _count(t["chunks"], "chunk"))
        for t in found["tensors"]
    )
    if found["objects"]:
        lines.append(_count(len(found["objects"]), "object"))
        lines += _table((o["key"], f"grid {tuple(o['shape'])}") for o in found["objects"])
    lines.append(f"common data: {', '.join(found['common']) or 'none'}")
    lines.append(_count(len(found["files"]), "file"))
    return lines + _table((f["name"], _size(f["nbytes"])) for f in found["files"])


def _verify(found: Found, options: Found) -> list[str]:
    left = [f"{name} was left by a save that never finished; it may be removed" for name in found["leftovers"]]
    if found["ok"]:
        what = f"{_size(found['checked_bytes'])} by checksum"
        if not found["checked"]:
            what = "names, sizes and metadata" + ("" if options["quick"] else "; it has no checksums")
        return [f"{found['path']}: whole ({what})", *left]
    rows = _table((p["kind"], p["file"] or "-", p["key"] or "-", p["detail"]) for p in found["problems"])
    return [f"{found['path']}: {_count(len(found['problems']), 'problem')}", *rows, *left]


def _convert(found: Found, options: Found) -> list[str]:
    tensors, files = _count(found["tensors"], "tensor"), _count(len(found["files"]), "file")
    return [f"{found['dst']}: {tensors}, {_size(found['nbytes'])} as {found['to']} in {files}"]


def _consolidate(found: Found, options: Found) -> list[str]:
    return [f"{found['path']}: {_size(found['nbytes'])} of its own, {_size(found['nbytes_before'])} before"]


def _diff(found: Found, options: Found) -> list[str]:
    lines = [f"only in {options[side]}: {key}" for side in "ab" for key in found[f"only_in_{side}"]]
    for entry in found["different"]:
        count, most = entry["count"], entry["max_abs"]
        amount = "" if count is None else f": {_count(count, 'element')}, by at most {most:g}"
        lines.append(f"{entry['key']} differs in {entry['reason']}{amount}")
    return [*lines, *(f"common data differs at {path}" for path in found["common_differs"])] or ["equal"]


_TEXTS = {
    "inspect": _inspect,
    "metadata": _metadata,
    "verify": _verify,
    "convert": _convert,
    "consolidate": _consolidate,
    "diff": _diff,
}
_LONG = ("verify", "convert", "consolidate", "diff")  # these tell their progress


if __name__ == "__main__":
    sys.exit(main())
