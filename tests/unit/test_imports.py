"""Who may import whom, and what an import costs."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import moe
import offload
from tests.fixtures.tiny_run import write_tiny_config

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN = {
    "native": {"m6", "moe", "offload", "tests"},
    "moe": {"m6", "offload", "tests"},
    "offload": {"m6", "moe", "tests"},
    "m6": {"tests"},
}
HEAVY = ("deepspeed", "wandb", "datasets", "matplotlib", "tensorboard", "cairosvg", "opencc", "datatrove")


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(file: Path) -> Iterator[tuple[str, int]]:
    """The packages that a file imports anywhere, inside functions too, with the line."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            inside = file.relative_to(ROOT).parts[0]
            yield (inside if node.level else str(node.module).split(".")[0], node.lineno)


@pytest.mark.parametrize("package", FORBIDDEN)
def test_layers_import_downwards_only(package: str):
    found = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in modules(package)
        for name, line in imported(file)
        if name in FORBIDDEN[package]
    ]
    assert not found
    assert modules(package), "the walk found no files"


@pytest.mark.parametrize(("package", "inside_functions"), [("moe", "deepspeed"), ("offload", "scipy")])
def test_the_layers_below_need_torch_alone(package: str, inside_functions: str):
    """Expert parallelism needs DeepSpeed too, and planning needs SciPy: inside their functions."""
    names = {name for file in modules(package) for name, _ in imported(file)}
    assert names - set(sys.stdlib_module_names) <= {package, "native", "torch", inside_functions}
    for file in modules(package):
        top = ast.parse(file.read_text(encoding="utf-8")).body
        outer = [node for node in top if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not [node for node in outer if inside_functions in ast.dump(node)], file


def test_the_builder_of_kernels_needs_nothing():
    names = {name for file in modules("native") for name, _ in imported(file)}
    assert names - set(sys.stdlib_module_names) <= {"native"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        (
            "moe, offload, m6, m6.cli.main, m6.config.run, m6.model, m6.tokenizers, m6.data.pretraining, "
            "m6.training.loop, m6.export",
            HEAVY,
        ),
        # What reads a configuration, a run or data needs no model, whose bases take most of the time.
        (
            "m6.data.pretraining, m6.slurm.status, m6.plots.run, m6.checkpoints.comparison",
            (*HEAVY, "transformers.modeling_utils"),
        ),
    ],
    ids=["everything", "without a model"],
)
def test_imports_are_light(modules: str, heavy: tuple[str, ...]):
    """In a process of its own, since this one has loaded everything."""
    code = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "[]\n"


@pytest.mark.parametrize("package", [moe, offload], ids=lambda package: package.__name__)
def test_a_package_gives_its_names_when_they_are_asked_for(package: ModuleType):
    """``MoEConfig`` alone needs no torch; tests/unit/cli/test_before_torch.py looks at that."""
    tree = ast.parse((ROOT / package.__name__ / "__init__.py").read_text(encoding="utf-8"))
    typed = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert {*package.__all__} == typed - {"import_module", "TYPE_CHECKING", "Any"}
    for name in set(package.__all__) - {"NextWeights"}:  # a Literal
        assert getattr(package, name).__module__.startswith(f"{package.__name__}."), name
        assert getattr(package, name).__name__ == name
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'Layers'"):
        getattr(package, "Layers")  # noqa: B009


LOADED = """
import atexit, sys
from m6.cli.main import main

@atexit.register
def show():
    print(sum(name.split(".")[0] in ("m6", "moe", "native", "offload") for name in sys.modules))

main()
"""
MOST_MODULES = 180
"""Of our modules and packages, in the process of a small training on one rank."""


@pytest.mark.slow
def test_a_small_training_loads_few_modules(tmp_path: Path):
    """Parts that only some runs need are imported where a run asks for them."""
    config = write_tiny_config(tmp_path)
    ended = subprocess.run(
        [sys.executable, "-c", LOADED, "pretrain", str(config), "--run-dir", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) <= MOST_MODULES
