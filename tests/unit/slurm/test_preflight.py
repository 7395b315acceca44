"""What preflight calls a sick node."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from m6.slurm import preflight

GPUS = "0, 41, 3, 0\n1, 44, 3, 0\n"


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    (tmp_path / "clock").write_text(f"{int(time.time())}\n")
    return tmp_path


def run(reports: Path, *arguments: str, **environment: str) -> str:
    subprocess.run(
        [sys.executable, "-m", "m6.slurm.preflight", *(arguments or ["m6_smoke"]), str(reports)],
        env={**os.environ, "SLURMD_NODENAME": "n7", **environment},
        check=True,
        timeout=600,
    )
    return (reports / "n7.txt").read_text()


def test_a_fit_node(reports: Path):
    assert run(reports, MIN_SHM_GB="0") == "ok\n"  # containers have little


def test_the_folders_of_the_run_that_the_node_sees(reports: Path):
    here, there, gone = (str(reports / name) for name in ("here", "there", "gone"))
    Path(here).mkdir()
    Path(there).mkdir()
    config = reports / "run.json"
    config.write_text("// mine\n" + json.dumps({"m6": {"data": {"path": here, "tokenizer": gone, "num_workers": 4}}}))
    run(reports, str(config), MIN_SHM_GB="0")
    assert (reports / "n7.seen").read_text() == f"{here}\n"
    options = ["--init", there, "--set", f"m6.data.path={gone}", f"--set=m6.data.tokenizer={here}", "--set", "a=b"]
    assert preflight.folders_of(config, options) == sorted([gone, here, there])
    assert preflight.folders_of(config, [f"--init={there}"]) == sorted([here, gone, there])
    for text in ("{", "[]", '{"m6": {"data": 3}}'):
        config.write_text(text)
        assert preflight.folders_of(config, ["--init"]) == []


def test_everything_that_is_wrong_is_said(reports: Path):
    (reports / "clock").write_text(f"{int(time.time()) + 100}\n")
    limits = {"MIN_HOST_MEMORY_GB": "1e6", "MIN_SHM_GB": "1e6", "PREFLIGHT_HOOK": "echo burning; false"}
    lines = run(reports, **limits).splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("the clock is -")
    assert "GiB of host memory are free, 1e+06 are required" in lines[1]
    assert "GiB of /dev/shm are free" in lines[2]
    assert lines[3] == "PREFLIGHT_HOOK: burning"


def test_a_folder_that_is_not_shared(tmp_path: Path):
    assert "the run's folder is not shared with this node" in run(tmp_path)


def test_a_check_that_breaks_is_told(reports: Path):
    assert run(reports, MIN_SHM_GB="much").startswith("preflight itself failed: ValueError")


def test_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")
    assert preflight.check_gpus(GPUS, "", 9.0) == []
    assert preflight.check_gpus("", "", 9.0) == ["0 GPUs, 2 are required"]
    assert preflight.check_gpus("0, 41, 3, [N/A]\n1, 44, 3, [N/A]\n", "", 9.0) == []
    assert preflight.check_gpus("0, 91, 3, 0\n1, 44, 20000, 2\n", "", 9.0) == [
        "GPU 0: 91 C while idle",
        "GPU 1: not idle, 20000 MiB are in use",
        "GPU 1: 2 uncorrected ECC errors since the driver was loaded",
    ]


CUDA_13 = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120"
CUDA_12_6 = "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90"


@pytest.mark.parametrize(
    ("card", "architectures", "said"),
    [
        (
            "7.0",
            CUDA_13,
            "GPU 0, sm_70: this PyTorch has kernels for sm_75, .* the CUDA 12.6 build has some: .*whl/cu126",
        ),
        ("6.1", CUDA_13, "cu126"),
        ("7.0", CUDA_12_6, ""),
        ("8.0", CUDA_13, ""),
        ("8.9", CUDA_13, ""),  # by the kernels of 8.6
        ("12.1", CUDA_13, ""),
        ("10.3", "sm_90a sm_100", ""),
        ("9.0", "sm_80 sm_90a", ""),
        ("10.0", "sm_80 sm_90a", "GPU 0, sm_100: .* a newer build of PyTorch may have some"),
        ("8.0", "sm_86", "sm_80"),
        ("10.0", "sm_80 compute_80", ""),  # compiled by the driver
        ("7.0", "", ""),  # an installation that does not say
        ("[N/A]", CUDA_13, ""),
    ],
)
def test_cards_for_which_the_installed_pytorch_has_no_kernels(card: str, architectures: str, said: str):
    problems = preflight.check_kernels(f"0, {card}\n", architectures)
    assert len(problems) == (1 if said else 0)
    assert re.search(said, "".join(problems))


def test_xids_that_matter(monkeypatch: pytest.MonkeyPatch):
    """A crash of an application (31, 43) is none of the node's."""
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")
    log = "[    1.0] nvidia: loaded\n[  100.0] NVRM: Xid (PCI:0000:3b:00): {}, pid=7, name=python\n"
    assert preflight.check_gpus(GPUS, log.format(31) + log.format(43), 200.0) == []
    assert preflight.check_gpus(GPUS, log.format(79) + log.format(48), 200.0) == ["the kernel log has Xid 48, 79"]
    assert preflight.check_gpus(GPUS, log.format(79), 200.0 + 86400) == [], "of the day before"
