"""Layouts in a run's JSON."""

from dataclasses import replace
from pathlib import Path

import pytest

from m6.config.run import load_config, parse_config
from m6.errors import UserError
from m6.planning.cost.layout import ParallelLayout
from m6.planning.search.configuration import configure, configured, layout_of, parse_forced
from tests.fixtures.tiny_run import tiny_document

CONFIGS = Path(__file__).parents[3] / "configs"


def test_layout_survives_the_journey_through_json():
    config = load_config(CONFIGS / "m6_100b.json")
    for asked in (
        layout_of(config, 128),
        ParallelLayout(256, 64, zero_stage=1, micro_batch_size=2),
        ParallelLayout(64, 1, zero_stage=3, micro_batch_size=1, offload_optimizer=True, offload_params=True),
    ):
        changed = configured(config, asked)
        assert layout_of(changed, asked.world_size) == asked
        assert changed.model == config.model
        assert changed.deepspeed.train_batch_size == config.deepspeed.train_batch_size


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
