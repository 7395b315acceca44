"""Is this node fit for an attempt? Run on every node before each: ``python -m m6.slurm.preflight REPORTS``.

Needs the standard library alone. Writes REPORTS/NODE.txt: "ok", or one line for each thing that is wrong. Limits
come from the environment, see scripts/slurm/cluster.env.example.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

_GIB = 2**30
_GPU_FIELDS = ("index", "temperature.gpu", "memory.used", "ecc.errors.uncorrected.volatile.total")
# What NVIDIA's documentation of Xid errors asks a restart or an exchange for: memory, bus, NVLink, firmware.
_BAD_XIDS = {48, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140}
_XID_AGE_S = 86400.0  # the log goes back to the node's start; a node that was left out for a day is tried again


def limit(name: str, default: float) -> float:
    return float(os.environ.get(name, default))


def check_clock(reports: Path) -> list[str]:
    """The job wrote its time just before: a node's clock is neither behind it nor far ahead."""
    try:
        ahead = time.time() - int((reports / "clock").read_text())
    except FileNotFoundError:
        return [f"{reports}: the run's folder is not shared with this node"]
    allowed = limit("MAX_CLOCK_SKEW_S", 5)
    latest = limit("PREFLIGHT_TIMEOUT_S", 300) + allowed
    return [] if -allowed <= ahead <= latest else [f"the clock is {ahead:+.0f} s off that of the job's first node"]


def check_memory() -> list[str]:
    """Free host memory, room in /dev/shm for the data workers, and leave to pin pages for GPUs."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    problems = []
    free = int(found[1]) * 1024 / _GIB if found else 0.0
    if free < limit("MIN_HOST_MEMORY_GB", 1):
        problems.append(f"{free:.1f} GiB of host memory are free, {limit('MIN_HOST_MEMORY_GB', 1):g} are asked for")
    shared = shutil.disk_usage("/dev/shm").free / _GIB
    if shared < limit("MIN_SHM_GB", 0.05):
        problems.append(f"{shared:.2f} GiB of /dev/shm are free, {limit('MIN_SHM_GB', 0.05):g} are asked for")
    pinned, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if expected_gpus() and pinned != resource.RLIM_INFINITY:
        problems.append(f"only {pinned / _GIB:.2f} GiB of memory may be pinned (ulimit -l)")
    return problems


def expected_gpus() -> int:
    return int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)


def check_gpus(query: str, kernel_log: str, uptime_s: float) -> list[str]:
    """GPUs that are missing, busy, hot, or have errors.

    Args:
        query: what nvidia-smi prints for _GPU_FIELDS, as CSV without header and units; a line for each GPU.
        kernel_log: what dmesg prints; empty where it may not be read.
        uptime_s: seconds since the node's start, from which the log counts too.
    """
    problems = []
    rows = [[field.strip() for field in line.split(",")] for line in query.splitlines() if line.strip()]
    if len(rows) != expected_gpus():
        problems.append(f"{len(rows)} GPUs, {expected_gpus()} are asked for")
    for index, temperature, used, errors in rows:
        if _number(temperature) > limit("MAX_GPU_TEMPERATURE_C", 80):
            problems.append(f"GPU {index}: {temperature} C before anything runs")
        if _number(used) > limit("MAX_GPU_MEMORY_USED_MB", 1024):
            problems.append(f"GPU {index}: not idle, {used} MiB are in use")
        if _number(errors) > 0:
            problems.append(f"GPU {index}: {errors} uncorrected ECC errors since the driver was loaded")
    found = re.findall(r"^\[ *([\d.]+)\].*NVRM: Xid .*?: (\d+),", kernel_log, re.MULTILINE)
    xids = {int(number) for stamp, number in found if uptime_s - float(stamp) < _XID_AGE_S} & _BAD_XIDS
    if xids:
        problems.append(f"the kernel's log has Xid {', '.join(map(str, sorted(xids)))}")
    return problems


def check_site() -> list[str]:
    """The site's own check: a shell command that fails on a node that is not fit and says why."""
    command = os.environ.get("PREFLIGHT_HOOK")
    if not command:
        return []
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    said = " ".join((result.stdout + result.stderr).split())
    return [f"PREFLIGHT_HOOK: {said or f'exit code {result.returncode}'}"] if result.returncode else []


def check_node(reports: Path) -> list[str]:
    """Everything that is wrong with this node."""
    problems = [*check_clock(reports), *check_memory(), *check_site()]
    if expected_gpus():
        query = _output("nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits")
        problems += check_gpus(query, _output("dmesg"), time.clock_gettime(time.CLOCK_BOOTTIME))
    return problems


def main() -> None:
    reports = Path(sys.argv[1])
    try:
        problems = check_node(reports)
    except Exception as error:  # a check that breaks is a finding, not a reason to say nothing
        problems = [f"preflight itself failed: {type(error).__name__}: {error}"]
    node = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    temporary = reports / f".{node}.tmp"
    temporary.write_text("\n".join(problems or ["ok"]) + "\n", encoding="utf-8")
    temporary.rename(reports / f"{node}.txt")


def _number(text: str) -> float:
    """0 for what a GPU does not report, such as ``[N/A]``."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def _output(*command: str) -> str:
    """What a command prints; empty where it is missing or refused."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout if result.returncode == 0 else ""


if __name__ == "__main__":
    main()
