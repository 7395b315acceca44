#!/usr/bin/env bash
# The control of the two ways to draw: the same model, data, start and steps, trained to write codes from left to right.
#   bash scripts/experiments/text_to_image/control.sh [FOLDER]     (after bash scripts/text_to_image.sh [FOLDER])
# About an hour on two cores; it resumes. It writes FOLDER/left_to_right.md beside FOLDER/report.md.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../environment.sh"
cd "$root"
out=${1:-runs/text_to_image}
data=data/text_to_image
run=$out/left_to_right
make_environment data

choose_precision

say "fine-tuning from left to right"
steps=$(sed -n 's/.*"total_steps": *\([0-9]*\).*/\1/p' "$out/finetuned/config.json" | head -n 1)
# Words dropped from the input (arXiv 1511.06349): without them such a model follows the codes before, not the caption.
OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m m6 finetune configs/finetune/text_to_image.json \
    --init "$out/pretrained" --run-dir "$run" --set m6.training.total_steps="$steps" \
    --set train_micro_batch_size_per_gpu=32 --set m6.data.path="$data" --set m6.data.tokenizer="$data/tokenizer" \
    --set m6.objectives.image_code_denoising.weight=0 --set m6.objectives.text_to_image.weight=1 \
    --set m6.objectives.text_to_image.caption_dropout=0.1 --set m6.objectives.text_to_image.code_dropout=0.7 \
    "${precision[@]}"
finished "$run/DONE"
say "pictures from left to right"
[ -d "$run/pictures" ] || m6 generate --checkpoint "$run" --captions "$out/captions.txt" --num 8 --temperature 0.9 \
    --batch-size 64 --out-dir "$run/pictures"
m6 evaluate-pictures "$run/pictures" --data "$data" --held-out-style twemoji --among "$out/captions.txt" \
    --judge "$out/judge" --out "$out/left_to_right.md"
say "done: $out/left_to_right.md, to compare with $out/report.md"
