""" "When it stops": a page of errors for each package.

    site_raises.messages + docs/errors/<package>.toml, <package>/*.toml --> pages (this file) --> site_pages.py

The code says which messages there are; the data files say of classes and of messages what their cause is, how they
look and what to do. An entry speaks for one message (``text``) or for a family with one cause and one remedy
(``title`` and ``texts``); of several entries whose words a message has, the one with the longest words speaks for it.
The address of a message on its page is made of its words: it stays when lines move.
"""

import functools
import hashlib
import html
import itertools
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import site_raises
from site_raises import Kind, Message

ANCHOR_WORDS = 7
FIELDS = {"cause", "example", "remedy"}
COMMON = "Messages"  # the section of a data file without a ``section`` of its own


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """What the data files say of one class, message or family of messages."""

    of: str  # the class's name, or the heading
    texts: tuple[str, ...]  # fixed words of its messages, in one line each
    section: str
    cause: str
    example: str
    remedy: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Notes:
    classes: dict[str, Said]
    messages: list[Said]
    lines: tuple[tuple[str, str], ...]  # (class, function): functions that make the lines of a list in its messages


def pages(root: Path) -> dict[str, str]:
    made = {f"errors/{package}.md": page(package, root) for package in site_raises.BASES}
    return {"errors/README.md": overview(root), **made}


def notes(package: str, root: Path) -> Notes:
    folder = root / "docs/errors"
    found = [tomllib.loads(path.read_text()) for path in [folder / f"{package}.toml", *files_of(package, root)]]
    return Notes(
        classes={name: _said(name, (), "", given) for name, given in found[0].get("class", {}).items()},
        messages=[_entry(given, file.get("section", COMMON)) for file in found for given in file.get("message", [])],
        lines=tuple((kind, name) for kind, functions in found[0].get("lines", {}).items() for name in functions),
    )


def files_of(package: str, root: Path) -> list[Path]:
    """The data files of a package beside its first."""
    return sorted((root / "docs/errors" / package).glob("*.toml"))


@functools.cache
def messages(package: str, root: Path) -> list[Message]:
    return site_raises.messages(package, root, notes(package, root).lines)


@functools.cache
def entries(package: str, root: Path) -> dict[Message, Said | None]:
    """Which entry speaks for each message; None where none does."""
    said = notes(package, root).messages
    return {message: _speaker(message, said) for message in messages(package, root)}


def _speaker(message: Message, said: list[Said]) -> Said | None:
    lengths = [max((len(words) for words in entry.texts if speaks_of(words, message)), default=0) for entry in said]
    return said[lengths.index(max(lengths))] if any(lengths) else None


def speaks_of(words: str, message: Message) -> bool:
    """Few letters beside values, as in ``{name}: {error}``, would be found everywhere: they are a whole message."""
    return words in message.text if len(re.sub(r"\{[\w.]*\}|\W", "", words)) >= 8 else words == message.text


def matches(template: str, said: str) -> bool:
    """Whether ``said`` is a text of this template: its fixed parts in order, anything where values stand.

    A place may stand before it, as ``a.jsonl:3: `` does. A text that ends in "..." is the beginning of one.
    """
    said = " ".join(said.split())
    if not said.endswith("..."):
        return re.fullmatch("(.*: )?" + _pattern(template) + ".*", said) is not None
    begins = said.removesuffix("...").strip()
    ends = [end for end in range(len(template), 0, -1) if template[:end].count("{") == template[:end].count("}")]
    return any(re.fullmatch(_pattern(template[:end].strip()), begins) for end in ends)


def _pattern(template: str) -> str:
    return ".*".join(map(re.escape, re.split(r"\{[\w.]*\}", template)))


def of_entry(said: Said, package: str, root: Path) -> list[Message]:
    """The messages of the code that an entry of the data files speaks for."""
    return [message for message, entry in entries(package, root).items() if entry == said]


def overview(root: Path) -> str:
    rows = []
    for package in site_raises.BASES:
        kinds = site_raises.kinds(package, root).values()
        names = ", ".join(f"[`{kind.name}`]({package}.md#{_slug(kind.name)})" for kind in public(kinds))
        rows.append(f"| [sixfold-{package}]({package}.md) | {names} | {len(messages(package, root))} |")
    return OVERVIEW + "\n".join(rows) + "\n"


def page(package: str, root: Path) -> str:
    kinds, said = site_raises.kinds(package, root), notes(package, root)
    parts = [f"# Errors of sixfold-{package}\n", INTRODUCTION, "## Classes\n"]
    parts += [_of_class(kind, said.classes.get(kind.name)) for kind in public(kinds.values())]
    anchor = anchors(package, root)
    of = {entry: list[Message]() for entry in said.messages}
    for message, entry in entries(package, root).items():
        if entry is not None:
            of[entry].append(message)
    for section, told in itertools.groupby(of, key=lambda entry: entry.section):
        parts += [f"## {section}\n", *(_of_entry(entry, of[entry], anchor) for entry in told)]
    return "\n".join(parts)


def public(kinds: Iterable[Kind]) -> list[Kind]:
    return [kind for kind in kinds if not kind.name.startswith("_")]


def anchors(package: str, root: Path) -> dict[Message, str]:
    """An address for each message: its class and first words; of two with the same words, both get a digest."""
    found = {message: _anchor(message) for message in messages(package, root)}
    several = list(found.values())
    return {
        message: anchor if several.count(anchor) == 1 else f"{anchor}-{_digest(message)}"
        for message, anchor in found.items()
    }


def _of_class(kind: Kind, said: Said | None) -> str:
    lines = [f"### {kind.name}\n", f"`{kind.module}.{kind.name}`, a {' and '.join(kind.bases)}. {kind.meaning}\n"]
    return "\n".join([*lines, _three(said)] if said else lines)


def _of_entry(said: Said, meant: list[Message], anchor: dict[Message, str]) -> str:
    return f"### {_heading(said.of)}\n\n{_three(said)}\nAs the code has it:\n\n{_listed(meant, anchor)}"


def _listed(made: Iterable[Message], anchor: dict[Message, str]) -> str:
    modules: dict[tuple[str, str], list[Message]] = {}
    for message in made:
        modules.setdefault((message.kind, message.text), []).append(message)
    items = [
        f'<li id="{anchor[first]}"><a href="#{anchor[first]}">{first.kind}</a> '
        f"<code>{html.escape(first.text)}</code> ({', '.join(one.module for one in (first, *others))})</li>\n"
        for first, *others in modules.values()
    ]
    return f"<ul>\n{''.join(items)}</ul>\n"


def _three(said: Said) -> str:
    example = "\n".join(f"    {line}" for line in said.example.strip().splitlines())
    return f"*Cause.* {said.cause.strip()}\n\n{example}\n\n*Remedy.* {said.remedy.strip()}\n"


def _entry(given: dict[str, Any], section: str) -> Said:
    """A ``[[message]]``: of one message its ``text``, of a family its ``title`` and ``texts``."""
    given = dict(given)
    texts = [given.pop("text")] if "text" in given else given.pop("texts", [])
    title = given.pop("title", None) or (texts[0] if len(texts) == 1 else "")
    if not texts or not title:
        raise ValueError(f"{given}: an entry has text, or title and texts")
    return _said(title, tuple(" ".join(text.split()) for text in texts), section, given)


def _said(of: str, texts: tuple[str, ...], section: str, given: dict[str, str]) -> Said:
    if set(given) != FIELDS:
        raise ValueError(f"{of}: has {sorted(given)}; an entry has {sorted(FIELDS)}")
    return Said(of=of, texts=texts, section=section, **given)


def _anchor(message: Message) -> str:
    words = re.findall(r"[A-Za-z0-9]+", re.sub(r"\{[\w.]*\}", " ", message.text))
    return _slug("-".join([message.kind, *words[:ANCHOR_WORDS]]))


def _digest(message: Message) -> str:
    return hashlib.sha256(f"{message.module} {message.text}".encode()).hexdigest()[:6]


def heading_id(said: Said) -> str:
    """The address of an entry, as the site's generator makes it of a heading."""
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", " ".join(said.of.split())).strip().lower())


def _slug(text: str) -> str:
    return re.sub(r"[^\w-]", "", text).strip("-").lower()


def _heading(words: str) -> str:
    return html.escape(" ".join(words.split())).replace("_", "&#95;").replace("*", "&#42;").replace("`", "&#96;")


INTRODUCTION = """\
An error of this package names the thing, its value, the rule and what to do: read it to its end first. Search this
page for its fixed words (where `{name}` and `{...}` are here, values stand in it), or the whole site by the field
above. If one rank raises an error of a run, it reaches all ranks, with the number of the rank at fault.
"""

OVERVIEW = """\
# When it stops

Every typed error of the six packages, listed from their code. Search for the words of the message that stay the same
whatever its values are. Cause, example and remedy stand beside them.

A run that ends without an error, gives NaN or is slow: [debug a hang, a NaN, a slow rank](../do/debug.md).

| package | classes | messages |
|---|---|---|
"""
