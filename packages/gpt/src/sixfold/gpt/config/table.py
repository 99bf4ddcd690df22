"""Values of a configuration table: what a key may hold, and how a table refuses what it may not.

    TOML value --> coerce (this file) --> a frozen dataclass of train_config.py

The rule of a key is its annotation: ``Annotated[int, AtLeast(1)]``, ``Literal["a", "b"]``, ``tuple[str, ...]``.
Pure Python: no torch, no files, no environment.
"""

import difflib
import math
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from sixfold.gpt.errors import ConfigError


@dataclass(frozen=True)
class AtLeast:
    """A number that is ``>= least``."""

    least: float

    def refuse(self, value: float) -> str:
        """The rule in words when ``value`` breaks it, else an empty text."""
        return "" if value >= self.least else f"it is >= {self.least}"


@dataclass(frozen=True)
class Above:
    """A number that is ``> bound``."""

    bound: float

    def refuse(self, value: float) -> str:
        """The rule in words when ``value`` breaks it, else an empty text."""
        return "" if value > self.bound else f"it is > {self.bound}"


@dataclass(frozen=True)
class Below:
    """A number that is ``< bound``."""

    bound: float

    def refuse(self, value: float) -> str:
        """The rule in words when ``value`` breaks it, else an empty text."""
        return "" if value < self.bound else f"it is < {self.bound}"


@dataclass(frozen=True)
class OneOf:
    """One of the names that another package knows; a Literal says those of ours."""

    names: tuple[str, ...]

    def refuse(self, value: str) -> str:
        """The rule in words when ``value`` breaks it, else an empty text."""
        if value in self.names:
            return ""
        near = nearest(value, self.names)
        return f"it is one of {', '.join(self.names)}{f'; the nearest is {near}' if near else ''}"


# What people write for it elsewhere, where letters alone would lead to another.
_MEANT = {"gpu": "cuda", "bfloat16": "bf16", "float32": "fp32", "fp16": "bf16", "bf16": "bfloat16", "fp32": "float32"}
Positive = Annotated[int, AtLeast(1)]
Count = Annotated[int, AtLeast(0)]
Size = Annotated[float, AtLeast(0)]
Rate = Annotated[float, Above(0)]
Fraction = Annotated[float, AtLeast(0), Below(1)]


@dataclass(frozen=True, kw_only=True)
class Table:
    """One TOML table. Values are checked and brought to their types when it is made (a list becomes a tuple)."""

    TABLE: ClassVar[str] = ""

    def __post_init__(self) -> None:
        hints = _hints(type(self))  # type: ignore[arg-type]  # mypy: a frozen dataclass is no Hashable type
        for field in fields(self):
            name = f"{self.TABLE}.{field.name}"
            object.__setattr__(self, field.name, coerce(getattr(self, field.name), hints[field.name], name))
        self.check()

    def check(self) -> None:
        """Rules between keys of this table; a subclass raises ConfigError."""


@cache
def _hints(table: type) -> dict[str, Any]:
    return get_type_hints(table, include_extras=True)


def keys_of(table: type) -> tuple[str, ...]:
    """Names of the keys of a table class, in the order they are written."""
    return tuple(field.name for field in fields(table))


def build(table: type, values: Mapping[str, Any], name: str) -> Any:
    """Make a table from TOML values.

    Args:
        table: a dataclass derived from Table.
        values: key -> TOML value; its keys are known to be keys of the table.
        name: how the table is called in errors, as ``train``.
    Raises:
        ConfigError: a key without default is missing, or a value breaks the rule of its key.
    """
    required = [field.name for field in fields(table) if field.default is MISSING and field.default_factory is MISSING]
    missing = [f"{name}.{key}" for key in required if key not in values]
    if missing:
        for key, value in values.items():  # a wrong one may be why, as train.tokens = "2B" without train.steps
            coerce(value, _hints(table)[key], f"{name}.{key}")
        raise ConfigError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not given, and there is no default; write "
            f"{'it' if len(missing) == 1 else 'them'} into the configuration, or {missing[0]}=VALUE behind its path"
        )
    return table(**values)


def coerce(value: Any, hint: Any, name: str) -> Any:
    """Bring ``value`` to the type that ``hint`` names.

    Raises:
        ConfigError: naming the key, the value and the rule.
    """
    origin = get_origin(hint)
    if origin is Annotated:
        inner, *rules = get_args(hint)
        value = coerce(value, inner, name)
        for rule in rules:
            broken = rule.refuse(value)
            if broken:
                raise ConfigError(f"{name} is {value!r}; {broken}")
        return value
    if origin is Literal:
        return _coerce_choice(value, get_args(hint), name)
    if origin in (Union, types.UnionType):
        return _coerce_union(value, get_args(hint), name)
    if origin is tuple:
        return _coerce_tuple(value, get_args(hint), name)
    if origin is dict:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise _wrong_type(name, value, "a table")
        return {key: coerce(entry, get_args(hint)[1], f"{name}.{key}") for key, entry in value.items()}
    if isinstance(hint, type) and is_dataclass(hint):
        return _coerce_table(value, hint, name)
    return _coerce_scalar(value, hint, name)


def nearest(wanted: str, known: Iterable[str], threshold: float = 0.4) -> str:
    """The entry of ``known`` that a writer of ``wanted`` most likely meant, or an empty text.

    Texts may be dotted (``optimizer.lr``): the last part counts, the same first part breaks ties. Initials count as a
    whole word (``learning_rate`` is near ``lr``), and so do shared words (``batch_size``, ``micro_batch_size``).
    """
    scored = [(_likeness(wanted, name), name) for name in known]
    best = max(scored, key=lambda pair: pair[0], default=(0.0, ""))
    return best[1] if best[0] >= threshold else ""


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of ``number`` that is nearest to ``wanted``, the smaller of two."""
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: (abs(d - wanted), d))


def _likeness(wanted: str, name: str) -> float:
    wanted_head, _, wanted_key = wanted.rpartition(".")
    name_head, _, name_key = name.rpartition(".")
    bonus = 0.15 if wanted_head == name_head else 0.0
    wanted_words, name_words = wanted_key.lower().split("_"), name_key.lower().split("_")
    if wanted_key.lower() == name_key.lower():
        return 1.0 + bonus
    initials = {"".join(word[:1] for word in wanted_words), "".join(word[:1] for word in name_words)}
    if len(name_key) > 1 and len(wanted_key) > 1 and (wanted_key in initials or name_key in initials):
        return 0.95 + bonus
    shared = 2 * len(set(wanted_words) & set(name_words)) / (len(wanted_words) + len(name_words))
    letters = difflib.SequenceMatcher(None, wanted_key.lower(), name_key.lower()).ratio()
    alike = max(shared, letters)
    return alike + bonus if bonus or alike > 0.8 else 0.0  # another table's key has to be clearly meant


def _coerce_scalar(value: Any, hint: Any, name: str) -> Any:
    if hint is float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong_type(name, value, "a number")
        if not math.isfinite(value):
            raise ConfigError(f"{name} is {value!r}; it is finite")
        return float(value)
    if hint is int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise _wrong_type(name, value, "a whole number")
        return value
    wanted = {bool: "true or false", str: "a text"}[hint]
    if not isinstance(value, hint):
        raise _wrong_type(name, value, wanted)
    return value


def _coerce_choice(value: Any, choices: tuple[Any, ...], name: str) -> Any:
    if any(type(value) is type(choice) and value == choice for choice in choices):
        return value
    near = nearest(value, choices) if isinstance(value, str) else ""
    meant = _MEANT.get(value) if isinstance(value, str) else None
    hint = f"; the nearest is {meant if meant in choices else near}" if near or meant in choices else ""
    raise ConfigError(f"{name} is {value!r}; it is one of {', '.join(map(str, choices))}{hint}")


def _coerce_union(value: Any, hints: tuple[Any, ...], name: str) -> Any:
    if value is None and type(None) in hints:
        return None
    problems = []
    for hint in hints:
        if hint is not type(None):
            try:
                return coerce(value, hint, name)
            except ConfigError as problem:
                problems.append(str(problem))
    raise ConfigError(" or ".join(problems))


def _coerce_tuple(value: Any, hints: tuple[Any, ...], name: str) -> Any:
    if not isinstance(value, list | tuple):
        raise _wrong_type(name, value, "a list")
    if len(hints) == 2 and hints[1] is Ellipsis:
        return tuple(coerce(entry, hints[0], f"{name}[{index}]") for index, entry in enumerate(value))
    if len(value) != len(hints):
        raise ConfigError(f"{name} is {value!r}; it is a list of {len(hints)} entries")
    return tuple(coerce(entry, hint, f"{name}[{i}]") for i, (entry, hint) in enumerate(zip(value, hints, strict=True)))


def _coerce_table(value: Any, table: type, name: str) -> Any:
    if isinstance(value, table):
        return value
    if not isinstance(value, Mapping):
        raise _wrong_type(name, value, "a table")
    for key in value:
        if key not in keys_of(table):
            near = nearest(key, keys_of(table))
            raise ConfigError(f"{name}.{key} is not a key of {name}" + (f"; the nearest is {near}" if near else ""))
    return build(table, value, name)


def _wrong_type(name: str, value: Any, wanted: str) -> ConfigError:
    return ConfigError(f"{name} is {value!r} ({type(value).__name__}); it is {wanted}")
