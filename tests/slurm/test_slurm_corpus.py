"""A corpus on two nodes of the local cluster: a stage that fails stops the rest, and the same command continues."""

import os
from pathlib import Path
from unittest import mock

import pytest

from m6.corpus.launch import make_corpus
from m6.corpus.plan import make_plan
from m6.corpus.stages import STAGES
from m6.corpus.work import prepare, work_folder
from m6.errors import UserError
from tests.fixtures.command import contents
from tests.fixtures.corpus import built, own, recipe_of, text_of, write_lines
from tests.slurm.cluster import LocalCluster, wait_until

pytestmark = pytest.mark.slurm


def test_a_corpus_on_two_nodes_has_the_bytes_of_one_process(cluster: LocalCluster, tmp_path: Path):
    for number in range(4):
        write_lines(tmp_path / "web" / f"{number}.jsonl", [text_of(n) for n in range(number * 10, number * 10 + 15)])
    alone = built(recipe_of(tmp_path / "alone", own("web", tmp_path / "web")))
    recipe = recipe_of(tmp_path / "data", own("web", tmp_path / "web"), slurm={"memory_gb": 1})
    work = prepare(work_folder(tmp_path / "data"), make_plan(recipe))
    names = [stage.name for stage in STAGES if stage.units(work)]  # without the one for a matching_model
    (work.folder / "pairs").write_text("in the way")  # the second stage fails

    def over(jobs: dict[str, str]) -> bool:
        return not set(jobs.values()) & {job.split("_")[0] for job in cluster.jobs()}

    # Exclusive: each task has a node of its own.
    site = {"SLURM_CONF": cluster.environment["SLURM_CONF"], "SBATCH_EXCLUSIVE": "exclusive"}
    with mock.patch.dict(os.environ, site):
        jobs = make_corpus(recipe, "slurm", 2).jobs
        assert list(jobs) == names
        with pytest.raises(UserError, match=r"jobs .* have not ended; wait for them, or cancel them"):
            make_corpus(recipe, "slurm", 2)
        wait_until(lambda: over(jobs), "the end of the jobs")
        assert not work.missing("clean", 4)
        assert len(work.missing("pairs", 20)) == 20
        assert cluster.state(jobs["finish"]) in ("CANCELLED", "")
        log = "".join(file.read_text() for file in (work.folder / "logs" / "pairs").rglob("*.out"))
        assert 'stage "pairs", unit 0 of' in log
        nodes = {cluster.job_fields(f"{jobs['clean']}_{task}")["NodeList"] for task in range(2)}
        assert len(nodes) == 2

        (work.folder / "pairs").unlink()
        again = make_corpus(recipe, "slurm", 2).jobs
        assert list(again) == names[1:]
        wait_until(lambda: over(again), "the end of the jobs")
    assert contents(tmp_path / "data") is not None, sorted((work.folder / "logs").rglob("*.out"))
    assert list(contents(tmp_path / "data").values()) == list(contents(alone).values())
