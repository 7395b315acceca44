"""lib/preflight.sh with stand-ins for Slurm's commands: which nodes it calls sick."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Two nodes that are fit; the sniff test does what SNIFF says.
SRUN = """#!/usr/bin/env bash
reports=${*: -1}
case "$*" in
*m6.slurm.preflight*)
    sleep "${PREFLIGHT_S:-0}" && for node in $NODES; do echo ok >"$reports/$node.txt"; done
    eval "${SEEN:-}"
    ;;
*m6.slurm.sniff*) eval "$SNIFF" ;;
esac
"""
# PREFLIGHT_TIMEOUT_S is the sniff test's alone.
TIMEOUT = """#!/usr/bin/env bash
[[ $* == *m6.slurm.sniff* ]] || set -- "$1" 600 "${@:3}"
exec /usr/bin/timeout "$@"
"""
SCRIPT = """
set -euo pipefail
SRUN_OPTIONS=() CONFIG=run.json STOP_ASKED=${STOP_ASKED:-} CHECK_PID=
log() { echo "$*"; }
give_up() { echo "gave up: $*"; exit 1; }
source "$ROOT/scripts/slurm/lib/preflight.sh"
check_disk() { :; }
if preflight; then echo fit; else echo "sick: ${SICK_NODES[*]}"; fi
"""


def preflight(folder: Path, **environment: str) -> str:
    programs = folder / "bin"
    programs.mkdir()
    (programs / "srun").write_text(SRUN)
    (programs / "timeout").write_text(TIMEOUT)
    (programs / "scontrol").write_text("#!/usr/bin/env bash\nprintf '%s\\n' $NODES\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    nodes = environment.setdefault("NODES", "n1 n2")
    job = {
        "SLURM_NNODES": str(len(nodes.split())),
        "RANKS_PER_NODE": "1",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_GPUS_ON_NODE": "1",
    }
    result = subprocess.run(
        ["bash", "-c", SCRIPT],
        env={
            **os.environ,
            **job,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "ROOT": str(ROOT),
            "M6_ATTEMPT_DIR": str(folder),
            "PREFLIGHT_TIMEOUT_S": "600",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.stderr == ""
    return result.stdout


def test_a_sniff_test_that_ended(tmp_path: Path):
    assert preflight(tmp_path, SNIFF='touch "$reports/sniffed"') == "fit\n"


def test_a_sniff_test_that_found_a_slow_node(tmp_path: Path):
    said = preflight(tmp_path, SNIFF='touch "$reports/sniffed"; echo slow >"$reports/n2.txt"')
    assert said == "preflight: n2: slow\nsick: n2\n"


@pytest.mark.parametrize(("sniff", "limit"), [("exit 1", "600"), ("sleep 600", "1")], ids=["crash", "hang"])
@pytest.mark.parametrize("products", ["", "n1.0 n2.1"])
def test_a_sniff_test_that_did_not_end(tmp_path: Path, sniff: str, limit: str, products: str):
    sniff = f'for file in {products}; do touch "$reports/products/$file"; done; {sniff}'
    said = preflight(tmp_path, SNIFF=sniff, PREFLIGHT_TIMEOUT_S=limit).splitlines()
    assert said[:2] == [f"preflight: the sniff test did not end (try {number} of 2)" for number in (1, 2)]
    reason = f"the sniff test did not end within {limit} s, twice, see the job's log"
    assert said[2:4] == [f"preflight: {node}: {reason}" for node in ("n1", "n2")]
    assert said[4].startswith("gave up: preflight found every node sick")


def test_a_node_whose_gpu_does_not_work(tmp_path: Path):
    """Its rank waits for nobody and leaves no file; the others wait for it."""
    said = preflight(tmp_path, SNIFF='touch "$reports/products/n1.0"; exit 1')
    reason = "a rank did not come through the matrix product, see the job's log"
    assert said == f"preflight: n2: {reason}\nsick: n2\n"


def test_a_sniff_test_that_ends_the_second_time(tmp_path: Path):
    sniff = '[[ ! -e $reports/again ]] || touch "$reports/sniffed"; touch "$reports/again"'
    assert preflight(tmp_path, SNIFF=sniff) == "preflight: the sniff test did not end (try 1 of 2)\nfit\n"


def test_a_stop_that_came_before_is_not_kept_waiting(tmp_path: Path):
    assert preflight(tmp_path, STOP_ASKED="1", PREFLIGHT_S="600") == "fit\n"
    assert not list((tmp_path / "preflight").glob("*.txt"))


@pytest.mark.parametrize(
    ("lacking", "said"),
    [
        ("", "fit\n"),
        ("n2", "preflight: n2: /data/b c is not there, as it is on other nodes\nsick: n2\n"),
        ("n2 n3", "fit\n"),  # of four: who is to be believed?
    ],
)
def test_a_node_without_a_folder_that_most_nodes_see(tmp_path: Path, lacking: str, said: str):
    seen = """for node in $NODES; do printf '%s\\n' /data/a >"$reports/$node.seen"
        [[ " $LACKING " == *" $node "* ]] || echo "/data/b c" >>"$reports/$node.seen"; done"""
    environment = {"NODES": "n1 n2 n3 n4", "LACKING": lacking, "SEEN": seen, "SLURM_GPUS_ON_NODE": "0"}
    assert preflight(tmp_path, **environment) == said
