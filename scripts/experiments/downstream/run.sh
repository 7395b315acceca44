#!/usr/bin/env bash
# Pretrains a model and fine-tunes it on seven downstream tasks, each also from random weights; scores all of them.
#   bash scripts/experiments/downstream/run.sh [FOLDER]     (runs/downstream by default)
# Some hours on two cores. Everything resumes: the same command goes on after an interruption.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../environment.sh"
cd "$root"
here=scripts/experiments/downstream
out=${1:-runs/downstream}
pretrained=$out/pretrained
make_environment dev

choose_precision

on_both_cores() { # on_both_cores COMMAND...: one rank on each core
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m m6 "$@" "${precision[@]}"
}

tune() { # tune NAME CONFIG SEEDS STEPS ROWS OPTIONS...: NAME is the folder of its runs; ROWS of each source are scored
    local name=$1 config=$2 seeds=$3 steps=$4 rows=$5 start seed run
    shift 5
    for ((seed = 0; seed < seeds; seed++)); do
        for start in pretrained scratch; do
            run=$out/$name/$start-$seed
            [ ! -f "$run/downstream.json" ] || continue
            say "$name, $start, seed $seed"
            local from=()
            [ "$start" = pretrained ] || from=(--from-scratch)
            on_both_cores finetune "configs/finetune/$config.json" --init "$pretrained" "${from[@]+"${from[@]}"}" \
                --run-dir "$run" --set m6.training.seed="$seed" --set m6.training.total_steps="$steps" \
                --set train_batch_size=64 --set train_micro_batch_size_per_gpu=32 "$@"
            m6 downstream "$run" --max-rows "$rows"
        done
    done
}

m6 data build inews emoji icon_park poetry easy_vqa shapes --limit shapes=10000 --out data/real
m6 data build reviews inews_sentiment --validation-share 0.05 --test-share 0.1 --out data/labelled
m6 data build easy_vqa_questions --out data/vqa
if [ ! -d data/real/tokenizer ]; then
    m6 data tokenizer data/real --out data/real/tokenizer --vocab-size 10000 --image-vocab-size 1024 \
        --character-coverage 0.999 --sample-megabytes 32
fi
on_both_cores pretrain "$here/pretrain.json" --run-dir "$pretrained"

labelled=(--set m6.data.path=data/labelled)
headlines=("${labelled[@]}" --set 'm6.data.sources={"inews_sentiment": 1.0}')
tune questions visual_question_answering 1 4000 2000
tune reviews text_classification 3 1000 2000 "${labelled[@]}"
tune headlines text_classification 3 500 2000 "${headlines[@]}"
tune headlines_with_context text_classification 3 500 2000 "${headlines[@]}" \
    --set m6.objectives.text_classification.with_context=true
tune captions image_captioning 1 2000 200
tune matches image_text_matching 1 2000 200
tune poems text_continuation 1 2000 2000
python "$here/report.py" "$out"
