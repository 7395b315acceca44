"""``m6 plan frontier A B --days``: which recipe ends lowest for a number of GPU-days."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from m6.cli.plan import app
from m6.config.run import load_config
from m6.errors import UserError
from m6.planning.loss import predicted_loss
from m6.planning.recipes import Budget, PricedRecipe, budgets, lowest, recipes_report

CHEAP = ("--set", "train_batch_size=128", "--force", "zero_stage=1", "--force", "tp_size=1", "--force", "pp_size=1")


def recipe(name: str, **step_s: float) -> PricedRecipe:
    """A shipped configuration with seconds of a step by number of devices, as ``_8=0.5``."""
    reason = "" if step_s else "the experts do not fit"
    return PricedRecipe(name, load_config(Path(name)), {int(n[1:]): s for n, s in step_s.items()}, reason)


def test_a_budget_is_spent_where_it_gives_the_most_steps():
    """8 devices take 10 steps a second, 64 take 40: fewer steps a GPU-day, but all of a large budget in time."""
    own = recipe("m6_cpu", _8=0.1, _64=0.025)
    small, large = Budget(gpu_days=8.0, days=2.0), Budget(gpu_days=128.0, days=2.0)
    assert (own.devices(small), own.devices(large)) == (8, 64)
    assert own.after(small) == predicted_loss(own.config, 1.0 * 86400 / 0.1)
    assert own.after(large) == predicted_loss(own.config, 2.0 * 86400 / 0.025)
    # Two days of 8 devices leave a part of 32 GPU-days unused; half a day of 64 is as many steps.
    assert own.after(Budget(32.0, 2.0)) == predicted_loss(own.config, 0.5 * 86400 / 0.025)
    assert recipe("m6_cpu", _8=1e6).after(small) is None
    assert recipe("m6_cpu").after(small) is None
    assert [budget.gpu_days for budget in budgets(64, 2.0)] == [1 / 32, 1 / 4, 2.0, 16.0, 128.0]


def test_the_verdict_names_the_lowest_and_all_whose_intervals_overlap():
    fast, slow = recipe("m6_cpu", _8=1e-5), recipe("m6_smoke", _8=10.0)
    budget = Budget(1e-2, 1.0)
    least, other = fast.after(budget), slow.after(budget)
    assert least is not None and other is not None  # noqa: PT018
    assert least.loss < other.loss
    best = lowest([slow, fast, recipe("m6t_base")], budget)
    assert best is not None
    assert best[0] is fast
    assert best[1] == ([slow] if other.low <= least.high else [])
    assert lowest([recipe("m6t_base")], budget) is None
    text = recipes_report([slow, fast, recipe("m6t_base")], [budget])
    assert f"- 0.01 GPU-days: **m6_cpu** ends lowest, {least};" in text
    assert "- m6_smoke ends lowest at none of these budgets." in text
    assert "m6t_base fits on no part of the cluster: the experts do not fit" in text
    assert "| m6t_base † |" in text  # AdamW and a cosine, of which the law has no runs
    assert "| does not fit |  |" in text


def test_several_configurations_are_compared_on_a_cluster(tmp_path: Path):
    png = tmp_path / "recipes.png"
    names = ["m6_cpu", "m6t_base"]
    arguments = ["frontier", *names, "--cluster", "h100_x128", *CHEAP, "--days", "2", "--out", str(png)]
    text = CliRunner().invoke(app, arguments, catch_exceptions=False).stdout
    assert "| 0.062 GPU-days | 0.5 GPU-days | 4 GPU-days | 32 GPU-days | 256 GPU-days |" in text
    assert "**extrapolated** beyond the law's runs" in text
    assert str(png) in text
    assert png.stat().st_size > 0


def test_mistakes():
    names = ["m6_cpu", "m6t_base"]
    with pytest.raises(UserError, match=r"m6_cpu, m6t_base: several configurations .* add --days"):
        CliRunner().invoke(app, ["frontier", *names, "--cluster", "h100_x128"], catch_exceptions=False)
    with pytest.raises(UserError, match="expected configurations with different names"):
        CliRunner().invoke(app, ["frontier", names[0], names[0], "--cluster", "h100_x128"], catch_exceptions=False)
