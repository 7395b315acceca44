#!/usr/bin/env bash
# Fine-tunes a pretrained run on captioning, sentiment of reviews, image-text matching and questions about pictures, and
# scores each.
#   bash scripts/experiments/downstream/run.sh PRETRAINED [FOLDER] [OPTIONS OF m6 finetune]   (default folder: runs/downstream)
# PRETRAINED was trained on data/real, as scripts/experiments/m6_cpu/run.sh does. Everything resumes.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../environment.sh"
cd "$root"
pretrained=${1:?the folder of a pretrained run}
out=${2:-runs/downstream}
options=("${@:3}")
make_environment dev

m6 data build reviews --validation-share 0.05 --test-share 0.1 --out data/reviews
m6 data build easy_vqa_questions --out data/vqa
for task in image_captioning text_classification image_text_matching visual_question_answering; do
    say "$task"
    m6 finetune "configs/finetune/$task.json" --init "$pretrained" --run-dir "$out/$task" "${options[@]+"${options[@]}"}"
    m6 downstream "$out/$task"
done
