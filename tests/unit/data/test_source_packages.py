"""Reading out of packages: what is found, what is refused, and what is said where a tool is missing."""

import pytest

from m6.data.sources import packages
from m6.data.sources.packages import DebianPackage, NpmPackage, PipPackage, members, tree_sha256
from m6.errors import UserError
from tests.fixtures.packages import write_tar


def test_members_streams_only_what_matches(tmp_path):
    tar = write_tar(tmp_path / "a.tgz", {"package/a.json": b"1", "package/b.txt": b"2", "package/c.json": b"3"})
    assert [(m[1], content) for m, content in members(tar, r"package/(\w)\.json")] == [("a", b"1"), ("c", b"3")]


def test_a_tarball_with_another_checksum_is_refused(tmp_path):
    package = NpmPackage("@scope/name", "1.0.0", "MIT", "0" * 64)
    write_tar(tmp_path / "npm" / "scope-name-1.0.0.tgz", {"package/a": b""})
    with pytest.raises(UserError, match=r"scope-name-1\.0\.0\.tgz is not @scope/name@1\.0\.0"):
        package.tarball(tmp_path)


def test_missing_tools_and_packages_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(packages.shutil, "which", lambda tool: None)
    with pytest.raises(UserError, match=r"npm is not installed, and a@1 has to be fetched.*npm pack a@1.*a-1\.tgz"):
        NpmPackage("a", "1", "MIT", "").tarball(tmp_path)
    with pytest.raises(UserError, match="apt-get is missing; stamps"):
        DebianPackage("stamps", "GPL").archive(tmp_path)
    with pytest.raises(UserError, match="no-such is not installed: pip install"):
        PipPackage("no-such", "no_such_module", "MIT").folder()


def test_a_failed_fetch_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(packages.shutil, "which", lambda tool: tool)
    script = tmp_path / "npm"
    script.write_text("#!/bin/sh\necho 'code E404' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(UserError, match="npm: a@1 cannot be fetched: code E404"):
        NpmPackage("a", "1", "MIT", "").tarball(tmp_path / "cache")
    assert list((tmp_path / "cache" / "npm").iterdir()) == []


@pytest.mark.parametrize("home", [None, "", "/nonexistent"])
def test_npm_has_folders_to_write(home, tmp_path, monkeypatch):
    """Of a user without an entry in passwd, as in OpenShift, or with a home folder that is read-only."""
    script = tmp_path / "npm"
    script.write_text(
        "#!/bin/sh\n"
        '[ "$HOME" ] && mkdir -p "$npm_config_cache" || { echo "no home folder" >&2; exit 1; }\n'
        'for folder; do :; done; echo "$HOME" >"$folder/a.tgz"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("npm_config_cache", "/proc/none")
    monkeypatch.delenv("HOME") if home is None else monkeypatch.setenv("HOME", home)
    with pytest.raises(UserError, match="its SHA-256 differs"):  # so it was fetched
        NpmPackage("a", "1", "MIT", "").tarball(tmp_path / "cache")
    assert ((tmp_path / "cache" / "npm" / "a-1.tgz").read_text() == "/nonexistent\n") == (home == "/nonexistent")


def test_a_tree_checksum_ignores_the_order(tmp_path):
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("2")
    both = [tmp_path / "a", tmp_path / "b"]
    assert tree_sha256(both) == tree_sha256(reversed(both))
    before = tree_sha256(both)
    (tmp_path / "b").write_text("3")
    assert tree_sha256(both) != before
