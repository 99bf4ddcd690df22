"""What ``load`` does with keys that do not match, under the name that megatron-core gives its module."""

from sixfold.dist_ckpt.plans.validation import (
    StrictHandling,
    check_keys,
    object_problems,
    parse_strict,
    raise_problems,
    table_problems,
)

parse_strict_flag = parse_strict  # under megatron-core's name

__all__ = [
    "StrictHandling",
    "check_keys",
    "object_problems",
    "parse_strict",
    "parse_strict_flag",
    "raise_problems",
    "table_problems",
]
