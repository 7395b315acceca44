"""The table of contracts in docs/guides/model.md names tests that exist, and every test of the contracts."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CONTRACTS = ("tests/unit/model/test_contracts.py", "tests/unit/export/test_pipelines.py")
OTHERS = ("tests/unit/model/test_generation.py",)


def functions(file: str) -> set[str]:
    body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_the_table_and_the_tests_agree():
    page = (ROOT / "docs/guides/model.md").read_text(encoding="utf-8")
    _, _, table = page.partition("| contract in transformers | here |\n| --- | --- |\n")
    rows = [line.strip("|").rsplit("|", 1) for line in table.splitlines() if line.startswith("|")]
    named = set()
    for contract, here in rows:
        tests = set(re.findall(r"\btest_\w+", here))
        assert tests or here.startswith((" not applicable: ", " not run: ")), contract
        assert "test_" not in contract
        named |= tests
    here = set().union(*map(functions, CONTRACTS))
    assert here <= named
    assert named <= here.union(*map(functions, OTHERS))
