#!/usr/bin/env bash
# Two nodes under torchrun. Run it on both, with the same files on one file system:
#
#   node a:  torchrun_two_nodes.sh 0 a CONFIG [section.key=value ...]
#   node b:  torchrun_two_nodes.sh 1 a CONFIG [section.key=value ...]
#
# RANKS_PER_NODE: one per GPU unless you say so. MAX_RESTARTS: when a rank is lost, torchrun starts all again, and the
# run goes on from its newest checkpoint.
set -euo pipefail
node_rank=$1 first_node=$2
shift 2
exec "${TORCHRUN:-torchrun}" \
  --nnodes=2 --node-rank="$node_rank" --nproc-per-node="${RANKS_PER_NODE:-gpu}" \
  --master-addr="$first_node" --master-port="${MASTER_PORT:-29500}" \
  --max-restarts="${MAX_RESTARTS:-0}" \
  -m sixfold.gpt train "$@"
