"""The provenance of an attempt: commit and patch, command, hardware, environment, versions of packages.

The code of a submitted run is copied, so later changes of the checkout do not reach its chain of jobs.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from m6.config.run import RunConfig
from m6.data.workers import usable_cores
from m6.errors import UserError
from m6.files import copy_folder, write_json, write_text
from m6.lock import new_folder
from m6.runs.environment import misplacement
from m6.validation import describe

if TYPE_CHECKING:
    import torch

SNAPSHOT = "snapshot.json"
_COPIED = ("m6", "moe", "native", "offload", "scripts/slurm")


def checkout() -> Path:
    """The folder of the sources.

    Raises:
        UserError: it has no job scripts, as in an installed package.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / "scripts" / "slurm" / "job.sh").is_file():
        raise UserError(f"{root}: has no scripts/slurm/job.sh; m6 submit needs a checkout of the repository")
    return root


def take_snapshot(target: Path, document: dict[str, Any]) -> None:
    """Copies the packages and the job scripts to ``target``, with the run's JSON as ``config.json``."""
    root = checkout()
    with new_folder(target) as partial:
        for name in _COPIED:
            copy_folder(root / name, partial / name, ignored=["__pycache__"])
        write_json(partial / "config.json", document)
        # The copy is no git repository, so it records the commit and the uncommitted changes.
        patch = git(root, "diff", "HEAD")
        if patch:
            write_text(partial / "patch.diff", patch, _PRIVATE)
        commit = git(root, "rev-parse", "HEAD").strip() or None
        write_json(partial / SNAPSHOT, {"git_commit": commit, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")})


def git(folder: Path, *arguments: str) -> str:
    """Returns the output of git; empty if git fails, is missing, or ``folder`` is not in a repository.

    Bytes outside of UTF-8, such as those of a changed file in another encoding, are escaped.
    """
    command = ["git", "-C", str(folder), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, encoding="utf-8", errors="backslashreplace", timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout if result.returncode == 0 else ""


# Only these variables of the environment are recorded, by their whole names: a list of secret names would never be
# complete, and a site may give a prefix such as NCCL_ to a secret, too.
_LAUNCH = (
    "MASTER_ADDR MASTER_PORT RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE CUDA_VISIBLE_DEVICES DS_ACCELERATOR "
    "HF_HUB_OFFLINE WANDB_MODE TORCH_EXTENSIONS_DIR OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS "
    "GLOO_SOCKET_IFNAME"
)
_SLURM = (
    "JOB_ID JOB_NAME JOB_NUM_NODES JOB_PARTITION ARRAY_TASK_ID NTASKS NTASKS_PER_NODE NNODES NODELIST PROCID LOCALID"
)
# The variables in NCCL's user guide ("Environment Variables") and those for debugging.
_NCCL = (
    "ALGO ALLOC_P2P_NET_LL_BUFFERS BUFFSIZE CGA_CLUSTER_SIZE CHECKS_DISABLE CHECK_POINTERS COLLNET_ENABLE "
    "COLLNET_NODE_THRESHOLD COMM_BLOCKING CONF_FILE CROSS_NIC CTA_POLICY CUMEM_ENABLE CUMEM_HOST_ENABLE DEBUG "
    "DEBUG_FILE DEBUG_SUBSYS DEBUG_TIMESTAMP_FORMAT DEBUG_TIMESTAMP_LEVELS DMABUF_ENABLE GDRCOPY_ENABLE "
    "GRAPH_DUMP_FILE GRAPH_MIXING_SUPPORT GRAPH_REGISTER HOSTID IB_ADAPTIVE_ROUTING IB_ADDR_FAMILY IB_ADDR_RANGE "
    "IB_AR_THRESHOLD IB_CUDA_SUPPORT IB_DISABLE IB_ECE_ENABLE IB_FIFO_TC IB_GID_INDEX IB_HCA IB_MERGE_NICS "
    "IB_MERGE_VFS IB_PCI_RELAXED_ORDERING IB_QPS_PER_CONNECTION IB_RETRY_CNT IB_RETURN_ASYNC_EVENTS "
    "IB_ROCE_VERSION_NUM IB_SL IB_SPLIT_DATA_ON_QPS IB_TC IB_TIMEOUT IGNORE_CPU_AFFINITY IPC_USE_ABSTRACT_SOCKET "
    "LAUNCH_MODE LAUNCH_ORDER_IMPLICIT LEGACY_CUDA_REGISTER LL_THRESHOLD LOCAL_REGISTER MAX_CTAS MAX_NCHANNELS "
    "MAX_NRINGS MEM_SYNC_DOMAIN MIN_CTAS MIN_NCHANNELS MIN_NRINGS MNNVL_CLIQUE_ID MNNVL_ENABLE MNNVL_UUID "
    "NCHANNELS_PER_NET_PEER NET NETDEVS_POLICY NET_FORCE_MERGE NET_GDR_C2C NET_GDR_LEVEL NET_GDR_READ NET_PLUGIN "
    "NET_SHARED_BUFFERS NET_SHARED_COMMS NSOCKS_PERTHREAD NTHREADS NVB_DISABLE NVLS_ENABLE OOB_NET_ENABLE "
    "OOB_NET_IFNAME P2P_DIRECT_DISABLE P2P_DISABLE P2P_LEVEL P2P_LL_THRESHOLD P2P_NET_CHUNKSIZE P2P_PXN_LEVEL "
    "PROFILER_PLUGIN PROTO PXN_DISABLE RAS_ADDR RAS_ENABLE RAS_TIMEOUT_FACTOR RUNTIME_CONNECT SET_STACK_SIZE "
    "SET_THREAD_NAME SHM_DISABLE SINGLE_RING_THRESHOLD SOCKET_FAMILY SOCKET_IFNAME SOCKET_NTHREADS SOCKET_RETRY_CNT "
    "SOCKET_RETRY_SLEEP_MSEC TOPO_DUMP_FILE TOPO_FILE TREE_THRESHOLD TUNER_PLUGIN UID_STAGGER_RATE "
    "UID_STAGGER_THRESHOLD WIN_ENABLE"
)
_RECORDED_VARIABLES = {
    *_LAUNCH.split(),
    *(f"SLURM_{name}" for name in _SLURM.split()),
    *(f"NCCL_{name}" for name in _NCCL.split()),
}
_PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "sentencepiece", "safetensors", "numpy")
_PRIVATE = 0o600


class Attempt(BaseModel):
    """The part of an attempt's record for reports; the file holds more."""

    time: str
    world_size: int
    packages: dict[str, str]
    hardware: str = "unknown"
    git_commit: str | None = None

    def version(self, package: str) -> str:
        """The version of a package in the attempt."""
        return self.packages.get(package, "unknown")


def read_attempts(run: Path) -> list[Attempt]:
    """Reads the records of all attempts at a run, the oldest first; warns about damaged files."""
    attempts = []
    for file in sorted((run / "provenance").glob("attempt_*/attempt.json")):
        try:
            attempts.append(Attempt.model_validate_json(file.read_bytes()))
        except (OSError, ValidationError) as error:
            reason = describe(error, Attempt, "") if isinstance(error, ValidationError) else error.strerror
            print(f"warning: {file}: corrupt: {reason}", file=sys.stderr)
    return attempts


def record_attempt(attempt: Path, config: RunConfig, world_size: int, nodes: Sequence[str]) -> None:
    """Makes the folder ``attempt`` and records the attempt's provenance in it; only its owner can read the files.

    Args:
        nodes: the name of the node of each rank, if it is known.
    """
    from m6.runs.processes import default_device

    attempt.mkdir()
    source = Path(__file__).resolve().parents[2]
    commit, patch = _commit_and_patch(source)
    record = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "world_size": world_size,
        "host": platform.node(),
        "nodes": list(nodes),  # of the ranks
        "misplacement": misplacement(config, nodes),
        "platform": platform.platform(),
        "hardware": hardware(default_device()),  # of the main rank
        "python": platform.python_version(),
        "git_commit": commit,
        "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "environment": {name: os.environ[name] for name in sorted(_RECORDED_VARIABLES & os.environ.keys())},
    }
    write_json(attempt / "attempt.json", record, _PRIVATE)
    write_json(attempt / "config.json", config.document, _PRIVATE)
    if patch:
        write_text(attempt / "patch.diff", patch, _PRIVATE)


def _commit_and_patch(source: Path) -> tuple[str | None, str]:
    """The git commit and the uncommitted changes of the sources; ``m6 submit`` recorded them in its copy."""
    if (source / SNAPSHOT).exists():
        patch = source / "patch.diff"
        commit = json.loads((source / SNAPSHOT).read_text(encoding="utf-8"))["git_commit"]
        return commit, patch.read_text(encoding="utf-8") if patch.exists() else ""
    return git(source, "rev-parse", "HEAD").strip() or None, git(source, "diff", "HEAD")


def hardware(device: torch.device) -> str:
    """Returns a description of this machine: CPU model, usable cores, GPUs."""
    import torch  # an attempt has it; readers need none

    cores = usable_cores()
    text = f"{_cpu_model()}, {cores} core{'' if cores == 1 else 's'}"
    if device.type == "cuda":
        text += f", {torch.cuda.device_count()} x {torch.cuda.get_device_name(device)}"
    return text


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
