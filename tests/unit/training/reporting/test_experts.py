"""Figures of the experts' health against a count by hand, and that collecting them waits for nothing."""

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from m6.architecture.configuration import M6Config
from m6.config.run import parse_config
from m6.errors import UserError
from m6.plots.experts import plot_experts
from m6.runs.processes import Runtime
from m6.training.reporting.experts import ExpertHealth, UnroutedTokens, decode_loads, encode_loads, reports_loads
from m6.training.reporting.interval import training_flops
from moe import MoEConfig, MoELayer, RoutingStats
from tests.fixtures.command import m6, user_error
from tests.fixtures.fabricated_run import training_entry, write_metrics
from tests.fixtures.tiny_run import tiny_document


def stats(
    counts: list[float],
    dropped: list[float],
    num_tokens: float,
    entropy: list[float],
    without_expert: float = 0.0,
    gate_sum: float = 0.0,
) -> RoutingStats:
    named = {"expert_counts": counts, "dropped": dropped, "num_tokens": num_tokens, "router_entropy": entropy}
    named |= {"without_expert": without_expert, "gate_sum": gate_sum}
    return RoutingStats(**{name: torch.tensor(named.get(name, 0.0)) for name in RoutingStats._fields})


def test_figures(runtime: Runtime):
    """Two layers of two prototypes, two micro-batches; the layer's figures, and those of each prototype."""
    health = ExpertHealth(nn.Identity(), M6Config(moe={"num_experts": 4, "num_prototypes": 2}))
    second = stats([2.0, 2.0, 2.0, 2.0], [0.0, 0.0], 4.0, [0.5, 0.5], gate_sum=6.0)
    health.add((stats([3.0, 1.0, 2.0, 0.0], [0.0, 2.0], 4.0, [0.6, 0.2], 1.0, 2.5), second))
    health.add((stats([1.0, 1.0, 2.0, 0.0], [0.0, 0.0], 2.0, [0.3, 0.2], 0.0, 1.1), second))
    means = health.reduce(with_loads=True)
    report = means["experts"]
    # Layer by layer, and their mean.
    expected = {
        "experts_per_token": [10 / 6, 2.0],
        "tokens_without_expert": [1 / 6, 0.0],
        "gate_sum": [3.6 / 6, 1.5],
        "dropped_fraction": [2 / 12, 0.0],
    }
    for key, values in expected.items():
        assert report[key] == pytest.approx(values)
        assert means[key] == pytest.approx(sum(values) / 2)
    first = np.array([4.0, 2.0, 4.0, 0.0])
    assert report["load_cv"] == pytest.approx([first.std() / first.mean(), 0.0])
    assert report["unused_experts"] == [1, 0]
    assert report["router_entropy"] == pytest.approx([(0.6 * 4 + 0.3 * 2 + 0.2 * 6) / 12, 0.5])
    assert report["prototypes"]["load_cv"][0] == pytest.approx([1 / 3, 1.0])
    assert report["prototypes"]["dropped_fraction"] == [pytest.approx([0.0, 2 / 6]), [0.0, 0.0]]
    assert report["prototypes"]["unused_experts"] == [[0, 1], [0, 0]]
    assert report["prototypes"]["router_entropy"][0] == pytest.approx([(0.6 * 4 + 0.3 * 2) / 6, 0.2])
    np.testing.assert_allclose(decode_loads(report["loads"][0]), first / first.mean(), rtol=2**-11)
    assert "sent_bytes" not in report
    assert json.loads(json.dumps(report)) == report
    assert health.reduce(with_loads=True) == {}, "a fresh start"
    health.add((second,))
    assert set(health.reduce(with_loads=False)["experts"]) == set(report) - {"prototypes", "loads"}


def test_figures_of_prototypes_whose_experts_are_in_groups(runtime: Runtime):
    """Of each group, the first two experts are the first prototype's and the other two the second one's."""
    groups = {"num_experts": 8, "num_prototypes": 2, "num_groups": 2}
    health = ExpertHealth(nn.Identity(), M6Config(moe=groups))
    health.add((stats([3.0, 3.0, 1.0, 0.0, 3.0, 3.0, 4.0, 0.0], [0.0, 7.0], 12.0, [0.5, 0.5]),))
    report = health.reduce(with_loads=True)["experts"]
    first, second = np.array([3.0, 3.0, 3.0, 3.0]), np.array([1.0, 0.0, 4.0, 0.0])
    assert report["prototypes"]["load_cv"] == [pytest.approx([0.0, second.std() / second.mean()])]
    assert report["prototypes"]["unused_experts"] == [[0, 2]]
    assert report["prototypes"]["dropped_fraction"] == [pytest.approx([0.0, 7 / 12])]
    loads = np.concatenate([first, second])
    np.testing.assert_allclose(decode_loads(report["loads"][0]), loads / loads.mean(), rtol=2**-11)


def test_bytes_of_exchanges_are_those_since_the_last_report(runtime: Runtime):
    layer = MoELayer(8, 8, MoEConfig(num_experts=2))
    layer.dispatcher.traffic.bytes_within_nodes = 5  # before training
    health = ExpertHealth(nn.ModuleList([layer, layer]), M6Config(moe={"num_experts": 2}))
    for within, between in ((100, 7), (20, 1)):
        layer.dispatcher.traffic.bytes_within_nodes += within
        layer.dispatcher.traffic.bytes_between_nodes += between
        health.add((stats([1.0, 1.0], [0.0], 2.0, [0.5]),))
        assert health.reduce(with_loads=False)["experts"]["sent_bytes"] == {
            "within_nodes": within,
            "between_nodes": between,
        }


def test_adding_waits_for_nothing():
    """Fake tensors have no numbers, so whatever asks for one fails."""
    with FakeTensorMode():
        layer = MoELayer(8, 16, MoEConfig(num_experts=4, num_prototypes=2))
        health = ExpertHealth(layer, M6Config())
        for _ in range(2):
            health.add((stats([1.0] * 4, [0.0] * 2, 2.0, [0.5] * 2),))


def test_loads_are_stored_compactly():
    counts = torch.tensor([0.0, 1.0, 1000.0, 3.0] * 128)
    text = encode_loads(counts)
    assert len(text) <= 2.7 * len(counts)
    np.testing.assert_allclose(decode_loads(text), (counts / counts.mean()).numpy(), rtol=2**-11)
    np.testing.assert_array_equal(decode_loads(encode_loads(torch.zeros(3))), 0)
    with pytest.raises(ValueError):
        decode_loads("no base64!")
    for total, interval in ((40, 1), (12_345, 10), (500, 10), (99, 100), (1000, 3)):
        lines = [step for step in range(1, total + 1) if step % interval == 0 or step == total]
        wanted = [step for step in lines if reports_loads(step, total, interval)]
        assert min(50, len(lines)) <= len(wanted) <= 101
        assert wanted[-1] == total


CAPACITY = {"num_experts": 4, "num_prototypes": 2, "capacity_factor": 0.3, "min_capacity": 0}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_run_counts_what_its_experts_compute(
    make_trainer: Callable, tmp_path, monkeypatch: pytest.MonkeyPatch, checkpointing: bool
):
    """Once, also where blocks are computed again; utilization and FLOPs count no choice that was dropped."""
    asked: list[tuple[float, ...]] = []
    counted = lambda model, *amounts: asked.append(amounts) or training_flops(model, *amounts)  # noqa: E731
    monkeypatch.setattr("m6.training.reporting.interval.training_flops", counted)
    trainer = make_trainer(m6__training__activation_checkpointing=checkpointing, m6__moe=CAPACITY)
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    training, seen = [line for line in lines if "loss" in line], 0
    for entry in training:
        experts, tokens = entry["experts"], entry["tokens_seen"] - seen
        for computed, dropped in zip(experts["experts_per_token"], experts["dropped_fraction"], strict=True):
            assert computed == pytest.approx(2 * (1 - dropped))  # every choice of a token is computed or dropped
            # Of 4 micro-batches each expert of T tokens computes at most ceil(0.15 T).
            assert computed * tokens <= 4 * (0.15 * tokens + 4)
        for key in ("experts_per_token", "dropped_fraction", "tokens_without_expert", "gate_sum"):
            assert entry[key] == pytest.approx(sum(experts[key]) / 2)
        # A token without an expert has lost both of its choices, and gates are at most 1.
        assert 2 * entry["dropped_fraction"] - 1 <= entry["tokens_without_expert"] < entry["dropped_fraction"]
        assert 0 < entry["gate_sum"] < entry["experts_per_token"]
        flops = entry["model_flops_per_second"] * entry["step_time_s"]
        skipped = 6 * tokens * 2 * (2 - entry["experts_per_token"]) * 2 * 32 * 64
        all_choices = training_flops(trainer.config.model, *asked.pop(0)[:4])
        assert flops == pytest.approx(all_choices - skipped, abs=6 * tokens)  # one parameter, rounded
        seen = entry["tokens_seen"]


def test_a_run_warns_of_tokens_without_an_expert(make_trainer: Callable, capsys: pytest.CaptureFixture[str]):
    make_trainer(m6__moe=CAPACITY).train()
    [warning] = [
        line for line in capsys.readouterr().err.splitlines() if "of the tokens of a layer have no expert" in line
    ]
    assert warning.startswith("warning: step 1: ")
    for part in ("of 2 chosen experts compute a token", "m6.moe.capacity_factor 0.3", 'm6.moe.drop_order "position"'):
        assert part in warning
    make_trainer("dropless").train()
    assert "no expert" not in capsys.readouterr().err


def test_when_a_run_warns_and_what_it_names(folder):
    def warns(**moe) -> UnroutedTokens:
        return UnroutedTokens(
            parse_config(tiny_document(folder, m6__moe={"num_experts": 4, "num_prototypes": 2, **moe}))
        )

    many, few = ({"tokens_without_expert": share, "experts_per_token": 0.6} for share in (0.3, 0.04))
    as_10t = {"capacity_factor": 0.5, "capacity_rule": "1", "min_capacity": 0, "capacity_rounding": "random"}
    found = warns(**as_10t)
    assert found.warning(10, few) is None
    line = found.warning(20, many)
    assert "30.0% of the tokens of a layer have no expert" in line
    assert "0.6 of 2 chosen experts" in line
    keys = ("capacity_factor 0.5", 'capacity_rule "1"', "min_capacity 0", 'drop_order "position"')
    assert all(f"m6.moe.{key}" in line for key in keys)
    assert "aux_loss_weight" not in line, "balanced choices would lose as much"
    assert found.warning(1019, many) is None
    assert found.warning(1020, many) is not None
    unbalanced = warns(capacity_factor=1.25, aux_loss_weight=0.0).warning(10, many)
    assert "The router is not balanced" in unbalanced
    assert "m6.moe.aux_loss_weight 0.0, m6.moe.balance_bias_rate 0.0" in unbalanced
    assert "capacity_rule" not in unbalanced
    assert warns(**as_10t, num_shared_experts=1).warning(10, many) is None, "shared experts compute every token"
    assert warns().warning(10, {**many, "tokens_without_expert": float("nan")}) is None
    dense = UnroutedTokens(parse_config(tiny_document(folder, m6__moe=None)))
    assert dense.warning(10, {}) is None


def test_heat_map_of_a_real_run(make_trainer: Callable, tmp_path):
    trainer = make_trainer(m6__training__total_steps=3)
    trainer.train()
    run = tmp_path / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for entry in (line["experts"] for line in lines if "loss" in line):
        loads = np.array([decode_loads(text) for text in entry["loads"]])
        assert loads.shape == (2, 4)
        np.testing.assert_allclose(loads.mean(1), 1.0, rtol=1e-3)
        np.testing.assert_allclose(loads.std(1), entry["load_cv"], rtol=1e-2)
        cv = np.array(entry["prototypes"]["load_cv"])
        assert cv.shape == (2, 2)
        np.testing.assert_allclose(np.sqrt((cv**2).mean(1)), entry["load_cv"])  # prototypes have equal means
    outcome = m6("plot", run, "--experts")
    assert (outcome.code, outcome.stdout) == (0, f"{run / 'experts.png'}\n")
    with Image.open(run / "experts.png") as picture:
        assert picture.format == "PNG"
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 20
    assert m6("plot", run, "--experts", "--out", tmp_path / "other.png").code == 0
    assert f"--out {tmp_path}: is a folder; expected the PNG" in user_error("plot", run, "--experts", "--out", tmp_path)


def test_what_is_drawn(tmp_path, monkeypatch: pytest.MonkeyPatch):
    from matplotlib.axes import Axes

    drawn = []
    pcolormesh = Axes.pcolormesh

    def spy(axes, *arguments, **options):
        drawn.append(arguments)
        return pcolormesh(axes, *arguments, **options)

    monkeypatch.setattr(Axes, "pcolormesh", spy)
    loads = [torch.tensor([1.0, 1.0, 0.0, 2.0]), torch.tensor([4.0, 4.0, 4.0, 4.0])]
    entry = {"prototypes": {"load_cv": [[0.0, 1.0]] * 2}, "loads": [encode_loads(counts) for counts in loads]}
    lines = [training_entry(s, {"text_denoising": 5.0}, experts=entry) for s in (10, 20, 30)]
    write_metrics(tmp_path, [*lines, training_entry(40, {"text_denoising": 5.0}, experts={"load_cv": [0.1, 0.1]})])
    plot_experts(tmp_path)
    assert len(drawn) == 3  # two layers and the bar of colours
    edges, experts, colours = drawn[0]
    assert edges.tolist() == [0, 10, 20, 30]
    assert experts.tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(colours.filled(-99), [[0] * 3, [0] * 3, [-99] * 3, [1] * 3])  # powers of two
    np.testing.assert_allclose(drawn[1][2], 0)


def test_no_loads_to_draw(tmp_path):
    write_metrics(tmp_path, [training_entry(1, {"language_modelling": 9.0})])
    assert "holds no loads of experts" in user_error("plot", tmp_path, "--experts")
    broken = {"loads": ["AAAA!"], "prototypes": {"load_cv": [[0.0]]}}
    write_metrics(tmp_path, [training_entry(1, {"language_modelling": 9.0}, experts=broken)])
    with pytest.raises(UserError, match="corrupt loads of experts"):
        plot_experts(tmp_path)
