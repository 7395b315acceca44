"""What would hold a run that does not fit."""

from m6.planning.search.planner import Planner
from m6.planning.search.requirements import smallest_cluster
from tests.fixtures.plans import planner


def test_the_smallest_cluster_that_holds_a_run():
    subject = planner("m6_100b", "a100_80g_x128", world=8)
    assert not subject.search().plans
    cluster = smallest_cluster(subject)
    assert cluster is not None
    assert Planner(subject.config, cluster).search().plans
    assert not Planner(subject.config, cluster.first(cluster.num_devices // 2)).search().plans
