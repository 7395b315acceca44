"""Pairs of features that do not go together: what the table says is what a run is told, and nothing else is refused."""

import itertools
import re
from pathlib import Path

import pytest

from m6.config import combinations as c
from m6.config import run as run_module
from m6.config.combinations import FACTS, Feature, Run, refusals, refused_pairs
from m6.config.run import load_config, parse_config
from m6.errors import UserError
from tests.fixtures.features import EXAMPLES, document

FEATURES = c.features()
# What DeepSpeed's keys ask of each other, see m6/config/deepspeed.py.
OF_DEEPSPEED = re.compile(
    "optimizer.type Adafactor needs zero_optimization.stage 0|"
    "optimizer.type (Muon|Lamb|Lars) needs zero_optimization.stage 0, 1 or 2|"
    "torch_autocast: is for weights in fp32|fp16.enabled and bf16.enabled are both true|"
    "zero_optimization.round_robin_gradients: DeepSpeed ignores it at stage 3"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("combinations")


def test_each_feature_has_an_example():
    assert set(EXAMPLES) == set(FEATURES)
    assert all(fact.needed_by and fact.broken_by for fact in FACTS)
    assert all(len(pair) == 2 for pair in refused_pairs()), "a feature that breaks what it needs"


@pytest.mark.parametrize("feature", FEATURES, ids=lambda each: each.name)
def test_each_feature_works_alone(folder: Path, feature: Feature):
    config = parse_config(document(folder, feature))
    assert feature.found(Run(config.m6, config.deepspeed, config.model)) is not None


def test_the_table_is_all_that_refuses_a_pair(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """With the check of the table left out every pair is accepted, but for those of DeepSpeed's keys."""
    runs: list[Run] = []
    monkeypatch.setattr(run_module, "check_combinations", lambda *sections: runs.append(Run(*sections)))
    seen = 0
    for pair in map(frozenset, itertools.combinations(FEATURES, 2)):
        found, names = document(folder, *pair), [feature.name for feature in pair]
        if found is None:
            assert pair not in refused_pairs(), names
            continue
        try:
            parse_config(found)
        except UserError as error:
            if OF_DEEPSPEED.match(str(error)):
                continue
            raise AssertionError(names) from error
        seen += 1
        on = {feature for feature in FEATURES if feature.found(runs[-1]) is not None}
        assert pair - {c.ZERO_2} <= on, names  # some features run stage 2 as stage 1
        assert {refusal.pair for refusal in refusals(runs[-1])} == {each for each in refused_pairs() if each <= on}
    assert seen > 900


def test_a_refusal_has_both_reasons(folder: Path):
    for pair, (fact, needs, breaks) in refused_pairs().items():
        found = document(folder, *pair)
        assert found is not None
        with pytest.raises(UserError) as caught:
            parse_config(found)
        texts = (fact.needed_by[needs], fact.broken_by[breaks], breaks.remedy, needs.remedy)
        for text in (each for each in texts if isinstance(each, str)):
            assert text in str(caught.value), [feature.name for feature in pair]


def test_the_nearest_stage_is_one_that_works(folder: Path):
    """Stage 2 is no remedy where it would be refused as well."""
    for other, stages in ((c.OFFLOAD, "use zero_optimization.stage 2, 1 or 0"), (c.SHARES, "stage 1 or 0")):
        with pytest.raises(UserError, match=f"; .*{stages}(, or |$)"):
            parse_config(document(folder, c.ZERO_3, other))


def test_all_reasons_come_at_once():
    """A pipeline of a recipe at stage 3: one message names each key that has to change."""
    stage_3 = 'zero_optimization={"stage": 3, "contiguous_gradients": true, "reduce_scatter": true}'
    changes = (
        stage_3,
        "m6.training.ep_size=1",
        "m6.parallel.pipeline.num_ranks=2",
        "m6.training.deterministic=any_world",
    )
    with pytest.raises(UserError) as caught:
        load_config(Path("m6t_100b"), changes)
    message = str(caught.value)
    assert "combinations do not work: (1) " in message
    for part in (
        "zero_optimization.stage 3",
        "zero_optimization.contiguous_gradients, zero_optimization.reduce_scatter",
        'm6.training.deterministic "any_world"',
        "use zero_optimization.stage 2, 1 or 0",
        "leave these keys out",
    ):
        assert part in message


def test_no_pair_is_refused_without_a_reason():
    """ "Was not tried" is none."""
    texts = [
        text
        for fact in FACTS
        for text in (*fact.needed_by.values(), *fact.broken_by.values())
        if isinstance(text, str) and "tried" in text
    ]
    assert not texts
