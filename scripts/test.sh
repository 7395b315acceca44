#!/usr/bin/env bash
# The whole suite on a fresh machine: environment, lint, types, shell scripts, tests.
#   bash scripts/test.sh [--fast | --all] [ARGUMENTS OF PYTEST]
# --fast leaves out the tests that are marked slow and those on a local Slurm cluster; --all adds those marked nightly.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$root"

# Of several -m pytest takes the last: the caller's narrows ours.
chosen=$# marks='' fast='' nightly=' and not nightly' arguments=()
while (($#)); do
    case $1 in
    --fast) fast=1 marks+=' and not slow' ;;
    --all) nightly='' ;;
    -m) shift && marks+=" and (${1:?-m without an expression})" ;;
    -m*) marks+=" and (${1#-m})" ;;
    *) arguments+=("$1") ;;
    esac
    shift
done
set -- "${arguments[@]+"${arguments[@]}"}"
marks=$nightly$marks

# Beside the environment, which keeps one core busy.
[ -n "$fast" ] || install_slurm &
slurm=$!
make_environment dev

run_tests() { # that no test was chosen is no failure where the choice was the caller's
    local code=0
    python -m pytest "$@" || code=$?
    ((code == 0 || (code == 5 && chosen)))
}

say "format, lint, shell scripts"
SKIP=mypy pre-commit run --all-files --show-diff-on-failure
# Beside the tests: they change no file, and one core would be idle.
said=$(mktemp)
pre-commit run mypy --all-files >"$said" 2>&1 &
types=$!
trap 'kill "$types" 2>/dev/null || true; rm -f "$said"' EXIT
say "tests"
# In the order of the folders: files with few and long tests would otherwise come last, when one core is idle.
failed=0
run_tests --numprocesses logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder \
    -m "not slurm and not gpu$marks" "$@" || failed=$?
say "types"
wait "$types" || failed=$?
cat "$said"
((failed)) && exit "$failed"
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
