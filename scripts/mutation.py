"""Mutation testing of ``moe`` and ``offload``: small changes of the code that the tests of the module ought to notice.

    python scripts/mutation.py --number 60

One mutant of each file is drawn in turn, so a larger ``--number`` extends the sample. Each runs in a copy of the code
with the tests that mirror its module. Mutants in the result run again only if their file or its tests have
changed. A verdict is written into the result by hand: the test for a survivor, or why no test tells it from the code.

It is our own, because mutmut replaces functions by others whose signatures PyTorch's custom operators cannot read, and
cosmic-ray starts a process that loads PyTorch for every mutant.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import hashlib
import importlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "scripts/benchmarks/results/mutation.json"
PACKAGES = ("moe", "offload")
# Tests of a file with another name than its own.
OTHER_TESTS = {
    "moe/activations.py": ("tests/unit/moe/kernels/test_experts_op.py", "tests/unit/moe/test_layer.py"),
    "moe/autograd.py": ("tests/unit/moe/test_precision.py",),
    "moe/dispatch.py": ("tests/unit/moe/test_exchange.py", "tests/unit/moe/test_layer.py"),
    "moe/exchange_steps.py": ("tests/unit/moe/test_expert_parallel.py",),
    "moe/expert_parallel.py": ("tests/unit/moe/test_shared_tokens.py",),
    "moe/experts.py": ("tests/unit/moe/test_layer.py", "tests/unit/moe/kernels/test_experts_op.py"),
    "moe/kernels/compiled.py": ("tests/unit/moe/kernels/test_products.py",),
    "moe/kernels/experts_op.py": ("tests/unit/moe/test_layer.py",),
    "moe/losses.py": ("tests/unit/moe/test_layer.py",),
    "moe/routing.py": ("tests/unit/moe/test_layer.py",),
    "offload/devices/device.py": ("tests/unit/offload/devices/test_simulated.py",),
    "offload/devices/simulated.py": ("tests/unit/offload/devices/test_simulated.py",),
    "offload/optimizer/master_weights.py": ("tests/unit/offload/optimizer/test_update.py",),
    "offload/plan/placement.py": ("tests/unit/offload/plan/test_solver.py",),
    "offload/plan/solver.py": ("tests/unit/offload/plan/test_solver.py",),
    "offload/runtime/activations.py": ("tests/unit/offload/runtime/test_arena.py",),
    "offload/runtime/dry_run.py": (
        "tests/unit/offload/runtime/test_activations.py",
        "tests/unit/offload/runtime/test_runtime.py",
    ),
    "offload/memory/layout.py": (
        "tests/unit/offload/plan/test_chunk_size.py",
        "tests/unit/offload/plan/test_timeline.py",
    ),
}
_PAIRS = ((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn))
COMPARISONS: dict[type, type] = {one: other for pair in _PAIRS for one, other in (pair, pair[::-1])}
ARITHMETIC: dict[type, type] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
ARITHMETIC |= dict.fromkeys((ast.FloorDiv, ast.Mod, ast.Pow), ast.Mult)


@dataclass(frozen=True)
class Mutant:
    """One expression or statement, from ``begin`` to ``end`` (line, column), becomes ``after``.

    ``key`` names it by its text and by ``ordinal``, the number of equal changes before it: edits above do not matter.
    """

    path: str
    ordinal: int
    begin: tuple[int, int]
    end: tuple[int, int]
    before: str
    after: str

    @property
    def key(self) -> str:
        text = f"{self.path}\n{self.ordinal}\n{self.before}\n{self.after}"
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def apply(self, source: str) -> str:
        """Returns the mutated source."""
        lines = source.encode().splitlines(keepends=True)  # columns of ``ast`` count bytes
        offsets = [sum(map(len, lines[: line - 1])) + column for line, column in (self.begin, self.end)]
        text = source.encode()
        return (text[: offsets[0]] + self.after.encode() + text[offsets[1] :]).decode()


def changed(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the mutations of one node."""
    own: Any = copy.deepcopy(node)
    if isinstance(own, ast.Compare) and len(own.ops) == 1:
        own.ops = [COMPARISONS[type(own.ops[0])]()]
        yield own
    elif isinstance(own, ast.BinOp | ast.AugAssign) and type(own.op) in ARITHMETIC:
        own.op = ARITHMETIC[type(own.op)]()
        yield own
    elif isinstance(own, ast.BoolOp):
        own.op = ast.Or() if isinstance(own.op, ast.And) else ast.And()
        yield own
    elif isinstance(own, ast.UnaryOp) and isinstance(own.op, ast.Not | ast.USub):
        yield own.operand
    elif isinstance(own, ast.Constant) and isinstance(own.value, bool):
        yield ast.Constant(not own.value)
    elif isinstance(own, ast.Constant) and isinstance(own.value, int | float):
        yield ast.Constant(own.value + 1)
        yield ast.Constant(own.value - 1)
    elif isinstance(own, ast.IfExp):
        own.body, own.orelse = own.orelse, own.body
        yield own
    elif isinstance(own, ast.Call) and len(own.args) > 1 and not any(isinstance(a, ast.Starred) for a in own.args[:2]):
        own.args[:2] = own.args[1::-1]
        yield own
    elif (isinstance(own, ast.Expr) and isinstance(own.value, ast.Call)) or (
        isinstance(own, ast.Assign) and isinstance(own.targets[0], ast.Attribute | ast.Subscript)
    ):
        yield ast.Pass()


def mutants_of(path: str) -> list[Mutant]:
    """All mutants of a file, in the order of the code. Annotations, messages of errors and imports are left out."""
    source = (ROOT / path).read_text(encoding="utf-8")
    found: list[Mutant] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.Assert | ast.JoinedStr):
            return
        if isinstance(node, ast.expr | ast.stmt) and not isinstance(node, ast.FunctionDef | ast.ClassDef):
            end = (node.end_lineno or 0, node.end_col_offset or 0)
            for other in changed(node):
                before = ast.get_source_segment(source, node) or ""
                after = ast.unparse(other)
                after = f"({after})" if isinstance(other, ast.expr) and not isinstance(other, ast.Constant) else after
                ordinal = sum((each.before, each.after) == (before, after) for each in found)
                found.append(Mutant(path, ordinal, (node.lineno, node.col_offset), end, before, after))
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        visit(child)

    visit(ast.parse(source))
    return found


def tests_of(path: str) -> list[str]:
    """The tests that mirror a module, and those of other names."""
    module = Path(path)
    own = Path("tests/unit") / module.parent / f"test_{module.name}"
    tests = [str(own)] * (ROOT / own).exists() + [*OTHER_TESTS.get(path, ())]
    if not tests and path.startswith("offload/"):  # the runtime uses every part, for several budgets
        tests = ["tests/unit/offload/test_invariance.py", "tests/unit/offload/runtime/test_runtime.py"]
    return tests


def sample(number: int, seed: int, paths: list[str]) -> list[Mutant]:
    """Draws one mutant of each file in turn."""
    piles = []
    for path in paths:
        pile = mutants_of(path)
        random.Random(f"{seed} {path}").shuffle(pile)
        piles.append(pile)
    turns = [mutant for turn in zip_longest(*piles) for mutant in turn if mutant is not None]
    return turns[:number]


def run_tests(tree: Path, tests: list[str]) -> None:
    """Runs in a child process; its exit code is pytest's."""
    os.setsid()
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    os.environ["PYTHONPATH"] = str(tree)  # for the processes that tests start
    os.environ["M6_TESTS_CACHE"] = str(tree / ".cache")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    pytest = importlib.import_module("pytest")
    os._exit(int(pytest.main(["-x", "-q", "-n0", "-p", "no:cacheprovider", "-m", "not slow", *tests])))


def outcome(tree: Path, tests: list[str], timeout_s: float) -> tuple[str, float]:
    """Runs the tests on the tree as it is: "survived" if all pass, otherwise "killed" or "timeout"; and seconds."""
    begin = time.monotonic()
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(tree, tests))
    process.start()
    process.join(timeout_s)
    timed_out = process.exitcode is None
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    result = "timeout" if timed_out else "killed" if process.exitcode else "survived"
    return result, round(time.monotonic() - begin, 1)


def write(results: dict[str, dict[str, Any]]) -> None:
    """Writes the result and its page, which lists survivors and what has a verdict."""
    RESULT.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    outcomes = [each["outcome"] for each in results.values()]
    text = f"""# Mutation testing of `moe` and `offload`

`python scripts/mutation.py --help` says how, and what a verdict is. {time.strftime("%Y-%m-%d")}: of {len(outcomes)} mutants of
{len({each["path"] for each in results.values()})} files {outcomes.count("killed")} are killed by the tests of their module, {outcomes.count("timeout")} by the time limit, and {outcomes.count("survived")} survive.
Below are those that survived when they were first run.

| file | line | code | mutant | now | verdict |
| --- | ---: | --- | --- | --- | --- |
"""  # noqa: E501
    for each in sorted(results.values(), key=lambda each: (each["path"], each["line"])):
        if each["outcome"] == "survived" or each["verdict"] != "open":
            before, after = (" ".join(each[name].split()).replace("|", "\\|") for name in ("before", "after"))
            cells = [each["path"], each["line"], f"`{before}`", f"`{after}`", each["outcome"], each["verdict"]]
            text += f"| {' | '.join(map(str, cells))} |\n"
    RESULT.with_suffix(".md").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=60, help="size of the sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--under", default="", help="only files whose path begins so, such as moe/kernels")
    options = parser.parse_args()
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    tracked = [name for name in files.stdout.splitlines() if (ROOT / name).is_file()]
    paths = [p for p in tracked if p.endswith(".py") and p.split("/")[0] in PACKAGES and p.startswith(options.under)]
    results: dict[str, dict[str, Any]] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for name in ("torch._dynamo", "hypothesis", "scipy.optimize", "pytest"):
        importlib.import_module(name)  # once for all children
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in tracked:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
        for mutant in sample(options.number, options.seed, paths):
            tests, path = tests_of(mutant.path), tree / mutant.path
            state = hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in (mutant.path, *tests))).hexdigest()[
                :12
            ]
            old = results.get(mutant.key, {"verdict": "open"})
            if old.get("state") == state:
                continue
            key = " ".join(tests)
            if key not in seconds:
                unchanged, seconds[key] = outcome(tree, tests, 900)
                if unchanged != "survived":
                    raise SystemExit(f"{key} fail without a mutation")
            source = path.read_text(encoding="utf-8")
            path.write_text(mutant.apply(source), encoding="utf-8")
            found, spent = outcome(tree, tests, 30 + 3 * seconds[key])
            path.write_text(source, encoding="utf-8")
            results[mutant.key] = {
                **{"path": mutant.path, "line": mutant.begin[0], "before": mutant.before, "after": mutant.after},
                **{"outcome": found, "seconds": spent, "state": state, "verdict": old["verdict"]},
            }
            print(found, spent, f"{mutant.path}:{mutant.begin[0]}", repr(mutant.before), repr(mutant.after), flush=True)
            write(results)
    write(results)  # with verdicts that were written since


if __name__ == "__main__":
    main()
