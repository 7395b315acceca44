#!/usr/bin/env bash
# The whole suite on a fresh machine: environment, lint, types, shell scripts, tests.
#   bash scripts/test.sh [ARGUMENTS OF PYTEST]
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$root"
make_environment dev

# The job scripts are tested on a real Slurm of virtual nodes on this machine; without it those tests are skipped.
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null && ! { command -v slurmctld && command -v munged; } >/dev/null; then
    say "Slurm and munge, from the distribution's packages"
    apt-get -qq update
    DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends slurm-wlm munge >/dev/null
fi

say "format, lint, types, shell scripts"
pre-commit run --all-files --show-diff-on-failure
say "tests"
python -m pytest "$@"
