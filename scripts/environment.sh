# Sourced by the other scripts: makes .venv in the repository and installs the pinned dependencies once.
#
#   M6_PYTHON        interpreter to build the environment with (default: python3), 3.10 or newer
#   M6_VENV          folder of the environment (default: .venv)
#   TORCH_INDEX_URL  a wheel index of PyTorch, if the default index does not have the build you want
#
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${M6_VENV:-$root/.venv}
python=${M6_PYTHON:-python3}
torch_version=2.13.0

# Python compiles the modules that are used when they are used; pip would compile all 20,000, for minutes.
pip_install() { "$venv/bin/pip" install --quiet --no-compile "$@"; }

say() { printf '\n== %s\n' "$*"; }

install_torch() {
    local index=()
    [ -n "${TORCH_INDEX_URL:-}" ] && index=(--extra-index-url "$TORCH_INDEX_URL")
    # Without an NVIDIA driver the CPU build is a tenth of the size; an index that has none (macOS, or plain
    # PyPI) offers the default build instead.
    if ! command -v nvidia-smi >/dev/null 2>&1 &&
        pip_install "${index[@]+"${index[@]}"}" "torch==$torch_version+cpu" 2>/dev/null; then
        return
    fi
    pip_install "${index[@]+"${index[@]}"}" "torch==$torch_version"
}

make_environment() { # make_environment EXTRA
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
        echo "error: Python 3.10 or newer is needed; found $("$python" --version 2>&1 || echo none). Set M6_PYTHON" >&2
        exit 2
    fi
    local wanted
    wanted=$(cat "$root/pyproject.toml" "$root/scripts/constraints.txt" | cksum)
    # "dev" holds everything that the other extras do.
    if ! grep -qsFx "$wanted" "$venv/.installed-$1" "$venv/.installed-dev"; then
        say "environment: $venv"
        if ! "$python" -m venv "$venv"; then
            echo "error: $python cannot make a virtual environment (Debian, Ubuntu: apt-get install python3-venv)" >&2
            exit 2
        fi
        pip_install --upgrade pip
        install_torch
        pip_install --constraint "$root/scripts/constraints.txt" --editable "${root}[$1]"
        printf '%s\n' "$wanted" >"$venv/.installed-$1"
    fi
    export PATH="$venv/bin:$PATH"
    # Some images forbid Python to keep what it compiled; each process would then compile thousands of modules, for seconds.
    unset PYTHONDONTWRITEBYTECODE
    # DeepSpeed keeps compiled code here: a build that was killed leaves a lock behind, on which every later user of the
    # folder that all environments share would wait.
    export TORCH_EXTENSIONS_DIR="$venv/torch_extensions"
    # Tokenizers and data sets are local; nothing is looked up on the hub.
    export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} TOKENIZERS_PARALLELISM=false
}

# Sets "precision" to options of m6 pretrain and m6 finetune: bf16 where the processor or the GPU (from compute capability
# 8.0) multiplies it, which halves a step; elsewhere it would be slower.
choose_precision() {
    local enabled=false
    if grep -qsE 'avx512_bf16|amx_bf16' /proc/cpuinfo ||
        [[ $(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null) =~ ^([89]|[1-9][0-9])\. ]]; then
        enabled=true
    fi
    # shellcheck disable=SC2034 # for the scripts that source this one
    precision=(--set "torch_autocast.enabled=$enabled" --set torch_autocast.dtype=bfloat16)
}

# Slurm and munge for a local cluster, from the distribution: for tests of the job scripts. Without root or apt-get,
# nothing happens, and those tests are skipped.
install_slurm() {
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        return
    fi
    if ! command -v slurmctld >/dev/null || ! command -v munged >/dev/null; then
        say "Slurm and munge"
        apt-get -qq update
        DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends slurm-wlm munge >/dev/null
    fi
}

finished() { # finished FILE: ends the script unless a training has left this file, which one that was stopped has not
    [ -e "$1" ] && return
    echo "the training was stopped; run the same command again to continue" >&2
    exit 1
}
