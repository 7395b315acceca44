"""The section m6.parallel.pipeline: how layers are cut, and what it refuses."""

import contextlib
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m6.architecture.sharing import PARTS, Sharing
from m6.config.checks import check_world_size
from m6.config.pipeline import PipelineSettings
from m6.config.run import RunConfig, parse_config
from m6.config.section_checks import check_sharing, cut_between_groups, keeps_groups
from m6.errors import UserError
from m6.planning.cost.layout import layout_of
from m6.planning.search.configuration import configure
from tests.fixtures.tiny_run import tiny_document


def run(folder: Path, pipeline: dict[str, Any], stage: int = 1, **changes: Any) -> RunConfig:
    changes = {"train_batch_size": 16, "m6__model__num_layers": 4, **changes}
    changes.setdefault("zero_optimization", {"stage": stage})
    return parse_config(tiny_document(folder, m6__parallel__pipeline=pipeline, **changes))


@pytest.mark.parametrize(
    ("schedule", "layers", "cut", "of_second_rank"),
    [
        ("1f1b", None, [3, 3], [1]),
        ("1f1b", [4, 2], [4, 2], [1]),
        ("zbv", None, [1, 2, 1, 2], [1, 2]),
        ("dualpipev", [1, 3, 1, 1], [1, 3, 1, 1], [1, 2]),
        ("interleaved_1f1b", None, [1, 2, 1, 2], [1, 3]),
        ("interleaved_zero_bubble", [1] * 6, [1] * 6, [1, 3, 5]),
    ],
)
def test_cuts(schedule: Any, layers: list[int] | None, cut: list[int], of_second_rank: list[int]):
    settings = PipelineSettings(num_ranks=2, schedule=schedule, layers=layers)
    settings.check_cut(6)
    stages = settings.cut(6)
    assert [len(stage) for stage in stages] == cut
    assert [layer for stage in stages for layer in stage] == list(range(6))
    assert settings.stages_of(1) == of_second_rank
    assert sorted(settings.stages_of(0) + settings.stages_of(1)) == list(range(len(cut)))


ZBV = {"num_ranks": 2, "schedule": "zbv"}
PLAIN = {"num_ranks": 2}
IN_PLACE = {
    "image_code_denoising": {"weight": 1},
    **{name: {"weight": 0} for name in ("text_denoising", "language_modelling", "image_captioning")},
    "image_text_denoising": {"weight": 0},
}
REFUSED = {
    "one rank": ({"num_ranks": 1}, {}, r"m6\.parallel\.pipeline\.num_ranks: .*2"),
    "unknown schedule": ({**PLAIN, "schedule": "gpipe"}, {}, r"m6\.parallel\.pipeline\.schedule"),
    "sum": ({**PLAIN, "layers": [3, 2]}, {}, r"layers \[3, 2\] has 5 layers, but .*num_layers is 4; use \[2, 2\]"),
    "number of stages": ({**PLAIN, "layers": [1, 2, 1]}, {}, r"expected 2 numbers .* found 3"),
    "stages of a V": ({**ZBV, "layers": [2, 2]}, {}, r"expected 4 numbers .* found 2"),
    "one stage each": ({"num_ranks": 2, "schedule": "interleaved_1f1b", "layers": [2, 2]}, {}, r"expected 4 numbers"),
    "more stages than layers": (
        {"num_ranks": 3, "schedule": "zbv"},
        {},
        r'makes 6 stages, but m6\.model\.num_layers is 4.*num_ranks 2 or "schedule": "1f1b"',
    ),
    "no layer": ({"num_ranks": 5}, {}, r"makes 5 stages.*use num_ranks 4"),
    "one group": (
        PLAIN,
        {"m6__pseudo_to_real": {"switch_step": 2}},
        r"layers 1 and 2 share weights .*num_groups 1\), but are in different stages; .*use .*num_groups 2",
    ),
    "groups": (
        {**PLAIN, "layers": [1, 3]},
        {"m6__pseudo_to_real": {"switch_step": 2, "num_groups": 2}},
        r'layers 0 and 1 share weights .*use "layers": \[2, 2\]',
    ),
    "nothing to offload": (
        {**ZBV, "layers": [1, 2, 1, 1]},
        {"m6__offload": {"device_budget_mib": 99.0}, "m6__model__num_layers": 5, "m6__model__moe_layer_frequency": 2},
        r"m6\.offload: rank 0 of m6\.parallel\.pipeline has layers \[0, 4\], none of which has experts",
    ),
    "a stage without adapters": (
        PLAIN,
        {
            "m6__lora": {"targets": ["experts"]},
            "m6__init": "runs/first",
            "m6__model__moe_layer_frequency": 4,
        },
        r"m6\.lora\.targets experts: stage 0 of m6\.parallel\.pipeline has layers 0 to 1, none .*; add \"attention\"",
    ),
    "one slice": ({**PLAIN, "slices": 1}, {}, r"pipeline\.slices.*2"),
    "more slices than tokens": ({**PLAIN, "slices": 65}, {}, r"sequence_length 64 tokens has at most 64 .*use 64"),
    "no place to cut": (
        {**PLAIN, "slices": 4},
        {"m6__objectives": IN_PLACE, "m6__data__packing": False, "m6__data__image_tokenizer": "tokenizers/image"},
        r"rows of 64 tokens have one sample \(m6\.data\.packing=false\).* image_code_denoising, predict targets in "
        r"place: 0 places; set m6\.data\.packing=true",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, case: str):
    pipeline, changes, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        run(tmp_path, pipeline, **changes)


@given(data=st.data())
def test_layers_that_share_weights_are_in_one_stage(data: st.DataObject):
    layers = data.draw(st.integers(2, 12))
    sharing = Sharing(layers, data.draw(st.integers(1, layers - 1)), PARTS)
    stages = data.draw(st.integers(2, layers))
    between = cut_between_groups(stages, sharing)
    assert (between is None) == (stages > sharing.num_groups)
    ends = sorted(data.draw(st.sets(st.integers(1, layers - 1), min_size=stages - 1, max_size=stages - 1)))
    anywhere = [end - begin for begin, end in itertools.pairwise((0, *ends, layers))]
    for cut in (anywhere, between or anywhere):
        settings = PipelineSettings(num_ranks=len(cut), layers=cut)
        first = [sharing.first_layer(layer) for layer in range(layers)]
        whole = all(first[end - 1] != first[end] for end in itertools.accumulate(cut) if end < layers)
        assert keeps_groups(settings.cut(layers), sharing) == whole
        assert whole or cut is not between
        with contextlib.nullcontext() if whole else pytest.raises(UserError, match="share weights"):
            check_sharing(settings, sharing)


WORLDS = {
    "world": (PLAIN, 3, {}, r"num_ranks 2 does not divide the world size 3; use 3"),
    "single process": (PLAIN, 1, {}, r"does not divide the world size 1; start more ranks"),
    "ep_size": (
        PLAIN,
        4,
        {"m6__training__ep_size": 4},
        r"ep_size 4 does not divide the 2 ranks that hold the same stage.*use ep_size 2",
    ),
    "few micro-batches": (
        ZBV,
        4,
        {"train_batch_size": 12},
        r"train_batch_size 12: .*needs 4 .*has 3; try .*_gpu 1, or .* 16",
    ),
    "few for 1F1B": ({"num_ranks": 4}, 4, {"train_batch_size": 4}, r"needs 4 .*has 2; try .*_gpu 1, or .* 8"),
    "rounds": (
        {"num_ranks": 2, "schedule": "interleaved_1f1b"},
        2,
        {"train_batch_size": 10},
        r"a multiple of 2 .*has 5; try .*_gpu 1, or .* 12",
    ),
    "batch": (PLAIN, 4, {"train_batch_size": 9}, r"train_batch_size 9: it is not a multiple"),
}


@pytest.mark.parametrize("case", WORLDS)
def test_refused_on_a_number_of_ranks(tmp_path: Path, case: str):
    pipeline, world_size, changes, message = WORLDS[case]
    config = run(tmp_path, pipeline, **changes)
    with pytest.raises(UserError, match=message):
        check_world_size(config, world_size)


def test_the_advice_runs(tmp_path: Path):
    check_world_size(run(tmp_path, ZBV, train_batch_size=16), 4)
    check_world_size(run(tmp_path, {"num_ranks": 2, "schedule": "interleaved_1f1b"}, train_batch_size=12), 2)
    assert run(tmp_path, ZBV).accumulation_steps(4) == 4


def test_slices_need_no_number_of_micro_batches(tmp_path: Path):
    """They fill the pipeline instead; what the planner writes for the run keeps them."""
    config = run(tmp_path, {"num_ranks": 4, "slices": 4}, train_batch_size=2)
    check_world_size(config, 4)
    planned = configure(config, layout_of(config, 4))["m6"]["parallel"]["pipeline"]
    assert planned == {"num_ranks": 4, "schedule": "1f1b", "layers": [1, 1, 1, 1], "slices": 4}
    others = run(tmp_path, {"num_ranks": 2, "slices": 4})
    assert (
        "slices"
        not in configure(others, replace(layout_of(others, 2), schedule="zbv", cut=()))["m6"]["parallel"]["pipeline"]
    )


def test_the_planner_prices_a_pipeline(tmp_path: Path):
    assert layout_of(run(tmp_path, PLAIN), 2).pp_size == 2
