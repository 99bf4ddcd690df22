#!/bin/bash
#SBATCH --job-name=tokens-merge
# Join the pairs of all TASKS tasks of many_machines_build.sh, check the result, and remove them.
#
#     sbatch --dependency=afterok:JOB many_machines_merge.sh PREFIX TASKS
set -euo pipefail
prefix=$1 tasks=$2

# By number, not by what the folder holds: a shard that is missing is an error, not a shorter corpus.
mapfile -t shards < <(for ((task = 0; task < tasks; task++)); do printf '%s-%05d\n' "$prefix" "$task"; done)
sixfold-data merge "${shards[@]}" --output "$prefix" --overwrite
sixfold-data verify "$prefix"
for shard in "${shards[@]}"; do rm -f "$shard".{bin,idx,mask,sources,manifest.json}; done
