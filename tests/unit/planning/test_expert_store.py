"""The host memory of streamed experts against the bytes that the store takes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from m6.config.offload import OffloadSettings
from m6.config.run import load_config, parse_config
from m6.planning.cost.compute_time import HostTime, StepTime
from m6.planning.cost.expert_store import ExpertStore, stored_numel, uses_of_experts
from m6.planning.cost.folding import fold
from m6.planning.cost.layout import ParallelLayout
from m6.planning.cost.memory import MemoryFootprint, MemoryModel
from m6.planning.cost.step_time import TimeModel
from m6.planning.machine.cluster import load_cluster
from m6.planning.machine.profile import Profile
from m6.planning.search.neighbours import with_offload
from m6.planning.search.stages import pseudo_sharing
from offload import OffloadRuntime, OptimizerSettings, SimulatedDevice, Stack, remainder_dtype
from offload.optimizer import update as update_module
from offload.runtime.updates import GradientSums
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
    store = ExpertStore.of(config, config.accumulation_steps(1), shared=False)
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
        assert store.chunks(model, 1).on_host(0) == runtime.host_bytes
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
        load_config(CONFIGS / "papers" / "m6_10t.json"),
        OffloadSettings(optimizer={"type": "Adafactor", "lr": 0.005}, **settings),
    )
    memory = MemoryModel(config, Profile())
    layout = ParallelLayout(512, 512, micro_batch_size=8, checkpointing=True, stream_experts=True)
    assert memory(layout).host == pytest.approx(expected * memory.stored_experts(layout), rel=0.01)


def test_the_device_owns_as_many_chunks_as_fit():
    """What it owns is not on the host, and the step waits for the host the less the more it owns."""
    config, cluster = load_config(CONFIGS / "papers" / "m6t_1t.json"), load_cluster(Path("v100_32g_x480"))
    layout = ParallelLayout(480, 480, zero_stage=1, micro_batch_size=4, stream_experts=True, ranks_per_node=8)

    def priced(device_bytes: int | None) -> tuple[MemoryFootprint, StepTime]:
        memory = MemoryModel(config, Profile(), device_bytes=device_bytes)
        return memory(layout), TimeModel(config, cluster, Profile(), memory)(layout)

    streamed, slowest = priced(None)
    expert = 2 * 1024 * 21248  # a chunk: 10 bytes each for weight, master and sum of gradients
    assert streamed.owned_experts == 0 < slowest.host
    some, faster = priced(streamed.peak + 10**10)
    assert 10**10 - 10.1 * expert < some.owned_experts <= 10**10
    assert some.peak == streamed.peak + some.owned_experts
    assert some.host + some.owned_experts == streamed.host
    assert faster.host < slowest.host
    whole, fastest = priced(streamed.peak + 10**11)
    assert (whole.host, whole.store, fastest.host) == (0, 0, 0.0)
    staging = 2 * 2 * expert
    assert whole.owned_experts == pytest.approx(streamed.host - staging, rel=1e-3)
    # Without the window for what comes and goes: two layers' weights and one layer's gradients.
    assert streamed.peak - (whole.peak - whole.owned_experts) == pytest.approx(3 * 2 * 2 * expert, rel=1e-3)
    assert fastest.update > faster.update > slowest.update, "what the device owns it updates itself"


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("total", [torch.float16, torch.float32])
def test_bytes_of_adding_up_gradients(total: torch.dtype, number: int, on_device: bool):
    """Counted copy by copy: a gradient arrives in host memory, is read, and is written or added to what is there."""
    store = ExpertStore(torch.float16, total, OptimizerSettings("adafactor"), 2**20, 1)
    moved = 0
    for place in range(number):
        if not on_device:
            moved += 2  # it arrives
        if place == 0 and total == torch.float16 and not on_device:
            continue  # where it stays
        moved += 2 + total.itemsize  # read, written
        if place > 0:
            moved += total.itemsize  # the sum so far, read
    moved += total.itemsize  # the norm
    # A device computes the norm in double: the gradient is widened, squared and summed.
    assert store.gradient_bytes(number, on_device) == moved + (8 + 8 + 8 + 8 if on_device else 0)


class _Moved(TorchDispatchMode):
    """Counts the bytes that operators read and write."""

    num_bytes = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        if not operator.is_view:
            values = pytree.tree_leaves((args, kwargs, result))
            self.num_bytes += sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
        return result


@pytest.mark.parametrize("gradient", [torch.float32, torch.float16])
@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["adamw", "adafactor", "sgd", "muon"])
def test_bytes_of_an_update_on_the_device(
    kind: Any, dtype: torch.dtype, masters: bool, gradient: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """A device has PyTorch's operators, not the kernel of the host. One figure stands for both types of gradients."""
    monkeypatch.setattr(update_module, "load_kernel", lambda: None)
    optimizer = OptimizerSettings(kind, masters=masters, momentum=0.9)
    shape = (1, 64, 256)
    remainder = remainder_dtype(dtype, masters)
    rest = None if remainder is None else torch.zeros(shape, dtype=remainder)
    states = {name: torch.zeros(size) for name, size in optimizer.states(shape).items()}
    weights, gradients = torch.ones(shape, dtype=dtype), torch.ones(shape, dtype=gradient)
    with _Moved() as moved:
        update_module.update(optimizer, 1, 1e-3, 1.0, weights, rest, gradients, states)
    store = ExpertStore(dtype, gradient, optimizer, 2**20, 1)
    assert store.device_update_bytes == pytest.approx(moved.num_bytes / (64 * 256), rel=0.2)


@pytest.mark.parametrize("at_once", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_bytes_of_sums_of_gradients_that_wait_on_the_device(dtype: torch.dtype, at_once: int):
    sums, store = GradientSums(at_once), ExpertStore(dtype, dtype, OptimizerSettings("sgd"), 2**20, 1)
    waiting = 0
    with _Moved() as moved:
        for _ in range(at_once):
            total = sums.add(0, [torch.ones(1000, dtype=dtype)])
            waiting = max(waiting, sum(part.nbytes for _, parts in sums._begun.values() for part in parts))
    assert total is not None
    made = at_once * dtype.itemsize * 1000
    assert moved.num_bytes - made == 1000 * store.summing_bytes(at_once)
    assert waiting == 1000 * store.sum_bytes(at_once)


def test_the_host_has_no_more_than_its_memory():
    """Eight ranks share the memory of a node: many gradients wait for it, not for the links."""
    host = HostTime(load_cluster(Path("v100_32g_x480")).nodes[0], Profile())
    store = ExpertStore(torch.float16, torch.float32, OptimizerSettings("adafactor"), 2**20, 100)
    numel, micro_batches = 10**9, 8
    found = host.streaming(numel, store, micro_batches, 8, 1, 1e9, 0.0)  # nothing hides the backward passes
    rate = 256e9 * Profile().bandwidth_efficiency / 8
    assert found.exposed == pytest.approx((2 * 8 + store.gradient_bytes(8, on_device=False)) * numel / rate)
    pseudo = host.streaming(numel, store, micro_batches, 24, 3, 1e9, 0.0)  # three layers share the experts
    assert pseudo.exposed == pytest.approx((3 * 2 * 8 + store.gradient_bytes(24, on_device=False)) * numel / rate)


def test_layers_that_share_experts_reduce_a_gradient_each():
    config, cluster = load_config(CONFIGS / "papers" / "m6_10t.json"), load_cluster(Path("v100_32g_x512"))
    layout = ParallelLayout(512, 128, zero_stage=1, micro_batch_size=8, checkpointing=True, stream_experts=True)
    memory = MemoryModel(config, Profile(), sharing=pseudo_sharing(config))
    time = TimeModel(config, cluster, Profile(), memory)
    assert time.store.num_gradients(layout, 3) == 3 * 48
    experts = stored_numel(memory.model, 128)
    assert experts == pytest.approx(80 * 2 * 1024 * 9984, rel=1e-3)
    assert time.store.reduced_bytes(layout, 0) == 2 * experts
    # Four ranks have the same experts: each sends and receives 1.5 times them, over a network that 8 ranks share.
    assert time(layout).reduction > 48 * 1.5 * 2 * experts / (6.25e9 / 8)


def test_gradients_add_up_in_fp32_where_an_expert_has_several():
    config = load_config(CONFIGS / "papers" / "m6_10t.json")
    assert uses_of_experts(fold(config.model, pseudo_sharing(config))) == 48
    assert uses_of_experts(fold(config.model)) == 1
    widths = [
        ExpertStore.of(config, accumulation, shared).gradient_dtype.itemsize  # type: ignore[union-attr]
        for accumulation, shared in ((1, False), (2, False), (1, True))
    ]
    assert widths == [2, 4, 4]
