"""Compiles one C++ file into a shared library in the user's cache folder, or finds it there."""

import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path


def load_library(source: Path, flags: Sequence[str], compilers: Sequence[str], without_it: str) -> ctypes.CDLL | None:
    """Loads the shared library of a C++ file, and compiles it first if the cache does not have it.

    The cache is ``$XDG_CACHE_HOME/m6-recipes/kernels`` or ``~/.cache/m6-recipes/kernels``. Callers keep the result,
    since each call starts the compiler to ask for its version. ``M6_RECIPES_BUILD=0`` in the environment forbids the
    compilation, but not loading from the cache.

    Args:
        source: the C++ file.
        flags: options of the compiler. They have to contain ``-shared``.
        compilers: programs to look for on PATH, best first, if the environment variable ``CXX`` names none.
        without_it: the user's loss without the library; begins the warning.

    Returns:
        The library; None, after a warning, if it cannot be compiled or loaded.
    """
    try:
        return ctypes.CDLL(str(_build(source, flags, compilers)))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:  # RuntimeError: a user without a home
        reason = getattr(error, "stderr", None) or str(error)
        warnings.warn(f"{without_it}, since the kernel could not be built: {reason.strip()}", stacklevel=3)
        return None


def remembered(library: ctypes.CDLL, name: str, decide: Callable[[], str], otherwise: str) -> str:
    """The result of the first call of ``decide`` on this machine. All later processes get the same result.

    The answer is stored in a file next to the library. If several processes ask at the same time, all get the answer
    of the first one to write.

    Args:
        library: of ``load_library``.
        name: of the question. It has to contain everything on which the answer depends.
        otherwise: the answer if it cannot be stored. Two processes then still have the same answer.
    """
    path = Path(f"{library._name}.{hashlib.sha256(name.encode()).hexdigest()[:16]}.txt")
    try:
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                written = Path(folder) / path.name
                written.write_text(decide(), encoding="utf-8")
                written.chmod(0o600)
                with contextlib.suppress(FileExistsError):
                    os.link(written, path)
        _check_private(path)
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return otherwise


def processor_name() -> str:
    """The model of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _build(source: Path, flags: Sequence[str], compilers: Sequence[str]) -> Path:
    """Returns the library's path in the cache.

    The file's name contains a checksum of the source, the compiler and the flags. The library is compiled under a
    temporary name and then linked to its own. So several processes may compile it at the same time. There is no lock,
    so no process waits for one left by a killed process. No process loses a mapped file.
    """
    compiler = shlex.split(os.environ.get("CXX", "")) or [path for path in map(shutil.which, compilers) if path][:1]
    if not compiler:
        raise FileNotFoundError(f"no C++ compiler: install {compilers[0]}, or name a compiler in CXX")
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
    identity = [source.read_text(encoding="utf-8"), *compiler, *flags, version]
    if "-march=native" in flags:
        identity.append(_processor())  # unlike machines may share a home directory
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "m6-recipes" / "kernels"
    checksum = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:16]
    library = cache / f"{source.stem}_{checksum}.so"
    if not library.exists():
        if os.environ.get("M6_RECIPES_BUILD") == "0":
            raise PermissionError(f"M6_RECIPES_BUILD is 0, and there is no {library}")
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            compiled = Path(folder) / library.name
            command = [*compiler, *flags, str(source), "-o", str(compiled)]
            subprocess.run(command, capture_output=True, text=True, check=True)
            compiled.chmod(0o700)  # whatever the umask: files writable by others are not loaded
            with compiled.open("rb") as file:
                os.fsync(file.fileno())
            try:
                os.link(compiled, library)
            except FileExistsError:
                pass
            except OSError:  # a file system without links
                os.replace(compiled, library)
    for path in (cache, library):
        _check_private(path)
    return library


def _check_private(path: Path) -> None:
    """Raises PermissionError if another user could have written the file."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"{path} is a link, belongs to another user or can be written by others: remove it, or name another folder "
            "in XDG_CACHE_HOME"
        )


def _processor() -> str:
    """The instruction sets of this processor. ``-march=native`` depends on them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
