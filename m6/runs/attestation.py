"""Compares code, configuration and data of all ranks at the start.

A rank with another learning rate or other data would otherwise train on unnoticed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import m6
from m6.config.run import RunConfig
from m6.data.codes import CODES_FOLDER
from m6.data.manifest import MANIFEST_NAME
from m6.errors import StorageError, UserError
from m6.files import sha256, why_unwritable, write_text
from m6.runs.processes import Runtime, on_main_rank
from moe.kernels.compiled import load_kernel

_PACKAGES = (
    "torch", "deepspeed", "transformers", "tokenizers", "safetensors", "sentencepiece", "numpy", "pyarrow", "pillow",
    "pydantic", "peft", "triton",
)  # fmt: skip
# These variables choose numbers, kernels or collectives. Others may differ, such as names of network cards.
_VARIABLES = (
    "ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG", "DISABLE_ADDMM_CUDA_LT", "DNNL_MAX_CPU_ISA", "DS_ACCELERATOR",
    "HF_HUB_OFFLINE", "M6_RECIPES_EXPERTS", "MKL_CBWR", "MKL_DYNAMIC", "MKL_ENABLE_INSTRUCTIONS", "MKL_NUM_THREADS",
    "NCCL_ALGO", "NCCL_BUFFSIZE", "NCCL_COLLNET_ENABLE", "NCCL_CROSS_NIC", "NCCL_IB_DISABLE", "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS", "NCCL_NET", "NCCL_NTHREADS", "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "NCCL_PROTO",
    "NCCL_SHM_DISABLE", "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS", "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA", "OPENBLAS_NUM_THREADS", "PYTHONHASHSEED", "PYTHONOPTIMIZE", "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_BLOCKING_WAIT", "WORLD_SIZE",
)  # fmt: skip
_SOURCES = ("m6", "moe", "offload", "native")
# The most differences of one rank in a message, and the most ranks.
_NAMED = 4
_ABSENT = "absent"
# How many parts of a large file are compared.
_PARTS, _PART_BYTES = 256, 4096
# NFS may show a folder as it was a minute ago.
_VISIBLE_AFTER_S, _POLL_S = 60.0, 0.5


def attest(config: RunConfig, runtime: Runtime, restart: bool = False) -> None:
    """Compares configuration, code, versions, environment, data and tokenizers of all ranks.

    Every rank calls this function before it uses any of them. Equal ranks exchange only a checksum.

    Args:
        restart: whether the command line of this rank has ``--restart``.

    Raises:
        UserError: on every rank if one differs from rank 0, with the ranks, their nodes, the keys and both values.
    """
    if runtime.world_size == 1:
        return
    own = _facts(config, restart)
    checksums = [""] * runtime.world_size
    dist.all_gather_object(checksums, hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest())
    if len(set(checksums)) == 1:
        return
    of_main: list[Any] = [own]
    dist.broadcast_object_list(of_main, src=0)
    differences: list[list[str]] = [[]] * runtime.world_size
    dist.all_gather_object(differences, _differences(own, of_main[0]))
    by_difference: dict[str, list[int]] = {}
    for rank, found in enumerate(differences):
        more = f", and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        if found:
            by_difference.setdefault(", ".join(found[:_NAMED]) + more, []).append(rank)
    said = [f"{_ranks(runtime, ranks)}: {text}" for text, ranks in by_difference.items()]
    more = f"; and {len(said) - _NAMED} more" if len(said) > _NAMED else ""
    raise UserError(f"ranks differ from {runtime.name_of(0)}; {'; '.join(said[:_NAMED])}{more}")


def check_shared(folders: Sequence[Path], runtime: Runtime) -> None:
    """Checks whether all ranks see files of rank 0 in the folders of a run, and may write there. Every rank calls it.

    Args:
        folders: the run's folder, and folders in it that may be links or mounts of their own. A folder that does not
            exist on rank 0 is left out.

    Raises:
        StorageError: on every rank if one sees no file of rank 0, or may not write, with these ranks and their nodes.
    """
    if runtime.world_size == 1:
        return
    prefix = ".shared_"

    def write() -> list[tuple[Path, str]]:
        name = prefix + secrets.token_hex(8)
        written = [folder for folder in folders if folder.is_dir()]
        for folder in written:
            for old in folder.glob(f"{prefix}*"):  # of a killed attempt
                old.unlink(missing_ok=True)
            write_text(folder / name, name)
        return [(folder, name) for folder in written]

    def remove() -> None:
        for folder, name in files:
            (folder / name).unlink(missing_ok=True)

    files = on_main_rank(write)
    hidden = next((folder for folder, name in files if not _appears(folder / name, name)), None)
    blind: list[Path | None] = [None] * runtime.world_size
    dist.all_gather_object(blind, hidden)
    on_main_rank(remove)
    # Each rank writes its part of a checkpoint, and one node may have mounted the file system read-only.
    reason = next(filter(None, (why_unwritable(folder) for folder, _ in files)), None) if hidden is None else None
    refused: list[str | None] = [None] * runtime.world_size
    dist.all_gather_object(refused, reason)
    if ranks := [rank for rank, folder in enumerate(blind) if folder is not None]:
        raise StorageError(
            f"{blind[ranks[0]]}: {_ranks(runtime, ranks)} did not see for {_VISIBLE_AFTER_S:.0f} s what "
            f"{runtime.name_of(0)} wrote there; --run-dir takes a folder on a file system that all nodes share"
        )
    if ranks := [rank for rank, reason in enumerate(refused) if reason is not None]:
        raise StorageError(
            f"{refused[ranks[0]]} for {_ranks(runtime, ranks)}; all ranks write parts of checkpoints into --run-dir"
        )


def _appears(file: Path, content: str) -> bool:
    deadline = time.monotonic() + _VISIBLE_AFTER_S
    while True:
        for folder in (file.parent.parent, file.parent):  # opening a folder makes NFS ask its server
            with contextlib.suppress(OSError):
                os.scandir(folder).close()
        try:
            if file.read_text(encoding="utf-8") == content:
                return True
        except OSError:
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)


def _facts(config: RunConfig, restart: bool) -> dict[str, str]:
    """All values to compare, by name."""
    data = config.m6.data
    folders = {"m6.data.tokenizer": data.tokenizer, "m6.data.image_tokenizer": data.image_tokenizer}
    facts = dict(_flatten(config.document))
    facts |= {f"environment variable {name}": os.environ.get(name, _ABSENT) for name in _VARIABLES}
    facts |= {f"version of {name}": version for name, version in _versions()}
    facts |= _code()
    facts |= _arithmetic(config)
    facts["--restart"] = str(restart).lower()
    manifests = [data.path / MANIFEST_NAME, *sorted(data.path.glob(f"{CODES_FOLDER}/*/{MANIFEST_NAME}"))]
    facts |= {f"checksum of m6.data.path {file}": _checksum(file) for file in manifests}
    for key, folder in folders.items():
        files = sorted(Path(folder).rglob("*")) if folder is not None else []
        facts |= {f"checksum of {key} {file}": _checksum(file) for file in files if file.is_file()}
    if (init := config.m6.init) is not None:
        # Of a run, the newest checkpoint: its manifest has the checksums of the weights.
        newest = sorted(init.glob("checkpoints/step_*/manifest.json"))[-1:]
        facts |= {f"checksum of m6.init {file}": _checksum(file) for file in (*sorted(init.glob("*.json")), *newest)}
        # An exported model has no checksums, and at ZeRO stage 3 and in pipelines ranks hold no copies to compare.
        facts |= {f"parts of m6.init {file}": _parts(file) for file in sorted(init.glob("*.safetensors"))}
    return facts


def _arithmetic(config: RunConfig) -> dict[str, str]:
    """What decides how a rank rounds: equal bits whatever rank computes a sample need equal processors and kernels."""
    if config.m6.training.deterministic is None:
        return {}
    if torch.cuda.is_available():
        return {"GPU": torch.cuda.get_device_name()}
    facts = {
        "instructions of the processor": torch.backends.cpu.get_cpu_capability(),
        "threads of PyTorch": str(torch.get_num_threads()),
    }
    if config.m6.moe is not None:  # each machine has measured for itself
        facts["products of experts"] = "compiled" if load_kernel() else "pytorch"
    return facts


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, entry in value.items():
            yield from _flatten(entry, f"{name}.{key}" if name else key)
    else:
        yield name, json.dumps(value, ensure_ascii=False)


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    yield "m6-recipes", m6.__version__
    yield "CUDA", str(torch.version.cuda)
    if torch.cuda.is_available():
        yield "NCCL", ".".join(map(str, torch.cuda.nccl.version()))
    for name in _PACKAGES:
        # The loaded copy decides. It may be another one than the installed copy.
        loaded = getattr(sys.modules.get(name), "__version__", None)
        try:
            yield name, str(loaded or importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield name, _ABSENT


@cache
def _code() -> dict[str, str]:
    root = Path(__file__).resolve().parents[2]
    suffixes = (".py", ".json", ".cpp", ".cu", ".h")
    files = (file for name in _SOURCES for file in sorted((root / name).rglob("*")) if file.suffix in suffixes)
    return {f"checksum of the code {file.relative_to(root)}": _checksum(file) for file in files}


def _checksum(file: Path) -> str:
    try:
        return sha256(file)[:12]
    except OSError as error:  # on this node: the ranks differ
        return f"unreadable ({error.strerror})"


def _parts(file: Path) -> str:
    """The size of a file of weights, and a checksum of parts all over it: those of another step differ everywhere."""
    digest = hashlib.sha256()
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            for number in range(_PARTS):
                opened.seek(max(0, size - _PART_BYTES) * number // (_PARTS - 1))
                digest.update(opened.read(_PART_BYTES))
    except OSError as error:
        return f"unreadable ({error.strerror})"
    return f"{digest.hexdigest()[:12]} of {size} bytes"


def _differences(own: dict[str, str], of_main: dict[str, str]) -> list[str]:
    """Each difference in words. The configuration comes first, since it may explain the others."""
    keys = [*of_main, *(key for key in own if key not in of_main)]
    pairs = ((key, own.get(key, _ABSENT), of_main.get(key, _ABSENT)) for key in keys)
    return [f"{key} is {_short(mine)} instead of {_short(theirs)}" for key, mine, theirs in pairs if mine != theirs]


def _short(value: str) -> str:
    return value if len(value) <= 100 else f"{value[:97]}..."


def _ranks(runtime: Runtime, ranks: list[int]) -> str:
    """Such as "rank 1 on a, rank 2 on b and 3 more"."""
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return ", ".join(map(runtime.name_of, ranks[:_NAMED])) + more
