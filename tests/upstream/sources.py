"""transformers' common tests, from its source distribution. They are not in its package, and not copied here."""

import contextlib
import importlib
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from types import ModuleType

import transformers

PACKAGE = "transformers_common_tests"
# These files of transformers' repository are not in its source distribution. The common tests inherit from the classes,
# and need the rest to begin.
STUBS = {
    f"{PACKAGE}/__init__.py": "",
    f"{PACKAGE}/exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    f"{PACKAGE}/generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    f"{PACKAGE}/utils/test_configuration_utils.py": "config_common_kwargs = {}\n",
    f"{PACKAGE}/fixtures/sample_text.txt": "A sample. 一个例子。\n",
    "fetch_hub_objects_for_ci.py": "def url_to_local_path(url, *_, **__):\n    return url\n",
}


def make_importable(cache: Path) -> str:
    """Makes ``PACKAGE`` importable: the common tests of the installed version of transformers.

    Args:
        cache: a folder that keeps them for later runs.

    Returns:
        why they are not there, such as without a package index; empty if they are.
    """
    version = transformers.__version__
    target = cache / f"transformers-{version}-tests"
    if not target.exists():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                problem = _extract(version, Path(folder))
                if problem:
                    return problem
                with contextlib.suppress(OSError):  # another process was first
                    os.rename(Path(folder) / "tests", target)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"no common tests of transformers {version}: {error}"
    sys.path.insert(0, str(target))
    return ""


def _extract(version: str, folder: Path) -> str:
    """Downloads the source distribution and writes its common tests to ``folder/tests``; returns a problem."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-binary",
        ":all:",
    ]
    command = [*pip, "--dest", str(folder), f"transformers=={version}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    archive = folder / f"transformers-{version}.tar.gz"
    if not archive.exists():
        return f"no source distribution of transformers {version}: {ended.stderr.strip()[-300:]}"
    with tarfile.open(archive) as tar:
        for member in tar:
            parts = Path(member.name).parts
            if len(parts) == 3 and parts[1] == "tests" and parts[2].endswith(".py"):
                content = tar.extractfile(member)
                assert content is not None
                _write(folder / "tests" / PACKAGE / parts[2], content.read())
    for name, text in STUBS.items():
        _write(folder / "tests" / name, text.encode())
    return ""


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


def module(name: str) -> ModuleType:
    """A module of the common tests."""
    return importlib.import_module(f"{PACKAGE}.{name}")
