"""lib/layout.sh with stand-ins for m6 and Slurm: the layout of an attempt, and when a job asks for more nodes."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]
PREAMBLE = """
set -euo pipefail
STOP_ASKED= STOP_SIGNAL=USR2 WATCH_INTERVAL_S=0.05 CONFIG=$FOLDER/config.json RUN_DIR=$FOLDER RANKS_PER_NODE=2
M6_ATTEMPT_DIR=$FOLDER SLURM_JOB_NUM_NODES=2 SLURM_JOB_PARTITION=debug
log() { echo "$*"; }
give_up() { echo "gave up: $*"; exit 1; }
source "$ROOT/scripts/slurm/lib/layout.sh"
"""
# Says what it was asked, and writes the answer of ANSWER.
PYTHON = """#!/usr/bin/env bash
echo "${@:3}" >"$FOLDER/asked"
[[ -n ${ANSWER:-} ]] || { echo "error: no layout fits" >&2; exit 2; }
printf '%s\\n' $ANSWER >"$FOLDER/layout"
echo "as it is"
"""


def bash(folder: Path, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    (programs / "python").write_text(PYTHON)
    # The number of idle nodes is what IDLE holds, in two lines as of two kinds of nodes.
    (programs / "sinfo").write_text('#!/usr/bin/env bash\ntee -a "$FOLDER/seen" <"$FOLDER/idle"; echo 0\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    return subprocess.run(
        ["bash", "-c", PREAMBLE + script],
        env={
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "ROOT": str(ROOT),
            "FOLDER": str(folder),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=60,
    )


CHOOSE = 'choose_layout "$@"; echo "$STEP_NODES nodes, $GROW_AT: ${LAYOUT_OPTIONS[*]-}"'


def test_only_an_elastic_run_is_planned_anew(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"m6": {}}')
    assert bash(tmp_path, f"set -- ''; {CHOOSE}").stdout == "2 nodes, 0: \n"
    assert not (tmp_path / "asked").exists()


def test_the_layout_of_an_attempt(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"m6": {"elastic": {}}}')
    given = "set -- --failed --set a=1 --restart --profile p.json; "
    result = bash(tmp_path, given + CHOOSE, ANSWER="1 4 600 m6.training.ep_size=2")
    assert result.stdout == "layout: as it is\n1 nodes, 4: --set m6.training.ep_size=2\n"
    asked = (tmp_path / "asked").read_text()
    assert asked == (
        f"plan replan {tmp_path}/config.json --run-dir {tmp_path} --nodes 2 --ranks-per-node 2 --out {tmp_path}/layout "
        "--failed --set a=1 --profile p.json\n"
    )
    refused = bash(tmp_path, f"set -- ''; {CHOOSE}")
    assert (refused.returncode, refused.stdout) == (1, "gave up: no layout: no layout fits\n")


# The step ends when the job is asked to stop, or by itself after LASTS seconds: on a busy machine the watcher is late.
WATCH = """
trap 'echo "asked to stop"; STOP_ASKED=1' USR2
sleep "$LASTS" >/dev/null & STEP_PID=$!
GROW_AT=$AT GROW_AFTER_S=1 STEP_NODES=2
watch_growth & watcher=$!
(sleep 1.5; echo "$THEN" >"$FOLDER/idle") &
while kill -0 "$STEP_PID" 2>/dev/null && [[ -z $STOP_ASKED ]]; do wait "$STEP_PID" || true; done
kill "$watcher" "$STEP_PID" 2>/dev/null || true
"""


def test_a_job_asks_for_more_nodes_when_they_have_been_idle(tmp_path: Path):
    (tmp_path / "idle").write_text("0\n")
    result = bash(tmp_path, WATCH, AT="4", THEN="2", LASTS="50")
    assert "2 nodes have been idle for" in result.stdout
    assert "4 would be faster than 2" in result.stdout
    assert "asked to stop" in result.stdout


def test_it_does_not_for_fewer_or_if_it_may_not(tmp_path: Path):
    (tmp_path / "idle").write_text("0\n")
    assert "asked" not in bash(tmp_path, WATCH, AT="4", THEN="1", LASTS="5").stdout, "one node more is not enough"
    assert "1" in (tmp_path / "seen").read_text(), "it looked"
    assert "asked" not in bash(tmp_path, WATCH, AT="0", THEN="9", LASTS="5").stdout, "no layout would be faster"
