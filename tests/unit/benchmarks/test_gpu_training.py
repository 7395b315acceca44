"""The page of training steps on a GPU: its column of computed pairs follows from its other figures."""

import re
from pathlib import Path

from m6.config.run import load_config
from m6.model.parameters import num_parameters
from tests.fixtures.pages import ROOT

PAGE = ROOT / "scripts" / "benchmarks" / "results" / "gpu_training.md"
PEAK = 989e12


def flops_of_choices(config: str) -> float:
    """Forward and backward FLOPs of all choices of a token."""
    model = load_config(Path(config)).model
    counts = (num_parameters(model, experts_per_token=experts)["active_per_token"] for experts in (None, 0.0))
    with_all, with_none = counts
    return 6.0 * (with_all - with_none)


def test_the_utilization_of_computed_pairs_is_what_its_formula_says():
    text = PAGE.read_text(encoding="utf-8")
    dropped = float(re.search(r"([\d.]+) % of the \(token, expert\) pairs were dropped", text)[1]) / 100
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    header, _, *rows = rows
    counted, corrected = (next(i for i, name in enumerate(header) if part in name) for part in ("all", "computed"))
    speed, config, checked = header.index("tokens/s"), "", 0
    for row in rows:
        config = {"1": "m6t_base", "2": "m6t_10b"}.get(row[0][0], config)  # "the same": as the row before
        mfu, tokens = float(row[counted].rstrip("%")) / 100, float(row[speed].replace(",", ""))
        share = flops_of_choices(config) / (mfu * PEAK / tokens)
        assert 0.7 < share < 0.8, "three quarters of the FLOPs that were counted are of choices"
        assert row[corrected] == f"{mfu * (1 - dropped * share):.0%}"
        checked += 1
    assert checked == 6
