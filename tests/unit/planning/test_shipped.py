"""The committed plans are what the planner says today, and argue what they are there to argue."""

import re

import pytest

from m6.planning.shipped import PLANS, SHIPPED, shipped_plan


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in ("m6_1t", "m6_10t") else name for name in SHIPPED]
)
def test_plans_are_fresh(name: str):
    assert (PLANS / f"{name}.md").read_text(encoding="utf-8") == shipped_plan(name), (
        "write them anew: python -m m6.planning.shipped"
    )


def test_no_other_plans_lie_there():
    assert {path.stem for path in PLANS.glob("*.md")} == {*SHIPPED, "README"}


def test_what_they_argue():
    trillion, ten = ((PLANS / f"{name}.md").read_text(encoding="utf-8") for name in ("m6_1t", "m6_10t"))
    why = trillion.split("## Why not with Adam")[1]
    assert "33,420,214,272 bytes" in why  # 16 for each of a rank's 2 experts x 24 layers x 2 x 1024 x 21248
    assert "**no layout fits**" in why
    assert re.search(r"of 30\.92 GB on V100, \d+\.\d\d GB too much", why)
    assert "| **in all** | 50,000 |" in ten
    assert "## The same with capacity k" in ten
