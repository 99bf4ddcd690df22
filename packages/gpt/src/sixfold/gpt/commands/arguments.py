"""Values of the command's options, refused by argparse in one line, and the words that make a configuration.

text of an option --> at_least_one, above_zero, seconds and others (this file) --> cli.py, plan_and_doctor.py
files, section.key=value, --set, --preset --> configuration (this file) --> train.py, plan_and_doctor.py
"""

import argparse
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from sixfold.gpt.config.train_config import TrainConfig

Config = TypeVar("Config", bound="TrainConfig")


def add_configuration(verb: argparse.ArgumentParser) -> None:
    """The words from which ``configuration`` makes one."""
    verb.add_argument(
        "words",
        nargs="*",
        default=[],
        metavar="CONFIG section.key=value",
        help="TOML files, of which a later one says keys anew, and changes of keys",
    )
    verb.add_argument("--preset", default="", metavar="NAME", help="[model] of a published model, as llama-3-8b")
    verb.add_argument(
        "--set", action="append", default=[], dest="changes", metavar="section.key=value", help="change a key, too"
    )


def configuration(args: argparse.Namespace, kind: type[Config]) -> Config:
    """What the words of ``add_configuration`` say.

    Raises:
        ConfigError: no file and no preset is named; all else that is wrong.
    """
    from sixfold.gpt.config.toml import is_override
    from sixfold.gpt.config.train_config import TABLES
    from sixfold.gpt.errors import ConfigError

    overrides = [word for word in args.words if is_override(word, TABLES)]
    files = [word for word in args.words if word not in overrides]
    if not files and not args.preset:
        raise ConfigError("no configuration is named; give a TOML file, or --preset with the name of a model")
    # In the order of the command line, whatever the form (KEY=VALUE, --set KEY=VALUE): the last one counts.
    place = {word.partition("=")[2] if word.startswith("--") else word: n for n, word in enumerate(args.given)}
    changes = sorted([*overrides, *args.changes], key=lambda change: place[change])
    return kind.from_toml(files, changes, preset=args.preset)


def at_least_one(text: str) -> int:
    """A whole number >= 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number >= 1")
    return int(text)


def at_least_zero(text: str) -> int:
    """A whole number >= 0."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number >= 0")
    return int(text)


def node_addresses(text: str) -> tuple[tuple[str, int], ...]:
    """Nodes as ``host:port,host:port``; an IPv6 address has brackets."""
    found = []
    for one in text.split(","):
        host, _, port = one.strip().rpartition(":")
        host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise argparse.ArgumentTypeError(f"{one!r} is no node; it looks like host0:29400, and a list has commas")
        found.append((host, int(port)))
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r} names a node twice; each has an address of its own")
    return tuple(found)


def minutes(text: str) -> float:
    """A number of minutes > 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of minutes > 0")
    return value


def above_zero(text: str) -> float:
    """A number > 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number > 0")
    return value


def seconds(text: str) -> float:
    """A number of seconds >= 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number >= 0")
    return value


def share(text: str) -> float:
    """A number from 0 to 1."""
    value = seconds(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share, 0 to 1")
    return value
