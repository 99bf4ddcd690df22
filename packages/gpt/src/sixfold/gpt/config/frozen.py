"""Which parameters a run does not train.

    train.frozen: patterns, [lora] --> is_frozen (this file) --> rank_model.py: requires_grad; plan: no moments
                                   `-> check_frozen (this file) --> rules.py

With adapters all else is frozen. A pattern is the beginning of a canonical name: ``embedding``, ``layers.0-3``,
``layers.*.attention.q``. Texts alone: no torch.
"""

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from sixfold.gpt.config.layer_tensors import parameter_names
from sixfold.gpt.config.lora import is_adapter
from sixfold.gpt.errors import ConfigError

if TYPE_CHECKING:
    from sixfold.gpt.config.train_config import TrainConfig

_RANGE = re.compile(r"(\d+)-(\d+)")


def is_frozen(config: "TrainConfig", name: str) -> bool:
    """Whether the parameter ``name``, canonical, is not trained."""
    if config.lora.rank:
        return not is_adapter(name)
    return any(matches(pattern, name) for pattern in config.train.frozen)


def matches(pattern: str, name: str) -> bool:
    """Whether ``name`` begins with ``pattern``, part by part between dots.

    A part of the pattern is the part itself, ``*`` for any one, or ``FIRST-LAST`` for these numbers and all between.
    """
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) <= len(parts) and all(map(_fits, wanted, parts))


@lru_cache(maxsize=4096)  # a plan asks for each tensor of each layer, again and again
def _fits(wanted: str, part: str) -> bool:
    found = _RANGE.fullmatch(wanted)
    if found and part.isdecimal():
        return int(found[1]) <= int(part) <= int(found[2])
    return wanted in ("*", part)


def check_frozen(config: "TrainConfig") -> None:
    """Refuse patterns that mean nothing, and a run in which nothing is trained.

    Raises:
        ConfigError: the pattern, and the parts that there are.
    """
    if not config.train.frozen:
        return
    names = parameter_names(config.model)
    for pattern in config.train.frozen:
        if not any(matches(pattern, name) for name in names):
            tied = "; the head is the embedding (model.tie_embeddings)" if config.model.tie_embeddings else ""
            raise ConfigError(
                f"train.frozen has {pattern!r}, which no parameter's name begins with{tied}. Names are as "
                f"{', '.join(_examples(names))}; 'layers.0-3' and 'layers.*.ffn' work"
            )
    if all(is_frozen(config, name) for name in names):
        raise ConfigError(
            f"train.frozen is {list(config.train.frozen)}, which is every parameter: nothing would be trained. Leave "
            f"out what is to be trained"
        )


def _examples(names: list[str]) -> list[str]:
    """Names for an error: those outside of layers, and some of the last layer."""
    outside = [name for name in names if not name.startswith("layers.")]
    inside = [name for name in names if name.startswith("layers.")]
    return [outside[0], *inside[-3:], *outside[1:]]
