"""Text of a configuration: TOML and command-line overrides in, TOML out.

    files, overrides --> read_files, read_tables (this file) --> train_config.py --> write_tables (this file) --> TOML

The standard library reads TOML but does not write it. Nothing here knows the rule of a value: only names of tables and
keys. A later file says a key anew, and a file does so with what it includes.
"""

import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sixfold.gpt.config.table import keys_of, nearest
from sixfold.gpt.errors import ConfigError

Tables = Mapping[str, type]  # table name -> its dataclass


def read_file(path: str | os.PathLike[str]) -> str:
    """Text of a configuration file.

    Raises:
        ConfigError: it cannot be read, or is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")  # Windows' editors put a mark before the text
    except OSError as problem:
        raise ConfigError(f"{path}: {problem.strerror}; give the path of a TOML configuration") from problem
    except UnicodeDecodeError as problem:
        raise ConfigError(f"{path}: byte {problem.start} is not UTF-8; a configuration is TOML in UTF-8") from problem


def read_tables(text: str, overrides: Sequence[str], tables: Tables, source: str) -> dict[str, dict[str, Any]]:
    """Read TOML and apply overrides.

    Args:
        text: TOML.
        overrides: each ``section.key=value``; the value is TOML, else a text.
        tables: every table there is.
        source: where the text is from, for errors.
    Returns:
        Table name -> key -> value for each table, empty where the file has none.
    Raises:
        ConfigError: not TOML, or a table or key that does not exist (with the nearest that does).
    """
    found = _parsed(text, source)
    if not found and not overrides:
        raise ConfigError(_empty(source))
    values = _checked(found, tables)
    _override(values, overrides, tables)
    return values


def read_files(
    paths: Sequence[str | os.PathLike[str]],
    overrides: Sequence[str],
    tables: Tables,
    *,
    first: Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, Any]]:
    """As ``read_tables``, of files and what they include; ``first`` has keys that the files may say anew.

    Raises:
        ConfigError: also for an include that is no list of paths, cannot be read, or leads back to its file.
    """
    values: dict[str, dict[str, Any]] = {name: dict(first.get(name, {})) for name in tables}
    for path in paths:
        text = read_file(path)
        if not _parsed(text, str(path)) and not overrides:
            raise ConfigError(_empty(str(path)))
        _merge(values, _with_includes(Path(path), text, tables, ()))
    _override(values, overrides, tables)
    return values


def is_override(word: str, tables: Tables) -> bool:
    """Whether a word of the command changes a key, and is no path of a file."""
    if os.path.exists(word):
        return False
    name, _, key = word.partition("=")[0].strip().partition(".")
    return ("=" in word and "/" not in name) or (name in tables and key in keys_of(tables[name]))


def _with_includes(path: Path, text: str, tables: Tables, within: tuple[Path, ...]) -> dict[str, dict[str, Any]]:
    """Tables of a file, whose text is known, with those of the files that it includes below its own."""
    within = (*within, path.resolve())
    found = _parsed(text, str(path))
    names = found.pop("include", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f'{path}: include is {names!r}; it is a list of paths, as include = ["base.toml"]')
    values: dict[str, dict[str, Any]] = {name: {} for name in tables}
    for name in names:
        place = path.parent / name
        if place.resolve() in within:
            raise ConfigError(f"{path} includes {name!r}, which includes {path}; take one of them out")
        try:
            inner = read_file(place)
        except ConfigError as problem:
            raise ConfigError(f"{path} includes {name!r}, a path from the folder of that file: {problem}") from problem
        _merge(values, _with_includes(place, inner, tables, within))
    _merge(values, _checked(found, tables))
    return values


def _parsed(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise ConfigError(f"{source}: not TOML: {problem}") from problem


def _empty(source: str) -> str:
    return (
        f"{source} is empty; a configuration has tables such as [model]. A shell empties the FILE of "
        "`--print-config > FILE` before the command reads it: print to another file"
    )


def _merge(values: dict[str, dict[str, Any]], above: Mapping[str, Mapping[str, Any]]) -> None:
    for name, table in above.items():
        values[name] |= table


def _override(values: dict[str, dict[str, Any]], overrides: Sequence[str], tables: Tables) -> None:
    for override in overrides:
        name, key, value = parse_override(override, tables)
        values[name][key] = value


def _checked(found: Mapping[str, Any], tables: Tables) -> dict[str, dict[str, Any]]:
    """Table name -> key -> value, for each table that there is."""
    values: dict[str, dict[str, Any]] = {name: {} for name in tables}
    for name, table in found.items():
        if name == "include":
            raise ConfigError("include stands in a text that is no file; only a file has a folder to start from")
        if name not in tables and not isinstance(table, dict):
            same = [f"{one}.{name}" for one in tables if name in keys_of(tables[one])]  # as steps and every
            near = " or ".join(same) or _nearest_key(f".{name}", tables)
            raise ConfigError(
                f"{name} = {table!r} is in no table"
                + (f"; the nearest key is {near}" if near else "; write [table] above")
            )
        _check_table(name, tables)
        if not isinstance(table, dict):
            raise ConfigError(f"{name} is {table!r}; it is a table: write [{name}] and its keys below")
        for key, value in table.items():
            _check_key(name, key, tables)
            values[name][key] = value
    return values


def parse_override(override: str, tables: Tables) -> tuple[str, str, Any]:
    """Split ``section.key=value`` into table, key and value.

    Raises:
        ConfigError: no ``=``, no ``.``, or a table or key that does not exist.
    """
    target, equals, text = override.partition("=")
    name, dot, key = target.strip().partition(".")
    if not equals or not dot:
        raise ConfigError(f"override {override!r} is not section.key=value, as in optimizer.lr=1e-3")
    _check_table(name, tables)
    _check_key(name, key, tables)
    if tables[name].__annotations__[key] is str and not text.strip().startswith(("'", '"')):
        return name, key, text  # run.dir=2026 is a name, not a number
    for spelling in (text, _as_toml(text)):
        try:
            parsed = tomllib.loads(f"value = {spelling}")
        except tomllib.TOMLDecodeError:
            continue
        return name, key, parsed["value"] if len(parsed) == 1 else text
    return name, key, text


def _as_toml(text: str) -> str:
    """Spellings of Python that TOML has not: True, False, .001, 1."""
    found = text.strip()
    if found in ("True", "False", "TRUE", "FALSE"):
        return found.lower()
    if re.fullmatch(r"[+-]?(\d+\.|\.\d+|\d+\.(?=[eE]))([eE][+-]?\d+)?", found):
        return repr(float(found))
    return text


def write_tables(values: Mapping[str, Mapping[str, Any]]) -> str:
    """TOML text of tables; a key whose value is None is left out. ``read_tables`` gives the same values back."""
    parts = []
    for name, table in values.items():
        lines = [f"{key} = {_toml(value)}" for key, value in table.items() if value is not None]
        parts.append("\n".join([f"[{name}]", *lines]))
    return "\n\n".join(parts) + "\n"


def _toml(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            # A JSON string is a TOML basic string but for DEL, which JSON leaves as it is.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case Mapping():
            entries = (f"{json.dumps(key)} = {_toml(entry)}" for key, entry in value.items() if entry is not None)
            return "{" + ", ".join(entries) + "}"
        case list() | tuple():
            return "[" + ", ".join(_toml(entry) for entry in value) + "]"
    raise TypeError(f"{value!r} ({type(value).__name__}) has no TOML form")


# Other programs' names of keys, where letters alone would lead to another key.
_KNOWN_AS = {
    "n_head": "model.num_attention_heads", "n_heads": "model.num_attention_heads",
    "num_heads": "model.num_attention_heads",
    "num_key_value_heads": "model.num_query_groups", "n_kv_heads": "model.num_query_groups",
    "d_model": "model.hidden_size", "n_embd": "model.hidden_size", "dim": "model.hidden_size",
    "intermediate_size": "model.ffn_hidden_size", "d_ff": "model.ffn_hidden_size",
    "rms_norm_eps": "model.norm_eps", "tie_word_embeddings": "model.tie_embeddings",
    "max_position_embeddings": "data.seq_length", "block_size": "data.seq_length", "context_length": "data.seq_length",
    "dtype": "train.precision", "gradient_clipping": "train.clip_grad", "max_grad_norm": "train.clip_grad",
    "save_interval": "checkpoint.every", "save_steps": "checkpoint.every", "train_iters": "train.steps",
    "warmup_ratio": "schedule.warmup_steps", "gradient_accumulation_steps": "train.global_batch_size",
    "grad_accum": "train.global_batch_size",
    "eval_interval": "eval.every", "eval_steps": "eval.every", "eval_iters": "eval.batches",
    "log_interval": "log.every", "logging_steps": "log.every",
}  # fmt: skip


def _nearest_key(wanted: str, tables: Tables) -> str:
    key = wanted.rpartition(".")[2].lower()
    if meant := _KNOWN_AS.get(key):
        return meant
    known = [f"{table}.{name}" for table in tables for name in keys_of(tables[table])]
    for name in known:
        if key == name.replace(".", "_"):  # eval_every is eval.every
            return name
    return nearest(wanted, known, threshold=0.6)


def _check_table(name: str, tables: Tables) -> None:
    if name not in tables:
        near = nearest(name, tables)
        raise ConfigError(
            f"[{name}] is not a table of the configuration" + (f"; the nearest is [{near}]" if near else "")
        )


def _check_key(name: str, key: str, tables: Tables) -> None:
    if key not in keys_of(tables[name]):
        near = _nearest_key(f"{name}.{key}", tables)
        raise ConfigError(f"{name}.{key} is not a key of [{name}]" + (f"; the nearest is {near}" if near else ""))
