#!/usr/bin/env bash
# The real run: 15.5 M parameters with experts and prototypes on real text and pictures, about an hour on two cores.
# Writes report.md and curves.png beside this script. Building the data needs npm for the emoji, icons and poems.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../environment.sh"
cd "$root"
here=scripts/experiments/m6_cpu
make_environment data

if [ ! -f data/real/manifest.json ]; then
    m6 data build inews emoji icon_park poetry easy_vqa --out data/real
fi
if [ ! -d data/real/tokenizer ]; then
    m6 data tokenizer data/real --out data/real/tokenizer --vocab-size 10000 --image-vocab-size 1024 \
        --character-coverage 0.999 --sample-megabytes 32
fi
choose_precision
OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m m6 pretrain configs/m6_cpu.json --run-dir runs/m6_cpu \
    --set train_micro_batch_size_per_gpu=32 "${precision[@]}"
finished runs/m6_cpu/DONE
m6 evaluate runs/m6_cpu
cp runs/m6_cpu/report.md "$here/report.md"
m6 plot runs/m6_cpu --out "$here/curves.png"
