"""What the experiments share, and what the grid of routings counts."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from m6.config.run import load_config
from m6.model import M6ForConditionalGeneration
from scripts.experiments.experiment import ResultTable
from scripts.experiments.prototyping.grid import (
    CONFIG,
    RESULTS,
    RETIRED,
    ROUTINGS,
    Case,
    cases,
    flops_per_token,
    summary,
    tenths,
)
from scripts.experiments.prototyping.report import first_step


def test_table_grows_by_whole_rows_and_knows_finished_runs(tmp_path):
    table = ResultTable(tmp_path / "results.csv", ("name", "seed"))
    assert table.rows() == []
    assert not table.holds({"name": "a", "seed": 0})
    table.append({"name": "a", "seed": 0, "loss": 1.5})
    table.append({"name": 'b, "c"', "seed": 1, "loss": 2.5})
    again = ResultTable(tmp_path / "results.csv", ("name", "seed"))
    assert again.holds({"name": 'b, "c"', "seed": 1})
    assert not again.holds({"name": "a", "seed": 1})
    assert again.rows()[0] == {"name": "a", "seed": "0", "loss": "1.5"}
    with pytest.raises(ValueError, match="columns"):
        again.append({"name": "a", "seed": 2})
    assert len(again.rows()) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["results.csv"]


def test_every_case_is_a_valid_run_of_its_own():
    names = [tuple(case.identity().values()) for case in cases()]
    assert len(set(names)) == len(names) == 26
    for case in cases():
        config = load_config(CONFIG, tuple(case.overrides()))
        assert (config.model.moe_config().capacity_factor is None) == (case.capacity == "none")
        assert config.model.moe_config().normalize_gates == ROUTINGS[case.routing].normalized


@pytest.mark.parametrize("case", [Case("top-2", "none", True), Case("4 top-1", "1", True), Case("2 top-1", "k", True)])
def test_flops_are_those_that_pytorch_counts(case):
    """PyTorch counts each matrix product; of the experts' operator, into which it does not look, it is told."""

    def products(source, w_in, w_out):
        return 2 * source[0] * (math.prod(w_in[1:]) + math.prod(w_out[1:]))

    told = {
        torch.ops.moe.experts: lambda *shapes, **_: products(shapes[1], *shapes[6:8]),
        torch.ops.moe.experts_backward: lambda *shapes, **_: 2 * products(shapes[5], *shapes[10:12]),
    }
    config = load_config(CONFIG, tuple(case.overrides()))
    model = M6ForConditionalGeneration(config.model).double().train()
    ids = torch.randint(0, 258, (4, 128), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False, custom_mapping=told) as counter:
        output = model.model(input_ids=ids)
        output.last_hidden_state.sum().backward()
    stats = output.router_stats
    dropped = torch.stack([layer.dropped.sum() / (layer.dropped.sum() + layer.expert_counts.sum()) for layer in stats])
    attention = sum(number for op, number in counter.get_flop_counts()["Global"].items() if "attention" in str(op))
    counted = (counter.get_total_flops() - attention) / ids.numel()
    # The formula counts the biases of attention as if they were weights: 0.6 %.
    formula = flops_per_token(config.model, 0, dropped.double().numpy())
    assert formula == pytest.approx(counted, rel=0.01)


def test_summary_is_the_mean_of_the_second_half():
    model = load_config(CONFIG, tuple(Case("2 top-1", "k", True).overrides())).model

    def entry(step, value):
        experts = {"load_cv": [value] * 3, "dropped_fraction": [value / 2] * 3, "unused_experts": [1, 2, 3]}
        return {"step": step, "tokens_seen": 100 * step, "loss": value, "experts": experts}

    validation = {"step": 4, "validation": {"language_modelling": 3.0, "image_captioning": 2.0}}
    row = summary(model, 128, [entry(1, 9.0), entry(2, 9.0), entry(3, 0.2), entry(4, 0.4), validation])
    assert (row["steps"], row["tokens"], row["validation_lm"], row["validation_captions"]) == (4, 400, 3.0, 2.0)
    assert row["training_losses"] == "9.0000 9.0000 0.2000 0.4000"
    assert (row["load_cv"], row["dropped"], row["unused_experts"]) == (0.3, 0.15, 2.0)
    full = flops_per_token(model, 128, torch.zeros(3).numpy())
    # 2 experts of 2 x 64 x 128 parameters a token in each of 3 layers, 15 % of them dropped.
    assert full - row["flops_per_token"] == pytest.approx(6 * 0.15 * 2 * 3 * 2 * 64 * 128, abs=1)


def test_tenths_are_equal_parts_of_training_in_order():
    assert tenths([float(step) for step in range(20)]) == [0.5 + 2 * part for part in range(10)]
    assert tenths([3.0, 1.0]) == [3.0, 1.0]


def test_first_step_is_where_the_curve_crosses():
    losses = [4.0, 3.0, 2.0, 2.5, 1.0]  # at steps 20, 40, 60, 80 and 100
    assert first_step(losses, 2.25, 100.0) == pytest.approx(55.0)
    assert first_step(losses, 1.0, 100.0) == 100.0
    assert first_step(losses, 0.5, 100.0) == math.inf


def test_the_results_hold_every_finished_run_once():
    rows = ResultTable(RESULTS, ()).rows()
    identities = [tuple(row[name] for name in (*Case("top-1", "k", True).identity(), "seed")) for row in rows]
    assert len(set(identities)) == len(identities) > 0
    known = {tuple(case.identity().values()) for case in (*cases(), *RETIRED)}
    assert {identity[:-1] for identity in identities} <= known
