"""scripts/slurm/lib/rank.sh: compiled code is loaded only from a folder that nobody else can write."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "slurm" / "lib" / "rank.sh"
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR")


def run(temporary: Path, rank: int = 1) -> subprocess.CompletedProcess[str]:
    """Starts a rank that prints where its compiled code goes."""
    variables = {"TMPDIR": temporary, "SLURM_JOB_ID": 7, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    command = ["bash", str(SCRIPT), "printenv", *CACHES]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_compiled_code_goes_to_a_folder_of_the_user_alone(tmp_path: Path):
    for rank in (1, 2, 1):  # the last one is a later attempt
        folder = tmp_path / "m6_7" / str(rank)
        ended = run(tmp_path, rank)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert {Path(line).parent for line in ended.stdout.split()} == {folder}
        for made in (folder, folder.parent):
            assert stat.S_IMODE(made.stat().st_mode) == 0o700


@pytest.mark.parametrize("planted", ["open", "link", "file", "inner", "foreign"])
def test_a_folder_that_another_user_may_have_made(tmp_path: Path, planted: str):
    folder = tmp_path / "m6_7"
    if planted == "link":
        (tmp_path / "elsewhere").mkdir(0o700)
        folder.symlink_to("elsewhere")
    elif planted == "file":
        folder.write_text("")
    else:
        folder.mkdir(0o700)
    if planted == "open":
        folder.chmod(0o770)
    elif planted == "inner":
        (folder / "1").mkdir()
        (folder / "1").chmod(0o755)
    elif planted == "foreign":
        if os.getuid():
            pytest.skip("only root can give a folder away")
        os.chown(folder, 12345, -1)
    ended = run(tmp_path)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith(f"error: {folder}")
    assert "set TMPDIR" in ended.stderr
