"""What ``load`` does with keys that do not match, under the name that megatron-core gives its module."""

from sixfold.dist_ckpt.plans.shard_table import object_problems as object_problems
from sixfold.dist_ckpt.plans.shard_table import raise_problems as raise_problems
from sixfold.dist_ckpt.plans.shard_table import table_problems as table_problems
from sixfold.dist_ckpt.save_load.requested_keys import StrictHandling as StrictHandling
from sixfold.dist_ckpt.save_load.requested_keys import check_keys as check_keys
from sixfold.dist_ckpt.save_load.requested_keys import parse_strict as parse_strict

parse_strict_flag = parse_strict  # under megatron-core's name
