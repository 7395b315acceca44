"""The job scripts' headers say what the clusters' JSON say, and fit the configurations they train."""

import re
from pathlib import Path

import pytest

from m6.config.checks import check_world_size
from m6.config.run import load_config
from m6.planning.cost.layout import layout_of
from m6.planning.machine.cluster import load_cluster as load_machine
from m6.planning.search.job_files import signal_lead_s
from m6.planning.search.planner import Planner
from m6.planning.search.results import PricedLayout
from m6.slurm.job import load_job

ROOT = Path(__file__).parents[3]
SCRIPTS = {
    "smoke": ("cpu_2x1", ["train_micro_batch_size_per_gpu=8"]),
    "pretrain_100b": ("gpu_16x8", []),
    "pretrain_1t": ("gpu_64x8", []),
    "pretrain_10t": ("gpu_64x8", []),
    "finetune_text_to_image": ("gpu_1x8", ["m6.moe.num_experts=32"]),  # of the run that it begins with
}


def script(name: str) -> str:
    return (ROOT / "scripts" / "slurm" / f"{name}.sbatch").read_text()


def header(name: str) -> set[str]:
    return {line.split()[1] for line in script(name).splitlines() if line.startswith("#SBATCH")}


def body(name: str) -> list[str]:
    lines = [line for line in script(name).splitlines() if not line.startswith("#")]
    return ["train" if line.startswith(("train ", "M6_COMMAND=finetune train ")) else line for line in lines]


def test_all_scripts_are_listed():
    found = {path.stem for path in (ROOT / "scripts" / "slurm").glob("*.sbatch")} - {"pretrain"}
    assert found == set(SCRIPTS)
    assert {path.stem for path in (ROOT / "configs" / "jobs").glob("*.json")} == {
        *(name for name, _ in SCRIPTS.values()),
        "gpu_60x8",  # of m6t_1t
    }


@pytest.mark.parametrize("name", SCRIPTS)
def test_header_and_configuration(name: str):
    cluster_name, overrides = SCRIPTS[name]
    cluster = load_job(ROOT / "configs" / "jobs" / f"{cluster_name}.json")
    options = {re.sub(r"=(\d+):00:00$", lambda hours: f"={int(hours[1]) * 60}", option) for option in header(name)}
    options = {option.replace("=00:30:00", "=30") for option in options}
    assert set(cluster.options()) <= options
    assert {"--requeue", "--open-mode=append"} <= options
    [config] = re.findall(r"configs/[\w/]+\.json", script(name))
    check_world_size(load_config(ROOT / config, tuple(overrides)), cluster.world_size)


@pytest.mark.parametrize(("name", "machine"), [("100b", "h200_x128"), ("1t", "h200_x128"), ("10t", "v100_32g_x512")])
def test_the_signal_comes_no_later_than_the_plan_asks(name: str, machine: str):
    job = load_job(ROOT / "configs" / "jobs" / f"{SCRIPTS[f'pretrain_{name}'][0]}.json")
    planner = Planner(load_config(Path(f"m6_{name}")), load_machine(Path(machine)).resized(job.world_size))
    plan = planner.evaluate(layout_of(planner.config, job.world_size))
    assert isinstance(plan, PricedLayout)
    assert job.signal_lead_s >= signal_lead_s(planner, plan)


def test_the_signal_is_the_one_that_the_body_waits_for():
    [signal] = re.findall(r"^STOP_SIGNAL=(\w+)", (ROOT / "scripts" / "slurm" / "job.sh").read_text(), re.MULTILINE)
    for name in SCRIPTS:
        assert any(option.startswith(f"--signal=B:{signal}@") for option in header(name))


def test_the_bodies_are_the_same():
    assert len({tuple(body(name)) for name in (*SCRIPTS, "pretrain")}) == 1
