#!/usr/bin/env bash
# What srun starts for every rank: rank.sh COMMAND...
set -euo pipefail
trap '' USR2 # until the trainer has a handler; the job repeats the signal
if ((SLURM_PROCID == 0)); then
    echo "$SLURM_JOB_ID.$SLURM_STEP_ID" >"$M6_ATTEMPT_DIR/step"
fi
# Compiled code goes to a local disk, to a folder of this rank alone.
compiled=${TMPDIR:-/tmp}/m6_$SLURM_JOB_ID/$SLURM_LOCALID
export TRITON_CACHE_DIR=$compiled/triton TORCHINDUCTOR_CACHE_DIR=$compiled/inductor TORCH_EXTENSIONS_DIR=$compiled/torch
exec "$@"
