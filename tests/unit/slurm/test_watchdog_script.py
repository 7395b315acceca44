"""lib/watchdog.sh with files of chosen ages: when it ends a step."""

import os
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# A step that stands still lasts as long as it takes to see that; another ends by itself.
SCRIPT = """
set -euo pipefail
WATCH_INTERVAL_S=0.1 START_TIMEOUT_S=1800 STEP_TIMEOUT_S=900 STEP_STARTED=$(($(date +%s) - 4000))
log() { echo "$*"; }
source "$ROOT/scripts/slurm/lib/watchdog.sh"
end_with_evidence() { echo ended; }
sleep "$LASTS" >/dev/null & STEP_PID=$!
watch_step
kill "$STEP_PID" 2>/dev/null || true
"""


@pytest.mark.parametrize(
    ("progress", "loading", "said"),
    [
        (None, None, "no step for 400. s, the limit is 1800 s"),
        (5000, None, "no step for 400. s, the limit is 1800 s"),  # of the attempt before
        (5000, 2000, "no step for 200. s, the limit is 1800 s"),
        (5000, 1000, ""),  # it reads its checkpoint
        (1000, None, "no step for 100. s, the limit is 900 s"),
        (1000, 1500, "no step for 100. s, the limit is 900 s"),
        (1000, 100, ""),  # the Real model reads the Pseudo model's checkpoint
        (100, 1500, ""),
    ],
)
def test_when_a_step_has_stood_still(tmp_path: Path, progress: int | None, loading: int | None, said: str):
    for name, age in (("progress", progress), ("loading", loading)):
        if age is not None:
            (tmp_path / name).touch()
            os.utime(tmp_path / name, (0, time.time() - age))
    lasts = "60" if said else "1"
    environment = {**os.environ, "ROOT": str(ROOT), "RUN_DIR": str(tmp_path), "LASTS": lasts}
    result = subprocess.run(["bash", "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=60)
    assert result.stderr == ""
    if said:
        before, after = said.split(".")
        first, last = result.stdout.splitlines()
        assert first.startswith(f"watchdog: {before}")
        assert first.endswith(after)
        assert last == "ended"
    else:
        assert result.stdout == ""
