"""What would hold a run that does not fit."""

from m6.planning.reports import no_plan_report
from m6.planning.search.neighbours import smallest_cluster
from m6.planning.search.planner import Planner
from tests.fixtures.plans import planner


def test_the_smallest_cluster_that_holds_a_run():
    subject = planner("m6t_100b", "a100_80g_x128", world=8)
    assert not subject.search().plans
    cluster = smallest_cluster(subject)
    assert cluster is not None
    assert Planner(subject.config, cluster).search().plans
    assert not Planner(subject.config, cluster.first(cluster.num_devices // 2)).search().plans


def test_experts_that_lamb_cannot_update_are_streamed_with_an_optimizer_that_can():
    subject = planner("m6t_100b", "a100_80g_x128", "optimizer.type=Lamb", "zero_optimization.stage=1", world=8)
    result = subject.search()
    assert not result.plans
    needed = 'm6.offload with "update": "next_forward" and "optimizer.type": "Adafactor"'
    assert needed in no_plan_report(subject, result)
