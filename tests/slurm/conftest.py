"""One local cluster for all scenarios, several of which run at a time: most of their time is waiting.

A test that takes the fixture ``played`` names a function of scenarios.py, elastic.py or pipelines.py with
``@pytest.mark.scenario("...")``: it does things to a run, and returns what the test then judges.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.slurm import elastic, pipelines, scenarios
from tests.slurm.cluster import LocalCluster, why_not
from tests.slurm.run import ClusterRun, MakeRun, jobs_go_to

AT_A_TIME = 4


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "scenario(name): what happens to a run on the local cluster")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    cluster = LocalCluster(tmp_path_factory.mktemp("cluster"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, cluster: LocalCluster) -> Iterator[Path]:
    """Where the runs lie; jobs that are submitted meanwhile go to the local cluster."""
    folder = tmp_path_factory.mktemp("slurm")
    with jobs_go_to(cluster, folder):
        yield folder


@pytest.fixture(scope="session")
def make_run(cluster: LocalCluster, folder: Path) -> MakeRun:
    return lambda name, environment="", **changes: ClusterRun(cluster, folder, name, environment, **changes)


@pytest.fixture(scope="session")
def plays(request: pytest.FixtureRequest, make_run: MakeRun) -> Iterator[dict[str, Future[Any]]]:
    """The scenarios of the selected tests, all under way."""
    marks = [mark for item in request.session.items for mark in item.iter_markers("scenario")]
    names = sorted((name for mark in marks for name in mark.args), key=lambda name: name not in scenarios.FIRST)
    pool = ThreadPoolExecutor(AT_A_TIME)
    yield {name: pool.submit(_find(name), make_run) for name in dict.fromkeys(names)}
    pool.shutdown(cancel_futures=True)


def _find(name: str) -> Callable[[MakeRun], Any]:
    module = next(module for module in (scenarios, elastic, pipelines) if hasattr(module, name))
    found: Callable[[MakeRun], Any] = getattr(module, name)
    return found


@pytest.fixture
def played(request: pytest.FixtureRequest, plays: dict[str, Future[Any]]) -> Any:
    """What this test's scenario returned."""
    return plays[request.node.get_closest_marker("scenario").args[0]].result()


@pytest.fixture
def whole(request: pytest.FixtureRequest, plays: dict[str, Future[Any]]) -> ClusterRun:
    """The run that was left alone, with which the test compares: the second name in its mark."""
    run: ClusterRun = plays[request.node.get_closest_marker("scenario").args[1]].result()
    return run
