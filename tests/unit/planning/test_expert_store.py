"""The host memory of streamed experts against the bytes that the store takes."""

from pathlib import Path
from typing import Any

import pytest

from m6.config.offload import OffloadSettings
from m6.config.run import load_config, parse_config
from m6.planning.cost.expert_store import ExpertStore, shares_experts
from m6.planning.cost.folding import fold
from m6.planning.cost.layout import ParallelLayout
from m6.planning.cost.memory import MemoryModel
from m6.planning.machine.profile import Profile
from m6.planning.search.requirements import with_offload
from m6.planning.search.stages import pseudo_sharing
from offload import OffloadRuntime, SimulatedDevice, Stack
from tests.fixtures.tiny_run import tiny_document

BF16 = {"bf16": {"enabled": True}, "zero_optimization__stage": 1}
ADAFACTOR = {"optimizer": {"type": "Adafactor", "params": {"lr": 1e-3}}}
ONE_MICRO_BATCH = {"gradient_clipping": 0.0, "train_batch_size": 2}
LATE = {"m6__gradient_delay": {"accept_loss": True}}
CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize(
    ("changes", "offload"),
    [
        ({}, {}),
        (BF16, {}),
        (ADAFACTOR, {}),
        ({}, {"optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9}}),
        (BF16, {"master_weights": False}),
        ({**BF16, **ONE_MICRO_BATCH}, {"update": "backward"}),
        ({}, {"chunk_mib": 0.01}),
        ({**BF16, "train_batch_size": 2, **LATE}, {}),  # new weights take the place of gradients
        ({**BF16, **LATE}, {}),  # and a place of their own
    ],
    ids=str,
)
def test_host_bytes_are_those_of_the_store(tmp_path: Path, changes: dict[str, Any], offload: dict[str, Any]):
    config = parse_config(tiny_document(tmp_path, m6__offload={"device_budget_mib": 64.0, **offload}, **changes))
    model = fold(config.model)
    store = ExpertStore.of(config, config.deepspeed.accumulation_steps(1), shares_experts(model))
    [block] = [block for block, _, _ in model.blocks if block.experts]
    shapes = [block.shapes[index] for index in sorted(block.experts)]
    matrices = {str(index): shape[1:] for index, shape in enumerate(shapes)}
    layers = [layer for layer in range(config.model.num_layers) if config.model.is_moe_layer(layer)]
    runtime = OffloadRuntime(
        [Stack(f"layer_{layer}", shapes[0][0], matrices) for layer in layers],
        SimulatedDevice(2**26),
        store.optimizer,
        dtype=store.dtype,
        chunk_bytes=store.chunk_bytes,
        gradient_dtype=store.gradient_dtype,
        update_in_backward=store.gradient_dtype is None,
        next_weights=store.next_weights,
    )
    try:
        assert store.host_bytes(model, 1) == runtime.host_bytes
    finally:
        runtime.close()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"master_weights": True}, 8),
        ({"master_weights": False}, 4),
        ({"master_weights": False, "update": "backward"}, 2),
    ],
)
def test_bytes_of_a_parameter_of_m6_10t(settings: dict[str, Any], expected: int):
    """Adafactor, one micro-batch a step, in 16 bits. Means of rows and columns, alignment and staging come on top."""
    config = with_offload(
        load_config(CONFIGS / "m6_10t.json"), OffloadSettings(optimizer={"type": "Adafactor", "lr": 0.005}, **settings)
    )
    memory = MemoryModel(config, Profile())
    layout = ParallelLayout(512, 512, micro_batch_size=8, checkpointing=True, stream_experts=True)
    assert memory(layout).host == pytest.approx(expected * memory.streamed_experts(layout), rel=0.01)


def test_gradients_add_up_in_fp32_where_an_expert_has_several():
    config = load_config(CONFIGS / "m6_10t.json")
    assert shares_experts(fold(config.model, pseudo_sharing(config)))
    assert not shares_experts(fold(config.model))
    widths = [
        ExpertStore.of(config, accumulation, shared).gradient_dtype.itemsize  # type: ignore[union-attr]
        for accumulation, shared in ((1, False), (2, False), (1, True))
    ]
    assert widths == [2, 4, 4]
