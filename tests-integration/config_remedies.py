"""What an error of a configuration names as its remedy, read out of its text.

    "data.deal is 'permuted' and ...; data.deal = 'in_turn' works" --> remedies_in (this file) --> changed, refusal

A remedy is a dict from key to value, or to None for a key that is to be left out. Nothing here knows a rule.
"""

import copy
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sixfold.gpt.config.rules import check_world
from sixfold.gpt.config.train_config import TrainConfig

KEY = r"[a-z]+\.[a-z0-9_]+(?:\[\d+\])*(?:\.[a-z]+)?"
VALUE = r"""'[^']*'|"[^"]*"|\[[^\]]*\]|-?\d[\d.e+-]*\b|\w+"""
VALUES = rf"(?:{VALUE})(?: or (?:{VALUE}))*"
MINIMAL = {
    "model.num_layers": 4,
    "model.hidden_size": 64,
    "model.num_attention_heads": 4,
    "model.ffn_hidden_size": 96,
    "model.vocab_size": 257,
    "data.blend": ["data/wiki", "data/code"],
    "data.seq_length": 32,
    "train.steps": 100,
    "train.global_batch_size": 16,
    "train.micro_batch_size": 4,
    "optimizer.lr": 1e-3,
    "run.dir": "runs/tiny",
}


@dataclass(frozen=True)
class Remedy:
    """What to change, and whether the text says that it works or only where it leads."""

    keys: Mapping[str, Any] = field(default_factory=dict)
    works: bool = True


def overrides_of(words: str) -> dict[str, Any]:
    """Keys and values of lines ``key = value`` between semicolons, as a file has the values; None leaves out."""
    lines = [line.partition("=") for line in words.split(";")]
    return {
        key.strip(): None if value.strip() == "None" else tomllib.loads(f"value = {value}")["value"]
        for key, _, value in lines
    }


def refusal(keys: Mapping[str, Any], world: int = 0) -> str:
    """The text by which the smallest configuration with these keys is refused (on ``world`` ranks), or an empty one."""
    try:
        config = TrainConfig.from_text(toml_of(MINIMAL | dict(keys)))
        if world:
            check_world(config, world)
    except ValueError as error:
        return str(error)
    return ""


def toml_of(keys: Mapping[str, Any]) -> str:
    """The text of a configuration."""
    tables: dict[str, list[str]] = {}
    for name, value in keys.items():
        table, _, key = name.partition(".")
        tables.setdefault(table, [f"[{table}]"]).append(f"{key} = {toml(value)}")
    return "".join("\n".join(lines) + "\n\n" for lines in tables.values())


def toml(value: Any) -> str:
    """A value as a configuration file has it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


def changed(keys: Mapping[str, Any], remedy: Remedy) -> dict[str, Any]:
    """The keys after a remedy; ``data.changes[0].at`` changes a part of a value."""
    after = copy.deepcopy(dict(keys))
    for key, value in remedy.keys.items():
        name, *steps = re.findall(r"^[a-z]+\.[a-z0-9_]+|\d+(?=\])|(?<=\.)[a-z]+$", key) if "[" in key else [key]
        if value is None:
            after.pop(name, None)
        elif steps:
            inside = after[name]
            path = [int(step) if step.isdigit() else step for step in steps]
            for step in path[:-1]:
                inside = inside[step]
            inside[path[-1]] = value
        else:
            after[name] = value
    return after


def remedies_in(said: str) -> list[Remedy]:
    """Each remedy that the text names with its value; those that it describes in other words are left out."""
    if found := re.search(rf"^({KEY}) is .*; it is one of ([\w, ]+)", said):
        return [Remedy({found[1]: word}) for word in found[2].split(", ")]
    if found := re.search(rf"^({KEY}) is .*; it is >= (-?\d+)$", said):
        return [Remedy({found[1]: int(found[2])}, works=False)]  # of this key alone
    if found := re.search(rf"^({KEY}) is .* and ({KEY}) .*; it is (\d+) unless the shape is '(\w+)'$", said):
        return [Remedy({found[1]: int(found[3])}), Remedy({found[2]: found[4]}, works=False)]
    begin = re.search(r" works?\b| takes several|\bleave | set (?=\w+\.)", said)
    if begin is None:
        return []
    cut = max((at.end() for at in re.finditer(r"[;:.] ", said[: begin.start() + 1])), default=0)
    first = re.match(KEY, said)
    subject = first[0] if first else ""
    return [remedy for part in re.split(r", or |, and ", said[cut:]) for remedy in _of_part(part, subject)]


def _of_part(part: str, subject: str) -> list[Remedy]:
    if found := re.match(rf"leave ({KEY}) out|leave (?:it|the key|the first) out", part):
        return [Remedy({found[1] or subject: None})]
    given = re.findall(rf"({KEY}) = ({VALUES})", part)
    if not given:
        bare = re.match(rf"({VALUES}) works$|(\d+) for the default$", part)
        return [Remedy({subject: value}) for value in _values(bare[1] or bare[2])] if bare else []
    *together, (key, values) = given
    fixed = {name: _values(text)[0] for name, text in together}
    return [Remedy(fixed | {key: value}, " works" in part) for value in _values(values)]


def _values(text: str) -> list[Any]:
    """The values between ``or``. Each is TOML, since a reader copies it into a file."""
    return [tomllib.loads(f"value = {value}")["value"] for value in text.split(" or ")]
