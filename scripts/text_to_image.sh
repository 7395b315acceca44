#!/usr/bin/env bash
# From a fresh clone to pictures of Chinese sentences on two cores without a GPU: environment, real pictures with
# captions, image tokenizer, short pretraining, fine-tuning, a grid, and the evaluation of what was drawn.
#   bash scripts/text_to_image.sh [--long] [--pixels 128] [FOLDER]
# It takes about an hour; --long, with five times as many concepts, more drawings, and a wider model that trains longer,
# about three. Pictures have 64 or 128 pixels a side and equally many codes. FOLDER is runs/text_to_image by default,
# with _long and _128 after it; data goes to data/.
# Everything resumes: the same command goes on after an interruption. The time of each part is in FOLDER/times.tsv.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$root"
name=text_to_image
concepts=40          # emoji, a fair sample of all, in five drawing styles and as silhouettes
shapes=10000         # drawings of coloured shapes, of which the split leaves three quarters to train on
width=128            # of the model
tokenizer_steps=4000 # of the image tokenizer
steps=2600           # of the fine-tuning
pixels=64            # a side of a picture
given=$*
while [[ ${1:-} == --* ]]; do
    case $1 in
    --long) name=text_to_image_long concepts=200 shapes=60000 width=192 tokenizer_steps=8000 steps=12000 ;;
    --pixels) pixels=${2:-} && shift $(($# > 1)) ;;
    *) pixels='' && break ;;
    esac
    shift
done
[[ $# -le 1 && ${1:-} != -* ]] || pixels=''
case $pixels in
64) suffix='' ;;
128) suffix=_128 ;;
*)
    echo "error: expected [--long] [--pixels 64 or 128] [FOLDER]; found $given" >&2
    exit 2
    ;;
esac
here=scripts/experiments/text_to_image
out=${1:-runs/$name$suffix}
pictures=data/pictures$suffix # all emoji, from which the image tokenizer learns what pictures look like
data=data/$name$suffix        # those whose captions the model learns
tokenizer=runs/image_tokenizer${name#text_to_image}$suffix
make_environment data
mkdir -p "$out"

part() { # part NAME COMMAND...: runs a part and notes its seconds
    local name=$1 begin=$SECONDS
    shift
    say "$name"
    "$@"
    printf '%s\t%d\n' "$name" "$((SECONDS - begin))" >>"$out/times.tsv"
}

choose_precision

on_both_cores() { # on_both_cores MICRO_BATCH COMMAND...: one rank on each core
    local micro_batch=$1
    shift
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m m6 "$@" --set train_micro_batch_size_per_gpu="$micro_batch" \
        --set m6.data.path="$data" --set m6.data.tokenizer="$data/tokenizer" "${precision[@]}"
}

build() {
    m6 data build emoji emoji_styles shapes --image-size "$pixels" --limit shapes=10000 --out "$pictures"
    m6 data build inews emoji emoji_styles shapes --image-size "$pixels" --limit inews=2000 --limit "emoji=$((5 * concepts))" \
        --limit "emoji_styles=$((7 * concepts))" --limit "shapes=$shapes" --out "$data"
    if [ ! -d "$data/tokenizer" ]; then
        # Pieces of at most two characters: a caption that is one piece cannot be composed anew.
        m6 data tokenizer "$data" --out "$data/tokenizer" --vocab-size 3000 --image-vocab-size 4096 \
            --character-coverage 0.995 --max-piece-length 2 --sample-megabytes 2
    fi
}

draw() { # draw CAPTIONS NUMBER OPTIONS...
    m6 generate --checkpoint "$out/finetuned" --captions "$1" --num "$2" --batch-size 64 "${@:3}"
}

draw_all() { # draw_all NAME OPTIONS...: pictures of the captions that training showed and of held-out combinations
    [ ! -d "$out/$1" ] || return 0
    python "$here/captions.py" "$data" >"$out/captions.txt"
    draw "$out/captions.txt" 8 --out-dir "$out/$1" "${@:2}"
}

draw_styles() { # concepts in every style and as silhouettes, seen together and not
    python "$here/styles.py" captions "$data" >"$out/styles.txt"
    [ -d "$out/styles" ] || draw "$out/styles.txt" 2 --out-dir "$out/styles"
    python "$here/styles.py" score "$out/styles" "$data" "$pictures" | tee "$out/styles.md"
}

judge() { # judge NAME: writes OUT/NAME.md
    m6 evaluate-pictures "$out/$1" --data "$data" --held-out-style twemoji --among "$out/captions.txt" \
        --judge "$out/judge" --out "$out/$1.md"
}

compare_outlines() { # of the drawings of both ways
    for way in masked left_to_right; do
        python "$here/outlines.py" "$out/$way" "$data" --image-tokenizer "$tokenizer" | tee "$out/outlines_$way.md"
    done
}

export_model() { # for others to start from: m6 finetune --init, from_pretrained
    [ -d "$out/model" ] || m6 export "$out/finetuned" --hf "$out/model"
}

part "data" build
part "image tokenizer" m6 train-image-tokenizer "configs/image_tokenizer/pictures_$pixels.json" \
    --set data.path="$pictures" --set optimizer.total_steps="$tokenizer_steps" --out "$tokenizer" "${precision[@]}"
finished "$tokenizer/training/DONE"
part "image codes" m6 data codes "$data" --image-tokenizer "$tokenizer"
part "pretraining" on_both_cores 16 pretrain "$here/pretrain.json" --run-dir "$out/pretrained" \
    --set m6.model.hidden_size="$width" --set m6.model.ffn_hidden_size="$width" \
    --set m6.model.num_attention_heads=$((width / 32))
finished "$out/pretrained/DONE"
part "fine-tuning" on_both_cores 32 finetune configs/finetune/text_to_image.json --init "$out/pretrained" \
    --run-dir "$out/finetuned" --set m6.training.total_steps="$steps" --set m6.data.image_tokenizer="$tokenizer"
finished "$out/finetuned/DONE"
part "export" export_model
part "grid" draw "$here/shown.txt" 8 --out "$out/grid.png"
part "pictures, masked" draw_all masked
part "pictures, left to right" draw_all left_to_right --decoding left_to_right
part "pictures, masked, the best 8 of 16" draw_all chosen --candidates 16
for name in masked left_to_right chosen; do
    part "evaluation, $name" judge "$name"
done
part "styles" draw_styles
part "outlines" compare_outlines
say "done: $out: grid.png, masked.md, left_to_right.md, chosen.md, styles.md, outlines_*.md, model, times.tsv"
