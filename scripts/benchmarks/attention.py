"""How long attention takes on a CPU: PyTorch's fused one against two products and a softmax; README.md."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from record import Recorder, spread
from torch import Tensor
from torch.nn import functional as F

from m6.model.attention import attend_by_products

BATCH, HEADS, WIDTH = 16, 4, 32


def main(
    length: Annotated[list[int], typer.Option(help="tokens of a row; may be given often")] = [71, 140, 280, 512, 1024],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="measurements of each contestant, in turn")] = 7,
) -> None:
    """Forward and backward pass, in turn, with a mask, at every length in fp32 and bf16."""
    recorder = Recorder("attention_cpu", "Attention on a CPU: fused, and as products")
    torch.set_num_threads(1)
    contestants: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
        "fused": lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        "products": lambda q, k, v, mask: attend_by_products(q, k, v, mask, 0.0),
    }
    rows, numbers = [], {}
    for tokens in length:
        for dtype in (torch.float32, torch.bfloat16):
            times: dict[str, list[float]] = {name: [] for name in contestants}
            for attend in contestants.values():
                measure(attend, tokens, dtype)  # does not count
            for _ in range(rounds):
                for name, attend in contestants.items():
                    times[name].append(measure(attend, tokens, dtype))
            ratios = [fused / products for fused, products in zip(times["fused"], times["products"], strict=True)]
            kind = str(dtype).removeprefix("torch.")
            rows.append(
                [str(tokens), kind, *(f"{1e3 * statistics.median(t):.1f}" for t in times.values()), spread(ratios)]
            )
            numbers[f"{tokens} {kind}"] = times
    header = ["tokens", "type", "fused, ms", "products, ms", "products are faster by"]
    notes = f"""\
CPU time on one thread of a forward and a backward pass of {BATCH} rows with {HEADS} heads of {WIDTH}, half of whose
pairs are masked; medians, and for the ratio the 10th and 90th percentile, over {rounds} interleaved rounds.
"""
    recorder.write(header, rows, notes, {"cpu_s": numbers})


def measure(attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], tokens: int, dtype: torch.dtype) -> float:
    """This process's CPU time for a forward and a backward pass."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = torch.randn(4, BATCH, HEADS, tokens, WIDTH, generator=generator).to(dtype).unbind()
    mask = torch.rand(BATCH, 1, tokens, tokens, generator=generator) < 0.5
    mask |= torch.eye(tokens, dtype=torch.bool)
    for tensor in (query, key, value):
        tensor.requires_grad_()
    begin = time.process_time()
    attend(query, key, value, mask).backward(grad)
    return time.process_time() - begin


if __name__ == "__main__":
    typer.run(main)
