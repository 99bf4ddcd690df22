"""Text files as slices of work, and slices as numbered documents.

    paths --> cut --> Slice --> documents (this file) --> parts.py

A slice owns the lines that begin in its byte range, so files are cut at line ends without being read first.
Text is passed on exactly as it is; nothing is stripped or normalised. A line that gives no text has a reason instead,
and finished_part.py counts it or ends the build.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from sixfold.indexed_data.errors import IndexedDataError
from sixfold.indexed_data.paths import AnyPath, local_path
from sixfold.indexed_data.text.compressed_files import open_text
from sixfold.indexed_data.text.input_kinds import HEAD_BYTES, TABLES, compression_of, format_of, what_it_is
from sixfold.indexed_data.text.tables import refuse_tools, saved_dataset_files, table_pieces, table_rows
from sixfold.indexed_data.text.tokenizer import Messages

FORMATS = ("auto", "jsonl", "text", *TABLES)
TEXT_DOCUMENTS = ("file", "paragraph", "line")
TOOLS = "tools"  # where an object has those that its conversation may call
_NO_END = 2**63 - 1
_BOM = b"\xef\xbb\xbf"  # of UTF-8: a mark of editors, no text
_LOOKS_LIKE_JSON = re.compile(rb'(?:\xef\xbb\xbf)?\s*\{\s*"')
_FIRST_LINE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class TextOptions:
    """How files become documents."""

    format: str = "auto"  # one of FORMATS; auto goes by the file's extension
    json_key: str = "text"  # of an object; the column of a table
    text_documents: str = "file"  # one of TEXT_DOCUMENTS
    messages_key: str | None = None  # of a conversation, in place of a text

    @property
    def key(self) -> str:
        """The field or column that is read."""
        return self.json_key if self.messages_key is None else self.messages_key

    def format_of(self, path: str) -> str:
        """How the file ``path`` is read: one of FORMATS but ``auto``."""
        return format_of(path) if self.format == "auto" else self.format

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise IndexedDataError(f"format is {self.format!r}; it is one of {', '.join(FORMATS)}")
        if self.text_documents not in TEXT_DOCUMENTS:
            raise IndexedDataError(
                f"text_documents is {self.text_documents!r}; it is one of {', '.join(TEXT_DOCUMENTS)}"
            )


@dataclass(frozen=True, slots=True)
class Source:
    """One input file as it was when the build began."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int  # unlike mtime, nobody sets it back

    @property
    def state(self) -> tuple[int, int, int]:
        """What changes with the content."""
        return self.size, self.mtime_ns, self.ctime_ns

    @classmethod
    def of(cls, path: AnyPath, options: TextOptions) -> Source:
        """The input ``path``; IndexedDataError for a file that is not read. It says what it is and what to do."""
        name = local_path("an input", path)
        try:
            status = os.stat(name)
            if not stat.S_ISREG(status.st_mode):
                raise IndexedDataError(f"{name}: is {_what_kind(status.st_mode)}")
            with open(name, "rb", buffering=0) as file:
                head = file.read(HEAD_BYTES)
                file.seek(max(0, status.st_size - 4))
                found = what_it_is(name, head, file.read(4), options.format_of(name))
        except FileNotFoundError as error:
            hint = "; standard input cannot be read, write it to a file first" if name == "-" else ""
            raise IndexedDataError(f"{name}: {error.strerror}; give text, jsonl or table files{hint}") from error
        except OSError as error:
            raise IndexedDataError(f"{name}: cannot be read: {error.strerror}") from error
        if found is not None:
            what, remedy = found
            raise IndexedDataError(f"{name}: is {what}, which is not read as {options.format_of(name)}; {remedy}")
        return cls(name, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def sources_of(paths: Sequence[AnyPath], options: TextOptions) -> list[Source]:
    """The files of ``paths`` in order; a folder that ``datasets`` saved is the tables that it lists.

    Raises:
        IndexedDataError: a file that is not read, or JSON lines that would be read as text.
    """
    sources: list[Source] = []
    if options.messages_key is not None:
        text = [
            name for name in map(os.fsdecode, paths) if not os.path.isdir(name) and options.format_of(name) == "text"
        ]
        if text:
            raise IndexedDataError(
                f"{text[0]}: messages_key is given, and a text file has no keys; give jsonl or tables"
            )
    for path in paths:
        name = local_path("an input", path)
        names = saved_dataset_files(name) if os.path.isdir(name) else None
        sources += [Source.of(each, options) for each in ([name] if names is None else names)]
    for source in sources:
        _refuse_unnamed_jsonl(source.path, options)
    return sources


def _what_kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder; give the files in it, such as folder/*.jsonl, or one that datasets saved"
    kind = "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
    return f"{kind}; a build reads parts of its inputs, and again after a kill: write it to a file first"


@dataclass(frozen=True, slots=True)
class Slice:
    """The lines of ``path`` that begin in the bytes ``begin`` to ``end``; of a table, its groups of rows."""

    path: str
    begin: int
    end: int

    def __str__(self) -> str:
        return self.path if (self.begin, self.end) == (0, _NO_END) else f"{self.path}[{self.begin}:{self.end}]"


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a slice: its text or its messages, or the reason why there is none."""

    line: int  # counted from 1 in the slice
    text: str | Messages | None
    reason: str = ""


def cut(sources: Sequence[Source], options: TextOptions, part_bytes: int) -> list[tuple[Slice, ...]]:
    """Share the sources, in order, into parts of about ``part_bytes`` bytes: large files cut, small ones together."""
    parts: list[tuple[Slice, ...]] = []
    pending: list[Slice] = []
    room = part_bytes
    for source in sources:
        # One without a document has a piece too: provenance names every input, as datatrove counts every file.
        for piece, nbytes in [*_pieces(source, options, part_bytes)] or [(Slice(source.path, 0, 0), 0)]:
            if pending and nbytes > room:
                parts.append(tuple(pending))
                pending, room = [], part_bytes
            pending.append(piece)
            room -= nbytes
    return [*parts, tuple(pending)] if pending else parts


def _pieces(source: Source, options: TextOptions, part_bytes: int) -> Iterator[tuple[Slice, int]]:
    kind = options.format_of(source.path)
    if kind in TABLES:
        if options.messages_key is not None:
            refuse_tools(source.path, kind, TOOLS)
        for begin, end, nbytes in table_pieces(source.path, kind, options.key, source.size, part_bytes):
            yield Slice(source.path, begin, end), nbytes
        return
    by_lines = kind == "jsonl" or options.text_documents == "line"
    if not by_lines or compression_of(source.path):
        yield Slice(source.path, 0, _NO_END), source.size
        return
    for begin in range(0, source.size, part_bytes):
        end = min(begin + part_bytes, source.size)
        yield Slice(source.path, begin, end), end - begin


_ONE_PER_LINE = "one object per line is read: jq -c"
_SPREAD = f"a JSON text over several lines; {_ONE_PER_LINE} '.[]' FILE of a list, jq -c . FILE of objects"
_LIST = f"a JSON list, not an object; {_ONE_PER_LINE} '.[]' FILE"
_CR = "the lines of the file end in CR alone; give them line feeds first: tr '\\r' '\\n'"


class Lines:
    """The lines of one slice with their numbers, without the newline at their end; of a table, its rows.

    ``count`` grows with the reading.
    """

    def __init__(self, piece: Slice) -> None:
        self.piece, self.count = piece, 0
        self.newline = False  # at the end of the line that was given last

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        with open_text(self.piece.path) as file:
            position = self.piece.begin
            if not position:
                position += len(_without_mark(file))
            else:  # the line that begins before this slice belongs to the slice before
                file.seek(position - 1)
                position += len(file.readline()) - 1
            while position < self.piece.end and (line := file.readline()):
                position += len(line)
                self.count += 1
                self.newline = line.endswith(b"\n")
                yield self.count, line.removesuffix(b"\n")


def documents(lines: Lines, options: TextOptions) -> Iterator[Document]:
    """The documents of a slice, in order. Blank lines between documents are skipped.

    Raises:
        IndexedDataError: the file cannot be read, or is no whole gzip or zstd file.
    """
    kind = options.format_of(lines.piece.path)
    try:
        if kind in TABLES:
            yield from _of_rows(lines, kind, options)
        elif kind == "jsonl":
            yield from _of_jsonl(lines, options)
        elif options.text_documents == "line":
            yield from _of_text_lines(lines)
        elif options.text_documents == "paragraph":
            yield from _of_paragraphs(lines)
        else:
            yield _of_file(lines.piece.path)
    except (OSError, EOFError) as error:  # BadGzipFile is an OSError
        raise IndexedDataError(f"{lines.piece.path}: cannot be read: {error}") from error


def _of_rows(lines: Lines, kind: str, options: TextOptions) -> Iterator[Document]:
    piece, key = lines.piece, options.key
    for value in table_rows(piece.path, kind, piece.begin, piece.end, key):
        lines.count += 1
        if options.messages_key is not None:
            yield _conversation(lines.count, key, value, None)
        elif isinstance(value, str):
            yield Document(lines.count, value)
        elif value is None:
            yield Document(lines.count, None, f"no string in column {key!r}: it is null")
        elif isinstance(value, bytes):
            yield _decoded(lines.count, value)
        else:
            yield Document(lines.count, None, f"no string in column {key!r}: it is a {type(value).__name__}")


def _conversation(line: int, key: str, value: Any, tools: Any) -> Document:
    """The messages of a row or an object, checked: what a template does with others is its own matter."""
    import json  # only here: reading pairs should not load it

    if not isinstance(value, list):
        return Document(line, None, f"no list of messages at {key!r}")
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not _has_content(message):
            return Document(line, None, f"message {number} at {key!r} has no role or no content that is text")
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            return Document(line, None, f"no list of tools at {TOOLS!r}: {error}")
    if tools and not isinstance(tools, list):
        return Document(line, None, f"no list of tools at {TOOLS!r}: a {type(tools).__name__}")
    messages = Messages(value)
    messages.tools = tools or None
    return Document(line, messages)


def _has_content(message: dict[str, Any]) -> bool:
    """Whether it is a text, parts that are texts, or none in a message that calls tools."""
    content = message.get("content")
    if isinstance(content, list):
        return bool(content) and all(
            isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            for part in content
        )
    return isinstance(content, str) or (content is None and bool(message.get("tool_calls")))


def _of_jsonl(lines: Lines, options: TextOptions) -> Iterator[Document]:
    import json  # only here: reading pairs should not load it

    key = options.key
    for number, line in lines:
        if not line.strip():
            continue
        decoded = _decoded(number, line)
        if decoded.text is None:
            yield decoded
            continue
        try:
            value: Any = json.loads(str(decoded.text))
        except (ValueError, RecursionError) as error:
            if number == 1 and not lines.piece.begin and line.strip() in (b"[", b"{"):
                yield Document(number, None, _SPREAD)
                continue
            what = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
            yield Document(number, None, f"not JSON: {what}")
            continue
        if isinstance(value, list):
            yield Document(number, None, _LIST)
        elif not isinstance(value, dict):
            yield Document(number, None, f"a JSON {type(value).__name__}, not an object")
        elif options.messages_key is not None:
            yield _conversation(number, key, value.get(key), value.get(TOOLS))
        elif not isinstance(text := value.get(key), str):
            yield Document(number, None, f"no string at key {key!r}")
        elif _has_lone_surrogate(line, text):
            yield Document(number, None, f"text at key {key!r} has half of a surrogate pair, which no UTF-8 can hold")
        else:
            yield Document(number, text)


def _of_text_lines(lines: Lines) -> Iterator[Document]:
    for number, line in lines:
        if _ends_in_cr(lines, number, line):
            yield Document(number, None, _CR)
        elif line.strip():
            yield _decoded(number, line.removesuffix(b"\r"))


def _ends_in_cr(lines: Lines, number: int, line: bytes) -> bool:
    """Whether the whole file is one line to us and several to who wrote it."""
    return number == 1 and not lines.piece.begin and not lines.newline and b"\r" in line.rstrip(b"\r")


def _of_paragraphs(lines: Lines) -> Iterator[Document]:
    paragraph: list[bytes] = []
    first = 1
    for number, line in lines:
        if _ends_in_cr(lines, number, line):
            yield Document(number, None, _CR)
            return
        if line.strip():
            if not paragraph:
                first = number
            paragraph.append(line)
        elif paragraph:
            yield _decoded(first, b"\n".join(paragraph).removesuffix(b"\r"))
            paragraph = []
    if paragraph:
        yield _decoded(first, b"\n".join(paragraph).removesuffix(b"\r"))


def _of_file(path: str) -> Document:
    with open_text(path) as file:
        _without_mark(file)
        return _decoded(1, file.read())


def _without_mark(file: IO[bytes]) -> bytes:
    """Go behind the mark at the beginning of a file of UTF-8, if there is one; gives it."""
    mark = file.read(len(_BOM))
    if mark == _BOM:
        return mark
    file.seek(0)
    return b""


def _decoded(line: int, data: bytes) -> Document:
    try:
        return Document(line, data.decode("utf-8"))
    except UnicodeDecodeError as error:
        begin = data.rfind(b"\n", 0, error.start) + 1
        line += data.count(b"\n", 0, error.start)
        return Document(line, None, f"not UTF-8: byte 0x{data[error.start]:02x} at column {error.start - begin + 1}")


def _has_lone_surrogate(line: bytes, text: str) -> bool:
    if text.isascii() or b"\\u" not in line:
        return False
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _refuse_unnamed_jsonl(path: str, options: TextOptions) -> None:
    """IndexedDataError for JSON lines that would be read as text, since their file has another extension."""
    if options.format != "auto" or options.format_of(path) != "text":
        return
    import json  # only here: reading pairs should not load it

    try:
        with open_text(path) as file:
            line = file.readline(_FIRST_LINE_BYTES)
        if not _LOOKS_LIKE_JSON.match(line):
            return
        value = json.loads(line.removeprefix(_BOM))
    except (OSError, EOFError, ValueError, RecursionError):  # told where it is read, or no JSON
        return
    if isinstance(value, dict) and isinstance(value.get(options.json_key), str):
        raise IndexedDataError(
            f"{path}: its first line is a JSON object with a text at {options.json_key!r}, and its name does not end "
            'in .jsonl: say which it is, format="jsonl" (--format jsonl) or format="text"'
        )
