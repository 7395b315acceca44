"""The committed page of today's clusters is what the planner says, and the picture is of that page."""

import pytest
from PIL import Image

from m6.plots.todays_clusters import CLUSTERS, DEVICES, PAGE, PICTURE, Sized, digest_of, draw, page_of, plan_size

COMMAND = "python -m m6.plots.todays_clusters"
# Every configuration and every cluster: what changes one row changes others of its configuration or its cluster.
SAMPLE = [("m6_10b", "H100", 64), ("m6_100b", "GB200 NVL72", 64), ("m6_1t", "H200", 512)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "label", "devices"), SAMPLE)
def test_the_rows_are_fresh(name: str, label: str, devices: int):
    begin = f"| {name} | {label} | {devices} "
    [row] = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(begin)]
    key = (name, label, devices)
    assert row in page_of({key: plan_size(*key)}).splitlines(), f"write the page anew: {COMMAND}"


def test_the_sample_has_every_configuration_and_cluster():
    names, labels, _ = zip(*SAMPLE, strict=True)
    assert (set(names), set(labels)) == (set(DEVICES), set(CLUSTERS))


def test_the_rest_is_fresh():
    page = PAGE.read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| m6_")]
    expected = [
        [f"| {name}", label, f"{devices}"]
        for name, numbers in DEVICES.items()
        for label in CLUSTERS
        for devices in numbers
    ]
    assert [row.split(" | ")[:3] for row in rows] == expected
    without = [line for line in page.splitlines() if line not in rows]
    assert without == page_of({}).splitlines(), f"write it anew: {COMMAND}"
    assert Image.open(PICTURE).info["Description"] == digest_of(page), f"draw it anew: {COMMAND}"


def test_a_run_that_does_not_fit_says_what_it_lacks(tmp_path):
    few, enough = ("m6_1t", "H100", 8), ("m6_10b", "H100", 64)
    plans = {key: plan_size(*key) for key in (few, enough)}
    assert plans[few].booked is None
    assert "too much" in plans[few].lacks
    assert plans[enough].booked is not None
    page = page_of(plans)
    assert plans[few].lacks in page
    draw(plans, page, tmp_path / "picture.png")
    assert Image.open(tmp_path / "picture.png").info["Description"] == digest_of(page)


def test_without_plans_a_row_is_empty_but_for_its_reason():
    [row] = [
        line for line in page_of({("a", "H100", 8): Sized(None, None, "lacks it")}).splitlines() if "| a |" in line
    ]
    assert [cell.strip() for cell in row.split("|")[4:-1]] == [""] * 6 + ["lacks it"]
