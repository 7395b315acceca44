"""C++ kernels for the host's processor, compiled at first use; the ground that ``moe`` and ``offload`` share."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared")


def load_kernel(source: Path, flags: tuple[str, ...], otherwise: str) -> ctypes.CDLL | None:
    """Compiles a source without dependencies, within seconds, and loads it.

    The library is built under a temporary name and renamed, into a folder named after the source, the compiler and
    the processor. So processes that start together may all build it, none waits for a lock that a killed one left,
    and a home directory that unlike machines share holds one library for each.

    Args:
        flags: of the compiler, besides those that every library needs.
        otherwise: what the user is warned of where there is no compiler.

    Returns:
        None, with the warning, where it could not be built or loaded.
    """
    try:
        return ctypes.CDLL(str(_build(source, (*_FLAGS, *flags))))
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        warnings.warn(f"{otherwise}, since {source.name} could not be built: {reason.strip()}", stacklevel=2)
        return None


def _build(source: Path, flags: tuple[str, ...]) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise OSError("no C++ compiler: install g++, or name one in CXX")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    identity = "\n".join((source.read_text(encoding="utf-8"), *flags, version, _processor()))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "m6-recipes"
    library = cache / f"{source.stem}_{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            built = Path(folder) / library.name
            command = [compiler, *flags, str(source), "-o", str(built)]
            subprocess.run(command, capture_output=True, text=True, check=True)
            built.replace(library)
    return library


def _processor() -> str:
    """What ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
