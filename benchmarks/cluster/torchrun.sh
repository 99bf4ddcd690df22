#!/usr/bin/env bash
# One node's ranks of a comparison, under torchrun. Run it on every node, with the same files on one file system:
#
#   torchrun.sh NODE_RANK FIRST_NODE NODES CONFIG [section.key=value ...]
#
# RANKS_PER_NODE: one per GPU unless you say so.
set -euo pipefail
node_rank=$1 first_node=$2 nodes=$3
shift 3
exec "${TORCHRUN:-torchrun}" \
  --nnodes="$nodes" --node-rank="$node_rank" --nproc-per-node="${RANKS_PER_NODE:-gpu}" \
  --master-addr="$first_node" --master-port="${MASTER_PORT:-29500}" \
  -m sixfold.gpt train "$@"
