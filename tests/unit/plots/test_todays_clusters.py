"""The committed page of today's clusters is what the planner says, and the picture is of that page."""

import pytest
from PIL import Image

from m6.config.run import load_config, parse_config
from m6.errors import UserError
from m6.planning.machine.cluster import Cluster, load_cluster
from m6.planning.search.planner import Planner
from m6.planning.search.stages import training_stages
from m6.planning.shipped import SHIPPED
from m6.plots.todays_clusters import CLUSTERS, PAGE, PICTURE, digest_of, draw, least_devices, page_of, plan_size
from m6.shipped import CONFIGS
from m6.validation import read_document

COMMAND = "python -m m6.plots.todays_clusters"


# Every configuration and every cluster: what changes one row changes others of its configuration or its cluster.
SAMPLE = [("m6_100b", "A100-80G"), ("m6_100b", "GB200 NVL72"), ("m6_1t", "H100"), ("m6_10t", "H200")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "label"), SAMPLE)
def test_the_rows_are_fresh(name: str, label: str):
    begin = f"| {name} | {label} "
    [row] = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(begin)]
    assert row in page_of({name: plan_size(name, [label])}).splitlines(), f"write the page anew: {COMMAND}"


def test_the_sample_has_every_configuration_and_cluster():
    names, labels = zip(*SAMPLE, strict=True)
    assert (set(names), set(labels)) == (set(SHIPPED), set(CLUSTERS))


def test_the_rest_is_fresh():
    page = PAGE.read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| m6_")]
    assert [row.split(" | ")[:2] for row in rows] == [[f"| {name}", label] for name in SHIPPED for label in CLUSTERS]
    without = [line for line in page.splitlines() if line not in rows]
    assert without == page_of({}).splitlines(), f"write it anew: {COMMAND}"
    assert Image.open(PICTURE).info["Description"] == digest_of(page), f"draw it anew: {COMMAND}"


@pytest.fixture(scope="module")
def h100() -> Cluster:
    return load_cluster(CONFIGS / "clusters" / "h100_x128.json")


def test_half_as_many_do_not_do(h100: Cluster):
    config = load_config(CONFIGS / "m6_100b.json")
    plan = least_devices(config, h100, time_limit_min=1440)
    assert plan.devices > h100.nodes[0].devices_per_node
    for devices, fits in ((plan.devices, True), (plan.devices // 2, False)):
        stages = training_stages(Planner(config, h100.resized(devices)))
        assert all(stage.search().plans for stage in stages) is fits
    assert plan.total["devices"] == plan.devices
    assert plan.too_few is not None
    assert "too much" in plan.too_few


def test_weights_beyond_all_memory_need_no_search(h100: Cluster, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Planner, "search", lambda self: pytest.fail("a search"))
    document = read_document(CONFIGS / "m6_10t.json") | {"train_batch_size": 32}
    document["train_micro_batch_size_per_gpu"] = 1
    with pytest.raises(UserError, match=r"a batch of 32 has no more devices; needs 20,\d{3} GB for the weights of"):
        least_devices(parse_config(document), h100, time_limit_min=1440)


def test_a_picture_is_of_its_page(tmp_path, h100: Cluster):
    plan = least_devices(load_config(CONFIGS / "m6_100b.json"), h100, time_limit_min=1440)
    sizes = {"one": {"H100": plan}, "two": {"H100": plan}}
    draw(sizes, page_of(sizes), tmp_path / "picture.png")
    picture = Image.open(tmp_path / "picture.png")
    assert picture.info["Description"] == digest_of(page_of(sizes))
    assert len(picture.convert("RGB").getcolors(1 << 24)) > 10
