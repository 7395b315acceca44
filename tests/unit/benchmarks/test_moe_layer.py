"""The benchmark of expert layers: its sizes, the contestants that are our own layer, and what it says of targets."""

from typing import Any

import pytest
import torch

from moe import MoELayer
from moe.kernels import experts_op
from moe.kernels.products import GroupedProducts, LoopProducts
from scripts.benchmarks.moe_contestants import (
    BFLOAT16,
    FORCED,
    GRIDS,
    Cell,
    ForcedStep,
    Step,
    chosen_products,
    held_bytes,
    k_times_top_1,
    ours,
    round_seconds,
)
from scripts.benchmarks.moe_targets import Result, bfloat16_notes, speed_notes

TINY = Cell(32, 16, 8, num_prototypes=2)


def test_sizes_are_whole_and_affordable() -> None:
    for cells in (*GRIDS.values(), BFLOAT16):
        assert len(set(cells)) == len(cells)
        assert all(cell.num_experts % cell.num_prototypes == 0 for cell in cells)
        assert max(map(held_bytes, cells)) < 20e9
        assert round_seconds(cells) < 8 * 60


def test_round_seconds_by_hand() -> None:
    # 11 contestants with 2 matrices and 5 with 3; each is multiplied forward and for two gradients; 64 rows.
    assert round_seconds([TINY], flops_per_s=1.0) == (11 * 2 + 5 * 3) * 3 * (2 * 64 * 16 * 64)


@pytest.mark.parametrize(("name", "expected"), [("ours, grouped_mm", GroupedProducts), ("ours, loop", LoopProducts)])
def test_forced_products_are_used_in_both_passes(name: str, expected: type, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[type, str]] = []
    for kind in (GroupedProducts, LoopProducts):
        for product in ("forward", "weight_grad"):
            plain = getattr(kind, product)

            def spy(self: Any, *args: Any, product: str = product, plain: Any = plain) -> Any:
                used.append((type(self), product))
                return plain(self, *args)

            monkeypatch.setattr(kind, product, spy)
    chosen = experts_op.choose_products
    step = Step(*ours(TINY), TINY.num_tokens, TINY.hidden_size, torch.float32)
    step()
    weight = step.module.get_parameter("experts.w_in")
    free = weight.grad
    step.free_gradients()
    used.clear()

    ForcedStep(step, FORCED[name])()

    assert set(used) == {(expected, "forward"), (expected, "weight_grad")}
    assert experts_op.choose_products is chosen
    torch.testing.assert_close(weight.grad, free, rtol=1e-4, atol=1e-5)  # float32, sums in another order


def test_chosen_products_is_what_the_layer_takes() -> None:
    layer, _ = ours(TINY)
    assert isinstance(layer, MoELayer)
    assert chosen_products(TINY, layer.double()) == "loop"  # the only ones with float64


def test_k_times_top_1_does_what_prototypes_do() -> None:
    torch.manual_seed(0)
    layers, run = k_times_top_1(TINY)
    layer, run_prototypes = ours(TINY)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parts = [part.get_parameter(name).detach() for part in layers.children()]
            parameter.copy_(torch.cat(parts, dim=0))
    x = torch.randn(TINY.num_tokens, TINY.hidden_size)
    torch.testing.assert_close(run(x), run_prototypes(x))


def result(cell: Cell, **seconds: float) -> Result:
    """Everyone takes 1 s but those who are named, with _ for what is between words."""
    names = ["floor", "dense", "ours", "ours, recompute", *FORCED, "deepspeed drop", "deepspeed no drop", "dense gated"]
    names += ["ours gated", "mixtral grouped_mm", "switch"]
    if cell.num_prototypes > 1:
        names += ["ours, top-k", "ours, k x top-1"]
    times = {name: [seconds.get(name.replace(", ", "_").replace(" ", "_"), 1.0)] * 2 for name in names}
    return Result(cell, "compiled", times, {"dense": 900, "ours": 1000, "ours, recompute": 560})


def test_the_notes_tell_who_is_faster() -> None:
    single, prototypes = Cell(2048, 256, 8), Cell(2048, 256, 64, num_prototypes=2)
    results = [
        result(single, ours=2.0, switch=1.5, deepspeed_drop=3.0, deepspeed_no_drop=4.0, ours_loop=2.5),
        result(prototypes, ours_grouped_mm=0.8, mixtral_grouped_mm=0.5),
    ]

    notes = speed_notes(results, 15, 2, "float32", 1)

    rows = [line.strip("| ").split(" | ") for line in notes.splitlines() if line.startswith("|")]
    reached = {target: own for target, own, *_ in rows}
    assert notes.startswith("2 of 15 sizes")
    assert reached["at least 0.95 of dense from 256 rows per expert"] == "0.500 (0.500 to 0.500), least 0.500"
    assert reached["at least 1.35 x the better DeepSpeed mode in the median"].endswith("least 1.000")
    slower = reached["never slower than a peer"]
    assert slower == f"switch at {single} (0.75); mixtral grouped_mm at {prototypes} (0.50)"
    fastest = next(line for target, line in reached.items() if target.startswith("the chosen products are the fastest"))
    assert fastest.endswith("least 0.500")
    assert reached["k top-1 not slower than k x top-1"] == "1.000 (1.000 to 1.000), least 1.000"
    assert "0.622 (0.622 to 0.622), most 0.622" in notes


def test_the_notes_of_one_size_do_not_need_the_others() -> None:
    notes = speed_notes([result(Cell(2048, 256, 64))], 15, 1, "float32", 2)
    assert "| k top-1 not slower than k x top-1 | not measured |" in notes
    assert "| never slower than a peer | never |" in notes
    assert "Faster than our layer in bfloat16:\nnone." in bfloat16_notes([result(Cell(512, 256, 8))], 3, 1)
