"""What every test shares: one thread, no hub, caches of their own, no limits of time."""

import gc
import os
import signal
import tempfile

# Before anything imports torch or datasets, which read these once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="m6-tests-hf-")
# Kernels are compiled once for all workers, which inherit the folder. scripts/mutation.py names a cache of its own, so
# that not every mutant compiles them again.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["XDG_CACHE_HOME"] = os.environ.get("M6_TESTS_CACHE") or tempfile.mkdtemp(prefix="m6-tests-cache-")
os.environ["WANDB_MODE"] = "offline"

import pytest
from hypothesis import HealthCheck, settings

# No test fails because a machine is busy, or by chance; FUZZ=1 looks at new examples each time.
settings.register_profile(
    "m6", deadline=None, derandomize="FUZZ" not in os.environ, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("m6")


# A trainer in this process sets and at its end ignores them; programs that later tests start would ignore them, too.
_HANDLERS = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}


def pytest_collection_finish() -> None:
    """Leaves out of later collections of garbage what was imported: half a million objects, for half a second each."""
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown() -> None:
    """Gives signals back their meaning."""
    for number, handler in _HANDLERS.items():
        signal.signal(number, handler)


def pytest_configure(config: pytest.Config) -> None:
    """Hides GPUs from all tests but those of ``-m gpu``: the others start several ranks, for which one is too few."""
    chosen = config.option.markexpr
    if "gpu" not in chosen or "not gpu" in chosen:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["DS_ACCELERATOR"] = "cpu"
