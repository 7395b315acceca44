"""Sizes that no machine has are refused in a moment, before anything is allocated."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from m6.config.image_tokenizer import load_settings
from m6.config.run import load_config
from m6.errors import UserError
from m6.planning.prediction import check_memory

CONFIGS = Path(__file__).parents[3] / "configs"
SMOKE = CONFIGS / "m6_smoke.json"


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("m6.model.hidden_size", 10**12),
        ("m6.model.ffn_hidden_size", 10**15),
        ("m6.model.max_position_embeddings", 10**13),
        ("m6.model.num_layers", 10**7),
        ("m6.model.image_size", 2**40),
        ("m6.model.text_vocab_size", 10**12),
        ("m6.moe.num_experts", 10**12),
        ("m6.moe.num_shared_experts", 10**12),
        ("m6.moe.min_capacity", 10**30),
        ("m6.moe.capacity_factor", 1e308),
        ("m6.moe.capacity_factor", 1e-308),
        ("m6.data.sequence_length", 10**8),
        ("m6.training.total_steps", 10**30),
        ("train_micro_batch_size_per_gpu", 10**8),
        ("train_batch_size", 4 * 10**11),
        ("m6.objectives.text_denoising.mean_span_length", 1e308),
        ("m6.objectives.text_denoising.weight", 1e308),
        ("m6.offload", '{"chunk_mib": 1e308, "device_budget_mib": 10}'),
        ("m6.offload", '{"device_budget_mib": 1e308}'),
        ("m6.offload", '{"device_budget_mib": 10, "rules": [{"layers": "0-1000000000000", "place": "stream"}]}'),
        ("m6.offload", '{"device_budget_mib": 10, "rules": [{"layers": "²", "place": "stream"}]}'),
        ("m6.training.seed", "1" + "0" * 4000),
    ],
)
def test_a_size_beyond_any_machine_names_its_key(key: str, value: object):
    with pytest.raises(UserError, match=key.split(".")[-1]) as raised:
        load_config(SMOKE, (f"{key}={value}",))
    assert len(str(raised.value)) < 500


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "override", ["model.image_size=1099511627776", f"model.codebook_dim={'9' * 400}", "model.codebook_size=10000000000"]
)
def test_sizes_of_an_image_tokenizer(override: str):
    with pytest.raises(UserError):
        load_settings(CONFIGS / "image_tokenizer" / "pictures_64.json", (override,))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("m6.moe.num_experts=100000", "m6.moe.num_prototypes=100000"), "m6.moe.num_experts"),
        (("m6.model.text_vocab_size=10000000", "m6.model.hidden_size=16416"), "m6.model.text_vocab_size"),
    ],
)
def test_a_run_that_the_machine_can_never_hold(overrides: tuple[str, ...], key: str, monkeypatch: pytest.MonkeyPatch):
    config = load_config(SMOKE, overrides)
    memory: Any = SimpleNamespace(total=24 << 30)
    monkeypatch.setattr("m6.planning.prediction.psutil.virtual_memory", lambda: memory)
    with pytest.raises(UserError, match=rf"^{key}: each of the 1 ranks of this machine would hold .* but there are 24"):
        check_memory(config, 1, 1)
    check_memory(load_config(SMOKE), 1, 1)


def test_the_ranks_of_a_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch):
    config = load_config(SMOKE, ("train_micro_batch_size_per_gpu=2",))
    memory: Any = SimpleNamespace(total=160 << 20)
    monkeypatch.setattr("m6.planning.prediction.psutil.virtual_memory", lambda: memory)
    check_memory(config, 8, 1)
    with pytest.raises(UserError, match="each of the 8 ranks"):
        check_memory(config, 8, 8)
