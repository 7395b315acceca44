#!/usr/bin/env bash
# What srun starts for every rank: rank.sh COMMAND...
set -euo pipefail
trap '' USR2 # until the trainer has a handler; the job repeats the signal
if ((SLURM_PROCID == 0)); then
    echo "$SLURM_JOB_ID.$SLURM_STEP_ID" >"$M6_ATTEMPT_DIR/step"
fi
# Compiled code goes to a local disk, to a folder of this rank alone. It is loaded from there, so nobody else may write it;
# the name of the folder is known, and another user may have made it first.
compiled=${TMPDIR:-/tmp}/m6_$SLURM_JOB_ID
for folder in "$compiled" "$compiled/$SLURM_LOCALID"; do
    mkdir -m 700 "$folder" 2>/dev/null || true # another rank or an earlier attempt may have made it
    if [[ -L $folder || ! -d $folder || ! -O $folder || -n $(find "$folder" -maxdepth 0 -perm /077) ]]; then
        echo "error: $folder, the folder of compiled code, is not a folder that only $(id -un) can open: remove it, or set TMPDIR" >&2
        exit 1
    fi
done
compiled=$folder
export TRITON_CACHE_DIR=$compiled/triton TORCHINDUCTOR_CACHE_DIR=$compiled/inductor TORCH_EXTENSIONS_DIR=$compiled/torch
exec "$@"
