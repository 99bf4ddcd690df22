#!/usr/bin/env bash
# Two nodes under torchrun. Run it on both, with the same files on one file system:
#
#   node a:  torchrun_two_nodes.sh 0 a CONFIG [section.key=value ...]
#   node b:  torchrun_two_nodes.sh 1 a CONFIG [section.key=value ...]
#
# RANKS_PER_NODE: one per GPU unless you say so. MAX_RESTARTS: when a rank is lost, torchrun starts all again, and the
# run goes on from its newest checkpoint. Its agents then meet anew, which they do by c10d, with a store for each try: in
# one that was used before ranks find the addresses of those that are gone.
set -euo pipefail
node_rank=$1 first_node=$2 port=${MASTER_PORT:-29500}
shift 2
if ((${MAX_RESTARTS:-0})); then
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
  meet=(--rdzv-backend=c10d --rdzv-endpoint="$first_node:$port" --rdzv-id=sixfold --max-restarts="$MAX_RESTARTS")
else
  meet=(--node-rank="$node_rank" --master-addr="$first_node" --master-port="$port")
fi
exec "${TORCHRUN:-torchrun}" --nnodes=2 --nproc-per-node="${RANKS_PER_NODE:-gpu}" "${meet[@]}" \
  -m sixfold.gpt train "$@"
