"""Checks the health of a node, before each attempt: ``python -m m6.slurm.preflight CONFIG [OPTIONS] REPORTS``.

CONFIG and OPTIONS are those of ``m6 pretrain``. It runs on every node and writes two files. REPORTS/NODE.txt is "ok",
or has one line per problem. REPORTS/NODE.seen lists the run's folders seen by the node, for a comparison of nodes.
Limits are environment variables, see scripts/slurm/cluster.env.example. Only the standard library is needed, so a
damaged installation of other packages does not hide a sick node.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from m6.files import without_comments
from m6.runs.cards import lacking_kernels

_GIB = 2**30
_GPU_FIELDS = ("index", "temperature.gpu", "memory.used", "ecc.errors.uncorrected.volatile.total")
# Xid errors for which NVIDIA's documentation recommends a restart or a replacement: memory, bus, NVLink, firmware.
_BAD_XIDS = {48, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140}
# Older Xid errors are ignored: the kernel log reaches back to the boot, and an excluded node gets another try.
_XID_AGE_S = 86400.0
_FOLDERS = ("path", "tokenizer", "image_tokenizer")  # of m6.data


def limit(name: str, default: float) -> float:
    """Returns a limit from the environment."""
    return float(os.environ.get(name, default))


def check_clock(reports: Path) -> list[str]:
    """Compares the node's clock with ``reports/clock``, written by the job's first node."""
    try:
        ahead = time.time() - int((reports / "clock").read_text())
    except FileNotFoundError:
        return [f"{reports}: the run's folder is not shared with this node"]
    allowed = limit("MAX_CLOCK_SKEW_S", 5)
    # The file may be as old as the time limit of the whole preflight.
    latest = limit("PREFLIGHT_TIMEOUT_S", 300) + allowed
    return [] if -allowed <= ahead <= latest else [f"the clock is {ahead:+.0f} s off that of the job's first node"]


def check_memory() -> list[str]:
    """Checks free host memory, free space in /dev/shm (for data workers) and the limit of pinned memory (for GPUs)."""
    # MemAvailable, not MemFree: the page cache can be given back.
    available = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    problems = []
    free = int(available[1]) * 1024 / _GIB if available else 0.0
    if free < limit("MIN_HOST_MEMORY_GB", 1):
        problems.append(f"{free:.1f} GiB of host memory are free, {limit('MIN_HOST_MEMORY_GB', 1):g} are required")
    shared = shutil.disk_usage("/dev/shm").free / _GIB
    if shared < limit("MIN_SHM_GB", 0.05):
        problems.append(f"{shared:.2f} GiB of /dev/shm are free, {limit('MIN_SHM_GB', 0.05):g} are required")
    pinned, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if expected_gpus() and pinned != resource.RLIM_INFINITY:
        problems.append(f"only {pinned / _GIB:.2f} GiB of memory may be pinned (ulimit -l)")
    return problems


def expected_gpus() -> int:
    """Returns the number of GPUs of the job on this node, by Slurm."""
    return int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)


def check_gpus(query: str, kernel_log: str, uptime_s: float) -> list[str]:
    """Finds GPUs that are missing, busy, hot, or have errors.

    Args:
        query: output of nvidia-smi for _GPU_FIELDS, as CSV without header and units; one line per GPU.
        kernel_log: output of dmesg; empty if it cannot be read.
        uptime_s: seconds since the boot of the node; the log's time stamps count from there.
    """
    problems = []
    rows = [[field.strip() for field in line.split(",")] for line in query.splitlines() if line.strip()]
    if len(rows) != expected_gpus():
        problems.append(f"{len(rows)} GPUs, {expected_gpus()} are required")
    for index, temperature, used, errors in rows:
        if _number(temperature) > limit("MAX_GPU_TEMPERATURE_C", 80):
            problems.append(f"GPU {index}: {temperature} C while idle")
        if _number(used) > limit("MAX_GPU_MEMORY_USED_MB", 1024):
            problems.append(f"GPU {index}: not idle, {used} MiB are in use")
        if _number(errors) > 0:
            problems.append(f"GPU {index}: {errors} uncorrected ECC errors since the driver was loaded")
    logged = re.findall(r"^\[ *([\d.]+)\].*NVRM: Xid .*?: (\d+),", kernel_log, re.MULTILINE)
    xids = {int(number) for stamp, number in logged if uptime_s - float(stamp) < _XID_AGE_S} & _BAD_XIDS
    if xids:
        problems.append(f"the kernel log has Xid {', '.join(map(str, sorted(xids)))}")
    return problems


def check_kernels(capabilities: str, architectures: str) -> list[str]:
    """Finds GPUs for which the installed PyTorch has no kernels.

    Args:
        capabilities: output of nvidia-smi for index and compute_cap, as CSV without header; one line per GPU.
        architectures: of the build, with blanks between them; empty if they are not known.
    """
    problems = []
    for index, major, minor in re.findall(r"^(\d+), (\d+)\.(\d+)$", capabilities, re.MULTILINE):
        if problem := lacking_kernels((int(major), int(minor)), architectures.split()):
            problems.append(f"GPU {index}, {problem}")
    return problems


def check_site() -> list[str]:
    """Runs the site's shell command PREFLIGHT_HOOK. On a sick node it fails and prints the reason."""
    command = os.environ.get("PREFLIGHT_HOOK")
    if not command:
        return []
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    output = " ".join((result.stdout + result.stderr).split())
    return [f"PREFLIGHT_HOOK: {output or f'exit code {result.returncode}'}"] if result.returncode else []


def check_node(reports: Path) -> list[str]:
    """Returns all problems of this node."""
    problems = [*check_clock(reports), *check_memory(), *check_site()]
    if expected_gpus():
        query = _output("nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits")
        problems += check_gpus(query, _output("dmesg"), time.clock_gettime(time.CLOCK_BOOTTIME))
        # Asked in a separate process. If this PyTorch does not work at all, the training reports it.
        architectures = _output(sys.executable, "-c", "import torch; print(*torch.cuda.get_arch_list())")
        problems += check_kernels(
            _output("nvidia-smi", "--query-gpu=index,compute_cap", "--format=csv,noheader"), architectures
        )
    return problems


def folders_of(config: Path, options: Sequence[str]) -> list[str]:
    """Returns the folders in a run's JSON and options: data, tokenizers and the model of ``--init``."""
    try:
        data = json.loads(without_comments(config.read_text(encoding="utf-8")))["m6"]["data"]
    except (OSError, ValueError, KeyError, TypeError):  # the training reports this mistake
        data = {}
    folders = {name: data[name] for name in _FOLDERS if isinstance(data, dict) and isinstance(data.get(name), str)}
    for option, following in itertools.pairwise([*options, ""]):
        given = option if option.startswith(("--init=", "--set=")) else f"{option}={following}"
        name, _, value = given.partition("=")
        if name == "--init":
            folders["init"] = value
        elif name == "--set" and value.startswith("m6.data.") and "=" in value:
            key, _, chosen = value.removeprefix("m6.data.").partition("=")
            folders |= {key: chosen} if key in _FOLDERS else {}
    return sorted(filter(None, folders.values()))


def main() -> None:
    """Checks this node and writes its report. The report appears atomically."""
    config, *options, last = sys.argv[1:]
    reports = Path(last)
    node = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    try:
        problems = check_node(reports)
        seen = [folder for folder in folders_of(Path(config), options) if Path(folder).exists()]
        (reports / f"{node}.seen").write_text("".join(f"{folder}\n" for folder in seen), encoding="utf-8")
    except Exception as error:  # a failed check is reported as a problem of the node
        problems = [f"preflight itself failed: {type(error).__name__}: {error}"]
    temporary = reports / f".{node}.tmp"
    temporary.write_text("\n".join(problems or ["ok"]) + "\n", encoding="utf-8")
    temporary.rename(reports / f"{node}.txt")


def _number(text: str) -> float:
    """Parses a number; 0 for a value not reported by the GPU, such as ``[N/A]``."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def _output(*command: str) -> str:
    """Returns the output of a command; empty if the command is missing, fails or takes over a minute."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout if result.returncode == 0 else ""


if __name__ == "__main__":
    main()
