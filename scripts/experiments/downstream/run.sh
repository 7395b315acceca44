#!/usr/bin/env bash
# Pretrains a model and fine-tunes it on seven downstream tasks, each also from random weights; scores all of them.
#   bash scripts/experiments/downstream/run.sh [--large] [FOLDER]
# About two hours on two cores; --large, a model of 256 x 6 that reads pictures in patches of 8 pixels and seven times as
# many samples, is for a GPU. FOLDER is runs/downstream by default, or runs/downstream_large.
# Everything resumes: the same command goes on after an interruption.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../environment.sh"
cd "$root"
here=scripts/experiments/downstream
suffix='' ranks=2 micro_batch=32 options=()
if [ "${1:-}" = --large ]; then
    suffix=_large ranks=1 micro_batch=256
    options=(--set train_batch_size=256 --set m6.training.total_steps=3000 --set m6.model.hidden_size=256
        --set m6.model.num_layers=6 --set m6.model.num_attention_heads=8 --set m6.model.patch_size=8
        --set optimizer.params.lr=0.006 --set optimizer.params.momentum=0.9 --set m6.data.sources.review_texts=0.5)
    shift
fi
if [[ $# -gt 1 || ${1:-} == -* ]]; then
    echo "error: expected [--large] [FOLDER]; found $*" >&2
    exit 2
fi
out=${1:-runs/downstream$suffix}
pretrained=$out/pretrained
data=data/downstream # not data/real, which other experiments have: this one holds reviews, too
make_environment dev

choose_precision
export OMP_NUM_THREADS=1

tune() { # tune START NAME CONFIG SEEDS STEPS ROWS OPTIONS...: NAME is the folder of the runs; ROWS of each source are scored
    local start=$1 name=$2 config=$3 seeds=$4 steps=$5 rows=$6 from=() seed run
    shift 6
    [ "$start" = pretrained ] || from=(--from-scratch)
    for ((seed = 0; seed < seeds; seed++)); do
        run=$out/$name/$start-$seed
        [ ! -f "$run/downstream.json" ] || continue
        say "$name, $start, seed $seed"
        m6 finetune "configs/finetune/$config.json" --init "$pretrained" "${from[@]+"${from[@]}"}" --run-dir "$run" \
            --set m6.data.tokenizer="$data/tokenizer" --set m6.training.seed="$seed" \
            --set m6.training.total_steps="$steps" "${precision[@]}" "$@"
        finished "$run/DONE"
        m6 downstream "$run" --max-rows "$rows"
    done
}

tune_all() { # tune_all START: all tasks from one start
    local start=$1 same=(--set m6.data.path="$data") reviews=(--set m6.data.path=data/labelled) headlines
    headlines=("${reviews[@]}" --set 'm6.data.sources={"inews_sentiment": 1.0}')
    tune "$start" questions visual_question_answering 1 2000 2000
    tune "$start" reviews text_classification 3 460 2000 "${reviews[@]}"
    tune "$start" headlines text_classification 3 200 2000 "${headlines[@]}"
    tune "$start" headlines_with_context text_classification 3 200 2000 "${headlines[@]}" \
        --set m6.objectives.text_classification.with_context=true
    tune "$start" matches image_text_matching 1 1500 200 "${same[@]}"
    tune "$start" captions image_captioning 1 1000 200 "${same[@]}"
    tune "$start" poems text_continuation 1 600 2000 "${same[@]}"
}

m6 data build reviews inews_sentiment --validation-share 0.05 --test-share 0.1 --out data/labelled
# Of the reviews that classification trains on, pretraining reads the text without the label.
[ -f data/review_texts.jsonl ] || python "$here/texts.py" data/labelled reviews data/review_texts.jsonl
m6 data build inews emoji icon_park poetry easy_vqa shapes data/review_texts.jsonl --licence MIT \
    --limit shapes=10000 --out "$data"
m6 data build easy_vqa_questions --out data/vqa
if [ ! -d "$data/tokenizer" ]; then
    m6 data tokenizer "$data" --out "$data/tokenizer" --vocab-size 10000 --image-vocab-size 1024 \
        --character-coverage 0.999 --sample-megabytes 32
fi
torchrun --nproc-per-node "$ranks" -m m6 pretrain "$here/pretrain.json" --run-dir "$pretrained" \
    --set train_micro_batch_size_per_gpu="$micro_batch" "${options[@]+"${options[@]}"}" "${precision[@]}"
finished "$pretrained/DONE"

# The two starts side by side, each on a core.
tune_all scratch &
scratch=$!
trap 'pgrep -P "$scratch" | xargs -r kill "$scratch" 2>/dev/null || true' EXIT
tune_all pretrained
wait "$scratch"
python "$here/report.py" "$out" "$suffix"
