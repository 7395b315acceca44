"""lib/successors.sh with stand-ins for Slurm's commands, whose controller is away for some tries."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Every question fails TRIES times before it is answered. Only names of hosts are known without the controller.
SLURM = """#!/usr/bin/env bash
asked="${0##*/} $*"
if [[ $asked == *" hostnames "* ]]; then
    printf '%s\\n' n1 n2
    exit
fi
echo "$asked" >>"$FOLDER/asked"
(($(grep --count --line-regexp --fixed-strings "$asked" "$FOLDER/asked") > TRIES)) || exit 7
case "$asked" in
"scontrol show job"*) echo "JobId=1 Requeue=$REQUEUE Restarts=0" ;;
"scontrol show node"*) echo "NodeName=n1 NodeAddr=10.0.0.1 NodeHostName=n1" ;;
squeue*) [[ -z ${WAITING:-} ]] || echo "$WAITING $RUN_DIR" ;;
sbatch*) echo 12 ;;
esac
"""
PREAMBLE = """
set -euo pipefail
SLURM_JOB_ID=1 SLURM_JOB_NUM_NODES=2 RANKS_PER_NODE=4 SLURM_JOB_NAME=m6 SLURM_JOB_PARTITION=debug
SICK_NODES=(n2) SCRIPT_ARGUMENTS=() M6_ATTEMPT_DIR=$FOLDER
log() { echo "$*"; }
stalled() { false; }
newest_checkpoint() { echo 5; }
source "$ROOT/scripts/slurm/lib/controller.sh"
source "$ROOT/scripts/slurm/lib/successors.sh"
source "$ROOT/scripts/slurm/lib/settings.sh"
"""


def bash(folder: Path, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    programs = folder / "bin"
    programs.mkdir()
    for name in ("scontrol", "squeue", "sbatch"):
        (programs / name).write_text(SLURM)
    (programs / "sleep").write_text('#!/usr/bin/env bash\necho "$1" >>"$FOLDER/slept"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    for name in ("slurm", "preflight"):
        (folder / name).mkdir()
    (folder / "preflight" / "n2.txt").write_text("smells of smoke\n")
    return subprocess.run(
        ["bash", "-c", PREAMBLE + script, __file__],
        env={
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "ROOT": str(ROOT),
            "FOLDER": str(folder),
            "RUN_DIR": str(folder),
            "REQUEUE": "1",
            "TRIES": "2",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=60,
    )


def asked(folder: Path, question: str) -> int:
    return (folder / "asked").read_text().splitlines().count(question)


def test_a_job_is_requeued_when_the_controller_is_back(tmp_path: Path):
    ended = bash(tmp_path, "hand_over")
    assert (ended.returncode, ended.stdout) == (0, "saved at step 5: requeueing\n")
    assert asked(tmp_path, "scontrol requeue 1") == 3
    assert "failed, again in 5 s: scontrol requeue 1\nfailed, again in 10 s: scontrol requeue 1\n" in ended.stderr
    assert (tmp_path / "slept").read_text().split() == ["5", "10", "5", "10", "600"]


def test_a_controller_that_stays_away_ends_the_job_with_its_code(tmp_path: Path):
    """Also if it cannot say whether the job may be requeued: a job that ended with 0 would look as if all were well."""
    ended = bash(tmp_path, "hand_over", TRIES="99")
    assert ended.returncode == 7
    assert asked(tmp_path, "scontrol requeue 1") == 8
    assert 200 < sum(map(int, (tmp_path / "slept").read_text().split())) / 2 < 300, "seconds for each question"


@pytest.mark.parametrize(("waiting", "said"), [("12", ": job 12 goes on"), ("", ", and no job of this run is waiting")])
def test_a_job_of_a_chain_leaves_the_rest_to_the_next(tmp_path: Path, waiting: str, said: str):
    ended = bash(tmp_path, "hand_over", REQUEUE="0", WAITING=waiting)
    assert ended.returncode == 0
    assert f"saved at step 5{said}" in ended.stdout
    assert asked(tmp_path, "scontrol requeue 1") == 0


def test_a_sick_node_is_left_out_when_the_controller_is_back(tmp_path: Path):
    ended = bash(tmp_path, "replace_nodes")
    assert (ended.returncode, ended.stdout) == (0, "job 12 goes on without n2\n")
    assert "--nodes=2 --ntasks-per-node=4 " in (tmp_path / "asked").read_text()


def test_jobs_that_wait_leave_out_a_sick_node(tmp_path: Path):
    ended = bash(tmp_path, "replace_nodes", WAITING="12")
    assert (ended.returncode, ended.stdout) == (0, "the jobs that wait for this run leave out n2\n")
    assert asked(tmp_path, "scontrol update JobId=12 ExcNodeList=n2") == 3


def test_an_attempt_begins_when_the_controller_is_back(tmp_path: Path):
    job = "SLURM_JOB_NODELIST=n[1-2] RANKS_PER_NODE=1 CONFIG=/dev/null; mkdir $RUN_DIR/slurm/attempts; python() { :; }"
    ended = bash(tmp_path, f'{job}; source "$ROOT/scripts/slurm/lib/attempts.sh"; open_attempt')
    assert ended.returncode == 0
    assert (tmp_path / "slurm" / "attempts" / "0001" / "job.txt").read_text() == "JobId=1 Requeue=1 Restarts=0\n"


def test_a_job_starts_when_the_controller_is_back(tmp_path: Path):
    job = "M6_ROOT=$FOLDER SLURM_SUBMIT_DIR=$FOLDER CONFIG=tiny.json SLURM_JOB_NODELIST=n[1-2] SLURM_NTASKS=2"
    ended = bash(tmp_path, f'{job}; settings; echo "$MASTER_ADDR"')
    assert (ended.returncode, ended.stdout) == (0, "10.0.0.1\n")
    assert asked(tmp_path, "scontrol show node n1 --oneliner") == 3
