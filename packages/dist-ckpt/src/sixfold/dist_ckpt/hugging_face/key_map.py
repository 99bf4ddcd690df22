"""Names of tensors here and in a folder of Hugging Face: one map for both ways.

    KeyMap (this file) --> theirs: names for an export --> ours: names for a load

Pure: names alone. A part in braces, ``{n}``, stands for one part of a name between dots; ``{*rest}`` for one or more.

    blocks.{n}.up.weight -> model.layers.{n}.mlp.up_proj.weight
    model.{*rest} -> {*rest}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from functools import lru_cache

from sixfold.dist_ckpt.errors import CheckpointError, MismatchError
from sixfold.dist_ckpt.plans.shard_table import listed

_HOLE = re.compile(r"\{(\*?)([A-Za-z_][A-Za-z0-9_]*)\}")
_OTHERS = ("error", "keep")


@dataclass(frozen=True)
class KeyMap:
    """Rules ``ours: theirs``; the first one that fits a name is taken.

    Args:
        rules: patterns by our names, or pairs of them.
        others: what happens to a name that no rule fits: "error", or "keep" the name.
    Raises:
        CheckpointError: a brace that is no placeholder, two rules with one side in common, a placeholder that stands
            on the right alone.
    """

    rules: InitVar[Mapping[str, str] | Iterable[tuple[str, str]]]
    others: str = "error"
    pairs: tuple[tuple[str, str], ...] = field(init=False)

    def __post_init__(self, rules: Mapping[str, str] | Iterable[tuple[str, str]]) -> None:
        pairs = tuple(map(tuple, rules.items() if isinstance(rules, Mapping) else rules))
        object.__setattr__(self, "pairs", pairs)
        if self.others not in _OTHERS:
            raise CheckpointError(f"others is {self.others!r}; it is one of {_OTHERS}")
        for pair in pairs:
            if len(pair) != 2 or not all(isinstance(side, str) for side in pair):
                raise CheckpointError(f"a rule of a KeyMap is {pair!r}; it is a pair of texts, ours and theirs")
        for side, name in ((0, "ours"), (1, "theirs")):
            patterns = [_pattern(pair[side]) for pair in pairs]
            twice = [pair[side] for at, pair in enumerate(pairs) if patterns[at] in patterns[:at]]
            if twice:
                raise CheckpointError(f"two rules have {twice[0]!r} as {name}; a name has one rule on each side")
        for ours, theirs in pairs:
            if lacking := _holes(theirs) - _holes(ours):
                raise CheckpointError(
                    f"{_rule(ours, theirs)}: {_named(lacking)} stands on the right alone, and nothing says what it is"
                )

    def check_both_ways(self) -> None:
        """MismatchError if a name of theirs does not tell the name of ours."""
        for ours, theirs in self.pairs:
            if lost := _holes(ours) - _holes(theirs):
                raise MismatchError(
                    f"{_rule(ours, theirs)}: {_named(lost)} stands on the left alone, so that no name of theirs tells "
                    "ours. Such a map is for an export; for a load write it on both sides"
                )

    def theirs(self, ours: Iterable[str]) -> dict[str, str]:
        """Their name for each of our names.

        Raises:
            MismatchError: a name that no rule fits, with ``others="error"``; two names that become one.
        """
        return self._applied(ours, self._theirs, "a name of ours")

    def ours(self, theirs: Iterable[str], *, unreached: bool = False) -> dict[str, str]:
        """Our name for each of their names: the one that ``theirs`` takes there. A rule goes before a kept name.

        Args:
            unreached: a name of theirs that none of ours becomes is given, with a word beside it, for ``strict`` to
                judge: it is not asked for.
        Raises:
            MismatchError: as ``theirs``; a rule that works one way alone; a name of theirs for two of ours.
        """
        self.check_both_ways()
        change = (lambda name: self._ours(name) or [f"{name} (of the files)"]) if unreached else self._ours
        return self._applied(theirs, change, "a name of theirs")

    def __str__(self) -> str:
        return "\n".join([*(_rule(*pair) for pair in self.pairs), f"others: {self.others}"])

    def _theirs(self, name: str) -> list[str]:
        for ours, theirs in self.pairs:
            if found := _regex(ours).fullmatch(name):
                return [_filled(theirs, found)]
        return [name] if self.others == "keep" else []

    def _ours(self, name: str) -> list[str]:
        """All names of ours that a rule makes this one: a rule that fits may not be the first that fits its name."""
        matches = ((ours, _regex(theirs).fullmatch(name)) for ours, theirs in self.pairs)
        candidates = dict.fromkeys(_filled(ours, found) for ours, found in matches if found)
        by_rule = [one for one in candidates if self._theirs(one) == [name]]
        return by_rule or [name] * (self._theirs(name) == [name])

    def _applied(self, names: Iterable[str], change: Callable[[str], list[str]], what: str) -> dict[str, str]:
        found, untaken, clashes, taken = dict[str, str](), list[str](), list[str](), dict[str, str]()
        for name in names:
            new = change(name)
            if not new:
                untaken.append(name)
            elif len(new) > 1:
                clashes.append(f"{name}: it is that of {' and of '.join(new)}")
            elif (first := taken.setdefault(new[0], name)) != name:
                clashes.append(f"{new[0]}: {first} and {name} both become it")
            else:
                found[name] = new[0]
        if untaken:
            raise MismatchError(
                listed(f"no rule of the KeyMap fits {what}; add one, or keep such names by others='keep'", untaken)
            )
        if clashes:
            raise MismatchError(listed("the KeyMap makes one name of two; correct its rules", clashes))
        return found


def _rule(ours: str, theirs: str) -> str:
    return f"{ours} -> {theirs}"


def _named(holes: set[str]) -> str:
    return ", ".join(f"{{{name}}}" for name in sorted(holes))


def _holes(pattern: str) -> set[str]:
    return {hole.group(0)[1:-1] for hole in _HOLE.finditer(pattern)}


def _pattern(text: str) -> str:
    """A pattern with its placeholders numbered: equal for two that fit the same names."""
    literal = _HOLE.sub("", text)
    if "{" in literal or "}" in literal:
        raise CheckpointError(f"{text!r}: a brace holds a name, as {{n}}, or a star and a name, as {{*rest}}")
    order = list(dict.fromkeys(hole.group(0) for hole in _HOLE.finditer(text)))
    return _HOLE.sub(lambda hole: f"{{{hole.group(1)}{order.index(hole.group(0))}}}", text)


@lru_cache(maxsize=1024)
def _regex(pattern: str) -> re.Pattern[str]:
    """What fits a pattern; a placeholder that stands there twice is the same text twice."""
    parts, at, seen = [], 0, set[str]()
    for hole in _HOLE.finditer(pattern):
        star, name = hole.groups()
        parts.append(re.escape(pattern[at : hole.start()]))
        group = _group(star, name)
        parts.append(f"(?P={group})" if group in seen else f"(?P<{group}>{'.+' if star else '[^.]+'})")
        seen.add(group)
        at = hole.end()
    return re.compile("".join(parts) + re.escape(pattern[at:]), re.DOTALL)


def _group(star: str, name: str) -> str:
    return f"s_{name}" if star else f"o_{name}"


def _filled(pattern: str, found: re.Match[str]) -> str:
    return _HOLE.sub(lambda hole: found.group(_group(*hole.groups())), pattern)
