#!/usr/bin/env bash
# Installs m6 into a Debian image that has Python; both recipes call it.
#   bash containers/install.sh TORCH_VERSION [TORCH_INDEX_URL]
set -euo pipefail
torch_version=$1
index=()
[ -n "${2:-}" ] && index=(--extra-index-url "$2")
cd "$(dirname "${BASH_SOURCE[0]}")/.."

apt-get update
# A compiler for the kernels of moe and offload, which are compiled at first use; Cairo, which draws emoji and icons.
apt-get install --yes --no-install-recommends g++ libcairo2
rm -rf /var/lib/apt/lists/*
# Before the others: DeepSpeed's installation imports torch, and any of its builds fits the pins.
pip install --no-cache-dir "${index[@]+"${index[@]}"}" "torch==$torch_version"
pip install --no-cache-dir --constraint scripts/constraints.txt ".[data,serve,downstream,tracking]"
