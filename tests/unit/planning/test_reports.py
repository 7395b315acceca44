"""Reports name the reasons."""

from dataclasses import replace

from m6.planning.cost.layout import layout_of
from m6.planning.reports import explanation, plan_report
from m6.planning.search.results import Rejection
from tests.fixtures.plans import planner


def test_reports_say_why():
    subject = planner("m6t_100b", "a100_80g_x128")
    result = subject.search()
    text = plan_report(subject, result)
    for part in ("Why not otherwise", "stage 3", "Uncalibrated", "step time", " layouts: "):
        assert part in text
    assert "| exchange |" in explanation(subject, subject.evaluate(layout_of(subject.config, 128)))
    refused = subject.evaluate(replace(result.best.layout, zero_stage=3))
    assert isinstance(refused, Rejection)
    assert "zero_optimization.stage 3 cannot hold experts" in explanation(subject, refused)
