"""The miniatures are the shipped configurations but for widths and counts, and their results are of today's JSONs."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from m6.config.checks import check_world_size
from m6.config.run import parse_config
from moe import MoEConfig, MoELayer
from moe.dispatch_dtype import CODECS
from scripts.experiments.experiment import ResultTable
from scripts.experiments.large_recipes import miniature as rules
from scripts.experiments.large_recipes import train
from scripts.experiments.large_recipes.miniature import RECIPES, changed, digest, miniature, shipped, variants
from scripts.experiments.large_recipes.report import compare, current, verdict
from scripts.experiments.large_recipes.train import KEY, RESULTS, Case, RoundingDispatcher, document_of, run_name

SCALED = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "optimizer.params.lr",
    "optimizer.params.adamw_lr",
    *(f"zero_optimization.{name}" for name in ("contiguous_gradients", "reduce_scatter", "overlap_comm")),
    *(f"m6.model.{name}" for name in ("hidden_size", "num_layers", "num_attention_heads", "ffn_hidden_size")),
    *(f"m6.model.{name}" for name in ("text_vocab_size", "image_vocab_size", "max_position_embeddings")),
    *(f"m6.model.{name}" for name in ("image_size", "patch_size", "initializer_range")),
    *(f"m6.moe.{name}" for name in ("num_experts", "num_prototypes", "num_groups")),
    "m6.data.sequence_length",
    "m6.data.num_workers",
    *(f"m6.data.sources.{name}" for name in rules.SOURCES),
    *(
        f"m6.training.{name}"
        for name in ("total_steps", "ep_size", "activation_checkpointing", "overlap_micro_batches")
    ),
    *(f"m6.parallel.pipeline.{name}" for name in ("num_ranks", "schedule")),
    "m6.schedule.warmup_steps",
    "m6.pseudo_to_real.switch_step",
    "m6.offload.num_threads",
    "m6.offload.device_budget_mib",
    *(f"m6.checkpoint.{name}" for name in ("interval_steps", "keep_last", "async_save")),
    "m6.evaluation.interval_steps",
    "m6.evaluation.num_rows",
}


def flat(document: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(document, dict):
        return {prefix: document}
    return {
        key: value
        for name, part in document.items()
        for key, value in flat(part, f"{prefix}.{name}" if prefix else name).items()
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_only_widths_and_counts_differ(recipe: str):
    full, small = flat(shipped(recipe)), flat(miniature(shipped(recipe), recipe))
    differ = {key for key in full.keys() | small.keys() if full.get(key) != small.get(key)}
    assert differ <= SCALED


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_variant_is_a_run_at_both_sizes(recipe: str, tmp_path):
    for variant in variants(recipe):
        check_world_size(parse_config(document_of(Case(recipe, variant, "cost", 1.0, 0), 100, tmp_path, "cpu")), 1)
        parse_config(changed(recipe, variant))


@pytest.mark.parametrize("recipe", [name for name in RECIPES if shipped(name)["m6"]["moe"].get("capacity_factor")])
def test_as_many_tokens_choose_among_a_prototypes_experts(recipe: str):
    """It decides how many tokens find their experts full."""
    full, small = shipped(recipe), miniature(shipped(recipe), recipe)
    tokens = small["train_micro_batch_size_per_gpu"] * rules.MEAN_TOKENS
    moe = small["m6"]["moe"]
    ratio = tokens * moe["num_prototypes"] / moe["num_experts"]
    assert 0.5 <= ratio / rules.tokens_per_choice(full) <= 2


def test_equal_miniatures_are_one_run(monkeypatch):
    """Candidates of one family differ in widths, so their miniatures are equal where their numbers of experts are."""
    base, larger = (Case(name, "recipe", "cost", 1.0, 0, 100) for name in ("m6_base", "m6_10b"))
    assert run_name(base, 100, "cpu") == run_name(larger, 100, "cpu")
    assert run_name(base, 101, "cpu") != run_name(base, 100, "cpu")
    assert run_name(replace(base, seed=1), 100, "cpu") != run_name(base, 100, "cpu")
    monkeypatch.setattr(train, "days", lambda recipe, variant: 2.0)

    class Table:
        def rows(self) -> list[dict[str, str]]:
            return [{"recipe": "m6_base", "run": run_name(base, 100, "cpu"), "loss": "1.5", "cpu_s": "9"}]

    row = train.shared(larger, 100, run_name(larger, 100, "cpu"), Table())
    assert row is not None
    assert (row["recipe"], row["loss"], row["cpu_s"], row["cost"]) == ("m6_10b", "1.5", "0", "2.000")
    assert train.shared(larger, 101, run_name(larger, 101, "cpu"), Table()) is None


def test_a_variant_has_the_steps_of_its_cost_and_at_most_a_twentieth_more(monkeypatch):
    prices = {"recipe": 3.0, "dense": 2.0, "today": 4.0, "none": 0.1}
    monkeypatch.setattr(train, "days", lambda recipe, variant: prices[variant])
    for variant, price in prices.items():
        steps = train.steps_of(Case("m6_base", variant, "cost", 1.0, 0, 1000), ResultTable(RESULTS, KEY))
        ratio = min(train.LONGEST, prices["recipe"] / price)
        assert 0.99 <= steps / (1000 * ratio) <= 1.05


def test_a_recipe_that_is_top_1_has_to_beat_the_dense_model_alone(monkeypatch):
    plain = changed("m6_base", "top1")
    monkeypatch.setattr(rules, "shipped", lambda recipe: copy.deepcopy(plain))
    chosen = runs(recipe=[1.0, 1.0, 1.0], dense=[1.1, 1.2, 1.1])
    assert "m6_base stays**" in verdict("m6_base", chosen)


def test_top_1_is_no_variant_of_a_recipe_that_is_top_1(monkeypatch):
    assert "top1" in variants("m6_base")
    plain = changed("m6_base", "top1")
    monkeypatch.setattr(rules, "shipped", lambda recipe: copy.deepcopy(plain))
    assert "top1" not in variants("m6_base")


@pytest.mark.parametrize("recipe", [name for name in RECIPES if RECIPES[name].batch == 64])
def test_variants_of_experts_have_as_many_parameters_and_flops(recipe: str):
    """Of the routed experts, and of what a token computes; a shared expert is the only difference."""

    def sizes(variant: str) -> tuple[int, int]:
        full = changed(recipe, variant)
        moe, width = MoEConfig(**full["m6"]["moe"]), full["m6"]["model"]["ffn_hidden_size"]
        computed = moe.num_prototypes * moe.top_k + moe.num_shared_experts
        return moe.num_experts * width, computed * width

    assert {sizes(name) for name in ("recipe", "top1", "today", *rules.HALVES)} == {sizes("recipe")}
    assert changed(recipe, "dense")["m6"]["model"]["ffn_hidden_size"] == sizes("recipe")[1]


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("moe", "capacity_factor", 2.0),
        ("moe", "aux_loss_weight", 0.01),
        ("moe", "dispatch_dtype", "float8"),
        ("schedule", "decay", "constant"),
        ("model", "hidden_dropout", 0.0),
        ("pseudo_to_real", "switch_step", 25000),
        ("offload", "master_weights", True),
    ],
)
def test_a_change_of_the_json_makes_results_old(monkeypatch, section: str, key: str, value: Any):
    before = digest("m6_10t")
    edited = shipped("m6_10t")
    assert edited["m6"][section].get(key) != value
    edited["m6"][section][key] = value
    monkeypatch.setattr(rules, "shipped", lambda recipe: copy.deepcopy(edited))
    assert digest("m6_10t") != before
    row = {"recipe": "m6_10t", "digest": before}
    assert [row] != current([row])


def test_a_price_is_kept_until_its_variant_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def asked(*_: object) -> None:
        raise LookupError

    monkeypatch.setattr(train, "PRICES", tmp_path / "prices.json")
    monkeypatch.setattr(train, "Planner", asked)
    price = {"digest": train._digest(changed("m6_10b", "dense")), "days": 5.0}
    train.PRICES.write_text(json.dumps({"m6_10b, dense": price}))
    assert train.days("m6_10b", "dense") == 5.0
    monkeypatch.setitem(rules.ALL, "dense", rules.ALL["none"])
    with pytest.raises(LookupError):
        train.days("m6_10b", "dense")


def test_results_are_of_the_shipped_configurations():
    rows = ResultTable(RESULTS, KEY).rows()
    old = {row["recipe"] for row in rows} - {row["recipe"] for row in current(rows)}
    assert current(rows) == rows, f"the JSON of {', '.join(sorted(old))} changed after these runs: train them again"


def test_one_rank_rounds_rows_as_the_exchange_does():
    torch.manual_seed(0)
    layer = MoELayer(8, 16, MoEConfig(num_experts=1, aux_loss_weight=0.0))
    plain, tokens = layer.dispatcher, torch.randn(5, 8, requires_grad=True)
    layer.dispatcher = RoundingDispatcher("float8_both")
    output = layer(tokens).hidden_states
    codec, _ = CODECS["float8_both"]

    def rounded(rows: torch.Tensor) -> torch.Tensor:
        return codec.decode(codec.encode(rows), rows.dtype)

    layer.dispatcher = plain
    routing = layer._route(tokens, tokens, None, None)[0]
    routing = routing._replace(gates=routing.gates.detach())
    inside = rounded(tokens.detach()).requires_grad_()
    expected = plain(inside, routing, layer.experts, None)
    torch.testing.assert_close(output, rounded(expected), rtol=0, atol=0)
    weights = torch.randn_like(output)
    (expected * rounded(weights)).sum().backward()
    layer.dispatcher = RoundingDispatcher("float8_both")
    [gradient] = torch.autograd.grad(layer.dispatcher(tokens, routing, layer.experts, None), tokens, weights)
    torch.testing.assert_close(gradient, rounded(inside.grad), rtol=0, atol=0)


def runs(**losses: list[float]) -> dict[str, list[dict[str, str]]]:
    return {
        variant: [{"seed": str(seed), "loss": str(loss)} for seed, loss in enumerate(values)]
        for variant, values in losses.items()
    }


@pytest.mark.parametrize(
    ("losses", "outcome"),
    [
        ({"recipe": [1.0, 1.0, 1.0], "dense": [1.1, 1.2, 1.1], "top1": [1.1, 1.1, 1.1]}, "stays"),
        ({"recipe": [1.0, 1.0, 1.0], "dense": [1.1, 0.9, 1.1], "top1": [1.1, 1.1, 1.1]}, "does not win"),
        ({"recipe": [1.0, 1.0], "dense": [1.1, 1.2], "top1": [1.1, 1.1]}, "is undecided"),
        ({"recipe": [1.0, 1.0, 1.0], "dense": [1.1, 1.2, 1.3]}, "is undecided"),
    ],
)
def test_a_recipe_stays_only_if_it_wins_with_every_seed(losses: dict[str, list[float]], outcome: str):
    chosen = runs(**losses)
    assert f"m6_10t {outcome}**" in verdict("m6_10t", chosen)
    assert compare(chosen, "dense").differences == [
        pytest.approx(a - b) for a, b in zip(losses["recipe"], losses["dense"], strict=True)
    ]
