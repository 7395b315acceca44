#!/usr/bin/env bash
# From a fresh clone to a pretrained model in minutes, on two cores without a GPU: environment, real data, tokenizer,
# pretraining that is killed and resumed on the way, evaluation, a caption, and a report.
#   bash scripts/smoke.sh [RUN_FOLDER [OPTIONS OF m6 pretrain]]   (default: runs/m6_smoke; data goes to data/smoke)
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$root"
run=${1:-runs/m6_smoke}
options=("${@:2}")
kill_at=${M6_SMOKE_KILL_AT:-60} # steps after which the first attempt is killed
if [ $# -eq 0 ]; then
    rm -rf "$run"
elif [ -e "$run" ]; then
    echo "error: $run exists; choose a new folder for the run" >&2
    exit 2
fi
make_environment data

say "data: Chinese news and pictures with Chinese captions, from pip packages"
if [ ! -f data/smoke/manifest.json ]; then
    m6 data build inews easy_vqa --out data/smoke
fi
if [ ! -d data/smoke/tokenizer ]; then
    m6 data tokenizer data/smoke --out data/smoke/tokenizer --vocab-size 6000 --image-vocab-size 256 \
        --character-coverage 0.998 --sample-megabytes 3
fi

say "pretraining: the first attempt is killed (kill -9) after $kill_at steps"
m6 pretrain configs/m6_smoke.json --run-dir "$run" "${options[@]+"${options[@]}"}" &
trainer=$!
trap 'kill -9 $trainer 2>/dev/null || true' EXIT
until grep -qs "\"step\": $kill_at," "$run/metrics.jsonl"; do
    if ! kill -0 "$trainer" 2>/dev/null; then
        echo "error: the trainer ended before step $kill_at" >&2
        exit 1
    fi
    sleep 0.2
done
kill -9 "$trainer"
wait "$trainer" 2>/dev/null || true

say "pretraining: the second attempt resumes and finishes"
m6 pretrain configs/m6_smoke.json --run-dir "$run" "${options[@]+"${options[@]}"}"
trap - EXIT
finished "$run/DONE"

say "evaluation against n-gram models"
m6 evaluate "$run"
m6 plot "$run"
picture="$run/report_samples/easy_vqa_0.png"

say "a caption"
m6 generate --checkpoint "$run" --image "$picture"
say "done: report $run/report.md, curves $run/curves.png"
