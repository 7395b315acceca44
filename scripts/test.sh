#!/usr/bin/env bash
# The whole suite on a fresh machine: environment, lint, types, shell scripts, tests.
#   bash scripts/test.sh [ARGUMENTS OF PYTEST]
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$root"
make_environment dev

install_slurm

say "format, lint, types, shell scripts"
pre-commit run --all-files --show-diff-on-failure
say "tests"
python -m pytest --numprocesses logical --maxprocesses 8 --dist loadfile "$@"
