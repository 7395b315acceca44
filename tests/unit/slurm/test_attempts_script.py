"""lib/attempts.sh on made-up logs of ranks: which rank failed or stands still, and which stages it has."""

import os
import socket
import subprocess
from pathlib import Path

import pytest

from m6.checkpoints.discovery import complete_checkpoints
from m6.files import write_json

ROOT = Path(__file__).parents[3]
PLACES = ("pipeline 0, stage 0, layers 0-1", "pipeline 1, stage 0, layers 0-1", "pipeline 0, stage 1, layers 2-3", "")
STACK = """Fatal: SIGQUIT
Thread 0x0001 (most recent call first):
  File "{root}/m6/data/reader.py", line 7 in read

Current thread 0x0002 (most recent call first):
{innermost}  File "{root}/m6/training/engine/pipeline.py", line {line} in {function}
  File "{root}/m6/training/loop.py", line 99 in train
"""


def write_checkpoint(folder: Path, name: str, step: int | None) -> None:
    """Makes a folder of a checkpoint; its manifest holds a step, or nothing."""
    checkpoint = folder / "checkpoints" / name
    checkpoint.mkdir(parents=True, exist_ok=True)
    state = {"samples_seen": 7 * 99, "step": step, "optimizer_step": 99}
    write_json(checkpoint / "manifest.json", {"format": 2, "state": {} if step is None else state})


def describe(folder: Path, what: str, logs: list[str]) -> list[str]:
    attempt = folder / "slurm" / "attempts" / "0001"
    attempt.mkdir(parents=True, exist_ok=True)
    for rank, log in enumerate(logs):
        place = PLACES[rank] if rank < len(PLACES) else ""
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


def test_many_ranks_that_say_different_things(tmp_path: Path):
    """More than a pipe holds (64 KiB): the job would end by a reader that does not wait for all of it."""
    words = 'words() { printf "%s %09000d" "$(<"$1")" 0; }'
    said = describe(tmp_path, f"{words}; describe_ranks words", [f"said {rank}" for rank in range(16)])
    assert [line.split()[1].strip(":") for line in said] == [f"rank_{rank:05d}.log" for rank in range(8)]


def test_versions_hold_no_token_of_a_checkout(tmp_path: Path):
    """pip prints the address that a package was cloned or fetched from as git has it, or as it was given."""
    frozen = ["-e git+https://TOKEN@a.org/b/c.git@12ab#egg=m6", "d @ git+https://e:TOKEN@f.org/g@main", "torch==2.13.0"]
    frozen += ["h @ https://i.org/h-1-py3.whl?private_token=TOKEN&x=1#sha256=12ab"]
    assert describe(tmp_path, f"python() {{ printf '%s\\n' {' '.join(map(repr, frozen))}; }}; packages", []) == [
        "-e git+https://a.org/b/c.git@12ab#egg=m6",
        "d @ git+https://f.org/g@main",
        "torch==2.13.0",
        "h @ https://i.org/h-1-py3.whl#sha256=12ab",
    ]


COMPLETING = "job 11, which had the run before, is completing: waiting"
ONLY_JOB = """
set -euo pipefail
STOP_ASKED= WATCH_INTERVAL_S=1 COMPLETING_TIMEOUT_S=3 SLURM_JOB_ID=12
log() { echo "$*"; }
patiently() { "$@"; }
squeue() { echo "11 $(head -n 1 "$RUN_DIR/states")"; echo "13 RUNNING"; sed -i 1d "$RUN_DIR/states"; }
source "$M6_ROOT/scripts/slurm/lib/attempts.sh"
check_only_job
echo goes on
"""


@pytest.mark.parametrize(
    ("owner", "states", "said"),
    [
        ("", ["RUNNING"], ["goes on"]),
        ("12", ["RUNNING"], ["goes on"]),  # requeued
        ("10", ["RUNNING"], ["goes on"]),  # Slurm has forgotten it
        ("11", ["RUNNING"], ["job 11 is training in {run}"]),
        ("11", ["SUSPENDED"], ["job 11 is training in {run}"]),
        ("11", ["COMPLETING", "COMPLETING", ""], [COMPLETING, "goes on"]),
        ("11", ["COMPLETING"] * 9, [COMPLETING, "goes on"]),
    ],
)
def test_two_jobs_do_not_train_in_one_folder(tmp_path: Path, owner: str, states: list[str], said: list[str]):
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "job").write_text(owner)
    (tmp_path / "states").write_text("".join(f"{state}\n" for state in states))
    environment = {**os.environ, "RUN_DIR": str(tmp_path), "M6_ROOT": str(ROOT)}
    result = subprocess.run(["bash", "-c", ONLY_JOB], env=environment, capture_output=True, text=True, timeout=60)
    assert result.stderr == ""
    assert result.stdout.splitlines() == [line.format(run=tmp_path) for line in said]
    assert (result.returncode == 0) == (said[-1] == "goes on")
    assert ((tmp_path / "slurm" / "job").read_text() == "12\n") == (said[-1] == "goes on")


def stack(line: int, function: str, innermost: str = "") -> str:
    """A rank's threads; ``innermost`` is the line and function of another package that a line of the project calls."""
    return STACK.format(root=ROOT, line=line, function=function, innermost=innermost and f"  File {innermost}\n")


def test_a_job_does_not_begin_again_at_every_attempt(tmp_path: Path):
    script = 'set -euo pipefail; source "$SLURM_SUBMIT_DIR/scripts/slurm/job.sh"; train config.json --set a=1 --restart'
    environment = {**os.environ, "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "1"}
    result = subprocess.run(["bash", "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2
    assert "error: --restart would begin again at every attempt; m6 submit --restart begins again once" in result.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        ("own.json", 0, "own.json"),
        ("m6t_base", 0, f"{ROOT}/m6/configs/papers/m6t_base.json"),
        ("image_captioning", 0, f"{ROOT}/m6/configs/finetune/image_captioning.json"),
        ("jobs/cpu_2x1", 2, "error: jobs/cpu_2x1: no such file, and no shipped configuration"),
        ("m6_bse", 2, "error: m6_bse: no such file, and no shipped configuration"),
    ],
)
def test_a_job_takes_the_name_of_a_shipped_configuration(tmp_path: Path, given: str, code: int, said: str):
    (tmp_path / "own.json").touch()
    script = 'log() { echo "$*"; }; source "$M6_ROOT/scripts/slurm/lib/settings.sh"; find_config; echo "$CONFIG"'
    environment = {**os.environ, "M6_ROOT": str(ROOT), "CONFIG": given}
    command = ["bash", "-euo", "pipefail", "-c", script]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (code, f"{said}\n", "")


@pytest.mark.parametrize(
    ("attempts", "gives_up"),
    [
        ("", False),
        ("failed", False),
        ("failed failed", True),
        ("saved failed", False),
        ("saved failed failed", True),
        ("failed gave_up failed", False),  # a person removed FATAL
        ("failed stopped", False),  # bad luck
        ("stopped failed stopped", False),
        ("failed stopped failed", True),
        ("stopped stopped", True),  # the time limit is shorter than preflight
        ("failed stopped stopped", True),
        ("stopped saved stopped", False),
        ("stopped gave_up stopped", False),
    ],
)
def test_when_a_job_gives_up(tmp_path: Path, attempts: str, gives_up: bool):
    """Attempts begin at the newest checkpoint, 9, but the one that saved it; some are stopped in preflight."""
    write_checkpoint(tmp_path, "step_00000009", 9)
    script = """
        SLURM_JOB_ID=7 ATTEMPT=0001
        log() { :; }
        failed() { record_attempt; }
        stopped() { STOP_ASKED=1 record_attempt; }
        saved() { echo 8 0001 7 >>"$RUN_DIR/slurm/attempts.txt"; }
        gave_up() { (give_up a reason) || true; }
    """
    script += f"for attempt in {attempts}; do $attempt; done; if stalled; then echo gives up; fi"
    assert describe(tmp_path, script, []) == (["gives up"] if gives_up else [])


@pytest.mark.parametrize(
    "foreign",
    [
        "step_00001000_old",
        "step_00001000.bak",
        "step_00000009 (copy)",
        "step_99",
        "step_",
        "step_x",
        "step_0000000٩٩",
        "step_" + 30 * "9",
        "corrupt_step_00001000",
    ],
)
def test_folders_of_other_names_do_not_keep_a_job_alive(tmp_path: Path, foreign: str):
    for name, step in (("step_00000009", 9), ("step_00000008", 8), (foreign, 1000)):
        write_checkpoint(tmp_path, name, step)
    (tmp_path / "checkpoints" / "step_00000099" / "manifest.json").mkdir(parents=True)
    script = "SLURM_JOB_ID=7 ATTEMPT=0001; newest_checkpoint; record_attempt; record_attempt; stalled && echo gives up"
    assert describe(tmp_path, script, []) == ["9", "gives up"]
    assert [path.name for path in complete_checkpoints(tmp_path / "checkpoints")] == ["step_00000008", "step_00000009"]


def test_steps_of_more_digits_are_compared_as_numbers(tmp_path: Path):
    for step in (99_999_998, 100_000_000, 99_999_999):
        write_checkpoint(tmp_path, f"step_{step:08d}", step)
    assert describe(tmp_path, "newest_checkpoint", []) == ["100000000"]


@pytest.mark.parametrize("held", [9, 990, 9900, 199, None])
def test_a_folder_with_the_checkpoint_of_another_step_is_none(tmp_path: Path, held: int | None):
    """With a copy of step 9 at 99, a job would give up although it goes from step 9 to 20."""
    write_checkpoint(tmp_path, "step_00000009", 9)
    write_checkpoint(tmp_path, "step_00000099", held)
    assert describe(tmp_path, "newest_checkpoint", []) == ["9"]
    write_checkpoint(tmp_path, "step_00000099", 99)
    assert describe(tmp_path, "newest_checkpoint", []) == ["99"]


def test_a_checkpoint_that_is_set_aside_and_written_again_is_no_progress(tmp_path: Path):
    """Each attempt damages the checkpoint that it writes, so that the next one goes back to the one before."""
    write_checkpoint(tmp_path, "step_00000010", 10)
    script = """
        SLURM_JOB_ID=7 ATTEMPT=0001
        for newest in 10 20 10 20 10 20; do
            newest_checkpoint() { echo "$newest"; }
            if stalled; then echo "gives up at $newest"; break; fi
            record_attempt
        done
    """
    assert describe(tmp_path, script, []) == ["gives up at 20"]


def test_folders_of_other_names_are_no_attempts(tmp_path: Path):
    script = (
        'for name in 0009 0010 0011_old 99 copy x0012; do mkdir "$RUN_DIR/slurm/attempts/$name"; done; newest_attempt'
    )
    assert describe(tmp_path, script, []) == ["0010"]
    assert describe(tmp_path / "many", 'mkdir "$RUN_DIR"/slurm/attempts/{9999,10000}; newest_attempt', []) == ["10000"]


def ports(folder: Path, jobs: range, attempts: range) -> list[int]:
    """The ports at which jobs and their attempts begin to look."""
    # Without Python the first candidate is taken.
    script = f"""
        python() {{ return 1; }}
        for SLURM_JOB_ID in {" ".join(map(str, jobs))}; do
            for number in {" ".join(map(str, attempts))}; do ATTEMPT=$(printf %04d $number); free_port; done
        done
    """
    return [int(line) for line in describe(folder, script, [])]


def test_jobs_and_attempts_do_not_share_a_port(tmp_path: Path):
    """Of 20 jobs in a row with 20 attempts each, and of jobs whose ids are any round number apart."""
    found = ports(tmp_path / "a", range(1_234_560, 1_234_580), range(1, 21))
    assert len(set(found)) == len(found) == 400
    assert {20000 <= port < 32768 for port in found} == {True}
    for distance in (16, 64, 100, 500, 625, 1000, 1024, 5000, 10000):
        found = ports(tmp_path / f"b{distance}", range(70_000, 70_000 + 10 * distance, distance), range(1, 3))
        assert len(set(found)) == len(found) == 20, distance


def test_a_port_that_is_taken_is_passed_over(tmp_path: Path):
    [first] = ports(tmp_path / "first", range(77, 78), range(1, 2))
    with socket.create_server(("", first)) as taken:
        assert taken.getsockname()[1] == first
        [port] = describe(tmp_path / "taken", "SLURM_JOB_ID=77 ATTEMPT=0001; free_port", [])
    assert int(port) > first


RECEIVES = '"/site-packages/torch/distributed/pipelining/schedules.py", line 683 in _wait_batch_p2p'
EXCHANGES = f'"{ROOT}/moe/collectives.py", line 179 in wait'
COMPUTES = '"/site-packages/torch/nn/functional.py", line 11 in gelu'


def test_where_ranks_stand(tmp_path: Path):
    """The newest stack counts, of its threads the main one, of its lines the innermost one of the project."""
    waits = stack(1, "update") + stack(96, "accumulate", RECEIVES)
    outside = 'Current thread 0x0002 (most recent call first):\n  File "/bin/x.py", line 3 in f\n'
    assert describe(tmp_path, "describe_ranks position", [waits, waits, stack(212, "_pass"), outside]) == [
        "2     rank_00000.log (pipeline 0, stage 0, layers 0-1): m6/training/engine/pipeline.py:96 in accumulate, "
        "waits for other ranks",
        "1     rank_00002.log (pipeline 0, stage 1, layers 2-3): m6/training/engine/pipeline.py:212 in _pass",
        "1     rank_00003.log: not in m6",
    ]


def test_ranks_that_wait_are_told_from_the_one_they_wait_for(tmp_path: Path):
    """Though they stand at the same line: inside of torch.distributed, or of a wait of our own."""
    logs = [stack(96, "accumulate", innermost) for innermost in (RECEIVES, COMPUTES, EXCHANGES)]
    line = "m6/training/engine/pipeline.py:96 in accumulate"
    waiting = f"2     rank_00000.log (pipeline 0, stage 0, layers 0-1): {line}, waits for other ranks"
    behind = f"rank_00001.log (pipeline 1, stage 0, layers 0-1): {line}"
    assert describe(tmp_path, "describe_ranks position", logs) == [waiting, f"1     {behind}"]


def test_the_stopwatch_of_waits_is_not_where_a_rank_stands(tmp_path: Path):
    frames = ("39 in <lambda>", "99 in _timed", "39 in timed")
    stopwatch = "\n  File ".join(f'"{ROOT}/m6/training/reporting/ranks.py", line {frame}' for frame in frames)
    in_torch = '"/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce'
    line = "m6/training/engine/pipeline.py:96 in accumulate"
    logs = [stack(96, "accumulate", innermost) for innermost in (stopwatch, f"{stopwatch}\n  File {in_torch}")]
    assert describe(tmp_path, "describe_ranks position", logs) == [
        f"2     rank_00000.log (pipeline 0, stage 0, layers 0-1): {line}, waits for other ranks"
    ]


def test_the_cause_of_two_hangs_in_a_row_is_where_a_rank_was_that_did_not_wait(tmp_path: Path):
    logs = [stack(96, "accumulate", innermost) for innermost in (RECEIVES, COMPUTES, EXCHANGES)]
    place, line = "rank_00001.log (pipeline 1, stage 0, layers 0-1)", "m6/training/engine/pipeline.py:96 in accumulate"
    assert describe(tmp_path / "hang", "likely_cause", logs) == [f"{place}: last stack: {line}"]
    assert describe(tmp_path / "all_wait", "likely_cause", [logs[0], logs[2]]) == [""]


def test_an_error_is_a_likelier_cause_than_a_stack(tmp_path: Path):
    """A rank's own error first, even if somebody had asked it for its stacks before."""
    lost, own = "RuntimeError: Connection closed by peer\n", stack(1, "update") + "m6: error: a checkpoint\n"
    found = describe(tmp_path / "own", "likely_cause", [stack(96, "accumulate"), lost, own])
    assert found == ["rank_00002.log (pipeline 0, stage 1, layers 2-3): m6: error: a checkpoint"]
    found = describe(tmp_path / "lost", "likely_cause", [stack(96, "accumulate"), lost])
    assert found == ["rank_00001.log (pipeline 1, stage 0, layers 0-1): RuntimeError: Connection closed by peer"]


def test_a_rank_without_stacks(tmp_path: Path):
    found = describe(tmp_path, "describe_ranks position", ["starts\n"])
    assert found == ["1     rank_00000.log (pipeline 0, stage 0, layers 0-1): told no stacks"]
