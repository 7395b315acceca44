#!/usr/bin/env bash
# From a fresh clone to pictures of Chinese sentences on two cores without a GPU, in about an hour: environment, real
# pictures with captions, image tokenizer, short pretraining, fine-tuning, a grid, and the evaluation of what was drawn.
#   bash scripts/text_to_image.sh [FOLDER]   (default: runs/text_to_image; data goes to data/pictures, data/text_to_image)
# Everything resumes: the same command goes on after an interruption. The time of each part is in FOLDER/times.tsv.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$root"
here=scripts/experiments/text_to_image
out=${1:-runs/text_to_image}
pictures=data/pictures  # all of them, from which the image tokenizer learns what pictures look like
data=data/text_to_image # those whose captions the model learns
emoji=200               # 40 concepts, a fair sample of all, in five drawing styles
shapes=3000             # coloured shapes, of which the split leaves 1,762 to train on
make_environment data
mkdir -p "$out"

part() { # part NAME COMMAND...: runs a part and notes its seconds
    local name=$1 begin=$SECONDS
    shift
    say "$name"
    "$@"
    printf '%s\t%d\n' "$name" "$((SECONDS - begin))" >>"$out/times.tsv"
}

on_both_cores() { # on_both_cores COMMAND...: one rank on each core, each with half of the experts
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m m6 "$@" --set train_micro_batch_size_per_gpu=8 \
        --set m6.training.ep_size=2
}

build() {
    m6 data build emoji easy_vqa --out "$pictures"
    m6 data build inews emoji easy_vqa_compositions --limit "$emoji" --limit "easy_vqa_compositions=$shapes" --out "$data"
    if [ ! -d "$data/tokenizer" ]; then
        m6 data tokenizer "$data" --out "$data/tokenizer" --vocab-size 3000 --image-vocab-size 1024 \
            --character-coverage 0.995 --sample-megabytes 2
    fi
}

draw() { # draw FOLDER: pictures of every caption, those that training showed and the held-out combinations
    [ ! -d "$1" ] || return 0
    python "$here/captions.py" "$data" >"$out/captions.txt"
    m6 generate --checkpoint "$out/finetuned" --captions "$out/captions.txt" --num 4 --candidates 16 --guidance 2 \
        --batch-size 32 --out-dir "$1"
}

grid() {
    m6 generate --checkpoint "$out/finetuned" --captions "$here/shown.txt" --num 8 --candidates 16 --guidance 2 \
        --batch-size 32 --out "$out/grid.png"
}

part "data" build
part "image tokenizer" m6 train-image-tokenizer configs/image_tokenizer/pictures_64.json \
    --set data.path="$pictures" --out runs/image_tokenizer
part "image codes" m6 data codes "$data" --image-tokenizer runs/image_tokenizer
part "pretraining" on_both_cores pretrain "$here/pretrain.json" --run-dir "$out/pretrained"
part "fine-tuning" on_both_cores finetune configs/finetune/text_to_image.json --init "$out/pretrained" \
    --run-dir "$out/finetuned"
part "grid" grid
part "pictures" draw "$out/pictures"
part "evaluation" m6 evaluate-pictures "$out/pictures" --data "$data" --held-out-style twemoji --out "$out/report.md"
say "done: grid $out/grid.png, report $out/report.md, times $out/times.tsv"
