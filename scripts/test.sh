#!/usr/bin/env bash
# The whole suite on a fresh machine: environment, lint, types, shell scripts, tests.
#   bash scripts/test.sh [--fast] [ARGUMENTS OF PYTEST]
# --fast leaves out the tests that are marked slow and those on a local Slurm cluster.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$root"

# Of several -m pytest takes the last: the caller's narrows ours.
chosen=$# marks='' fast='' arguments=()
while (($#)); do
    case $1 in
    --fast) fast=1 marks+=' and not slow' ;;
    -m) shift && marks+=" and (${1:?-m without an expression})" ;;
    -m*) marks+=" and (${1#-m})" ;;
    *) arguments+=("$1") ;;
    esac
    shift
done
set -- "${arguments[@]+"${arguments[@]}"}"

# Beside the environment and the types, which keep one core busy.
[ -n "$fast" ] || install_slurm &
slurm=$!
make_environment dev

run_tests() { # that no test was chosen is no failure where the choice was the caller's
    local code=0
    python -m pytest "$@" || code=$?
    ((code == 0 || (code == 5 && chosen)))
}

say "format, lint, types, shell scripts"
pre-commit run --all-files --show-diff-on-failure
say "tests"
# In the order of the folders: files with few and long tests would otherwise come last, when one core is idle.
run_tests --numprocesses logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder \
    -m "not slurm and not gpu$marks" "$@"
if command -v nvidia-smi >/dev/null; then
    say "tests on a GPU"
    run_tests --numprocesses 4 -m "gpu$marks" "$@"
fi
[ -n "$fast" ] && exit
if ! wait "$slurm"; then
    echo "error: Slurm could not be installed, see above; --fast leaves out its tests" >&2
    exit 1
fi
# By themselves: several nodes with real jobs leave no core to other tests.
say "tests on a local Slurm cluster"
run_tests -rs -m "slurm$marks" "${@:-tests/slurm}"
