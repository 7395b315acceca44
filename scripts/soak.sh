#!/usr/bin/env bash
# One run on a local Slurm cluster that is killed (kill -9 of all ranks) at 50 random moments; about 20 minutes on two
# cores, as root on Debian or Ubuntu. The result goes to scripts/benchmarks/results/slurm_soak.md.
#   bash scripts/soak.sh [--kills N] [--seed N]
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$root"
make_environment dev
install_slurm
export PYTHONPATH=$root OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu
python scripts/benchmarks/slurm.py soak "$@"
