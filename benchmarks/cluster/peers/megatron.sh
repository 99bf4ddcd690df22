#!/usr/bin/env bash
# Megatron-Core 0.16.1, same work as ../llama3-8b.toml, ../llama3-70b.toml (fsdp) or ../llama3-70b-3d.toml (3d). In a
# checkout of Megatron-LM's tag core_v0.16.1, on every node:
#
#   megatron.sh NODE_RANK FIRST_NODE NODES 8b|70b fsdp|3d [--option value ...]
#
# CP=2 for the slides' case. --log-throughput has TFLOP/s of a device; memory is reported by rank after the first step.
set -euo pipefail
node_rank=$1 first_node=$2 nodes=$3 size=$4 way=$5
shift 5
if [[ "$size" == 8b ]]; then
  shape=(--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336)
  recompute=(--recompute-granularity selective)
else
  shape=(--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --ffn-hidden-size 28672)
  recompute=(--recompute-granularity full --recompute-method uniform --recompute-num-layers 1)
fi
if [[ "$way" == fsdp ]]; then
  layout=(--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --no-gradient-accumulation-fusion
    --init-model-with-meta-device --ckpt-format fsdp_dtensor "${recompute[@]}")
else # one connection, so that what tensor parallelism overlaps is launched in order
  export CUDA_DEVICE_MAX_CONNECTIONS=1
  layout=(--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4
    --num-layers-per-virtual-pipeline-stage 4)
fi
exec "${TORCHRUN:-torchrun}" \
  --nnodes="$nodes" --node-rank="$node_rank" --nproc-per-node=8 \
  --master-addr="$first_node" --master-port="${MASTER_PORT:-29500}" \
  pretrain_gpt.py --use-mcore-models "${shape[@]}" "${layout[@]}" \
  --group-query-attention --num-query-groups 8 --swiglu --disable-bias-linear --normalization RMSNorm \
  --position-embedding-type rope --rotary-base 500000 --untie-embeddings-and-output-weights \
  --attention-dropout 0 --hidden-dropout 0 --seq-length 8192 --max-position-embeddings 8192 \
  --micro-batch-size 1 --global-batch-size "${GLOBAL_BATCH:-1024}" --context-parallel-size "${CP:-1}" \
  --train-iters 50 --lr 1.5e-4 --min-lr 1.5e-5 --lr-decay-style cosine --lr-warmup-iters 10 --clip-grad 1.0 \
  --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --calculate-per-token-loss \
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
  --data-path "${DATA:-corpus/c4}" --split 98,2,0 --tokenizer-type NullTokenizer --vocab-size 128256 \
  --eval-iters 0 --log-interval 1 --log-throughput "$@"
