"""lib/attempts.sh on made-up logs of ranks: which rank failed or stands still, and which stages it has."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]
PLACES = ("pipeline 0, stage 0, layers 0-1", "pipeline 1, stage 0, layers 0-1", "pipeline 0, stage 1, layers 2-3", "")
STACK = """Fatal: SIGQUIT
Thread 0x0001 (most recent call first):
  File "{root}/m6/data/reader.py", line 7 in read

Current thread 0x0002 (most recent call first):
  File "/site-packages/torch/distributed.py", line 11 in recv
  File "{root}/m6/training/engine/{file}.py", line {line} in {function}
  File "{root}/m6/training/loop.py", line 99 in train
"""


def describe(folder: Path, what: str, logs: list[str]) -> list[str]:
    attempt = folder / "slurm" / "attempts" / "0001"
    attempt.mkdir(parents=True)
    for rank, (place, log) in enumerate(zip(PLACES, logs, strict=False)):
        said = f"place: rank {rank}, {place}\n" if place else ""
        (attempt / f"rank_{rank:05d}.log").write_text(said + log)
    script = f'set -euo pipefail; source "$M6_ROOT/scripts/slurm/lib/attempts.sh"; {what}'
    environment = {**os.environ, "RUN_DIR": str(folder), "M6_ROOT": str(ROOT)}
    result = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    return [line.strip() for line in result.stdout.splitlines()]


def test_the_rank_that_failed_is_named_with_its_stages(tmp_path: Path):
    lost = "RuntimeError: Connection closed by peer\n\n"
    assert describe(tmp_path, "describe_failure", [lost, lost, "ValueError: a\ttab\n", lost]) == [
        "3     rank_00000.log (pipeline 0, stage 0, layers 0-1): RuntimeError: Connection closed by peer",
        "1     rank_00002.log (pipeline 0, stage 1, layers 2-3): ValueError: a tab",
    ]


def test_where_ranks_stand(tmp_path: Path):
    """The newest stack counts, of its threads the main one, of its lines the innermost one of the project."""
    first = STACK.format(root=ROOT, file="engine", line=1, function="update")
    waits = first + STACK.format(root=ROOT, file="pipeline", line=96, function="accumulate")
    stands = STACK.format(root=ROOT, file="pipeline", line=212, function="_pass")
    outside = 'Current thread 0x0002 (most recent call first):\n  File "/bin/x.py", line 3 in f\n'
    assert describe(tmp_path, "describe_ranks position", [waits, waits, stands, outside]) == [
        "2     rank_00000.log (pipeline 0, stage 0, layers 0-1): m6/training/engine/pipeline.py:96 in accumulate",
        "1     rank_00002.log (pipeline 0, stage 1, layers 2-3): m6/training/engine/pipeline.py:212 in _pass",
        "1     rank_00003.log: not in m6",
    ]


def test_a_rank_without_stacks(tmp_path: Path):
    found = describe(tmp_path, "describe_ranks position", ["starts\n"])
    assert found == ["1     rank_00000.log (pipeline 0, stage 0, layers 0-1): told no stacks"]
