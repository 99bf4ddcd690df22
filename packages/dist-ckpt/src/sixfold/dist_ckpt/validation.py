"""What ``load`` does with keys that do not match, under the name that megatron-core gives its module."""

from sixfold.dist_ckpt.plans.validation import StrictHandling as StrictHandling
from sixfold.dist_ckpt.plans.validation import check_keys as check_keys
from sixfold.dist_ckpt.plans.validation import object_problems as object_problems
from sixfold.dist_ckpt.plans.validation import parse_strict as parse_strict
from sixfold.dist_ckpt.plans.validation import raise_problems as raise_problems
from sixfold.dist_ckpt.plans.validation import table_problems as table_problems

parse_strict_flag = parse_strict  # under megatron-core's name
