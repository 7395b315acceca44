#!/usr/bin/env bash
# The whole suite on a fresh machine: environment, lint, types, shell scripts, tests.
#   bash scripts/test.sh [ARGUMENTS OF PYTEST]
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$root"
make_environment dev

say "lint"
ruff format --check .
ruff check .
say "types"
mypy
say "shell scripts"
git ls-files -z '*.sh' .ci/run | xargs -0 shellcheck --external-sources
say "tests"
python -m pytest "$@"
