"""The arrows between the folders of ``m6``: none goes up, not even inside of a function."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# From the lowest level to the highest. Units of one level do not import each other.
LEVELS = {
    "m6": (
        {"decoding", "errors"},
        {"colours", "files", "fonts", "formatting", "shipped"},
        {"renamed", "validation"},
        {"architecture", "lock"},
        {"tokenizers"},
        {"model"},
        {"data"},
        {"config", "corpus"},
        {"runs"},
        {"checkpoints"},
        {"generation", "slurm", "export"},
        {"evaluation"},
        {"training"},
        {"planning"},
        {"plots", "serving"},
        {"cli"},
    ),
    "m6.training": (
        {"faults", "meta_model", "pass_orders", "sizes"},
        {"fake_world", "optimizers", "reduction"},
        {"deepspeed_private"},
        {"mesh"},
        {"replicas"},
        {"offloading"},
        {"engine"},
        {"stages", "reporting", "checkpointing", "tokenizers"},
        {"train_step", "evaluation"},
        {"loop"},
    ),
    "m6.planning": (
        {"machine", "loss", "routed"},
        {"recipes"},
        {"cost"},
        {"search"},
        {"booking", "dry_plan", "dry_run", "prediction", "replan", "reports"},
        {"shipped"},
    ),
}


def arrows(package: str) -> Iterator[tuple[str, str, str]]:
    """(unit that imports, unit that is imported, where) inside of a package."""
    depth = package.count(".") + 1
    for file in sorted((ROOT / package.replace(".", "/")).rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        unit = parts[depth]
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if unit.startswith("__"):
                continue
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                names = [node.module] if node.module != package else [f"{package}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                if name.startswith(f"{package}.") and (target := name.split(".")[depth]) != unit:
                    yield unit, target, f"{'/'.join(parts)}.py:{node.lineno}"


def upward(found: Sequence[tuple[str, str, str]], levels: Sequence[set[str]]) -> list[str]:
    """The arrows that do not go down."""
    level = {unit: number for number, units in enumerate(levels) for unit in units}
    return [f"{where}: {unit} imports {target}" for unit, target, where in found if level[target] >= level[unit]]


@pytest.mark.parametrize("package", LEVELS)
def test_no_arrow_goes_up(package: str):
    found = list(arrows(package))
    assert found, "the walk found no imports"
    assert not upward(found, LEVELS[package])


@pytest.mark.parametrize("package", LEVELS)
def test_every_unit_has_a_level(package: str):
    folder = ROOT / package.replace(".", "/")
    units = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    assert {unit for unit in units if not unit.startswith("__")} == set().union(*LEVELS[package])


def test_an_arrow_that_goes_up_is_found():
    levels = ({"low"}, {"middle", "beside"}, {"high"})
    found = [("high", "low", "a:1"), ("low", "high", "b:2"), ("middle", "beside", "c:3")]
    assert upward(found, levels) == ["b:2: low imports high", "c:3: middle imports beside"]
