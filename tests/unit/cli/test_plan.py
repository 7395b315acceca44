"""``m6 plan`` as a user types it."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from m6.cli.plan import app
from m6.config.checks import check_world_size
from m6.config.run import load_config
from m6.errors import UserError
from m6.slurm.job import load_job

CONFIGS = Path(__file__).parents[3] / "configs"
CONFIG = str(CONFIGS / "papers" / "m6t_base.json")
NO_JOB = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "M6_ROOT"))}
MACHINE = ("--cluster", "a100_80g_x128", "--set", "train_batch_size=128")


def run(*arguments: str) -> str:
    return CliRunner().invoke(app, [*arguments], catch_exceptions=False).stdout


def test_plan_without_a_name_is_the_best(tmp_path: Path):
    text = run(CONFIG, *MACHINE, "--world", "8", "--out", str(tmp_path))
    assert "Why not otherwise" in text
    config = load_config(tmp_path / "m6t_base.json")
    check_world_size(config, 8)
    assert (
        (tmp_path / "m6t_base.sbatch")
        .read_text()
        .startswith("#!/usr/bin/env bash\n#SBATCH --job-name=m6t_base\n#SBATCH --nodes=1\n")
    )
    # The job's body finds no sbatch variables here, and says so: the file is a script that begins it.
    ended = subprocess.run(["bash", tmp_path / "m6t_base.sbatch"], capture_output=True, text=True, env=NO_JOB)
    assert ended.stderr.strip().endswith("SLURM_SUBMIT_DIR: unbound variable")
    job = load_job(tmp_path / "m6t_base.job.json")
    assert (job.nodes, job.ranks_per_node, job.gpus_per_node, job.time_limit_min) == (1, 8, 8, 1440)
    assert f"m6 submit {tmp_path}/m6t_base.json --job {tmp_path}/m6t_base.job.json" in text


def test_json_is_all_of_the_output(tmp_path: Path):
    arguments = [CONFIG, *MACHINE, "--world", "8", "--json", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    json.loads(result.stdout)
    assert f"wrote {tmp_path}/m6t_base.json" in result.stderr


def test_two_stages_of_one_layout_are_one_job(tmp_path: Path):
    stages = ("--set", "m6.pseudo_to_real.switch_step=1000", "--set", "m6.training.total_steps=2000")
    run(CONFIG, *MACHINE, *stages, "--world", "8", "--out", str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"m6t_base.json", "m6t_base.job.json", "m6t_base.sbatch"}
    assert load_config(tmp_path / "m6t_base.json").m6.pseudo_to_real is not None


def test_two_stages_of_different_layouts_are_two_jobs_of_one_run(tmp_path: Path):
    stages = ("--set", "m6.pseudo_to_real.switch_step=20000", "--world", "16", "--out", str(tmp_path))
    text = run(str(CONFIGS / "papers" / "m6t_100b.json"), "--cluster", "a100_80g_x128", *stages)
    for stage in ("pseudo", "real"):
        path = f"{tmp_path}/m6t_100b.{stage}"
        assert f"m6 submit {path}.json --job {path}.job.json --run-dir RUN\n" in text
        assert load_config(Path(f"{path}.json")).m6.pseudo_to_real is not None


def test_explain_gives_the_reason():
    text = run("explain", CONFIG, *MACHINE, "--world", "8", "--force", "zero_stage=3", "--force", "micro_batch_size=1")
    assert "refused: m6.training.ep_size 8 splits experts over ranks, but zero_optimization.stage 3 cannot hold" in text
    assert "| experts split |" in text


def test_curve_and_frontier_list_numbers_of_devices(tmp_path: Path):
    cheap = (
        "--force",
        "zero_stage=2",
        "--force",
        "offload_params=false",
        "--force",
        "tp_size=1",
        "--force",
        "pp_size=1",
    )
    lines = run("curve", CONFIG, *MACHINE, *cheap).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["1", "2", "4", "8", "16", "32", "64", "128"]
    png = tmp_path / "frontier.png"
    assert str(png) in run("frontier", CONFIG, *MACHINE, *cheap, "--out", str(png))
    assert png.stat().st_size > 0


def test_a_file_is_no_folder_for_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It is refused before the search."""
    monkeypatch.setattr("m6.cli.plan._planner", None)
    (tmp_path / "plan").touch()
    with pytest.raises(UserError, match="plan: is a file; expected the folder to write to"):
        run(CONFIG, *MACHINE, "--out", str(tmp_path / "plan"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cluster", "a100_80g_128"), 'did you mean "a100_80g_x128"'),
        (("--cluster", "a100_80g_x128", "--world", "12"), "nodes of 8; take whole nodes"),
        (
            ("--cluster", "a100_80g_x128", "--world", "256"),
            "64 has fewer samples than there are devices, 256",
        ),
        (("--cluster", "a100_v100_mixed", "--world", "256"), "256 devices: .* has 128"),
        (("--cluster", "a100_80g_x128", "--force", "zero=1"), "--force zero=1: expected NAME=VALUE"),
        (("--cluster", "a100_80g_x128", "--profile", "none.json"), "none.json: no such file"),
        (("--cluster", "cpu_laptop", "--memory-fraction", "0.01"), "no layout fits on CPU laptop"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], message: str):
    with pytest.raises(UserError, match=message):
        run(CONFIG, *arguments)
