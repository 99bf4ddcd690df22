#!/bin/bash
#SBATCH --job-name=tokens
#SBATCH --array=0-31
#SBATCH --cpus-per-task=16
#SBATCH --requeue
# One task of a Slurm array: build the pair of this task's share of the files listed in INPUTS, one path per line.
#
#     sbatch many_machines_build.sh INPUTS PREFIX [option of sixfold-data build ...]
#
# Shares are runs of lines, so that the pairs, joined in their order, hold the documents in the order of the list.
set -euo pipefail
inputs=$1 prefix=$2 task=$SLURM_ARRAY_TASK_ID tasks=$SLURM_ARRAY_TASK_COUNT
shift 2

mapfile -t files < "$inputs"
share=("${files[@]:$((task * ${#files[@]} / tasks)):$(((task + 1) * ${#files[@]} / tasks - task * ${#files[@]} / tasks))}")
if ((${#share[@]} == 0)); then
    echo "$inputs lists ${#files[@]} files for $tasks tasks; use as many tasks as files or fewer" >&2
    exit 2
fi
shard=$(printf '%s-%05d' "$prefix" "$task")
if [[ -e $shard.idx && -e $shard.bin ]]; then # a requeued task whose work is done: a pair is whole or absent
    exit 0
fi
exec sixfold-data build "${share[@]}" --output "$shard" --workers "${SLURM_CPUS_PER_TASK:-1}" --overwrite "$@"
