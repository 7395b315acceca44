"""The committed plans are what the planner says today, and argue what they are there to argue."""

import re

import pytest

from m6.config.run import load_config
from m6.planning.shipped import PLANS, SHIPPED, shipped_plan
from m6.shipped import CONFIGS
from moe.expectation import expected_routing

LARGE = [name for name in SHIPPED if name != "m6t_100b"]  # minutes of search by the same code


@pytest.mark.slow
@pytest.mark.parametrize("name", ["m6t_100b", *(pytest.param(name, marks=pytest.mark.nightly) for name in LARGE)])
def test_plans_are_fresh(name: str):
    assert (PLANS / f"{name}.md").read_text(encoding="utf-8") == shipped_plan(name), (
        "write them anew: python -m m6.planning.shipped"
    )


def test_no_other_plans_lie_there():
    assert {path.stem for path in PLANS.glob("*.md")} == {*SHIPPED, "README", "recipes"}


def page(name: str) -> str:
    return (PLANS / f"{name}.md").read_text(encoding="utf-8")


def test_480_gpus_of_32_gb_need_adafactor():
    """M6-T (arXiv 2105.15082): with Adam in 16 bits on the device an expert parameter takes 16 bytes."""
    plan, why = page("m6t_1t").split("## Why not with Adam")
    assert re.search(r"^\*\*world 480, ep 480, .*, stream experts,", plan, re.MULTILINE)
    experts = 2 * 24 * 2 * 1024 * 21248  # of a rank
    assert f"{16 * experts:,} bytes" in why
    assert "**no layout fits**" in why
    found = re.search(r"of 30\.92 GB on V100, (\d+\.\d\d) GB too much", why)
    assert found is not None
    # Sixteen bytes for each expert parameter alone are over the 0.9 of 32 GiB that may be planned for.
    assert float(found[1]) > (16 * experts - 0.9 * 32 * 2**30) / 1e9 > 0


def booked(name: str) -> list[str]:
    """The cells of the plan's line of booking, of both stages together if there are two."""
    last = "**in all**" if name == "m6_10t" else "real"
    [line] = [line for line in page(name).split("## The same")[0].splitlines() if line.startswith(f"| {last} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize(
    ("name", "days", "samples_per_s"), [("m6t_100b", 1.5, 772), ("m6t_1t", 3, 0), ("m6_10t", 10, 0)]
)
def test_recipes_end_within_the_days_of_the_papers(name: str, days: float, samples_per_s: float):
    """Whale (ATC 2022), section 5.3.2; M6-T's 3 days by Alibaba's article of August 2021; M6-10T's abstract."""
    cells = booked(name)
    assert float(cells[3].replace(",", "")) >= samples_per_s
    assert float(cells[4].split()[0]) <= days


@pytest.mark.parametrize("name", SHIPPED)
def test_at_most_a_quarter_of_a_step_waits_for_the_exchange(name: str):
    plan = page(name).split("## The same")[0].split("## Why not")[0]
    shares = [float(share) for share in re.findall(r"^\| exchange \| \S+ \| (\S+)% \|$", plan, re.MULTILINE)]
    assert len(shares) == (2 if name == "m6_10t" else 1)
    assert max(shares) <= 25


def test_the_page_of_the_papers_names_the_days_of_the_plans():
    days, ranges = zip(*(booked(name)[4].rstrip(")").split(" (") for name in SHIPPED), strict=True)
    said = f"{days[0]}, {days[1]} and {days[2]} days (ranges {', '.join(ranges)})"
    assert said in " ".join((CONFIGS / "papers" / "README.md").read_text(encoding="utf-8").split())


def test_ten_trillion_say_how_many_tokens_have_no_expert():
    moe = load_config(CONFIGS / "papers" / "m6_10t.json").model.moe_config()
    shares = [expected_routing(moe, tokens).tokens_without_expert for tokens in (2048, 4096)]
    assert shares == pytest.approx([0.78, 0.87], abs=0.01)
    found = re.search(r"\*\*(\d+)% to (\d+)% of the tokens get no expert in a layer\*\*: of 2,048", page("m6_10t"))
    assert [int(share) for share in found.groups()] == [round(100 * share) for share in shares]
    for name in ("m6t_100b", "m6t_1t"):
        assert "get no expert" not in page(name)


@pytest.mark.parametrize("name", SHIPPED)
def test_plans_count_the_experts_that_compute(name: str):
    """Every prediction of a loss stands below the experts that it counts."""
    lines = [line for line in page(name).splitlines() if line.startswith(("Experts that compute", "Predicted "))]
    assert len(lines) == (4 if name == "m6_10t" else 2)
    for experts, loss in zip(lines[::2], lines[1::2], strict=True):
        computed, chosen = re.match(r"Experts that compute a token of a sparse layer: (\S+) of (\d+)", experts).groups()
        assert 0 < float(computed) < int(chosen)
        assert "Muon, wsd and rotary positions, which are not this run's (AdamW" in loss


def test_ten_trillion_with_capacity_k_stand_beside():
    assert "## The same with capacity k" in page("m6_10t")
