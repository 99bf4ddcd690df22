#!/usr/bin/env bash
# FSDP2 by torchtitan 0.2.0, same work as ../llama3-8b.toml or ../llama3-70b.toml. In a checkout of its tag v0.2.0, on
# every node:
#
#   torchtitan_fsdp2.sh NODE_RANK FIRST_NODE NODES 8b|70b [--section.option=value ...]
#
# CP=2 for the slides' case. Log lines have memory, tokens per second and TFLOP/s of a device.
set -euo pipefail
node_rank=$1 first_node=$2 nodes=$3 size=$4
shift 4
mode=selective
[[ "$size" == 70b ]] && mode=full
exec "${TORCHRUN:-torchrun}" \
  --nnodes="$nodes" --node-rank="$node_rank" --nproc-per-node=8 \
  --rdzv-backend=c10d --rdzv-endpoint="$first_node:${MASTER_PORT:-29500}" \
  -m torchtitan.train --job.config_file="torchtitan/models/llama3/train_configs/llama3_$size.toml" \
  --training.local_batch_size=1 --training.global_batch_size="${GLOBAL_BATCH:-1024}" --training.seq_len=8192 \
  --training.steps=50 --parallelism.data_parallel_shard_degree=-1 --parallelism.tensor_parallel_degree=1 \
  --parallelism.context_parallel_degree="${CP:-1}" --activation_checkpoint.mode="$mode" \
  --lr_scheduler.warmup_steps=10 --metrics.log_freq=1 --profiling.no-enable_profiling "$@"
