"""The table over seeds and starts of the downstream experiment."""

import json

from scripts.experiments.downstream import report


def write_scores(folder, accuracy):
    def estimate(value):
        return {"value": value, "low": value - 0.1, "high": value + 0.05, "is_share": True}

    scores = {"this model": {"accuracy": estimate(accuracy)}, "commonest": {"accuracy": estimate(0.5)}}
    folder.mkdir(parents=True)
    record = {"task": "text_classification", "source": "reviews", "rows": 1728, "scores": scores}
    (folder / "downstream.json").write_text(json.dumps([record]), encoding="utf-8")


def test_seeds_are_averaged_and_baselines_stand_once(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "HERE", tmp_path)
    for seed, accuracy in enumerate((0.8, 0.84, 0.88)):
        write_scores(tmp_path / f"runs/reviews/pretrained-{seed}", accuracy)
    write_scores(tmp_path / "runs/reviews/scratch-0", 0.7)
    report.main(tmp_path / "runs")
    (line,) = [row for row in (tmp_path / "report.md").read_text().splitlines() if row.startswith("| reviews |")]
    assert line == (
        "| reviews | reviews, 1,728 | accuracy | 84.0% (80.0% to 88.0%), 3 seeds | 70.0% (60.0% to 75.0%) "
        "| commonest 50.0% (40.0% to 55.0%) |"
    )
    table = (tmp_path / "results.csv").read_text().splitlines()
    assert len(table) == 1 + 4 * 2
    assert table[1].startswith("reviews,reviews,1728,pretrained,0,this model,accuracy,0.8,0.7")


def test_a_suffix_names_other_files(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "HERE", tmp_path)
    write_scores(tmp_path / "runs/reviews/pretrained-0", 0.8)
    report.main(tmp_path / "runs", "_large")
    assert "80.0%" in (tmp_path / "report_large.md").read_text()
    assert (tmp_path / "results_large.csv").exists()
    assert not (tmp_path / "report.md").exists()
