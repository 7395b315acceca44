"""What an attempt ran with: commit and patch, command, hardware, environment, versions of packages."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from m6.config.run import RunConfig
from m6.files import write_json, write_text
from m6.runs.hardware import hardware
from m6.runs.placement import misplacement
from m6.runs.processes import default_device
from m6.runs.snapshot import SNAPSHOT, git

# Of the environment only these are recorded: a list of what is secret would never be complete.
_RECORDED_VARIABLES = re.compile(
    r"(MASTER_(ADDR|PORT)|(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|CUDA_VISIBLE_DEVICES|DS_ACCELERATOR|HF_HUB_OFFLINE"
    r"|WANDB_MODE|TORCH_EXTENSIONS_DIR|(OMP|MKL|OPENBLAS)_NUM_THREADS|(NCCL|GLOO)_[A-Z0-9_]+"
    r"|SLURM_(JOB_(ID|NAME|NUM_NODES|PARTITION)|ARRAY_TASK_ID|NTASKS(_PER_NODE)?|NNODES|NODELIST|PROCID|LOCALID))"
)
_PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "sentencepiece", "safetensors", "numpy")
_PRIVATE = 0o600


def record_attempt(attempt: Path, config: RunConfig, world_size: int, nodes: Sequence[str]) -> None:
    """Makes the folder ``attempt`` and records in it what the attempt runs with; only its owner can read the files.

    Args:
        nodes: the name of the node of each rank, if it is known.
    """
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
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if _RECORDED_VARIABLES.fullmatch(name)
        },
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
