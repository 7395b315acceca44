"""Layouts in a run's JSON."""

from dataclasses import replace
from pathlib import Path

import pytest

from m6.config.run import load_config, parse_config
from m6.errors import UserError
from m6.planning.cost.layout import ParallelLayout, layout_of
from m6.planning.search.configuration import configure, configured, parse_forced
from tests.fixtures.tiny_run import tiny_document

CONFIGS = Path(__file__).parents[3] / "configs"


def test_layout_survives_the_journey_through_json():
    config = load_config(CONFIGS / "papers" / "m6t_100b.json")
    for asked in (
        layout_of(config, 128),
        ParallelLayout(256, 64, zero_stage=1, micro_batch_size=2),
        ParallelLayout(64, 1, zero_stage=3, micro_batch_size=1, offload_optimizer=True, offload_params=True),
    ):
        changed = configured(config, asked)
        assert layout_of(changed, asked.world_size) == asked
        assert changed.model == config.model
        assert changed.deepspeed.train_batch_size == config.deepspeed.train_batch_size


@pytest.mark.parametrize(("ep_size", "tp_size", "at_once"), [(1, 2, 1), (2, 1, 2), (2, 4, 1), (3, 2, 1), (4, 2, 1)])
def test_a_layout_splits_a_batch_as_its_json(tmp_path, ep_size: int, tp_size: int, at_once: int):
    """Exchanges of 3 ranks overlap tensor groups of 2, so that ranks of 3 groups need equal shares."""
    layout = ParallelLayout(
        24, ep_size, tp_size, zero_stage=1, micro_batch_size=2, overlap_micro_batches=at_once, shares=(3, 5)
    )
    rows = 2 * 4 * at_once * layout.dp_size
    layout = replace(layout, shares=(3 * at_once, 5 * at_once))
    section = {} if tp_size == 1 else {"tensor": {"num_ranks": tp_size}}
    document = tiny_document(
        tmp_path,
        train_batch_size=rows,
        bf16={"enabled": True},
        zero_optimization={"stage": 1},
        m6__moe__num_experts=12,
        m6__model__num_attention_heads=4,
        m6__parallel=section,
    )
    changed = configured(parse_config(document), layout)
    assert layout.batch_split(("a reason",)) == replace(changed.batch_split(24), equal_for=("a reason",))


def test_experts_stream_where_the_run_says_so(tmp_path):
    plain = parse_config(tiny_document(tmp_path))
    streaming = parse_config(tiny_document(tmp_path, m6__offload__device_budget_mib=1.0))
    layout = replace(layout_of(plain, 4), stream_experts=True)
    with pytest.raises(UserError, match=r"add the section m6\.offload"):
        configure(plain, layout)
    assert layout_of(streaming, 4) == layout
    assert configured(streaming, layout).expert_store == streaming.expert_store


def test_forced_values():
    assert parse_forced(("zero_stage=2", "checkpointing=true")) == {"zero_stage": 2, "checkpointing": True}
    for text, message in (
        ("zero_stag=2", 'did you mean "zero_stage"'),
        ("zero_stage=two", "expected a whole number, found 'two'"),
        ("checkpointing=1", "expected true or false"),
        ("tp_size=0", "expected a whole number above 0, found '0'"),
    ):
        with pytest.raises(UserError, match=message):
            parse_forced((text,))
