"""lib/layout.sh with stand-ins for m6 and Slurm: the layout of an attempt, and when a job asks for more nodes."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[3]
PREAMBLE = """
set -euo pipefail
STOP_ASKED= STOP_SIGNAL=USR2 WATCH_INTERVAL_S=0.05 CONFIG=$FOLDER/config.json RUN_DIR=$FOLDER RANKS_PER_NODE=2
M6_ATTEMPT_DIR=$FOLDER SLURM_JOB_ID=1 SLURM_JOB_NUM_NODES=2 SLURM_JOB_PARTITION=debug
log() { echo "$*"; }
give_up() { echo "gave up: $*"; exit 1; }
source "$ROOT/scripts/slurm/lib/controller.sh"
source "$ROOT/scripts/slurm/lib/layout.sh"
source "$ROOT/scripts/slurm/lib/successors.sh"
source "$ROOT/scripts/slurm/lib/watchdog.sh"
"""
# Says what it was asked, and writes the answer of ANSWER; without one it ends with MISTAKE, or else of a full disk.
PYTHON = """#!/usr/bin/env bash
echo "${@:3}" >"$FOLDER/asked"
[[ -z ${MISTAKE:-} ]] || { echo "error: $MISTAKE" | tee "$FOLDER/mistake" >&2; exit 2; }
[[ -n ${ANSWER+given} ]] || { echo "error: No space left on device" >&2; exit 2; }
[[ -z $ANSWER ]] || printf '%s\\n' $ANSWER >"$FOLDER/layout"
echo "as it is"
"""
# A job that may be requeued unless CHAIN is set, of nodes with two features, without n1.
SCONTROL = """#!/usr/bin/env bash
[[ $2 != hostnames ]] || { tr , '\\n' <<<"$3"; exit; }
echo "JobId=1 Requeue=${CHAIN:-1} Features=fast&big ExcNodeList=n1 End"
"""


def bash(folder: Path, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    (programs / "python").write_text(PYTHON)
    (programs / "scontrol").write_text(SCONTROL)
    # As many idle nodes as the file says, and three that the job cannot have.
    (programs / "sinfo").write_text(
        '#!/usr/bin/env bash\necho "n1 fast,big"; echo "n2 fast,bigger"; echo "n3 (null)"\n'
        'for ((n = $(tee -a "$FOLDER/seen" <"$FOLDER/idle"); n > 0; n--)); do echo "m$n big,new,fast"; done\n'
    )
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


CHOOSE = 'choose_layout "$@" || echo "again"; echo "$STEP_NODES nodes, $GROW_AT: ${LAYOUT_OPTIONS[*]-}"'


def test_only_an_elastic_run_is_planned_anew(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"m6": {}}')
    assert bash(tmp_path, f"set -- ''; {CHOOSE}").stdout == "2 nodes, 0: \n"
    assert not (tmp_path / "asked").exists()


def test_the_layout_of_an_attempt(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"m6": {"elastic": {}}}')
    given = "set -- --failed --set a=1 --restart --profile p.json --set=b=2 --init=run; "
    result = bash(tmp_path, given + CHOOSE, ANSWER="1 4 600 m6.training.ep_size=2")
    assert result.stdout == "layout: as it is\n1 nodes, 4: --set m6.training.ep_size=2\n"
    asked = (tmp_path / "asked").read_text()
    assert asked == (
        f"plan replan {tmp_path}/config.json --run-dir {tmp_path} --nodes 2 --ranks-per-node 2 --out {tmp_path}/layout "
        "--failed --set a=1 --profile p.json --set=b=2 --init=run\n"
    )


def test_only_a_mistake_ends_the_run(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"m6": {"elastic": {}}}')
    full = bash(tmp_path, f"set -- ''; {CHOOSE}")
    assert full.stdout == "no layout: error: No space left on device\nagain\n2 nodes, 0: \n"
    refused = bash(tmp_path, f"set -- ''; {CHOOSE}", MISTAKE="no layout fits")
    assert (refused.returncode, refused.stdout) == (1, "gave up: no layout: no layout fits\n")


def test_what_looks_like_an_elastic_run_and_is_none(tmp_path: Path):
    """m6 plan replan writes nothing then."""
    (tmp_path / "config.json").write_text('{"m6": {"elastic": null, "logging": {"wandb_group": "elastic"}}}')
    assert bash(tmp_path, f"set -- ''; {CHOOSE}", ANSWER="").stdout == "2 nodes, 0: \n"
    assert (tmp_path / "asked").exists()
    (tmp_path / "config.json").write_text('{"m6": {}}')
    for option in ("--set m6.elastic.max_nodes=4", "--set=m6.elastic.max_nodes=4"):
        chosen = bash(tmp_path, f"set -- '' {option}; {CHOOSE}", ANSWER="1 4 600")
        assert chosen.stdout == "layout: as it is\n1 nodes, 4: \n"


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
    (tmp_path / "slurm").mkdir()
    result = bash(tmp_path, WATCH, AT="4", THEN="2", LASTS="50")
    assert "2 nodes have been idle for" in result.stdout
    assert "4 would be faster than 2" in result.stdout
    assert "asked to stop" in result.stdout


def test_it_does_not_for_fewer_or_if_it_may_not(tmp_path: Path):
    cases = {
        "one node more is not enough": {"AT": "4", "THEN": "1"},
        "no layout would be faster": {"AT": "0", "THEN": "9"},
        "a job of a chain": {"AT": "4", "THEN": "9", "CHAIN": "0"},
    }
    folders = {reason: tmp_path / str(number) for number, reason in enumerate(cases)}
    for folder in folders.values():
        folder.mkdir()
        (folder / "idle").write_text("0\n")
    with ThreadPoolExecutor() as pool:  # most of their time is waiting
        ended = {reason: pool.submit(bash, folders[reason], WATCH, LASTS="5", **case) for reason, case in cases.items()}
    for reason, each in ended.items():
        assert "asked" not in each.result().stdout, reason
    assert "1" in (folders["one node more is not enough"] / "seen").read_text(), "it looked"


def test_it_waits_longer_after_each_time_that_asking_was_no_use(tmp_path: Path):
    (tmp_path / "idle").write_text("0\n")
    (tmp_path / "slurm").mkdir()
    growth = tmp_path / "slurm" / "growth"
    growth.write_text("2\n" * 10)
    assert "asked" not in bash(tmp_path, WATCH, AT="4", THEN="2", LASTS="5").stdout
    growth.write_text("1\n" * 10)  # it has more nodes than then
    assert "asked to stop" in bash(tmp_path, WATCH, AT="4", THEN="2", LASTS="50").stdout
    assert growth.read_text() == "2\n"
