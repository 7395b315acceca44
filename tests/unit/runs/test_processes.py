"""Memory that a process on a CPU keeps for its next step, and gives back."""

import platform
import subprocess
import sys

import pytest

CODE = """
import torch
from m6.runs.processes import _keep_freed_memory, return_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

_keep_freed_memory()
before = resident()
pieces = [torch.ones(1 << 20) for _ in range(100)]  # 4 MiB each
pinned = torch.ones(1 << 10)  # lies behind them, so that the end of the heap cannot be cut off
del pieces
kept = resident() - before
return_freed_memory(torch.device("cpu"))
print(round(kept), round(resident() - before))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps memory in this way")
def test_freed_memory_is_kept_until_it_is_returned():
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    kept, left = map(int, ended.stdout.split()[-2:])
    assert kept >= 390, "400 MiB wait for the next step"
    assert left <= 40, "and go back to the kernel"
