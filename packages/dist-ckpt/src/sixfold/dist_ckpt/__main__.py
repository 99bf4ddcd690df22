"""The command ``sixfold-ckpt``, also ``python -m sixfold.dist_ckpt``.

    arguments --> tools/commands.py --> text or JSON, exit status (this file)

Exit status: 0 fine; 1 ``verify`` found problems, ``diff`` differences; 2 the command could not do its work.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from sixfold.dist_ckpt import tools
from sixfold.dist_ckpt.errors import CheckpointError

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    show = _Bar() if sys.stderr.isatty() else None
    try:
        found, text, status = options.run(options, show)
    except CheckpointError as error:
        print(f"sixfold-ckpt: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    finally:
        if show is not None:
            show.clear()
    print(json.dumps(found, indent=2) if options.json else text)
    return int(status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sixfold-ckpt", description="Look at, check, convert and compare checkpoints."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        sub.add_argument("--json", action="store_true", help="print one JSON object")
        return sub

    def with_keys(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--keys", default="*", metavar="GLOB", help="only these tensors and objects")

    sub = command("inspect", _inspect, "What a checkpoint holds.")
    sub.add_argument("dir")
    with_keys(sub)
    sub = command("metadata", _metadata, "Write the .metadata of a checkpoint that was saved without it.")
    sub.add_argument("dir")
    sub = command("verify", _verify, "Check every byte and report all damage.")
    sub.add_argument("dir")
    sub.add_argument("--quick", action="store_true", help="sizes and metadata only")
    sub = command("convert", _convert, "Write a checkpoint in another format.")
    sub.add_argument("src")
    sub.add_argument("dst", help="a folder that does not exist or is empty")
    sub.add_argument("--to", required=True, choices=("torch_dist", "zarr", "safetensors"))
    sub.add_argument("--max-shard-bytes", type=int, metavar="N", help="safetensors: several files of at most N bytes")
    with_keys(sub)
    sub = command("diff", _diff, "Compare two checkpoints by value, whatever their layouts.")
    sub.add_argument("a")
    sub.add_argument("b")
    sub.add_argument("--rtol", type=float, default=0.0, help="|a - b| <= RTOL * |b| counts as equal (default 0)")
    with_keys(sub)
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


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _metadata(options: argparse.Namespace, show: Any) -> tuple[dict[str, Any], str, int]:
    found = tools.metadata(options.dir)
    what = f"written, {_size(found['nbytes'])}" if found["written"] else "there already"
    return found, f"{found['path']}: .metadata {what}", 0


def _inspect(options: argparse.Namespace, _: Any) -> tuple[dict[str, Any], str, int]:
    found = tools.inspect(options.dir, keys=options.keys)
    checked = "checksums for every byte" if found["integrity"] else "no checksums of its own"
    plain = ", plain DCP" if found["backend"] == "torch_dist" else ""
    backend = f"{found['backend']} {found['version']}" if found["version"] else f"{found['backend']}{plain}"
    saved = f", save {found['save_id']}" if found["save_id"] else ""
    lines = [f"{found['path']}: {backend}{saved}, {checked}"]
    lines.append(f"{_count(len(found['tensors']), 'tensor')}, {_size(found['nbytes'])}")
    lines += _table(
        [
            (t["key"], t["dtype"], str(tuple(t["shape"])), _size(t["nbytes"]), _count(t["chunks"], "chunk"))
            for t in found["tensors"]
        ]
    )
    if found["objects"]:
        lines.append(_count(len(found["objects"]), "object"))
        lines += _table([(o["key"], f"grid {tuple(o['shape'])}") for o in found["objects"]])
    lines.append(f"common data: {', '.join(found['common']) or 'none'}")
    lines.append(_count(len(found["files"]), "file"))
    lines += _table([(f["name"], _size(f["nbytes"])) for f in found["files"]])
    return found, "\n".join(lines), 0


def _verify(options: argparse.Namespace, show: Any) -> tuple[dict[str, Any], str, int]:
    found = tools.verify(options.dir, quick=options.quick, progress=show)
    if found["ok"]:
        what = f"{_size(found['checked_bytes'])} by checksum"
        if not found["checked"]:
            what = "names, sizes and metadata" + ("" if options.quick else "; it has no checksums")
        return found, f"{found['path']}: whole ({what})", 0
    lines = [f"{found['path']}: {_count(len(found['problems']), 'problem')}"]
    lines += _table([(p["kind"], p["file"] or "-", p["key"] or "-", p["detail"]) for p in found["problems"]])
    return found, "\n".join(lines), 1


def _convert(options: argparse.Namespace, show: Any) -> tuple[dict[str, Any], str, int]:
    found = tools.convert(
        options.src,
        options.dst,
        to=options.to,
        max_shard_bytes=options.max_shard_bytes,
        keys=options.keys,
        progress=show,
    )
    tensors = _count(found["tensors"], "tensor")
    text = f"{found['dst']}: {tensors}, {_size(found['nbytes'])} as {found['to']}"
    return found, f"{text} in {_count(len(found['files']), 'file')}", 0


def _diff(options: argparse.Namespace, show: Any) -> tuple[dict[str, Any], str, int]:
    found = tools.diff(options.a, options.b, rtol=options.rtol, keys=options.keys, progress=show)
    if found["equal"]:
        return found, "equal", 0
    lines = [f"only in {options.a}: {key}" for key in found["only_in_a"]]
    lines += [f"only in {options.b}: {key}" for key in found["only_in_b"]]
    for entry in found["different"]:
        amount = (
            "" if entry["count"] is None else f": {_count(entry['count'], 'element')}, by at most {entry['max_abs']:g}"
        )
        lines.append(f"{entry['key']} differs in {entry['reason']}{amount}")
    lines += [f"common data differs at {path}" for path in found["common_differs"]]
    return found, "\n".join(lines), 1


if __name__ == "__main__":
    sys.exit(main())
