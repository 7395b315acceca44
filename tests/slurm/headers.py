"""The headers of the job scripts."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for path in (ROOT / "scripts" / "slurm").glob("*.sbatch") if path.name != "pretrain.sbatch")


def header(script: Path) -> dict[str, str]:
    """The options of sbatch in a script: name to value, empty for one that takes none."""
    lines = [line.split()[1] for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    return dict(line.removeprefix("--").partition("=")[::2] for line in lines)
