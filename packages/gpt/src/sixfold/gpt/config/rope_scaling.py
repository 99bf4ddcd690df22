"""model.rope_scaling: which types there are, and which keys each has.

    model_config.py, rope_config.py --> ROPE_TYPES, refuse_scaling (this file)        rope.py computes what they mean

Names and meanings are transformers'. Numbers only: no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sixfold.gpt.errors import ConfigError

CONTEXT = "original_max_position_embeddings"


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeType:
    """Keys of a type beside ``rope_type``: those that it must have, and those that it may have."""

    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()  # true or false

    @property
    def keys(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.needed, *self.optional, *self.switches)


ROPE_TYPES: Mapping[str, RopeType] = {
    "llama3": RopeType(needed=("factor", "low_freq_factor", "high_freq_factor", CONTEXT)),
    "linear": RopeType(needed=("factor",)),
    "yarn": RopeType(
        needed=("factor", CONTEXT),
        optional=("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        switches=("truncate",),
    ),
}


def refuse_scaling(scaling: Mapping[str, float | str | bool]) -> None:
    """Refuse a table that is of no type, or has other keys or values than its type.

    Raises:
        ConfigError: naming the key and the rule.
    """
    name = scaling.get("rope_type")
    kind = ROPE_TYPES.get(name) if isinstance(name, str) else None
    if kind is None:
        tables = "; ".join(f'"{known}" with {", ".join(sorted(one.needed))}' for known, one in ROPE_TYPES.items())
        raise ConfigError(f"model.rope_scaling is {dict(scaling)}; it is {{}} or a table with rope_type = {tables}")
    given = set(scaling) - {"rope_type"}
    missing, extra = sorted(set(kind.needed) - given), sorted(given - set(kind.keys))
    if missing or extra:
        raise ConfigError(f"model.rope_scaling: keys of {name} missing: {missing}; not keys of {name}: {extra}")
    for key in sorted(given):
        value = scaling[key]
        if key in kind.switches:
            if not isinstance(value, bool):
                raise ConfigError(f"model.rope_scaling.{key} is {value!r}; it is true or false")
        elif isinstance(value, str | bool) or value <= 0:
            raise ConfigError(f"model.rope_scaling.{key} is {value!r}; it is a number > 0")
