"""lib/watchdog.sh with a clock of the test's own: when it ends a step, whatever the times of the files are."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# At each look at the clock 100 s have passed, and the next of the EVENTS happens: "step" writes a new RUN/progress,
# "life" touches it, "part" touches RUN/loading, "gone" removes both, "odd" leaves what has times and cannot be read,
# "-" does nothing. After the last event the step ends.
SCRIPT = """
set -euo pipefail
WATCH_INTERVAL_S=0 START_TIMEOUT_S=1800 STEP_TIMEOUT_S=900 EVENTS=($EVENTS)
log() { echo "$*"; }
source "$ROOT/scripts/slurm/lib/watchdog.sh"
end_with_evidence() { echo "ended after ${#DONE[@]} looks"; }
uptime_s() { echo $((7000 + 100 * ${#DONE[@]})); }
DONE=() STEP_STARTED=$(uptime_s) STEP_PID=1
kill() { ((${#DONE[@]} < ${#EVENTS[@]})) && happens "${EVENTS[${#DONE[@]}]}" && DONE+=(1); }
happens() {
    case $1 in
    step)
        echo "${#DONE[@]}" >"$RUN_DIR/.new"
        touch --date="@$FILE_CLOCK" "$RUN_DIR/.new"
        mv "$RUN_DIR/.new" "$RUN_DIR/progress"
        ;;
    life) touch --date="@$((FILE_CLOCK + ${#DONE[@]}))" "$RUN_DIR/progress" ;;
    part) touch --date="@$((FILE_CLOCK + ${#DONE[@]}))" "$RUN_DIR/loading" ;;
    gone) rm -f "$RUN_DIR/progress" "$RUN_DIR/loading" ;;
    odd) rm -rf "$RUN_DIR/progress" && mkdir "$RUN_DIR/progress" ;;
    esac
}
watch_step
"""
QUIET = ["-"]


def watch(folder: Path, events: list[str], file_clock: int = 1_700_000_000) -> list[str]:
    environment = {
        **os.environ,
        "ROOT": str(ROOT),
        "RUN_DIR": str(folder),
        "EVENTS": " ".join(events),
        "FILE_CLOCK": str(file_clock),
    }
    result = subprocess.run(["bash", "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=60)
    assert result.stderr == ""
    return result.stdout.splitlines()


def ended(age: int, limit: int, looks: int) -> list[str]:
    return [f"watchdog: no step for {age} s, the limit is {limit} s", f"ended after {looks} looks"]


@pytest.mark.parametrize(
    ("events", "said"),
    [
        (QUIET * 40, ended(1900, 1800, 19)),
        (QUIET * 18, []),
        (["step", *QUIET * 40], ended(1000, 900, 11)),
        (["step", *QUIET * 9] * 5, []),
        (["step", *QUIET * 9, "life", *QUIET * 9], []),  # it waits for a checkpoint
        ([*QUIET * 17, "part", *QUIET * 40], ended(1900, 1800, 37)),
        ([*QUIET * 17, "part", *QUIET * 17, "part", "step", *QUIET * 40], ended(1000, 900, 47)),
        (["step", *QUIET * 8, "part", *QUIET * 9], []),  # the Real model reads the Pseudo model's checkpoint
        (["step", *QUIET * 8, "gone", *QUIET * 40], ended(1000, 900, 11)),  # no sign of life
        (["step", *QUIET * 8, "odd", *QUIET * 40], ended(1000, 900, 11)),
    ],
)
# Of the file server, before and after any clock of this node.
@pytest.mark.parametrize("file_clock", [0, 1_700_000_000, 4_000_000_000])
def test_when_a_step_has_stood_still(tmp_path: Path, events: list[str], said: list[str], file_clock: int):
    for name in ("progress", "loading"):  # of the attempt before
        (tmp_path / name).write_text("9\n")
        os.utime(tmp_path / name, (0, file_clock))
    assert watch(tmp_path, events, file_clock) == said


def test_a_run_without_files_of_an_attempt_before(tmp_path: Path):
    assert watch(tmp_path, QUIET * 40) == ended(1900, 1800, 19)


def test_a_clock_that_no_one_can_set(tmp_path: Path):
    """Two looks are as far apart as the time in between, by the kernel's own count."""
    script = 'source "$ROOT/scripts/slurm/lib/watchdog.sh"; uptime_s'
    environment = {**os.environ, "ROOT": str(ROOT)}
    before = float(Path("/proc/uptime").read_text().split()[0])
    result = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    after = float(Path("/proc/uptime").read_text().split()[0])
    assert int(before) <= int(result.stdout) <= after
