"""m6 submit: the command, what it leaves behind, and what it refuses before anything is written."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from m6.config.run import load_config
from m6.runs.data import keep_sources, open_data
from m6.tokenizers.text import M6Tokenizer
from tests.fixtures.command import contents, m6, user_error
from tests.fixtures.fabricated_run import write_run, write_run_and_data
from tests.fixtures.tiny_run import write_tiny_config

CLUSTER = {
    "nodes": 2,
    "ranks_per_node": 2,
    "gpus_per_node": 2,
    "cpus_per_rank": 8,
    "memory_gb_per_node": 64,
    "time_limit_min": 120,
    "signal_lead_s": 300,
    "partition": "gpu",
    "account": "m6",
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_config(tmp_path_factory.mktemp("submission"))


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    return write_cluster(tmp_path)


def write_cluster(folder: Path, **changes: object) -> Path:
    document = {**CLUSTER, "shared_folders": [str(folder.parent)], **changes}  # the data lies beside the folder
    path = folder / "cluster.json"
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not None}))
    return path


def trained_run(folder: Path) -> tuple[Path, Path]:
    """A run with one checkpoint, which fits the job of ``write_cluster``, and its configuration."""
    write_run_and_data(folder)
    run, config = folder / "run", folder / "run" / "config.json"
    (run / "last_checkpoint").write_text("step_00000100\n")
    document = json.loads(config.read_text())
    document["train_micro_batch_size_per_gpu"] = 1
    config.write_text(json.dumps(document))
    return run, config


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine whose sbatch notes its arguments and gives out ids."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "sbatch").write_text(
        f'#!/bin/bash\nprintf "%s\\n" "$@" "--" >>{tmp_path}/calls\necho $((100 + $(grep -c ^--$ {tmp_path}/calls)))\n'
    )
    (programs / "sbatch").chmod(0o755)
    return {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}


def test_a_dry_run_prints_the_command_and_writes_nothing(config: Path, cluster: Path, tmp_path: Path):
    run = tmp_path / "run"
    before = contents(tmp_path)
    outcome = m6("submit", config, "--job", cluster, "--run-dir", run, "--dry-run")
    assert outcome.code == 0, outcome
    assert contents(tmp_path) == before
    command = shlex.split(outcome.stdout)
    assert command[0] == "sbatch"
    assert set(command) >= {
        "--nodes=2",
        "--ntasks-per-node=2",
        "--gpus-per-node=2",
        "--cpus-per-task=8",
        "--mem=64G",
        "--time=120",
        "--signal=B:USR2@300",
        "--exclusive",
        "--partition=gpu",
        "--account=m6",
        "--requeue",
        "--open-mode=append",
        "--dependency=singleton",
        f"--output={run}/slurm/m6_run_%j.log",
        f"--comment={run}",
    }
    assert re.fullmatch(r"--job-name=m6_run_[0-9a-f]{6}", next(each for each in command if "job-name" in each))
    assert command[-2].endswith("/scripts/slurm/pretrain.sbatch")


def test_runs_in_folders_of_one_name_do_not_wait_for_each_other(config: Path, cluster: Path, tmp_path: Path):
    """Slurm's singleton goes by the name of the job, which is the same for all jobs of a run."""
    names = []
    for parent in ("one", "other", "one"):
        outcome = m6("submit", config, "--job", cluster, "--run-dir", tmp_path / parent / "run", "--dry-run")
        names.append(next(each for each in shlex.split(outcome.stdout) if each.startswith("--job-name=")))
    assert names[0] == names[2] != names[1]


def test_the_run_is_called_as_its_jobs_call_it(config: Path, cluster: Path, tmp_path: Path):
    """They find each other by the comment, and a shell's `cd` resolves ".."."""
    outcome = m6("submit", config, "--job", cluster, "--run-dir", tmp_path / "there" / ".." / "run", "--dry-run")
    assert f"--comment={tmp_path / 'run'}" in shlex.split(outcome.stdout)


def test_a_percent_sign_in_the_name_is_not_a_pattern_of_slurm(config: Path, cluster: Path, tmp_path: Path):
    outcome = m6("submit", config, "--job", cluster, "--run-dir", tmp_path / "50%j", "--dry-run")
    command = shlex.split(outcome.stdout)
    assert {f"--output={tmp_path}/50%%j/slurm/m6_50%%j_%j.log", f"--comment={tmp_path}/50%j"} <= set(command)


@pytest.mark.parametrize("name", ["a,b", "a\nb", "a\\b"])
def test_names_that_slurm_cannot_take(config: Path, cluster: Path, tmp_path: Path, name: str):
    outcome = m6("submit", config, "--job", cluster, "--run-dir", tmp_path / name, "--dry-run")
    assert outcome.code == 2
    assert "takes no folder with a comma or a line break in its name" in outcome.stderr


def test_what_is_submitted_is_recorded(config: Path, cluster: Path, tmp_path: Path, slurm: dict[str, str]):
    run = tmp_path / "run"
    arguments = ("submit", config, "--job", cluster, "--run-dir", run, "--set", "m6.training.total_steps=7")
    outcome = m6(*arguments, **slurm)
    assert outcome.code == 0, outcome
    printed, job = outcome.stdout.splitlines()
    assert job == "101"
    given = (tmp_path / "calls").read_text().split("\n--\n")[0].splitlines()
    assert shlex.split(printed) == ["sbatch", *given]
    [record] = [json.loads(line) for line in (run / "slurm" / "submissions.jsonl").read_text().splitlines()]
    assert record["command"] == printed
    assert record["jobs"] == ["101"]
    *_, script, snapshot_config = given
    assert json.loads(Path(snapshot_config).read_text())["m6"]["training"]["total_steps"] == 7
    snapshot = Path(snapshot_config).parent
    assert (snapshot / "m6" / "training" / "loop.py").is_file()
    packages = {str(path.parent) for path in Path().glob("*/py.typed")}
    assert packages >= {"m6", "moe", "native", "offload"}
    assert packages <= {path.name for path in snapshot.iterdir()}, "jobs use none of the checkout's packages"
    assert Path(script).is_file()
    assert "git_commit" in json.loads((snapshot / "snapshot.json").read_text())
    options = (run / "slurm" / "sbatch_options").read_text().splitlines()
    assert set(options) <= set(given)
    assert not [option for option in options if option.startswith(("--dependency", "--array", "--parsable"))]


def test_a_finetuning_run_is_submitted_with_the_model_it_begins_with(
    config: Path, cluster: Path, tmp_path: Path, slurm: dict[str, str]
):
    document = json.loads(config.read_text())
    write_run(tmp_path / "pretrained", document)
    model = {name: document["m6"].pop(name) for name in ("model", "moe")}
    finetuning = tmp_path / "finetuning.json"
    finetuning.write_text(json.dumps(document))
    arguments = ("submit", finetuning, "--job", cluster, "--run-dir", tmp_path / "run", "--init")
    outcome = m6(*arguments, tmp_path / "pretrained", **slurm)
    assert outcome.code == 0, outcome
    submitted = json.loads(Path(shlex.split(outcome.stdout.splitlines()[0])[-1]).read_text())["m6"]
    assert {name: submitted[name] for name in model} == model
    assert submitted["init"] == str(tmp_path / "pretrained")
    assert "neither a run nor an exported model" in user_error(*arguments, tmp_path / "missing")


def test_a_chain_is_the_same_command_again(config: Path, cluster: Path, tmp_path: Path, slurm: dict[str, str]):
    outcome = m6("submit", config, "--job", cluster, "--run-dir", tmp_path / "run", "--chain", 3, **slurm)
    assert outcome.stdout.splitlines()[1:] == ["101", "102", "103"]
    calls = (tmp_path / "calls").read_text().split("\n--\n")[:3]
    assert calls[0] == calls[1] == calls[2]
    assert "--no-requeue" in calls[0].splitlines()


def test_an_array_runs_one_task_at_a_time(config: Path, cluster: Path, tmp_path: Path):
    outcome = m6("submit", config, "--job", cluster, "--run-dir", tmp_path / "run", "--array", 5, "--dry-run")
    assert {"--array=1-5%1", "--no-requeue"} <= set(shlex.split(outcome.stdout))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": 3}, "fewer than the 6 ranks; try train_micro_batch_size_per_gpu 1, or train_batch_size 12"),
        ({"nodes": 4}, "fewer than the 8 ranks; try train_micro_batch_size_per_gpu 1, or train_batch_size 16"),
        (
            {"time_limit_min": 6},
            "time_limit_min 6 leaves no time to train: Slurm asks to stop signal_lead_s 300 before",
        ),
        ({"gpus_per_node": 4}, "gpus_per_node 4 with ranks_per_node 2; a rank has one GPU"),
        ({"shared_folders": ["/elsewhere"]}, "not in a folder that all nodes share (shared_folders: /elsewhere)"),
        ({"signal_led_s": 9}, 'signal_led_s: unknown key; did you mean "signal_lead_s"?'),
        ({"nodes": None}, "nodes: missing"),
        ({"nodes": "2"}, "nodes: input should be a valid integer"),
    ],
)
def test_what_cannot_work(config: Path, tmp_path: Path, changes: dict, message: str):
    cluster = write_cluster(tmp_path, **changes)
    assert message in user_error("submit", config, "--job", cluster, "--run-dir", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_local_disk_is_refused(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cluster = write_cluster(tmp_path, shared_folders=[])
    arguments = ("submit", config, "--job", cluster, "--run-dir", tmp_path / "run", "--dry-run")
    monkeypatch.setattr("m6.slurm.submission.file_system_type", lambda path: "ext4")
    assert "is on ext4, which other nodes cannot see" in user_error(*arguments)
    monkeypatch.setattr("m6.slurm.submission.file_system_type", lambda path: "lustre")
    assert m6(*arguments).code == 0


def test_what_all_nodes_read_has_to_be_shared_too(config: Path, tmp_path: Path):
    """Else the job would wait for its nodes and end in preflight."""
    shared, data = tmp_path / "shared", json.loads(config.read_text())["m6"]["data"]
    shared.mkdir()

    def submit(run: Path, *folders: object) -> tuple[object, ...]:
        job = write_cluster(tmp_path, shared_folders=[str(folder) for folder in folders])
        return ("submit", config, "--job", job, "--run-dir", run, "--dry-run")

    outside = f"{data['path']}: not in a folder that all nodes share (shared_folders: {shared})"
    assert user_error(*submit(shared / "run", shared)) == f"m6.data.path {outside}"
    text = user_error(*submit(shared / "run", shared, data["path"]))
    assert text.startswith(f"m6.data.tokenizer {data['tokenizer']}: not in")
    text = user_error(*submit(tmp_path / "run", shared, data["path"], data["tokenizer"]))
    assert text.startswith(f"--run-dir {tmp_path / 'run'}: not in")
    assert m6(*submit(shared / "run", shared, data["path"], data["tokenizer"])).code == 0


def test_processes_are_counted_against_the_cores_of_the_job(config: Path, cluster: Path, tmp_path: Path):
    arguments = ("submit", config, "--job", cluster, "--run-dir", tmp_path / "run", "--dry-run")
    text = user_error(*arguments, "--set", "m6.data.num_workers=1000")
    assert text.startswith("m6.data.num_workers is 1,000; expected at most ")


@pytest.mark.parametrize("name", ["DONE", "STOP", "FATAL"])
def test_a_run_that_is_over(config: Path, cluster: Path, tmp_path: Path, name: str):
    run = tmp_path / "run"
    (run / "slurm").mkdir(parents=True)
    (run / "config.json").write_text(config.read_text())
    (run / name).touch()
    assert str(run / name) in user_error("submit", config, "--job", cluster, "--run-dir", run)


def test_a_run_begins_again_once(cluster: Path, tmp_path: Path, slurm: dict[str, str]):
    run, config = trained_run(tmp_path)
    (run / "DONE").write_text("100\n")
    (run / "slurm").mkdir()
    (run / "slurm" / "attempts.txt").write_text("0 0001 7\n0 0002 7\n")  # the second one came to the end
    arguments = ("submit", config, "--job", cluster, "--run-dir", run)
    assert "the run is finished" in user_error(*arguments)
    assert m6(*arguments, "--restart", "--dry-run").code == 0
    assert (run / "DONE").exists(), "a dry run moves nothing"
    outcome = m6(*arguments, "--restart", **slurm)
    assert outcome.code == 0, outcome.stderr
    assert "--restart" not in (tmp_path / "calls").read_text(), "a job that is requeued would begin again, too"
    assert (run / "before_restart_000" / "checkpoints" / "step_00000100").is_dir()
    assert not (run / "checkpoints").exists()
    assert not (run / "DONE").exists()
    script = f'RUN_DIR={run}; source scripts/slurm/lib/attempts.sh; stalled && echo "the job gives up"'
    assert subprocess.run(["bash", "-c", script], capture_output=True, text=True).stdout == ""


def test_what_an_attempt_would_refuse_is_refused_at_once(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run, config = trained_run(tmp_path)
    arguments = ("submit", config, "--job", cluster, "--run-dir", run, "--dry-run")
    assert m6(*arguments).code == 0
    (run / "checkpoints").rename(run / "elsewhere")
    assert "was saved as step_00000100, but" in user_error(*arguments)
    (run / "elsewhere").rename(run / "checkpoints")
    keep_sources(run, open_data(load_config(config)))
    sources = json.loads((run / "sources.json").read_text())
    del sources["sources"]["tiny_text"]
    (run / "sources.json").write_text(json.dumps(sources))
    assert 'source "tiny_text" is new' in user_error(*arguments)
    assert m6(*arguments, "--restart").code == 0
    monkeypatch.setattr(M6Tokenizer, "fingerprint", "0" * 64)
    assert "is not the one that" in user_error(*arguments)


def test_chain_and_array_together(config: Path, cluster: Path, tmp_path: Path):
    message = user_error("submit", config, "--job", cluster, "--run-dir", tmp_path / "run", "--chain", 2, "--array", 2)
    assert message == "--chain 2 and --array 2: both make consecutive jobs; choose one"


def test_no_slurm_here(config: Path, cluster: Path, tmp_path: Path):
    message = user_error("submit", config, "--job", cluster, "--run-dir", tmp_path / "run", PATH="/nowhere")
    assert message.startswith("sbatch: no such command")
    assert not (tmp_path / "run").exists()


def test_slurm_refuses(config: Path, cluster: Path, tmp_path: Path, slurm: dict[str, str]):
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.write_text("#!/bin/bash\necho 'sbatch: error: invalid partition' >&2\nexit 1\n")
    message = user_error("submit", config, "--job", cluster, "--run-dir", tmp_path / "run", **slurm)
    assert message == "sbatch refused: sbatch: error: invalid partition"


def test_a_job_between_bounds_asks_for_any_number_of_nodes(cluster: Path, tmp_path: Path):
    config = write_tiny_config(tmp_path, m6__elastic={"min_nodes": 1, "max_nodes": 4}, train_batch_size=16)
    outcome = m6("submit", config, "--job", cluster, "--run-dir", tmp_path / "run", "--dry-run")
    assert outcome.code == 0, outcome.stderr
    options = shlex.split(outcome.stdout)
    # One task a node of all its cores, which the job divides: with tasks per node Slurm gives the fewest nodes.
    assert {"--nodes=1-4", "--cpus-per-task=16"} <= set(options)
    assert not [option for option in options if option.startswith("--ntasks")]
    (exported,) = (option for option in options if option.startswith("--export="))
    assert exported.endswith(",M6_RANKS_PER_NODE=2")


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"min_nodes": 3, "max_nodes": 4}, "cluster.json: nodes is 2, but m6.elastic goes from 3 to 4"),
        ({"min_nodes": 2, "max_nodes": 2}, "no number of nodes from 2 to 2 with 2 ranks each can run it"),
    ],
)
def test_bounds_that_no_layout_meets(cluster: Path, tmp_path: Path, bounds: dict[str, int], message: str):
    config = write_tiny_config(tmp_path, m6__elastic=bounds, train_batch_size=6)  # three micro-batches
    assert message in user_error("submit", config, "--job", cluster, "--run-dir", tmp_path / "run", "--dry-run")
    assert not (tmp_path / "run").exists()


def test_small_pictures_and_a_missing_key_are_told_before_the_queue(cluster: Path, tmp_path: Path):
    config = write_tiny_config(tmp_path, m6__objectives={"text_denoising": {"weight": 1}})
    manifest = tmp_path / "data" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "recipe": {"image_size": 16}}))
    arguments = ("submit", config, "--job", cluster, "--run-dir", tmp_path / "run", "--dry-run")
    outcome = m6(*arguments)
    assert outcome.code == 0, outcome.stderr
    said = f"warning: {tmp_path / 'data'} keeps pictures of 16 pixels a side at most, which are enlarged to 32"
    assert said in outcome.stderr
    assert said not in m6(*arguments, "--set", 'm6.data.sources={"tiny_text": 1}').stderr
    nobody = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "WANDB_API_KEY": "", "WANDB_MODE": "online"}
    outcome = m6(*arguments, "--set", "m6.logging.wandb=online", **nobody)
    assert outcome.code == 0
    assert 'warning: here m6.logging.wandb "online": there is no API key' in outcome.stderr
