"""Every way to compute the experts' products, against float64, on generated sizes."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe import MoEConfig, MoELayer
from moe.kernels import compiled, products
from moe.kernels.compiled import CompiledProducts, load_kernel
from moe.kernels.products import GroupedProducts, LoopProducts, Products, choose_products
from tests.fixtures.moe_reference import reference_moe

# Chosen by hand: which way is faster is measured once, and on a busy machine either may win.
CHOSEN = {"M6_RECIPES_EXPERTS": "compiled"}
with mock.patch.dict(os.environ, CHOSEN):
    KERNEL = load_kernel.__wrapped__()

compiled_here = pytest.mark.skipif(KERNEL is None, reason="the kernel needs a processor with AVX-512 and a compiler")
WAYS: dict[str, Callable[[Tensor], Products]] = {
    "compiled": lambda counts: CompiledProducts(counts, KERNEL),
    "grouped": GroupedProducts,
    "loop": lambda counts: LoopProducts(counts, torch.float32),
    "filled loop": lambda counts: LoopProducts(counts, torch.float32, 16),
}
EACH_WAY = [pytest.param("compiled", marks=compiled_here), "grouped", "loop", "filled loop"]

# Below, at and above what the kernel cuts by: its tiles (14 x 32), stripes (112), depth (384) and pieces (512).
SIZES = [1, 3, 13, 14, 15, 16, 17, 31, 32, 33, 64, 111, 113, 380, 385, 520]


@st.composite
def shapes(draw):
    counts = draw(st.lists(st.sampled_from([0, 0, 1, 2, 5, 14, 32, 33, 113]), min_size=1, max_size=4))
    if draw(st.booleans()):
        counts[draw(st.integers(0, len(counts) - 1))] = draw(st.sampled_from([385, 530]))
    return torch.tensor(counts), draw(st.sampled_from(SIZES)), draw(st.sampled_from(SIZES))


def exact(counts: Tensor, rows: Tensor, weight: Tensor, wide: Tensor) -> dict[str, Tensor]:
    own, own_wide = rows.split(counts.tolist()), wide.split(counts.tolist())
    return {
        "forward": torch.cat([r @ w.T for r, w in zip(own, weight, strict=True)]),
        "input_grad": torch.cat([r @ w for r, w in zip(own_wide, weight, strict=True)]),
        "weight_grad": torch.stack([left.T @ right for left, right in zip(own_wide, own, strict=True)]),
        "bias_grad": torch.stack([each.sum(0) for each in own_wide]),
    }


@pytest.mark.parametrize("way", EACH_WAY)
@settings(max_examples=60)
@given(shape=shapes(), seed=st.integers(0, 10**6))
@example(shape=(torch.tensor([530]), 380, 520), seed=0)  # one more tile of columns would not fit the packed panel
def test_every_product_is_within_the_rounding_of_its_sum(way: str, shape, seed: int) -> None:
    """|error| <= n u sum |a||b| for n products, u = 2^-24: Higham, Accuracy and Stability, equation 3.5.

    Whatever the order of summation is. The grouped call takes widths that are multiples of 4 alone.
    """
    counts, narrow_size, wide_size = shape
    if way == "grouped":
        narrow_size, wide_size = 4 * narrow_size, 4 * wide_size
    torch.manual_seed(seed)
    num_rows = int(counts.sum())
    if num_rows == 0 and way == "grouped":
        return  # nothing to group: choose_products leaves it to the loop
    rows, wide = torch.randn(num_rows, narrow_size), torch.randn(num_rows, wide_size)
    weight = torch.randn(len(counts), wide_size, narrow_size)
    own = WAYS[way](counts)
    results = {
        "forward": own.forward(rows, weight),
        "input_grad": own.input_grad(wide, weight),
        "weight_grad": own.weight_grad(wide, rows),
        "bias_grad": own.bias_grad(wide),
    }
    expected = exact(counts, rows.double(), weight.double(), wide.double())
    bounds = exact(counts, rows.double().abs(), weight.double().abs(), wide.double().abs())
    lengths = {"forward": narrow_size, "input_grad": wide_size, "weight_grad": num_rows, "bias_grad": num_rows}
    for name, result in results.items():
        assert result.shape == expected[name].shape
        bound = 1.01 * (lengths[name] + 1) * 2**-24 * bounds[name]
        assert ((result.double() - expected[name]).abs() <= bound).all(), name


@pytest.mark.parametrize("way", EACH_WAY)
@pytest.mark.parametrize("activation", ["gelu", "relu", "swiglu"])
@settings(max_examples=15)
@given(
    prototypes=st.sampled_from([1, 2]),
    top_k=st.integers(1, 3),
    capacity_factor=st.sampled_from([None, 0.7]),
    bias=st.booleans(),
    recompute=st.booleans(),
    sizes=st.sampled_from([(16, 32), (36, 100), (64, 20)]),
    mask=st.lists(st.booleans(), min_size=1, max_size=40),
    seed=st.integers(0, 10**6),
)
def test_the_layer_equals_the_reference_in_float32(
    way, activation, prototypes, top_k, capacity_factor, bias, recompute, sizes, mask, seed
) -> None:
    """1e-4 of the largest value: roundings through a steep router; one row that is wrong or missing is 1e-2 or more.

    Without near ties, so that both choose the same experts.
    """
    config = MoEConfig(
        num_experts=6 if prototypes == 2 else 5,
        num_prototypes=prototypes,
        top_k=top_k,
        capacity_factor=capacity_factor,
        activation=activation,
        bias=bias,
        recompute_activation=recompute,
        aux_loss_weight=0.1,
    )
    torch.manual_seed(seed)
    layer = MoELayer(*sizes, config)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.3)
    x = torch.randn(len(mask), sizes[0], requires_grad=True)
    token_mask = torch.tensor(mask)
    exact_x = x.detach().double().requires_grad_()
    logits = (exact_x @ layer.router.weight.double().T).unflatten(1, (prototypes, -1))
    assume(logits.sort().values.diff().min() > 1e-4)
    exact_parameters = {name: each.detach().double().requires_grad_() for name, each in layer.named_parameters()}

    def gradients(output, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        loss = output.hidden_states.sin().sum() + output.aux_loss + sum(0 * each.sum() for each in inputs)
        return torch.autograd.grad(loss, inputs)

    with mock.patch("moe.kernels.experts_op.choose_products", lambda rows, counts, *_: force(way, rows, counts)):
        output = layer(x, token_mask)
        grads = gradients(output, [x, *layer.parameters()])
    expected = reference_moe(exact_x, token_mask, exact_parameters, config, training=True)
    expected_grads = gradients(expected, [exact_x, *exact_parameters.values()])
    assert output.stats.expert_counts.tolist() == [len(tokens) for tokens in expected.tokens_of_expert]
    for own, other in zip((output.hidden_states, *grads), (expected.hidden_states, *expected_grads), strict=True):
        torch.testing.assert_close(own.double(), other, rtol=0, atol=1e-4 * max(other.abs().max().item(), 1.0))


def force(way: str, rows: Tensor, counts: Tensor) -> Products:
    return WAYS["loop" if way == "grouped" and len(rows) == 0 else way](counts)


@compiled_here
def test_a_result_depends_on_neither_other_rows_nor_threads() -> None:
    """To the bit: every element is summed over the same blocks in the same order."""
    torch.manual_seed(0)
    counts = torch.tensor([70, 0, 517, 5])  # 512 and 5: two pieces of one product
    rows, weight = torch.randn(592, 463), torch.randn(4, 130, 463)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    output = WAYS["compiled"](counts).forward(rows, weight)
    for expert, begin, end in ((0, 0, 33), (0, 30, 70), (2, 401, 440), (2, 540, 587), (3, 588, 590), (3, 591, 592)):
        part = torch.zeros(4, dtype=torch.int64)
        part[expert] = end - begin  # 33 or more of many, or fewer of few
        alone = WAYS["compiled"](part).forward(rows[begin:end], weight)
        assert torch.equal(alone, output[begin:end])
    poisoned = rows.clone()
    poisoned[100] = float("nan")
    broken = WAYS["compiled"](counts).forward(poisoned, weight)
    assert broken[100].isnan().all()
    assert torch.equal(broken[torch.arange(592) != 100], output[torch.arange(592) != 100])
    grads = WAYS["compiled"](counts).weight_grad(output, rows)
    try:
        torch.set_num_threads(3)
        assert torch.equal(WAYS["compiled"](counts).forward(rows, weight), output)
        assert torch.equal(WAYS["compiled"](counts).weight_grad(output, rows), grads)
    finally:
        torch.set_num_threads(threads)


@compiled_here
def test_strided_operands_and_wrong_shapes() -> None:
    torch.manual_seed(0)
    own = WAYS["compiled"](torch.tensor([3, 40, 0]))
    rows, weight = torch.randn(20, 43).mT, torch.randn(3, 20, 50).mT
    torch.testing.assert_close(own.forward(rows, weight), own.forward(rows.contiguous(), weight.contiguous()))
    wide = torch.randn(43, 100)[:, ::2]
    torch.testing.assert_close(own.input_grad(wide, weight), own.input_grad(wide.contiguous(), weight.contiguous()))
    torch.testing.assert_close(own.weight_grad(wide, rows), own.weight_grad(wide.contiguous(), rows.contiguous()))
    assert torch.equal(own.forward(torch.empty(43, 0), torch.empty(3, 50, 0)), torch.zeros(43, 50))
    with pytest.raises(ValueError, match=r"rows \(43, 50\) do not fit matrices \(3, 20, 50\)"):
        own.forward(wide, weight)
    with pytest.raises(ValueError, match="42 and 3 rows, but the experts count 43"):
        own.forward(rows[1:], weight)
    with pytest.raises(ValueError, match="43 and 42 rows, but the experts count 43"):
        own.weight_grad(wide, rows[1:])
    with pytest.raises(ValueError, match=r"expected float32 on a CPU, got torch.float64"):
        own.forward(rows, weight.double())


@compiled_here
def test_the_kernel_shares_pytorchs_threads() -> None:
    """Two OpenMP libraries in a process would each start as many threads as there are cores."""
    code = """
import pathlib, torch
from moe.kernels.compiled import CompiledProducts, load_kernel
torch.set_num_threads(2)
CompiledProducts(torch.tensor([99]), load_kernel()).forward(torch.randn(99, 600), torch.randn(1, 1200, 600))
maps = pathlib.Path("/proc/self/maps").read_text().split()
print(len({name for name in maps if "omp" in name.rsplit("/", 1)[-1] and ".so" in name}))
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, env={**os.environ, **CHOSEN}
    )
    assert ended.stdout.strip() == "1", ended.stdout + ended.stderr


def test_without_a_compiler_there_is_a_warning_and_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    with pytest.warns(UserWarning, match=r"/nowhere/c\+\+"):
        assert load_kernel.__wrapped__() is None


def test_products_are_chosen_by_type_and_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(dtype: torch.dtype, size: int, num_rows: int) -> Products:
        rows, weight = torch.zeros(num_rows, size, dtype=dtype), torch.zeros(6, 16, size, dtype=dtype)
        return choose_products(rows, torch.tensor([num_rows, 0, 0, 0, 0, 0]), weight)

    kernel = mock.Mock()
    for emulated, there in [(False, True), (False, False), (True, True), (True, False)]:
        monkeypatch.setattr(
            products, "_is_emulated", lambda rows, emulated=emulated: emulated and rows.dtype == torch.bfloat16
        )
        monkeypatch.setattr(products, "load_kernel", lambda there=there: kernel if there else None)
        for dtype, size, num_rows, expected in [
            (torch.float32, 8, 13, CompiledProducts if there else GroupedProducts),
            (torch.float32, 6, 13, CompiledProducts if there else LoopProducts),  # 24 bytes are no multiple of 16
            (torch.float32, 8, 0, CompiledProducts if there else LoopProducts),
            (torch.float64, 8, 13, LoopProducts),
            (torch.bfloat16, 8, 13, LoopProducts),
        ]:
            way = choose(dtype, size, num_rows)
            assert isinstance(way, expected), (dtype, size, num_rows)
            if isinstance(way, LoopProducts):
                assert way.compute_dtype == (torch.float32 if emulated and dtype == torch.bfloat16 else dtype)
                assert way.multiple == (1 if emulated or dtype != torch.bfloat16 else products.CPU_ROWS)


def test_filled_rows_give_processors_few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number of rows from 1 to 200 reaches the product as one of four, so that its kernel is compiled once."""
    seen = set()
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, **out: (seen.add((*a.shape, *b.shape)), mm(a, b, **out))[1])
    for count in range(1, 201):
        own = LoopProducts(torch.tensor([count]), torch.float32, 64)
        rows, wide, weight = torch.ones(count, 2), torch.ones(count, 3), torch.ones(1, 3, 2)
        assert own.forward(rows, weight).shape == (count, 3)
        assert own.input_grad(wide, weight).shape == (count, 2)
        assert torch.equal(own.weight_grad(wide, rows), torch.full((1, 3, 2), float(count)))
    assert seen == {s for n in (64, 128, 192, 256) for s in [(n, 2, 2, 3), (n, 3, 3, 2), (3, n, n, 2)]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", ["grouped", "loop", "loop in float32"])
def test_gradients_of_16_bit_biases_round_once(way: str, dtype: torch.dtype) -> None:
    """Half a spacing of the type, and sums of 4,096 numbers near 1 in float32, where 16 bits stop at 256 or 2,048."""
    torch.manual_seed(0)
    rows, counts = torch.rand(4096, 16).add(0.5).to(dtype), torch.tensor([4096])
    own = (
        GroupedProducts(counts) if way == "grouped" else LoopProducts(counts, dtype if way == "loop" else torch.float32)
    )
    grad = own.bias_grad(rows)
    assert grad.dtype == dtype
    torch.testing.assert_close(grad[0].double(), rows.double().sum(0), rtol=0.51 * torch.finfo(dtype).eps, atol=0)


@compiled_here
def test_the_faster_kernel_is_measured_once_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    load = compiled.load_kernel.__wrapped__
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiled, "_faster", lambda kernel: "pytorch")
    assert load() is None
    # Whatever another measurement would say: a run that goes on computes with the same products.
    monkeypatch.setattr(compiled, "_faster", lambda kernel: "compiled")
    assert load() is None
    # Another number of threads is another question.
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1000)
    assert load() is not None
    monkeypatch.undo()
    monkeypatch.setenv("M6_RECIPES_EXPERTS", "pytorch")
    assert load() is None
    monkeypatch.setenv("M6_RECIPES_EXPERTS", "mkl")
    with pytest.warns(UserWarning, match="M6_RECIPES_EXPERTS=mkl is ignored: expected compiled or pytorch"):
        load()


@compiled_here
def test_the_measured_products_are_those_of_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is slower is not chosen; the clock is a count of the calls of one of them."""
    kernel, clock = KERNEL, [0.0]
    monkeypatch.setattr(compiled.time, "perf_counter", lambda: clock[0])
    for slow, chosen in (("compiled", "pytorch"), ("grouped", "compiled")):
        plain = getattr(compiled._Case, slow)

        def counted(self: Any, *args: Any, plain: Any = plain) -> None:
            plain(self, *args)
            clock[0] += 1.0

        with monkeypatch.context() as patched:
            patched.setattr(compiled._Case, slow, counted)
            assert compiled._faster(kernel) == chosen


class RowsOnGpu:
    """What the choice of products asks of rows on a GPU."""

    device, dtype = torch.device("cuda"), torch.bfloat16

    def __len__(self) -> int:
        return 8

    def element_size(self) -> int:
        return 2


@pytest.mark.parametrize(("experts", "kind"), [(1023, GroupedProducts), (1024, LoopProducts), (2048, LoopProducts)])
def test_a_grouped_product_on_a_gpu_has_fewer_than_1024_experts(experts: int, kind: type) -> None:
    rows, weight = RowsOnGpu(), torch.empty(1, 16, 16, dtype=torch.bfloat16).expand(experts, 16, 16)
    assert type(choose_products(rows, torch.zeros(experts, dtype=torch.int64), weight)) is kind
