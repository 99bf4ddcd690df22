""" "When it stops": a page of errors for each package.

    site_raises.messages + docs/errors/<package>.toml --> pages (this file) --> site_pages.py

The code says which messages there are; the data file says of classes and of common messages what their cause is, how
they look and what to do. A message's address is made of its words: it stays when lines move.
"""

import hashlib
import html
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import site_raises
from site_raises import Kind, Message

ANCHOR_WORDS = 7
FIELDS = {"cause", "example", "remedy"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """What the data file says of one class or message."""

    of: str  # the class's name, or fixed words of the message
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
    found = tomllib.loads((root / "docs/errors" / f"{package}.toml").read_text())
    return Notes(
        classes={name: _said(name, given) for name, given in found.get("class", {}).items()},
        messages=[_said(given.pop("text"), given) for given in found.get("message", [])],
        lines=tuple((kind, function) for kind, functions in found.get("lines", {}).items() for function in functions),
    )


def messages(package: str, root: Path) -> list[Message]:
    return site_raises.messages(package, root, notes(package, root).lines)


def matches(template: str, said: str) -> bool:
    """Whether ``said`` is a text of this template: its fixed parts in order, anything where values stand.

    A text that ends in "..." is the beginning of one.
    """
    said = " ".join(said.split())
    if not said.endswith("..."):
        return re.fullmatch(_pattern(template) + ".*", said) is not None
    begins = said.removesuffix("...").strip()
    ends = [end for end in range(len(template), 0, -1) if template[:end].count("{") == template[:end].count("}")]
    return any(re.fullmatch(_pattern(template[:end].strip()), begins) for end in ends)


def _pattern(template: str) -> str:
    return ".*".join(map(re.escape, re.split(r"\{[\w.]*\}", template)))


def of_message(said: Said, package: str, root: Path) -> list[Message]:
    """The messages of the code that an entry of the data file speaks of."""
    words = " ".join(said.of.split())
    return [message for message in messages(package, root) if words in message.text]


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
    if said.messages:
        parts.append("## Common messages\n")
        parts += [_of_entry(entry, package, root) for entry in said.messages]
    parts.append("## All messages\n\nBy the module that makes them. `{name}` and `{...}` are values.\n")
    parts += _all(package, root)
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


def _of_entry(said: Said, package: str, root: Path) -> str:
    anchor = anchors(package, root)
    meant = [f'<a href="#{anchor[message]}">{message.kind}</a>' for message in of_message(said, package, root)]
    return f"### {_heading(said.of)}\n\n{_three(said)}\nAs the code has it: {', '.join(meant)}\n"


def _three(said: Said) -> str:
    example = "\n".join(f"    {line}" for line in said.example.strip().splitlines())
    return f"*Cause.* {said.cause.strip()}\n\n{example}\n\n*Remedy.* {said.remedy.strip()}\n"


def _all(package: str, root: Path) -> list[str]:
    anchor, code = anchors(package, root), site_raises.source(root / "packages" / package)
    modules: dict[str, list[Message]] = {}
    for message in messages(package, root):
        modules.setdefault(message.module, []).append(message)
    lines = []
    for module, made in sorted(modules.items()):
        lines += [f"### {module}\n", f"{code.meanings[module]}\n", "<ul>"]
        lines += [
            f'<li id="{anchor[message]}"><a href="#{anchor[message]}">{message.kind}</a> '
            f"<code>{html.escape(message.text)}</code></li>"
            for message in made
        ]
        lines.append("</ul>\n")
    return lines


def _said(of: str, given: dict[str, str]) -> Said:
    if set(given) != FIELDS:
        raise ValueError(f"{of}: has {sorted(given)}; an entry has {sorted(FIELDS)}")
    return Said(of=of, **given)


def _anchor(message: Message) -> str:
    words = re.findall(r"[A-Za-z0-9]+", re.sub(r"\{[\w.]*\}", " ", message.text))
    return _slug("-".join([message.kind, *words[:ANCHOR_WORDS]]))


def _digest(message: Message) -> str:
    return hashlib.sha256(f"{message.module} {message.text}".encode()).hexdigest()[:6]


def _slug(text: str) -> str:
    return re.sub(r"[^\w-]", "", text).strip("-").lower()


def _heading(words: str) -> str:
    return html.escape(" ".join(words.split())).replace("_", "&#95;").replace("*", "&#42;").replace("`", "&#96;")


INTRODUCTION = """\
An error of this package names the thing, its value, the rule and what to do: read it to its end first. Search this
page for its fixed words (values stand in it where here are braces), or the whole site by the field above. Raised on
one rank, an error of a run reaches all ranks with the number of the rank at fault.
"""

OVERVIEW = """\
# When it stops

Every typed error of the six packages, listed from their code. Search for the words of the message that stay the same
whatever its values are; classes and common messages have their cause, an example and a remedy.

A run that ends without an error, gives NaN or is slow: [debug a hang, a NaN, a slow rank](../do/debug.md).

| package | classes | messages |
|---|---|---|
"""
